/* The vocabulary of the tensor-core kernels: tiles of 16-bit rows in shared memory, and their products.
 *
 * A row of D elements is D/8 chunks of 16 bytes; chunk c of row r lies at place c ^ (r % 8), so that the eight rows of
 * an 8 x 8 matrix lie in different banks. D is 64, 128 or 256; heads in between are padded with zeros. */
#ifndef HEED_CUDA_TILE_MMA_CUH
#define HEED_CUDA_TILE_MMA_CUH

#include "scores.cuh"
#include "sm75.cuh"

template <int D> __device__ inline uint32_t chunk_at(uint32_t tile, int row, int chunk)
{
    return tile + row * D * 2 + ((chunk ^ (row & 7)) << 4);
}

/* The address of chunk c of a row, c even or one more, from that of its chunk 0 or 1: one exclusive or with a constant,
 * as tiles start at multiples of 1 KB. 8 rows down is 8 rows' bytes further. */
template <int D> __device__ inline uint32_t along(uint32_t address, int c)
{
    return (address ^ ((c & 6) << 4)) + ((c & ~7) << 4);
}

/* ---- Memory to shared memory ------------------------------------------------------------------------------------- */

/* Copies COUNT rows that lie `step` bytes apart, those from `rows` on as zeros; each is `width` elements wide. */
template <int D, int COUNT, int THREADS>
__device__ inline void copy_rows(uint32_t tile, const char *first, int64_t step, int rows, int width)
{
    constexpr int CHUNKS = D / 8, ROWS_AT_ONCE = THREADS / CHUNKS;
    static_assert(ROWS_AT_ONCE % 4 == 0, "so that r, below, changes one bit of a chunk's place, or none");
    const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
    const int bytes = max(0, min(16, (width - chunk * 8) * 2));
    const char *from = first + row * step + chunk * 16;
    const uint32_t to = chunk_at<D>(tile, row, chunk);
    step *= ROWS_AT_ONCE;
#pragma unroll
    for (int r = 0; r < COUNT; r += ROWS_AT_ONCE, from += step)
        if (ROWS_AT_ONCE <= COUNT || row < COUNT)
            copy_async((to ^ (r & 4) << 4) + r * D * 2, from, r + row < rows ? bytes : 0);
}

/* The same for rows that lie anywhere: row r at from(r), which is NULL for zeros. */
template <int D, int COUNT, int THREADS, class From>
__device__ inline void copy_scattered_rows(uint32_t tile, int width, const void *somewhere, From from)
{
    constexpr int CHUNKS = D / 8, ROWS_AT_ONCE = THREADS / CHUNKS;
    const int chunk = threadIdx.x % CHUNKS;
    const int bytes = max(0, min(16, (width - chunk * 8) * 2));
#pragma unroll 1
    for (int r = threadIdx.x / CHUNKS; r < COUNT; r += ROWS_AT_ONCE) {
        const char *row = (const char *)from(r);
        copy_async(chunk_at<D>(tile, r, chunk), row ? row + chunk * 16 : (const char *)somewhere, row ? bytes : 0);
    }
}

/* The keys of one head in one tensor, in the order that the sequence sees them. */
struct key_rows {
    const char *first;
    int64_t step; /* bytes from key to key */
};

__device__ inline key_rows keys_of(const args &a, const span &s, const view &t, int hk)
{
    key_rows k;
    k.first = t.data + (a.page ? 0 : row_at(t, s.k_batch, hk, s.k_row + a.col) * 2);
    k.step = a.col_step * t.stride[2] * 2;
    return k;
}

template <int D, int COUNT, int THREADS>
__device__ inline void copy_keys(uint32_t tile, const args &a, const span &s, const view &t, const key_rows &k, int hk,
                                 int n0, int keys, int width)
{
    if (!a.page)
        copy_rows<D, COUNT, THREADS>(tile, k.first + n0 * k.step, k.step, keys - n0, width);
    else
        copy_scattered_rows<D, COUNT, THREADS>(tile, width, t.data, [&](int r) {
            int64_t at = n0 + r < keys ? key_at(a, s, t, hk, n0 + r) : NOWHERE;
            return at == NOWHERE ? (const char *)NULL : t.data + at * 2;
        });
}

