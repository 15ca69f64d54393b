/* The vocabulary of the Hopper kernels for short sequences. All rows that a warpgroup meets are in shared memory together:
 * they are asked for at once, piece by piece, so that any strides will do and no map has to be made, and nothing is waited
 * for twice. A block is one warpgroup and knows nothing of others; several on a multiprocessor hide each other's latencies.
 *
 * A warpgroup takes 64 rows at a time. Of the backward's blocks each takes several such tiles one after the other where there
 * are many, all of a head at most, and so loads what they meet but once. Bits do not depend on that: parts of what is met
 * begin at multiples of their size.
 *
 * Instructions are few on purpose, and loops are preferred to copies of code: a warp by itself waits for each line of code
 * that it has not met yet, which is what most of its time goes into. */
#ifndef HEED_CUDA_SHORT_SM90_CUH
#define HEED_CUDA_SHORT_SM90_CUH

#include "small.cuh"
#include "tile_sm90.cuh"

constexpr int SHORT_THREADS = 128, SHORT_OWN = 64; /* rows that a warpgroup owns */

/* Tiles that a block takes, of `tiles` in each of so many heads: the multiprocessors hold `held` blocks each. */
inline int tiles_each(int64_t heads, int64_t tiles, int units, int held)
{
    return (int)HEED_MAX(HEED_MIN(heads * tiles / ((int64_t)units * held), tiles), 1);
}

/* Shared memory to ask for: where no multiprocessor needs more than one block, so much that none is given two. A kernel that
 * starts before the one before it has ended would find but few of them empty. */
inline size_t room_for_one(size_t bytes, dim3 grid, const heed_plan *plan)
{
    const int64_t blocks = (int64_t)grid.x * grid.y * grid.z;
    return blocks <= plan->device.units ? HEED_MAX(bytes, plan->device.shared_bytes / 2 + 1024) : bytes;
}

/* Who does what in a backward: of a head's blocks the first k_blocks, which have more to do, own keys, k_tiles tiles of them
 * each, and the others queries. blocks_last: where all are at work at once, so that each multiprocessor gets some of both. */
struct short_division {
    int k_blocks, k_tiles, q_tiles, blocks_last;
};

inline short_division divide(const args &a, bool tile_each, const heed_plan *plan, dim3 &grid)
{
    const int64_t q_tiles = a.d_q.data ? tiles_of(a.Sq, SHORT_OWN) : 0, heads = (int64_t)a.B * a.Hq,
                  k_tiles = a.d_k.data || a.d_v.data ? tiles_of(keys_of(a), SHORT_OWN) : 0;
    const int each = tile_each ? 1 : tiles_each(heads, q_tiles + k_tiles, plan->device.units, 2);
    const int k_each = a.G == 1 ? each : 1, k_blocks = (int)tiles_of(k_tiles, k_each),
              blocks = k_blocks + (int)tiles_of(q_tiles, each);
    const bool few = heads * blocks <= 2 * plan->device.units;
    grid = grid_of(a, blocks);
    if (few)
        grid = dim3(grid.x, grid.z, grid.y);
    return { k_blocks, k_each, each, few };
}

/* The number of this block among those of its head. */
__device__ inline int own_block(const short_division &by, const args &a, int &b, int &h)
{
    const int x = blockIdx.x, y = by.blocks_last ? blockIdx.y : blockIdx.z;
    b = a.B >= a.Hq ? x : y, h = a.B >= a.Hq ? y : x; /* as in grid_of() */
    return by.blocks_last ? blockIdx.z : blockIdx.y;
}

/* So many rows of s, a multiple of 64, from `row` on as a tile for the tensor core, by all threads. Rows and columns that there
 * are not become zeros. */
__device__ inline void copy_rows(char *to, const source &s, int row, int rows)
{
    constexpr int ONCE = SHORT_THREADS / 8;
    const int r0 = threadIdx.x / 8, chunk = threadIdx.x % 8;
    uint32_t at = shared_address(to) + r0 * 128 + (chunk ^ r0 % 8) * 16;
    const char *first = s.first + min(chunk * 16, s.end);
    if (row + rows - 1 <= s.last && s.end == 112) { /* all are there */
        first = row_from(first, row + r0, s.step);
#pragma unroll 4
        for (int r = 0; r < rows; r += ONCE, at += ONCE * 128, first = row_from(first, ONCE, s.step))
            copy_async(at, first, 16);
        return;
    }
    const int last = chunk * 16 <= s.end ? s.last : -1;
#pragma unroll 2
    for (int i = row + r0; i < row + rows; i += ONCE, at += ONCE * 128)
        copy_async(at, row_from(first, max(min(i, last), 0), s.step), i <= last ? 16 : 0);
}

