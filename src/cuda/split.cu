/* The pass that splits whole tensors into the workspace, for kernels that meet each row many times. A block makes one
 * tile of 64 rows; keys off the stride and rows of padding are never read, so what the kernels see is dense. */
#include "split.cuh"

constexpr int THREADS = 256;

/* 64 rows of a tensor. */
template <int D> __device__ static void split_tile(const even_rows &rows, const split_rows &to, int64_t group)
{
    __shared__ unsigned most[THREADS / 32];
    const rows_in_flight<D, SPLIT_ROWS, THREADS> some(rows);
    const shift found = some.find_shift(most);
    some.template split<GROUP_ROWS>(to.groups + group * tile_bytes<D, GROUP_ROWS>, 0,
                                    (min(rows.count, SPLIT_ROWS) + GROUP_ROWS - 1) / GROUP_ROWS * GROUP_ROWS, found.s);
    if (threadIdx.x == 0)
        to.shifts[group] = found;
}

__device__ static row_facts_split facts_of(float lse, float delta)
{
    if (lse == -CUDART_INF_F)
        return { CUDART_INF_F, 0.0f, 0.0f, CUDART_INF_F };
    const float log2 = -min_or_nan(-min_or_nan(lse * LOG2E, 3.4e38f), 3.4e38f), LOG2E_REST = 1.92596303e-8f;
    const float rest = fabsf(log2) < 1e7f ? fmaf(lse, LOG2E_REST, fmaf(lse, LOG2E, -log2)) : 0.0f;
    return { log2, rest, delta, lse };
}

/* Blocks 0 .. of keys: a tile of k and then one of v, and so on; then those of queries likewise. */
template <int D>
__global__ void __launch_bounds__(THREADS)
    split_pass(const __grid_constant__ args a, const __grid_constant__ split_tensors to, int key_tiles, int query_tiles,
               int key_blocks)
{
#if HEED_SPLIT_HERE
    const bool keys = (int)blockIdx.x < key_blocks;
    const int tiles = keys ? key_tiles : query_tiles, heads = keys ? a.Hk : a.Hq;
    const unsigned index = (blockIdx.x - (keys ? 0 : key_blocks)) / 2;
    const bool second = blockIdx.x % 2;
    const int first = index % tiles * SPLIT_ROWS, h = index / tiles % heads;
    const span s = span_of(a, index / tiles / heads);
    if (first >= (keys ? s.keys : s.rows))
        return;
    if (keys) {
        const split_rows &x = second ? to.v : to.k;
        split_tile<D>(keys_from(a, s, second ? a.v : a.k, h, first, second ? a.Dv : a.D), x,
                      first_group(x, s.b, s.k_row, h) + first / GROUP_ROWS);
        return;
    }
    const split_rows &x = second ? to.d_o : to.q;
    split_tile<D>(queries_from(a, s, second ? a.d_o : a.q, h, first, second ? a.Dv : a.D), x,
                  first_group(x, s.b, s.q_row, h) + first / GROUP_ROWS);
    if (!second && threadIdx.x < SPLIT_ROWS && first + (int)threadIdx.x < s.rows) {
        const int64_t i = s.q_row + first + threadIdx.x;
        to.facts[((int64_t)s.q_batch * a.Hq + h) * a.q_rows + i] = facts_of(load(a.lse, row_at(a.lse, s.q_batch, h, i)),
                                                                            load(a.delta,
                                                                                 row_at(a.delta, s.q_batch, h, i)));
    }
#endif
}

template <int D> static heed_status run(const args &a, const split_tensors &to, const heed_exec *x)
{
    const int64_t keys = a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0;
    const int64_t key_tiles = tiles_of(keys, SPLIT_ROWS), query_tiles = to.facts ? tiles_of(a.Sq, SPLIT_ROWS) : 0;
    const int64_t key_blocks = 2 * key_tiles * a.Hk * a.B, blocks = key_blocks + 2 * query_tiles * a.Hq * a.B;
    return launch(split_pass<D>, blocks, THREADS, 0, x, a, to, (int)key_tiles, (int)query_tiles, (int)key_blocks);
}

heed_status heed_cuda_split(const args &a, const split_tensors &to, const heed_exec *x)
{
    return split_width(a) == 64 ? run<64>(a, to, x) : run<128>(a, to, x);
}
