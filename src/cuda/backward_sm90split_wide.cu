/* Backward for fp32 on Hopper, head sizes from 129 to 256. Two numbers of fp16 for each element of 64 rows of two tensors take
 * more than half of the shared memory, so a block owns 64 rows for good and meets the other side one tile of few rows after the
 * other:
 *
 *     owner of     A1 A2    B1 B2    first warpgroup                   second
 *     keys         K  V     Q  dO    S = A1 B1^T, P, dV += P B2        dP = A2 B2^T, dS, dK += dS B1
 *     queries      Q  dO    K  V     S = A1 B1^T, P, dQ += dS B1       dP = A2 B2^T, dS, dQ += dS B1, half of the columns each
 *
 * P passes from the first to the second, and dS of queries back, from a thread to the one at the same place of the other
 * warpgroup, as both hold the same elements. Results leave no registers for a second set of as many sums: products are added
 * to them 64 columns at a time.
 *
 * What is marked backward_splitwide.cu computes again: see backward_sm90split.cuh. */
#include "backward_sm90split.cuh"

/* TERMS: of scores_split.cuh. */
template <int HEAD_, int TILE_, int TERMS_> struct wide_shape {
    static constexpr int TERMS = TERMS_;
    static constexpr int HEAD = HEAD_, TILE = TILE_, D = 2 * HEAD, PANELS = HEAD / 64;
    static constexpr int THREADS = 3 * 128, FEW = 40, MANY = 232;
    static constexpr int FIRST = (PANELS + 1) / 2 * 64; /* columns of dQ that the first warpgroup has */
};

struct wide_job {
    args a;
    tensor_map keys[2], queries[2]; /* k and v, q and d_o */
    split_tensors split;
    int key_tiles, query_tiles;   /* of the longest sequence */
    int key_blocks, query_blocks; /* all tiles of keys come first: they take longer */
    int exact_below;
    float scale; /* unshifted_scale() */
    int *any;    /* whether anything was marked */
};

/* Which rows a block owns, and what it meets: tiles of all heads that share keys, the last first, and of each the heads one
 * after the other. */
struct wide_work {
    int keys, head, from, rows;    /* own; no rows: there is nothing to do */
    int start, tiles, heads, tile; /* of each head; so many rows a tile */
    span s;
    int inside, outside; /* all own rows see these */

    __device__ int all() const { return tiles * heads; }
    __device__ int column(int i) const { return start + (tiles - 1 - i / heads) * tile; }
    __device__ int met_head(const args &a, int i) const { return keys ? head * a.G + i % heads : head / a.G; }
    /* Where the shifts of tile i, and those of the own rows, are. */
    __device__ int64_t met_at(const args &a, const split_tensors &split, int i) const
    {
        const int row = column(i) / SPLIT_ROWS * SPLIT_ROWS;
        return keys ? split_at(split.q, s.q_batch, met_head(a, i), s.q_row + row)
                    : split_at(split.k, s.k_batch, met_head(a, i), s.k_row + row);
    }
    __device__ int64_t own_at(const split_tensors &split) const
    {
        return keys ? split_at(split.k, s.k_batch, head, s.k_row + from)
                    : split_at(split.q, s.q_batch, head, s.q_row + from);
    }
};

template <class C> struct wide_shared {
    char own[2][tile_bytes<C::D, SPLIT_ROWS>], met[2][tile_bytes<C::D, C::TILE>];
    float4 pass[C::TILE / 8][128];    /* P or dS: what a thread has of 8 columns */
    float L[C::TILE], delta[C::TILE]; /* of the queries that keys meet */
    int2 range[SPLIT_ROWS];           /* of what the own rows see */
    uint64_t own_full, full[2], free[2], landed[2], passed, returned;
    wide_work work;
};

