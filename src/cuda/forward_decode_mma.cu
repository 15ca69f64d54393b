/* Forward of few rows of 16 bits against many keys. Eight rows, of all heads that share keys, are the columns of the tensor
 * core's results, keys (of S) and columns of V (of O) their rows:
 *
 *     S^T [16 keys x 8 rows] = K Q^T        O^T [16 columns x 8 rows] += V^T P^T
 *
 * so that K and V go from memory straight into the registers of a product. Of a sum over d, d may be in any order, as long as it
 * is that of Q too: a lane takes 16 bytes of a key. V must be turned: a lane takes 16 bytes of four keys, and makes pairs of
 * neighbouring keys by byte permutations. P is turned by an instruction for that.
 *
 * Of a part a warp has OWN keys for itself, takes them in pieces of 16 keys x 64 columns, K first, a few of which are on their
 * way at any time, and has its own maxima. What the warps have is added at the end of a part.
 * What follows from the launch's arguments alone is found before the kernel waits for the one before it. */
#include "decode.cuh"
#include "merge.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, ROWS = 8, OWN = PART / WARPS, TILES = OWN / 16;

template <int WIDTH> struct shared_decode {
    static constexpr int PITCH = WIDTH + 4;
    alignas(16) float o[WARPS][ROWS][PITCH]; /* columns as place_of() says */
    float most[WARPS][ROWS], sums[WARPS][ROWS];
    const char *k[PART], *v[PART]; /* of a key that nobody sees, those of the next that somebody does */
    own_row row[ROWS];
    span sequence;                           /* looked at now and then, and not in registers */
    const char *first_k, *first_v, *q[ROWS]; /* NULL: the row sees nothing */
    int first, last;                         /* of the keys that any row sees */
    int first_part, end, hk, rows;           /* of the block */
};

/* The scores of a row with the lane's keys, which are eight apart. */
struct row_scores {
    static constexpr int R = 1, C = OWN / 8;
    static constexpr bool EXACT = false;
    float x[C];
    int i, n, first, last;
    __device__ float &at(int, int c) { return x[c]; }
    __device__ int row(int) const { return i; }
    static __device__ constexpr int apart(int c) { return 8 * c; }
    __device__ int key(int c) const { return n + 8 * c; }
    __device__ int low(int) const { return first; }
    __device__ int high(int) const { return last; }
};

/* Where column c of O is: lanes that write at once, with columns eight apart of rows two apart, meet different banks. */
__device__ inline int place_of(int c) { return c / 64 * 64 + c / 2 % 4 * 16 + c / 8 % 8 * 2 + c % 2; }

/* What is read once, columns that do not exist as zeros. */
__device__ inline uint4 load_or_zero(const char *from, bool exists)
{
    uint4 x = make_uint4(0, 0, 0, 0);
    if (exists)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "l"(from));
    return x;
}

/* So that a row is in the second cache when its turn comes. */
__device__ inline void ask_ahead(const char *row, int bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row), "r"(bytes) : "memory");
#endif
}

__device__ inline uint32_t word(const uint4 &x, int w) { return w == 0 ? x.x : w == 1 ? x.y : w == 2 ? x.z : x.w; }

/* Over the eight lanes that have the same rows. */
__device__ inline float rows_max(float x)
{
#pragma unroll
    for (int other = 4; other < 32; other *= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, other));
    return x;
}

__device__ inline float rows_sum(float x)
{
#pragma unroll
    for (int other = 4; other < 32; other *= 2)
        x += __shfl_xor_sync(~0u, x, other);
    return x;
}

/* O of a warp once more, by multiply-adds: P = 0 hides whatever V holds, for rows of other heads may see it. */
template <class T, int WIDTH>
__device__ inline void sum_visible(float (&o)[ROWS][shared_decode<WIDTH>::PITCH], const uint32_t (&P)[TILES][2],
                                   const char *const *v, int columns, int rows)
{
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int r = 0; r < rows; r++)
#pragma unroll 1
        for (int c = lane; c - lane < columns; c += 32) {
            float sum = 0.0f;
#pragma unroll
            for (int eight = 0; eight < OWN / 8; eight++)
#pragma unroll 1
                for (int n = 0; n < 8; n++) {
                    const uint32_t two = __shfl_sync(~0u, P[eight / 2][eight % 2], r * 4 + n / 2);
                    const uint16_t p = (uint16_t)(n & 1 ? two >> 16 : two);
                    if (p && c < columns)
                        sum = fmaf((float)*(const T *)&p, (float)((const T *)v[eight * 8 + n])[c], sum);
                }
            if (c < columns)
                o[r][place_of(c)] = sum;
        }
}

