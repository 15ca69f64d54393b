/* What the Hopper backward in one kernel adds to its scores, a bias and ALiBi, what hides them besides the band, a mask, and
 * what leaves P out of O, dropout (dropout_sm90.cuh).
 *
 * Bias and mask of a tile of 64 queries and the own keys come by the copy engine, in pieces: rows are queries, of 128 bytes
 * (a bias: 64 keys of 16 bits, or 32 of fp32) or 64 (a mask). All pieces of a tile are a stage of one more ring, of as many
 * stages as fit in; what is the same for all queries comes as one row. In a piece the 16-byte chunk c of row r lies at chunk
 * c ^ (r % 8), in rows of 64 bytes at c ^ (r / 2 % 4): the engine writes this order, and lanes that read a few rows at a time
 * meet different banks. Scores have keys as rows: pieces are read transposed. */
#ifndef HEED_CUDA_BACKWARD_SM90_SCORES_CUH
#define HEED_CUDA_BACKWARD_SM90_SCORES_CUH

#include "backward_sm90_keys.cuh"
#include "dropout_sm90.cuh"

/* ---- What there is ----------------------------------------------------------------------------------------------- */

struct score_maps : term_maps {
    int stage_bytes, more_stages, at; /* a second stage: 1; at: from the first dS on */
    int landing;                      /* bytes that arrive for a tile */
    float query_step, key_step;       /* ALiBi: positions from one to the next */
    bool together; /* sequences that share a head's bias or mask meet it at the same time, so that it is read once */
};

struct scored_job : backward_job {
    score_maps m;
};

constexpr int BIAS_PIECE = COLUMNS * 128, MASK_PIECE = COLUMNS * 64;

/* SCORE_BYTES: of the ring, if it needs no more than this. DROPS: dS of a P that was dropped wants it, which S still has where
 * the kernel is EXACT. */
template <int D, int ROWS, int SLOTS, int FIRST, int SECOND, int WAYS, int DS, int SCORE_BYTES_, bool DROPS_ = false>
struct scored_shape : backward_shape<true, D, ROWS, SLOTS, FIRST, SECOND, WAYS, DS> {
    using base = backward_shape<true, D, ROWS, SLOTS, FIRST, SECOND, WAYS, DS>;
    static constexpr int SCORE_BYTES = SCORE_BYTES_, MOST_BYTES = base::GROUPS * (2 * BIAS_PIECE + MASK_PIECE);
    static constexpr bool TERMS = true, DROPS = DROPS_, LENDS = SCORE_BYTES < MOST_BYTES;
    static_assert(!DROPS || WAYS & EXACT);
};

template <class C> struct scored_shared : backward_shared<C> {
    uint64_t scores_full[2], scores_free[2];
    float distance[4 * C::GROUPS]; /* ALiBi: from a warp's first key to the sequence's first query */
    int sequence[C::WORKS];        /* of a piece of work */
    int2 met[C::FIRST];            /* head and first column of a tile */
    /* Dropout, for each warp: the seed, its sequence's first query's position, and the number of its first eight keys. */
    uint4 drawn[C::DROPS ? 4 * C::GROUPS : 0];
};

/* What a bias or mask takes of a block's shared memory: second tiles of dS and dQ are left where 1. */
struct score_room {
    int more_dS, more_dQ, at, bytes; /* at: from the first dS on */
};

/* dQ's is taken last, so that dQ may leave with the last keys. */
template <class C> static score_room room_for(int bytes)
{
    constexpr int dS = C::ROWS * 128, dQ = COLUMNS * C::HEAD * (int)sizeof(float);
    score_room r = { 1, 1, C::DS * dS, C::SCORE_BYTES };
    if (C::LENDS && bytes > C::SCORE_BYTES) {
        r.more_dQ = bytes <= dS + C::SCORE_BYTES, r.more_dS = !r.more_dQ && bytes <= C::SCORE_BYTES + dQ;
        r.at = (1 + r.more_dS) * dS;
        r.bytes = (1 - r.more_dS) * dS + C::SCORE_BYTES + (1 - r.more_dQ) * dQ;
    }
    return r;
}

template <class C> __device__ inline scored_shared<C> &with_scores(backward_shared<C> &s)
{
    return static_cast<scored_shared<C> &>(s);
}

__device__ inline const score_maps &maps_of(const backward_job &p) { return static_cast<const scored_job &>(p).m; }

/* ---- What brings it ---------------------------------------------------------------------------------------------- */

template <class C> __device__ inline bool are_sequences_together(const backward_job &p) { return maps_of(p).together; }

