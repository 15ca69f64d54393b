/* What the warpgroups of the fp32 forward on Hopper do with scores: S becomes P and l its sum, by a maximum that only keeps P in
 * fp16's range. A shape S says how many keys a block has (S::KEYS) and how wide O is (S::HEAD). */
#ifndef HEED_CUDA_SOFTMAX_SPLIT_CUH
#define HEED_CUDA_SOFTMAX_SPLIT_CUH

#include "scores_split.cuh"
#include "softmax_sm90.cuh"

/* The P of a row begin with 2^11 for the largest of its first keys. The sum of those of a block that a lane has may grow to
 * 2^15: then none of them is out of fp16's range. */
constexpr int P_TOP = 11;
constexpr float P_SUM = 0x1p15f;

/* The rows of a lane: what is subtracted from exponents, inf where a row has seen no key yet, and sums of P. */
struct split_state {
    float offset[2], l[2];
    bool unset; /* there is such a row in the warp */
    bool low;   /* the lane has met logits below -FARTHEST in a row without others */
};

/* Rows that see their first keys take the maximum of these. */
template <class S> __device__ inline void find_maxima(const float (&s)[S::KEYS / 2], split_state &x, float c)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float most = s[2 * r];
#pragma unroll
        for (int i = 0; i < S::KEYS / 8; i++)
            most = fmaxf(most, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
        most = quad_max(most) * c;
        if (x.offset[r] == CUDART_INF_F && most != -CUDART_INF_F)
            x.offset[r] = offset_of(most, P_TOP);
    }
    x.unset = __any_sync(~0u, x.offset[0] == CUDART_INF_F || x.offset[1] == CUDART_INF_F);
}

/* Beyond, what is subtracted from exponents would be rounded too far. */
constexpr float FARTHEST = 1e7f;

/* The maxima follow logits with terms, and O and l follow them, so that P stays near 2^11 however a bias rises along the keys.
 * Beside logits above -FARTHEST those below are nothing. True: some are beyond FARTHEST. */
template <class S>
__device__ inline bool follow_maxima(const float (&s)[S::KEYS / 2], split_state &x, float (&O)[S::HEAD / 2])
{
    float most[2];
    bool beyond = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        most[r] = s[2 * r];
#pragma unroll
        for (int i = 0; i < S::KEYS / 8; i++)
            most[r] = fmaxf(most[r], fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
        most[r] = quad_max(most[r]);
        beyond |= most[r] > FARTHEST;
        if (most[r] < -FARTHEST) {
            x.low |= most[r] != -CUDART_INF_F;
            most[r] = -CUDART_INF_F;
        }
    }
    const auto grows = [&](int r) {
        return most[r] != -CUDART_INF_F && !(offset_of(most[r], P_TOP) <= x.offset[r] + 3.0f);
    };
    const auto is_unset = [&](int r) { return x.offset[r] == CUDART_INF_F && most[r] != -CUDART_INF_F; };
    if (__any_sync(~0u, grows(0) || grows(1) || is_unset(0) || is_unset(1)))
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const bool changes = grows(r) || is_unset(r);
            const float offset = changes ? offset_of(most[r], P_TOP) : x.offset[r];
            const float factor = grows(r) ? exp2_fast(x.offset[r] - offset) : 1.0f; /* of nothing, where it is unset */
            x.offset[r] = offset, x.l[r] *= factor;
#pragma unroll
            for (int i = 0; i < S::HEAD / 4; i++)
                O[i / 2 * 4 + 2 * r + i % 2] *= factor;
        }
    return __any_sync(~0u, beyond);
}

/* P = 2^(c S - offset), and its sums. */
template <class S>
__device__ inline void take_exponentials(float (&s)[S::KEYS / 2], const split_state &x, float c, float (&sum)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float two[2] = {};
#pragma unroll
        for (int i = 0; i < S::KEYS / 4; i++) {
            float &p = s[i / 2 * 4 + 2 * r + i % 2];
            p = exp2_fast(fmaf(p, c, -x.offset[r]));
            two[i % 2] += p;
        }
        sum[r] = two[0] + two[1];
    }
}

/* Logits become P, and l its sum. */
template <class S> __device__ inline void weigh_logits(float (&s)[S::KEYS / 2], split_state &x)
{
    float sum[2];
    take_exponentials<S>(s, x, LOG2E, sum);
    x.l[0] += sum[0], x.l[1] += sum[1];
}

/* S becomes P, and l its sum: c = scale 2^-shifts changes from block to block. No maximum holds this up: where P has grown
 * too far it is lowered afterwards, with O, l, and `now`, with which what is still to be added to O will be multiplied.
 * True: it has grown beyond fp32, 2^117 times, in a row that exists. */
template <class S, class Exists>
__device__ inline bool weigh_split(float (&s)[S::KEYS / 2], split_state &x, float c, float (&O)[S::HEAD / 2],
                                   float (&now)[2], Exists exists)
{
    if (x.unset)
        find_maxima<S>(s, x, c);
    float sum[2];
    take_exponentials<S>(s, x, c * exponents_back<S::HEAD>, sum);
    bool lost = false;
    if (__any_sync(~0u, !(fmaxf(sum[0], sum[1]) <= P_SUM))) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float most = quad_max(sum[r]);
            const float grown = most > P_SUM ? (float)((int)(__float_as_uint(most) >> 23) - 127 - P_TOP) : 0.0f;
            const float offset = x.offset[r] + grown; /* rounded; inf where a row has seen no key */
            const float factor = grown > 0.0f ? exp2_fast(x.offset[r] - offset) : 1.0f;
            x.offset[r] = offset;
            x.l[r] *= factor, now[r] *= factor, sum[r] *= factor;
#pragma unroll
            for (int i = 0; i < S::HEAD / 4; i++)
                O[i / 2 * 4 + 2 * r + i % 2] *= factor;
#pragma unroll
            for (int i = 0; i < S::KEYS / 4; i++)
                s[i / 2 * 4 + 2 * r + i % 2] *= factor;
        }
        const bool there[2] = { exists(0), exists(1) }; /* by all lanes: it shuffles */
        lost = __any_sync(~0u, (!(sum[0] < CUDART_INF_F) && there[0]) || (!(sum[1] < CUDART_INF_F) && there[1]));
    }
    x.l[0] += sum[0], x.l[1] += sum[1];
    return lost;
}

#endif
