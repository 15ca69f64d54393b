/* Forward for fp32 with mma.sync: each operand is two numbers of fp16 (split.cuh). One tile of the result: compute_tile().
 * A block of four warps owns 64 or 128 rows of one head and meets 32 keys at a time, as in forward_mma.cu.
 *
 * Above head size 128 there is no room for 32 keys and their values at once. So K, K, V, V of 16 rows each come one after the
 * other into three places by turns; where a block has room for two places only, they are K and V of 16 keys, and O is
 * rounded twice as often.
 *
 * Few keys: each block splits those it meets, and the call is one launch. Many: a pass before the kernel has split them
 * into the workspace. Either way the numbers are the same to the last bit.
 *
 * P carries 2^14, which cancels against l. O is kept in units of 2^-v, v being the least shift of the V tiles so far. */
#ifndef HEED_CUDA_FORWARD_SPLIT_CUH
#define HEED_CUDA_FORWARD_SPLIT_CUH

#include "tile_split.cuh"
#include "scores_mma.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;

/* What either of two blocks may have on sm_90. Less than one may have on sm_80, and more than on sm_86 and 89. */
constexpr int SHARED_HALF = 113 * 1024;

/* SLOTS: tiles of keys in shared memory, K and V or three. */
template <int D, bool ALONE, int SLOTS> struct shape {
    static constexpr bool BY_TURNS = SLOTS > 2;
    static constexpr int MT = ALONE || D > 64 ? 1 : 2, BR = WARPS * 16 * MT;
    static constexpr int BC = D > 128 && !BY_TURNS ? 16 : 32, NT = BC / 8;
    static constexpr int KEYS = ALONE ? SPLIT_ROWS : BY_TURNS ? BC / 2 : BC; /* of one tile */
    static constexpr bool Q_SPLIT = D > 128; /* before the kernel, which has no registers for it */
};

template <int D, bool ALONE, int SLOTS> struct shared_split {
    typedef shape<D, ALONE, SLOTS> like;
    char Q[split_bytes<D, like::BR>], keys[SLOTS][split_bytes<D, like::KEYS>];
    int low[like::BR], high[like::BR], inside, outside; /* all rows see keys inside .. outside */
    unsigned most[WARPS];
    span sequence; /* what is looked at once for each tile lies here and not in registers */
    head of;
    int i0; /* the block's first row */
    shift q[like::BR / SPLIT_ROWS];
};

template <int MT, int NT> struct exact_tile : query_major<MT, NT> {
    static constexpr bool EXACT = true;
};

/* P = 2^14 exp(c S - m'), l = l a + sum P, with m' = max(m, c S) and a = exp(m - m'), which is what O is to be
 * multiplied by. c2 = c log2(e). */
template <int MT, int NT>
__device__ static void softmax_step(float (&S)[MT][NT][4], float (&m)[MT * 2], float (&l)[MT * 2], float (&a)[MT * 2],
                                    float c, float c2)
{
#pragma unroll
    for (int r = 0; r < MT * 2; r++) {
        float(&rows)[NT][4] = S[r / 2];
        const int half = r % 2 * 2;
        float top = -CUDART_INF_F;
#pragma unroll
        for (int n = 0; n < NT; n++)
            top = fmaxf(top, fmaxf(rows[n][half], rows[n][half + 1]));
        top = quad_max(top);
        const float own = top * c, most = fmaxf(m[r], own), base = most == -CUDART_INF_F ? 0.0f : most;
        const float offset = offset_of(base);
        float sum = 0.0f;
        if (is_vast(offset)) {
            a[r] = exp2_fast((m[r] - base) * LOG2E);
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = half; e < half + 2; e++) {
                    const float x = rows[n][e];
                    const float less = own >= m[r] ? (x - top) * c2 : min_or_nan(fmaf(x, c, -base) * LOG2E, 0.0f);
                    rows[n][e] = exp2_fast(less + TOP);
                    sum += rows[n][e];
                }
        } else {
            a[r] = exp2_fast(offset_of(m[r]) - offset);
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = half; e < half + 2; e++) {
                    rows[n][e] = exp2_fast(fmaf(rows[n][e], c2, -offset));
                    sum += rows[n][e];
                }
        }
        m[r] = most;
        l[r] = l[r] * a[r] + sum;
    }
}