/* By all threads; there are no registers to keep it. */
template <class C> __device__ inline void find_work(const wide_job &p, wide_shared<C> &sh)
{
    const args &a = p.a;
    wide_work &w = sh.work;
    const int keys = (int)blockIdx.x < p.key_blocks;
    if (threadIdx.x == 0) {
        const int block = blockIdx.x - (keys ? 0 : p.key_blocks), tiles = keys ? p.key_tiles : p.query_tiles,
                  heads = keys ? a.Hk : a.Hq, tile = block % tiles, which = block / tiles, b = which / heads;
        w.s = span_of(a, b);
        w.keys = keys, w.head = which - b * heads, w.heads = keys ? a.G : 1, w.tile = C::TILE;
        w.from = (keys ? tile : tiles - 1 - tile) * SPLIT_ROWS; /* those first that a causal mask leaves the most */
        w.rows = min(SPLIT_ROWS, (keys ? w.s.keys : w.s.rows) - w.from);
        if (w.rows > 0) {
            int first[2], last[2]; /* bands move one way: the first and the last row say it all */
            for (int i = 0; i < 2; i++)
                if (keys)
                    band_of_key(a, w.s, w.from + i * (w.rows - 1), first[i], last[i]);
                else
                    band_of_row(a, w.s, w.from + i * (w.rows - 1), first[i], last[i]);
            w.inside = max(first[0], first[1]), w.outside = min(last[0], last[1]);
            w.start = min(first[0], first[1]) / C::TILE * C::TILE;
            w.tiles = max(max(last[0], last[1]) - w.start + C::TILE - 1, 0) / C::TILE;
        }
    }
    __syncthreads();
    const int row = threadIdx.x;
    if (row < SPLIT_ROWS) {
        int2 range = make_int2(0, 0);
        if (row < w.rows && keys)
            band_of_key(a, w.s, w.from + row, range.x, range.y);
        else if (row < w.rows)
            band_of_row(a, w.s, w.from + row, range.x, range.y);
        sh.range[row] = range;
    }
    __syncthreads();
}

/* ---- The producers ----------------------------------------------------------------------------------------------- */

/* By a warp each: B1 with L, or B2 with delta; and the own tile that it is multiplied with, first. */
template <class C> __device__ inline void bring(const wide_job &p, wide_shared<C> &s, int which)
{
    const args &a = p.a;
    const wide_work &w = s.work;
    const span &q = w.s;
    const int lane = threadIdx.x % 32;
    const tensor_map &own = (w.keys ? p.keys : p.queries)[which], &other = (w.keys ? p.queries : p.keys)[which];
    const int own_batch = w.keys ? q.k_batch : q.q_batch, own_row = (w.keys ? q.k_row : q.q_row) + w.from;
    const int batch = w.keys ? q.q_batch : q.k_batch, row = w.keys ? q.q_row : q.k_row;
    const int there = w.keys ? q.rows : q.keys;
    const bool ragged = w.keys ? a.lengths_q || a.offsets_q : a.lengths_k || a.offsets_k;
    constexpr int BYTES = sizeof s.met[0];
    if (lane == 0) { /* in pieces as high as the others, which have one map */
        const uint32_t full = shared_address(&s.own_full), to = shared_address(s.own[which]);
        arrive_expecting(full, sizeof s.own[0]);
        for (int part = 0; part < SPLIT_ROWS; part += C::TILE)
            for (int box = 0; box < C::D / 64; box++)
                load_box(to + box * SPLIT_ROWS * 128 + part * 128, own.map, box * 64, own_row + part,
                         w.head * own.head_on, own_batch * own.batch_on, full);
    }
    const uint32_t full = shared_address(&s.full[which]), landed = shared_address(&s.landed[which]);
    float *const numbers = which ? s.delta : s.L;
    const float *const from = which ? p.split.delta : p.split.L;
    int cut = 0;
    for (int i = 0; i < w.all(); i++) {
        const int column = w.column(i), head = w.met_head(a, i), live = there - column;
        float number[C::TILE / 32];
        if (w.keys)
#pragma unroll
            for (int n = 0; n < C::TILE / 32; n++)
                number[n] = lane + n * 32 < live
                                ? from[((int64_t)batch * a.Hq + head) * a.q_rows + row + column + lane + n * 32]
                                : 0.0f;
        wait(shared_address(&s.free[which]), i & 1 ^ 1);
        const bool foreign = ragged && live < C::TILE;
        if (w.keys)
#pragma unroll
            for (int n = 0; n < C::TILE / 32; n++)
                numbers[lane + n * 32] = number[n];
        if (lane == 0) {
            arrive_expecting(foreign ? landed : full, BYTES);
            load_tile<C::D, C::TILE>(shared_address(s.met[which]), other, row + column, head, batch,
                                     foreign ? landed : full);
        }
        if (foreign) { /* whatever these rows hold, 0 times it must be 0 */
            wait(landed, cut++ & 1);
            clear_rows<C::TILE, BYTES>(s.met[which], live);
            fence_async();
        }
        if (lane || foreign)
            arrive(full);
    }
}

