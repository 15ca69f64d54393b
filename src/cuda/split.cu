/* The pass that splits whole tensors into the workspace, for kernels that meet each row many times. A block splits 64
 * rows; keys off the stride and rows of padding are never read, so what the kernels see is dense. */
#include "split.cuh"

constexpr int THREADS = 256;
constexpr int FEW = 256; /* blocks, where there is seldom anything to do */

/* The first 64 of some rows, to place `at` of x. */
template <int D>
__device__ static void split_64(const even_rows &rows, const split_rows &x, int64_t at, const float *less, bool hi_only)
{
    __shared__ unsigned most[THREADS / 32];
    const rows_in_flight<D, SPLIT_ROWS, THREADS> some(rows);
    const shift found = some.find_shift(most);
    some.split(found.s, less, [&](int row, int chunk, uint4 hi, uint4 lo) {
        char *const to = x.rows + (at + row) * (4 * D) + chunk * 16;
        if (row < rows.count) {
            *(uint4 *)to = hi;
            if (!hi_only)
                *(uint4 *)(to + 2 * D) = lo;
        }
    });
    if (threadIdx.x == 0) {
        x.shifts[at] = found;
        if (x.marks)
            x.marks[at] = 0;
    }
}

__device__ static row_facts_split facts_of(float lse, float delta)
{
    if (lse == -CUDART_INF_F)
        return { CUDART_INF_F, 0.0f, 0.0f, CUDART_INF_F };
    const float log2 = -min_or_nan(-min_or_nan(lse * LOG2E, 3.4e38f), 3.4e38f), LOG2E_REST = 1.92596303e-8f;
    const float rest = fabsf(log2) < 1e7f ? fmaf(lse, LOG2E_REST, fmaf(lse, LOG2E, -log2)) : 0.0f;
    return { log2, rest, delta, lse };
}

/* The groups of 64 rows of either kind of tensor: `keys` of k, as many of v, then those of q and of d_o. */
struct split_grid {
    int key_tiles, query_tiles, keys, queries, all;
};

/* Group number `index` of all. */
template <int D>
__device__ static void split_one(const args &a, const split_tensors &to, const split_grid &n, int index)
{
    __shared__ float less[SPLIT_ROWS];
    const bool keys = index < 2 * n.keys;
    index -= keys ? 0 : 2 * n.keys;
    const int tiles = keys ? n.key_tiles : n.query_tiles, heads = keys ? a.Hk : a.Hq;
    const bool second = index >= (keys ? n.keys : n.queries);
    index -= second ? (keys ? n.keys : n.queries) : 0;
    const int first = index % tiles * SPLIT_ROWS, h = index / tiles % heads;
    const span s = span_of(a, index / tiles / heads);
    if (first >= (keys ? s.keys : s.rows))
        return;
    const split_rows &x = keys ? (second ? to.v : to.k) : (second ? to.d_o : to.q);
    const int batch = keys ? s.k_batch : s.q_batch, row = (keys ? s.k_row : s.q_row) + first;
    const even_rows from = keys ? keys_from(a, s, second ? a.v : a.k, h, first, second ? a.Dv : a.D)
                                : queries_from(a, s, second ? a.d_o : a.q, h, first, second ? a.Dv : a.D);
    if (to.d_o.rows && !keys && threadIdx.x < SPLIT_ROWS && first + (int)threadIdx.x < s.rows) {
        const int i = row + threadIdx.x;
        const row_facts_split f = facts_of(load(a.lse, row_at(a.lse, batch, h, i)),
                                           load(a.delta, row_at(a.delta, batch, h, i)));
        const int64_t number = ((int64_t)batch * a.Hq + h) * a.q_rows + i;
        const float part = f.rest * 0.693147182f;
        less[threadIdx.x] = part;
        if (!second && to.facts)
            to.facts[number] = f;
        if (!second && to.L)
            to.L[number] = f.log2, to.delta[number] = fmaf(-f.delta, part, f.delta);
    }
    /* In there threads meet before they read less. */
    split_64<D>(from, x, split_at(x, batch, h, row), second && !keys && to.L ? less : NULL, to.hi_only);
}

template <int D>
__global__ void __launch_bounds__(THREADS)
    split_pass(const __grid_constant__ args a, const __grid_constant__ split_tensors to, split_grid n, const int *when)
{
#if HEED_SPLIT_HERE
    if (when && !*when)
        return;
    if (to.zeros && blockIdx.x == 0 && threadIdx.x < 3)
        to.zeros[threadIdx.x] = 0;
#pragma unroll 1
    for (int index = blockIdx.x; index < n.all; index += gridDim.x) {
        split_one<D>(a, to, n, index);
        __syncthreads();
    }
#endif
}

template <int D> static heed_status run(const args &a, const split_tensors &to, const int *when, const heed_exec *x)
{
    const int64_t keys = a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0;
    const int64_t key_tiles = tiles_of(keys, SPLIT_ROWS), query_tiles = tiles_of(a.Sq, SPLIT_ROWS);
    const int64_t key_groups = to.k.rows ? key_tiles * a.Hk * a.B : 0;
    const int64_t query_groups = to.q.rows ? query_tiles * a.Hq * a.B : 0;
    const int64_t all = 2 * key_groups + (to.d_o.rows ? 2 : 1) * query_groups;
    const split_grid n = { (int)key_tiles, (int)query_tiles, (int)key_groups, (int)query_groups, (int)all };
    return launch(split_pass<D>, when ? HEED_MIN(all, FEW) : HEED_MAX(all, 1), THREADS, 0, x, a, to, n, when);
}

heed_status heed_cuda_split(const args &a, const split_tensors &to, const int *when, const heed_exec *x)
{
    const int width = split_width(a);
    return width == 64 ? run<64>(a, to, when, x) : width == 128 ? run<128>(a, to, when, x) : run<256>(a, to, when, x);
}
