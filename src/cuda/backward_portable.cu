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
#include "scores_fp32.cuh"

template <int WIDTH> using shared = shared_fp32<WIDTH>;

constexpr int PART = 8; /* see add_products() */

/* Queries whose scores are finished at once: on Blackwell there are no registers for more. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int AT_ONCE = 1;
#else
constexpr int AT_ONCE = 4;
#endif

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

/* What is known of each of the thread's queries. */
template <bool KEY_MAJOR, int WIDTH> __device__ static void load_queries(float (&fact)[8], const float *facts)
{
    typedef shared<WIDTH> s;
    facts += KEY_MAJOR ? s::column_of(0) : s::row_of(0);
    load_four(fact, facts);
    load_four(fact + 4, facts + (KEY_MAJOR ? s::columns_on(4) : s::rows_down(4)));
}

/* A tile of S, parked in shared memory, and dP in X become P after dropout, as dV wants it, where S was, and dS in X.
 * With to_scores dS is taken with respect to q.k, else with respect to S, as dbias wants it. whole: the band hides
 * nothing in this tile. */
template <bool KEY_MAJOR, int WIDTH>
__device__ static void differentiate(float (&X)[8][8], shared<WIDTH> &s, const args &a, int i0, int n0, bool whole,
                                     bool to_scores)
{
    const span &q = s.sequence;
    const head &x = s.of;
    const bool capped = a.softcap > 0;
    uint64_t kept = 0;
    auto keep = [&](int r, int c) { return kept >> (KEY_MAJOR ? 8 * c + r : 8 * r + c) & 1 ? a.keep_scale : 0.0f; };
    auto query = [](int r, int c) { return KEY_MAJOR ? c : r; };
    float fact[8]; /* of the thread's queries */
    load_queries<KEY_MAJOR, WIDTH>(fact, s.delta);
    if (capped)
        for_each_query<KEY_MAJOR, 1>(s, i0, n0, [&](auto &S) {
#pragma unroll
            for (int c = 0; c < 8; c++)
                S.X[0][c] = tanhf(S.X[0][c] * a.scale / a.softcap);
        });
    if (a.drop_below) {
        kept = draw_all<WIDTH, KEY_MAJOR>(a, q, x, i0, n0);
#pragma unroll
        for (int r = 0; r < 8; r++)
#pragma unroll
            for (int c = 0; c < 8; c++)
                X[r][c] *= keep(r, c);
    }
#pragma unroll
    for (int r = 0; r < 8; r++)
#pragma unroll
        for (int c = 0; c < 8; c++)
            X[r][c] -= fact[query(r, c)];
    float *own = s.own();
    if (capped && to_scores)
#pragma unroll
        for (int r = 0; r < 8; r++)
#pragma unroll
            for (int c = 0; c < 8; c++) {
                const float u = own[s.at(r, c)];
                X[r][c] *= 1.0f - u * u;
            }
    const bool plain = whole && !has_extras(a);
    auto finish = [&](auto &S) { finish_scores(S, capped ? a.softcap : a.scale, a, q, x, whole); };
    if (!plain && AT_ONCE == 4 && scores_in_fours(a, q))
        for_each_query<KEY_MAJOR, AT_ONCE>(s, i0, n0, finish);
    else if (!plain)
        for_each_query<KEY_MAJOR, 1>(s, i0, n0, finish);
    const float factor = plain ? a.scale : 1.0f, slope = to_scores ? a.scale : 1.0f;
    load_queries<KEY_MAJOR, WIDTH>(fact, s.lse);
#pragma unroll
    for (int c = 0; c < 8; c++)
#pragma unroll
        for (int half = 0; half < 8; half += 4) {
            asm volatile("" ::: "memory"); /* four at a time: there are no registers for all of S */
            float four[4], *at = own + s.four_at(half, c);
            load_four(four, at);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int r = half + (e ^ 1);
                /* at most 0, but for the rounding of large numbers; NaN stays */
                const float P = exp2_fast(min_or_nan(four[e] * factor - fact[query(r, c)], 0.0f) * LOG2E);
                X[r][c] = P == 0.0f ? 0.0f : P * X[r][c] * slope; /* P = 0 hides the pair, whatever dP came out as */
                four[e] = P;
            }
            if (KEY_MAJOR)
                *(float4 *)at = make_float4(four[0], four[1], four[2], four[3]);
        }
    if (KEY_MAJOR && a.drop_below)
        for_each_query<KEY_MAJOR, 1>(s, i0, n0, [&](auto &P) {
#pragma unroll
            for (int c = 0; c < 8; c++)
                P.X[0][c] *= kept >> c & 1 ? a.keep_scale : 0.0f;
            kept >>= 8;
        });
}

