/* Backward in plain fp32 arithmetic, for every problem there is, without atomic sums: each result has one owner, or several
 * that take turns, and is summed in a fixed order. A block owns 128 keys, or 64 of a wide head, and meets the queries of its
 * group's heads; dK and dV stay with it, dQ is added to sums in memory in the order of the keys. */
#include "differentiate_fp32.cuh"
#include "launch.cuh"

/* Offsets, band and facts of the queries from i0 on. Here queries are columns. */
template <int WIDTH>
__device__ static void meet_query_columns(shared<WIDTH> &s, const args &a, const span &q, const head &x, int i0)
{
    if (threadIdx.x < s.COLUMNS) {
        const int i = i0 + threadIdx.x;
        const row_facts f = facts_of(a, q, x, i);
        s.column[0][threadIdx.x] = row_or_zeros(a.q, i < q.rows ? row_at(a.q, q.q_batch, x.h, q.q_row + i) : NOWHERE);
        s.column[1][threadIdx.x] = row_or_zeros(a.d_o,
                                                i < q.rows ? row_at(a.d_o, q.q_batch, x.h, q.q_row + i) : NOWHERE);
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
    const unsigned thread = this_thread();
#pragma unroll
    for (int e = 0; e < 16; e++) { /* four rows as write_tile() has them */
        const int r = e % 2 * 4, c = e / 2;
        const float4 theirs = waiting[e][thread];
        waiting[e][thread] = make_float4(Y[r + 1][c], Y[r][c], Y[r + 3][c], Y[r + 2][c]);
        Y[r + 1][c] = theirs.x, Y[r][c] = theirs.y, Y[r + 3][c] = theirs.z, Y[r + 2][c] = theirs.w;
    }
}

/* Turing's shared memory has no place for a second result: there each gradient has a launch of its own. */
#if HEED_TURING
constexpr bool BOTH = false;
#else
constexpr bool BOTH = true;
#endif

/* Where dQ is summed, and how far the sums are: each tile of keys adds to UNIT queries at a time, the last ones first, after
 * the tile before it. So a row's sum is always taken in the order of the keys. Blocks are numbered as they begin: those
 * that one waits for are in work or done. */
struct query_sums {
    view to;     /* fp32 */
    int *passed; /* of each block, units that it has passed, all heads'; before them how many have begun. NULL: no dQ */
    int units;   /* of a head */
    int parts;   /* blocks that share a tile of keys' queries: so many rows each */
    int part_rows;
};

/* Adds a thread's share of a unit's dQ to the sums at `at`, for queries [from, to) of the unit. Some rows at once: there are
 * no registers for all. They are read past the first cache, which may hold what others have changed since. */
template <int WIDTH>
__device__ static void add_queries(const float (&Z)[8][8], const view &t, float *at, int from, int to, int first,
                                   int width)
{
    typedef unit_of<WIDTH> unit;
    constexpr int SOME = 4;
    const int row = unit::row(), column = first + shared<WIDTH>::column_of(0);
    at += row * t.stride[2] + column * t.stride[3];
#pragma unroll
    for (int some = 0; some < 8; some += SOME) {
        float x[SOME][8] = {};
        auto each = [&](auto four, auto one) {
#pragma unroll
            for (int r = some; r < some + SOME; r++) {
                if (row + unit::down(r) < from || row + unit::down(r) >= to)
                    continue;
#pragma unroll
                for (int c = 0; c < 8; c += 4) {
                    const int on = shared<WIDTH>::columns_on(c);
                    float *const there = at + unit::down(r) * t.stride[2] + on * t.stride[3];
                    if (t.vector && column + on + 4 <= width)
                        four(&x[r - some][c], &Z[r][c], (float4 *)there);
                    else
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (column + on + e < width)
                                one(x[r - some][c + e], Z[r][c + e], there + e * t.stride[3]);
                }
            }
        };
        each([](float *x, const float *, const float4 *there) { *(float4 *)x = __ldcg(there); },
             [](float &x, float, const float *there) { x = __ldcg(there); })
            ;
        each([](float *x, const float *z,
                float4 *there) { *there = make_float4(x[0] + z[0], x[1] + z[1], x[2] + z[2], x[3] + z[3]); },
             [](float x, float z, float *there) { *there = x + z; })
            ;
    }
}

/* A unit's dQ from the threads' shares into the shared tile, by rows, LINE apart; what a whole block has there after the
 * next barrier is the sum of both halves. Nobody reads the tile any more. */
template <int WIDTH> struct unit_tile {
    typedef unit_of<WIDTH> unit;
    static constexpr int LINE = WIDTH + 4, FOURS = WIDTH / 4, AT_ONCE = 8;
    static __device__ void write(shared<WIDTH> &s, const float (&Z)[8][8])
    {
        float *own = s.tile + unit::row() * LINE + s.column_of(0);
#pragma unroll
        for (int half = 0; half < unit::HALVES; half++) {
            __syncthreads();
            if (half == unit::half())
#pragma unroll
                for (int r = 0; r < 8; r++)
#pragma unroll
                    for (int c = 0; c < 8; c += 4) {
                        asm volatile("" ::: "memory"); /* four at a time */
                        float4 *const to = (float4 *)(own + unit::down(r) * LINE + s.columns_on(c));
                        const float4 x = half ? *to : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                        *to = make_float4(x.x + Z[r][c], x.y + Z[r][c + 1], x.z + Z[r][c + 2], x.w + Z[r][c + 3]);
                    }
        }
    }
    /* Adds queries [from, to) of the unit to the sums at `at`, its first row's. */
    static __device__ void add(const shared<WIDTH> &s, const view &t, float *at, int from, int to, int first, int width)
    {
        const int thread = this_thread(), row = thread / FOURS, column = thread % FOURS * 4;
        const bool whole = t.vector && first + column + 4 <= width;
        const float *own = s.tile + row * LINE + column;
        at += row * t.stride[2] + (first + column) * t.stride[3];
#pragma unroll 1
        for (int r = 0; r < UNIT; r += AT_ONCE * (THREADS / FOURS)) {
            float x[AT_ONCE][4] = {}; /* read past the first cache, which may hold what others have changed since */
            auto each = [&](auto four, auto one) {
#pragma unroll
                for (int e = 0; e < AT_ONCE; e++) {
                    const int down = r + e * (THREADS / FOURS);
                    float *const there = at + down * t.stride[2];
                    if (row + down < from || row + down >= to)
                        continue;
                    if (whole)
                        four(x[e], (float4 *)there, own + down * LINE);
                    else
#pragma unroll
                        for (int c = 0; c < 4; c++)
                            if (first + column + c < width)
                                one(x[e][c], there + c * t.stride[3], own[down * LINE + c]);
                }
            };
            each([](float(&x)[4], const float4 *there, const float *) { *(float4 *)x = __ldcg(there); },
                 [](float &x, const float *there, float) { x = __ldcg(there); })
                ;
            each([](float(&x)[4], float4 *there,
                    const float *y) { *there = make_float4(x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]); },
                 [](float x, float *there, float y) { *there = x + y; })
                ;
        }
    }
};

