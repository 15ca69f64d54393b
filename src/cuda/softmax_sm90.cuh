/* What the warpgroups of the Hopper forward do with scores and results: S becomes P, sums become lse, O is divided and
 * leaves. A lane has two rows of 64 and a quarter of their columns, as the tensor core leaves them: see sm90.cuh. */
#ifndef HEED_CUDA_SOFTMAX_SM90_CUH
#define HEED_CUDA_SOFTMAX_SM90_CUH

#include "feed_sm90.cuh"

/* What a lane sees of a row, as bits: of each 8 columns of a block it has two, N / 2 in all, from n0 on. */
template <class S, int N> __device__ inline uint32_t visible_in(const forward_work<S::ROWS> &w, int row, int n0)
{
    const auto below = [&](int n) { /* how many of the lane's columns come before column n */
                                    n = min(max(n - n0, 0), 2 * N);
                                    return n / 8 * 2 + min(n % 8, 2);
    };
    const int from = below(w.low[row]);
    return bit_mask(from, below(w.high[row]) - from);
}

/* Hides what is not visible of one of a lane's two rows. */
template <int N> __device__ inline void hide_row(float (&s)[N], int r, uint32_t visible)
{
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        if (!(visible >> i & 1))
            s[i / 2 * 4 + 2 * r + i % 2] = -CUDART_INF_F;
}

/* The two rows are r and r + 8. */
template <class S, int N> __device__ inline void hide(float (&s)[N], const forward_work<S::ROWS> &w, int row, int n0)
{
#pragma unroll
    for (int r = 0; r < 2; r++)
        hide_row(s, r, visible_in<S, N>(w, row + 8 * r, n0));
}

/* softcap tanh(scale S / softcap), but for the factor, which the exponent takes. */
template <int N> __device__ inline void cap(float (&s)[N], const args &a)
{
    const float twice = 2.0f * LOG2E * a.scale / a.softcap;
#pragma unroll
    for (int i = 0; i < N; i++) {
        s[i] = fmaf(-2.0f, reciprocal_fast(exp2_fast(s[i] * twice) + 1.0f), 1.0f);
        if (i % 8 == 7) /* a few at a time, for the sake of registers */
            keep_order(__float_as_int(s[i]) & INT32_MAX);
    }
}

/* Two rows of a lane: offset is c m, l has the sum of the lane's own columns, sum that of the last block alone, and factor
 * is what O has to be multiplied with since the maximum grew. late: by how much it is to grow, in shapes that let it
 * follow. */
struct row_state {
    float m[2], offset[2], l[2], factor[2], late[2], sum[2];
};

/* Brings the maxima up to this block. A maximum that grew little is left: P may reach 2^8. Where c m is so large that its
 * rounding matters to an exponent, m is subtracted from S instead, which holds for this block only: unless the next one is
 * refreshed too, the sum is spoilt. */
template <int N> __device__ inline void refresh_maxima(float (&s)[N], row_state &x, float c, bool again)
{
    float most[4] = { s[0], s[2], s[0], s[2] }; /* both rows at once, in short chains: everything waits for this */
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        most[i % 4] = fmaxf(most[i % 4], fmaxf(s[2 * i], s[2 * i + 1]));
    most[0] = fmaxf(most[0], most[2]), most[1] = fmaxf(most[1], most[3]);
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2)
#pragma unroll
        for (int r = 0; r < 2; r++)
            most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], lanes));
    bool large = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        most[r] = fmaxf(x.m[r], most[r]);
        if ((most[r] - x.m[r]) * c < 8.0f)
            most[r] = x.m[r];
        x.factor[r] = x.m[r] == -CUDART_INF_F ? 0.0f : exp2_fast((x.m[r] - most[r]) * c);
        x.l[r] *= x.factor[r];
        x.m[r] = most[r], x.offset[r] = most[r] == -CUDART_INF_F ? 0.0f : most[r] * c;
        large |= !(fabsf(x.offset[r]) < 1e7f);
    }
    if (large)
#pragma unroll
        for (int r = 0; r < 2; r++)
            if (!(fabsf(x.offset[r]) < 1e7f)) {
#pragma unroll
                for (int i = 0; i < N / 4; i++)
                    s[4 * i + 2 * r] -= most[r], s[4 * i + 2 * r + 1] -= most[r];
                x.offset[r] = 0.0f;
                if (!again)
                    x.l[r] = CUDART_NAN_F;
            }
}

