/* Backward in plain fp32 arithmetic, for every problem there is, without atomics: each result has one owner, which
 * recomputes what it needs and sums in a fixed order.
 *
 *     dK/dV kernel    owns 128 keys, or 64 of a wide head, and meets the queries of its group's heads
 *     dQ kernel       owns queries, meets the keys, likewise
 *     dbias kernel    owns a 128 x 64 tile of dbias, meets every pair that bias is broadcast to
 *
 * All three meet a tile the same way: S = Q K^T is parked in shared memory while dP = dO V^T is computed, and then
 *     P = exp(S - lse)    dS = P (dP - delta) dS/d(q.k)
 * a few elements at a time, which keeps the registers free for the results. */
#include "launch.cuh"
#include "tile_fp32.cuh"

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

/* A tile of S, parked in shared memory, and dP in X become P after dropout, as dV wants it, where S was, and dS in X.
 * With to_scores dS is taken with respect to q.k, else with respect to S, as dbias wants it. whole: the band hides
 * nothing in this tile. */
template <bool KEY_MAJOR, int WIDTH, int N>
__device__ static void differentiate(float (&X)[8][N], shared_fp32<WIDTH, N> &s, const args &a, int i0, int n0,
                                     bool whole, bool to_scores)
{
    constexpr int COUNT = KEY_MAJOR ? 1 : 2, QUERIES = KEY_MAJOR ? N : 8; /* at a time, and in all */
    const span &q = s.sequence;
    const head &x = s.of;
    const uint64_t kept = a.drop_below ? draw_all<WIDTH, KEY_MAJOR, QUERIES>(a, q, x, i0, n0) : 0;
#pragma unroll
    for (int first = 0; first < QUERIES; first += COUNT) {
        own_scores<WIDTH, KEY_MAJOR, COUNT> S = { {}, s.low, s.high, i0, n0, first };
        float slope[COUNT][8];
#pragma unroll
        for (int c = 0; c < 8; c++)
            if (KEY_MAJOR) {
                if (c % 4 == 0)
                    load_four(&S.X[0][c], tile_at(s, s.column_of(first), s.row_of(c)));
            } else {
                const float *two = tile_at(s, s.column_of(c), s.row_of(first));
                S.X[0][c] = two[0], S.X[COUNT - 1][c] = two[1];
            }
        score_with_slope(S, slope, a, q, x, whole);
#pragma unroll
        for (int r = 0; r < COUNT; r++) {
            const float lse = s.lse[S.down(r)], delta = s.delta[S.down(r)];
#pragma unroll
            for (int c = 0; c < 8; c++) {
                const float exponent = S.X[r][c] -
                                       lse; /* at most 0, but for the rounding of large numbers; NaN stays */
                const float P = expf(exponent > 0.0f ? 0.0f : exponent);
                const float keep = !a.drop_below ? 1.0f : kept >> (8 * (first + r) + c) & 1 ? a.keep_scale : 0.0f;
                float &dP = KEY_MAJOR ? X[c][first % N] : X[first + r][c % N];
                /* P = 0 hides the pair, whatever dP came out as */
                dP = P == 0.0f ? 0.0f : P * (keep * dP - delta) * (to_scores ? slope[r][c] : 1.0f);
                S.X[r][c] = P * keep;
            }
        }
        if (KEY_MAJOR)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *(float4 *)tile_at(s, s.column_of(first),
                                   s.row_of(4 * half)) = make_float4(S.X[0][4 * half], S.X[0][4 * half + 1],
                                                                     S.X[0][4 * half + 2], S.X[0][4 * half + 3]);
    }
}

/* ---- dQ ---------------------------------------------------------------------------------------------------------- */

/* dS of the tile at keys n0, from offsets and facts in shared memory, into X. then(slot): see multiply_rows(). */
template <int WIDTH, class Then>
__device__ static void query_tile(float (&X)[8][8], shared_fp32<WIDTH> &s, int &slot, const args &a, int i0, int n0,
                                  bool whole, bool to_scores, Then then)
{
    const span &q = s.sequence;
    const rows_of Q = { a.q, s.row[0], a.D }, K = { a.k, s.column[0], a.D };
    const rows_of dO = { a.d_o, s.row[1], a.Dv }, V = { a.v, s.column[1], a.Dv };
    if (threadIdx.x < s.COLUMNS) {
        const int n = n0 + threadIdx.x;
        s.column[0][threadIdx.x] = n < q.keys ? key_at(a, q, a.k, s.of.hk, n) : NOWHERE;
        s.column[1][threadIdx.x] = n < q.keys ? key_at(a, q, a.v, s.of.hk, n) : NOWHERE;
    }
    __syncthreads();
    start_rows(s, slot, Q, K, 0);
    clear(X);
    multiply_rows(X, s, slot, Q, K, [&](int free) { start_rows(s, free, dO, V, 0); }); /* S  = Q K^T */
    write_tile(s, X);
    clear(X);
    multiply_rows(X, s, slot, dO, V, then); /* dP = dO V^T */
    differentiate<false>(X, s, a, i0, n0, whole, to_scores);
}