template <int WIDTH>
__global__ void __launch_bounds__(THREADS, 2)
    backward_portable(const __grid_constant__ args a, const __grid_constant__ query_sums sums, int tiles, int slices,
                      head_groups groups, bool wants_k, bool wants_v)
{
    extern __shared__ float4 memory[];
    auto &all = *(shared_dkv<WIDTH> *)memory;
    shared<WIDTH> &s = all;
    __shared__ struct {
        unsigned index, before; /* before: the block of the tile of keys before this one */
        int n0, b, hk, slice, first, last, inside, outside;
        int before_first, before_last; /* units that the tile of keys before this one adds to */
    } own;                             /* looked at too rarely for registers */
    if (threadIdx.x == 0) {
        own.index = sums.passed ? atomicAdd(sums.passed - 1, 1) : blockIdx.x; /* those before are in work or done */
        const place at(own.index / sums.parts / slices, tiles, groups);
        own.before = own.index - at.heads * slices * sums.parts;
        own.slice = own.index / sums.parts % slices * WIDTH;
        own.n0 = at.tile * s.ROWS, own.hk = at.head % a.Hk, own.b = at.head / a.Hk;
    }
    __syncthreads();
    meet_head(s, a, own.b, own.hk * a.G);
    const span &q = s.sequence;
    if (own.n0 >= q.keys)
        return;
    if (threadIdx.x < s.ROWS) {
        int n = own.n0 + threadIdx.x;
        s.row[0][threadIdx.x] = row_or_zeros(a.k, n < q.keys ? key_at(a, q, a.k, own.hk, n) : NOWHERE);
        s.row[1][threadIdx.x] = row_or_zeros(a.v, n < q.keys ? key_at(a, q, a.v, own.hk, n) : NOWHERE);
    }
    if (threadIdx.x == 0) {
        int first, last, first_of_end, last_of_end;
        const int64_t from = (int64_t)(own.index % sums.parts) * sums.part_rows, to = from + sums.part_rows;
        own.before_first = own.before_last = 0;
        if (own.n0) {
            band_of_key(a, q, own.n0 - s.ROWS, first, last);
            band_of_key(a, q, own.n0 - 1, first_of_end, last_of_end);
            first = clamp(from, min(first, first_of_end), INT32_MAX), last = clamp(to, 0, max(last, last_of_end));
            if (first < last) /* else it adds to none */
                own.before_first = first / UNIT, own.before_last = (last - 1) / UNIT + 1;
        }
        band_of_key(a, q, own.n0, first, last);
        band_of_key(a, q, min(own.n0 + s.ROWS, q.keys) - 1, first_of_end, last_of_end);
        own.inside = max(first, first_of_end), own.outside = min(last, last_of_end);
        own.first = clamp(from, min(first, first_of_end), INT32_MAX);
        own.last = clamp(to, 0, max(last, last_of_end));
    }
    __syncthreads();
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
        const int begin = own.first / UNIT * UNIT;
        for (int i0 = begin + (own.last - begin - 1) / s.COLUMNS * s.COLUMNS; own.first < own.last && i0 >= begin;
             i0 -= s.COLUMNS) {
            float X[8][8];
            meet_query_columns(s, a, q, s.of, i0);
            start_rows(s, slot, K, Q);
            clear(X);
            multiply_rows<PART>(X, s, slot, K, Q, [](int) {}); /* S^T  = K Q^T */
            start_rows(s, slot, V, dO);
            write_tile(s, X);
            clear(X);
            multiply_rows<PART>(X, s, slot, V, dO, [&](int free) { /* dP^T = V dO^T */
                                                                   if (wants_v)
                                                                       start_slice(s, free, dO, 0, own.slice);
            });
            differentiate<true>(X, s, a, i0, own.n0, i0 >= own.inside && i0 + s.COLUMNS <= own.outside, true);
            if (wants_v)
                multiply_tile<PART>(Y, s, slot, dO, own.slice, own.last - i0); /* dV += P^T dO */
            if (wants_k) {
                start_slice(s, slot, Q, 0, own.slice);
                __syncthreads();
                write_tile(s, X);
                if (BOTH)
                    exchange(Y, all.waiting);
                multiply_tile<PART>(Y, s, slot, Q, own.slice, own.last - i0); /* dK += dS^T Q */
                if (BOTH)
                    exchange(Y, all.waiting);
            }
            __syncthreads();
            if (sums.passed) {
                turn_tile(s, X);
#pragma unroll 1
                for (int column = min(s.COLUMNS, own.last - i0) - 1 & -UNIT; column >= 0; column -= UNIT) {
                    float Z[8][8];
                    clear(Z);
                    start_slice(s, slot, K, 0, own.slice);
                    const int i = i0 + column, number = i / UNIT, turn = (h + 1) * sums.units - number;
                    int seen = turn; /* asked for before the products: mostly it is there when they are done */
                    if (threadIdx.x == 0 && number >= own.before_first && number < own.before_last)
                        seen = see_turn(sums.passed + own.before);
                    multiply_turned<PART>(Z, s, slot, K, own.slice, column); /* dQ += dS K */
                    while (seen < turn)
                        seen = see_turn(sums.passed + own.before);
                    float *const to = (float *)sums.to.data + row_at(sums.to, q.q_batch, s.of.h, q.q_row + i);
                    if constexpr (WIDTH == 64) { /* the tile has been used up: there is one unit */
                        unit_tile<WIDTH>::write(s, Z);
                        __syncthreads();
                        unit_tile<WIDTH>::add(s, sums.to, to, own.first - i, own.last - i, own.slice, a.D);
                    } else {
                        __syncthreads();
                        add_queries<WIDTH>(Z, sums.to, to, own.first - i, own.last - i, own.slice, a.D);
                    }
                    __syncthreads();
                    if (threadIdx.x == 0)
                        pass_turn(sums.passed + own.index, turn);
                }
            }
        }
    }
    auto place = [&](const view &t) {
        return [&](int row) { return own.n0 + row < q.keys ? key_at(a, q, t, own.hk, own.n0 + row) : NOWHERE; };
    };
    if (wants_v)
        store_slice(Y, s, a.d_v, own.slice, a.Dv, a.accumulate, place(a.d_v));
    if (BOTH)
        exchange(Y, all.waiting);
    if (wants_k)
        store_slice(Y, s, a.d_k, own.slice, a.D, a.accumulate, place(a.d_k));
}

