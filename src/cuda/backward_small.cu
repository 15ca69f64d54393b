/* Backward for few rows and keys, in all types, head sizes to 64, on sm_80 and later: one launch, made for one short wait
 * (small.cuh). The first blocks own queries and make dQ, the others own keys and make dK and dV:
 *
 *     queries   S   = Q K^T   dP   = dO V^T   dQ = scale dS K
 *     keys      S^T = K Q^T   dP^T = V dO^T   dK = scale dS^T Q   dV = P^T dO
 *
 * A warp owns 16 rows of the one side and meets every C-th 16 of the other; the C warps that share rows add up what they
 * have at the end, in order. delta is computed where it is needed, unless the caller brings it. */
#include "small.cuh"

constexpr int MOST_WARPS = 4, MOST_PARTS = 4, MEET = 16;

/* Where the GPU is all but idle, and there is shared memory for it, twice as many: each part is then two warps' that meet 16
 * rows at most, and adds up as it would if one warp had met both. */
template <class T, int U> constexpr bool in_halves = sizeof(T) == 4 && U == 1;

/* Who does what, of queries or keys: blocks for each head, and 2^log2_parts parts of what is met. */
struct division {
    int blocks, log2_parts;
};

/* ---- Scores ------------------------------------------------------------------------------------------------------ */

/* A warp's scores with keys as rows. */
template <class T> struct key_tile {
    static constexpr int R = 4, C = 2;
    static constexpr bool EXACT = sizeof(T) == 4;
    float (&X)[2][4];
    int i0, n0;            /* first query and first key of this lane */
    int lows[4], highs[4]; /* of its four queries */
    __device__ float &at(int r, int c) { return X[r / 2][c * 2 + r % 2]; }
    static __device__ constexpr int apart(int c) { return c * 8; }
    __device__ int row(int r) const { return i0 + r / 2 * 8 + r % 2; }
    __device__ int key(int c) const { return n0 + apart(c); }
    __device__ int low(int r) const { return lows[r]; }
    __device__ int high(int r) const { return highs[r]; }
};

template <bool KEYS, class T> struct tile_for {
    typedef score_tile<T, 2> type;
};
template <class T> struct tile_for<true, T> {
    typedef key_tile<T> type;
};

/* What is to be known of a query: P = 2^(c S - log2 - rest) with lse log2(e) = log2 + rest. A row without gradient has
 * lse = log2 = inf, so that its P is 0. */
struct facts {
    float lse, log2, rest, delta;
};

__device__ static facts facts_of(float lse, float delta)
{
    if (lse == -CUDART_INF_F || lse == CUDART_INF_F)
        return { CUDART_INF_F, CUDART_INF_F, 0.0f, 0.0f };
    const float log2 = -min_or_nan(-min_or_nan(lse * LOG2E, 3.4e38f), 3.4e38f), LOG2E_REST = 1.92596303e-8f;
    const float rest = fabsf(log2) < 1e7f ? fmaf(lse, LOG2E_REST, fmaf(lse, LOG2E, -log2)) : 0.0f;
    return { lse, log2, rest, delta };
}

/* From S and dP to P after dropout, and dS; dS carries the scale where GENERAL. */
template <bool GENERAL, class Tile>
__device__ static void differentiate(Tile &S, Tile &dP, const facts (&f)[Tile::R], const args &a, const span &s,
                                     const head &x, bool whole)
{
    const float c = fmaxf(fminf(a.scale * LOG2E, 3e38f), 1.2e-38f);
    float slope[Tile::R][Tile::C];
    if (GENERAL)
        score_with_slope(S, slope, a, s, x, whole);
    else if (!whole)
        hide_outside_band(S);
#pragma unroll
    for (int r = 0; r < Tile::R; r++) {
        const uint32_t kept = GENERAL && a.drop_below ? draw(S, r, a, s, x, seed_of(a)) : ~0u;
#pragma unroll
        for (int e = 0; e < Tile::C; e++) {
            /* At most 1: rounding, where S is large, could make it more. */
            const float power = GENERAL ? (S.at(r, e) - f[r].lse) * LOG2E : fmaf(S.at(r, e), c, -f[r].log2) - f[r].rest;
            const float p = exp2_fast(min_or_nan(power, 0.0f));
            const float keep = !GENERAL || !a.drop_below ? 1.0f : kept >> e & 1 ? a.keep_scale : 0.0f;
            S.at(r, e) = p * keep;
            dP.at(r, e) = p == 0.0f ? 0.0f : p * fmaf(dP.at(r, e), keep, -f[r].delta) * (GENERAL ? slope[r][e] : 1.0f);
        }
    }
}

/* ---- Delta ------------------------------------------------------------------------------------------------------- */