/* ---- dQ ---------------------------------------------------------------------------------------------------------- */

/* dS of the tile at keys n0, from offsets and facts in shared memory, into X. then(slot): see multiply_rows(). */
template <int WIDTH, class Then>
__device__ static void query_tile(float (&X)[8][8], shared<WIDTH> &s, int &slot, const args &a, int i0, int n0,
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
    start_rows(s, slot, Q, K);
    clear(X);
    multiply_rows<PART>(X, s, slot, Q, K, [](int) {}); /* S  = Q K^T */
    start_rows(s, slot, dO, V);
    write_tile(s, X);
    clear(X);
    multiply_rows<PART>(X, s, slot, dO, V, then); /* dP = dO V^T */
    differentiate<false>(X, s, a, i0, n0, whole, to_scores);
}

template <int WIDTH>
__device__ static void meet_queries(shared<WIDTH> &s, const args &a, const span &q, const head &x, int i0)
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
    auto &s = *(shared<WIDTH> *)memory;
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
        multiply_tile<PART>(dQ, s, slot, K, slice); /* dQ += dS K */
    }
    __syncthreads();
    store_slice(dQ, s, a.d_q, slice, a.D, a.accumulate, [&](int row) {
        return i0 + row < q.rows ? row_at(a.d_q, q.q_batch, x.h, q.q_row + i0 + row) : NOWHERE;
    });
}

/* ---- dK and dV --------------------------------------------------------------------------------------------------- */

/* Offsets, band and facts of the queries from i0 on. Here queries are columns. */
template <int WIDTH>
__device__ static void meet_query_columns(shared<WIDTH> &s, const args &a, const span &q, const head &x, int i0)
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

/* dK and dV take turns in registers: one waits in shared memory, each thread's share with its owner. */
template <int WIDTH> struct shared_dkv : shared<WIDTH> {
    float4 waiting[16][THREADS];
};

__device__ static void exchange(float (&Y)[8][8], float4 (*waiting)[THREADS])
{
    const int thread = this_thread();
#pragma unroll
    for (int e = 0; e < 16; e++) { /* four rows as write_tile() has them */
        const int r = e % 2 * 4, c = e / 2;
        const float4 theirs = waiting[e][thread];
        waiting[e][thread] = make_float4(Y[r + 1][c], Y[r][c], Y[r + 3][c], Y[r + 2][c]);
        Y[r + 1][c] = theirs.x, Y[r][c] = theirs.y, Y[r + 3][c] = theirs.z, Y[r + 2][c] = theirs.w;
    }
}

/* Turing's shared memory has no place for a second result: there each of dK and dV has a launch of its own. */
#if HEED_TURING
constexpr bool BOTH = false;
#else
constexpr bool BOTH = true;
#endif

