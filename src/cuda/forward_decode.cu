/* Forward of few rows against many keys, as where a model writes one token after the other: K and V are read once, and that is
 * what takes the time. In fp32 products are plain multiply-adds; 16 bits are forward_decode_mma.cu's.
 *
 * A block asks for K and the first of V at once, K by way of shared memory, 64 bytes of each key at a time. For S = Q K^T a
 * thread has one key; for O = P V one piece of 16 bytes of V's columns, of every so many keys. */
#include "decode.cuh"

constexpr int THREADS = PART, WARPS = THREADS / 32;
constexpr int CHUNK = 16, PIECES = CHUNK / 4; /* numbers of a key that are met at a time, in pieces of 16 bytes */
constexpr int STAGES = 3;

/* Where piece p of a chunk of key n lies, so that those of eight neighbours are in different banks. */
__device__ static int place_of(int n, int p) { return n * CHUNK + (p ^ (n / 2 & 3)) * 4; }

/* Columns c .. c + 3 of a row, of which there are `width`: rows start at multiples of 16 bytes but may end anywhere. */
__device__ static float4 load_piece(const float *row, int c, int width)
{
    if (c + 4 <= width)
        return __ldg((const float4 *)(row + c));
    return make_float4(c < width ? row[c] : 0.0f, c + 1 < width ? row[c + 1] : 0.0f, c + 2 < width ? row[c + 2] : 0.0f,
                       0.0f);
}

template <int ROWS> __device__ static void load_row(float (&x)[ROWS], const float *from)
{
    if constexpr (ROWS == 1)
        x[0] = *from;
    else
#pragma unroll
        for (int r = 0; r < ROWS; r += 4)
            *(float4 *)(x + r) = *(const float4 *)(from + r);
}

template <int ROWS> struct shared_decode {
    union {
        alignas(16) float stage[STAGES][PART * CHUNK];
        alignas(16) float sums[THREADS][ROWS][4]; /* of O */
    };
    float S[ROWS][PART];
    alignas(16) float P[PART][ROWS];
    const float *k[PART], *v[PART]; /* NULL: nobody sees the key, or it does not exist */
    own_row row[ROWS];
    head of[ROWS];
    span sequence;         /* looked at now and then, and not in registers */
    alignas(16) float q[]; /* [ROWS][whole chunks of D] */
};

/* A row's score with one key, as scores.cuh wants to see it. */
struct one_score {
    static constexpr int R = 1, C = 1;
    static constexpr bool EXACT = true;
    float x;
    int i, n, first, last;
    __device__ float &at(int, int) { return x; }
    __device__ int row(int) const { return i; }
    static __device__ constexpr int apart(int) { return 0; }
    __device__ int key(int) const { return n; }
    __device__ int low(int) const { return first; }
    __device__ int high(int) const { return last; }
};

