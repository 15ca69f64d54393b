/* Forward of few rows of 16 bits against many keys. Eight rows, of all heads that share keys, are the columns of the tensor
 * core's results, keys (of S) and columns of V (of O) their rows:
 *
 *     S^T [16 keys x 8 rows] = K Q^T        O^T [16 columns x 8 rows] += V^T P^T
 *
 * A part is met in tiles, of which K and V lie in shared memory. A warp copies its own keys of both, computes the
 * scores of these, and of O its own columns, over the keys of all warps. As soon as K of a tile has been met the next one is
 * asked for, in its place, and so is V.
 * What follows from the launch's arguments alone is found before the kernel waits for the one before it. */
#include "decode.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS, ROWS = 8;

template <int WIDTH> struct shared_decode {
    static constexpr int BYTES = 2 * WIDTH, KEYS = WIDTH > 128 ? 64 : 128, OWN = KEYS / WARPS; /* of a row; of a warp */
    alignas(128) char k[KEYS][BYTES], v[KEYS][BYTES]; /* with 16 bytes where place_of() says */
    alignas(16) char p[ROWS][2 * KEYS + 16];          /* rows of a column of eight keys begin in different banks */
    float most[WARPS][ROWS], sums[WARPS][ROWS];
    own_row row[ROWS];
    span sequence;                           /* looked at now and then, and not in registers */
    const char *first_k, *first_v, *q[ROWS]; /* NULL: the row sees nothing */
    int first, last;                         /* of the keys that any row sees */
    int all_first, all_last;                 /* of those that all of them see */
};

/* Where 16 bytes of a row are, so that eight rows have theirs in different banks, and so have two rows four each. */
__device__ inline int turn_of(int row) { return (row & 1) << 2 | (row & 2) | (row >> 2 & 1); }
template <int BYTES> __device__ inline int place_of(int row, int chunk)
{
    return row * BYTES + (chunk ^ turn_of(row)) * 16;
}