template <int WIDTH>
__global__ void __launch_bounds__(THREADS, 2)
    dkv_portable(const __grid_constant__ args a, int tiles, int slices, bool wants_k, bool wants_v)
{
    extern __shared__ float4 memory[];
    auto &all = *(shared_dkv<WIDTH> *)memory;
    shared<WIDTH> &s = all;
    __shared__ struct {
        int n0, b, hk, first, last, inside, outside;
    } own; /* looked at too rarely for registers */
    const int slice = blockIdx.x % slices * WIDTH;
    if (threadIdx.x == 0) {
        const unsigned index = blockIdx.x / slices, heads = a.B * a.Hk;
        own.n0 = index / heads * s.ROWS, own.hk = index % heads % a.Hk, own.b = index % heads / a.Hk;
    }
    __syncthreads();
    meet_head(s, a, own.b, own.hk * a.G);
    const span &q = s.sequence;
    if (own.n0 >= q.keys)
        return;
    if (threadIdx.x < s.ROWS) {
        int n = own.n0 + threadIdx.x;
        s.row[0][threadIdx.x] = n < q.keys ? key_at(a, q, a.k, own.hk, n) : NOWHERE;
        s.row[1][threadIdx.x] = n < q.keys ? key_at(a, q, a.v, own.hk, n) : NOWHERE;
    }
    if (threadIdx.x == 0) {
        int first, last, first_of_end, last_of_end;
        band_of_key(a, q, own.n0, first, last);
        band_of_key(a, q, min(own.n0 + s.ROWS, q.keys) - 1, first_of_end, last_of_end);
        own.inside = max(first, first_of_end), own.outside = min(last, last_of_end);
        own.first = min(first, first_of_end), own.last = max(last, last_of_end);
    }
    const rows_of K = { a.k, s.row[0], a.D }, V = { a.v, s.row[1], a.Dv };
    const rows_of Q = { a.q, s.column[0], a.D }, dO = { a.d_o, s.column[1], a.Dv };
    float Y[8][8]; /* dV, and dK in its turn */
    clear(Y);
    if (BOTH) {
        exchange(Y, all.waiting);
        clear(Y);
    }
    int slot = 0;
    for (int h = 0; h < a.G; h++) {
        meet_head(s, a, own.b, own.hk * a.G + h);
        for (int i0 = own.first; i0 < own.last; i0 += s.COLUMNS) {
            float X[8][8];
            meet_query_columns(s, a, q, s.of, i0);
            start_rows(s, slot, K, Q);
            clear(X);
            multiply_rows<PART>(X, s, slot, K, Q, [](int) {}); /* S^T  = K Q^T */
            start_rows(s, slot, V, dO);
            write_tile(s, X);
            clear(X);
            multiply_rows<PART>(X, s, slot, V, dO, [&](int free) { /* dP^T = V dO^T */
                                                                   if (BOTH || wants_v)
                                                                       start_slice(s, free, dO, 0, slice);
            });
            differentiate<true>(X, s, a, i0, own.n0, i0 >= own.inside && i0 + s.COLUMNS <= own.outside, true);
            if (BOTH || wants_v)
                multiply_tile<PART>(Y, s, slot, dO, slice); /* dV += P^T dO */
            if (BOTH || wants_k) {
                start_slice(s, slot, Q, 0, slice);
                __syncthreads();
                write_tile(s, X);
                if (BOTH)
                    exchange(Y, all.waiting);
                multiply_tile<PART>(Y, s, slot, Q, slice); /* dK += dS^T Q */
                if (BOTH)
                    exchange(Y, all.waiting);
            }
            __syncthreads();
        }
    }
    auto place = [&](const view &t) {
        return [&](int row) { return own.n0 + row < q.keys ? key_at(a, q, t, own.hk, own.n0 + row) : NOWHERE; };
    };
    if (wants_v)
        store_slice(Y, s, a.d_v, slice, a.Dv, a.accumulate, place(a.d_v));
    if (BOTH)
        exchange(Y, all.waiting);
    if (wants_k)
        store_slice(Y, s, a.d_k, slice, a.D, a.accumulate, place(a.d_k));
}

/* ---- dbias ------------------------------------------------------------------------------------------------------- */

/* Where bias has one row, or one column, for all: those of a tile are summed too, in the shared tile, and the tiles of
 * the whole row or column are met by the one block that owns it. */