/* What the warps have of a part. Those of a row are as many as there are for each, with 32 columns at a time. */
template <int WIDTH>
__device__ inline void join_warps(const shared_decode<WIDTH> &m, const parts_of_keys &parts, const args &a, int number)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, shift = m.rows > 1 ? 32 - __clz(m.rows - 1) : 0;
    const int r = warp & ((1 << shift) - 1);
    if (r >= m.rows)
        return;
    const float most = m.most[lane % WARPS][r]; /* of a warp for each lane, again and again */
    float top = most;
#pragma unroll
    for (int other = 1; other < WARPS; other *= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
    const float weight = most == -CUDART_INF_F ? 0.0f : exp2_fast((most - top) * LOG2E);
    float sum = m.sums[lane % WARPS][r] * weight; /* a NaN is to be seen */
#pragma unroll
    for (int other = 1; other < WARPS; other *= 2)
        sum += __shfl_xor_sync(~0u, sum, other);
    const int64_t result = m.row[r].result + number * ((int64_t)a.B * a.Hq * a.Sq);
#pragma unroll 1
    for (int c = (warp >> shift) * 32 + lane; c < WIDTH; c += (WARPS >> shift) * 32) {
        float x = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float own = __shfl_sync(~0u, weight, w);
            x += own == 0.0f ? 0.0f : m.o[w][r][place_of(c)] * own;
        }
        if (c < a.Dv)
            parts.o[result * a.Dv + c] = x;
        if (c == 0)
            parts.most[result] = sum == sum ? top : 0.0f, parts.sums[result] = sum;
    }
}