/* d_q from its sums, where those could not be in d_q itself. */
__global__ void finish_dq(const __grid_constant__ args a, const __grid_constant__ view sums, int64_t count)
{
    for (int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x; n < count; n += (int64_t)gridDim.x * THREADS) {
        const int64_t row = n / a.D, c = n % a.D, h = row / a.q_rows % a.Hq, b = row / a.q_rows / a.Hq;
        const int64_t at = row_at(a.d_q, b, h, row % a.q_rows) + c * a.d_q.stride[3];
        const float sum = load(sums, row_at(sums, b, h, row % a.q_rows) + c);
        store(a.d_q, at, a.accumulate ? load(a.d_q, at) + sum : sum);
    }
}

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

/* What is launched, and the workspace: delta, then the turns, then dQ's sums where d_q, not being fp32, cannot hold them.
 * Few tiles of keys, which leave multiprocessors idle, are met twice: dQ has a launch of its own then, in which several
 * blocks share the queries of each. On Turing it has one anyway, as has each of dK and dV: see BOTH. */
struct outline {
    bool wide, each, wants_k, wants_v, wants_q, q_alone;
    int64_t tiles, slices, blocks, parts, part_rows;
    size_t turns, sums, bytes;
    outline(const heed_problem *p, const heed_plan *plan)
    {
        wide = p->D > 64 || p->Dv > 64;
        each
            = plan->device.arch < 80;
        wants_q = p->g.d_q.data, wants_k = p->g.d_k.data, wants_v = p->g.d_v.data;
        slices = tiles_of(HEED_MAX(p->D, p->Dv), wide ? 128 : 64);
        tiles = tiles_of(p->full.keys, wide ? shared<128>::ROWS : shared<64>::ROWS);
        blocks = tiles * slices * p->Hk * p->B;
        const int64_t room = 2 * plan->device.units, most = tiles_of(p->Sq, 2 * UNIT);
        q_alone = wants_q && (each || !(wants_k || wants_v) || 3 * blocks < room);
        parts = q_alone && blocks ? HEED_MAX(1, HEED_MIN(room / blocks, most)) : 1;
        part_rows = HEED_MAX(1, tiles_of(most, parts)) * 2 * UNIT;
        turns = (heed_cuda_delta_bytes(p) + 15) / 16 * 16;
        sums = bytes = turns + ((size_t)(blocks * parts + 1) * sizeof(int) + 15) / 16 * 16;
        if (wants_q && p->g.d_q.dtype != HEED_F32)
            bytes += (size_t)(p->a.q.shape[0] * p->Hq * p->a.q.shape[2] * tiles_of(p->D, 4)) * 16;
    }
};

