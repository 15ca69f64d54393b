/* What the warpgroups of the Hopper backward do with a tile: wait for it, turn S into P and dP into dS, send results
 * out. What they are given: backward_sm90_block.cuh. */
#ifndef HEED_CUDA_BACKWARD_SM90_CUH
#define HEED_CUDA_BACKWARD_SM90_CUH

#include "backward_sm90_feed.cuh"

/* ---- Consumers: waiting and releasing ---------------------------------------------------------------------------- */

/* By every lane: it costs no time, and racecheck follows each thread by itself. */
__device__ inline void release(uint64_t *barrier) { arrive(shared_address(barrier)); }

template <class C> __device__ inline void wait_first(backward_shared<C> &s, int tile)
{
    wait(shared_address(&s.first_full[tile % C::FIRST]), tile / C::FIRST & 1);
}

template <class C> __device__ inline void wait_second(backward_shared<C> &s, int tile)
{
    wait(shared_address(&s.second_full[tile % C::SECOND]), tile / C::SECOND & 1);
}

template <class C> __device__ inline void release_first(backward_shared<C> &s, int tile)
{
    release(&s.first_free[tile % C::FIRST]);
}

template <class C> __device__ inline void release_second(backward_shared<C> &s, int tile)
{
    release(&s.second_free[tile % C::SECOND]);
}

/* P of a tile passes from one role to the other: until there is room for it, and until it is there. */
template <class C> __device__ inline void wait_to_pass(backward_shared<C> &s, int tile)
{
    wait(shared_address(&s.pass_free[tile % 2]), tile / 2 & 1 ^ 1);
}

template <class C> __device__ inline void wait_passed(backward_shared<C> &s, int tile)
{
    wait(shared_address(&s.pass_full[tile % 2]), tile / 2 & 1);
}

/* meet(piece, its number) for one piece of work after the other, when its own tiles are there. */
template <class C, class Meet> __device__ inline void meet_pieces(backward_shared<C> &s, Meet meet)
{
    for (int n = 0;; n++) {
        const piece &w = s.work[n % C::WORKS];
        wait(shared_address(&s.own_full[n % C::WORKS]), n / C::WORKS & 1);
        if (!uniform(w.exists))
            return;
        meet(w, n);
    }
}

/* Lets tiles pass that this group has no use for. */
template <class C> __device__ inline int skip(backward_shared<C> &s, int tile, int count)
{
    for (; count > 0; count--, tile++) {
        wait_first(s, tile);
        release_first(s, tile);
        wait_second(s, tile);
        release_second(s, tile);
    }
    return tile;
}

template <class C> __device__ inline uint64_t first_tile(const backward_shared<C> &s, int tile)
{
    return tile_at(shared_address(s.first[0]) + tile % C::FIRST * C::BYTES, COLUMNS * 128);
}

template <class C> __device__ inline uint64_t second_tile(const backward_shared<C> &s, int tile)
{
    return tile_at(shared_address(s.second[0]) + tile % C::SECOND * C::BYTES, COLUMNS * 128);
}

/* ---- Pointwise work ---------------------------------------------------------------------------------------------- */

/* Column of element e of a tile in this lane, less that of its first. */
__device__ constexpr int column_of(int e) { return e / 4 * 8 + e % 2; }

/* Where there may be a softcap (CAPS), it is asked for at run time, once for all elements of a tile: kernels of its own would
 * double what there is to compile. Tiles under one all need care, so that P of others is computed without asking. */

/* 2^x, where only rounding takes x above 0. */
__device__ inline float at_most_one(float x) { return exp2_fast(min_or_nan(x, 0.0f)); }

/* The general case: P(e), but 0 in columns outside the row's range. range: of this lane's rows. column: this lane's first. */
template <int FROM, int TO, class Element>
__device__ inline void careful_probabilities(float (&S)[COLUMNS / 2], const int2 *range, int column, Element P)
{
    const int low[2] = { range[0].x - column, range[8].x - column };
    const int high[2] = { range[0].y - column, range[8].y - column };
#pragma unroll
    for (int e = FROM; e < TO; e++) {
        const int i = column_of(e), r = e / 2 % 2;
        const float y = P(e);
        S[e] = i >= low[r] && i < high[r] ? y : 0.0f;
    }
}

/* The softcap's slope, 1 - tanh^2, from P, which is 0 or normal: P = 0 takes no gradient anyway. What P is rounded by is divided
 * by the softcap, so that small ones are left to others: HEED_USES_STEEP. */
