/* What the scores of the fp32 kernels of Hopper may be beyond scale and band: softcap, bias, ALiBi, mask; and dropout of their P. A
 * lane's share of a tile is that of the tensor core, two rows and every eighth pair of columns, and each lane reads its own elements
 * of a bias or mask from memory: those of a row's four lanes, or where keys are the rows those of eight, are 32 bytes side by side. */
#ifndef HEED_CUDA_SCORES_SPLIT_CUH
#define HEED_CUDA_SCORES_SPLIT_CUH

#include "dropout_sm90.cuh"
#include "scores.cuh"
#include "sm90.cuh"
#include "split.cuh"

/* N scores of a lane, as scores.cuh wants to see them. KEYS: rows are keys, else queries. */
template <bool KEYS, int N> struct lane_scores {
    static constexpr int R = KEYS ? N / 2 : 2, C = KEYS ? 2 : N / 2;
    static constexpr bool EXACT = true;
    float (&X)[N];
    int i0, n0; /* this lane's first query and first key */
    static __device__ constexpr int down(int r) { return r * 8; }
    static __device__ constexpr int across(int c) { return c / 2 * 8 + c % 2; }
    static __device__ constexpr int later(int r) { return KEYS ? across(r) : down(r); }
    static __device__ constexpr int apart(int c) { return KEYS ? down(c) : across(c); }
    static __device__ constexpr int element(int r, int c)
    {
        return KEYS ? r / 2 * 4 + c * 2 + r % 2 : c / 2 * 4 + r * 2 + c % 2;
    }
    __device__ float &at(int r, int c) { return X[element(r, c)]; }
    __device__ int row(int r) const { return i0 + later(r); }
    __device__ int key(int c) const { return n0 + apart(c); }
};

/* Scores that are more than a positive scale times q.k, or P that are more than their exponentials. */
__host__ __device__ inline bool has_terms(const args &a) { return has_extras(a) || a.scale <= 0; }

/* What of it a kernel takes. The code of softcap and dropout makes a tile 1.1 to 1.2 times as long for biases and masks, too. */
enum { WITHOUT_TERMS, WITH_SOME_TERMS, WITH_ALL_TERMS };
inline int terms_of(const args &a)
{
    return a.softcap > 0 || a.drop_below ? WITH_ALL_TERMS : has_terms(a) ? WITH_SOME_TERMS : WITHOUT_TERMS;
}
template <int TERMS> __device__ inline bool has_cap(const args &a) { return TERMS == WITH_ALL_TERMS && a.softcap > 0; }
template <int TERMS> __device__ inline bool has_dropout(const args &a)
{
    return TERMS == WITH_ALL_TERMS && a.drop_below;
}

/* What takes q.k to logits, or where there is a softcap to what it takes the tangent of. Not by the kernels: a division is a call,
 * for which the tensor core would have to wait. */
inline float unshifted_scale(const args &a) { return a.softcap > 0 ? a.scale / a.softcap : a.scale; }

/* The same of S that has terms, from that: alike in the forward and the backward. */
template <int HEAD> __device__ inline float logit_scale(float scale, int shifts)
{
    return fmaxf(fminf(times_power(scale * given_back<score_steps<HEAD>>, -shifts), 3e38f), -3e38f);
}

/* Calls use(r, c, element) for each score, with its element of a mask or bias, or with `none` where there is no such query or
 * key. at: that of the lane's first score. UNIT: keys lie side by side. */
template <bool UNIT, class T, class Element, class Use>
__device__ inline void meet_elements(const T &t, const span &s, const Element *at, int64_t down, int64_t step,
                                     Element none, Use use)
{
    constexpr int ALL = T::R * T::C,
                  TOGETHER = UNIT ? 16 : 4; /* on their way at a time: addresses take registers too */
    const int rows = s.rows - t.i0, keys = s.keys - t.n0;
#pragma unroll
    for (int i = 0; i < ALL; i += TOGETHER) {
        Element x[TOGETHER];
#pragma unroll
        for (int n = 0; n < TOGETHER; n++) {
            const int r = (i + n) / T::C, c = (i + n) % T::C;
            const Element *const from = at + (UNIT ? T::apart(c) : T::apart(c) * step);
            x[n] = T::later(r) < rows && T::apart(c) < keys ? *from : none;
            if (c == T::C - 1) /* to the next query */
                at += r + 1 < T::R ? (T::later(r + 1 < T::R ? r + 1 : r) - T::later(r)) * down : 0;
        }
#pragma unroll
        for (int n = 0; n < TOGETHER; n++)
            use((i + n) / T::C, (i + n) % T::C, x[n]);
    }
}

/* The same of a mask or bias that begins at `first`. */
template <class Element, class T, class Use>
__device__ inline void meet_term(const T &t, const args &a, const span &s, const view &m, int64_t first, Element none,
                                 Use use)
{
    const int64_t step = a.col_step * m.stride[3];
    const Element *const at = (const Element *)m.data + first + t.i0 * m.stride[2] +
                              (a.col + t.n0 * a.col_step) * m.stride[3];
    if (step == 1)
        meet_elements<true>(t, s, at, m.stride[2], step, none, use);
    else
        meet_elements<false>(t, s, at, m.stride[2], step, none, use);
}

/* S becomes logits, from factor S, which is what logit_scale() says it is. cap(e, slope): the slope of a softcap at element e. Where
 * there is none it is 0, not unset: a register that one branch alone sets is taken all through a loop. */
