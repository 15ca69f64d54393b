/* How the portable backward kernels meet a tile: S = Q K^T is parked in shared memory while dP = dO V^T is computed, and then
 *     P = exp(S - lse)    dS = P (dP - delta) dS/d(q.k)
 * a few elements at a time, which keeps the registers free for the results. */
#ifndef HEED_CUDA_DIFFERENTIATE_FP32_CUH
#define HEED_CUDA_DIFFERENTIATE_FP32_CUH

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
                /* Rounded as finish_scores() does: where tiles begin, and so which are whole, is not the pair's own. The
                 * difference is at most 0, but for the rounding of large numbers; NaN stays. */
                const float score = __fmul_rn(four[e], factor);
                const float P = exp2_fast(min_or_nan(score - fact[query(r, c)], 0.0f) * LOG2E);
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

#endif
