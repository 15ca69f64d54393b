/* Forward of few rows of 16 bits against many keys. Eight rows, of all heads that share keys, are the columns of the tensor
 * core's results, keys (of S) and columns of V (of O) their rows:
 *
 *     S^T [16 keys x 8 rows] = K Q^T        O^T [16 columns x 8 rows] += V^T P^T
 *
 * A part is met in tiles, of which K and V lie in shared memory. A warp copies its own keys of both, computes the scores of
 * these, and of O its own columns, over the keys of all warps. As soon as K of a tile has been met the next one is asked for,
 * in its place, and so is V. A block has eight rows, or twice as many where there are more.
 * What follows from the launch's arguments alone is found before the kernel waits for the one before it. */
#include "decode.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;

template <int WIDTH, int EIGHTS> struct shared_decode {
    static constexpr int ROWS = 8 * EIGHTS, BYTES = 2 * WIDTH; /* of a row of K or V */
    static constexpr int KEYS = WIDTH > 128 ? 64 : 128, OWN = KEYS / WARPS, COLUMNS = WIDTH / WARPS;
    alignas(128) char k[KEYS][BYTES], v[KEYS][BYTES]; /* with 16 bytes where place_of() says */
    alignas(16) char p[ROWS][2 * KEYS + 16];          /* rows of a column of eight keys begin in different banks */
    float most[WARPS][ROWS], sums[WARPS][ROWS];
    own_row row[ROWS];
    span sequence;                           /* looked at now and then, and not in registers */
    const char *first_k, *first_v, *q[ROWS]; /* NULL: the row sees nothing */
    int first, last;                         /* of the keys that any row sees */
    int all_first, all_last;                 /* of those that all of them see */
    int rows, hk;
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

/* What the block's warps want to know, found by three of them. */
template <class Shared> __device__ inline void begin(Shared &m, const args &a, const parts_of_keys &parts, own_part own)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const span s = span_of(a, own.b);
    if (warp == 0) { /* a row for each lane, again and again */
        const int rows = min(Shared::ROWS, a.G * a.Sq - own.first_row);
        const own_row row = own_row_of(a, s, parts, own, lane % Shared::ROWS);
        const bool sees = row.low < row.high, exists = lane % Shared::ROWS < rows;
        const int first = __reduce_min_sync(~0u, sees ? row.low : INT32_MAX),
                  last = __reduce_max_sync(~0u, sees ? row.high : 0);
        if (lane < Shared::ROWS) {
            m.row[lane] = row;
            m.q[lane] = sees ? a.q.data + row_at(a.q, s.q_batch, row.h, s.q_row + row.i) * 2 : NULL;
        }
        const int all_first = __reduce_max_sync(~0u, exists ? row.low : 0),
                  all_last = __reduce_min_sync(~0u, exists ? row.high : INT32_MAX);
        if (lane == 0)
            m.sequence = s, m.first = min(first, last), m.last = last, m.all_first = all_first, m.all_last = all_last,
            m.rows = rows, m.hk = own.hk;
    } else if (warp <= 2 && lane == 0) {
        const view &rows_of = warp == 1 ? a.k : a.v;
        (warp == 1 ? m.first_k : m.first_v) = rows_of.data + 2 * row_at(rows_of, s.k_batch, own.hk, s.k_row + a.col);
    }
}

