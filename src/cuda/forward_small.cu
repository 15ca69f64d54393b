/* Forward for few rows and keys, in all types, head sizes to 64, on sm_80 and later: made for one short wait (small.cuh). Two
 * warps share 16 rows, and each takes every other 16 or 32 keys; at the end they meet, to merge what they have. Where the GPU is
 * all but idle they are four, of whom the second two take what the first two would have met next, and go on from what those have:
 * bits are the same. */
#include "small.cuh"

/* Tiles of 8 keys that a warp meets at a time, and teams of two warps in a block: as many as there are registers for. */
template <class T, int U> constexpr int key_tiles = 4 / U;
template <class T, bool GENERAL> constexpr int most_teams = GENERAL || sizeof(T) == 4 ? 4 : 6;

/* A warp's K and V on their way, and then what it leaves to the other warp of its team: O, the largest score m and the
 * sum l of eight rows. */
template <class T, int U> struct partial {
    union {
        struct {
            staged<8 * key_tiles<T, U>, 8 * U> K, V;
        };
        float4 O[column_tiles<T, U> / 2][32];
        struct {
            float4 all_of_O[column_tiles<T, U>][32];
            float2 m[32], l[32]; /* of rows g and g + 8 */
        };
    };
    float2 ml[8];
    float2 most[8]; /* m of the rows, for who goes on */
};

/* P = 2^(c S - c m'), l = l a + sum P, with m' = max(m, S) and a = 2^(c m - c m'), which O is to be multiplied by. */
template <int N>
__device__ static void softmax_step(float (&S)[N][4], float (&m)[2], float (&l)[2], float (&a)[2], float c)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float most = m[r], sum = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++)
            most = fmaxf(most, fmaxf(S[n][r * 2], S[n][r * 2 + 1]));
        most = quad_max(most);
        const exponent e(c, most);
        a[r] = e.of_most(m[r]);
        m[r] = most;
        if (e.large()) {
#pragma unroll
            for (int n = 0; n < N; n++)
                S[n][r * 2] -= e.first, S[n][r * 2 + 1] -= e.first;
        }
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = r * 2; i < r * 2 + 2; i++)
                sum += S[n][i] = exp2_fast(fmaf(S[n][i], c, -e.then));
        l[r] = fmaf(l[r], a[r], sum);
    }
}

/* A row is 128 U bytes. GENERAL: what the scores need beyond scale and band. keys: see sequence(). A block is teams,
 * threadIdx.z, of two warps, threadIdx.y, or of FOUR. */