template <class C> __device__ inline void note_sequence(backward_shared<C> &s, int slot, int b)
{
    if (threadIdx.x % 32 == 0)
        with_scores(s).sequence[slot] = b;
}

template <class C> __device__ inline void note_tile(backward_shared<C> &s, int tile, int head, int column)
{
    if (threadIdx.x % 32 == 0)
        with_scores(s).met[tile % C::FIRST] = make_int2(head, column);
}

/* Asks for a tile's pieces: of all bias pieces, then of the mask. */
template <class C>
__device__ inline void bring_scores(const backward_job &p, backward_shared<C> &shared, int slot, int head, int column,
                                    int tile)
{
    const score_maps &m = maps_of(p);
    scored_shared<C> &s = with_scores(shared);
    if (!m.landing)
        return;
    const int stage = tile & m.more_stages;
    wait(shared_address(&s.scores_free[stage]), tile >> m.more_stages & 1 ^ 1);
    if (threadIdx.x % 32)
        return;
    const uint32_t full = shared_address(&s.scores_full[stage]);
    const int key = s.work[slot].tile * C::ROWS, b = s.sequence[slot];
    uint32_t to = shared_address(s.dS[0]) + m.at + stage * m.stage_bytes;
    arrive_expecting(full, m.landing);
    for (int n = 0; n < C::GROUPS * m.bias_pieces; n++, to += BIAS_PIECE)
        load_box(to, m.bias.map, key + n * (COLUMNS / m.bias_pieces), m.bias_rows == 1 ? 0 : column,
                 head * m.bias.head_on, b * m.bias.batch_on, full);
    for (int n = 0; n < C::GROUPS * m.mask_pieces; n++, to += MASK_PIECE)
        load_box(to, m.mask.map, key + n * COLUMNS, m.mask_rows == 1 ? 0 : column, head * m.mask.head_on,
                 b * m.mask.batch_on, full);
}

/* ---- What a warpgroup does with it ------------------------------------------------------------------------------- */

/* Scores are those of sm90.cuh: a lane has queries 8 i + 2 (lane % 4) and the next, of keys lane / 4 and 8 more. What follows
 * takes them as the products leave them and makes them those of 2^S = P. */

/* S = c S + unit bias. A matrix of 8 queries and 8 keys, transposed, is what the lanes have. */
template <class T>
__device__ inline void add_bias(float (&S)[COLUMNS / 2], int thread, uint32_t piece, int rows, float c, float unit)
{
    const int lane = thread % 32, down = rows == 1 ? 0 : 1024, query = rows == 1 ? 0 : lane / 16 * 8 + lane % 8;
    uint32_t from = piece + query * 128 + ((thread / 32 % 4 * 2 + lane / 8 % 2 ^ query % 8) << 4);
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; i += 2, from += 2 * down) {
        uint32_t x[4];
        load_matrices_transposed(x, from);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float2 both = unpack2<T>(x[e]);
            S[4 * i + 2 * e] = fmaf(S[4 * i + 2 * e], c, both.x * unit);
            S[4 * i + 2 * e + 1] = fmaf(S[4 * i + 2 * e + 1], c, both.y * unit);
        }
    }
}

/* The same in fp32, where two warps share a piece: all banks are met once. */
__device__ inline void add_wide_bias(float (&S)[COLUMNS / 2], int thread, const char *piece, int rows, float c,
                                     float unit)
{
    const int lane = thread % 32, warp = thread / 32 % 4, query = rows == 1 ? 0 : lane % 4 * 2;
    const int down = rows == 1 ? 0 : 1024, next = rows == 1 ? 0 : 128, swap = rows == 1 ? 0 : 16;
    const int at = query * 128 + ((warp % 2 * 4 + lane / 16 ^ query) << 4) + lane / 4 % 4 * 4;
    const char *const pieces = piece + warp / 2 * BIAS_PIECE;
    const char *const from[2][2] = { { pieces + at, pieces + (at ^ swap) + next },
                                     { pieces + (at ^ 32), pieces + (at ^ 32 ^ swap) + next } };
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &y = S[4 * i + 2 * half + e];
                y = fmaf(y, c, *(const float *)(from[half][e] + i * down) * unit);
            }
}

/* S = c S - slope |distance|. first: from the warp's first key to the tile's first query; step, down: from query to query,
 * and from key to key. Where 16 queries are on one side of the warp's keys it is a line. */