__device__ inline float slope_at(const score_rule &rule, float P, float L)
{
    const float u = (log2_fast(P) + L) * rule.out_inverse;
    return P == 0.0f ? 0.0f : 1.0f - u * u;
}

/* S becomes P. L belongs to the columns (keys own the rows), and where it is ADDED, S has -L / c in it; ranges are those
 * of the own rows; care: see care_for(). */
template <bool CAPS, bool ADDED = false, int FROM = 0, int TO = COLUMNS / 2>
__device__ inline void probabilities_by_column(float (&S)[COLUMNS / 2], const float *L, const score_rule &rule,
                                               int care, const int2 *range)
{
    L += threadIdx.x % 4 * 2;
    if (care < 0) {
#pragma unroll
        for (int e = FROM; e < TO; e++)
            S[e] = exp2_fast(ADDED ? S[e] * rule.c : fmaf(S[e], rule.c, -L[column_of(e)]));
        return;
    }
    const bool capped = CAPS && rule.capped();
    const float c = capped ? rule.out : rule.c;
    if (capped)
#pragma unroll
        for (int e = FROM; e < TO; e++)
            S[e] = rule.tangent(S[e]);
    careful_probabilities<FROM, TO>(S, range, care + threadIdx.x % 4 * 2, [&](int e) {
        return at_most_one(fmaf(S[e], c, -(ADDED ? 0.0f : L[column_of(e)])));
    });
}

template <class T> __device__ inline float2 unpack2(uint32_t x);
template <> __device__ inline float2 unpack2<__half>(uint32_t x) { return __half22float2(*(const __half2 *)&x); }
template <> __device__ inline float2 unpack2<__nv_bfloat16>(uint32_t x)
{
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u));
}

/* dP becomes dS = P (dP - delta), or where that is ADDED, P dP. */
template <bool CAPS, bool ADDED = false>
__device__ inline void differentiate_by_column(float (&dP)[COLUMNS / 2], const float (&P)[COLUMNS / 2], const float *L,
                                               const float *delta, const score_rule &rule)
{
    L += threadIdx.x % 4 * 2, delta += threadIdx.x % 4 * 2;
#pragma unroll
    for (int e = 0; e < COLUMNS / 2; e++)
        dP[e] = (ADDED ? dP[e] : dP[e] - delta[column_of(e)]) * P[e];
    if (CAPS && rule.capped())
#pragma unroll
        for (int e = 0; e < COLUMNS / 2; e++)
            dP[e] *= slope_at(rule, P[e], L[column_of(e)]);
}

/* The same from P as dV gets it, where the registers of the exact one have a next S to receive. */
template <class T, bool CAPS, bool ADDED = false>
__device__ inline void differentiate_by_column(float (&dP)[COLUMNS / 2], const uint32_t (&P)[COLUMNS / 16][4],
                                               const float *L, const float *delta, const score_rule &rule)
{
    L += threadIdx.x % 4 * 2, delta += threadIdx.x % 4 * 2;
#pragma unroll
    for (int e = 0; e < COLUMNS / 2; e += 2) {
        const float2 x = unpack2<T>(P[e / 8][e / 2 % 4]),
                     d = ADDED ? make_float2(0.0f, 0.0f) : *(const float2 *)(delta + column_of(e));
        dP[e] = (dP[e] - d.x) * x.x, dP[e + 1] = (dP[e + 1] - d.y) * x.y;
    }
    if (CAPS && rule.capped())
#pragma unroll
        for (int e = 0; e < COLUMNS / 2; e += 2) {
            const float2 x = unpack2<T>(P[e / 8][e / 2 % 4]);
            dP[e] *= slope_at(rule, x.x, L[column_of(e)]);
            dP[e + 1] *= slope_at(rule, x.y, L[column_of(e + 1)]);
        }
}

/* The same where L and delta belong to the rows (queries own them). plain: no need of care. Under a softcap P comes multiplied
 * with its slope, which dS wants, and here nobody wants P itself. */
__device__ inline void probabilities_by_row(float (&S)[COLUMNS / 2], const float (&L)[2], const score_rule &rule,
                                            bool plain, const int2 *range, int column)
{
    if (plain) {
#pragma unroll
        for (int e = 0; e < COLUMNS / 2; e++)
            S[e] = exp2_fast(fmaf(S[e], rule.c, -L[e / 2 % 2]));
        return;
    }
    if (rule.capped())
        careful_probabilities<0, COLUMNS / 2>(S, range, column, [&](int e) {
            const float t = rule.tangent(S[e]);
            return at_most_one(fmaf(t, rule.out, -L[e / 2 % 2])) * fmaf(-t, t, 1.0f);
        });
    else
        careful_probabilities<0, COLUMNS / 2>(S, range, column,
                                              [&](int e) { return at_most_one(fmaf(S[e], rule.c, -L[e / 2 % 2])); });
}