template <class T, int U, bool GENERAL, bool FOUR>
__global__ void __launch_bounds__(64 * most_teams<T, GENERAL>) forward_small(const __grid_constant__ args a, int keys)
{
#if __CUDA_ARCH__ >= 800
    constexpr int N = key_tiles<T, U>, M = 2 * U, TILES = column_tiles<T, U>;
    extern __shared__ __align__(16) char memory[];
    const int lane = threadIdx.x, part = threadIdx.y % 2;
    const bool second = FOUR && threadIdx.y >= 2;
    partial<T, U> *const team = (partial<T, U> *)memory + threadIdx.z * (FOUR ? 4 : 2), &own = team[threadIdx.y];
    const int i0 = (blockIdx.y * blockDim.z + threadIdx.z) * 16;
    let_next_start();
    if (GENERAL || is_ragged(a))
        wait_for_last();
    const span s = sequence(a, own_sequence(a), keys);
    head x = head_of(a, s, own_head(a));
    x.hk = a.G == 1 ? x.h : x.hk; /* a division takes its time */

    float S[N][4];
    score_tile<T, N> tile = { S, i0 + lane / 4, 0, { 0, 0 }, { s.keys, s.keys } };
    int first = 0, last = i0 < s.rows ? s.keys : 0, inside = 0, outside = s.keys; /* all rows see inside .. outside */
    if (a.left < FAR || a.right < FAR) {
        int low, high, low2, high2;
        band_of_row(a, s, min(i0, s.rows - 1), low, high);
        band_of_row(a, s, min(i0 + 15, s.rows - 1), low2, high2);
        first = min(low, low2) & ~7, last = i0 < s.rows ? max(high, high2) : 0;
        inside = max(low, low2), outside = min(high, high2);
#pragma unroll
        for (int r = 0; r < 2; r++)
            band_of_row(a, s, min(tile.row(r), s.rows - 1), tile.lows[r], tile.highs[r]);
    }
    const source q = query_rows<T>(a.q, s, x.h, s.rows - 1, a.D);
    const source k = key_rows<T>(a, a.k, s, x.hk, last - 1, a.D);
    const source v = key_rows<T>(a, a.v, s, x.hk, last - 1, a.Dv);
    wait_for_last(q.first, k.first, v.first);
    uint4 Q[2][M];
    int n0 = first + threadIdx.y * (8 * N);
    if (n0 < last) {
        load_across(Q, q, i0);
        own.K.copy(k, n0);
    }
    commit_copies();
    if (n0 < last)
        own.V.copy(v, n0);
    commit_copies();
    clear_columns(Q, q);
    const float scale = GENERAL ? 1.0f : a.scale, c = fmaxf(fminf(scale * LOG2E, 3e38f), 1.2e-38f);
    float O[TILES / 4][4][4], m[2] = { -CUDART_INF_F, -CUDART_INF_F }, l[2] = {}, rescale[2] = { 1, 1 };
#pragma unroll
    for (int i = 0; i < TILES / 4; i++)
        clear(O[i]);
    const bool busy = !FOUR || n0 < last; /* of four warps some may not be, but all wait for each other */
    for (bool more = (FOUR ? first : n0) < last; more; more = n0 < last) {
        const int next = FOUR ? last : n0 + 2 * (8 * N);
        const bool whole = n0 >= inside && n0 + 8 * N <= outside;
        if (busy) {
            wait_for_copies<1>();
            multiply_across(S, Q, own.K, T()); /* S = Q K^T */
            __syncwarp();                      /* all have read this K */
            if (next < last)
                own.K.copy(k, next);
            commit_copies();
            tile.n0 = n0 + lane % 4 * 2;
            if (GENERAL)
                score(tile, a.scale, a, s, x, whole);
            else if (!whole)
                hide_outside_band(tile);
        }
        if (!second && busy)
            softmax_step(S, m, l, rescale, c);
        if (FOUR) { /* the second two begin with what the first two have found */
            if (!second && lane % 4 == 0)
                own.most[lane / 4] = make_float2(m[0], m[1]);
            __syncthreads();
            if (second && busy) {
                m[0] = team[part].most[lane / 4].x, m[1] = team[part].most[lane / 4].y;
                softmax_step(S, m, l, rescale, c);
            }
        }
        if (busy) {
            if (GENERAL && a.drop_below)
                drop_and_scale(tile, a.keep_scale, a, s, x);
            const left_operand<T, N> P(S);
            wait_for_copies<1>();
#pragma unroll
            for (int i = 0; i < TILES / 4; i++) { /* O = a O + P V */
                float Y[4][4];
                P.template times<U>(Y, own.V, i, whole);
#pragma unroll
                for (int j = 0; j < 16; j++)
                    O[i][j / 4][j % 4] = fmaf(O[i][j / 4][j % 4], rescale[j % 4 / 2], Y[j / 4][j % 4]);
            }
            __syncwarp();
            if (next < last)
                own.V.copy(v, next);
            commit_copies();
        }
        n0 = next;
    }
    wait_for_copies<0>();
    if (FOUR) {
        if (!second) {
            own.m[lane] = make_float2(m[0], m[1]), own.l[lane] = make_float2(l[0], l[1]);
#pragma unroll
            for (int i = 0; i < TILES; i++)
                own.all_of_O[i][lane] = piece<T>::of(O[i / 4], i % 4);
        }
        __syncthreads();
        if (second) {
            const partial<T, U> &begun = team[part];
            const float2 its_m = begun.m[lane], its_l = begun.l[lane];
            if (!busy)
                m[0] = its_m.x, m[1] = its_m.y;
            l[0] = fmaf(its_l.x, rescale[0], l[0]), l[1] = fmaf(its_l.y, rescale[1], l[1]);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const float4 y = begun.all_of_O[i][lane];
                const int e = i % 2 * 2 + i % 4 / 2; /* as piece<T>::of() */
                const float by = rescale[i % 2];
                O[i / 4][0][e] = fmaf(y.x, by, O[i / 4][0][e]), O[i / 4][1][e] = fmaf(y.y, by, O[i / 4][1][e]);
                O[i / 4][2][e] = fmaf(y.z, by, O[i / 4][2][e]), O[i / 4][3][e] = fmaf(y.w, by, O[i / 4][3][e]);
            }
        }
    }

    /* Each finishes the eight rows g + 8 part, and leaves the others to the other. */
    float2 ml[2];