/* ---- Products ---------------------------------------------------------------------------------------------------- */

template <int MT, int NT> __device__ inline void clear(float (&x)[MT][NT][4])
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[m][n][e] = 0.0f;
}

/* X += A B^T: rows `a_row` .. + 16 MT of tile A times rows b_row .. + 8 NT of tile B. */
template <class T, int D, int MT, int NT>
__device__ inline void multiply_rows(float (&X)[MT][NT][4], uint32_t A, int a_row, uint32_t B, int b_row)
{
    const int lane = threadIdx.x % 32;
    const uint32_t a_first = chunk_at<D>(A, a_row + lane % 16, lane / 16);
    const uint32_t b_first = chunk_at<D>(B, b_row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
            load_matrices(a[m], along<D>(a_first, k * 2) + m * 16 * D * 2);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t b[4];
            load_matrices(b, along<D>(b_first, k * 2) + n * 8 * D * 2);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                multiply(X[m][n], a[m], b[0], b[1], T());
                multiply(X[m][n + 1], a[m], b[2], b[3], T());
            }
        }
    }
}

/* A tile of results becomes the left operand of the next product, 16 columns at a time, without leaving its lanes. */
template <class T, int MT, int NT>
__device__ inline void pack_tile(uint32_t (&P)[MT][NT / 2][4], const float (&X)[MT][NT][4])
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int k = 0; k < NT / 2; k++) {
            P[m][k][0] = pack<T>(X[m][2 * k][0], X[m][2 * k][1]);
            P[m][k][1] = pack<T>(X[m][2 * k][2], X[m][2 * k][3]);
            P[m][k][2] = pack<T>(X[m][2 * k + 1][0], X[m][2 * k + 1][1]);
            P[m][k][3] = pack<T>(X[m][2 * k + 1][2], X[m][2 * k + 1][3]);
        }
}

/* Y += P B: B is the rows b_row .. + 16 KT of a tile, D wide. */
template <class T, int D, int MT, int KT>
__device__ inline void multiply_tile(float (&Y)[MT][D / 8][4], const uint32_t (&P)[MT][KT][4], uint32_t B, int b_row)
{
    const int lane = threadIdx.x % 32;
    const uint32_t b_first = chunk_at<D>(B, b_row + lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < KT; k++)
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            uint32_t b[4];
            load_matrices_transposed(b, along<D>(b_first, n) + k * 16 * D * 2);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                multiply(Y[m][n], P[m][k], b[0], b[1], T());
                multiply(Y[m][n + 1], P[m][k], b[2], b[3], T());
            }
        }
}

/* ---- Registers to memory ----------------------------------------------------------------------------------------- */

/* Writes the warp's 16 MT rows to t, row r at element offset where(r), which may be NOWHERE. 16-bit results
 * pass through the warp's own rows of a tile that is no longer needed, to leave in pieces of 16 bytes. */
template <class T, int D, int MT, class Where>
__device__ inline void store_rows(const float (&Y)[MT][D / 8][4], const view &t, int width, bool accumulate,
                                  uint32_t tile, char *tile_memory, int row, Where where)
{
    const int lane = threadIdx.x % 32, g = lane / 4, pair = lane % 4 * 2;
    if (t.dtype == HEED_F32) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t at = where(row + m * 16 + half * 8 + g);
                if (at == NOWHERE)
                    continue;
                float *to = (float *)t.data + at;
#pragma unroll
                for (int n = 0; n < D / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (n * 8 + pair + e < width) {
                            float *one = to + n * 8 + pair + e;
                            *one = Y[m][n][half * 2 + e] + (accumulate ? *one : 0.0f);
                        }
            }
        return;
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                const int r = row + m * 16 + half * 8 + g;
                *(uint32_t *)(tile_memory + (chunk_at<D>(tile, r, n) - tile) +
                              pair * 2) = pack<T>(Y[m][n][half * 2], Y[m][n][half * 2 + 1]);
            }
    __syncwarp();
    for (int piece = lane; piece < 16 * MT * (D / 8); piece += 32) {
        const int r = row + piece / (D / 8), chunk = piece % (D / 8);
        const int64_t at = where(r);
        if (at == NOWHERE || chunk * 8 >= width)
            continue;
        const uint4 eight = *(const uint4 *)(tile_memory + (chunk_at<D>(tile, r, chunk) - tile));
        uint16_t *to = (uint16_t *)t.data + at + chunk * 8;
        if (chunk * 8 + 8 <= width)
            *(uint4 *)to = eight;
        else
            for (int e = 0; chunk * 8 + e < width; e++)
                to[e] = (uint16_t)((e < 2 ? eight.x : e < 4 ? eight.y : e < 6 ? eight.z : eight.w) >> 16 * (e % 2));
    }
}