/* Asks for a warp's keys of one tile after the other. */
template <class Shared> struct source {
    const args &a;
    Shared &m;
    int end;  /* of the tiles */
    int page; /* of the lane's key in the tile that is asked for next, which is looked up long before */

    /* Of a key that nobody sees, that of the next that somebody does. */
    __device__ int64_t key_of_lane(int tile) const
    {
        const int n = tile * Shared::KEYS + threadIdx.x / 32 * Shared::OWN + threadIdx.x % 32;
        return a.col + clamp(n, m.first, m.last - 1) * a.col_step;
    }
    __device__ void look_up(int tile)
    {
        if (a.page && tile < end)
            page = a.block_table[m.sequence.b * a.block_table_stride + (unsigned)key_of_lane(tile) / (unsigned)a.page];
    }

    /* Of x, a key for as many lanes as it has pieces of 16 bytes. */
    __device__ void ask(char *to, const view &x, const char *first_row, int columns, int tile)
    {
        constexpr int OWN = Shared::OWN, EACH = Shared::BYTES / 16, AT_ONCE = 32 / EACH;
        static_assert(OWN <= 32, "a lane has a key");
        const int lane = threadIdx.x % 32, key = lane / EACH, chunk = lane % EACH, mine = threadIdx.x / 32 * OWN;
        const int n0 = tile * Shared::KEYS + mine;
        const uint32_t own_to = shared_address(to + (mine + key) * Shared::BYTES);
        auto copy = [&](int n, const char *from) {
            copy_or_clear(own_to + n * Shared::BYTES + (chunk ^ turn_of(n) ^ turn_of(key)) * 16, from,
                          chunk * 8 < columns);
        };
        if (tile >= end)
            ;
        else if (!a.page && n0 >= m.first && n0 + OWN <= m.last) {
            const int64_t step = a.col_step * x.stride[2] * 2;
            const char *from = first_row + (n0 + key) * step + chunk * 16;
#pragma unroll
            for (int n = 0; n < OWN; n += AT_ONCE, from += AT_ONCE * step)
                copy(n, from);
        } else {
            const int64_t j = key_of_lane(tile);
            const char *row = x.data; /* of a page that does not exist: anything will do that can be read */
            if (!a.page)
                row = first_row + (j - a.col) * (x.stride[2] * 2);
            else if (page >= 0 && page < a.pages)
                row += 2 * row_at(x, page, m.hk, (unsigned)j % (unsigned)a.page);
#pragma unroll
            for (int n = 0; n < OWN; n += AT_ONCE)
                copy(n, (const char *)__shfl_sync(~0u, (unsigned long long)row, n + key) + chunk * 16);
        }
        commit_copies();
    }
    __device__ void ask_k(int tile) { ask(m.k[0], a.k, m.first_k, a.D, tile); }
    __device__ void ask_v(int tile) { ask(m.v[0], a.v, m.first_v, a.Dv, tile); }
};

/* What a tile gives for a column of O, where it is not finite, by multiply-adds: P = 0 hides whatever V holds, for rows of other
 * heads may see it. */
template <class T, class Shared>
__device__ inline void sum_visible(float &o, const Shared &m, int row, int column, T type)
{
    if (o * 0.0f == 0.0f)
        return;
    o = 0.0f;
#pragma unroll 1
    for (int n = 0; n < Shared::KEYS; n++) {
        const float p = to_floats(*(const uint16_t *)(m.p[row] + 2 * n), type).x,
                    v = to_floats(*(const uint16_t *)(m.v[0] + place_of<Shared::BYTES>(n, column / 8) + column % 8 * 2),
                                  type)
                            .x;
        o = p == 0.0f ? o : fmaf(p, v, o);
    }
}

