/* Backward in plain fp32 arithmetic, for every problem there is, without atomics: each result has one owner, which
 * recomputes what it needs and sums in a fixed order.
 *
 *     dK/dV kernel    owns 128 keys, meets the queries of its group's heads 64 at a time
 *     dQ kernel       owns 128 queries, meets the keys
 *     dbias kernel    owns a 128 x 64 tile of dbias, meets every pair that bias is broadcast to
 *
 * All three meet a tile the same way: S = Q K^T is parked in shared memory while dP = dO V^T is computed, and then
 *     P = exp(S - lse)    dS = P (dP - delta) dS/d(q.k)
 * a few elements at a time, which keeps the registers free for the results. */
#include "launch.cuh"
#include "tile_fp32.cuh"

/* A few elements of the tile: one query, C keys starting at key n, those of a thread's row or four neighbours. */
template <int COUNT, int GROUPS> struct few {
    static constexpr int R = 1, C = COUNT;
    static constexpr bool EXACT = true;
    float X[COUNT];
    int i, n, first, last;
    __device__ float &at(int, int c) { return X[c]; }
    __device__ int row(int) const { return i; }
    static __device__ constexpr int apart(int c) { return GROUPS ? column_of<(GROUPS ? GROUPS : 1)>(0, c) : c; }
    __device__ int key(int c) const { return n + apart(c); }
    __device__ int low(int) const { return first; }
    __device__ int high(int) const { return last; }
};

struct row_facts {
    float lse, delta; /* lse is +inf for a row without gradient, so that its P is 0 */
};

__device__ static row_facts facts_of(const args &a, const span &q, const head &x, int i)
{
    row_facts f = { CUDART_INF_F, 0.0f };
    if (i < q.rows) {
        float lse = load(a.lse, row_at(a.lse, q.q_batch, x.h, q.q_row + i));
        if (lse != -CUDART_INF_F) {
            f.lse = lse;
            f.delta = load(a.delta, row_at(a.delta, q.q_batch, x.h, q.q_row + i));
        }
    }
    return f;
}

/* From S in t and dP: leaves dS in dP, and what dV needs, P after dropout, in t. With to_scores dS is taken with
 * respect to q.k, else with respect to S, as dbias wants it. */
template <class T>
__device__ static void differentiate(T &t, float (&dP)[T::C], float lse, float delta, const args &a, const span &q,
                                     const head &x, bool whole, bool to_scores)
{
    float slope[1][T::C];
    score_with_slope(t, slope, a, q, x, whole);
    uint32_t kept = a.drop_below ? draw(t, 0, a, q, x, seed_of(a)) : ~0u;
#pragma unroll
    for (int c = 0; c < T::C; c++) {
        const float exponent = t.at(0, c) - lse; /* at most 0, but for the rounding of large numbers; NaN stays */
        const float P = expf(exponent > 0.0f ? 0.0f : exponent), keep = kept >> c & 1 ? a.keep_scale : 0.0f;
        /* P = 0 hides the pair, whatever dP came out as */
        dP[c] = P == 0.0f ? 0.0f : P * (keep * dP[c] - delta) * (to_scores ? slope[0][c] : 1.0f);
        t.at(0, c) = P * keep;
    }
}

/* ---- dQ ---------------------------------------------------------------------------------------------------------- */