/* ---- The warpgroups ---------------------------------------------------------------------------------------------- */

template <class C> __device__ inline uint64_t own_tile(const wide_shared<C> &s, int which)
{
    return tile_at(shared_address(s.own[which]));
}

template <class C> __device__ inline uint64_t met_tile(const wide_shared<C> &s, int which)
{
    return tile_at(shared_address(s.met[which]), C::TILE * 128);
}

/* Shifts of all tiles that a block meets. */
struct wide_shifts {
    const wide_job &p;
    const wide_work &w;
    const shift *const of;
    shifts_ahead ahead;
    __device__ wide_shifts(const wide_job &p, const wide_work &w, const split_rows &of) : p(p), w(w), of(of.shifts)
    {
        if (w.all())
            ahead.ask(0, w.all(), [&](int i) { return at(i); });
    }
    __device__ const shift *at(int i) const { return of + w.met_at(p.a, p.split, i); }
    __device__ shift get(int i)
    {
        return ahead.get(i, w.all(), [&](int i) { return at(i); });
    }
};

/* Which P of tile i are dropped, while its S is on the way. */
template <class C, bool KEYS> __device__ inline uint32_t draw_tile(const wide_job &p, const wide_shared<C> &s, int i)
{
    const wide_work &w = s.work;
    if (!has_dropout<C::TERMS>(p.a))
        return 0;
    const int thread = thread_anew(), across = w.column(i) + thread % 4 * 2,
              down = w.from + thread / 32 % 4 * 16 + thread % 32 / 4;
    return draw_dropped<KEYS, C::TILE / 2>(p.a, w.s, KEYS ? w.met_head(p.a, i) : w.head, KEYS ? across : down,
                                           KEYS ? down : across);
}

/* S of tile i to P, which is handed over. L: of the rows where queries own them. */
template <class C, bool KEYS>
__device__ inline void weigh_tile(const wide_job &p, wide_shared<C> &s, float (&S)[C::TILE / 2], int i, int shifts,
                                  const float (&L)[2], uint32_t dropped)
{
    const wide_work &w = s.work;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, column = w.column(i);
    const bool whole = column >= w.inside && column + C::TILE <= w.outside;
    float c = LOG2E, slope[C::TILE / 2];
    if constexpr (C::TERMS) {
        const int across = column + lane % 4 * 2, down = w.from + row;
        lane_scores<KEYS, C::TILE / 2> t = { S, KEYS ? across : down, KEYS ? down : across };
        add_terms<C::TERMS>(t, logit_scale<C::HEAD>(p.scale, shifts), p.a, w.s,
                            head_of(p.a, w.s, KEYS ? w.met_head(p.a, i) : w.head),
                            [&](int e, float x) { slope[e] = x; });
        bool vast = !KEYS && (is_vast_log2(L[0]) || is_vast_log2(L[1]));
        if (KEYS)
#pragma unroll
            for (int e = 0; e < C::TILE / 2; e += 4)
                vast |= is_vast_log2(s.L[lane % 4 * 2 + column_of(e)]) ||
                        is_vast_log2(s.L[lane % 4 * 2 + column_of(e + 1)]);
        if (__any_sync(~0u, vast) && lane == 0)
            (KEYS ? p.split.k : p.split.q).marks[w.own_at(p.split)] = *p.any = 1;
    } else
        c = exponent_scale<C::HEAD>(p.a, shifts);
    weigh(S, c, whole, &s.range[row], column + lane % 4 * 2,
          [&](int e) { return KEYS ? s.L[lane % 4 * 2 + column_of(e)] : L[e / 2 % 2]; });
    if (KEYS)
        wait(shared_address(&s.returned), i & 1 ^ 1); /* else this thread has read what lies there */
    const auto pass = [&](auto P) {
#pragma unroll
        for (int n = 0; n < C::TILE / 8; n++)
            s.pass[n][threadIdx.x % 128] = make_float4(P(4 * n), P(4 * n + 1), P(4 * n + 2), P(4 * n + 3));
    };
    if (has_dropout<C::TERMS>(p.a))
        sign_dropped<KEYS>(S, dropped);
    if constexpr (C::TERMS)
        pass_weights<C::TERMS>(S, slope, p.a, pass);
    else
        pass([&](int e) { return S[e]; });
    release(&s.passed);
    if (KEYS && has_dropout<C::TERMS>(p.a))
        drop<KEYS>(S, dropped); /* from dV */
}