/* The same for two tensors. */
__device__ inline void copy_both(char *x, char *y, const source &to_x, const source &to_y, int row, int rows)
{
#pragma unroll 1
    for (int n = 0; n < 2; n++) {
        const source s = { n ? to_y.first : to_x.first, n ? to_y.step : to_x.step, n ? to_y.last : to_x.last,
                           n ? to_y.end : to_x.end };
        copy_rows(n ? y : x, s, row, rows);
    }
}

/* What has been copied so far but for the last so many groups can be read by the tensor core, for all of the block. */
__device__ inline void wait_for_tiles(int pending = 0)
{
    if (pending >= 3)
        wait_copies<3>();
    else if (pending == 2)
        wait_copies<2>();
    else if (pending == 1)
        wait_copies<1>();
    else
        wait_copies<0>();
    fence_async();
    __syncthreads();
}

/* 16 rows and 64 columns of a warp leave, each times the factor of its row, or as zeros where that is 0. out: 2 KB. */
template <class T>
__device__ inline void store_rows(char *out, const float (&X)[32], float upper, float lower, const view &t, int64_t at,
                                  int64_t step, int rows, int width)
{
    const int lane = threadIdx.x % 32;
    const uint32_t to = shared_address(out) + lane % 16 * 128;
    const auto two = [&](int i, float by) { return by == 0.0f ? 0u : pack<T>(X[i] * by, X[i + 1] * by); };
#pragma unroll
    for (int c = 0; c < 8; c += 2)
        store_matrices(to + ((c + lane / 16) ^ (lane % 8)) * 16, two(4 * c, upper), two(4 * c + 2, lower),
                       two(4 * c + 4, upper), two(4 * c + 6, lower));
    __syncwarp();
    T *const first = (T *)t.data + at + lane % 8 * 8;
#pragma unroll
    for (int e = 0; e < 16; e += 4) {
        const int i = e + lane / 8;
        if (i < rows && lane % 8 * 8 < width)
            *(uint4 *)(first + i * step) = *(const uint4 *)(out + i * 128 + (lane % 8 ^ i % 8) * 16);
    }
}

/* The keys that the band lets row i see, and the rows that it lets see key n. Without GENERAL steps are 1: divisions would be
 * half of the code. */
template <bool GENERAL> __device__ inline void short_row(const args &a, const span &s, int i, int &first, int &last)
{
    if (GENERAL)
        return band_of_row(a, s, i, first, last);
    first = min(max(i + s.low, 0), s.keys);
    last = max(first, min(i + s.high, s.keys));
}
template <bool GENERAL> __device__ inline void short_key(const args &a, const span &s, int n, int &first, int &last)
{
    if (GENERAL)
        return band_of_key(a, s, n, first, last);
    first = min(max(n - s.high + 1, 0), s.rows);
    last = max(first, min(n - s.low + 1, s.rows));
}

/* The sequence of a block, which it keeps in shared memory: the same for all, there it takes no registers. */
template <bool GENERAL> __device__ inline const span &find_span(span &s, const args &a, int b)
{
    if (GENERAL || is_ragged(a))
        wait_for_last();
    if (threadIdx.x == 0)
        s = span_of(a, b);
    __syncthreads();
    return s;
}

/* What the scores need beyond scale and such a band. */
inline bool is_general(const args &a)
{
    const bool banded = a.left < FAR || a.right < FAR;
    return has_extras(a) || a.scale <= 0 || (banded && (a.p_step != 1 || a.r_step != 1));
}

/* The rows of the other side that some of the own rows begin .. end - 1 meet, first .. last - 1; all of them meet
 * inside .. outside - 1. KEYS: the own rows are keys. */
struct meeting {
    int first, last, inside, outside;
};

template <bool KEYS, bool GENERAL> __device__ inline meeting meet(const args &a, const span &s, int begin, int end)
{
    int low, high, low2, high2;
    if (KEYS)
        short_key<GENERAL>(a, s, begin, low, high), short_key<GENERAL>(a, s, end - 1, low2, high2);
    else
        short_row<GENERAL>(a, s, begin, low, high), short_row<GENERAL>(a, s, end - 1, low2, high2);
    return { min(low, low2), max(high, high2), max(low, low2), min(high, high2) };
}

__device__ inline int round_down(int x, int to) { return x / to * to; }
__device__ inline int round_up(int x, int to) { return (x + to - 1) / to * to; }

