/* From q.k and dP to P and dS, in registers, for the kernels of backward_mma.cuh; and tiles of scores with keys as rows. */
#ifndef HEED_CUDA_DIFFERENTIATE_MMA_CUH
#define HEED_CUDA_DIFFERENTIATE_MMA_CUH

#include "begin_mma.cuh"

/* A warp's scores with keys as rows, of a tile KEYS long. A lane has 2 MT neighbouring keys, and rows of the key
 * tiles are in that order (see key_order): mask and bias of a query are one load. low and high are those of the
 * tile's queries. */
template <int MT, int NT, int KEYS, class T> struct key_major {
    static constexpr int R = 2 * NT, C = 2 * MT, NEIGHBOURS = C;
    static constexpr bool EXACT = false;
    typedef T type;
    float (&X)[MT][NT][4];
    const int *lows, *highs;
    int i0, n0, column0;     /* first query and first key of this lane; its first column of the tile */
    const char *bias, *mask; /* of column0 and n0 in shared memory */
    typedef score_tiles<0, KEYS, true> extras;
    __device__ float &at(int r, int c) { return X[c / 2][r / 2][c % 2 * 2 + r % 2]; }
    static __device__ constexpr int down(int r) { return r / 2 * 8 + r % 2; }
    static __device__ constexpr int apart(int c) { return c; }
    __device__ int row(int r) const { return i0 + down(r); }
    __device__ int key(int c) const { return n0 + c; }
    __device__ int low(int r) const { return lows[column0 + down(r)]; }
    __device__ int high(int r) const { return highs[column0 + down(r)]; }
};

/* Which key of a block's own is in row r of its tiles: a warp's rows g, g + 8, ... belong to the same lanes. */
template <int MT> struct key_order {
    static constexpr int OWN = 16 * MT;
    __device__ int operator()(int r) const { return r / OWN * OWN + r % 8 * (2 * MT) + r % OWN / 8; }
};

template <int MT, int NT, int KEYS, class T>
__device__ inline void add_bias(key_major<MT, NT, KEYS, T> &t, float factor, const args &a, const span &, const head &)
{
    typedef typename key_major<MT, NT, KEYS, T>::extras extras;
    if (a.bias.dtype == HEED_F32) {
#pragma unroll
        for (int r = 0; r < 2 * NT; r++) {
            const words_of<8 * MT> row(t.bias + t.down(r) * extras::pitch(4));
#pragma unroll
            for (int c = 0; c < 2 * MT; c++)
                t.at(r, c) = fmaf(t.at(r, c), factor, __uint_as_float(row.x[c]));
        }
    } else {
#pragma unroll
        for (int r = 0; r < 2 * NT; r++) {
            const words_of<4 * MT> row(t.bias + t.down(r) * extras::pitch(2));
#pragma unroll
            for (int c = 0; c < 2 * MT; c += 2) {
                const float2 both = to_floats(row.x[c / 2], type_of<T>(a));
                t.at(r, c) = fmaf(t.at(r, c), factor, both.x);
                t.at(r, c + 1) = fmaf(t.at(r, c + 1), factor, both.y);
            }
        }
    }
}

template <int MT, int NT, int KEYS, class T>
__device__ inline void apply_mask(key_major<MT, NT, KEYS, T> &t, const args &, const span &, const head &)
{
    typedef typename key_major<MT, NT, KEYS, T>::extras extras;
#pragma unroll
    for (int r = 0; r < 2 * NT; r++) {
        const words_of<2 * MT> row(t.mask + t.down(r) * extras::pitch(1));
#pragma unroll
        for (int c = 0; c < 2 * MT; c++)
            t.at(r, c) = row.x[0] & 0xFFu << 8 * c ? t.at(r, c) : -CUDART_INF_F;
    }
}

/* The eight keys of one Philox are those of SHARE lanes, STEP apart: each of them draws for another eight of the DRAWS
 * that they need together, makes a byte of them, and all exchange bytes. draw(i) makes the byte number i, use(i, byte)
 * takes it. */
template <int DRAWS, int SHARE, int STEP, class Draw, class Use>
__device__ inline void draw_together(Draw draw, Use use)
{
    static_assert(DRAWS % SHARE == 0, "the same number for each");
    const int lane = threadIdx.x % 32, mine = lane / STEP % SHARE;
#pragma unroll
    for (int i = 0; i < DRAWS; i += 4 * SHARE) {
        const int EACH = DRAWS - i < 4 * SHARE ? (DRAWS - i) / SHARE : 4;
        uint32_t four = 0;
#pragma unroll
        for (int n = 0; n < EACH; n++)
            four |= draw(i + n * SHARE + mine) << 8 * n;
#pragma unroll
        for (int j = 0; j < SHARE; j++) {
            const uint32_t theirs = __shfl_sync(~0u, four, lane + (j - mine) * STEP);
#pragma unroll
            for (int n = 0; n < EACH; n++)
                use(i + n * SHARE + j, theirs >> 8 * n);
        }
    }
}

