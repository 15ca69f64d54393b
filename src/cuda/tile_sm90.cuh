/* Operations on tiles for the Hopper kernels: loading one with the copy engine, multiplying two, and the maps that tell
 * the engine where a tensor lies. */
#ifndef HEED_CUDA_TILE_SM90_CUH
#define HEED_CUDA_TILE_SM90_CUH

#include "launch.cuh"
#include "sm90.cuh"

/* ---- Host: maps -------------------------------------------------------------------------------------------------- */

/* Describes a tensor [batches][heads][rows][columns] to the copy engine, for boxes of box_rows rows and 64 or 128 bytes of
 * each. The planner keeps away what it cannot express: HEED_USES_UNALIGNED, HEED_USES_REVERSED, HEED_USES_STRAY. */
struct tensor_map {
    CUtensorMap map;
    int batch_on, head_on; /* factors for the coordinates: 0 where the tensor repeats itself along them */
};

heed_status heed_tensor_map(tensor_map *m, const view &t, int64_t columns, int64_t rows, int64_t heads, int64_t batches,
                            int box_rows, int box_columns = 64);

/* Bias and mask in pieces of 64 keys, of fp32 32, and of 64 rows, or one that all rows share. */
struct term_maps {
    tensor_map bias, mask;
    int bias_pieces, mask_pieces; /* of 64 keys: 0 where there is none */
    int bias_rows, mask_rows;     /* of a piece */
};

heed_status heed_map_terms(term_maps *m, const args &a);

/* ---- Device: tiles ----------------------------------------------------------------------------------------------- */

/* Bytes of a tile: whole boxes of 64 columns. */
template <int D, int ROWS> constexpr int tile_bytes = (D + 63) / 64 * ROWS * 128;

/* One thread asks for all boxes of a tile; they complete on the barrier, which expects tile_bytes<D, ROWS>. */
template <int D, int ROWS>
__device__ inline void load_tile(uint32_t to, const tensor_map &m, int row, int head, int batch, uint32_t barrier)
{
#pragma unroll
    for (int box = 0; box < (D + 63) / 64; box++)
        load_box(to + box * ROWS * 128, m.map, box * 64, row, head * m.head_on, batch * m.batch_on, barrier);
}

/* S = A B^T over D columns: 64 rows of A, out of a tile of A_ROWS, and the first N rows of B's tile of B_ROWS. */
template <class T, int D, int A_ROWS, int B_ROWS, int N = B_ROWS>
__device__ inline void multiply_rows(float (&S)[N / 2], uint64_t A, uint64_t B)
{
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        wgmma<T, N>::template shared<0, 0>(S, on(A, k / 4 * A_ROWS * 128 + k % 4 * 32),
                                           on(B, k / 4 * B_ROWS * 128 + k % 4 * 32), k != 0);
}

/* O += P V, or O = P V with keep = 0: P [64][K] packed in registers, V a tile of K rows (named with its box bytes) and
 * N columns. */
template <class T, int N, int K>
__device__ inline void multiply_columns(float (&O)[N / 2], const uint32_t (&P)[K / 16][4], uint64_t V, int keep = 1)
{
#pragma unroll
    for (int k = 0; k < K / 16; k++)
        wgmma<T, N>::template registers<1>(O, P[k], on(V, k * 2048), k == 0 ? keep : 1);
}

/* A result as the A operand of the next product; zeros where it has fewer columns. */
template <class T, int K, int N> __device__ inline void pack_rows(uint32_t (&P)[K / 16][4], const float (&S)[N])
{
#pragma unroll
    for (int i = 0; i < K / 4; i++)
        P[i / 4][i % 4] = 2 * i < N ? pack<T>(S[2 * i % N], S[(2 * i + 1) % N]) : 0;
}

#endif