#pragma unroll
    for (int r = 0; r < 2; r++)
        ml[r] = make_float2(m[r], quad_sum(l[r]));
    if (second == FOUR) {
        if (lane % 4 == 0)
            own.ml[lane / 4] = part ? ml[0] : ml[1];
#pragma unroll
        for (int i = 0; i < TILES / 2; i++) {
            const float4 upper = piece<T>::of(O[i / 2], i % 2 * 2), lower = piece<T>::of(O[i / 2], i % 2 * 2 + 1);
            own.O[i][lane] = part ? upper : lower;
        }
    }
    __syncthreads();
    const int i = i0 + 8 * part + lane / 4;
    if (i >= s.rows || second != FOUR)
        return;
    const partial<T, U> &other = team[threadIdx.y ^ 1];
    const float sink = a.sink.data ? load(a.sink, row_at(a.sink, 0, x.h, 0)) : -CUDART_INF_F;
    const merged_row y(part ? ml[1] : ml[0], other.ml[lane / 4], c, scale, sink);
    const int64_t o_at = row_at(a.o, s.q_batch, x.h, s.q_row + i);
#pragma unroll
    for (int n = 0; n < TILES / 2; n++) {
        const float4 upper = piece<T>::of(O[n / 2], n % 2 * 2), lower = piece<T>::of(O[n / 2], n % 2 * 2 + 1);
        const float4 from = other.O[n][lane], mine = part ? lower : upper;
        const int column = piece<T>::column(n / 2, n % 2 * 2);
        const float4 o = make_float4(fmaf(mine.x, y.weight[0], from.x * y.weight[1]),
                                     fmaf(mine.y, y.weight[0], from.y * y.weight[1]),
                                     fmaf(mine.z, y.weight[0], from.z * y.weight[1]),
                                     fmaf(mine.w, y.weight[0], from.w * y.weight[1]));
        if (column < a.Dv)
            store_piece<T>(a.o, o_at + column, o, false);
    }
    if (a.lse.data && lane % 4 == 0)
        store(a.lse, row_at(a.lse, s.q_batch, x.h, s.q_row + i), y.lse(scale, sink));
#endif
}

template <class T, int U, bool GENERAL> static heed_status run(const args &a, const heed_plan *plan, const heed_exec *x)
{
    static_assert(2 * most_teams<T, GENERAL> * sizeof(partial<T, U>) <= HEED_SHARED_SMALL,
                  "what a block may have everywhere");
    const int64_t tiles = tiles_of(a.Sq, 16);
    int teams = 1; /* no more than it takes to have all blocks at work at once: they share what the L1 has */
    while (teams < most_teams<T, GENERAL> && a.B * a.Hq * tiles_of(tiles, teams) > plan->device.units)
        teams++;
    /* In fp32 alone: elsewhere, on Hopper, others are for few rows. */
    const int64_t key_steps = tiles_of(keys_of(a), 8 * key_tiles<T, U>);
    const bool four = sizeof(T) == 4 && !GENERAL && teams == 1 && key_steps > 2 && key_steps <= 4;
    return launch_early(four                         ? forward_small < T, U, GENERAL,
                        sizeof(T) == 4 && !GENERAL > : forward_small<T, U, GENERAL, false>,
                        grid_of(a, tiles_of(tiles, teams)), dim3(32, four ? 4 : 2, teams),
                        teams * (four ? 4 : 2) * sizeof(partial<T, U>), plan, x, a, keys_of(a));
}

template <class T> static heed_status run(const args &a, const heed_plan *plan, const heed_exec *x)
{
    const bool general = a.softcap > 0 || a.bias.data || a.alibi.data || a.mask.data || a.drop_below || a.scale <= 0;
    if constexpr (sizeof(T) == 4)
        if (HEED_MAX(a.D, a.Dv) > 32)
            return general ? run<T, 2, true>(a, plan, x) : run<T, 2, false>(a, plan, x);
    return general ? run<T, 1, true>(a, plan, x) : run<T, 1, false>(a, plan, x);
}

size_t heed_forward_workspace_small(const heed_problem *p, const heed_plan *plan)
{
    (void)p, (void)plan;
    return 0;
}

heed_status heed_forward_small(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    const prologue start(p, x);
    const args &a = start.a;
    if (start.status)
        return start.status;
    return a.q.dtype == HEED_F32   ? run<float>(a, plan, x)
           : a.q.dtype == HEED_F16 ? run<__half>(a, plan, x)
                                   : run<__nv_bfloat16>(a, plan, x);
}