template <class T, int WIDTH, int EIGHTS>
__global__ void __launch_bounds__(THREADS, WIDTH *EIGHTS > 256 ? 2 : 3)
    decode_mma(const __grid_constant__ args a, const __grid_constant__ parts_of_keys parts)
{
    extern __shared__ __align__(128) char memory[];
    using Shared = shared_decode<WIDTH, EIGHTS>;
    Shared &m = *(Shared *)memory;
    constexpr int KEYS = Shared::KEYS, OWN = Shared::OWN, TILES = PART / KEYS;
    constexpr int SIXTEENS = OWN / 16, OF_O = Shared::COLUMNS / 16, PAIR = 2 * EIGHTS; /* rows of a lane */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const T type = type_of<T>(a);
    const auto row_of = [&](int j) { return j / 2 * 8 + 2 * t + j % 2; };
    const own_part own = own_part_of(parts, Shared::ROWS);
    let_next_start();
    if (!a.uniform || a.page) /* else nothing but K, V and Q is in memory */
        wait_for_last();
    begin(m, a, parts, own);
    __syncthreads();
    const span &s = m.sequence;
    int tile = max(own.part * TILES, m.first / KEYS);
    const int end = min((own.part + 1) * TILES, (m.last + KEYS - 1) / KEYS);
    source<Shared> keys = { a, m, end, 0 };
    keys.look_up(tile);
    wait_for_last();
    keys.ask_k(tile);
    keys.ask_v(tile);
    uint4 Q[EIGHTS][WIDTH / 32];
#pragma unroll
    for (int r = 0; r < EIGHTS; r++)
#pragma unroll
        for (int c = 0; c < WIDTH; c += 32) {
            const char *const q = m.q[r * 8 + g];
            Q[r][c / 32] = load_or_zero(q + (c + t * 8) * 2, q && t * 8 < a.D - c);
        }

    float O[EIGHTS][OF_O][4] = {}, top[PAIR], sum[PAIR] = {};
#pragma unroll
    for (float &one : top)
        one = -CUDART_INF_F;
#pragma unroll 1
    for (; tile < end; tile++) {
        const int n0 = tile * KEYS + warp * OWN;
        keys.look_up(tile + 1);
        wait_copies<1>();
        __syncwarp();
        float x[SIXTEENS][EIGHTS][4] = {}; /* S, and then P */
        with_type(type, [&](auto as) {
#pragma unroll
            for (int n = 0; n < SIXTEENS; n++)
#pragma unroll
                for (int c = 0; c < WIDTH / 32; c++) { /* which columns are summed together does not matter */
                    const char *const at = m.k[warp * OWN + n * 16];
                    const uint4 y = *(const uint4 *)(at + place_of<Shared::BYTES>(g, c * 4 + t)),
                                y8 = *(const uint4 *)(at + place_of<Shared::BYTES>(g + 8, c * 4 + t));
#pragma unroll
                    for (int r = 0; r < EIGHTS; r++) {
                        multiply(x[n][r], { y.x, y8.x, y.y, y8.y }, Q[r][c].x, Q[r][c].y, as);
                        multiply(x[n][r], { y.z, y8.z, y.w, y8.w }, Q[r][c].z, Q[r][c].w, as);
                    }
                }
        });
        __syncwarp();
        keys.ask_k(tile + 1);

        /* do_row(scores, head) for one row after the other, the present one always at the same place. */
        using scores = row_scores<2 * SIXTEENS>;
        auto score = [&](int j, int c) -> float & { return x[c / 2][j / 2][c % 2 * 2 + j % 2]; };
        auto each_row = [&](auto do_row) {
#pragma unroll 1
            for (int j = 0; j < PAIR; j++) {
                const own_row &row = m.row[row_of(j)];
                scores y;
                y.i = row.i, y.n = n0 + g, y.first = row.low, y.last = row.high;
#pragma unroll
                for (int c = 0; c < scores::C; c++)
                    y.x[c] = score(0, c);
                do_row(y, row.h);
#pragma unroll
                for (int c = 0; c < scores::C; c++) {
#pragma unroll
                    for (int k = 0; k + 1 < PAIR; k++)
                        score(k, c) = score(k + 1, c);
                    score(PAIR - 1, c) = y.x[c];
                }
            }
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
            for (int c = 0; c < scores::C; c++)
#pragma unroll
                for (int j = 0; j < PAIR; j++)
                    score(j, c) *= a.scale;
            if (n0 < m.all_first || n0 + OWN > m.all_last)
                each_row([&](scores &y, int) { hide_outside_band(y); });
        }
#pragma unroll
        for (int j = 0; j < PAIR; j++) {
            float most = -CUDART_INF_F;
#pragma unroll
            for (int c = 0; c < scores::C; c++)
                most = fmaxf(most, score(j, c));
            most = rows_max(most);
            if (g == 0)
                m.most[warp][row_of(j)] = most;
        }
        __syncthreads();
        float factor[PAIR]; /* of what there is already */
#pragma unroll
        for (int j = 0; j < PAIR; j++) {
            const float before = top[j];
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                top[j] = fmaxf(top[j], m.most[w][row_of(j)]);
            const float base = top[j] == -CUDART_INF_F ? 0.0f : top[j];
            factor[j] = exp2_fast((before - base) * LOG2E);
            sum[j] *= factor[j];
#pragma unroll
            for (int c = 0; c < scores::C; c++) {
                score(j, c) = exp2_fast((score(j, c) - base) * LOG2E);
                sum[j] += score(j, c);
            }
        }
        if (a.drop_below)
            each_row([&](scores &y, int h) { drop_and_scale(y, a.keep_scale, a, s, head_of(a, s, h)); });
#pragma unroll
        for (int r = 0; r < EIGHTS; r++)
#pragma unroll
            for (int c = 0; c < scores::C; c++)
                *(uint32_t *)(m.p[r * 8 + g] + (warp * OWN + 8 * c + 2 * t) * 2) = transpose_matrix(
                    pack(score(2 * r, c), score(2 * r + 1, c), type));
        wait_copies<1>();
        __syncthreads();

        /* Sums over every other 16 keys, where there would be one alone, so that products need not wait for each other. */
        constexpr int SUMS = OF_O > 1 ? 1 : 2;
        float more[SUMS][EIGHTS][OF_O][4] = {}, probe = 0.0f; /* NaN where any of it is not finite */
        with_type(type, [&](auto as) {
#pragma unroll
            for (int n = 0; n < KEYS; n += 32) {
                uint32_t P[EIGHTS][4];
#pragma unroll
                for (int r = 0; r < EIGHTS; r++)
                    load_matrices(P[r], shared_address(m.p[r * 8 + lane % 8] + (n + lane / 8 * 8) * 2));
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int c = 0; c < OF_O; c++) {
                        uint32_t y[4];
                        load_matrices_transposed(y, shared_address(m.v[n + half * 16]) +
                                                        place_of<Shared::BYTES>(lane % 8 + lane / 16 * 8,
                                                                                (warp * OF_O + c) * 2 + lane / 8 % 2));
#pragma unroll
                        for (int r = 0; r < EIGHTS; r++)
                            multiply(more[half % SUMS][r][c], y, P[r][2 * half], P[r][2 * half + 1], as);
                    }
            }
        });
        auto each_sum = [&](auto do_sum) { /* of row j of the lane and a column */
#pragma unroll
                                           for (int r = 0; r < EIGHTS; r++)
#pragma unroll
                                               for (int c = 0; c < OF_O; c++)
#pragma unroll
                                                   for (int e = 0; e < 4; e++)
                                                       do_sum(more[0][r][c][e], O[r][c][e], 2 * r + e % 2,
                                                              warp * Shared::COLUMNS + c * 16 + e / 2 * 8 + g,
                                                              more[SUMS - 1][r][c][e]);
        };
        each_sum([&](float &x, float &, int, int, float other) {
            if (SUMS > 1)
                x += other;
            probe = fmaf(x, 0.0f, probe);
        });
        if (__any_sync(~0u, probe != 0.0f))
            each_sum([&](float &x, float &, int j, int column, float) { sum_visible(x, m, row_of(j), column, type); });
        each_sum(
            [&](float &x, float &all, int j, int, float) { all = factor[j] == 0.0f ? x : fmaf(all, factor[j], x); });
        __syncthreads();
        keys.ask_v(tile + 1);
    }