size_t heed_backward_workspace_portable(const heed_problem *p, const heed_plan *plan) { return outline(p, plan).bytes; }

/* Sums of dQ and turns, all zero; but sums that lie in d_q start with what is there where that is wanted. */
static heed_status prepare_sums(const heed_problem *p, const args &a, const outline &o, const heed_exec *x,
                                query_sums *sums)
{
    const int64_t *shape = p->a.q.shape, counts[4] = { 1, 1, 1, o.blocks * o.parts + 1 };
    view turns = { (char *)x->workspace + o.turns, { 1, 1, 1, 1 }, HEED_F32, 1 };
    bool filled = a.accumulate || a.lengths_q || a.offsets_q; /* see heed_cuda_prepare_backward() */
    sums->to = a.d_q;
    sums->passed = (int *)turns.data + 1;
    sums->units = (int)tiles_of(a.Sq, UNIT);
    sums->parts = (int)o.parts, sums->part_rows = (int)HEED_MIN(o.part_rows, INT32_MAX);
    if (a.d_q.dtype != HEED_F32) {
        const int64_t width = tiles_of(a.D, 4) * 4;
        sums->to = {
            (char *)x->workspace + o.sums, { shape[1] * shape[2] * width, shape[2] * width, width, 1 }, HEED_F32, 1
        };
        filled = false;
    }
    heed_status status = heed_cuda_fill(turns, counts, 0.0f, x);
    return status || filled ? status : heed_cuda_fill(sums->to, shape, 0.0f, x);
}

