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

/* Who does what in a backward: of a head's blocks the first k_blocks, which have more to do, own keys, k_tiles tiles of them
 * each, and the others queries. blocks_last: where all are at work at once, so that each multiprocessor gets some of both. */
struct short_division {
    int k_blocks, k_tiles, q_tiles, blocks_last;
};

inline short_division divide(const args &a, const heed_plan *plan, dim3 &grid)
{
    const int64_t q_tiles = a.d_q.data ? tiles_of(a.Sq, SHORT_OWN) : 0, heads = (int64_t)a.B * a.Hq,
                  k_tiles = a.d_k.data || a.d_v.data ? tiles_of(keys_of(a), SHORT_OWN) : 0;
    const int each = tiles_each(heads, q_tiles + k_tiles, plan->device.units, 2);
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

/* Of the keys that queries meet, those of row 8 j + 2 t + e of 32 in shared memory are 8 t + 2 j + e: so a lane's scores of a
 * query are those of eight neighbours, as its mask and bias lie in memory. */
__device__ inline constexpr int key_of_row(int r) { return (r & ~31) | (r & 6) << 2 | (r & 24) >> 2 | (r & 1); }

/* So many rows of s, a multiple of 64, from `row` on as a tile for the tensor core, of up to 64 columns, by all threads. Rows and
 * columns that there are not become zeros. MIXED: in the order of key_of_row(). */
template <bool MIXED = false, int COLUMNS = 64>
__device__ inline void copy_rows(char *to, const source &s, int row, int rows)
{
    constexpr int CHUNKS = COLUMNS / 8, ONCE = SHORT_THREADS / CHUNKS;
    const int r0 = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    uint32_t at = shared_address(to) + r0 * 128 + (chunk ^ r0 % 8) * 16;
    const char *first = s.first + min(chunk * 16, s.end);
    const int i0 = row + (MIXED ? key_of_row(r0) : r0);
    if (row + rows - 1 <= s.last && s.end >= COLUMNS * 2 - 16) { /* all are there */
        first = row_from(first, i0, s.step);
#pragma unroll 4
        for (int r = 0; r < rows; r += ONCE, at += ONCE * 128)
            copy_async(at, row_from(first, MIXED ? key_of_row(r) : r, s.step), 16);
        return;
    }
    const int last = chunk * 16 <= s.end ? s.last : -1;
#pragma unroll 2
    for (int r = 0; r < rows; r += ONCE, at += ONCE * 128) {
        const int i = i0 + (MIXED ? key_of_row(r) : r);
        copy_async(at, row_from(first, max(min(i, last), 0), s.step), i <= last ? 16 : 0);
    }
}

/* The same of D columns, in boxes of 64 that are so many bytes apart. */
template <int D, bool MIXED = false>
__device__ inline void copy_boxes(char *to, const source &s, int row, int rows, int box_bytes)
{
    const auto of_box = [&](int box) { return source{ s.first + box * 128, s.step, s.last, s.end - box * 128 }; };
#pragma unroll 1
    for (int box = 0; box < D / 64; box++)
        copy_rows<MIXED>(to + box * box_bytes, of_box(box), row, rows);
    if (D % 64)
        copy_rows<MIXED, D % 64 ? D % 64 : 64>(to + D / 64 * box_bytes, of_box(D / 64), row, rows);
}

/* The same for two tensors. */
template <int D, bool MIXED = false>
__device__ inline void copy_both(char *x, char *y, const source &to_x, const source &to_y, int row, int rows,
                                 int box_bytes)
{
#pragma unroll 1
    for (int n = 0; n < 2; n++) {
        const source s = { n ? to_y.first : to_x.first, n ? to_y.step : to_x.step, n ? to_y.last : to_x.last,
                           n ? to_y.end : to_x.end };
        copy_boxes<D, MIXED>(n ? y : x, s, row, rows, box_bytes);
    }
}

/* X = A B^T over D columns, 64 rows of A and N of B, in boxes that are so many bytes apart. */
template <class T, int D, int N>
__device__ inline void multiply_boxes(float (&X)[N / 2], uint32_t A, int a_box, uint32_t B, int b_box)
{
    const uint64_t a = tile_at(A), b = tile_at(B);
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        wgmma<T, N>::template shared<0, 0>(X, on(a, k / 4 * a_box + k % 4 * 32), on(b, k / 4 * b_box + k % 4 * 32),
                                           k != 0);
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

/* 16 rows of a warp leave, 64 columns after the other, each times the factor of its row, or as zeros where that is 0. out: 2 KB. */
template <class T, int M>
__device__ inline void store_rows(char *out, const float (&X)[M], float upper, float lower, const view &t, int64_t at,
                                  int64_t step, int rows, int width)
{
    const int lane = threadIdx.x % 32;
    const uint32_t to = shared_address(out) + lane % 16 * 128;
    const auto two = [&](int i, float by) { return by == 0.0f ? 0u : pack<T>(X[i] * by, X[i + 1] * by); };
#pragma unroll
    for (int box = 0; box < (M + 31) / 32; box++) {
        if (box)
            __syncwarp();
#pragma unroll
        for (int c = 0; c < HEED_MIN(M / 4 - 8 * box, 8); c += 2) {
            const int i = 32 * box + 4 * c;
            store_matrices(to + ((c + lane / 16) ^ (lane % 8)) * 16, two(i, upper), two(i + 2, lower),
                           two(i + 4, upper), two(i + 6, lower));
        }
        __syncwarp();
        const int column = 64 * box + lane % 8 * 8;
        T *const first = (T *)t.data + at + column;
#pragma unroll
        for (int e = 0; e < 16; e += 4) {
            const int i = e + lane / 8;
            if (i < rows && column < width)
                *(uint4 *)(first + i * step) = *(const uint4 *)(out + i * 128 + (lane % 8 ^ i % 8) * 16);
        }
    }
}

/* The keys that the band lets row i see, and the rows that it lets see key n. Without STEPS steps are 1: divisions would be
 * half of the code. */
template <bool STEPS> __device__ inline void short_row(const args &a, const span &s, int i, int &first, int &last)
{
    if (STEPS)
        return band_of_row(a, s, i, first, last);
    first = min(max(i + s.low, 0), s.keys);
    last = max(first, min(i + s.high, s.keys));
}
template <bool STEPS> __device__ inline void short_key(const args &a, const span &s, int n, int &first, int &last)
{
    if (STEPS)
        return band_of_key(a, s, n, first, last);
    first = min(max(n - s.high + 1, 0), s.rows);
    last = max(first, min(n - s.low + 1, s.rows));
}

/* Waits where even finding out what there is to do reads memory: a kernel that starts before the one before it has ended. */
template <bool GENERAL> __device__ inline void wait_where_needed(const args &a)
{
    if (is_ragged(a) || (GENERAL && a.alibi.data))
        wait_for_last();
}

/* The sequence of a block, which it keeps in shared memory: the same for all, there it takes no registers. */
template <bool GENERAL> __device__ inline const span &find_span(span &s, const args &a, int b)
{
    wait_where_needed<GENERAL>(a);
    if (threadIdx.x == 0)
        s = span_of(a, b);
    __syncthreads();
    return s;
}

/* A band of other steps, and what the scores need beyond scale and band. */
inline bool has_steps(const args &a) { return (a.left < FAR || a.right < FAR) && (a.p_step != 1 || a.r_step != 1); }
inline bool is_general(const args &a) { return has_extras(a) || a.scale <= 0 || has_steps(a); }

/* The rows of the other side that some of the own rows begin .. end - 1 meet, first .. last - 1; all of them meet
 * inside .. outside - 1. KEYS: the own rows are keys. */
struct meeting {
    int first, last, inside, outside;
};

template <bool KEYS, bool STEPS> __device__ inline meeting meet(const args &a, const span &s, int begin, int end)
{
    int low, high, low2, high2;
    if (KEYS)
        short_key<STEPS>(a, s, begin, low, high), short_key<STEPS>(a, s, end - 1, low2, high2);
    else
        short_row<STEPS>(a, s, begin, low, high), short_row<STEPS>(a, s, end - 1, low2, high2);
    return { min(low, low2), max(high, high2), max(low, low2), min(high, high2) };
}

__device__ inline int round_down(int x, int to) { return x / to * to; }
__device__ inline int round_up(int x, int to) { return (x + to - 1) / to * to; }

/* ---- Scores ------------------------------------------------------------------------------------------------------ */

/* A lane's scores as scores.cuh wants to see them: queries are rows, N keys. */
template <int N, bool EXACT_ = false> struct query_scores {
    static constexpr int R = 2, C = N / 4, NEAR = EXACT_ ? 2 : 8; /* so many keys of a lane are neighbours */
    static constexpr bool EXACT = EXACT_;
    float (&X)[N / 2];
    int i0, n0;            /* first query and first key of this lane */
    int lows[2], highs[2]; /* of its two queries */
    __device__ float &at(int r, int c) { return X[c / 2 * 4 + r * 2 + c % 2]; }
    static __device__ constexpr int apart(int c) { return c / NEAR * (4 * NEAR) + c % NEAR; }
    __device__ int row(int r) const { return i0 + r * 8; }
    __device__ int key(int c) const { return n0 + apart(c); }
    __device__ int low(int r) const { return lows[r]; }
    __device__ int high(int r) const { return highs[r]; }
};

/* Hides what the band hides, unless whole: then that is nothing in this tile. */
template <bool STEPS, int N, bool EXACT>
__device__ inline void hide_band(query_scores<N, EXACT> &t, const args &a, const span &s, bool whole)
{
    if (whole)
        return;
#pragma unroll
    for (int r = 0; r < 2; r++)
        short_row<STEPS>(a, s, min(t.row(r), s.rows - 1), t.lows[r], t.highs[r]);
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
    static __device__ constexpr int down(int r) { return r / 2 * 8 + r % 2; }
    __device__ int row(int r) const { return i0 + down(from + r); }
    __device__ int key(int c) const { return n0 + apart(c); }
    __device__ int low(int) const { return 0; } /* hide_queries() has the band */
    __device__ int high(int) const { return INT32_MAX; }
};

template <bool STEPS, bool EXACT>
__device__ inline void hide_band(key_scores<EXACT> &t, const args &a, const span &s, bool whole)
{
    if (whole)
        return;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        int first, last;
        short_key<STEPS>(a, s, min(t.key(c), s.keys - 1), first, last);
        last = EXACT && t.key(c) >= s.keys ? first : last; /* there is no such key, but dQ would meet it */
#pragma unroll
        for (int r = 0; r < key_scores<EXACT>::R; r++)
            t.at(r, c) = (unsigned)(t.row(r) - first) < (unsigned)(last - first) ? t.at(r, c) : -CUDART_INF_F;
    }
}

/* ---- Mask and bias ----------------------------------------------------------------------------------------------- */

/* Eight keys of a query's mask and bias on their way: they are one piece of memory, or HEED_USES_LOOSE. */
struct score_piece {
    uint4 bias;
    uint2 mask;

    /* Of query i and keys n ..: those that there are not may have any others'. */
    __device__ void ask(const args &a, const span &s, const head &h, int i, int n)
    {
        i = min(i, s.rows - 1), n = min(n, a.Sk - 8);
        if (a.bias.data)
            bias = load_16(a.bias.data + (h.bias + n + i * a.bias.stride[2]) * 2);
        if (a.mask.data)
            mask = load_8(a.mask.data + h.mask + n + i * a.mask.stride[2]);
    }
    template <class T> __device__ float term(const args &a, int e) const
    {
        if (!a.bias.data)
            return 0.0f;
        const float2 two = unpack<T>(word(bias, e / 2));
        return e % 2 ? two.y : two.x;
    }
    __device__ bool sees(const args &a, int e) const
    {
        return !a.mask.data || (e < 4 ? mask.x : mask.y) & 255u << 8 * (e % 4);
    }
};

__device__ inline bool has_terms(const args &a) { return a.mask.data || a.bias.data; }

/* Those of a lane's queries, straight into registers. */
template <class T, int N> struct query_terms {
    score_piece x[2][N / 32];

    __device__ void ask(const args &a, const span &s, const head &h, const query_scores<N> &t)
    {
        if (has_terms(a))
#pragma unroll
            for (int p = 0; p < 2 * (N / 32); p++)
                x[p % 2][p / 2].ask(a, s, h, t.row(p % 2), t.n0 + p / 2 * 32);
    }

    /* S from q.k but for the band. */
    __device__ void score(query_scores<N> &t, const args &a, const span &s, const head &h) const
    {
        if (has_terms(a)) {
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int c = 0; c < t.C; c++) {
                    const score_piece &y = x[r][c / 8];
                    t.at(r, c) = y.sees(a, c % 8) ? fmaf(t.at(r, c), a.scale, y.template term<T>(a, c % 8))
                                                  : -CUDART_INF_F;
                }
        } else
            scale_scores(t, a.scale);
        if (a.alibi.data)
            add_alibi(t, s, h.slope);
    }
};