/* dS of the tile at keys n0, from offsets and facts in shared memory, into X. Used by the dQ and the dbias kernel. */
template <int GROUPS, int WIDTH>
__device__ static void query_tile(float (&X)[8][COLUMNS / GROUPS], shared_fp32<GROUPS, WIDTH> &s, const args &a,
                                  const span &q, const head &x, int i0, int n0, bool whole, bool to_scores)
{
    if (threadIdx.x < COLUMNS) {
        int n = n0 + threadIdx.x;
        s.column[0][threadIdx.x] = n < q.keys ? key_at(a, q, a.k, x.hk, n) : NOWHERE;
        s.column[1][threadIdx.x] = n < q.keys ? key_at(a, q, a.v, x.hk, n) : NOWHERE;
    }
    __syncthreads();
    clear(X);
    multiply_rows(X, s, a.q, s.row[0], a.k, s.column[0], a.D); /* S  = Q K^T */
    write_tile(s, X);
    clear(X);
    multiply_rows(X, s, a.d_o, s.row[1], a.v, s.column[1], a.Dv); /* dP = dO V^T */
    const int g = group_row<GROUPS>();
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const int row = row_of(g, r);
        few<COLUMNS / GROUPS, GROUPS> S = { {}, i0 + row, n0 + group_column<GROUPS>(), s.low[row], s.high[row] };
#pragma unroll
        for (int c = 0; c < COLUMNS / GROUPS; c++)
            S.X[c] = own_element(s, r, c);
        differentiate(S, X[r], s.lse[row], s.delta[row], a, q, x, whole, to_scores);
    }
}

template <int GROUPS, int WIDTH>
__device__ static void meet_queries(shared_fp32<GROUPS, WIDTH> &s, const args &a, const span &q, const head &x, int i0)
{
    __syncthreads();
    if (threadIdx.x < ROWS) {
        const int i = i0 + threadIdx.x;
        const row_facts f = facts_of(a, q, x, i);
        s.row[0][threadIdx.x] = i < q.rows ? row_at(a.q, q.q_batch, x.h, q.q_row + i) : NOWHERE;
        s.row[1][threadIdx.x] = i < q.rows ? row_at(a.d_o, q.q_batch, x.h, q.q_row + i) : NOWHERE;
        s.lse[threadIdx.x] = f.lse;
        s.delta[threadIdx.x] = f.delta;
        band_of_row(a, q, min(i, q.rows - 1), s.low[threadIdx.x], s.high[threadIdx.x]);
    }
    __syncthreads();
}

template <int GROUPS, int WIDTH>
__global__ void __launch_bounds__(16 * GROUPS, GROUPS == 8 ? 2 : 1)
    dq_portable(const __grid_constant__ args a, int tiles, int slices)
{
    extern __shared__ float4 memory[];
    auto &s = *(shared_fp32<GROUPS, WIDTH> *)memory;
    unsigned index = blockIdx.x;
    const int slice = index % slices * WIDTH;
    index /= slices;
    const int i0 = (tiles - 1 - index % tiles) * ROWS;
    index /= tiles;
    meet_head(s, a, index / a.Hq, index % a.Hq);
    const span &q = s.sequence;
    const head &x = s.of;
    if (i0 >= q.rows)
        return;
    const int rows = min(ROWS, q.rows - i0);
    meet_queries(s, a, q, x, i0);

    float dQ[8][WIDTH / GROUPS];
    clear(dQ);
    const int first = min(s.low[0], s.low[rows - 1]), last = max(s.high[0], s.high[rows - 1]);
    const int inside = max(s.low[0], s.low[rows - 1]), outside = min(s.high[0], s.high[rows - 1]);
    for (int n0 = first / 8 * 8; n0 < last; n0 += COLUMNS) {
        float dS[8][COLUMNS / GROUPS];
        query_tile(dS, s, a, q, x, i0, n0, n0 >= inside && n0 + COLUMNS <= outside, true);
        write_tile(s, dS);
        multiply_tile(dQ, s, a.k, s.column[0], slice, a.D); /* dQ += dS K */
    }
    store_slice<GROUPS, WIDTH>(dQ, a.d_q, slice, a.D, a.accumulate, [&](int row) {
        return i0 + row < q.rows ? row_at(a.d_q, q.q_batch, x.h, q.q_row + i0 + row) : NOWHERE;
    });
}

/* ---- dK and dV --------------------------------------------------------------------------------------------------- */