template <class T> __device__ inline float dot(uint32_t x, uint32_t y, float sum)
{
    const float2 u = unpack<T>(x), v = unpack<T>(y);
    return fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
}
template <> __device__ inline float dot<float>(uint32_t x, uint32_t y, float sum)
{
    return fmaf(__uint_as_float(x), __uint_as_float(y), sum);
}

/* x . y of rows g and g + 8: chunks x(n, m) and y(n, m) of row g + 8n, across. */
template <class T, int M, class X, class Y> __device__ static void dot_rows(float (&sum)[2], X x, Y y)
{
#pragma unroll
    for (int n = 0; n < 2; n++) {
        sum[n] = 0.0f;
#pragma unroll
        for (int m = 0; m < M; m++) {
            const uint4 u = x(n, m), v = y(n, m);
#pragma unroll
            for (int w = 0; w < 4; w++)
                sum[n] = dot<T>(word(u, w), word(v, w), sum[n]);
        }
        sum[n] += __shfl_xor_sync(~0u, sum[n], 1);
        sum[n] += __shfl_xor_sync(~0u, sum[n], 2);
    }
}

/* ---- Results ----------------------------------------------------------------------------------------------------- */

/* What a warp meets, on its way and while it is in use, and its results: dQ or dK, and dV. */
template <class T, int U> struct workplace {
    staged<16, 8 * U> first, second, o; /* Q, dO and O, or K, V and O of the warp's own queries */
    float4 Y[2][column_tiles<T, U>][32];
};

/* Y += P B, in shared memory: registers are for what is on its way. first: Y = P B. */
template <class T, int U, int TILES>
__device__ static void add_product(float4 (&Y)[TILES][32], const float (&P)[2][4], const staged<16, 8 * U> &B,
                                   bool first)
{
    const int lane = threadIdx.x;
    const left_operand<T, 2> left(P);
#pragma unroll
    for (int i = 0; i < TILES / 4; i++) {
        float four[4][4];
        left.template times<U>(four, B, i);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            float4 y = piece<T>::of(four, p);
            if (!first) {
                const float4 before = Y[4 * i + p][lane];
                y.x += before.x, y.y += before.y, y.z += before.z, y.w += before.w;
            }
            Y[4 * i + p][lane] = y;
        }
    }
}

/* Adds up the parts of a team's results and writes them. */
template <class T, int U>
__device__ static void store_sum(const workplace<T, U> *team, int which, int part, int parts, float scale,
                                 const view &t, int width, bool accumulate, int64_t first, int64_t step, int rows)
{
    constexpr int TILES = column_tiles<T, U>;
    const int lane = threadIdx.x;
    for (int i = part & (MOST_PARTS - 1); i < TILES; i += min(parts, MOST_PARTS)) {
        const int row = piece<T>::row(i % 4), column = piece<T>::column(i / 4, i % 4);
        if (row >= rows || column >= width)
            continue;
        float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < MOST_PARTS; w++)
            if (w < parts) {
                float4 p = team[w].Y[which][i][lane];
                if (in_halves<T, U> && parts > MOST_PARTS) {
                    const float4 rest = team[w + MOST_PARTS].Y[which][i][lane];
                    p.x += rest.x, p.y += rest.y, p.z += rest.z, p.w += rest.w;
                }
                y.x += p.x, y.y += p.y, y.z += p.z, y.w += p.w;
            }
        y.x *= scale, y.y *= scale, y.z *= scale, y.w *= scale;
        store_piece<T>(t, first + row * step + column, y, accumulate);
    }
}

/* ---- A block ----------------------------------------------------------------------------------------------------- */