/* The scores of a row with the lane's keys, which are eight apart. */
template <int COUNT> struct row_scores {
    static constexpr int R = 1, C = COUNT;
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

/* Columns that do not exist as zeros. */
__device__ inline uint4 load_or_zero(const char *from, bool exists)
{
    return exists ? load_16(from) : make_uint4(0, 0, 0, 0);
}

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

/* What a tile gives for one column of O and two rows, by multiply-adds: P = 0 hides whatever V holds, for rows of other heads
 * may see it. */
template <class T, int WIDTH>
__device__ inline void sum_visible(float &first, float &second, const shared_decode<WIDTH> &m, int row, int column)
{
    using S = shared_decode<WIDTH>;
    first = second = 0.0f;
#pragma unroll 1
    for (int n = 0; n < S::KEYS; n++) {
        const float p = ((const T *)m.p[row])[n], p2 = ((const T *)m.p[row + 1])[n],
                    v = *(const T *)(m.v[0] + place_of<S::BYTES>(n, column / 8) + column % 8 * 2);
        first = p == 0.0f ? first : fmaf(p, v, first);
        second = p2 == 0.0f ? second : fmaf(p2, v, second);
    }
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 3)
    decode_mma(const __grid_constant__ args a, const __grid_constant__ parts_of_keys parts)
{
    extern __shared__ __align__(128) char memory[];
    using S = shared_decode<WIDTH>;
    S &m = *(S *)memory;
    constexpr int KEYS = S::KEYS, OWN = S::OWN, TILES = PART / KEYS, SIXTEENS = OWN / 16, COLUMNS = WIDTH / WARPS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const own_part own = own_part_of(parts, ROWS);
    const int rows = min(ROWS, a.G * a.Sq - own.first_row);
    let_next_start();
    if (!a.uniform || a.page) /* else nothing but K, V and Q is in memory */
        wait_for_last();
    if (warp == 0) { /* a row for each lane, eight lanes the same */
        const span s = span_of(a, own.b);
        const own_row row = own_row_of(a, s, parts, own, lane % ROWS);
        const bool sees = row.low < row.high, exists = lane % ROWS < rows;
        const int first = __reduce_min_sync(~0u, sees ? row.low : INT32_MAX),
                  last = __reduce_max_sync(~0u, sees ? row.high : 0),
                  all_first = __reduce_max_sync(~0u, exists ? row.low : 0),
                  all_last = __reduce_min_sync(~0u, exists ? row.high : INT32_MAX);
        if (lane < ROWS) {
            m.row[lane] = row;
            m.q[lane] = sees ? a.q.data + row_at(a.q, s.q_batch, row.h, s.q_row + row.i) * 2 : NULL;
        }
        if (lane == 0)
            m.sequence = s, m.first = min(first, last), m.last = last, m.all_first = all_first, m.all_last = all_last;
    } else if (warp <= 2) {
        const span s = span_of(a, own.b);
        const view &rows_of = warp == 1 ? a.k : a.v;
        if (lane == 0)
            (warp == 1 ? m.first_k : m.first_v) = rows_of.data +
                                                  2 * row_at(rows_of, s.k_batch, own.hk, s.k_row + a.col);
    }
    __syncthreads();
    const span &s = m.sequence;
    int tile = max(own.part * TILES, m.first / KEYS);
    const int end = min((own.part + 1) * TILES, (m.last + KEYS - 1) / KEYS);

    /* Pages of the lane's keys in the tile that is asked for next, which are looked up long before. */
    int pages[(OWN + 31) / 32];
    auto number_of = [&](int tile, int n) { /* of a key that nobody sees, that of the next that somebody does */
                                            return clamp(tile * KEYS + warp * OWN + n, m.first, m.last - 1);
    };
    auto look_up = [&](int tile) {
#pragma unroll
        for (int n = lane; n - lane < OWN; n += 32)
            if (a.page && tile < end)
                pages[n / 32] = a.block_table[s.b * a.block_table_stride +
                                              (unsigned)(a.col + number_of(tile, n) * a.col_step) / (unsigned)a.page];
    };
    /* The warp's rows of x, a key for as many lanes as it has pieces of 16 bytes. */
    auto ask = [&](char *to, const view &x, const char *first_row, int columns, int tile) {
        constexpr int EACH = S::BYTES / 16, AT_ONCE = 32 / EACH;
        const int64_t step = a.col_step * x.stride[2] * 2;
        const int n0 = tile * KEYS + warp * OWN, chunk = lane % EACH;
        const uint32_t own_to = shared_address(to + (warp * OWN + lane / EACH) * S::BYTES);
        auto copy = [&](int n, const char *from) {
            copy_or_clear(own_to + n * S::BYTES + (chunk ^ turn_of(n) ^ turn_of(lane / EACH)) * 16, from,
                          chunk * 8 < columns);
        };
        if (tile >= end)
            ;
        else if (!a.page && n0 >= m.first && n0 + OWN <= m.last) {
            const char *from = first_row + (n0 + lane / EACH) * step + chunk * 16;
#pragma unroll
            for (int n = 0; n < OWN; n += AT_ONCE, from += AT_ONCE * step)
                copy(n, from);
        } else {
            const char *row[(OWN + 31) / 32];
#pragma unroll
            for (int n = lane; n - lane < OWN; n += 32) {
                const int number = number_of(tile, n);
                const int64_t j = a.col + number * a.col_step;
                const char *&one = row[n / 32];
                if (!a.page)
                    one = first_row + number * step;
                else if (pages[n / 32] < 0 || pages[n / 32] >= a.pages)
                    one = x.data; /* anything will do that can be read */
                else
                    one = x.data + 2 * row_at(x, pages[n / 32], own.hk, (unsigned)j % (unsigned)a.page);
            }
#pragma unroll
            for (int n = 0; n < OWN; n += AT_ONCE)
                copy(n, (const char *)__shfl_sync(~0u, (unsigned long long)row[n / 32], n % 32 + lane / EACH) +
                            chunk * 16);
        }
        commit_copies();
    };
    auto ask_k = [&](int tile) { ask(m.k[0], a.k, m.first_k, a.D, tile); };
    auto ask_v = [&](int tile) { ask(m.v[0], a.v, m.first_v, a.Dv, tile); };

    look_up(tile);
    wait_for_last();
    ask_k(tile);
    ask_v(tile);
    uint4 Q[WIDTH / 32];
    const char *const q = m.q[g];
#pragma unroll
    for (int c = 0; c < WIDTH; c += 32)
        Q[c / 32] = load_or_zero(q + (c + t * 8) * 2, q && t * 8 < a.D - c);

    float O[COLUMNS / 16][4] = {}, top[2] = { -CUDART_INF_F, -CUDART_INF_F }, sum[2] = { 0.0f, 0.0f };
#pragma unroll 1
    for (; tile < end; tile++) {
        const int n0 = tile * KEYS + warp * OWN;
        look_up(tile + 1);
        wait_copies<1>();
        __syncwarp();
        float x[SIXTEENS][4] = {}; /* S, and then P */
#pragma unroll
        for (int n = 0; n < SIXTEENS; n++)
#pragma unroll
            for (int c = 0; c < WIDTH / 32; c++) { /* which columns are summed together does not matter */
                const char *const at = m.k[warp * OWN + n * 16];
                const uint4 y = *(const uint4 *)(at + place_of<S::BYTES>(g, c * 4 + t)),
                            y8 = *(const uint4 *)(at + place_of<S::BYTES>(g + 8, c * 4 + t));
                multiply(x[n], { y.x, y8.x, y.y, y8.y }, Q[c].x, Q[c].y, T());
                multiply(x[n], { y.z, y8.z, y.w, y8.w }, Q[c].z, Q[c].w, T());
            }
        __syncwarp();
        ask_k(tile + 1);

        /* do_row(scores, head) for the even row, then for the odd one. */
        using scores = row_scores<2 * SIXTEENS>;
        auto each_row = [&](auto do_row) {
            scores y;
#pragma unroll
            for (int c = 0; c < scores::C; c++)
                y.x[c] = x[c / 2][c % 2 * 2];
#pragma unroll 1
            for (int j = 0; j < 2; j++) {
                const own_row &row = m.row[2 * t + j];
                y.i = row.i, y.n = n0 + g, y.first = row.low, y.last = row.high;
                do_row(y, row.h);
                if (j == 0)
#pragma unroll
                    for (int c = 0; c < scores::C; c++) {
                        float &one = x[c / 2][c % 2 * 2], &other = x[c / 2][c % 2 * 2 + 1];
                        one = y.x[c], y.x[c] = other;
                    }
            }
#pragma unroll
            for (int c = 0; c < scores::C; c++)
                x[c / 2][c % 2 * 2 + 1] = y.x[c];
        };
        if (has_extras(a))
            each_row([&](scores &y, int h) {
                if (y.first >= y.last) {
                    hide_outside_band(y);
                    return;
                }
                if (a.softcap > 0)
#pragma unroll
                    for (float &one : y.x)
                        one = capped<scores::EXACT>(one, parts.scale_in_cap, 1.0f);
                finish_scores(y, a.softcap > 0 ? a.softcap : a.scale, a, s, head_of(a, s, h), false);
            });
        else {
#pragma unroll
            for (int n = 0; n < SIXTEENS; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[n][e] *= a.scale;
            if (n0 < m.all_first || n0 + OWN > m.all_last)
                each_row([&](scores &y, int) { hide_outside_band(y); });
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float most = -CUDART_INF_F;
#pragma unroll
            for (int c = 0; c < scores::C; c++)
                most = fmaxf(most, x[c / 2][c % 2 * 2 + j]);
            most = rows_max(most);
            if (g == 0)
                m.most[warp][2 * t + j] = most;
        }
        __syncthreads();
        float factor[2]; /* of what there is already */
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float before = top[j];
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                top[j] = fmaxf(top[j], m.most[w][2 * t + j]);
            const float base = top[j] == -CUDART_INF_F ? 0.0f : top[j];
            factor[j] = exp2_fast((before - base) * LOG2E);
            sum[j] *= factor[j];
#pragma unroll
            for (int c = 0; c < scores::C; c++) {
                float &y = x[c / 2][c % 2 * 2 + j];
                y = exp2_fast((y - base) * LOG2E);
                sum[j] += y;
            }
        }
        if (a.drop_below)
            each_row([&](scores &y, int h) { drop_and_scale(y, a.keep_scale, a, s, head_of(a, s, h)); });
#pragma unroll
        for (int c = 0; c < scores::C; c++)
            *(uint32_t *)(m.p[g] + (warp * OWN + 8 * c + 2 * t) *
                                       2) = transpose_matrix(pack<T>(x[c / 2][c % 2 * 2], x[c / 2][c % 2 * 2 + 1]));
        wait_copies<1>();
        __syncthreads();

        /* Sums over every other 16 keys, where there would be one alone, so that products need not wait for each other. */
        constexpr int SUMS = COLUMNS > 16 ? 1 : 2;
        float more[SUMS][COLUMNS / 16][4] = {}, probe = 0.0f; /* NaN where any of it is not finite */
#pragma unroll
        for (int n = 0; n < KEYS; n += 32) {
            uint32_t P[4];
            load_matrices(P, shared_address(m.p[lane % 8] + (n + lane / 8 * 8) * 2));
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int c = 0; c < COLUMNS / 16; c++) {
                    uint32_t y[4];
                    load_matrices_transposed(y, shared_address(m.v[n + half * 16]) +
                                                    place_of<S::BYTES>(lane % 8 + lane / 16 * 8,
                                                                       (warp * COLUMNS / 16 + c) * 2 + lane / 8 % 2));
                    multiply(more[half % SUMS][c], y, P[2 * half], P[2 * half + 1], T());
                }
        }
#pragma unroll
        for (int c = 0; c < COLUMNS / 16; c++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                probe = fmaf(SUMS > 1 ? more[0][c][e] += more[SUMS - 1][c][e] : more[0][c][e], 0.0f, probe);
        if (__any_sync(~0u, probe != 0.0f))
#pragma unroll
            for (int c = 0; c < COLUMNS / 16; c++)
#pragma unroll
                for (int e = 0; e < 4; e += 2)
                    sum_visible<T>(more[0][c][e], more[0][c][e + 1], m, 2 * t, warp * COLUMNS + c * 16 + e * 4 + g);
#pragma unroll
        for (int c = 0; c < COLUMNS / 16; c++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                O[c][e] = factor[e % 2] == 0.0f ? more[0][c][e] : fmaf(O[c][e], factor[e % 2], more[0][c][e]);
        __syncthreads();
        ask_v(tile + 1);
    }

#pragma unroll
    for (int j = 0; j < 2; j++) {
        sum[j] = rows_sum(sum[j]);
        if (g == 0)
            m.sums[warp][2 * t + j] = sum[j];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 2; j++) {
        if (2 * t + j >= rows)
            break;
        const int64_t result = m.row[2 * t + j].result;
#pragma unroll
        for (int c = 0; c < COLUMNS / 8; c++) {
            const int column = warp * COLUMNS + c * 8 + g;
            if (column < a.Dv)
                parts.o[result * a.Dv + column] = O[c / 2][c % 2 * 2 + j];
        }
        if (threadIdx.x < 4) {
            float all = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                all += m.sums[w][2 * t + j];
            parts.most[result] = all == all ? top[j] : 0.0f; /* a NaN is to be seen */
            parts.sums[result] = all;
        }
    }
}

template <class T, int WIDTH>
static heed_status run_wide(const args &a, parts_of_keys parts, const heed_plan *plan, const heed_exec *x)
{
    static_assert(sizeof(shared_decode<WIDTH>) <= HEED_SHARED_SMALL);
    parts.scale_in_cap = a.scale / a.softcap;
    return launch_parts(decode_mma<T, WIDTH>, ROWS, THREADS, sizeof(shared_decode<WIDTH>), a, parts, plan, x);
}

template <class T>
static heed_status run(const args &a, const parts_of_keys &parts, const heed_plan *plan, const heed_exec *x)
{
    const int width = HEED_MAX(a.D, a.Dv);
    return width <= 64    ? run_wide<T, 64>(a, parts, plan, x)
           : width <= 128 ? run_wide<T, 128>(a, parts, plan, x)
                          : run_wide<T, 256>(a, parts, plan, x);
}

heed_status heed_cuda_decode_mma(const args &a, const parts_of_keys &parts, const heed_plan *plan, const heed_exec *x)
{
    return a.q.dtype == HEED_F16 ? run<__half>(a, parts, plan, x) : run<__nv_bfloat16>(a, parts, plan, x);
}