/* Offsets, band and facts of the 64 queries from i0 on. Here queries are columns. */
template <int GROUPS, int WIDTH>
__device__ static void meet_query_columns(shared_fp32<GROUPS, WIDTH> &s, const args &a, const span &q, const head &x,
                                          int i0)
{
    if (threadIdx.x < COLUMNS) {
        const int i = i0 + threadIdx.x;
        const row_facts f = facts_of(a, q, x, i);
        s.column[0][threadIdx.x] = i < q.rows ? row_at(a.q, q.q_batch, x.h, q.q_row + i) : NOWHERE;
        s.column[1][threadIdx.x] = i < q.rows ? row_at(a.d_o, q.q_batch, x.h, q.q_row + i) : NOWHERE;
        s.lse[threadIdx.x] = f.lse;
        s.delta[threadIdx.x] = f.delta;
        band_of_row(a, q, min(i, q.rows - 1), s.low[threadIdx.x], s.high[threadIdx.x]);
    }
    __syncthreads();
}

/* P goes to the shared tile in place of S, dS in place of dP: four neighbouring keys of one query at a time. */
template <int GROUPS, int WIDTH>
__device__ static void differentiate_keys(float (&X)[8][COLUMNS / GROUPS], shared_fp32<GROUPS, WIDTH> &s, const args &a,
                                          const span &q, const head &x, int i0, int n0)
{
    const int g = group_row<GROUPS>(), t = group_column<GROUPS>();
#pragma unroll
    for (int c = 0; c < COLUMNS / GROUPS; c++) {
        const int column = column_of<GROUPS>(t, c);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float4 *four = tile_at(s.tile, column, g / 4 + 16 * half);
            const float4 raw = *four;
            few<4, 0> S = {
                { raw.x, raw.y, raw.z, raw.w }, i0 + column, n0 + g + 64 * half, s.low[column], s.high[column]
            };
            float dP[4] = { X[4 * half][c], X[4 * half + 1][c], X[4 * half + 2][c], X[4 * half + 3][c] };
            differentiate(S, dP, s.lse[column], s.delta[column], a, q, x, false, true);
            *four = make_float4(S.X[0], S.X[1], S.X[2], S.X[3]);
#pragma unroll
            for (int e = 0; e < 4; e++)
                X[4 * half + e][c] = dP[e];
        }
    }
}

template <int GROUPS, int WIDTH>
__global__ void __launch_bounds__(16 * GROUPS, GROUPS == 8 ? 2 : 1)
    dkv_portable(const __grid_constant__ args a, int tiles, int slices)
{
    extern __shared__ float4 memory[];
    auto &s = *(shared_fp32<GROUPS, WIDTH> *)memory;
    unsigned index = blockIdx.x;
    const int slice = index % slices * WIDTH;
    index /= slices;
    const int n0 = index % tiles * ROWS;
    index /= tiles;
    const int hk = index % a.Hk;
    const int b = index / a.Hk;
    meet_head(s, a, b, hk * a.G);
    const span &q = s.sequence;
    const head &x = s.of;
    if (n0 >= q.keys)
        return;
    if (threadIdx.x < ROWS) {
        int n = n0 + threadIdx.x;
        s.row[0][threadIdx.x] = n < q.keys ? key_at(a, q, a.k, hk, n) : NOWHERE;
        s.row[1][threadIdx.x] = n < q.keys ? key_at(a, q, a.v, hk, n) : NOWHERE;
    }
    float dK[8][WIDTH / GROUPS], dV[8][WIDTH / GROUPS];
    clear(dK);
    clear(dV);
    int first, last, first_of_end, last_of_end;
    band_of_key(a, q, n0, first, last);
    band_of_key(a, q, min(n0 + ROWS, q.keys) - 1, first_of_end, last_of_end);
    first = min(first, first_of_end), last = max(last, last_of_end);

    for (int h = hk * a.G; h < (hk + 1) * a.G; h++) {
        meet_head(s, a, b, h);
        for (int i0 = first; i0 < last; i0 += COLUMNS) {
            float X[8][COLUMNS / GROUPS];
            meet_query_columns(s, a, q, x, i0);
            clear(X);
            multiply_rows(X, s, a.k, s.row[0], a.q, s.column[0], a.D); /* S^T  = K Q^T */
            write_tile(s, X);
            clear(X);
            multiply_rows(X, s, a.v, s.row[1], a.d_o, s.column[1], a.Dv); /* dP^T = V dO^T */
            differentiate_keys(X, s, a, q, x, i0, n0);
            if (a.d_v.data && slice < a.Dv)
                multiply_tile(dV, s, a.d_o, s.column[1], slice, a.Dv); /* dV += P^T dO */
            if (a.d_k.data && slice < a.D) {
                write_tile(s, X);
                multiply_tile(dK, s, a.q, s.column[0], slice, a.D); /* dK += dS^T Q */
            }
            __syncthreads();
        }
    }
    auto own = [&](const view &t) {
        return [&](int row) { return n0 + row < q.keys ? key_at(a, q, t, hk, n0 + row) : NOWHERE; };
    };
    if (a.d_v.data)
        store_slice<GROUPS, WIDTH>(dV, a.d_v, slice, a.Dv, a.accumulate, own(a.d_v));
    if (a.d_k.data)
        store_slice<GROUPS, WIDTH>(dK, a.d_k, slice, a.D, a.accumulate, own(a.d_k));
}