template <class T, int U, bool GENERAL, bool KEYS>
__device__ static void own_rows(char *memory, const args &a, int all_keys, int block, const division &n)
{
    constexpr int M = 2 * U, TILES = column_tiles<T, U>;
    typedef typename tile_for<KEYS, T>::type own_tile;
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y, parts = 1 << n.log2_parts;
    const int part = warp & (parts - 1), own0 = (block * (warps >> n.log2_parts) + (warp >> n.log2_parts)) * 16;
    const int own_h = own_head(a), hk = KEYS || a.G == 1 ? own_h : own_h / a.G;
    if (GENERAL || is_ragged(a))
        wait_for_last();
    const span s = sequence(a, own_sequence(a), all_keys);
    const int count = KEYS ? s.keys : s.rows;
    int first = 0, last = KEYS ? s.rows : s.keys, inside = 0, outside = last; /* all own rows meet inside .. outside */
    if (a.left < FAR || a.right < FAR) {
        int end, end2, begin2;
        if (KEYS)
            band_of_key(a, s, own0, first, end), band_of_key(a, s, min(own0 + 15, count - 1), begin2, end2);
        else
            band_of_row(a, s, own0, first, end), band_of_row(a, s, min(own0 + 15, count - 1), begin2, end2);
        inside = max(first, begin2), outside = min(end, end2);
        first = min(first, begin2) & ~7, last = max(end, end2);
    }
    const int tiles = own0 < count ? (last - first + MEET - 1) / MEET : 0;
    const int64_t k_row = s.k_row + a.col;
    const source k = rows_of<T>(a.k, row_at(a.k, s.k_batch, hk, k_row), a.col_step * a.k.stride[2],
                                (KEYS ? s.keys : last) - 1, a.D);
    const source v = rows_of<T>(a.v, row_at(a.v, s.k_batch, hk, k_row), a.col_step * a.v.stride[2],
                                (KEYS ? s.keys : last) - 1, a.Dv);
    int h = KEYS ? own_h * a.G : own_h, tile = part;
    auto queries = [&](const view &t, int width) {
        return rows_of<T>(t, row_at(t, s.q_batch, h, s.q_row), t.stride[2], (KEYS ? last : s.rows) - 1, width);
    };
    workplace<T, U> *const team = (workplace<T, U> *)memory + (warp - part), &own = team[part];
    wait_for_last(k.first, v.first, queries(a.q, a.D).first);

    uint4 A[2][M], A2[2][M]; /* K and V, or Q and dO */
    if (tiles) {
        load_across(A, KEYS ? k : queries(a.q, a.D), own0);
        load_across(A2, KEYS ? v : queries(a.d_o, a.Dv), own0);
    }
    bool started = false;
    while (tiles) {
        for (; KEYS && tile >= tiles; tile -= tiles) /* on to the next head of the group */
            h++;
        if (tile >= tiles || h >= (KEYS ? own_h * a.G + a.G : own_h + 1))
            break;
        const int met0 = first + tile * MEET, i0 = KEYS ? met0 : own0;
        own.first.copy(KEYS ? queries(a.q, a.D) : k, met0);
        commit_copies();
        own.second.copy(KEYS ? queries(a.d_o, a.Dv) : v, met0);
        if (!a.delta.data && (KEYS || !started))
            own.o.copy(queries(a.o, a.Dv), i0);
        commit_copies();
        float S[2][4], dP[2][4], delta[2];
        own_tile t = { S, i0 + (KEYS ? lane % 4 * 2 : lane / 4), (KEYS ? own0 + lane / 4 : met0 + lane % 4 * 2) };
        own_tile dt = { dP, t.i0, t.n0 };
        facts f[own_tile::R];
#pragma unroll
        for (int r = 0; r < own_tile::R; r++)
            f[r].lse = load(a.lse, row_at(a.lse, s.q_batch, h, s.q_row + min(t.row(r), s.rows - 1)));
        if (!started)
            clear_columns(A, k), clear_columns(A2, v);
        wait_for_copies<1>();
        multiply_across(S, A, own.first, T());
        wait_for_copies<0>();
        multiply_across(dP, A2, own.second, T());
        if (!a.delta.data)
            dot_rows<T, M>(
                delta,
                [&](int n, int m) { /* columns that there are not are not to be counted */
                                    return 64 * m + lane % 4 * 16 > v.end ? make_uint4(0, 0, 0, 0) : own.o.across(n, m);
                },
                [&](int n, int m) { return KEYS ? own.second.across(n, m) : A2[n][m]; });
#pragma unroll
        for (int r = 0; r < own_tile::R; r++) {
            const int i = min(t.row(r), s.rows - 1);
            float d;
            if (a.delta.data)
                d = load(a.delta, row_at(a.delta, s.q_batch, h, s.q_row + i));
            else {
                d = KEYS ? __shfl_sync(~0u, delta[r / 2], (lane % 4 * 2 + r % 2) * 4) : delta[r];
                d -= a.d_lse.data ? load(a.d_lse, row_at(a.d_lse, s.q_batch, h, s.q_row + i)) : 0.0f;
            }
            f[r] = facts_of(t.row(r) < s.rows ? f[r].lse : CUDART_INF_F, d);
        }
        const bool whole = met0 >= inside && met0 + MEET <= outside;
        if (!whole) {
#pragma unroll
            for (int r = 0; r < own_tile::R; r++)
                band_of_row(a, s, min(t.row(r), s.rows - 1), t.lows[r], t.highs[r]);
        }
        const head x = head_of(a, s, h);
        differentiate<GENERAL>(t, dt, f, a, s, x, whole);
        if (KEYS)
            add_product<T, U>(own.Y[1], S, own.second, !started); /* dV += P^T dO */
        add_product<T, U>(own.Y[0], dP, own.first, !started);     /* dQ += dS K, dK += dS^T Q */
        started = true;
        tile += parts;
        __syncwarp();
    }
    if (!started) {
#pragma unroll
        for (int i = 0; i < TILES; i++)
            own.Y[0][i][lane] = own.Y[1][i][lane] = make_float4(0, 0, 0, 0);
    }
    __syncthreads();
    const float scale = GENERAL ? 1.0f : a.scale;
    const int rows = count - own0;
    const bool second = part >= MOST_PARTS; /* of two halves */
    if (!KEYS) {
        if (!second)
            store_sum(team, 0, part, parts, scale, a.d_q, a.D, a.accumulate,
                      row_at(a.d_q, s.q_batch, own_h, s.q_row + own0), a.d_q.stride[2], rows);
        return;
    }
    if (a.d_k.data && !second)
        store_sum(team, 0, part, parts, scale, a.d_k, a.D, a.accumulate,
                  row_at(a.d_k, s.k_batch, own_h, k_row + own0 * a.col_step), a.col_step * a.d_k.stride[2], rows);
    if (a.d_v.data && (second || parts <= MOST_PARTS))
        store_sum(team, 1, part, parts, 1.0f, a.d_v, a.Dv, a.accumulate,
                  row_at(a.d_v, s.k_batch, own_h, k_row + own0 * a.col_step), a.col_step * a.d_v.stride[2], rows);
}