template <class T, int WIDTH, int AHEAD, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    decode_mma(const __grid_constant__ args a, const __grid_constant__ parts_of_keys parts)
{
    extern __shared__ __align__(16) char memory[];
    auto &m = *(shared_decode<WIDTH> *)memory;
    constexpr int CHUNKS = WIDTH / 64, PIECES = TILES * CHUNKS; /* of K, and as many of V */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, to = warp * OWN;
    const own_part own = own_part_of(parts, ROWS);
    let_next_start();
    if (!a.uniform || a.page) /* else nothing but K, V and Q is in memory */
        wait_for_last();
    if (warp == 0) { /* a row for each lane, eight lanes the same */
        const span s = span_of(a, own.b);
        const own_row row = own_row_of(a, s, parts, own, lane % ROWS);
        const bool sees = row.low < row.high;
        const int first = __reduce_min_sync(~0u, sees ? row.low : INT32_MAX),
                  last = __reduce_max_sync(~0u, sees ? row.high : 0);
        if (lane < ROWS) {
            m.row[lane] = row;
            m.q[lane] = sees ? a.q.data + row_at(a.q, s.q_batch, row.h, s.q_row + row.i) * 2 : NULL;
        }
        if (lane == 0)
            m.sequence = s, m.first = min(first, last), m.last = last, m.hk = own.hk, m.first_part = own.part,
            m.end = min(own.part + parts.each, parts.count), m.rows = min(ROWS, a.G * a.Sq - own.first_row);
    } else if (warp <= 2) {
        const span s = span_of(a, own.b);
        const view &rows_of = warp == 1 ? a.k : a.v;
        if (lane == 0)
            (warp == 1 ? m.first_k : m.first_v) = rows_of.data +
                                                  2 * row_at(rows_of, s.k_batch, own.hk, s.k_row + a.col);
    }
    __syncthreads();
    const span &s = m.sequence;
    /* Whether any row sees any of the warp's keys. */
    auto is_seen = [&](int part) {
        const int n = part * PART + to;
        return part < m.end && n < m.last && n + OWN > m.first;
    };
    auto find_keys = [&](int part) {
#pragma unroll
        for (int n = lane; n < OWN; n += 32) {
            const int number = clamp(part * PART + to + n, m.first, m.last - 1);
            const char *&k = m.k[to + n], *&v = m.v[to + n];
            if (a.page) {
                const int64_t k_at = key_at<unsigned>(a, s, a.k, m.hk, number),
                              v_at = key_at<unsigned>(a, s, a.v, m.hk, number);
                k = a.k.data + 2 * (k_at == NOWHERE ? 0 : k_at); /* anything will do that can be read */
                v = a.v.data + 2 * (v_at == NOWHERE ? 0 : v_at);
            } else {
                k = m.first_k + number * (a.col_step * a.k.stride[2] * 2);
                v = m.first_v + number * (a.col_step * a.v.stride[2] * 2);
            }
        }
    };
    auto ask = [&](uint4(&x)[4], int piece) {
        const char *const *const k = m.k + to, *const *const v = m.v + to;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (piece < PIECES) { /* 32 columns twice, of two keys */
                const int c = piece % CHUNKS * 64 + j % 2 * 32;
                x[j] = load_or_zero(k[piece / CHUNKS * 16 + j / 2 * 8 + g] + t * 16 + c * 2, t * 8 < a.D - c);
            } else if (piece < 2 * PIECES) { /* 64 columns of four keys */
                const int c = (piece - PIECES) / TILES * 64;
                x[j] = load_or_zero(v[piece % TILES * 16 + j / 2 * 8 + t * 2 + j % 2] + g * 16 + c * 2,
                                    g * 8 < a.Dv - c);
            }
    };
#pragma unroll 1
    for (int part = m.first_part; part < m.end; part++) {
        const int n0 = part * PART + to;
        if (is_seen(part)) {
            find_keys(part);
            __syncwarp();
            wait_for_last();
            const char *const q = m.q[g];
            uint4 Q[CHUNKS][2], ring[AHEAD][4];
#pragma unroll
            for (int c = 0; c < WIDTH; c += 32)
                Q[c / 64][c / 32 % 2] = load_or_zero(q + (c + t * 8) * 2, q && t * 8 < a.D - c);
#pragma unroll
            for (int piece = 0; piece < AHEAD; piece++)
                ask(ring[piece], piece);
            float S[TILES][4] = {};
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++) {
                const uint4(&x)[4] = ring[piece % AHEAD];
                float(&sum)[4] = S[piece / CHUNKS];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const uint4 &q = Q[piece % CHUNKS][j];
                    multiply(sum, { x[j].x, x[j + 2].x, x[j].y, x[j + 2].y }, q.x, q.y, T());
                    multiply(sum, { x[j].z, x[j + 2].z, x[j].w, x[j + 2].w }, q.z, q.w, T());
                }
                ask(ring[piece % AHEAD], piece + AHEAD);
            }
            if (!a.page && is_seen(part + 1)) {
                const int number = clamp((part + 1) * PART + to + lane, m.first, m.last - 1);
                ask_ahead(m.first_k + number * (a.col_step * a.k.stride[2] * 2), a.D * 2);
            }

            /* do_row(scores, head) for the even row, then for the odd one. */
            auto each_row = [&](auto do_row) {
                row_scores x;
#pragma unroll
                for (int c = 0; c < row_scores::C; c++)
                    x.x[c] = S[c / 2][c % 2 * 2];
#pragma unroll 1
                for (int j = 0; j < 2; j++) {
                    const own_row &row = m.row[2 * t + j];
                    x.i = row.i, x.n = n0 + g, x.first = row.low, x.last = row.high;
                    do_row(x, row.h);
                    if (j == 0)
#pragma unroll
                        for (int c = 0; c < row_scores::C; c++) {
                            float &one = S[c / 2][c % 2 * 2], &other = S[c / 2][c % 2 * 2 + 1];
                            one = x.x[c], x.x[c] = other;
                        }
                }
#pragma unroll
                for (int c = 0; c < row_scores::C; c++)
                    S[c / 2][c % 2 * 2 + 1] = x.x[c];
            };
            const bool extras = has_extras(a);
            each_row([&](row_scores &x, int h) {
                if (extras && x.first < x.last) {
                    if (a.softcap > 0)
#pragma unroll
                        for (float &one : x.x)
                            one = capped<row_scores::EXACT>(one, parts.scale_in_cap, 1.0f);
                    finish_scores(x, a.softcap > 0 ? a.softcap : a.scale, a, s, head_of(a, s, h), false);
                    return;
                }
                scale_scores(x, a.scale);
                hide_outside_band(x);
            });
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float top = -CUDART_INF_F, sum = 0.0f;
#pragma unroll
                for (int c = 0; c < row_scores::C; c++)
                    top = fmaxf(top, S[c / 2][c % 2 * 2 + j]);
                top = rows_max(top);
                const float base = top == -CUDART_INF_F ? 0.0f : top;
#pragma unroll
                for (int c = 0; c < row_scores::C; c++) {
                    float &x = S[c / 2][c % 2 * 2 + j];
                    x = exp2_fast((x - base) * LOG2E);
                    sum += x;
                }
                sum = rows_sum(sum);
                if (lane < 4)
                    m.most[warp][2 * t + j] = top, m.sums[warp][2 * t + j] = sum;
            }
            if (a.drop_below)
                each_row([&](row_scores &x, int h) { drop_and_scale(x, a.keep_scale, a, s, head_of(a, s, h)); });
            uint32_t P[TILES][2];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int j = 0; j < 2; j++)
                    P[tile][j] = transpose_matrix(pack<T>(S[tile][2 * j], S[tile][2 * j + 1]));

            float probe = 0.0f; /* NaN where any of O is not finite */
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                float O[4][4] = {};
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    const int piece = PIECES + chunk * TILES + tile;
                    const uint4(&x)[4] = ring[piece % AHEAD];