/* Splits rows into a tile. Starts with all threads past what the tile held before. */
template <int D, int ROWS, int TILE>
__device__ static shift split_here(char *tile, int first, unsigned *most, const even_rows &rows)
{
    rows_in_flight<D, ROWS, THREADS> some(rows);
    const shift found = some.find_shift(most);
    some.split(found.s, NULL, [&](int row, int chunk, uint4 hi, uint4 lo) {
        char *to = tile + chunk_of<TILE>(first + row, chunk);
        *(uint4 *)to = hi;
        *(uint4 *)(to + part_bytes<D, TILE>) = lo;
    });
    return found;
}

/* One tile. GENERAL: what the scores need beyond scale and band. exact_below: where the shifts of Q and K add up to less,
 * two numbers of fp16 are not enough. AGAIN: what another kernel has left, and the backward takes its scores from that one.
 * only: at [batch][head][first row] whether it is wanted; NULL: it is. */
template <int D, bool GENERAL, bool ALONE, bool AGAIN, int SLOTS>
__device__ __forceinline__ void compute_tile(const args &a, const split_tensors &split, int number, int tiles,
                                             int exact_below, const int *only)
{
    typedef shape<D, ALONE, SLOTS> like;
    constexpr int MT = like::MT, NT = like::NT, BR = like::BR, BC = like::BC, KEYS = like::KEYS;
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(shared_split<D, ALONE, SLOTS> *)memory;
    const uint32_t sQ = shared_address(s.Q), sK = shared_address(s.keys[0]), sV = shared_address(s.keys[1]);
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16 * MT, i0 = (tiles - 1 - number % tiles) * BR;
    if (threadIdx.x == 0) {
        s.sequence = span_of(a, number / tiles / a.Hq);
        s.of = head_of(a, s.sequence, number / tiles % a.Hq);
        s.i0 = i0;
    }
    __syncthreads();
    const span &q = s.sequence;
    const head &x = s.of;
    if (i0 >= q.rows || (only && !only[((int64_t)q.q_batch * a.Hq + x.h) * a.q_rows + q.q_row + i0]))
        return;
    const int rows = min(BR, q.rows - i0);
    if (threadIdx.x < BR)
        band_of_row(a, q, min(i0 + (int)threadIdx.x, q.rows - 1), s.low[threadIdx.x], s.high[threadIdx.x]);
    __syncthreads();
    constexpr int TOGETHER = HEED_MAX(KEYS, BC);
    const int first = min(s.low[0], s.low[rows - 1]) / TOGETHER * TOGETHER, last = max(s.high[0], s.high[rows - 1]);
    if (threadIdx.x == 0)
        s.inside = max(s.low[0], s.low[rows - 1]), s.outside = min(s.high[0], s.high[rows - 1]);
    const auto copy_keys = [&](uint32_t to, const split_rows &from, int n) {
        copy_split<D, KEYS, THREADS>(to, split_row<D>(from, q.k_batch, x.hk, q.k_row + n), q.keys - n);
    };
    /* BY_TURNS: where tile i lies, K, K, V or V of 32 keys. ptxas has no registers for the plain product. */
    const auto slot = [&](int i) {
        return i % 3 < 2 ? sK + i % 3 * split_bytes<D, KEYS> : shared_address(s.keys[SLOTS - 1]);
    };
    const auto copy_tile = [&](int i) {
        const int n = first + i / 4 * BC;
        if (n < last)
            copy_keys(slot(i), i & 2 ? split.v : split.k, n + i % 2 * KEYS);
        commit_copies();
    };
    if (like::BY_TURNS)
        copy_tile(0);
    else if (!ALONE && first < last)
        copy_keys(sK, split.k, first);
    if (like::Q_SPLIT) {
        const int64_t at = split_at(split.q, q.q_batch, x.h, q.q_row + i0);
        copy_split<D, BR, THREADS>(sQ, split.q.rows + at * (4 * D), rows);
        if (threadIdx.x == 0)
            s.q[0] = split.q.shifts[at];
    }
    commit_copies();
#pragma unroll 1
    for (int part = 0; part < BR && !like::Q_SPLIT; part += SPLIT_ROWS) {
        const shift found = split_here<D, SPLIT_ROWS, BR>(s.Q, part, s.most,
                                                          queries_from(a, q, a.q, x.h, i0 + part, a.D));
        if (threadIdx.x == 0)
            s.q[part / SPLIT_ROWS] = found;
    }
    __syncthreads();
    const shift q_shift = s.q[row0 / SPLIT_ROWS];

    float O[MT][D / 8][4], m[MT * 2], l[MT * 2];
    clear(O);
#pragma unroll
    for (int r = 0; r < MT * 2; r++)
        m[r] = -CUDART_INF_F, l[r] = 0.0f;
    int v_least = 1000;
    shift k_shift, v_shift;
    for (int n0 = first, i = 0; n0 < last; n0 += BC, i += 4) { /* i: BY_TURNS, the first tile of these keys */
        const auto at = [&]() { return split_at(split.k, q.k_batch, x.hk, q.k_row + n0 / SPLIT_ROWS * SPLIT_ROWS); };
        if (ALONE && n0 % SPLIT_ROWS == 0) {
            k_shift = split_here<D, SPLIT_ROWS, KEYS>(s.keys[0], 0, s.most, keys_from(a, q, a.k, x.hk, n0, a.D));
            v_shift = split_here<D, SPLIT_ROWS, KEYS>(s.keys[1], 0, s.most, keys_from(a, q, a.v, x.hk, n0, a.Dv));
            __syncthreads();
        } else if (!ALONE) {
            k_shift = split.k.shifts[at()];
            if (!like::BY_TURNS)
                v_shift = split.v.shifts[at()];
            wait_copies<0>();
            __syncthreads(); /* K is here, and the last V is no longer needed */
            if (like::BY_TURNS) {
                copy_tile(i + 1), copy_tile(i + 2);
            } else {
                copy_keys(sV, split.v, n0);
                commit_copies();
            }
        }
        float S[MT][NT][4];
        const bool whole = n0 >= s.inside && n0 + BC <= s.outside;
        exact_tile<MT, NT> t = { { S, s.low, s.high, i0 + row0 + lane / 4, n0 + lane % 4 * 2, row0 + lane / 4 } };
        const shift own = like::BY_TURNS ? s.q[0] : q_shift; /* for which there is no register then */
        const int shifts = own.s + k_shift.s;
        const bool exactly = own.strange | k_shift.strange || shifts < exact_below;
        if (like::BY_TURNS) {
            typedef float half[MT][NT / 2][4];
            if (!exactly && AGAIN)
                multiply_split_again<D, BR, KEYS>((half &)S[0][0], sQ, row0, slot(i), 0);
            else if (!exactly)
                multiply_split_rows<D, BR, KEYS>((half &)S[0][0], sQ, row0, slot(i), 0);
            wait_copies<0>();
            __syncthreads(); /* the second K is here, and the first no longer needed */
            copy_tile(i + 3);
            if (!exactly && AGAIN)
                multiply_split_again<D, BR, KEYS>((half &)S[0][NT / 2], sQ, row0, slot(i + 1), 0);
            else if (!exactly)
                multiply_split_rows<D, BR, KEYS>((half &)S[0][NT / 2], sQ, row0, slot(i + 1), 0);
        }
        if (exactly)
            multiply_exactly<D <= 128 ? 1 : 4 * MT * NT>(t, a, q, x, own.s, shifts - own.s);
        else if (AGAIN && !like::BY_TURNS)
            multiply_split_again<D, BR, KEYS>(S, sQ, row0, sK, n0 % KEYS);
        else if (!like::BY_TURNS)
            multiply_split_rows<D, BR, KEYS>(S, sQ, row0, sK, n0 % KEYS); /* S = Q K^T 2^shifts */
        if (!ALONE) {
            wait_copies<0>();
            __syncthreads(); /* V is here, and this K is no longer needed */
            if (like::BY_TURNS)
                copy_tile(i + 4);
            else if (n0 + BC < last)
                copy_keys(sK, split.k, n0 + BC);
            commit_copies();
        }
        float c = 1.0f, c2 = LOG2E;
        if (GENERAL) {
            const float up = power(-shifts / 2) * (AGAIN && !exactly ? given_back<score_steps<D>> : 1.0f),
                        further = power(-shifts - -shifts / 2);
#pragma unroll
            for (int r = 0; r < MT * 2; r++)
#pragma unroll
                for (int e = 0; e < NT * 2; e++)
                    t.at(r, e) *= up, t.at(r, e) *= further;
            score(t, a.scale, a, q, x, whole);
        } else {
            if (!whole)
                hide_outside_band(t);
            c = fmaxf(fminf(times_power(a.scale, -shifts), 3e38f), 1.2e-38f); /* 0 and inf times -inf would be NaN */
            c2 = c * (AGAIN && !exactly ? exponents_back<D> : LOG2E);
        }
        float before[MT * 2], now[MT * 2];
        softmax_step(S, m, l, before, c, c2);
        int up[MT * 2] = {};
        if (GENERAL && a.drop_below) { /* what is left of P may be small beside the largest */
            drop_and_scale(t, 1.0f, a, q, x);
            raise_rows(S, up);
        }
        if (like::BY_TURNS)
            v_shift = split.v.shifts[at()];
        const int v_new = min(v_least, v_shift.s);
#pragma unroll
        for (int r = 0; r < MT * 2; r++)
            before[r] *= power(v_new - v_least), now[r] = power(v_new - v_shift.s - up[r]);
        v_least = v_new;
        const uint32_t V = like::BY_TURNS ? slot(i + 2) : sV + n0 % KEYS * 128;
        multiply_split_tile<D, KEYS>(O, before, now, split_operand<MT, NT / 2>(S), V, 0,
                                     like::BY_TURNS ? (int)(slot(i + 3) - V) : 16 * 128); /* O += P V */
    }
    wait_copies<0>();

    const float sink = a.sink.data ? load(a.sink, row_at(a.sink, 0, x.h, 0)) : -CUDART_INF_F;
#pragma unroll
    for (int r = 0; r < MT * 2; r++) {
        const int i = s.i0 + row0 + r / 2 * 16 + r % 2 * 8 + lane / 4;
        float lse;
        const float sum = finish_row(quad_sum(l[r]), m[r], offset_of(m[r]), sink, lse), inverse = 1.0f / sum;
        const float keep = GENERAL && a.drop_below ? a.keep_scale : 1.0f;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int e = r % 2 * 2; e < r % 2 * 2 + 2; e++)
                O[r / 2][n][e] = sum == 0.0f ? 0.0f
                                             : keep * times_power(quotient(O[r / 2][n][e], sum, inverse), -v_least);
        if (a.lse.data && lane % 4 == 0 && i < q.rows)
            store(a.lse, row_at(a.lse, q.q_batch, x.h, q.q_row + i), lse);
    }
    store_rows_fp32<D, MT>(O, a.o, a.Dv, false, [&](int r) {
        return s.i0 + row0 + r < q.rows ? row_at(a.o, q.q_batch, x.h, q.q_row + s.i0 + row0 + r) : NOWHERE;
    });
}

#endif