template <int TERMS, class T, class Cap>
__device__ inline void add_terms(T &t, float factor, const args &a, const span &s, const head &x, Cap cap)
{
    if (has_cap<TERMS>(a)) {
#pragma unroll
        for (int r = 0; r < T::R; r++)
#pragma unroll
            for (int c = 0; c < T::C; c++) {
                const float u = capped<T::EXACT>(t.at(r, c), factor, 1.0f);
                t.at(r, c) = u;
                cap(T::element(r, c), 1.0f - u * u);
            }
        factor = a.softcap;
    } else if (TERMS == WITH_ALL_TERMS)
#pragma unroll
        for (int e = 0; e < T::R * T::C; e++)
            cap(e, 0.0f);
    if (a.bias.data)
        meet_term<float>(t, a, s, a.bias, x.bias, 0.0f,
                         [&](int r, int c, float bias) { t.at(r, c) = fmaf(t.at(r, c), factor, bias); });
    else
        scale_scores(t, factor);
    if (a.alibi.data)
        add_alibi(t, s, x.slope);
    if (a.mask.data)
        meet_term<unsigned char>(t, a, s, a.mask, x.mask, 1, [&](int r, int c, unsigned char visible) {
            t.at(r, c) = visible ? t.at(r, c) : -CUDART_INF_F;
        });
}

/* ---- Dropout ----------------------------------------------------------------------------------------------------- */

/* The bit of element e of lane_scores<KEYS, N>: what exchange_bits() makes of those of draw_four() or draw_two(). The eights of a
 * row are shared out to its four lanes; where keys are the rows, a warp's two eights of them meet queries that are shared out to
 * its lanes, and of 32 queries only half of the lanes draw for either eight. */
template <bool KEYS, int N> __device__ constexpr int drop_bit(int e)
{
    static_assert(N == 32 || N == 16);
    const int i = e / 4, r = e / 2 % 2, c = e % 2; /* eight columns, row, column */
    return KEYS ? (N == 32 ? i % 2 * 16 + r * 8 + c * 4 + i / 2 : i % 2 * 16 + c * 8 + r * 2 + i / 2)
                : (N == 32 ? c * 16 + i / 4 * 8 + r * 4 + i % 4 : c * 16 + r * 8 + i);
}

/* Bit drop_bit(e) is set where P of element e is dropped. i0, n0: the lane's first query and key, as lane_scores has them. Tiles
 * begin at multiples of eight keys. By whole warps. */
template <bool KEYS, int N> __device__ inline uint32_t draw_dropped(const args &a, const span &s, int h, int i0, int n0)
{
    asm volatile(""
                 : "+r"(h), "+r"(i0), "+r"(n0)); /* or what follows from them alone would be kept from tile to tile */
    const drop_source source = { seed_of(a), (uint32_t)h, (uint32_t)s.b };
    const auto position = [&](int i) { return (uint32_t)(uint64_t)s.p0 + (uint32_t)i * (uint32_t)(uint64_t)s.p_step; };
    const int lane = thread_anew() % 32;
    uint32_t kept = 0;
    if (are_eights_whole(a)) {
        const uint32_t first = (uint32_t)(uint64_t)(s.r0 + n0 >> 3);
        const int query = KEYS ? i0 + lane / 4 % (N / 4) * 8 : i0;
        const drop_source::row_part rows[2] = { source.of_row(position(query)),
                                                source.of_row(position(query + (KEYS ? 1 : 8))) };
        if (N == 32) {
            const uint32_t eight = first + (KEYS ? 0 : lane % 4), eights[2] = { eight, eight + (KEYS ? 1 : 4) };
            kept = draw_four(source, eights, rows, a.drop_below);
        } else
            kept = draw_two(source, first + (KEYS ? lane / 16 : lane % 4), rows, a.drop_below);
        if (KEYS) {
            kept = exchange_bits(kept, 4, 16, 0x0000FFFF);
            kept = exchange_bits(kept, 8, 1, 0x55555555);
            kept = exchange_bits(kept, 16, 2, 0x33333333);
        } else {
            kept = exchange_bits(kept, 1, 1, 0x55555555);
            kept = exchange_bits(kept, 2, 2, 0x33333333);
        }
        return ~kept;
    }
#pragma unroll 1
    for (int e = 0; e < N; e++) { /* rare, and would be long otherwise */
        const int across = e / 4 * 8 + e % 2, down = e / 2 % 2 * 8;
        const int64_t key = s.r0 + (n0 + (KEYS ? down : across)) * s.r_step;
        const uint32_t row = position(i0 + (KEYS ? across : down));
        kept |= (uint32_t)source.keeps(key, row, a.drop_below) << drop_bit<KEYS, N>(e);
    }
    return ~kept;
}

/* Drops P. */
template <bool KEYS, int N> __device__ inline void drop(float (&P)[N], uint32_t dropped)
{
#pragma unroll
    for (int e = 0; e < N; e++)
        P[e] = dropped & 1u << drop_bit<KEYS, N>(e) ? 0.0f : P[e];
}

/* Gives those P a sign that are dropped, which dS still wants: see differentiate(). */
template <bool KEYS, int N> __device__ inline void sign_dropped(float (&P)[N], uint32_t dropped)
{
#pragma unroll
    for (int e = 0; e < N; e++)
        P[e] = dropped & 1u << drop_bit<KEYS, N>(e) ? -P[e] : P[e];
}

#endif
