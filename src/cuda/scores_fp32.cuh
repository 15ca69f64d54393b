/* The scores of the portable kernels: what scores.cuh does to them in the shared tile of tile_fp32.cuh, a few queries of a
 * thread's share at a time, and dropout for all of it. */
#ifndef HEED_CUDA_SCORES_FP32_CUH
#define HEED_CUDA_SCORES_FP32_CUH

#include "tile_fp32.cuh"

/* A thread's scores of R queries, number `which` and following, as scores.cuh wants to see them, times eight keys. Queries
 * are the tile's rows, or with KEY_MAJOR its columns. */
template <int WIDTH, bool KEY_MAJOR, int R_> struct own_scores {
    typedef shared_fp32<WIDTH> s;
    static constexpr int R = R_, C = 8;
    static constexpr bool EXACT = true;
    static constexpr int FOUR_KEYS = 4 * (KEY_MAJOR ? s::RG : s::CG);
    float X[R][8];
    const int *lows, *highs; /* of the first query */
    int first_row, first_key;
    __device__ own_scores(int i0, int n0, int which, const int *low, const int *high)
    {
        const int down = KEY_MAJOR ? s::column_of(which) : s::row_of(which);
        lows = low + down, highs = high + down, first_row = i0 + down;
        first_key = n0 + 4 * (KEY_MAJOR ? s::g() : s::t());
    }
    __device__ float &at(int r, int c) { return X[r][c]; }
    __device__ int row(int r) const { return first_row + r; }
    static __device__ constexpr int apart(int c) { return c % 4 + FOUR_KEYS * (c / 4); }
    __device__ int key(int c) const { return first_key + apart(c); }
    __device__ int low(int r) const { return lows[r]; }
    __device__ int high(int r) const { return highs[r]; }
};

/* change(scores) for the thread's queries in the shared tile, R = 1 or 4 at once. A loop of few instructions, as what is
 * done to scores can be long, and rare beside the products. */
template <bool KEY_MAJOR, int R, int WIDTH, class Change>
__device__ inline void for_each_query(shared_fp32<WIDTH> &s, int i0, int n0, Change change)
{
#pragma unroll 1
    for (int which = 0; which < 8; which += R) {
        own_scores<WIDTH, KEY_MAJOR, R> S(i0, n0, which, s.low, s.high);
        float *own = s.own();
        if (R == 4) {
            auto each = [&](auto move) {
#pragma unroll
                for (int i = 0; i < 8; i++) /* four queries of a key, or four keys of a query */
                    if (KEY_MAJOR)
                        move(own + s.four_at(i % 2 * 4, which + i / 2), &S.X[i / 2 % R][i % 2 * 4], 1);
                    else
                        move(own + s.four_at(which, i), &S.X[0][i], 8);
            };
            each([](const float *tile, float *x, int step) {
                float four[4];
                load_four(four, tile);
                x[step] = four[0], x[0] = four[1], x[3 * step] = four[2], x[2 * step] = four[3];
            })
                ;
            change(S);
            each([](float *tile, const float *x, int step) {
                *(float4 *)tile = make_float4(x[step], x[0], x[3 * step], x[2 * step]);
            })
                ;
        } else {
            auto place = [&](int key) { return own + (KEY_MAJOR ? s.at(key, which) : s.at(which, key)); };
#pragma unroll
            for (int key = 0; key < 8; key++)
                S.X[0][key] = *place(key);
            change(S);
#pragma unroll
            for (int key = 0; key < 8; key++)
                *place(key) = S.X[0][key];
        }
    }
}

/* Whether a mask or bias can be read four keys at a time. */
__device__ inline bool in_fours(const view &t, const args &a, const span &s)
{
    return !t.data || (t.vector && t.stride[3] == 1 && a.col_step == 1 && a.col % 4 == 0 && s.keys % 4 == 0);
}

__device__ inline bool scores_in_fours(const args &a, const span &s)
{
    return a.softcap <= 0 && in_fours(a.bias, a, s) && in_fours(a.mask, a, s);
}