/* ---- dbias ------------------------------------------------------------------------------------------------------- */

/* Where bias has one row, or one column, for all: those of a tile are summed too, in the shared tile, and the tiles of
 * the whole row or column are met by the one block that owns it. */
__device__ static void store_bias(const args &a, float (*tile)[ROWS], int b, int h, int i0, int n0, int keys)
{
    const bool one_row = a.bias_shape[2] == 1, one_column = a.bias_shape[3] == 1;
    const int rows = one_row ? 1 : min(ROWS, a.bias_shape[2] - i0), columns = one_column ? 1 : min(COLUMNS, keys - n0);
    for (int e = threadIdx.x; e < rows * columns; e += blockDim.x) {
        const int row = e / columns, column = e % columns;
        float sum = 0.0f;
        for (int c = one_column ? 0 : column; c < (one_column ? COLUMNS : column + 1); c++)
            for (int r = one_row ? 0 : row; r < (one_row ? ROWS : row + 1); r++)
                sum += ((float *)tile_at(tile, c, r / 4))[r % 4];
        int64_t j = one_column ? 0 : a.col + (n0 + column) * a.col_step;
        store(a.d_bias, row_at(a.d_bias, b, h, one_row ? 0 : i0 + row) + j * a.d_bias.stride[3], sum);
    }
}

__global__ void __launch_bounds__(128, 2)
    dbias_portable(const __grid_constant__ args a, int tiles, int key_tiles, int keys)
{
    constexpr int GROUPS = 8, WIDTH = 64;
    extern __shared__ float4 memory[];
    auto &s = *(shared_fp32<GROUPS, WIDTH> *)memory;
    const bool one_row = a.bias_shape[2] == 1, one_column = a.bias_shape[3] == 1;
    const bool one_head = a.bias_shape[1] == 1, one_batch = a.bias_shape[0] == 1;
    unsigned index = blockIdx.x;
    const int own_n = index % key_tiles * COLUMNS, own_i = index / key_tiles % tiles * ROWS;
    index = index / key_tiles / tiles;
    const int own_h = index % a.bias_shape[1], own_b = index / a.bias_shape[1];

    const span &q = s.sequence;
    const head &x = s.of;
    float sum[8][COLUMNS / GROUPS];
    clear(sum);
    for (int b = own_b; b < (one_batch ? a.B : own_b + 1); b++) {
        for (int h = own_h; h < (one_head ? a.Hq : own_h + 1); h++) {
            meet_head(s, a, b, h);
            for (int i0 = own_i; i0 < (one_row ? q.rows : min(q.rows, own_i + 1)); i0 += ROWS) {
                meet_queries(s, a, q, x, i0);
                const int rows = min(ROWS, q.rows - i0);
                const int first = min(s.low[0], s.low[rows - 1]), last = max(s.high[0], s.high[rows - 1]);
                for (int n0 = own_n; n0 < (one_column ? q.keys : min(q.keys, own_n + 1)); n0 += COLUMNS) {
                    if (n0 >= last || n0 + COLUMNS <= first)
                        continue;
                    float dS[8][COLUMNS / GROUPS];
                    query_tile(dS, s, a, q, x, i0, n0, false, false);
#pragma unroll
                    for (int r = 0; r < 8; r++)
#pragma unroll
                        for (int c = 0; c < COLUMNS / GROUPS; c++)
                            sum[r][c] += dS[r][c];
                    __syncthreads();
                }
            }
        }
    }
    write_tile(s, sum);
    __syncthreads();
    store_bias(a, s.tile, own_b, own_h, own_i, own_n, keys);
}