#pragma unroll
                    for (int w = 0; w < 4; w++) { /* two columns */
                        const uint32_t y[4] = { word(x[0], w), word(x[1], w), word(x[2], w), word(x[3], w) };
                        multiply(O[w],
                                 { __byte_perm(y[0], y[1], 0x5410), __byte_perm(y[0], y[1], 0x7632),
                                   __byte_perm(y[2], y[3], 0x5410), __byte_perm(y[2], y[3], 0x7632) },
                                 P[tile][0], P[tile][1], T());
                    }
                    ask(ring[piece % AHEAD], piece + AHEAD);
                }
#pragma unroll
                for (int w = 0; w < 4; w++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        probe = fmaf(O[w][j], 0.0f, fmaf(O[w][j + 2], 0.0f, probe));
                        if (2 * t + j < m.rows)
                            *(float2 *)&m.o[warp][2 * t + j][place_of(chunk * 64 + g * 8 + w * 2)] = make_float2(
                                O[w][j], O[w][j + 2]);
                    }
            }
            if (__any_sync(~0u, probe != 0.0f)) {
                __syncwarp();
                sum_visible<T, WIDTH>(m.o[warp], P, m.v + to, a.Dv, m.rows);
            }
        } else if (lane < ROWS)
            m.most[warp][lane] = -CUDART_INF_F, m.sums[warp][lane] = 0.0f;
        __syncthreads();

        if (part == m.first_part)
            wait_for_last(); /* for warps that have not yet */
        join_warps(m, parts, a, part - m.first_part);
        __syncthreads();
    }
    if (parts.each < parts.count)
        return;
    const part_results all = { parts.count, parts.o, parts.most, parts.sums, (int64_t)a.B * a.Hq * a.Sq, a.Dv };
#pragma unroll 1
    for (int unit = warp; unit < m.rows * (WIDTH / 32); unit += WARPS) {
        const own_row &row = m.row[unit / (WIDTH / 32)];
        if (row.i < s.rows)
            merge_columns<1>(a, s, row.h, row.i, all, row.result, unit % (WIDTH / 32) * 32 + lane);
    }
}

/* How many parts a block has: one, but where blocks of a few are all at once on the GPU, those, and where a head has only two,
 * both, which saves the launch that merges them. More of them one after the other is slower than blocks that take turns. */
static int parts_of_each(const args &a, int count, int blocks_at_once, const heed_plan *plan)
{
    const int64_t heads = (int64_t)a.B * a.Hk * tiles_of((int64_t)a.G * a.Sq, ROWS);
    const int64_t turns = tiles_of(heads * count, (int64_t)blocks_at_once * HEED_MAX(plan->device.units, 1));
    return turns <= 4 ? (int)HEED_MIN(HEED_MAX(turns, 1), count) : count <= 2 ? count : 1;
}

template <class T, int WIDTH, int BLOCKS>
static heed_status run_wide(const args &a, parts_of_keys parts, const heed_plan *plan, const heed_exec *x, bool *merged)
{
    parts.each = parts_of_each(a, parts.count, BLOCKS, plan);
    parts.scale_in_cap = a.scale / a.softcap;
    *merged = parts.each >= parts.count;
    return launch_parts(decode_mma<T, WIDTH, 4, BLOCKS>, ROWS, THREADS, sizeof(shared_decode<WIDTH>), a, parts, plan,
                        x);
}

template <class T>
static heed_status run(const args &a, const parts_of_keys &parts, const heed_plan *plan, const heed_exec *x,
                       bool *merged)
{
    const int width = HEED_MAX(a.D, a.Dv);
    return width <= 64    ? run_wide<T, 64, 2>(a, parts, plan, x, merged)
           : width <= 128 ? run_wide<T, 128, 2>(a, parts, plan, x, merged)
                          : run_wide<T, 256, 1>(a, parts, plan, x, merged);
}

heed_status heed_cuda_decode_mma(const args &a, const parts_of_keys &parts, const heed_plan *plan, const heed_exec *x,
                                 bool *merged)
{
    return a.q.dtype == HEED_F16 ? run<__half>(a, parts, plan, x, merged)
                                 : run<__nv_bfloat16>(a, parts, plan, x, merged);
}