/* P = 2^(c S - c m), in place; TAKEN: s is c S - c m already. */
template <class S, bool TAKEN = false, int N> __device__ inline void exponentials(float (&s)[N], row_state &x, float c)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            float *const p = &s[4 * i + 2 * r];
            p[0] = exp2_fast(TAKEN ? p[0] : fmaf(p[0], c, -x.offset[r]));
            p[1] = exp2_fast(TAKEN ? p[1] : fmaf(p[1], c, -x.offset[r]));
            sum0 += p[0], sum1 += p[1];
        }
        if (!S::TENSOR_SUMS)
            x.l[r] += x.sum[r] = sum0 + sum1;
    }
}

/* Where the P of a block have grown beyond fp16, as those of a bias that rises along the keys do, they are lowered afterwards,
 * in fp32, with l, and O by the factors; true: so it was. Sums that are needed anyway say so, at no cost to others. What has
 * grown beyond fp32 stays out of range. */
template <int N> __device__ inline bool lower(float (&s)[N], row_state &x, float c)
{
    constexpr float limit = 0x1p15f; /* then no P of the sum is more */
    if (!__any_sync(~0u, fmaxf(x.sum[0], x.sum[1]) > limit))
        return false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float most = quad_max(x.sum[r]);
        x.factor[r] = 1.0f;
        if (most > limit) { /* down to 2^4: not by more than a float of fp32 can say */
            const float offset = x.offset[r] + (float)((int)(__float_as_uint(most) >> 23) - 127 - 4);
            x.factor[r] = exp2_fast(x.offset[r] - offset);
            x.l[r] *= x.factor[r];
            x.offset[r] = offset, x.m[r] = offset / c;
        }
#pragma unroll
        for (int i = 0; i < N / 4; i++)
            s[4 * i + 2 * r] *= x.factor[r], s[4 * i + 2 * r + 1] *= x.factor[r];
    }
    return true;
}

/* What maxima are counted in: 1 where something has been added to scores that were multiplied by the scale. */
template <class S> __device__ inline float unit_of(const args &a)
{
    return S::CAPPED ? a.softcap : S::TERMS && (a.bias.data || a.alibi.data) ? 1.0f : a.scale;
}

/* Whether a maximum is none that can be left alone: no key was seen, or only such as biases push far away, and nearer ones may
 * follow; or it is so large that it holds for one block. */
template <class S> __device__ inline bool is_open(float m, float c)
{
    return S::TERMS ? !(m * c > -24.0f && m * c < 1e7f) : m == -CUDART_INF_F;
}

/* What comes between S of a block, or of its first half, and its exponentials: the softcap, what is hidden where not all of it
 * is visible (edge), and the maxima where these are to grow. True: O has to be multiplied with the factors. */
template <class S, int N>
__device__ inline bool settle(float (&s)[N], row_state &x, const args &a, bool edge, const uint32_t (&visible)[2],
                              float c, bool exact, bool &unset)
{
    if (S::CAPPED)
        cap(s, a);
    if (edge)
        hide_row(s, 0, visible[0]), hide_row(s, 1, visible[1]);
    if (!(exact || edge || unset))
        return S::follow(s, x, c);
    refresh_maxima(s, x, c, S::TERMS || exact);
    unset = __any_sync(~0u, is_open<S>(x.m[0], c) || is_open<S>(x.m[1], c));
    return __any_sync(~0u, x.factor[0] != 1.0f || x.factor[1] != 1.0f);
}

/* The same, and S becomes P. */
template <class S, int N>
__device__ inline bool weigh(float (&s)[N], row_state &x, const args &a, bool edge, const uint32_t (&visible)[2],
                             float c, bool exact, bool &unset)
{
    const bool refresh = exact || edge || unset, grew = settle<S>(s, x, a, edge, visible, c, exact, unset);
    exponentials<S>(s, x, c);
    return grew || (S::LOWERS && !refresh && lower(s, x, c));
}

/* The sums are complete: writes lse; divide: what is left to multiply O with. False where something of the warp was out of range.
 * Lanes that share two rows know the same of them, so each finishes one for all: a logarithm is many instructions. */