/* Results += X B, 64 columns at a time from column `from` on, with X split into hi and lo, in units of 2^-by. */
template <class C, int N, int K>
__device__ inline void add_product(gradient<N> &y, const uint32_t (&hi)[K][4], const uint32_t (&lo)[K][4], uint64_t B,
                                   int from, const int (&by)[2])
{
    float now[2];
    y.template prepare<C::TILE / 16>(by, now);
    multiply_by_panels<C::HEAD, N / 64>(hi, lo, B, from / 64,
                                        [&](int panel, const float(&T)[32]) { y.add_columns(panel * 64, T, now); });
}

/* The first warpgroup where keys own the rows. */
template <class C> __device__ inline void values_role(const wide_job &p, wide_shared<C> &s)
{
    const args &a = p.a;
    const wide_work &w = s.work;
    const int k_shift = p.split.k.shifts[w.own_at(p.split)].s;
    wide_shifts q_shifts(p, w, p.split.q), g_shifts(p, w, p.split.d_o);
    gradient<C::HEAD> dV;
    const float none[2] = {};
#pragma unroll 1
    for (int i = 0; i < w.all(); i++) {
        float S[C::TILE / 2];
        operand_of<C::TILE> hi, lo;
        int by[2];
        uint32_t dropped = 0;
        wait(shared_address(&s.full[0]), i & 1);
        multiply_scores<C::HEAD, SPLIT_ROWS, 2>(S, own_tile(s, 0), met_tile(s, 0),
                                                [&]() { dropped = draw_tile<C, true>(p, s, i); });
        weigh_tile<C, true>(p, s, S, i, k_shift + q_shifts.get(i).s, none, dropped);
        release(&s.free[0]);
        split_weights(hi, lo, S, by);
        const int more = TOP + g_shifts.get(i).s;
        by[0] += more, by[1] += more;
        wait(shared_address(&s.full[1]), i & 1);
        add_product<C>(dV, hi, lo, met_tile(s, 1), 0, by);
        release(&s.free[1]);
    }
    if (a.d_v.data)
        dV.write(C::TERMS ? a.keep_scale : 1.0f, a.d_v, a.Dv, w.rows, [&](int r) {
            return row_at(a.d_v, w.s.k_batch, w.head, a.col + (w.s.k_row + w.from + r) * a.col_step);
        });
}

/* The second, where they do: dK; and where queries do: the last columns of dQ. */
template <class C, bool KEYS> __device__ inline void second_role(const wide_job &p, wide_shared<C> &s)
{
    constexpr int FROM = KEYS ? 0 : C::FIRST;
    const args &a = p.a;
    const wide_work &w = s.work;
    const span &q = w.s;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int64_t own = w.own_at(p.split);
    const shift own1 = (KEYS ? p.split.k : p.split.q).shifts[own], own2 = (KEYS ? p.split.v : p.split.d_o).shifts[own];
    bool again = own1.strange | own2.strange;
    wide_shifts shifts1(p, w, KEYS ? p.split.q : p.split.k), shifts2(p, w, KEYS ? p.split.d_o : p.split.v);
    float delta[2] = {};
    if (!KEYS) {
        const float *const of = p.split.delta + ((int64_t)q.q_batch * a.Hq + w.head) * a.q_rows + q.q_row + w.from;
        delta[0] = of[min(row, w.rows - 1)], delta[1] = of[min(row + 8, w.rows - 1)];
    }
    gradient<C::HEAD - FROM> y;
#pragma unroll 1
    for (int i = 0; i < w.all(); i++) {
        float dP[C::TILE / 2];
        operand_of<C::TILE> hi, lo;
        int by[2];
        wait(shared_address(&s.full[1]), i & 1);
        multiply_scores<C::HEAD, SPLIT_ROWS, 2>(dP, own_tile(s, 1), met_tile(s, 1));
        const shift met1 = shifts1.get(i), met2 = shifts2.get(i);
        again |= met1.strange || met2.strange || own1.s + met1.s < p.exact_below;
        wait(shared_address(&s.passed), i & 1);
        differentiate<C::TERMS>(
            dP, own2.s + met2.s, a, [&](int n) { return s.pass[n][threadIdx.x % 128]; },
            [&](int e) { return KEYS ? s.delta[lane % 4 * 2 + column_of(e)] : delta[e / 2 % 2]; }, by,
            [&](int n, const float *dS) {
                if (!KEYS)
                    s.pass[n][threadIdx.x % 128] = make_float4(dS[0], dS[1], dS[2], dS[3]);
            });
        release(&s.returned);
        release(&s.free[1]);
        split_weights(hi, lo, dP);
        by[0] += met1.s, by[1] += met1.s;
        wait(shared_address(&s.full[0]), i & 1);
        add_product<C>(y, hi, lo, met_tile(s, 0), FROM, by);
        release(&s.free[0]);
    }
    if (KEYS && a.d_k.data)
        y.write(a.scale, a.d_k, a.D, w.rows,
                [&](int r) { return row_at(a.d_k, q.k_batch, w.head, a.col + (q.k_row + w.from + r) * a.col_step); });
    else if (!KEYS) {
        view t = a.d_q;
        t.data += FROM * t.stride[3] * (int)sizeof(float);
        y.write(a.scale, t, a.D - FROM, w.rows,
                [&](int r) { return row_at(t, q.q_batch, w.head, q.q_row + w.from + r); });
    }
    if (again && threadIdx.x % 128 == 0)
        (KEYS ? p.split.k : p.split.q).marks[own] = *p.any = 1;
}

