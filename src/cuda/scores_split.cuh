/* What is added to the scores of the fp32 kernels of Hopper, or hides them: bias, ALiBi, mask. A lane's share of a tile is that of
 * the tensor core, two rows and every eighth pair of columns, and each lane reads its own elements from memory: those of a row's
 * four lanes, or where keys are the rows those of eight, are 32 bytes side by side. */
#ifndef HEED_CUDA_SCORES_SPLIT_CUH
#define HEED_CUDA_SCORES_SPLIT_CUH

#include "scores.cuh"
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
    __device__ float &at(int r, int c) { return KEYS ? X[r / 2 * 4 + c * 2 + r % 2] : X[c / 2 * 4 + r * 2 + c % 2]; }
    __device__ int row(int r) const { return i0 + later(r); }
    __device__ int key(int c) const { return n0 + apart(c); }
};

/* Scores that are more than a positive scale times q.k, but for softcap and dropout. */
__host__ __device__ inline bool has_terms(const args &a)
{
    return a.bias.data || a.alibi.data || a.mask.data || a.scale <= 0;
}

/* What takes S to logits where something is added to these: the same in the forward and the backward. */
template <int HEAD> __device__ inline float logit_scale(const args &a, int shifts)
{
    return fmaxf(fminf(times_power(a.scale * given_back<score_steps<HEAD>>, -shifts), 3e38f), -3e38f);
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

/* S becomes logits, from factor S. */
template <class T> __device__ inline void add_terms(T &t, float factor, const args &a, const span &s, const head &x)
{
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

#endif
