/* Forward with mma.sync for fp16 and bf16, head sizes to 256, on sm_80 and later. A block of four warps owns 128 rows
 * of one head, each warp 32 of them (half as many at D = 256), and meets 32 to 112 keys at a time. K and V have one
 * buffer each: V arrives while S = Q K^T is computed, the next K while O += P V is. */
#include "launch.cuh"
#include "tile_mma.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;

/* 16-row tiles to a warp: as many as its results leave registers for. */
template <int D> constexpr int row_tiles = D == 256 ? 1 : 2;

template <int D, int BC> struct shared_forward {
    static constexpr int BR = WARPS * 16 * row_tiles<D>;
    char Q[BR * D * 2], K[BC * D * 2], V[BC * D * 2];
    int low[BR], high[BR], inside, outside; /* all rows see keys inside .. outside */
    span sequence;                          /* what is looked at once for each tile lies here and not in registers */
    head of;
    key_rows k, v;
};

/* The four lanes of a row are neighbours. */
__device__ static float row_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ static float row_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* P = 2^(c S - c m'), l = l a + sum P, O = O a, with a = 2^(c m - c m'). */
template <int D, int MT, int NT>
__device__ static void softmax_step(float (&S)[MT][NT][4], float (&m)[MT * 2], float (&l)[MT * 2],
                                    float (&O)[MT][D / 8][4], float c)
{
#pragma unroll
    for (int r = 0; r < MT * 2; r++) {
        float(&rows)[NT][4] = S[r / 2];
        const int half = r % 2 * 2;
        float most = m[r];
#pragma unroll
        for (int n = 0; n < NT; n++)
            most = fmaxf(most, fmaxf(rows[n][half], rows[n][half + 1]));
        most = row_max(most);
        float base = most == -CUDART_INF_F ? 0.0f : most, offset = base * c;
        const float rescale = exp2_fast((m[r] - base) * c);
        if (fabsf(offset) > 1e7f) { /* its rounding would matter to an exponent: subtract first */
#pragma unroll
            for (int n = 0; n < NT; n++)
                rows[n][half] -= base, rows[n][half + 1] -= base;
            offset = 0.0f;
        }
        m[r] = most;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = half; e < half + 2; e++) {
                rows[n][e] = exp2_fast(fmaf(rows[n][e], c, -offset));
                sum += rows[n][e];
            }
        l[r] = l[r] * rescale + sum;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            O[r / 2][n][half] *= rescale, O[r / 2][n][half + 1] *= rescale;
    }
}

template <class Tile> __device__ static void drop(Tile &t, const args &a, const span &s, const head &x)
{
    uint32_t kept[Tile::R];
    draw_tile(t, kept, a, s, x);
#pragma unroll
    for (int r = 0; r < Tile::R; r++)
#pragma unroll
        for (int c = 0; c < Tile::C; c++)
            t.at(r, c) = kept[r] >> c & 1 ? t.at(r, c) * a.keep_scale : 0.0f;
}

/* What the scores need beyond scale and band is in GENERAL, so that the others do not pay for it. The keys at once are
 * as many as leave no register short. */
template <int D, bool GENERAL>
constexpr int keys_at_once = D == 256   ? 32
                             : D == 128 ? (GENERAL ? 32 : 64)
                                        : (GENERAL ? 64 : 112);