template <class Four, class T, class Each>
__device__ inline void for_each_four(T &t, const args &a, const span &s, const view &m, int64_t first, Each each)
{
    Four x[T::R][2];
#pragma unroll
    for (int r = 0; r < T::R; r++) {
        const int64_t at = first_element(t, r, a, m, first);
#pragma unroll
        for (int c = 0; c < 8; c += 4) {
            x[r][c / 4] = Four();
            if (exists(t, s, r, c))
                x[r][c / 4] = *(const Four *)(m.data + (at + T::apart(c)) * (int64_t)(sizeof(Four) / 4));
        }
    }
#pragma unroll
    for (int r = 0; r < T::R; r++)
#pragma unroll
        for (int c = 0; c < 8; c++)
            each(r, c, x[r][c / 4])
                ;
}

__device__ inline float of_four(float4 x, int e) { return e == 0 ? x.x : e == 1 ? x.y : e == 2 ? x.z : x.w; }

template <int WIDTH, bool KEY_MAJOR>
__device__ inline void add_bias(own_scores<WIDTH, KEY_MAJOR, 4> &t, float factor, const args &a, const span &s,
                                const head &x)
{
    if (a.bias.dtype == HEED_F32)
        for_each_four<float4>(t, a, s, a.bias, x.bias, [&](int r, int c, float4 b) {
            t.at(r, c) = fmaf(t.at(r, c), factor, of_four(b, c % 4));
        });
    else
        for_each_four<uint2>(t, a, s, a.bias, x.bias, [&](int r, int c, uint2 b) {
            const unsigned short half = (unsigned short)((c % 4 < 2 ? b.x : b.y) >> c % 2 * 16);
            t.at(r, c) = fmaf(t.at(r, c), factor,
                              a.bias.dtype == HEED_F16 ? __half2float(__ushort_as_half(half))
                                                       : __bfloat162float(__ushort_as_bfloat16(half)));
        });
}

template <int WIDTH, bool KEY_MAJOR>
__device__ inline void apply_mask(own_scores<WIDTH, KEY_MAJOR, 4> &t, const args &a, const span &s, const head &x)
{
    for_each_four<uint32_t>(t, a, s, a.mask, x.mask, [&](int r, int c, uint32_t m) {
        t.at(r, c) = m >> c % 4 * 8 & 255 ? t.at(r, c) : -CUDART_INF_F;
    });
}

/* A thread's dropout bits: bit 8 r + c is set where P of its query r and key c is kept. Eight keys of one Philox are
 * those of two neighbouring threads, which share the draws where they are of one warp, as with queries for rows. */
template <int WIDTH, bool KEY_MAJOR>
__device__ inline uint64_t draw_all(const args &a, const span &s, const head &x, int i0, int n0)
{
    typedef own_scores<WIDTH, KEY_MAJOR, 1> tile;
    constexpr int OTHER = KEY_MAJOR ? 1 : 2; /* lanes to the neighbour */
    const uint64_t seed = seed_of(a);
    const int64_t first = s.r0 + n0;
    uint64_t kept = 0;
    if (s.r_step != 1 || first % 8) {
#pragma unroll 1
        for (int which = 0; which < 8; which++)
            kept |= (uint64_t)draw(tile(i0, n0, which, NULL, NULL), 0, a, s, x, seed) << 8 * which;
        return kept;
    }
    /* The thread with the lower keys draws the first eight, which hold c = 0 .. 3 of both, and the other the rest. */
    const tile t(i0, n0, 0, NULL, NULL);
    const int upper = t.key(0) - n0 & 4 ? 1 : 0;
    const uint32_t eight = (uint32_t)(uint64_t)((s.r0 + t.key(upper * 4)) >> 3);
#pragma unroll 1
    for (int which = 7; which >= 0; which--) {
        const int row = tile(i0, n0, which, NULL, NULL).row(0);
        const uint32_t p = (uint32_t)(uint64_t)(s.p0 + row * s.p_step);
        const uint32_t mine = kept_of_eight(philox(seed, make_uint4(eight, p, x.h, s.b)), a.drop_below);
        const uint32_t theirs = __shfl_xor_sync(~0u, mine, OTHER);
        const uint32_t low = (upper ? theirs : mine) >> 4 * upper, high = (upper ? mine : theirs) >> 4 * upper;
        kept = kept << 8 | (low & 15) | (high & 15) << 4;
    }
    return kept;
}

#endif