/* The first warpgroup where queries own the rows: the first columns of dQ. */
template <class C> __device__ inline void queries_role(const wide_job &p, wide_shared<C> &s)
{
    const args &a = p.a;
    const wide_work &w = s.work;
    const span &q = w.s;
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const int q_shift = p.split.q.shifts[w.own_at(p.split)].s;
    const float *const of = p.split.L + ((int64_t)q.q_batch * a.Hq + w.head) * a.q_rows + q.q_row + w.from;
    const float L[2] = { of[min(row, w.rows - 1)], of[min(row + 8, w.rows - 1)] };
    wide_shifts k_shifts(p, w, p.split.k);
    gradient<C::FIRST> dQ;
#pragma unroll 1
    for (int i = 0; i < w.all(); i++) {
        float S[C::TILE / 2];
        operand_of<C::TILE> hi, lo;
        int by[2];
        uint32_t dropped = 0;
        wait(shared_address(&s.full[0]), i & 1);
        multiply_scores<C::HEAD, SPLIT_ROWS, 2>(S, own_tile(s, 0), met_tile(s, 0),
                                                [&]() { dropped = draw_tile<C, false>(p, s, i); });
        const int k_shift = k_shifts.get(i).s;
        weigh_tile<C, false>(p, s, S, i, q_shift + k_shift, L, dropped);
        wait(shared_address(&s.full[1]), i & 1);
        release(&s.free[1]); /* which the other reads alone */
        wait(shared_address(&s.returned), i & 1);
#pragma unroll
        for (int n = 0; n < C::TILE / 8; n++)
            *(float4 *)&S[4 * n] = s.pass[n][threadIdx.x % 128];
        raise_rows((float(&)[1][C::TILE / 8][4]) S, by);
        split_weights(hi, lo, S);
        by[0] += TOP + k_shift, by[1] += TOP + k_shift;
        add_product<C>(dQ, hi, lo, met_tile(s, 0), 0, by);
        release(&s.free[0]);
    }
    dQ.write(a.scale, a.d_q, a.D, w.rows,
             [&](int r) { return row_at(a.d_q, q.q_batch, w.head, q.q_row + w.from + r); });
}

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

template <int HEAD, int TILE, int TERMS>
__global__ void __launch_bounds__(wide_shape<HEAD, TILE, TERMS>::THREADS, 1)
    backward_sm90split_wide(const __grid_constant__ wide_job p)
{
    typedef wide_shape<HEAD, TILE, TERMS> C;
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(wide_shared<C> *)memory;
    let_next_start();
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s.own_full), 2);
        for (int i = 0; i < 2; i++)
            barrier_init(shared_address(&s.full[i]), 32), barrier_init(shared_address(&s.free[i]), 256),
                barrier_init(shared_address(&s.landed[i]), 1);
        barrier_init(shared_address(&s.passed), 128), barrier_init(shared_address(&s.returned), 128);
        barrier_init_done();
    }
    find_work(p, s);
    if (s.work.rows <= 0)
        return;
    const int group = uniform(threadIdx.x / 128), keys = uniform(s.work.keys);
    if (group == 2) {
        fewer_registers<C::FEW>();
        const int warp = threadIdx.x / 32 % 4;
        if (warp < 2)
            bring(p, s, warp);
        return;
    }
    more_registers<C::MANY>();
    wait(shared_address(&s.own_full), 0);
    if (group == 0 && keys)
        values_role<C>(p, s);
    else if (group == 0)
        queries_role<C>(p, s);
    else if (keys)
        second_role<C, true>(p, s);
    else
        second_role<C, false>(p, s);
}

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