template <class S>
__device__ inline bool conclude(const row_state &x, const args &a, const forward_work<S::ROWS> &w, int row,
                                const key_parts &by, float (&divide)[2])
{
    const float sums[2] = { quad_sum(x.l[0]), quad_sum(x.l[1]) };
    const bool good = !__any_sync(~0u, !(fabsf(sums[0]) + fabsf(sums[1]) < 1e37f));
#pragma unroll
    for (int r = 0; r < 2; r++)
        divide[r] = sums[r] == 0.0f ? 0.0f : reciprocal_fast(sums[r]); /* 0: the row saw no key */
    const int odd = threadIdx.x % 2, own = row + 8 * odd;
    float sum = odd ? sums[1] : sums[0], most = (odd ? x.m[1] : x.m[0]) * unit_of<S>(a);
    if (a.sink.data && by.count == 1) {
        const float sink = load(a.sink, row_at(a.sink, 0, w.h, 0));
        float mine = 0.0f;
        if (sum != 0.0f) {
            const float all = fmaxf(most, sink), factor = exp2_fast((most - all) * LOG2E);
            sum = sum * factor + exp2_fast((sink - all) * LOG2E);
            mine = factor / sum, most = all;
        }
        const float others = __shfl_xor_sync(~0u, mine, 1);
        divide[0] = odd ? others : mine, divide[1] = odd ? mine : others;
    }
    float *const lse = by.count > 1 ? by.lse : (float *)a.lse.data;
    if (lse && threadIdx.x % 4 < 2 && own < w.end[(unsigned)row / 64]) {
        const int64_t pitch = by.count > 1 ? 1 : a.lse.stride[2];
        lse[w.lse_at + own * pitch] = sum == 0.0f ? -CUDART_INF_F : most + logf(sum);
    }
    return good;
}

/* A tile is over for this group: O is divided and leaves, 64 columns at a time, through a few rows of shared memory that
 * are the warp's own. The O of a part leaves as it is. empty: some row of the warp saw no key. False where something was
 * out of range. */
template <class T, class S>
__device__ inline bool send_out(float (&O)[S::D / 2], const float (&divide)[2], bool empty, const args &a,
                                const forward_work<S::ROWS> &w, const key_parts &by, char *out, int row0)
{
    const int lane = threadIdx.x % 32, rows = w.end[(unsigned)row0 / 64] - row0;
    float size[4] = {};
#pragma unroll
    for (int i = 0; i < S::D / 2; i++) {
        size[i % 4] += fabsf(O[i]);
        O[i] *= divide[i / 2 % 2];
    }
    const bool good = !__any_sync(~0u, !(size[0] + size[1] + size[2] + size[3] < 1e37f));
    if (empty) /* without a key O may be anything */
#pragma unroll
        for (int i = 0; i < S::D / 2; i++)
            O[i] = divide[i / 2 % 2] == 0.0f ? 0.0f : O[i];
    if (by.count > 1) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i = lane / 4 + 8 * r, end = i < rows ? a.Dv - lane % 4 * 2 : 0;
            float *const o = by.o + w.o_at + (int64_t)(row0 + i) * a.Dv + lane % 4 * 2;
#pragma unroll
            for (int c = 0; c < S::D / 4; c++)
                if (c / 2 * 8 + c % 2 < end)
                    o[c / 2 * 8 + c % 2] = O[c / 2 * 4 + 2 * r + c % 2];
        }
        return good;
    }
    /* Chunk c of row r lies at c ^ r % 8. So an even c, or four rows further down, is one bit of an address or two that change. */
    const int64_t pitch = a.o.stride[2];
    const uint32_t to = shared_address(out) + lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
    const int from = lane / 8 * 128 + (lane / 8 ^ lane % 8) * 16;
    T *const o = (T *)a.o.data + w.o_at + (row0 + lane / 8) * pitch + lane % 8 * 8;
#pragma unroll
    for (int box = 0; box < (S::D + 63) / 64; box++) {
        const int columns = a.Dv - box * 64;
        if (box && columns <= 0) /* so what is cut stays in shared memory */
            break;
        __syncwarp();
#pragma unroll
        for (int c = 0; c < 8 && box * 8 + c < S::D / 8; c += 2) {
            const float *const x = &O[box * 32 + 4 * c];
            store_matrices(to ^ c * 16, pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]),
                           pack<T>(x[6], x[7]));
        }
        __syncwarp();
        uint4 x[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[e] = *(const uint4 *)(out + (from ^ e % 2 * 64) + e * 512);
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (lane / 8 + 4 * e < rows && lane % 8 * 8 + 8 <= columns)
                *(uint4 *)(o + box * 64 + 4 * e * pitch) = x[e];
    }
    const int cut = a.Dv % 8, chunk = a.Dv / 8; /* the last few columns of a row, one by one */
    if (cut)
#pragma unroll 1
        for (int i = lane / 8; i < min(rows, 16); i += 4)
            if (lane % 8 < cut)
                o[(i - lane / 8) * pitch + (chunk - lane % 8) * 8 + lane % 8] = ((
                    const T *)(out + i * 128 + (chunk ^ i) % 8 * 16))[lane % 8];
    return good;
}

#endif