heed_status heed_cuda_bias_gradient(const args &a, const heed_exec *x)
{
    if (!a.d_bias.data)
        return HEED_OK;
    const int64_t shape[4] = { a.bias_shape[0], a.bias_shape[1], a.bias_shape[2], a.bias_shape[3] };
    heed_status status = heed_cuda_fill(a.d_bias, shape, 0.0f, x); /* keys that no row sees */
    const int64_t keys = a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0;
    if (status || keys == 0 || a.Sq == 0 || a.B == 0)
        return status;
    const int64_t tiles = tiles_of(shape[2], ROWS), key_tiles = shape[3] == 1 ? 1 : tiles_of(keys, COLUMNS);
    return launch(dbias_portable, shape[0] * shape[1] * tiles * key_tiles, 128, sizeof(shared_fp32<8, 64>), x, a,
                  (int)tiles, (int)key_tiles, (int)keys);
}

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

template <int GROUPS, int WIDTH> static heed_status run_dq(const args &a, const heed_exec *x)
{
    int64_t tiles = tiles_of(a.Sq, ROWS), slices = tiles_of(a.D, WIDTH);
    return launch(dq_portable<GROUPS, WIDTH>, tiles * slices * a.Hq * a.B, 16 * GROUPS,
                  sizeof(shared_fp32<GROUPS, WIDTH>), x, a, (int)tiles, (int)slices);
}

template <int GROUPS, int WIDTH> static heed_status run_dkv(const args &a, const heed_exec *x)
{
    int64_t keys = a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0;
    int64_t tiles = tiles_of(keys, ROWS), slices = tiles_of(HEED_MAX(a.D, a.Dv), WIDTH);
    return launch(dkv_portable<GROUPS, WIDTH>, tiles * slices * a.Hk * a.B, 16 * GROUPS,
                  sizeof(shared_fp32<GROUPS, WIDTH>), x, a, (int)tiles, (int)slices);
}

size_t heed_backward_workspace_portable(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return heed_cuda_delta_bytes(p);
}

heed_status heed_backward_portable(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    (void)plan;
    on_device device(x->device);
    args a;
    heed_status status = device.status;
    if (!status)
        status = heed_cuda_args(p, &a);
    if (!status)
        status = heed_cuda_prepare_backward(p, &a, x);
    if (!status)
        status = heed_cuda_sink_gradient(a, x);
    if (!status)
        status = heed_cuda_bias_gradient(a, x);
    if (!status && a.d_q.data)
        status = a.D <= 64 ? run_dq<8, 64>(a, x) : run_dq<16, 128>(a, x);
    if (!status && (a.d_k.data || a.d_v.data))
        status = a.D <= 64 && a.Dv <= 64 ? run_dkv<16, 64>(a, x) : run_dkv<16, 128>(a, x);
    return status;
}