template <int ROWS>
__global__ void __launch_bounds__(THREADS, 2)
    forward_decode(const __grid_constant__ args a, const __grid_constant__ parts_of_keys parts)
{
    extern __shared__ __align__(16) char memory[];
    auto &m = *(shared_decode<ROWS> *)memory;
    constexpr int AHEAD = ROWS > 1 ? 4 : 8; /* pieces of V that a thread asks for at once */
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const own_part own = own_part_of(parts, ROWS);
    const int hk = own.hk, n0 = own.part * PART, rows = min(ROWS, a.G * a.Sq - own.first_row);
    const int chunks = (a.D + CHUNK - 1) / CHUNK, q_pitch = chunks * CHUNK;
    let_next_start();
    if (!a.uniform || a.page || a.alibi.data) /* else what is found first is not in memory */
        wait_for_last();
    if (t < rows) {
        const span s = span_of(a, own.b);
        m.row[t] = own_row_of(a, s, parts, own, t);
        m.of[t] = head_of(a, s, m.row[t].h);
        if (t == 0)
            m.sequence = s;
    }
    __syncthreads();
    const span &s = m.sequence;
    int first = INT32_MAX, last = 0; /* of the keys of this part that any row sees */
    for (int r = 0; r < rows; r++)
        if (m.row[r].low < m.row[r].high)
            first = min(first, m.row[r].low), last = max(last, m.row[r].high);
    first = max(first - n0, 0), last = min(last - n0, PART);
    if (first >= last) {
        wait_for_last();
        for (int r = 0; r < rows; r++) {
            for (int c = t; c < a.Dv; c += THREADS)
                parts.o[m.row[r].result * a.Dv + c] = 0.0f;
            if (t == 0)
                parts.most[m.row[r].result] = -CUDART_INF_F, parts.sums[m.row[r].result] = 0.0f;
        }
        return;
    }
    const bool seen = t >= first && t < last;
    const int64_t k_at = seen ? key_at<unsigned>(a, s, a.k, hk, n0 + t) : NOWHERE,
                  v_at = seen ? key_at<unsigned>(a, s, a.v, hk, n0 + t) : NOWHERE;
    m.k[t] = k_at == NOWHERE ? NULL : (const float *)a.k.data + k_at;
    m.v[t] = v_at == NOWHERE ? NULL : (const float *)a.v.data + v_at;
    __syncthreads();
    wait_for_last();
    const float *keys[PIECES]; /* of which the thread copies a piece */
#pragma unroll
    for (int j = 0; j < PIECES; j++)
        keys[j] = m.k[t / PIECES + j * (PART / PIECES)];
    auto bring = [&](int chunk) {
        if (chunk < chunks) {
            const int c = chunk * CHUNK + t % PIECES * 4, bytes = clamp((a.D - c) * 4, 0, 16);
            float *const to = m.stage[chunk % STAGES];
#pragma unroll
            for (int j = 0; j < PIECES; j++)
                copy_async(shared_address(to + place_of(t / PIECES + j * (PART / PIECES), t % PIECES)),
                           keys[j] && bytes ? keys[j] + c : (const float *)a.k.data, keys[j] ? bytes : 0);
        }
        commit_copies();
    };
#pragma unroll
    for (int chunk = 0; chunk < STAGES - 1; chunk++)
        bring(chunk);
    const int pieces = max(1, (a.Dv + 3) / 4), sets = max(1, THREADS / pieces), set = t / min(pieces, THREADS);
    const int piece = t % min(pieces, THREADS); /* of set 0 .. sets - 1; what is left of the threads has none */
    float4 some[AHEAD];
    auto ask = [&](int from) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int n = from + j * sets;
            const float *const row = set < sets && n < PART ? m.v[n] : NULL;
            some[j] = row ? load_piece(row, piece * 4, a.Dv) : make_float4(0, 0, 0, 0);
        }
    };
    /* Which keys are summed together does not depend on what other rows see. */
    const int begin = first / (8 * sets) * (8 * sets) + set;
    ask(begin);
#pragma unroll 1
    for (int r = 0; r < ROWS; r++) {
        const bool exists = r < rows && m.row[r].high > 0;
        const float *const from = (const float *)a.q.data +
                                  (exists ? row_at(a.q, s.q_batch, m.row[r].h, s.q_row + m.row[r].i) : 0);
        for (int c = t; c < q_pitch; c += THREADS)
            m.q[r * q_pitch + c] = exists && c < a.D ? from[c] : 0.0f;
    }

    /* S = Q K^T, the sum over a chunk by itself: over many numbers that is the more accurate. */
    float S[ROWS] = {};
    for (int chunk = 0; chunk < chunks; chunk++) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        bring(chunk + STAGES - 1);
        const float *const stage = m.stage[chunk % STAGES], *const q = m.q + chunk * CHUNK;
        float sum[ROWS] = {};