/* Tiles of a head wait for each other when they add to dQ, the longer the wider it is and the more of them are in work at a
 * time: there groups pay only while heads are short. */
template <int WIDTH>
static heed_status run(const args &a, const outline &o, const query_sums &sums, bool wants_k, bool wants_v,
                       const heed_plan *plan, const heed_exec *x)
{
    const int64_t heads = (int64_t)a.Hk * a.B;
    const bool grouped = WIDTH == 64 || (o.tiles <= 16 && !is_banded(a));
    const head_groups groups(heads, grouped ? heads_at_once(plan) : heads, 0);
    return launch(backward_portable<WIDTH>, o.blocks * sums.parts, THREADS,
                  o.each ? sizeof(shared<WIDTH>) : sizeof(shared_dkv<WIDTH>), x, a, sums, (int)o.tiles, (int)o.slices,
                  groups, wants_k, wants_v);
}

heed_status heed_backward_portable(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    prologue call(p, x);
    const args &a = call.a;
    const outline o(p, plan);
    const auto gradients = o.wide ? run<128> : run<64>;
    query_sums sums = {}, none = {};
    none.parts = 1, none.part_rows = INT32_MAX;
    heed_status status = call.status;
    if (!status && o.wants_q)
        status = prepare_sums(p, a, o, x, &sums);
    if (!status && o.each && o.wants_k && o.wants_v)
        status = gradients(a, o, none, true, false, plan, x);
    if (!status && (o.wants_k || o.wants_v))
        status = gradients(a, o, o.wants_q && !o.q_alone ? sums : none, o.wants_k && !(o.each && o.wants_v), o.wants_v,
                           plan, x);
    if (!status && o.q_alone)
        status = gradients(a, o, sums, false, false, plan, x);
    if (status || !o.wants_q || sums.to.data == a.d_q.data)
        return status;
    const int64_t count = p->a.q.shape[0] * p->Hq * p->a.q.shape[2] * p->D;
    return launch(finish_dq, HEED_MIN(tiles_of(count, THREADS), 65536), THREADS, 0, x, a, sums.to, count);
}