#pragma unroll
    for (int j = 0; j < PAIR; j++) {
        sum[j] = rows_sum(sum[j]);
        if (g == 0)
            m.sums[warp][row_of(j)] = sum[j];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < PAIR; j++) {
        if (row_of(j) >= m.rows)
            continue;
        const int64_t result = m.row[row_of(j)].result;
#pragma unroll
        for (int c = 0; c < OF_O * 2; c++) {
            const int column = warp * Shared::COLUMNS + c * 8 + g;
            if (column < a.Dv)
                parts.o[result * a.Dv + column] = O[j / 2][c / 2][c % 2 * 2 + j % 2];
        }
        if (threadIdx.x < 4) {
            float all = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                all += m.sums[w][row_of(j)];
            parts.most[result] = all == all ? top[j] : 0.0f; /* a NaN is to be seen */
            parts.sums[result] = all;
        }
    }
}

template <class T, int WIDTH, int EIGHTS>
static heed_status run(const args &a, parts_of_keys parts, const heed_plan *plan, const heed_exec *x)
{
    using Shared = shared_decode<WIDTH, EIGHTS>;
    static_assert(sizeof(Shared) <= HEED_SHARED_SMALL);
    parts.scale_in_cap = a.scale / a.softcap;
    return launch_parts(decode_mma<T, WIDTH, EIGHTS>, Shared::ROWS, THREADS, sizeof(Shared), a, parts, plan, x);
}

template <class T, int EIGHTS>
static heed_status run(const args &a, const parts_of_keys &parts, const heed_plan *plan, const heed_exec *x)
{
    const int width = HEED_MAX(a.D, a.Dv);
    return width <= 64    ? run<T, 64, EIGHTS>(a, parts, plan, x)
           : width <= 128 ? run<T, 128, EIGHTS>(a, parts, plan, x)
                          : run<T, 256, EIGHTS>(a, parts, plan, x);
}

heed_status heed_cuda_decode_mma(const args &a, const parts_of_keys &parts, const heed_plan *plan, const heed_exec *x)
{
    return a.G * a.Sq > 8          ? run<either, 2>(a, parts, plan, x)
           : a.q.dtype == HEED_F16 ? run<__half, 1>(a, parts, plan, x)
                                   : run<__nv_bfloat16, 1>(a, parts, plan, x);
}