__device__ inline void add_alibi(float (&S)[COLUMNS / 2], int thread, float first, float step, float down, float slope,
                                 float c)
{
    const float own = (float)(thread % 4 * 2) * step - (float)(thread % 32 / 4) * down;
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++, first += 16.0f * step) {
        const float d[2] = { first + own, first + own - 8.0f * down };
        const bool after = first - 15.0f * down >= 0.0f, before = first + 15.0f * step <= 0.0f;
        if (after || before) {
            const float rise = after ? -slope : slope, along = rise * step, from[2] = { rise * d[0], rise * d[1] };
#pragma unroll
            for (int e = 0; e < 8; e++)
                S[8 * k + e] = fmaf(S[8 * k + e], c, fmaf((float)column_of(e), along, from[e / 2 % 2]));
        } else
#pragma unroll
            for (int e = 0; e < 8; e++)
                S[8 * k + e] = fmaf(S[8 * k + e], c, -slope * fabsf(fmaf((float)column_of(e), step, d[e / 2 % 2])));
    }
}

/* Each byte that is not 0 as 1. */
__device__ inline uint32_t set_bytes(uint32_t x) { return ((x & 0x7f7f7f7f) + 0x7f7f7f7f | x) >> 7 & 0x01010101; }

/* Most tiles of most masks hide nothing: then all bytes are 1. Else each lane has, of 16 pairs of queries, two neighbouring
 * keys: it makes a number of them, with bit i of a byte for queries 8 i on, and gets those of its own keys from the lanes
 * that have them. */
__device__ inline void apply_mask(float (&S)[COLUMNS / 2], int thread, uint32_t piece, int rows)
{
    const int lane = thread % 32, query = rows == 1 ? 0 : lane;
    const uint32_t from = piece + query * 64 + ((thread / 32 % 4 ^ query / 2 % 4) << 4);
    uint32_t x[4], y[4];
    load_matrices_transposed(x, from), load_matrices_transposed(y, from + (rows == 1 ? 0 : 2048));
    const uint32_t all = x[0] & x[1] & x[2] & x[3] & y[0] & y[1] & y[2] & y[3];
    if (__all_sync(~0u, all == 0x01010101))
        return;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        bits |= set_bytes(x[i]) << i | set_bytes(y[i]) << i + 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t seen = __shfl_sync(~0u, bits, lane / 8 * 4 + lane % 4 + half * 16) >> lane / 4 % 2 * 8;
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (!(seen & 1u << i + 16 * e))
                    S[4 * i + 2 * half + e] = -CUDART_INF_F;
    }
}

/* S = (S - lse) log2 e, of the lse that are left out of S; w, head, column: of the tile. */
__device__ inline void subtract_lse(float (&S)[COLUMNS / 2], int thread, const args &a, const piece &w, int head,
                                    int column)
{
    float own[2]; /* of two queries for each lane, which it gives to those that have them */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int n = min(column + half * 32 + thread % 32, w.columns - 1); /* nobody sees others */
        const float lse = ((const float *)a.lse.data)[row_at(a.lse, w.other_batch, head, w.other_row + n)];
        own[half] = is_left_out(a, lse) ? lse : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < COLUMNS / 2; e += e % 2 ? 3 : 1) {
        const float lse = __shfl_sync(~0u, own[column_of(e) / 32], column_of(e) % 32 + thread % 4 * 2);
        S[e] = (S[e] - lse) * LOG2E, S[e + 2] = (S[e + 2] - lse) * LOG2E;
    }
}

/* Whether a tile has queries whose lse is left out of S: only one that needs care. By whole warps. */
template <class C>
__device__ inline bool leaves_out(const key_group<C> &x, const scored_shared<C> &s, int thread, int tile)
{
    const uint4 *const terms = s.terms[tile % C::FIRST] + thread % 32;
    return x.care >= 0 && __any_sync(~0u, has_left_out(terms[0]) || has_left_out(terms[32]));
}

template <class C> __device__ inline float slope_of(const backward_job &p, backward_shared<C> &s, int slot, int head)
{
    return ((const float *)p.a.alibi.data)[row_at(p.a.alibi, with_scores(s).sequence[slot], head, 0)];
}

/* ---- Dropout ----------------------------------------------------------------------------------------------------- */

/* Of a tile a lane draws queries 8 (lane / 4) + 2 (lane % 4) and the next, for both eights of its warp's keys, and gets what
 * lanes with as much lane % 4 have drawn for its own two keys. */

/* Which element of the lane's scores a bit is of. */
__device__ constexpr int kept_element(int bit) { return bit % 4 * 8 + bit / 16 * 4 + bit / 8 % 2 * 2 + bit / 4 % 2; }