__device__ inline void differentiate_by_row(float (&dP)[COLUMNS / 2], const float (&P)[COLUMNS / 2],
                                            const float (&delta)[2])
{
#pragma unroll
    for (int e = 0; e < COLUMNS / 2; e++)
        dP[e] = (dP[e] - delta[e / 2 % 2]) * P[e];
}

/* ---- Results ----------------------------------------------------------------------------------------------------- */

/* Writes 64 rows of a result, times `scale`, those below `rows` that exist. at: element offset of the first, step: from
 * one to the next. Straight from registers, as nobody then waits for room in shared memory: four lanes that hold parts of
 * a row give each other what they need to have 16 bytes each. */
template <class T, class C>
__device__ inline void store_result(const float (&Y)[C::D / 2], float scale, const view &t, int width, bool accumulate,
                                    int rows, int64_t at, int64_t step)
{
    const int thread = thread_anew(), lane = thread % 32, top = thread / 32 % 4 * 16;
    if (t.dtype == HEED_F32) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = top + lane / 4 + half * 8, first = lane % 4 * 2;
            const int count = r < rows ? width - first : 0; /* of the columns from the lane's first on */
            float *const to = (float *)t.data + at + r * step + first;
            float cut = 0.0f; /* the last column, where it has no neighbour */
            const auto two = [&](int i) { return &Y[4 * i + 2 * half]; };
            if (accumulate) { /* not a choice in one loop: that would be two branches for each pair */
#pragma unroll
                for (int i = 0; i < C::D / 8; i++) {
                    float2 *const x = (float2 *)(to + 8 * i);
                    if (8 * i + 2 <= count)
                        *x = make_float2(fmaf(two(i)[0], scale, x->x), fmaf(two(i)[1], scale, x->y));
                    cut = 8 * i + 1 == count ? two(i)[0] : cut;
                }
            } else
#pragma unroll
                for (int i = 0; i < C::D / 8; i++) {
                    if (8 * i + 2 <= count)
                        *(float2 *)(to + 8 * i) = make_float2(two(i)[0] * scale, two(i)[1] * scale);
                    cut = 8 * i + 1 == count ? two(i)[0] : cut;
                }
            if (count % 8 == 1)
                to[count - 1] = accumulate ? fmaf(cut, scale, to[count - 1]) : cut * scale;
        }
        return;
    }
    uint16_t *const out = (uint16_t *)t.data + at + (top + lane / 4) * step + lane % 4 * 8;
#pragma unroll
    for (int k = 0; k < C::D / 32; k++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *const y = &Y[16 * k + 4 * i + 2 * half];
                x[i] = pack<T>(y[0] * scale, y[1] * scale);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) { /* lanes 0 and 1, 2 and 3 */
                const uint32_t given = __shfl_xor_sync(~0u, lane & 1 ? x[2 * i] : x[2 * i + 1], 1);
                x[2 * i] = lane & 1 ? given : x[2 * i], x[2 * i + 1] = lane & 1 ? x[2 * i + 1] : given;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) { /* lanes 0 and 2, 1 and 3 */
                const uint32_t given = __shfl_xor_sync(~0u, lane & 2 ? x[i] : x[i + 2], 2);
                x[i] = lane & 2 ? given : x[i], x[i + 2] = lane & 2 ? x[i + 2] : given;
            }
            const int column = 32 * k + lane % 4 * 8;
            uint16_t *const to = out + half * 8 * step + 32 * k;
            if (top + lane / 4 + half * 8 >= rows)
                continue;
            if (column + 8 <= width)
                *(uint4 *)to = make_uint4(x[0], x[1], x[2], x[3]);
            else
#pragma unroll 1 /* rare, and there is one for each k */
                for (int e = 0; column + e < width; e++)
                    to[e] = (uint16_t)((e < 2 ? x[0] : e < 4 ? x[1] : e < 6 ? x[2] : x[3]) >> 16 * (e % 2));
        }
}

template <int N> __device__ inline void clear(float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] = 0.0f;
}

#endif