template <class T, int D, bool GENERAL>
__global__ void __launch_bounds__(THREADS, 2) forward_mma(const __grid_constant__ args a, int tiles)
{
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(1024) char memory[];
    constexpr bool tight = __CUDA_ARCH__ < 900 && D == 128 && !GENERAL; /* one register short with 64 keys there */
    constexpr int BC = tight ? 48 : keys_at_once<D, GENERAL>, NT = BC / 8, MT = row_tiles<D>, BR = WARPS * 16 * MT;
    auto &s = *(shared_forward<D, BC> *)memory;
    const uint32_t sQ = shared_address(s.Q), sK = shared_address(s.K), sV = shared_address(s.V);
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16 * MT, i0 = (tiles - 1 - blockIdx.x % tiles) * BR;
    if (threadIdx.x == 0) {
        s.sequence = span_of(a, blockIdx.x / tiles / a.Hq);
        s.of = head_of(a, s.sequence, blockIdx.x / tiles % a.Hq);
        s.k = keys_of(a, s.sequence, a.k, s.of.hk);
        s.v = keys_of(a, s.sequence, a.v, s.of.hk);
    }
    __syncthreads();
    const span &q = s.sequence;
    const head &x = s.of;
    if (i0 >= q.rows)
        return;
    const int rows = min(BR, q.rows - i0);
    if (threadIdx.x < BR)
        band_of_row(a, q, min(i0 + (int)threadIdx.x, q.rows - 1), s.low[threadIdx.x], s.high[threadIdx.x]);
    copy_rows<D, BR, THREADS>(sQ, a.q.data + row_at(a.q, q.q_batch, x.h, q.q_row + i0) * 2, a.q.stride[2] * 2, rows,
                              a.D);
    __syncthreads();
    const int first = min(s.low[0], s.low[rows - 1]) / 8 * 8, last = max(s.high[0], s.high[rows - 1]);
    if (threadIdx.x == 0)
        s.inside = max(s.low[0], s.low[rows - 1]), s.outside = min(s.high[0], s.high[rows - 1]);

    float O[MT][D / 8][4], m[MT * 2], l[MT * 2];
    clear(O);
#pragma unroll
    for (int r = 0; r < MT * 2; r++)
        m[r] = -CUDART_INF_F, l[r] = 0.0f;
    const float c = GENERAL ? LOG2E : a.scale * LOG2E;

    if (first < last)
        copy_keys<D, BC, THREADS>(sK, a, q, a.k, s.k, x.hk, first, q.keys, a.D);
    commit_copies();
    for (int n0 = first; n0 < last; n0 += BC) {
        wait_copies<0>();
        __syncthreads(); /* K is here, and the last V is no longer needed */
        copy_keys<D, BC, THREADS>(sV, a, q, a.v, s.v, x.hk, n0, q.keys, a.Dv);
        commit_copies();
        float S[MT][NT][4];
        clear(S);
        multiply_rows<T, D>(S, sQ, row0, sK, 0); /* S  = Q K^T */
        wait_copies<0>();
        __syncthreads(); /* V is here, and this K is no longer needed */
        if (n0 + BC < last)
            copy_keys<D, BC, THREADS>(sK, a, q, a.k, s.k, x.hk, n0 + BC, q.keys, a.D);
        commit_copies();
        const bool whole = n0 >= s.inside && n0 + BC <= s.outside;
        query_major<MT, NT> t = { S, s.low, s.high, i0 + row0 + lane / 4, n0 + lane % 4 * 2, row0 + lane / 4 };
        if (GENERAL)
            score(t, a, q, x, whole);
        else if (!whole)
            hide_outside_band(t);
        softmax_step<D>(S, m, l, O, c);
        if (GENERAL && a.drop_below)
            drop(t, a, q, x);
        uint32_t P[MT][NT / 2][4];
        pack_tile<T>(P, S);
        multiply_tile<T, D>(O, P, sV, 0); /* O += P V */
    }
    wait_copies<0>();
    __syncthreads(); /* Q's tile becomes the way out, and without a key nobody has waited for Q */

    const float sink = a.sink.data ? load(a.sink, row_at(a.sink, 0, x.h, 0)) : -CUDART_INF_F;
#pragma unroll
    for (int r = 0; r < MT * 2; r++) {
        const int i = i0 + row0 + r / 2 * 16 + r % 2 * 8 + lane / 4;
        float sum = row_sum(l[r]), own = GENERAL ? m[r] : m[r] * a.scale, most = fmaxf(own, sink), rescale = 0.0f;
        if (sum != 0.0f) { /* else the row saw no key */
            rescale = exp2_fast((own - most) * LOG2E);
            sum = sum * rescale + exp2_fast((sink - most) * LOG2E);
            rescale /= sum;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            O[r / 2][n][r % 2 * 2] *= rescale, O[r / 2][n][r % 2 * 2 + 1] *= rescale;
        if (a.lse.data && lane % 4 == 0 && i < q.rows)
            store(a.lse, row_at(a.lse, q.q_batch, x.h, q.q_row + i), sum == 0.0f ? -CUDART_INF_F : most + logf(sum));
    }
    store_rows<T, D, MT>(O, a.o, a.Dv, false, sQ, s.Q, row0,
                         [&](int r) { return r < rows ? row_at(a.o, q.q_batch, x.h, q.q_row + i0 + r) : NOWHERE; });
#endif
}

template <class T, int D> static heed_status run(const args &a, const heed_exec *x)
{
    const int64_t tiles = tiles_of(a.Sq, WARPS * 16 * row_tiles<D>), blocks = tiles * a.Hq * a.B;
    const bool general = a.softcap > 0 || a.bias.data || a.alibi.data || a.mask.data || a.drop_below || a.scale <= 0;
    if (general)
        return launch(forward_mma<T, D, true>, blocks, THREADS, sizeof(shared_forward<D, keys_at_once<D, true>>), x, a,
                      (int)tiles);
    return launch(forward_mma<T, D, false>, blocks, THREADS, sizeof(shared_forward<D, keys_at_once<D, false>>), x, a,
                  (int)tiles);
}

template <class T> static heed_status run(const args &a, const heed_exec *x)
{
    const int width = HEED_MAX(a.D, a.Dv);
    return width <= 64 ? run<T, 64>(a, x) : width <= 128 ? run<T, 128>(a, x) : run<T, 256>(a, x);
}

size_t heed_forward_workspace_mma(const heed_problem *p, const heed_plan *plan)
{
    (void)p, (void)plan;
    return 0;
}

heed_status heed_forward_mma(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    (void)plan;
    on_device device(x->device);
    args a;
    heed_status status = device.status;
    if (!status)
        status = heed_cuda_args(p, &a);
    if (!status)
        status = heed_cuda_prepare_forward(p, a, x);
    if (status)
        return status;
    return a.q.dtype == HEED_F16 ? run<__half>(a, x) : run<__nv_bfloat16>(a, x);
}