/* A lane's scores as scores.cuh wants to see them: queries are rows, N keys. */
template <int N, bool EXACT_ = false> struct query_scores {
    static constexpr int R = 2, C = N / 4;
    static constexpr bool EXACT = EXACT_;
    float (&X)[N / 2];
    int i0, n0;            /* first query and first key of this lane */
    int lows[2], highs[2]; /* of its two queries */
    __device__ float &at(int r, int c) { return X[c / 2 * 4 + r * 2 + c % 2]; }
    static __device__ constexpr int apart(int c) { return c / 2 * 8 + c % 2; }
    __device__ int row(int r) const { return i0 + r * 8; }
    __device__ int key(int c) const { return n0 + apart(c); }
    __device__ int low(int r) const { return lows[r]; }
    __device__ int high(int r) const { return highs[r]; }
};

/* S from q.k: by scale and more where GENERAL, else only the band. whole: it hides nothing in this tile. */
template <bool GENERAL, int N, bool EXACT>
__device__ inline void find_scores(query_scores<N, EXACT> &t, const args &a, const span &s, const head &x, bool whole)
{
    if (!whole)
#pragma unroll
        for (int r = 0; r < 2; r++)
            short_row<GENERAL>(a, s, min(t.row(r), s.rows - 1), t.lows[r], t.highs[r]);
    if (GENERAL)
        score(t, a.scale, a, s, x, whole);
    else if (!whole)
        hide_outside_band(t);
}

/* P = 2^(c S - c m'), l = l a + sum P, with m' = max(m, S) and a = 2^(c m - c m'), which O is to be multiplied by. */
template <int N>
__device__ inline void softmax_step(query_scores<N> &S, float (&m)[2], float (&l)[2], float (&a)[2], float c)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float most = m[r], sum[2] = {};
#pragma unroll
        for (int i = 0; i < N / 4; i++)
            most = fmaxf(most, S.at(r, i));
        most = quad_max(most);
        const exponent e(c, most);
        a[r] = e.of_most(m[r]);
        m[r] = most;
        if (e.large()) {
#pragma unroll
            for (int i = 0; i < N / 4; i++)
                S.at(r, i) -= e.first;
        }
#pragma unroll
        for (int i = 0; i < N / 4; i++)
            sum[i % 2] += S.at(r, i) = exp2_fast(fmaf(S.at(r, i), c, -e.then));
        l[r] = fmaf(l[r], a[r], sum[0] + sum[1]);
    }
}

/* A lane's scores with keys as rows: 64 queries, of which the lane has 16, or four of these, from `from` on. */
template <bool EXACT_ = false, int R_ = 16> struct key_scores {
    static constexpr int R = R_, C = 2;
    static constexpr bool EXACT = EXACT_;
    float (&X)[32];
    int i0, n0; /* first query and first key of this lane */
    int from = 0;
    __device__ float &at(int r, int c) { return X[(from + r) / 2 * 4 + c * 2 + r % 2]; }
    static __device__ constexpr int apart(int c) { return c * 8; }
    __device__ int row(int r) const { return i0 + (from + r) / 2 * 8 + r % 2; }
    __device__ int key(int c) const { return n0 + apart(c); }
    __device__ int low(int) const { return 0; } /* hide_queries() has the band */
    __device__ int high(int) const { return INT32_MAX; }
};

/* S from q.k but for the band: four queries at a time, for the sake of registers. */
template <bool EXACT>
__device__ inline void score_queries(key_scores<EXACT> &t, const args &a, const span &s, const head &x)
{
#pragma unroll
    for (int from = 0; from < 16; from += 4) {
        key_scores<EXACT, 4> four = { t.X, t.i0, t.n0, from };
        score(four, a.scale, a, s, x, true);
    }
}

/* Hides the queries that may not see a key. */
template <bool GENERAL, bool EXACT>
__device__ inline void hide_queries(key_scores<EXACT> &t, const args &a, const span &s)
{
#pragma unroll
    for (int c = 0; c < 2; c++) {
        int first, last;
        short_key<GENERAL>(a, s, min(t.key(c), s.keys - 1), first, last);
#pragma unroll
        for (int r = 0; r < key_scores<EXACT>::R; r++)
            t.at(r, c) = (unsigned)(t.row(r) - first) < (unsigned)(last - first) ? t.at(r, c) : -CUDART_INF_F;
    }
}

template <bool GENERAL, bool EXACT>
__device__ inline void find_scores(key_scores<EXACT> &t, const args &a, const span &s, const head &x, bool whole)
{
    if (GENERAL)
        score_queries(t, a, s, x);
    if (!whole)
        hide_queries<GENERAL>(t, a, s);
}

#endif