template <int HEAD, int TILE, int TERMS> static heed_status run(wide_job &p, const heed_exec *x)
{
    typedef wide_shape<HEAD, TILE, TERMS> C;
    static_assert(sizeof(wide_shared<C>) <= 227 * 1024, "what a block may have on sm_90");
    const args &a = p.a;
    const int queries = a.offsets_q ? 1 : a.B, keys = a.offsets_k ? 1 : a.B;
    const int64_t k_rows = a.offsets_k ? a.k_rows : (a.Sk - 1 - a.col) / a.col_step + 1;
    const split_tensors &split = p.split;
    heed_status status = split_map(&p.queries[0], split.q, HEAD, 2, a.q_rows, queries, TILE);
    status = status ? status : split_map(&p.queries[1], split.d_o, HEAD, 2, a.q_rows, queries, TILE);
    status = status ? status : split_map(&p.keys[0], split.k, HEAD, 2, k_rows, keys, TILE);
    status = status ? status : split_map(&p.keys[1], split.v, HEAD, 2, k_rows, keys, TILE);
    p.key_tiles = (int)tiles_of((a.Sk - 1 - a.col) / a.col_step + 1, SPLIT_ROWS);
    p.query_tiles = (int)tiles_of(a.Sq, SPLIT_ROWS);
    const int64_t key_blocks = a.d_k.data || a.d_v.data ? (int64_t)p.key_tiles * a.Hk * a.B : 0,
                  query_blocks = a.d_q.data ? (int64_t)p.query_tiles * a.Hq * a.B : 0;
    if (key_blocks + query_blocks > INT32_MAX)
        return heed_fail(HEED_UNSUPPORTED, "the problem has %lld tiles, a launch holds %d",
                         (long long)(key_blocks + query_blocks), INT32_MAX);
    p.key_blocks = (int)key_blocks, p.query_blocks = (int)query_blocks;
    return status ? status
                  : launch(backward_sm90split_wide<HEAD, TILE, TERMS>, key_blocks + query_blocks, C::THREADS,
                           sizeof(wide_shared<C>), x, p);
}

size_t heed_backward_workspace_sm90split_wide(const heed_problem *p)
{
    split_tensors split = {};
    return begin_workspace(p, NULL, split).bytes + heed_cuda_delta_bytes(p);
}

heed_status heed_backward_sm90split_wide(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    wide_job job = {};
    const prologue start(p, x, begin_workspace(p, x->workspace, job.split).bytes);
    const args &a = start.a;
    if (start.status)
        return start.status;
    if (!heed_elements(&p->a.q) || a.Sk <= a.col) { /* the sums are over nothing, and there are no maps */
        const heed_gradient &g = p->g;
        heed_status status = heed_cuda_fill(a.d_q, g.d_q.shape, 0.0f, x);
        status = status ? status : heed_cuda_fill(a.d_k, g.d_k.shape, 0.0f, x);
        return status ? status : heed_cuda_fill(a.d_v, g.d_v.shape, 0.0f, x);
    }
    job.a = a;
    job.split.facts = NULL;
    job.exact_below = split_exact_below(a), job.scale = unshifted_scale(a), job.any = job.split.zeros + 2;
    job.split.columns = split_columns(a);
    heed_status status = heed_cuda_split(a, job.split, false, NULL, x);
    const bool narrow = job.split.columns == 192;
    if (!status && has_terms(a))
        status = narrow ? run<192, 64, WITH_ALL_TERMS>(job, x) : run<256, 32, WITH_ALL_TERMS>(job, x);
    else if (!status)
        status = narrow ? run<192, 64, WITHOUT_TERMS>(job, x) : run<256, 32, WITHOUT_TERMS>(job, x);
    const marked only = { job.any, job.split.k.marks, job.split.q.marks };
    if (!status && narrow) { /* what is marked wants rows as wide as its tiles */
        split_tensors pass = job.split;
        pass.columns = 0, pass.zeros = pass.k.marks = pass.q.marks = NULL;
        status = heed_cuda_split(a, pass, true, job.any, x);
    }
    return status ? status : heed_cuda_backward_marked(a, job.split, only, 2 * plan->device.units, x);
}