template <int WIDTH>
__device__ static void store_bias(const args &a, shared<WIDTH> &s, int b, int h, int i0, int n0, int keys)
{
    constexpr int ROWS = s.ROWS, COLUMNS = s.COLUMNS;
    const bool one_row = a.bias_shape[2] == 1, one_column = a.bias_shape[3] == 1;
    const int rows = one_row ? 1 : min(ROWS, a.bias_shape[2] - i0), columns = one_column ? 1 : min(COLUMNS, keys - n0);
    for (int e = threadIdx.x; e < rows * columns; e += blockDim.x) {
        const int row = e / columns, column = e % columns;
        float sum = 0.0f;
        for (int c = one_column ? 0 : column; c < (one_column ? COLUMNS : column + 1); c++)
            for (int r = one_row ? 0 : row; r < (one_row ? ROWS : row + 1); r++)
                sum += s.tile[c * s.LINE + (r ^ 1)];
        int64_t j = one_column ? 0 : a.col + (n0 + column) * a.col_step;
        store(a.d_bias, row_at(a.d_bias, b, h, one_row ? 0 : i0 + row) + j * a.d_bias.stride[3], sum);
    }
}

constexpr int BIAS_WIDTH = 64;

__global__ void __launch_bounds__(THREADS, 2)
    dbias_portable(const __grid_constant__ args a, int tiles, int key_tiles, int keys)
{
    extern __shared__ float4 memory[];
    auto &s = *(shared<BIAS_WIDTH> *)memory;
    constexpr int ROWS = s.ROWS, COLUMNS = s.COLUMNS;
    __shared__ int own_b, own_h, own_i, own_n; /* looked at too rarely for registers */
    const bool one_row = a.bias_shape[2] == 1, one_column = a.bias_shape[3] == 1;
    const bool one_head = a.bias_shape[1] == 1, one_batch = a.bias_shape[0] == 1;
    if (threadIdx.x == 0) {
        unsigned index = blockIdx.x;
        own_n = index % key_tiles * COLUMNS, own_i = index / key_tiles % tiles * ROWS;
        index = index / key_tiles / tiles;
        own_h = index % a.bias_shape[1], own_b = index / a.bias_shape[1];
    }
    __syncthreads();

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
                for (int n0 = own_n; n0 < (one_column ? q.keys : min(q.keys, own_n + 1)); n0 += COLUMNS) {
                    const int end = min(ROWS, q.rows - i0) - 1;
                    if (n0 >= max(s.high[0], s.high[end]) || n0 + COLUMNS <= min(s.low[0], s.low[end]))
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
    typedef shared<BIAS_WIDTH> own;
    const int64_t tiles = tiles_of(shape[2], own::ROWS);
    const int64_t key_tiles = shape[3] == 1 ? 1 : tiles_of(keys, own::COLUMNS);
    return launch(dbias_portable, shape[0] * shape[1] * tiles * key_tiles, THREADS, sizeof(own), x, a, (int)tiles,
                  (int)key_tiles, (int)keys);
}

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

template <int WIDTH> static heed_status run_dq(const args &a, const heed_exec *x)
{
    int64_t tiles = tiles_of(a.Sq, shared<WIDTH>::ROWS), slices = tiles_of(a.D, WIDTH);
    return launch(dq_portable<WIDTH>, tiles * slices * a.Hq * a.B, THREADS, sizeof(shared<WIDTH>), x, a, (int)tiles,
                  (int)slices);
}

template <int WIDTH>
static heed_status run_dkv(const args &a, bool wants_k, bool wants_v, const heed_plan *plan, const heed_exec *x)
{
    const bool one = plan->device.arch < 80; /* see BOTH */
    if (one && wants_k && wants_v) {
        heed_status status = run_dkv<WIDTH>(a, true, false, plan, x);
        return status ? status : run_dkv<WIDTH>(a, false, true, plan, x);
    }
    int64_t keys = a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0;
    int64_t tiles = tiles_of(keys, shared<WIDTH>::ROWS), slices = tiles_of(HEED_MAX(a.D, a.Dv), WIDTH);
    return launch(dkv_portable<WIDTH>, tiles * slices * a.Hk * a.B, THREADS,
                  one ? sizeof(shared<WIDTH>) : sizeof(shared_dkv<WIDTH>), x, a, (int)tiles, (int)slices, wants_k,
                  wants_v);
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
    const bool wants_k = a.d_k.data, wants_v = a.d_v.data;
    if (!status && (wants_k || wants_v))
        status = a.D <= 64 && a.Dv <= 64 ? run_dkv<64>(a, wants_k, wants_v, plan, x)
                                         : run_dkv<128>(a, wants_k, wants_v, plan, x);
    return status;
}