template <class T, int U, bool GENERAL>
__global__ void __launch_bounds__(32 * MOST_WARPS * (in_halves<T, U> ? 2 : 1), in_halves<T, U>             ? 1
                                                                               : GENERAL || sizeof(T) == 4 ? 2
                                                                                                           : 3)
    backward_small(const __grid_constant__ args a, int all_keys, division queries, division keys)
{
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(16) char memory[];
    let_next_start();
    if ((int)blockIdx.y < queries.blocks)
        own_rows<T, U, GENERAL, false>(memory, a, all_keys, blockIdx.y, queries);
    else if (own_head(a) < a.Hk)
        own_rows<T, U, GENERAL, true>(memory, a, all_keys, blockIdx.y - queries.blocks, keys);
#endif
}

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

template <class T, int U, bool GENERAL> static heed_status run(const args &a, const heed_plan *plan, const heed_exec *x)
{
    const int keys = keys_of(a);
    const int64_t q_tiles = tiles_of(a.Sq, 16), k_tiles = tiles_of(keys, 16),
                  teams = a.B * (a.Hq * q_tiles + a.Hk * k_tiles);
    division q = {}, k = {};
    while (1 << q.log2_parts < HEED_MIN(k_tiles, MOST_PARTS))
        q.log2_parts++;
    while (1 << k.log2_parts < HEED_MIN(a.G * q_tiles, MOST_PARTS))
        k.log2_parts++;
    if (in_halves<T, U> && teams <= plan->device.units && HEED_MAX(k_tiles, a.G * q_tiles) <= 2 * MOST_PARTS)
        q.log2_parts += k_tiles > MOST_PARTS, k.log2_parts += a.G * q_tiles > MOST_PARTS;
    const int least = 1 << HEED_MAX(q.log2_parts, k.log2_parts);
    int warps = least; /* no more than it takes to have all blocks at work at once: they share what the L1 has */
    while (2 * warps <= MOST_WARPS && teams * least > warps * plan->device.units)
        warps *= 2;
    q.blocks = a.d_q.data ? (int)tiles_of(q_tiles, warps >> q.log2_parts) : 0;
    k.blocks = a.d_k.data || a.d_v.data ? (int)tiles_of(k_tiles, warps >> k.log2_parts) : 0;
    return launch_early(backward_small<T, U, GENERAL>, grid_of(a, q.blocks + k.blocks), dim3(32, warps),
                        warps * sizeof(workplace<T, U>), plan, x, a, keys, q, k);
}

template <class T, int U> static heed_status run(const args &a, const heed_plan *plan, const heed_exec *x)
{
    const bool general = a.softcap > 0 || a.bias.data || a.alibi.data || a.mask.data || a.drop_below || a.scale <= 0;
    return general ? run<T, U, true>(a, plan, x) : run<T, U, false>(a, plan, x);
}

size_t heed_backward_workspace_small(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return heed_cuda_others_bytes(p);
}

heed_status heed_backward_small(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    const prologue start(p, x, DELTA_WHERE_NEEDED);
    const args &a = start.a;
    if (start.status)
        return start.status;
    const bool narrow = HEED_MAX(a.D, a.Dv) <= 32;
    return a.q.dtype == HEED_F16    ? run<__half, 1>(a, plan, x)
           : a.q.dtype == HEED_BF16 ? run<__nv_bfloat16, 1>(a, plan, x)
           : narrow                 ? run<float, 1>(a, plan, x)
                                    : run<float, 2>(a, plan, x);
}