/* ---- Scores ------------------------------------------------------------------------------------------------------ */

/* A warp's scores with queries as rows, as scores.cuh wants to see them. low and high are in shared memory. */
template <int MT, int NT> struct query_major {
    static constexpr int R = 2 * MT, C = 2 * NT;
    static constexpr bool EXACT = false;
    float (&X)[MT][NT][4];
    const int *lows, *highs; /* of the tile's first query */
    int i0, n0, row0;        /* first query and first key of this lane; its first row of the tile */
    __device__ float &at(int r, int c) { return X[r / 2][c / 2][r % 2 * 2 + c % 2]; }
    static __device__ constexpr int down(int r) { return r / 2 * 16 + r % 2 * 8; }
    static __device__ constexpr int apart(int c) { return c / 2 * 8 + c % 2; }
    __device__ int row(int r) const { return i0 + down(r); }
    __device__ int key(int c) const { return n0 + apart(c); }
    __device__ int low(int r) const { return lows[row0 + down(r)]; }
    __device__ int high(int r) const { return highs[row0 + down(r)]; }
};

/* ---- Dropout ----------------------------------------------------------------------------------------------------- */

__device__ inline void trade(uint32_t &x, uint32_t &y, int lanes)
{
    const bool upper = threadIdx.x & lanes;
    const uint32_t other = __shfl_xor_sync(~0u, upper ? x : y, lanes);
    (upper ? x : y) = other;
}

/* Bit c of kept[r] is set where P of query r and key c is kept. The eight keys of one Philox are those of four
 * neighbouring lanes: each of them draws for another eight, and then they trade words, word i for lane i. */
template <int MT, int NT>
__device__ inline void draw_tile(const query_major<MT, NT> &t, uint32_t (&kept)[2 * MT], const args &a, const span &s,
                                 const head &x)
{
    const uint64_t seed = seed_of(a);
    const int64_t first = s.r0 + t.n0 - threadIdx.x % 4 * 2;
    const bool together = NT % 4 == 0 && s.r_step == 1 && first % 8 == 0;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        kept[r] = 0;
        if (!together) {
            kept[r] = draw(t, r, a, s, x, seed);
            continue;
        }
        const uint32_t p = (uint32_t)(uint64_t)(s.p0 + t.row(r) * s.p_step);
#pragma unroll
        for (int n = 0; n < NT / 4 * 4; n += 4) {
            uint4 w = philox(seed, make_uint4((uint32_t)(uint64_t)(first / 8 + n + threadIdx.x % 4), p, x.h, s.b));
            trade(w.x, w.y, 1);
            trade(w.z, w.w, 1);
            trade(w.x, w.z, 2);
            trade(w.y, w.w, 2);
            const uint32_t words[4] = { w.x, w.y, w.z, w.w };
#pragma unroll
            for (int j = 0; j < 4; j++) {
                kept[r] |= (uint32_t)((words[j] & 0xFFFFu) >= a.drop_below) << 2 * (n + j);
                kept[r] |= (uint32_t)(words[j] >> 16 >= a.drop_below) << (2 * (n + j) + 1);
            }
        }
    }
}

#endif