template <int WIDTH>
__device__ static void meet_queries(shared_fp32<WIDTH> &s, const args &a, const span &q, const head &x, int i0)
{
    __syncthreads();
    if (threadIdx.x < s.ROWS) {
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

template <int WIDTH>
__global__ void __launch_bounds__(THREADS, 2) dq_portable(const __grid_constant__ args a, int tiles, int slices)
{
    extern __shared__ float4 memory[];
    auto &s = *(shared_fp32<WIDTH> *)memory;
    unsigned index = blockIdx.x;
    const int slice = index % slices * WIDTH;
    index /= slices;
    const unsigned heads = a.B * a.Hq;
    const int i0 = (tiles - 1 - index / heads) * s.ROWS; /* under a causal band the longest come first */
    index %= heads;
    meet_head(s, a, index / a.Hq, index % a.Hq);
    const span &q = s.sequence;
    const head &x = s.of;
    if (i0 >= q.rows)
        return;
    const int rows = min(s.ROWS, q.rows - i0);
    meet_queries(s, a, q, x, i0);

    float dQ[8][8];
    clear(dQ);
    const rows_of K = { a.k, s.column[0], a.D };
    const int first = min(s.low[0], s.low[rows - 1]), last = max(s.high[0], s.high[rows - 1]);
    const int inside = max(s.low[0], s.low[rows - 1]), outside = min(s.high[0], s.high[rows - 1]);
    int slot = 0;
    for (int n0 = first / 8 * 8; n0 < last; n0 += s.COLUMNS) {
        float dS[8][8];
        query_tile(dS, s, slot, a, i0, n0, n0 >= inside && n0 + s.COLUMNS <= outside, true,
                   [&](int free) { start_slice(s, free, K, 0, slice); });
        write_tile(s, dS);
        multiply_tile(dQ, s, slot, K, slice); /* dQ += dS K */
    }
    store_slice<WIDTH>(dQ, a.d_q, slice, a.D, a.accumulate, [&](int row) {
        return i0 + row < q.rows ? row_at(a.d_q, q.q_batch, x.h, q.q_row + i0 + row) : NOWHERE;
    });
}

/* ---- dK and dV --------------------------------------------------------------------------------------------------- */

/* Offsets, band and facts of the queries from i0 on. Here queries are columns. */
template <int WIDTH, int N>
__device__ static void meet_query_columns(shared_fp32<WIDTH, N> &s, const args &a, const span &q, const head &x, int i0)
{
    if (threadIdx.x < s.COLUMNS) {
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

/* Where shared memory is plenty, dK waits there for its turn, each thread's share with its owner, and so leaves the
 * registers for whole tiles of scores; else the tiles are half as wide. */
template <int WIDTH, bool PLENTY> struct shared_dkv : shared_fp32<WIDTH, PLENTY ? 8 : 4> {
    float4 waiting[PLENTY ? 16 : 1][THREADS];
};

template <bool PLENTY> __device__ static void put_away(float4 (*waiting)[THREADS], const float (&Y)[8][8])
{
#pragma unroll
    for (int e = 0; PLENTY && e < 16; e++)
        waiting[e][threadIdx.x] = *(const float4 *)&Y[e / 2][e % 2 * 4];
}

template <bool PLENTY> __device__ static void take_back(float (&Y)[8][8], const float4 (*waiting)[THREADS])
{
#pragma unroll
    for (int e = 0; PLENTY && e < 16; e++)
        *(float4 *)&Y[e / 2][e % 2 * 4] = waiting[e][threadIdx.x];
}

template <int WIDTH, bool PLENTY>
__global__ void __launch_bounds__(THREADS, 2) dkv_portable(const __grid_constant__ args a, int tiles, int slices)
{
    extern __shared__ float4 memory[];
    auto &all = *(shared_dkv<WIDTH, PLENTY> *)memory;
    shared_fp32<WIDTH, PLENTY ? 8 : 4> &s = all;
    unsigned index = blockIdx.x;
    const int slice = index % slices * WIDTH;
    index /= slices;
    const unsigned heads = a.B * a.Hk;
    const int n0 = index / heads * s.ROWS, hk = index % heads % a.Hk, b = index % heads / a.Hk;
    meet_head(s, a, b, hk * a.G);
    const span &q = s.sequence;
    if (n0 >= q.keys)
        return;
    if (threadIdx.x < s.ROWS) {
        int n = n0 + threadIdx.x;
        s.row[0][threadIdx.x] = n < q.keys ? key_at(a, q, a.k, hk, n) : NOWHERE;
        s.row[1][threadIdx.x] = n < q.keys ? key_at(a, q, a.v, hk, n) : NOWHERE;
    }
    const rows_of K = { a.k, s.row[0], a.D }, V = { a.v, s.row[1], a.Dv };
    const rows_of Q = { a.q, s.column[0], a.D }, dO = { a.d_o, s.column[1], a.Dv };
    float dK[8][8], dV[8][8];
    clear(dK);
    clear(dV);
    put_away<PLENTY>(all.waiting, dK);
    int first, last, first_of_end, last_of_end;
    band_of_key(a, q, n0, first, last);
    band_of_key(a, q, min(n0 + s.ROWS, q.keys) - 1, first_of_end, last_of_end);
    const int inside = max(first, first_of_end), outside = min(last, last_of_end);
    first = min(first, first_of_end), last = max(last, last_of_end);

    int slot = 0;
    for (int h = hk * a.G; h < (hk + 1) * a.G; h++) {
        meet_head(s, a, b, h);
        for (int i0 = first; i0 < last; i0 += s.COLUMNS) {
            float X[8][PLENTY ? 8 : 4];
            meet_query_columns(s, a, q, s.of, i0);
            start_rows(s, slot, K, Q, 0);
            clear(X);
            multiply_rows(X, s, slot, K, Q, [&](int free) { start_rows(s, free, V, dO, 0); }); /* S^T  = K Q^T */
            write_tile(s, X);
            clear(X);
            multiply_rows(X, s, slot, V, dO, [&](int free) { start_slice(s, free, dO, 0, slice); }); /* dP^T = V dO^T */
            differentiate<true>(X, s, a, i0, n0, i0 >= inside && i0 + s.COLUMNS <= outside, true);
            multiply_tile(dV, s, slot, dO, slice); /* dV += P^T dO */
            start_slice(s, slot, Q, 0, slice);
            __syncthreads();
            write_tile(s, X);
            take_back<PLENTY>(dK, all.waiting);
            multiply_tile(dK, s, slot, Q, slice); /* dK += dS^T Q */
            put_away<PLENTY>(all.waiting, dK);
            __syncthreads();
        }
    }
    take_back<PLENTY>(dK, all.waiting);
    auto own = [&](const view &t) {
        return [&](int row) { return n0 + row < q.keys ? key_at(a, q, t, hk, n0 + row) : NOWHERE; };
    };
    if (a.d_v.data)
        store_slice<WIDTH>(dV, a.d_v, slice, a.Dv, a.accumulate, own(a.d_v));
    if (a.d_k.data)
        store_slice<WIDTH>(dK, a.d_k, slice, a.D, a.accumulate, own(a.d_k));
}

/* ---- dbias ------------------------------------------------------------------------------------------------------- */

/* Where bias has one row, or one column, for all: those of a tile are summed too, in the shared tile, and the tiles of
 * the whole row or column are met by the one block that owns it. */
template <int WIDTH>
__device__ static void store_bias(const args &a, shared_fp32<WIDTH> &s, int b, int h, int i0, int n0, int keys)
{
    constexpr int ROWS = s.ROWS, COLUMNS = s.COLUMNS;
    const bool one_row = a.bias_shape[2] == 1, one_column = a.bias_shape[3] == 1;
    const int rows = one_row ? 1 : min(ROWS, a.bias_shape[2] - i0), columns = one_column ? 1 : min(COLUMNS, keys - n0);
    for (int e = threadIdx.x; e < rows * columns; e += blockDim.x) {
        const int row = e / columns, column = e % columns;
        float sum = 0.0f;
        for (int c = one_column ? 0 : column; c < (one_column ? COLUMNS : column + 1); c++)
            for (int r = one_row ? 0 : row; r < (one_row ? ROWS : row + 1); r++)
                sum += *tile_at(s, c, r);
        int64_t j = one_column ? 0 : a.col + (n0 + column) * a.col_step;
        store(a.d_bias, row_at(a.d_bias, b, h, one_row ? 0 : i0 + row) + j * a.d_bias.stride[3], sum);
    }
}

constexpr int BIAS_WIDTH = 64;

__global__ void __launch_bounds__(THREADS, 2)
    dbias_portable(const __grid_constant__ args a, int tiles, int key_tiles, int keys)
{
    extern __shared__ float4 memory[];
    auto &s = *(shared_fp32<BIAS_WIDTH> *)memory;
    constexpr int ROWS = s.ROWS, COLUMNS = s.COLUMNS;
    const bool one_row = a.bias_shape[2] == 1, one_column = a.bias_shape[3] == 1;
    const bool one_head = a.bias_shape[1] == 1, one_batch = a.bias_shape[0] == 1;
    unsigned index = blockIdx.x;
    const int own_n = index % key_tiles * COLUMNS, own_i = index / key_tiles % tiles * ROWS;
    index = index / key_tiles / tiles;
    const int own_h = index % a.bias_shape[1], own_b = index / a.bias_shape[1];

    const span &q = s.sequence;
    const head &x = s.of;
    float sum[8][8];
    int slot = 0;
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
                    float dS[8][8];
                    query_tile(dS, s, slot, a, i0, n0, false, false, [](int) {});
#pragma unroll
                    for (int r = 0; r < 8; r++)
#pragma unroll
                        for (int c = 0; c < 8; c++)
                            sum[r][c] += dS[r][c];
                    __syncthreads();
                }
            }
        }
    }
    write_tile(s, sum);
    __syncthreads();
    store_bias(a, s, own_b, own_h, own_i, own_n, keys);
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
    typedef shared_fp32<BIAS_WIDTH> shared;
    const int64_t tiles = tiles_of(shape[2], shared::ROWS);
    const int64_t key_tiles = shape[3] == 1 ? 1 : tiles_of(keys, shared::COLUMNS);
    return launch(dbias_portable, shape[0] * shape[1] * tiles * key_tiles, THREADS, sizeof(shared), x, a, (int)tiles,
                  (int)key_tiles, (int)keys);
}

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