#pragma unroll(ROWS > 4 ? 2 : PIECES)
        for (int p = 0; p < PIECES; p++) {
            const float4 k = *(const float4 *)(stage + place_of(t, p));
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float4 x = *(const float4 *)(q + r * q_pitch + p * 4);
                sum[r] = fmaf(x.x, k.x, sum[r]);
                sum[r] = fmaf(x.y, k.y, sum[r]);
                sum[r] = fmaf(x.z, k.z, sum[r]);
                sum[r] = fmaf(x.w, k.w, sum[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            S[r] += sum[r];
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        m.S[r][t] = S[r];
#pragma unroll 1
    for (int r = 0; r < rows; r++) { /* each thread its own */
        const own_row &row = m.row[r];
        one_score own = { m.S[r][t], row.i, n0 + t, row.low, row.high };
        if (has_extras(a))
            score(own, a.scale, a, s, m.of[r], false);
        else
            own.x = own.n >= own.first && own.n < own.last ? own.x * a.scale : -CUDART_INF_F;
        m.S[r][t] = own.x;
    }
    __syncthreads();

    /* P = exp(S - the row's largest), a row for each warp. */
#pragma unroll 1
    for (int r = warp; r < ROWS; r += WARPS) {
        float x[PART / 32], top = -CUDART_INF_F, sum = 0.0f;
#pragma unroll
        for (int j = 0; j < PART / 32; j++) {
            x[j] = r < rows ? m.S[r][j * 32 + lane] : -CUDART_INF_F;
            top = fmaxf(top, x[j]);
        }
#pragma unroll
        for (int other = 16; other; other /= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
        const float base = top == -CUDART_INF_F ? 0.0f : top;
        const own_row &row = m.row[min(r, rows - 1)];
        const drop_source draws = { a.drop_below ? seed_of(a) : 0, (uint32_t)row.h, (uint32_t)s.b };
        const uint32_t position = (uint32_t)(uint64_t)(s.p0 + row.i * s.p_step);
#pragma unroll
        for (int j = 0; j < PART / 32; j++) {
            const float p = exp2_fast((x[j] - base) * LOG2E);
            sum += p;
            x[j] = p;
        }
        if (a.drop_below)
#pragma unroll 1
            for (int j = 0; j < PART / 32; j++) {
                const bool keeps = draws.keeps(s.r0 + (n0 + j * 32 + lane) * s.r_step, position, a.drop_below);
#pragma unroll
                for (int k = 0; k < PART / 32; k++) /* number j, without an address in registers */
                    x[k] = k != j ? x[k] : keeps ? x[k] * a.keep_scale : 0.0f;
            }
#pragma unroll
        for (int j = 0; j < PART / 32; j++)
            m.P[j * 32 + lane][r] = x[j];
#pragma unroll
        for (int other = 16; other; other /= 2)
            sum += __shfl_xor_sync(~0u, sum, other);
        if (lane == 0 && r < rows) {
            parts.most[row.result] = sum == sum ? top : 0.0f; /* a NaN is to be seen by whoever merges */
            parts.sums[row.result] = sum;
        }
    }
    __syncthreads();

    /* O = P V, the sum over eight keys by itself. P = 0 hides whatever V holds. */
    float O[ROWS][4] = {}, sum[ROWS][4] = {};
    auto add_sum = [&] {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                O[r][e] += sum[r][e], sum[r][e] = 0.0f;
    };
    int met = 0;
    for (int from = begin; from < last; ask(from)) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            float p[ROWS];
            load_row(p, m.P[min(from + j * sets, PART - 1)]);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (p[r] != 0.0f) {
                    sum[r][0] = fmaf(p[r], some[j].x, sum[r][0]), sum[r][1] = fmaf(p[r], some[j].y, sum[r][1]);
                    sum[r][2] = fmaf(p[r], some[j].z, sum[r][2]), sum[r][3] = fmaf(p[r], some[j].w, sum[r][3]);
                }
        }
        from += AHEAD * sets;
        if ((met += AHEAD) % 8 == 0)
            add_sum();
    }
    add_sum();
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        *(float4 *)m.sums[t][r] = make_float4(O[r][0], O[r][1], O[r][2], O[r][3]);
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < rows; r++)
        for (int c = t; c < a.Dv; c += THREADS) {
            float sum = 0.0f;
#pragma unroll 4
            for (int k = 0; k < sets; k++)
                sum += m.sums[k * pieces + c / 4][r][c % 4];
            parts.o[m.row[r].result * a.Dv + c] = sum;
        }
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

template <int ROWS>
static heed_status run(const args &a, const parts_of_keys &parts, const heed_plan *plan, const heed_exec *x)
{
    const size_t bytes = sizeof(shared_decode<ROWS>) + ROWS * tiles_of(a.D, CHUNK) * CHUNK * sizeof(float);
    static_assert(sizeof(shared_decode<ROWS>) + ROWS * HEED_MAX_HEAD_DIM * sizeof(float) <= HEED_SHARED_SMALL);
    static_assert(HEED_MAX_HEAD_DIM / 4 <= THREADS, "a thread for each piece of a row");
    return launch_parts(forward_decode<ROWS>, ROWS, THREADS, bytes, a, parts, plan, x);
}

static int64_t parts_of(int64_t keys) { return HEED_MAX(1, tiles_of(keys, PART)); }

size_t heed_forward_workspace_decode(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return (size_t)(p->B * p->Hq * p->Sq * parts_of(p->full.keys) * (p->Dv + 2)) * sizeof(float);
}

heed_status heed_forward_decode(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    const prologue start(p, x);
    const args &a = start.a;
    const int64_t rows = p->G * p->Sq, parts = parts_of(p->full.keys), count = p->B * p->Hq * p->Sq * parts;
    float *const o = (float *)x->workspace, *const most = o + count * p->Dv;
    const parts_of_keys all = { (int)parts, o, most, most + count, {}, {}, {}, {}, 0.0f };
    if (start.status)
        return start.status;
    const heed_status status = a.q.dtype != HEED_F32 ? heed_cuda_decode_mma(a, all, plan, x)
                               : rows == 1           ? run<1>(a, all, plan, x)
                               : rows <= 4           ? run<4>(a, all, plan, x)
                                                     : run<8>(a, all, plan, x);
    return status || !count ? status : heed_cuda_merge_parts(a, all.count, o, most, all.sums, plan, x);
}
