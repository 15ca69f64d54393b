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

/* So many rows of s, a multiple of 32, from `row` on as a tile for the tensor core, of up to 64 columns, by all threads. Rows and
 * columns that there are not become zeros: nothing is read there. MIXED: in the order of key_of_row(). */
template <bool MIXED = false, int COLUMNS = 64>
__device__ inline void copy_rows(char *to, const source &s, int row, int rows)
{
    constexpr int CHUNKS = COLUMNS / 8, ONCE = SHORT_THREADS / CHUNKS;
    const int r0 = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS, last = chunk * 16 <= s.end ? s.last : -1;
    uint32_t at = shared_address(to) + r0 * 128 + (chunk ^ r0 % 8) * 16;
    int i = row + (MIXED ? key_of_row(r0) : r0);
    const char *from = row_from(s.first + chunk * 16, i, s.step);
#pragma unroll 2
    for (int r = 0; r < rows; r += 32) {
#pragma unroll
        for (int n = 0; n < 32; n += ONCE) {
            const int further = MIXED ? key_of_row(n) : n;
            copy_async(at + n * 128, row_from(from, further, s.step), i + further <= last ? 16 : 0);
        }
        at += 32 * 128, i += 32, from = row_from(from, 32, s.step);
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
    /* Chunk c of row r lies at c ^ r % 8. So an even c, or four rows further down, is one bit of an address or two that change. */
    const uint32_t to = shared_address(out) + lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
    const int from = lane / 8 * 128 + (lane / 8 ^ lane % 8) * 16, column = lane % 8 * 8;
    T *first = (T *)t.data + at + lane / 8 * step + column;
    asm("" : "+l"(first)); /* else each row's address would be worked out from the tensor's */
    const auto two = [&](int i, float by) { return by == 0.0f ? 0u : pack<T>(X[i] * by, X[i + 1] * by); };
#pragma unroll
    for (int box = 0; box < (M + 31) / 32; box++) {
        if (box)
            __syncwarp();
#pragma unroll
        for (int c = 0; c < HEED_MIN(M / 4 - 8 * box, 8); c += 2) {
            const int i = 32 * box + 4 * c;
            store_matrices(to ^ c * 16, two(i, upper), two(i + 2, lower), two(i + 4, upper), two(i + 6, lower));
        }
        __syncwarp();
        uint4 x[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[e] = *(const uint4 *)(out + (from ^ e % 2 * 64) + e * 512);
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (lane / 8 + 4 * e < rows && 64 * box + column < width)
                *(uint4 *)(first + 64 * box + 4 * e * step) = x[e];
    }
}

/* The keys [first, last) that the band lets each of two rows see, or with KEYS the rows that it lets see each of two keys. Without
 * STEPS steps are 1; with others there are 64-bit divisions, hundreds of instructions, so that these are there but once. */
template <bool KEYS, bool STEPS>
__device__ inline void two_bands(const args &a, const span &s, const int (&i)[2], int (&first)[2], int (&last)[2])
{
    if (!STEPS || s.unit || (a.left >= FAR && a.right >= FAR)) {
        const int low = KEYS ? 1 - s.high : s.low, high = KEYS ? 1 - s.low : s.high, end = KEYS ? s.rows : s.keys;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            first[n] = min(max(i[n] + low, 0), end);
            last[n] = max(first[n], min(i[n] + high, end));
        }
        return;
    }
    first[1] = last[1] = 0;
#pragma unroll 1
    for (int n = 0; n < 2; n++) { /* the second becomes the first in the next round */
        first[0] = first[1], last[0] = last[1];
        if (KEYS)
            band_of_key(a, s, n ? i[1] : i[0], first[1], last[1]);
        else
            band_of_row(a, s, n ? i[1] : i[0], first[1], last[1]);
    }
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
    const int ends[2] = { begin, end - 1 };
    int low[2], high[2];
    two_bands<KEYS, STEPS>(a, s, ends, low, high);
    return { min(low[0], low[1]), max(high[0], high[1]), max(low[0], low[1]), min(high[0], high[1]) };
}

__device__ inline int round_down(int x, int to) { return x / to * to; }
__device__ inline int round_up(int x, int to) { return (x + to - 1) / to * to; }

/* ---- Scores ------------------------------------------------------------------------------------------------------ */

/* A lane's scores as scores.cuh wants to see them: queries are rows, N keys. */
template <int N, bool EXACT_ = false> struct query_scores {
    static constexpr int R = 2, C = N / 4, NEAR = EXACT_ ? 2 : 8; /* so many keys of a lane are neighbours */
    static constexpr bool EXACT = EXACT_;
    float (&X)[N / 2];
    int i0, n0; /* first query and first key of this lane */
    __device__ float &at(int r, int c) { return X[c / 2 * 4 + r * 2 + c % 2]; }
    static __device__ constexpr int apart(int c) { return c / NEAR * (4 * NEAR) + c % NEAR; }
    __device__ int row(int r) const { return i0 + r * 8; }
    __device__ int key(int c) const { return n0 + apart(c); }
    __device__ int low(int) const { return 0; } /* hide_band() has the band */
    __device__ int high(int) const { return INT32_MAX; }
    /* So many of the lane's keys come before key n. */
    __device__ int before(int n) const
    {
        const unsigned y = max(min(n - n0, N), 0);
        return y / (4 * NEAR) * NEAR + min(y % (4 * NEAR), (unsigned)NEAR);
    }
};

/* Hides what the band hides, unless whole: then that is nothing in this tile. What is seen is a bit for each key: a comparison of
 * each takes twice the instructions, but fewer registers, of which there are none left where scores are EXACT. */
template <bool STEPS, int N, bool EXACT>
__device__ inline void hide_band(query_scores<N, EXACT> &t, const args &a, const span &s, bool whole)
{
    if (whole)
        return;
    const int rows[2] = { min(t.row(0), s.rows - 1), min(t.row(1), s.rows - 1) };
    int first[2], last[2];
    two_bands<false, STEPS>(a, s, rows, first, last);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int begin = EXACT ? first[r] - t.n0 : t.before(first[r]);
        const unsigned count = EXACT ? last[r] - first[r] : t.before(last[r]) - begin, bits = bit_mask(begin, count);
#pragma unroll
        for (int c = 0; c < t.C; c++) {
            const bool seen = EXACT ? (unsigned)(t.apart(c) - begin) < count : bits >> c & 1;
            t.at(r, c) = seen ? t.at(r, c) : -CUDART_INF_F;
        }
    }
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
    __device__ int low(int) const { return 0; } /* as above */
    __device__ int high(int) const { return INT32_MAX; }
};