template <int WIDTH> static heed_status run_dq(const args &a, const heed_exec *x)
{
    typedef shared_fp32<WIDTH> shared;
    int64_t tiles = tiles_of(a.Sq, shared::ROWS), slices = tiles_of(a.D, WIDTH);
    return launch(dq_portable<WIDTH>, tiles * slices * a.Hq * a.B, THREADS, sizeof(shared), x, a, (int)tiles,
                  (int)slices);
}

template <int WIDTH, bool PLENTY> static heed_status run_dkv(const args &a, const heed_exec *x)
{
    typedef shared_dkv<WIDTH, PLENTY> shared;
    int64_t keys = a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0;
    int64_t tiles = tiles_of(keys, shared::ROWS), slices = tiles_of(HEED_MAX(a.D, a.Dv), WIDTH);
    return launch(dkv_portable<WIDTH, PLENTY>, tiles * slices * a.Hk * a.B, THREADS, sizeof(shared), x, a, (int)tiles,
                  (int)slices);
}

template <int WIDTH> static heed_status run_dkv(const args &a, const heed_plan *plan, const heed_exec *x)
{
    return plan->device.shared_bytes < sizeof(shared_dkv<WIDTH, true>) ? run_dkv<WIDTH, false>(a, x)
                                                                       : run_dkv<WIDTH, true>(a, x);
}

size_t heed_backward_workspace_portable(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return heed_cuda_delta_bytes(p);
}

heed_status heed_backward_portable(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    prologue call(p, x);
    const args &a = call.a;
    heed_status status = call.status;
    if (!status && a.d_q.data)
        status = a.D <= 64 ? run_dq<64>(a, x) : run_dq<128>(a, x);
    if (!status && (a.d_k.data || a.d_v.data))
        status = a.D <= 64 && a.Dv <= 64 ? run_dkv<64>(a, plan, x) : run_dkv<128>(a, plan, x);
    return status;
}