/* As for query_major; here the eight keys of one Philox are those of lanes four apart. */
template <int MT, int NT, int KEYS, class T>
__device__ inline void draw_tile(const key_major<MT, NT, KEYS, T> &t, kept_bits<key_major<MT, NT, KEYS, T>> &kept,
                                 const args &a, const span &s, const head &x)
{
    constexpr int C = 2 * MT, SHARE = 8 / C;
    const drop_source source = { seed_of(a), (uint32_t)x.h, (uint32_t)s.b };
    const int number = threadIdx.x % 32 / 4 % SHARE * C;
    const int64_t first = s.r0 + t.n0 - number;
    if (s.r_step != 1 || first % 8) {
#pragma unroll 1
        for (int r = 0; r < 2 * NT; r++) /* rare, and would be long otherwise */
            kept.add_row(r, draw(t, r, a, s, x, source.seed));
        return;
    }
    const drop_source::keys_part keys = source.of_keys((uint32_t)(uint64_t)(first >> 3));
    draw_together<2 * NT, SHARE, 4>(
        [&](int i) {
            const uint32_t p = (uint32_t)(uint64_t)(s.p0 + (t.i0 + i / 2 * 8 + i % 2) * s.p_step);
            return source.kept(keys, source.of_row(p), a.drop_below);
        },
        [&](int i, uint32_t byte) { kept.add(i, 0, byte >> number & ((1u << C) - 1)); });
}

/* What a row's lse is multiplied by to be the L of probability(), or in units of a bias that S begins with. */
template <int SCORES> static float unit_of_lse(const args &a)
{
    return SCORES == GENERAL ? 1.0f : SCORES == BEGUN ? with_unit<SCORES>(a).per_unit : LOG2E;
}

/* P = 2^(c S - L); LARGE: 2^(c (S - L)), the slower way that takes scores of any size. At most 1: rounding, where S is
 * large, could make it more. */
template <bool LARGE> __device__ inline float probability(float S, float c, float L)
{
    return exp2_fast(LARGE ? min_or_nan(S - L, 0.0f) * c : min_or_nan(fmaf(S, c, -L), 0.0f));
}

/* A bias can make scores so large that q.k is rounded when it is added, as it was in the forward. L must not be
 * subtracted before that, but before the product with c. */
__device__ inline bool is_coarse(float L) { return !(fabsf(L) < 1e5f); }

/* The L of probability(), where it is not in S already: L is in units of S where S begins with a bias, and at D = 128, where
 * the bias has to be divided anyway, S begins without it. */
template <int D, int SCORES> __device__ inline float less_later(const mma_args &a, float L, bool coarse)
{
    return SCORES != BEGUN ? L : D > 64 || coarse ? 0.0f : L * a.scale_log2;
}

template <class Tile> __device__ static void keep(Tile &t, const kept_bits<Tile> &kept, float scale)
{
#pragma unroll
    for (int r = 0; r < Tile::R; r++)
#pragma unroll
        for (int c = 0; c < Tile::C; c++)
            t.at(r, c) = kept.at(r, c) ? t.at(r, c) * scale : 0.0f;
}

/* From q.k in S and dP: dS = P (dP - delta) dS/d(q.k) / scale in dP, and what dV wants, P after dropout, in S. Each
 * step is done with before the next, so that little is alive beside the two tiles. lse(r) and delta(r) are those of
 * query r. */
template <class Tile, class Lse, class Delta>
__device__ static void score_and_differentiate(Tile &S, Tile &dP, const kept_bits<Tile> &kept, const args &a,
                                               const span &s, const head &x, bool whole, Lse lse, Delta delta)
{
    if (a.drop_below)
        keep(dP, kept, a.keep_scale);
#pragma unroll
    for (int r = 0; r < Tile::R; r++) {
        const float d = delta(r);
#pragma unroll
        for (int c = 0; c < Tile::C; c++)
            dP.at(r, c) -= d;
    }
    if (a.softcap > 0) {
        const float inverse = a.scale / a.softcap;
#pragma unroll
        for (int r = 0; r < Tile::R; r++)
#pragma unroll
            for (int c = 0; c < Tile::C; c++) {
                const float u = capped<false>(S.at(r, c), inverse, 1.0f);
                S.at(r, c) = u;
                dP.at(r, c) *= 1.0f - u * u;
            }
    }
    finish_scores(S, a.softcap > 0 ? a.softcap : a.scale, a, s, x, whole);
#pragma unroll
    for (int r = 0; r < Tile::R; r++) {
        const float L = lse(r);
#pragma unroll
        for (int c = 0; c < Tile::C; c++) {
            const float P = probability<true>(S.at(r, c), LOG2E, L);
            dP.at(r, c) = P == 0.0f ? 0.0f : P * dP.at(r, c); /* P = 0 hides the pair, whatever dP came out as */
            S.at(r, c) = P;
        }
    }
    if (a.drop_below)
        keep(S, kept, a.keep_scale);
}

template <int MT, int NT> __device__ static void scale_rows(float (&x)[MT][NT][4], float by)
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[m][n][e] *= by;
}

#endif