/* Those of 16 keys of a warp and 64 queries, which lie across its lanes, on their way through shared memory: the warp that brings
 * them is the one that reads them. */
template <class T> struct key_terms {
    static constexpr int PITCH = 20; /* so that no two lanes that read have the same bank */
    float x[64][PITCH];

    static __device__ int row(int p) { return p * 16 + (int)threadIdx.x % 32 / 2; }
    static __device__ int column() { return threadIdx.x % 2 * 8; }
    static __device__ float hidden() { return __uint_as_float(~0u); } /* a NaN that no 16 bits stand for */

    /* Asks for those of queries i0 .. and keys n0 .. */
    static __device__ void ask(score_piece (&y)[4], const args &a, const span &s, const head &h, int i0, int n0)
    {
        if (has_terms(a))
#pragma unroll
            for (int p = 0; p < 4; p++)
                y[p].ask(a, s, h, i0 + row(p), n0 + column());
    }
    __device__ void put(const score_piece (&y)[4], const args &a)
    {
        if (!has_terms(a))
            return;
#pragma unroll
        for (int p = 0; p < 4; p++) {
            float z[8];
#pragma unroll
            for (int e = 0; e < 8; e++)
                z[e] = y[p].sees(a, e) ? y[p].template term<T>(a, e) : hidden();
#pragma unroll
            for (int e = 0; e < 8; e += 4)
                *(float4 *)&x[row(p)][column() + e] = make_float4(z[e], z[e + 1], z[e + 2], z[e + 3]);
        }
        __syncwarp();
    }

    /* S from q.k but for the band. */
    __device__ void score(key_scores<> &t, const args &a, const span &s, const head &h) const
    {
        if (has_terms(a)) {
            const float *const first = &x[threadIdx.x % 4 * 2][threadIdx.x % 32 / 4];
#pragma unroll
            for (int r = 0; r < t.R; r++)
#pragma unroll
                for (int c = 0; c < t.C; c++) {
                    const float y = first[t.down(r) * PITCH + t.apart(c)];
                    t.at(r, c) = __float_as_uint(y) == ~0u ? -CUDART_INF_F : fmaf(t.at(r, c), a.scale, y);
                }
            __syncwarp(); /* others may take its place */
        } else
            scale_scores(t, a.scale);
        if (a.alibi.data)
            add_alibi(t, s, h.slope);
    }
};

#endif