template <class C>
__device__ inline void draw_kept(const backward_job &p, key_group<C> &x, backward_shared<C> &shared, int tile)
{
    const scored_shared<C> &s = with_scores(shared);
    const int thread = thread_anew(), lane = thread % 32;
    const int2 met = s.met[tile % C::FIRST];
    const uint4 from = s.drawn[uniform(thread / 32)];
    const uint32_t step = (uint32_t)(uint64_t)p.a.p_step;
    const drop_source source = { (uint64_t)from.y << 32 | from.x, (uint32_t)met.x, (uint32_t)s.sequence[x.slot] };
    if (are_eights_whole(p.a)) {
        const uint32_t position = from.z + (met.y + lane / 4 * 8 + lane % 4 * 2) * step;
        const drop_source::row_part rows[2] = { source.of_row(position), source.of_row(position + step) };
        const uint32_t eights[2] = { from.w, from.w + 1 };
        x.kept = draw_four(source, eights, rows, p.a.drop_below);
        x.kept = exchange_bits(x.kept, 4, 16, 0x0000FFFF);
        x.kept = exchange_bits(x.kept, 8, 1, 0x55555555);
        x.kept = exchange_bits(x.kept, 16, 2, 0x33333333);
        return;
    }
    x.kept = 0;
#pragma unroll 1
    for (int bit = 0; bit < 32; bit++) { /* rare, and would be long otherwise */
        const int e = kept_element(bit), query = met.y + lane % 4 * 2 + column_of(e);
        const int key = s.work[x.slot].tile * C::ROWS + thread / 32 * 16 + lane / 4 + e / 2 % 2 * 8;
        x.kept |= (uint32_t)source.keeps(p.a.r0 + key * p.a.r_step, from.z + query * step, p.a.drop_below) << bit;
    }
}

/* Leaves those of packed P that are kept. */
template <class C> __device__ inline void drop(uint32_t (&P)[COLUMNS / 16][4], const key_group<C> &x)
{
#pragma unroll
    for (int bit = 0; bit < 32; bit += bit % 4 == 3 ? 5 : 1) { /* and the fourth from it on are of two neighbours */
        const int e = kept_element(bit);
        const uint32_t first = x.kept << (7 - bit % 8), second = x.kept << (3 - bit % 8);
        P[e / 8][e / 2 % 4] &= pick_bytes(first, second, 0xCC88 + 0x1111 * (bit / 8));
    }
}

/* dS = P (Z dP - delta) but for 1 / (1 - p), which gradients are multiplied with when they leave: P (dP - (1 - p) delta), which
 * is what the product is, or where P was dropped, -P (1 - p) delta, of whose terms two suffice. */
template <class C>
__device__ inline void differentiate_kept(float (&dP)[COLUMNS / 2], const key_group<C> &x, const backward_shared<C> &s,
                                          int tile)
{
    const uint4 *const terms = s.terms[tile % C::FIRST] + threadIdx.x % 4 * 2;
    float dropped[COLUMNS / 4];
#pragma unroll
    for (int n = 0; n < COLUMNS / 4; n++) {
        const uint32_t two = terms[n / 2 * 8 + n % 2].z;
        dropped[n] = __uint_as_float(two << 16) + __uint_as_float(two & 0xFFFF0000);
    }
#pragma unroll
    for (int bit = 0; bit < COLUMNS / 2; bit++) {
        const int e = kept_element(bit);
        dP[e] = (x.kept >> bit & 1 ? dP[e] : dropped[e / 4 * 2 + e % 2]) * x.S[e];
    }
}

/* ---- Tiles ------------------------------------------------------------------------------------------------------- */

/* A piece of work. */
template <class C>
__device__ inline void begin_terms(const backward_job &p, key_group<C> &x, backward_shared<C> &shared)
{
    if (!C::DROPS && !p.a.alibi.data)
        return;
    scored_shared<C> &s = with_scores(shared);
    const span q = span_of(p.a, s.sequence[x.slot]);
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
        const int key = s.work[x.slot].tile * C::ROWS + warp * 16;
        s.distance[warp] = (float)(q.p0 - q.r0 - key * q.r_step);
        if (C::DROPS) {
            const uint64_t seed = seed_of(p.a);
            s.drawn[warp] = make_uint4((uint32_t)seed, (uint32_t)(seed >> 32), (uint32_t)(uint64_t)q.p0,
                                       (uint32_t)(uint64_t)(q.r0 + key >> 3));
        }
    }
    __syncwarp();
}

template <class C> __device__ inline void wait_scores(const score_maps &m, scored_shared<C> &s, int tile)
{
    if (m.landing)
        wait(shared_address(&s.scores_full[tile & m.more_stages]), tile >> m.more_stages & 1);
}

template <class C> __device__ inline void release_scores(const score_maps &m, scored_shared<C> &s, int tile)
{
    if (m.landing)
        release(&s.scores_free[tile & m.more_stages]);
}

