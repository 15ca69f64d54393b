/* The pass that splits whole tensors into the workspace, for kernels that meet each row many times. A block splits 64
 * rows; keys off the stride and rows of padding are never read, so what the kernels see is dense. */
#include "split.cuh"

template <int D> constexpr int threads_of = D > 64 ? 256 : 128; /* each has 32 numbers or more on their way */
constexpr int FEW = 256;                                        /* blocks, where there is seldom anything to do */

/* How many groups of 64 rows there are to split: tiles of the longest sequence, 0 of what is not wanted, and groups of a
 * head of the keys, with those of the queries that share it. */
struct split_grid {
    int key_tiles, query_tiles, of_head;
};

static split_grid split_grid_of(const args &a, const split_tensors &to)
{
    const int64_t keys = a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0;
    const int key_tiles = to.k.rows ? (int)tiles_of(keys, SPLIT_ROWS) : 0;
    const int query_tiles = to.q.rows ? (int)tiles_of(a.Sq, SPLIT_ROWS) : 0;
    return { key_tiles, query_tiles, 2 * key_tiles + (to.d_o.rows ? 2 : 1) * a.G * query_tiles };
}

/* Group number `index`: head by head those of k, of v, and of q and d_o of the heads that share them. No rows: the
 * sequence is too short to have it. */
struct split_group {
    bool keys, second; /* k or v, v or d_o */
    int batch, head, row;
    even_rows from;
    split_rows to;
    int64_t at; /* its first row in `to` */
    __device__ split_group(const args &a, const split_tensors &tensors, const split_grid &n, int index)
    {
        const int which = index / n.of_head, b = which / a.Hk;
        int rest = index - which * n.of_head;
        head = which - b * a.Hk;
        const span s = span_of(a, b);
        keys = rest < 2 * n.key_tiles;
        const int tiles = keys ? n.key_tiles : n.query_tiles;
        rest -= keys ? 0 : 2 * n.key_tiles;
        const int part = rest / tiles, first = (rest - part * tiles) * SPLIT_ROWS;
        second = keys ? part == 1 : part >= a.G;
        if (!keys)
            head = head * a.G + part - (second ? a.G : 0);
        batch = keys ? s.k_batch : s.q_batch, row = (keys ? s.k_row : s.q_row) + first;
        from = keys ? keys_from(a, s, second ? a.v : a.k, head, first, second ? a.Dv : a.D)
                    : queries_from(a, s, second ? a.d_o : a.q, head, first, second ? a.Dv : a.D);
        to = keys ? (second ? tensors.v : tensors.k) : (second ? tensors.d_o : tensors.q);
        at = split_at(to, batch, head, row);
    }
};

template <int D> using flight = rows_in_flight<D, SPLIT_ROWS, threads_of<D>>;