template <bool STEPS, bool EXACT>
__device__ inline void hide_band(key_scores<EXACT> &t, const args &a, const span &s, bool whole)
{
    if (whole)
        return;
    const int keys[2] = { min(t.key(0), s.keys - 1), min(t.key(1), s.keys - 1) };
    int first[2], last[2];
    two_bands<true, STEPS>(a, s, keys, first, last);
#pragma unroll
    for (int c = 0; c < 2; c++) {
        last[c] = EXACT && t.key(c) >= s.keys ? first[c] : last[c]; /* there is no such key, but dQ would meet it */
#pragma unroll
        for (int r = 0; r < key_scores<EXACT>::R; r++)
            t.at(r, c) = (unsigned)(t.row(r) - first[c]) < (unsigned)(last[c] - first[c]) ? t.at(r, c) : -CUDART_INF_F;
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
    template <class T> __device__ float term(int e) const
    {
        const float2 two = unpack<T>(word(bias, e / 2));
        return e % 2 ? two.y : two.x;
    }
    __device__ bool sees(int e) const { return (e < 4 ? mask.x : mask.y) & 255u << 8 * (e % 4); }
};

__device__ inline bool has_terms(const args &a) { return a.mask.data || a.bias.data; }

/* Those of a lane's queries, straight into registers. */
template <class T, int N> struct query_terms {
    score_piece x[2][N / 32];

    /* Of keys and queries that there are not any others' will do. */
    __device__ void ask(const args &a, const span &s, const head &h, const query_scores<N> &t)
    {
        if (!has_terms(a))
            return;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i = min(t.row(r), s.rows - 1);
            const char *const bias = a.bias.data + (h.bias + i * a.bias.stride[2]) * 2;
            const char *const mask = a.mask.data + h.mask + i * a.mask.stride[2];
#pragma unroll
            for (int p = 0; p < N / 32; p++) {
                const int n = min(t.n0 + p * 32, a.Sk - 8);
                if (a.bias.data)
                    x[r][p].bias = load_16(bias + n * 2);
                if (a.mask.data)
                    x[r][p].mask = load_8(mask + n);
            }
        }
    }

    /* S from q.k but for the band. */
    __device__ void score(query_scores<N> &t, const args &a, const span &s, const head &h) const
    {
        if (a.bias.data) {
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int c = 0; c < t.C; c++)
                    t.at(r, c) = fmaf(t.at(r, c), a.scale, x[r][c / 8].template term<T>(c % 8));
        } else
            scale_scores(t, a.scale);
        if (a.alibi.data)
            add_alibi(t, s, h.slope);
        if (a.mask.data) {
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int c = 0; c < t.C; c++)
                    t.at(r, c) = x[r][c / 8].sees(c % 8) ? t.at(r, c) : -CUDART_INF_F;
        }
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
                z[e] = a.mask.data && !y[p].sees(e) ? hidden() : a.bias.data ? y[p].template term<T>(e) : 0.0f;
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