/* A tile that this group has no use for. */
template <class C> __device__ inline void pass_scores(const backward_job &p, backward_shared<C> &s, int tile)
{
    const score_maps &m = maps_of(p);
    wait_scores(m, with_scores(s), tile);
    release_scores(m, with_scores(s), tile);
}

/* A tile whose products are there. */
template <class T, class C>
__device__ inline void apply_terms(const backward_job &p, key_group<C> &x, backward_shared<C> &shared, int tile)
{
    const score_maps &m = maps_of(p);
    scored_shared<C> &s = with_scores(shared);
    const int thread = thread_anew();
    const char *const from = s.dS[0] + m.at + (tile & m.more_stages) * m.stage_bytes;
    const int2 &met = s.met[tile % C::FIRST];
    const bool apart = m.bias_pieces && leaves_out(x, s, thread, tile);
    const float unit = apart ? 1.0f : LOG2E;
    float c = apart ? p.rule.c * (1.0f / LOG2E) : p.rule.c;
    wait_scores(m, s, tile);
    if (m.bias_pieces) {
        const char *const piece = from + x.group * m.bias_pieces * BIAS_PIECE;
        if (m.bias_pieces == 1)
            add_bias<T>(x.S, thread, shared_address(piece), m.bias_rows, c, unit);
        else
            add_wide_bias(x.S, thread, piece, m.bias_rows, c, unit);
        c = 1.0f;
    }
    if (p.a.alibi.data) {
        const float first = __shfl_sync(~0u, s.distance[thread / 32] + (float)met.y * m.query_step, 0);
        add_alibi(x.S, thread, first, m.query_step, m.key_step, slope_of(p, shared, x.slot, met.x) * unit, c);
    } else if (!m.bias_pieces)
#pragma unroll
        for (int e = 0; e < COLUMNS / 2; e++)
            x.S[e] *= c;
    if (apart)
        subtract_lse(x.S, thread, p.a, s.work[x.slot], met.x, met.y);
    if (m.mask_pieces)
        apply_mask(x.S, thread, shared_address(from + C::GROUPS * m.bias_pieces * BIAS_PIECE + x.group * MASK_PIECE),
                   m.mask_rows);
    release_scores(m, s, tile);
}

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

template <class T, class C>
__global__ void __launch_bounds__(C::THREADS, 1) backward_sm90scores(const __grid_constant__ scored_job p)
{
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(scored_shared<C> *)memory;
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; i++) {
            barrier_init(shared_address(&s.scores_full[i]), 1);
            barrier_init(shared_address(&s.scores_free[i]), 128 * C::CONSUMERS);
        }
    find_gradients<T, C>(p, s);
}

static bool is_by_head(const view &t) { return t.data && t.stride[0] == 0 && t.stride[1] != 0; }

template <class C> static heed_status run_scored(const backward_job &p, int blocks, const heed_exec *x)
{
    static_assert(sizeof(scored_shared<C>) <= 227 * 1024, "what a block may have on sm_90");
    scored_job job;
    score_maps &m = job.m;
    static_cast<backward_job &>(job) = p;
    const heed_status status = heed_map_terms(&m, p.a);
    if (status)
        return status;
    m.stage_bytes = C::GROUPS * (m.bias_pieces * BIAS_PIECE + m.mask_pieces * MASK_PIECE);
    const score_room room = room_for<C>(m.stage_bytes);
    m.at = room.at, job.more_dS = room.more_dS, job.more_dQ = room.more_dQ;
    m.more_stages = room.bytes >= 2 * m.stage_bytes;
    m.query_step = (float)p.a.p_step, m.key_step = (float)p.a.r_step;
    m.together = is_by_head(p.a.bias) || is_by_head(p.a.mask);
    m.landing = C::GROUPS * (m.bias_pieces * m.bias_rows * 128 + m.mask_pieces * m.mask_rows * 64);
    return launch_next(p.a.q.dtype == HEED_F16 ? backward_sm90scores<__half, C> : backward_sm90scores<__nv_bfloat16, C>,
                       blocks, C::THREADS, sizeof(scored_shared<C>), x, job);
}

template <class C> static backward_kernel scored_kernel(const heed_problem *p)
{
    const auto bytes = [](const heed_tensor &t) {
        return t.data ? C::ROWS * COLUMNS * (int)heed_dtype_size(t.dtype) : 0;
    };
    return { C::D, C::ROWS, room_for<C>(bytes(p->a.bias) + bytes(p->a.mask)).more_dQ != 0, run_scored<C> };
}

#endif