template <int D>
__device__ static void split_64(flight<D> &rows, const split_group &g, const float *less, const split_tensors &tensors)
{
    __shared__ unsigned most[threads_of<D> / 32];
    const shift found = rows.find_shift(most);
    const int columns = D > 128 && tensors.columns ? tensors.columns : D;
    rows.split(found.s, less, [&](int row, int chunk, uint4 hi, uint4 lo) {
        char *const to = g.to.rows + (g.at + row) * (4 * columns) + chunk * 16;
        if (row < g.from.count && chunk * 8 < columns) {
            *(uint4 *)to = hi;
            if (!tensors.hi_only)
                *(uint4 *)(to + 2 * columns) = lo;
        }
    });
    if (threadIdx.x == 0) {
        g.to.shifts[g.at] = found;
        if (g.to.marks)
            g.to.marks[g.at] = 0;
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

/* delta of 64 rows, the sum of o d_o, in fp64, as rows.cu has it. */
template <int D>
__device__ static void sum_rows(const args &a, const split_group &g, const flight<D> &d_o, float *delta)
{
    const flight<D> o(rows_from(a.o, row_at(a.o, g.batch, g.head, g.row), a.o.stride[2], g.from.count, a.Dv));
#pragma unroll
    for (int n = 0; n < o.EACH; n++) {
        double sum = 0;
#pragma unroll
        for (int e = 0; e < 8; e++)
            sum += (double)o.x[n][e] * d_o.x[n][e];
#pragma unroll
        for (int lane = o.CHUNKS / 2; lane; lane /= 2)
            sum += __shfl_xor_sync(~0u, sum, lane);
        const int row = threadIdx.x / o.CHUNKS + n * o.APART;
        if (a.d_lse.data && row < g.from.count)
            sum -= load(a.d_lse, row_at(a.d_lse, g.batch, g.head, g.row + row));
        delta[row] = (float)sum;
    }
}

/* What goes with 64 rows of d_o; less: what lse's rounding cuts off. SUMS: the problem has no delta. */
template <int D, bool SUMS>
__device__ static void find_facts(const args &a, const split_tensors &to, const split_group &g, const flight<D> &d_o,
                                  float *less)
{
    __shared__ float sums[SPLIT_ROWS];
    if (SUMS) {
        sum_rows<D>(a, g, d_o, sums);
        __syncthreads();
    }
    if ((int)threadIdx.x >= min(g.from.count, SPLIT_ROWS))
        return;
    const int i = g.row + threadIdx.x;
    const float delta = SUMS ? sums[threadIdx.x] : load(a.delta, row_at(a.delta, g.batch, g.head, i));
    const row_facts_split f = facts_of(load(a.lse, row_at(a.lse, g.batch, g.head, i)), delta);
    const int64_t number = ((int64_t)g.batch * a.Hq + g.head) * a.q_rows + i;
    less[threadIdx.x] = f.rest * 0.693147182f;
    if (to.facts)
        to.facts[number] = f;
    if (to.L)
        to.L[number] = f.log2, to.delta[number] = fmaf(-f.delta, less[threadIdx.x], f.delta);
}

/* Zeros for gradients of the keys around the stride's, of 64 of these: those before the first of all as well. A thread has four
 * columns of every so many rows, and counts where they stand from one key of the stride to the next. */
template <int D>
__device__ static void clear_gaps(const args &a, const split_group &g, const view &t, int width, int first)
{
    constexpr int LANES = D / 4, AT_ONCE = threads_of<D> / LANES;
    const int from = first ? a.col + first * a.col_step : 0, step = a.col_step;
    const int to = g.from.count <= SPLIT_ROWS ? a.Sk : a.col + (first + SPLIT_ROWS) * step;
    const int column = threadIdx.x % LANES * 4, columns = min(width - column, 4), further = AT_ONCE % step;
    int row = from + threadIdx.x / LANES, past = (row - a.col) % step;
    past += past < 0 ? step : 0;
    int64_t at = row_at(t, g.batch, g.head, row) + column * t.stride[3];
    for (; row < to; row += AT_ONCE, at += AT_ONCE * t.stride[2]) {
        if (past && t.vector && columns == 4)
            *(float4 *)((float *)t.data + at) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        else if (past)
            for (int c = 0; c < columns; c++)
                store(t, at + c * t.stride[3], 0.0f);
        past += further;
        past -= past >= step ? step : 0;
    }
}

/* Group number `index` of all. */
template <int D, bool SUMS>
__device__ static void split_one(const args &a, const split_tensors &to, const split_grid &n, int index)
{
    __shared__ float less[SPLIT_ROWS];
    const split_group g(a, to, n, index);
    if (g.from.count <= 0)
        return;
    const view &gradient = g.second ? a.d_v : a.d_k;
    if (to.gaps && g.keys && gradient.data)
        clear_gaps<D>(a, g, gradient, g.second ? a.Dv : a.D, g.row);
    flight<D> rows(g.from);
    const bool d_o = g.second && !g.keys;
    if (d_o)
        find_facts<D, SUMS>(a, to, g, rows, less);
    /* In there threads meet before they read less. */
    split_64<D>(rows, g, d_o && to.L ? less : NULL, to);
}

template <int D, bool SUMS>
__global__ void __launch_bounds__(threads_of<D>, D > 128  ? 1
                                                 : D > 64 ? (SUMS ? 3 : 4)
                                                          : (SUMS ? 5 : 7))
    split_pass(const __grid_constant__ args a, const __grid_constant__ split_tensors to, split_grid n, int all,
               const int *when)
{
#if HEED_SPLIT_HERE
    let_next_start();
    if (when) { /* launched early: see launch.cuh */
        wait_for_last();
        if (!*when)
            return;
    }
    if (to.zeros && blockIdx.x == 0 && threadIdx.x < 3)
        to.zeros[threadIdx.x] = 0;
    const auto clear_marks = [&](const split_rows &x, int batches) {
        if (x.marks && !x.rows) /* somebody else splits these */
            for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < split_at(x, batches, 0, 0);
                 i += gridDim.x * blockDim.x)
                x.marks[i] = 0;
    };
    clear_marks(to.q, a.offsets_q ? 1 : a.B);
    clear_marks(to.k, a.offsets_k ? 1 : a.B);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; to.turns && i < to.turn_count; i += gridDim.x * blockDim.x)
        to.turns[i] = 0;
#pragma unroll 1
    for (int index = blockIdx.x; index < all; index += gridDim.x) {
        split_one<D, SUMS>(a, to, n, index);
        __syncthreads();
    }
    wait_for_last(); /* when this kernel has ended, so has the one before */
#endif
}

template <int D, bool SUMS = false>
static heed_status run(const args &a, const split_tensors &to, bool early, const int *when, const heed_exec *x)
{
    const split_grid n = split_grid_of(a, to);
    const int64_t all = (int64_t)a.B * a.Hk * n.of_head;
    const int64_t blocks = when ? HEED_MIN(all, FEW) : HEED_MAX(all, 1);
    return early || when ? launch_next(split_pass<D, SUMS>, blocks, threads_of<D>, 0, x, a, to, n, (int)all, when)
                         : launch(split_pass<D, SUMS>, blocks, threads_of<D>, 0, x, a, to, n, (int)all, when);
}

heed_status heed_cuda_split(const args &a, const split_tensors &to, bool early, const int *when, const heed_exec *x)
{
    const int width = split_width(a);
    if (to.d_o.rows && !a.delta.data)
        return width == 64 ? run<64, true>(a, to, early, when, x) : run<128, true>(a, to, early, when, x);
    return width == 64    ? run<64>(a, to, early, when, x)
           : width == 128 ? run<128>(a, to, early, when, x)
                          : run<256>(a, to, early, when, x);
}
