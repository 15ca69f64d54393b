/* The vocabulary of the tensor-core kernels: tiles of 16-bit rows in shared memory, and their products.
 *
 * A row of D elements is D/8 chunks of 16 bytes; chunk c of row r lies at place c ^ (r % 8), so that the eight rows of
 * an 8 x 8 matrix lie in different banks. D is 64, 128 or 256; heads in between are padded with zeros. */
#ifndef HEED_CUDA_TILE_MMA_CUH
#define HEED_CUDA_TILE_MMA_CUH

#include "scores.cuh"
#include "sm75.cuh"

/* Where a kernel's code is compiled: Ampere's from there on, Turing's to Hopper, so that it can be tested there.
 * Elsewhere it is empty; the planner knows (backend.h). */
#if !defined(__CUDA_ARCH__)
#define CHIP_RUNS_HERE 1
#elif defined(HEED_LIKE_TURING)
#define CHIP_RUNS_HERE (__CUDA_ARCH__ < 1000)
#else
#define CHIP_RUNS_HERE (__CUDA_ARCH__ >= 800)
#endif

/* ---- Blocks ------------------------------------------------------------------------------------------------------ */

/* How a block works, as much at once as leaves no register short: each of its warps owns MT tiles of 16 rows of the
 * result, and all MEET so many rows of the other side at a time, in one or two SLOTS. BLOCKS: on one multiprocessor. */
template <int WARPS_, int MT_, int MEETS_, int SLOTS_, int BLOCKS_> struct block_tiles {
    static constexpr int WARPS = WARPS_, MT = MT_, MEETS = MEETS_, SLOTS = SLOTS_, BLOCKS = BLOCKS_;
    static constexpr int THREADS = 32 * WARPS, OWN = 16 * MT * WARPS;
};

/* What the scores of a kernel may need beyond scale and band: nothing; what takes no more than a mask's tile of shared
 * memory, so that it goes with a plain kernel's tiles; everything. */
enum { PLAIN, UNBIASED, GENERAL };

/* The least that will do. A Chip says to which head size it has kernels between plain and general ones, to which they
 * drop, and whether they take a softcap. They divide by the scale, which must not make ALiBi's slope infinite. */
template <int D, class Chip> int scores_of(const args &a)
{
    if (!has_extras(a) && a.scale > 0)
        return PLAIN;
    if (a.bias.data || a.scale < 1e-18f || D > Chip::UNBIASED_HEAD_DIM || (a.softcap > 0 && !Chip::CAPS_UNBIASED) ||
        (a.drop_below && D > Chip::DROPS_UNBIASED))
        return GENERAL;
    return UNBIASED;
}

/* Division of numbers below 2^31 by one that the host knows. */
struct divisor {
    unsigned number, factor, shift;
    __device__ int divide(int n) const { return (int)((uint64_t)(unsigned)n * factor >> shift); }
};

inline divisor divisor_of(int64_t number)
{
    divisor d = { (unsigned)HEED_MAX(number, 1), 0, 31 };
    while ((uint64_t)1 << (d.shift - 31) < d.number)
        d.shift++;
    d.factor = (unsigned)(((uint64_t)1 << d.shift) / d.number + 1);
    return d;
}

/* Which tile of which head a block owns. Heads go in groups, so that what the blocks of a group read fits in the L2
 * cache, and in a group the first tiles of all heads go first: under a causal band those should be the long ones. */
struct tile_order {
    int tiles, heads, full_rounds;
    divisor round, group, rest; /* blocks of a round; heads in one, and in the last one */
    divisor heads_of_batch, heads_of_key;
    int64_t blocks() const { return (int64_t)tiles * heads; }
    __device__ int find(int &b, int &h) const
    {
        const int r = round.divide(blockIdx.x), inside = blockIdx.x - r * round.number;
        const divisor &width = r < full_rounds ? group : rest;
        const int tile = width.divide(inside), head = r * group.number + inside - tile * width.number;
        b = heads_of_batch.divide(head);
        h = head - b * heads_of_batch.number;
        return tile;
    }
};

/* Heads of q or of k; rows: of the other side, for each of them. */
inline tile_order order_tiles(int64_t tiles, int64_t heads, int64_t rows, const args &a)
{
    const int64_t in_cache = (24 << 20) / HEED_MAX(1, rows * (a.D + a.Dv) * 2);
    const int64_t all = a.B * heads, group = HEED_MAX(1, HEED_MIN(all, in_cache));
    tile_order order;
    order.tiles = (int)tiles, order.heads = (int)all, order.full_rounds = (int)(all / group);
    order.round = divisor_of(tiles * group), order.group = divisor_of(group), order.rest = divisor_of(all % group);
    order.heads_of_batch = divisor_of(heads), order.heads_of_key = divisor_of(a.G);
    return order;
}

template <int D> __device__ inline uint32_t chunk_at(uint32_t tile, int row, int chunk)
{
    return tile + row * D * 2 + ((chunk ^ (row & 7)) << 4);
}

/* The address of chunk c of a row, c even or one more, from that of its chunk 0 or 1: one exclusive or with a constant,
 * as tiles start at multiples of 1 KB. 8 rows down is 8 rows' bytes further. */
template <int D> __device__ inline uint32_t along(uint32_t address, int c)
{
    return (address ^ ((c & 6) << 4)) + ((c & ~7) << 4);
}

/* ---- Memory to shared memory ------------------------------------------------------------------------------------- */

/* On Turing copies take registers on their way; for later chips the compiler has none to spare for Turing's code. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int COPIES_IN_REGISTERS = 2;
#else
constexpr int COPIES_IN_REGISTERS = 1;
#endif

/* Which of the rows in memory is row r of a tile. */
struct in_order {
    __device__ int operator()(int r) const { return r; }
};

/* Copies COUNT rows that lie `step` bytes apart, those from `rows` on as zeros; each is `width` elements wide. */
template <int D, int COUNT, int THREADS, class Order = in_order>
__device__ inline void copy_rows(uint32_t tile, const char *first, int64_t step, int rows, int width,
                                 Order order = Order())
{
    constexpr int CHUNKS = D / 8, ROWS_AT_ONCE = THREADS / CHUNKS;
    static_assert(ROWS_AT_ONCE % 4 == 0, "so that r, below, changes one bit of a chunk's place, or none");
    const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
    const int bytes = max(0, min(16, (width - chunk * 8) * 2));
    const char *from = first + row * step + chunk * 16;
    const uint32_t to = chunk_at<D>(tile, row, chunk);
    constexpr int UNROLL = HEED_TURING ? COPIES_IN_REGISTERS : COUNT;
    auto copy = [&](auto size) {
#pragma unroll UNROLL
        for (int r = 0; r < COUNT; r += ROWS_AT_ONCE) {
            const int which = order(r + row);
            if (ROWS_AT_ONCE <= COUNT || row < COUNT)
                copy_async<16>((to ^ (r & 4) << 4) + r * D * 2, from + (which - row) * step, size(which));
        }
    };
    if (rows >= COUNT && width == D) /* the rule, and half the instructions */
        copy([&](int) { return 16; });
    else
        copy([&](int which) { return which < rows ? bytes : 0; });
}

/* The same for rows that lie anywhere: row r at from(r), which is NULL for zeros. */
template <int D, int COUNT, int THREADS, class From>
__device__ inline void copy_scattered_rows(uint32_t tile, int width, const void *somewhere, From from)
{
    constexpr int CHUNKS = D / 8, ROWS_AT_ONCE = THREADS / CHUNKS;
    const int chunk = threadIdx.x % CHUNKS;
    const int bytes = max(0, min(16, (width - chunk * 8) * 2));
#pragma unroll 1
    for (int r = threadIdx.x / CHUNKS; r < COUNT; r += ROWS_AT_ONCE) {
        const char *row = (const char *)from(r);
        copy_async<16>(chunk_at<D>(tile, r, chunk), row ? row + chunk * 16 : (const char *)somewhere, row ? bytes : 0);
    }
}

/* The keys of one head in one tensor, in the order that the sequence sees them. */
struct key_rows {
    const char *first;
    int64_t step; /* bytes from key to key */
};

__device__ inline key_rows keys_of(const args &a, const span &s, const view &t, int hk)
{
    key_rows k;
    k.first = t.data + (a.page ? 0 : row_at(t, s.k_batch, hk, s.k_row + a.col) * 2);
    k.step = a.col_step * t.stride[2] * 2;
    return k;
}

template <int D, int COUNT, int THREADS, class Order = in_order>
__device__ inline void copy_keys(uint32_t tile, const args &a, const span &s, const view &t, const key_rows &k, int hk,
                                 int n0, int keys, int width, Order order = Order())
{
    if (!a.page)
        copy_rows<D, COUNT, THREADS>(tile, k.first + n0 * k.step, k.step, keys - n0, width, order);
    else
        copy_scattered_rows<D, COUNT, THREADS>(tile, width, t.data, [&](int r) {
            const int n = n0 + order(r);
            int64_t at = n < keys ? key_at(a, s, t, hk, n) : NOWHERE;
            return at == NOWHERE ? (const char *)NULL : t.data + at * 2;
        });
}

/* ---- Products ---------------------------------------------------------------------------------------------------- */

template <int MT, int NT> __device__ inline void clear(float (&x)[MT][NT][4])
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[m][n][e] = 0.0f;
}

/* X += A B^T: rows `a_row` .. + 16 MT of tile A times rows b_row .. + 8 NT of tile B. */
template <class T, int D, int MT, int NT>
__device__ inline void multiply_rows(float (&X)[MT][NT][4], uint32_t A, int a_row, uint32_t B, int b_row)
{
    const int lane = threadIdx.x % 32;
    const uint32_t a_first = chunk_at<D>(A, a_row + lane % 16, lane / 16);
    const uint32_t b_first = chunk_at<D>(B, b_row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
            load_matrices(a[m], along<D>(a_first, k * 2) + m * 16 * D * 2);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t b[4];
            load_matrices(b, along<D>(b_first, k * 2) + n * 8 * D * 2);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                multiply(X[m][n], a[m], b[0], b[1], T());
                multiply(X[m][n + 1], a[m], b[2], b[3], T());
            }
        }
    }
}

/* Columns 16 k .. + 16 of a tile of results become the left operand of the next product, without leaving their
 * lanes. */
template <class T, int NT> __device__ inline void pack_columns(uint32_t (&P)[4], const float (&X)[NT][4], int k)
{
    P[0] = pack<T>(X[2 * k][0], X[2 * k][1]);
    P[1] = pack<T>(X[2 * k][2], X[2 * k][3]);
    P[2] = pack<T>(X[2 * k + 1][0], X[2 * k + 1][1]);
    P[3] = pack<T>(X[2 * k + 1][2], X[2 * k + 1][3]);
}

/* Y += X B for columns 16 k .. + 16 of X and as many rows of tile B, which is D wide. */
template <class T, int D, int MT, int NT>
__device__ inline void multiply_tile(float (&Y)[MT][D / 8][4], const float (&X)[MT][NT][4], int k, uint32_t B)
{
    const int lane = threadIdx.x % 32;
    const uint32_t b_first = chunk_at<D>(B, lane % 16, lane / 16);
    uint32_t P[MT][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
        pack_columns<T>(P[m], X[m], k);
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
        uint32_t b[4];
        load_matrices_transposed(b, along<D>(b_first, n) + k * 16 * D * 2);
#pragma unroll
        for (int m = 0; m < MT; m++) {
            multiply(Y[m][n], P[m], b[0], b[1], T());
            multiply(Y[m][n + 1], P[m], b[2], b[3], T());
        }
    }
}

/* Y += X B for all columns of X. */
template <class T, int D, int MT, int NT>
__device__ inline void multiply_tile(float (&Y)[MT][D / 8][4], const float (&X)[MT][NT][4], uint32_t B)
{
#pragma unroll
    for (int k = 0; k < NT / 2; k++)
        multiply_tile<T, D>(Y, X, k, B);
}

/* ---- Registers to memory ----------------------------------------------------------------------------------------- */

/* Writes the warp's 16 MT rows to t, row r at element offset where(r), which may be NOWHERE. 16-bit results
 * pass through the warp's own rows of a tile that is no longer needed, to leave in pieces of 16 bytes. */
template <class T, int D, int MT, class Where>
__device__ inline void store_rows(const float (&Y)[MT][D / 8][4], const view &t, int width, bool accumulate,
                                  uint32_t tile, char *tile_memory, int row, Where where)
{
    const int lane = threadIdx.x % 32, g = lane / 4, pair = lane % 4 * 2;
    if (t.dtype == HEED_F32) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t at = where(row + m * 16 + half * 8 + g);
                if (at == NOWHERE)
                    continue;
                float *to = (float *)t.data + at;
#pragma unroll
                for (int n = 0; n < D / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (n * 8 + pair + e < width) {
                            float *one = to + n * 8 + pair + e;
                            *one = Y[m][n][half * 2 + e] + (accumulate ? *one : 0.0f);
                        }
            }
        return;
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                const int r = row + m * 16 + half * 8 + g;
                *(uint32_t *)(tile_memory + (chunk_at<D>(tile, r, n) - tile) +
                              pair * 2) = pack<T>(Y[m][n][half * 2], Y[m][n][half * 2 + 1]);
            }
    __syncwarp();
    for (int piece = lane; piece < 16 * MT * (D / 8); piece += 32) {
        const int r = row + piece / (D / 8), chunk = piece % (D / 8);
        const int64_t at = where(r);
        if (at == NOWHERE || chunk * 8 >= width)
            continue;
        const uint4 eight = *(const uint4 *)(tile_memory + (chunk_at<D>(tile, r, chunk) - tile));
        uint16_t *to = (uint16_t *)t.data + at + chunk * 8;
        if (chunk * 8 + 8 <= width)
            *(uint4 *)to = eight;
        else
            for (int e = 0; chunk * 8 + e < width; e++)
                to[e] = (uint16_t)((e < 2 ? eight.x : e < 4 ? eight.y : e < 6 ? eight.z : eight.w) >> 16 * (e % 2));
    }
}

/* ---- Scores ------------------------------------------------------------------------------------------------------ */

/* Mask and bias of a tile of QUERIES x KEYS scores lie in shared memory as they do outside, a row for each query:
 * copied ahead, they cost no wait, and any layout outside is read in order. Rows are PAD or 2 PAD bytes longer than
 * KEYS elements, which spreads a warp's reads over the banks. */
template <int QUERIES, int KEYS, bool KEY_MAJOR> struct score_tiles {
    static constexpr int ROWS = QUERIES, COLUMNS = KEYS, PAD = 16;
    static constexpr int most_bytes(int scores)
    {
        return scores == PLAIN ? 0 : ROWS * (KEYS + PAD + (scores == GENERAL ? 4 * KEYS + 2 * PAD : 0));
    }
    static __host__ __device__ constexpr int pitch(int size)
    {
        return KEYS * size + (size == 4 && !KEY_MAJOR ? 2 * PAD : PAD);
    }
    static __host__ __device__ int bias_bytes(const args &a)
    {
        return a.bias.data ? QUERIES * pitch(a.bias.dtype == HEED_F32 ? 4 : 2) : 0;
    }
    static __host__ __device__ int bytes(const args &a)
    {
        return bias_bytes(a) + (a.mask.data ? QUERIES * pitch(1) : 0);
    }
};

/* Mask or bias of one head. */
struct score_rows {
    const char *first;   /* of query 0 and key 0 */
    int64_t down, along; /* bytes from query to query, and from key to key */
    int vector;          /* keys are neighbours, and every sixteenth begins at a multiple of 16 bytes */
};

struct score_source {
    score_rows bias, mask;
};

__device__ inline score_rows score_rows_of(const args &a, const view &m, int64_t first, int size)
{
    score_rows x;
    x.first = m.data + (first + a.col * m.stride[3]) * size;
    x.down = m.stride[2] * size, x.along = a.col_step * m.stride[3] * size;
    x.vector = m.vector && x.along == size && (uintptr_t)x.first % 16 == 0;
    return x;
}

__device__ inline score_source score_source_of(const args &a, const head &x)
{
    return { score_rows_of(a, a.bias, x.bias, a.bias.dtype == HEED_F32 ? 4 : 2), score_rows_of(a, a.mask, x.mask, 1) };
}

/* Copies queries i0 .. and keys n0 .. of a mask or bias; those from `rows` and `keys` on are zero. */
template <int QUERIES, int KEYS, int THREADS, int SIZE>
__device__ inline void copy_scores(int thread, char *tile, int pitch, const score_rows &m, int i0, int n0, int rows,
                                   int keys)
{
    if (m.vector) {
        constexpr int CHUNKS = KEYS * SIZE / 16, ROWS_AT_ONCE = THREADS / CHUNKS;
        constexpr int UNROLL = HEED_TURING ? COPIES_IN_REGISTERS : QUERIES;
        const int row = thread / CHUNKS, at = thread % CHUNKS * 16;
        const int bytes = max(0, min(16, keys * SIZE - at));
        const char *from = m.first + (i0 + row) * m.down + (int64_t)n0 * SIZE + at;
        const int64_t step = ROWS_AT_ONCE * m.down;
        const uint32_t to = shared_address(tile + row * pitch + at);
        if (ROWS_AT_ONCE > QUERIES && row >= QUERIES)
            return;
        if (rows >= QUERIES && keys >= KEYS) { /* the rule, and a third of the instructions */
#pragma unroll UNROLL
            for (int r = 0; r < QUERIES; r += ROWS_AT_ONCE, from += step)
                copy_async<16>(to + r * pitch, from, 16);
        } else
#pragma unroll 1
            for (int r = 0; r < QUERIES; r += ROWS_AT_ONCE, from += step)
                copy_async<16>(to + r * pitch, from, r + row < rows ? bytes : 0);
    } else {
        constexpr int UNROLL = HEED_TURING ? COPIES_IN_REGISTERS : 4;
        const char *from = m.first + i0 * m.down + n0 * m.along;
#pragma unroll UNROLL
        for (int e = thread; e < QUERIES * KEYS; e += THREADS) {
            const int r = e / KEYS, c = e % KEYS;
            const char *one = from + r * m.down + c * m.along;
            char *to = tile + r * pitch + c * SIZE;
            const bool real = r < rows && c < keys;
            if (SIZE == 1)
                *to = real ? *one : 0;
            else if (SIZE == 2)
                *(uint16_t *)to = real ? *(const uint16_t *)one : 0;
            else
                *(float *)to = real ? *(const float *)one : 0.0f;
        }
    }
}

/* Mask and, of GENERAL kernels, bias for rows `row` .. + QUERIES of a tile that begins at query i0 and key n0, by so
 * many threads. */
template <int SCORES, class Tiles, int QUERIES, int THREADS>
__device__ inline void copy_mask_and_bias(int thread, char *tiles, int row, const args &a, const span &s,
                                          const score_source &from, int i0, int n0)
{
    constexpr int KEYS = Tiles::COLUMNS;
    const int rows = s.rows - i0 - row, keys = s.keys - n0;
    char *mask = tiles + (SCORES == GENERAL ? Tiles::bias_bytes(a) : 0) + row * Tiles::pitch(1);
    if (SCORES == GENERAL && a.bias.data && a.bias.dtype == HEED_F32)
        copy_scores<QUERIES, KEYS, THREADS, 4>(thread, tiles + row * Tiles::pitch(4), Tiles::pitch(4), from.bias,
                                               i0 + row, n0, rows, keys);
    else if (SCORES == GENERAL && a.bias.data)
        copy_scores<QUERIES, KEYS, THREADS, 2>(thread, tiles + row * Tiles::pitch(2), Tiles::pitch(2), from.bias,
                                               i0 + row, n0, rows, keys);
    if (SCORES != PLAIN && a.mask.data)
        copy_scores<QUERIES, KEYS, THREADS, 1>(thread, mask, Tiles::pitch(1), from.mask, i0 + row, n0, rows, keys);
}

/* A warp's scores with queries as rows, as scores.cuh wants to see them. low and high are in shared memory. A bias
 * is of fp32 or of type T. */
template <int MT, int NT, class T = float> struct query_major {
    static constexpr int R = 2 * MT, C = 2 * NT;
    static constexpr bool EXACT = false;
    float (&X)[MT][NT][4];
    const int *lows, *highs; /* of the tile's first query */
    int i0, n0, row0;        /* first query and first key of this lane; its first row of the tile */
    const char *bias, *mask; /* of row0 and n0 in shared memory */
    typedef score_tiles<0, 8 * NT, false> extras;
    __device__ float &at(int r, int c) { return X[r / 2][c / 2][r % 2 * 2 + c % 2]; }
    static __device__ constexpr int down(int r) { return r / 2 * 16 + r % 2 * 8; }
    static __device__ constexpr int apart(int c) { return c / 2 * 8 + c % 2; }
    __device__ int row(int r) const { return i0 + down(r); }
    __device__ int key(int c) const { return n0 + apart(c); }
    __device__ int low(int r) const { return lows[row0 + down(r)]; }
    __device__ int high(int r) const { return highs[row0 + down(r)]; }
};

/* Where a lane's first element of mask and bias lies, which is in the given row and column of the tile. */
template <int SCORES, class Extras, class Tile>
__device__ inline void point_at_tiles(Tile &t, const char *tiles, const args &a, int row, int column)
{
    const int size = a.bias.dtype == HEED_F32 ? 4 : 2;
    if (SCORES == GENERAL)
        t.bias = tiles + row * Extras::pitch(size) + column * size;
    t.mask = tiles + (SCORES == GENERAL ? Extras::bias_bytes(a) : 0) + row * Extras::pitch(1) + column;
}

__device__ inline float2 to_floats(uint32_t two, __half) { return __half22float2(*(const __half2 *)&two); }
__device__ inline float2 to_floats(uint32_t two, __nv_bfloat16)
{
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u));
}

template <int MT, int NT, class T>
__device__ inline void add_bias(query_major<MT, NT, T> &t, float factor, const args &a, const span &, const head &)
{
    typedef typename query_major<MT, NT, T>::extras extras;
    if (a.bias.dtype == HEED_F32) {
#pragma unroll
        for (int r = 0; r < 2 * MT; r++)
#pragma unroll
            for (int c = 0; c < 2 * NT; c += 2) {
                const float2 both = *(const float2 *)(t.bias + t.down(r) * extras::pitch(4) + t.apart(c) * 4);
                t.at(r, c) = fmaf(t.at(r, c), factor, both.x);
                t.at(r, c + 1) = fmaf(t.at(r, c + 1), factor, both.y);
            }
    } else {
#pragma unroll
        for (int r = 0; r < 2 * MT; r++)
#pragma unroll
            for (int c = 0; c < 2 * NT; c += 2) {
                const uint32_t two = *(const uint32_t *)(t.bias + t.down(r) * extras::pitch(2) + t.apart(c) * 2);
                const float2 both = to_floats(two, T());
                t.at(r, c) = fmaf(t.at(r, c), factor, both.x);
                t.at(r, c + 1) = fmaf(t.at(r, c + 1), factor, both.y);
            }
    }
}

template <int MT, int NT, class T>
__device__ inline void apply_mask(query_major<MT, NT, T> &t, const args &, const span &, const head &)
{
    typedef typename query_major<MT, NT, T>::extras extras;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++)
#pragma unroll
        for (int c = 0; c < 2 * NT; c += 2) {
            const uint32_t both = *(const uint16_t *)(t.mask + t.down(r) * extras::pitch(1) + t.apart(c));
            t.at(r, c) = both & 0xFFu ? t.at(r, c) : -CUDART_INF_F;
            t.at(r, c + 1) = both >> 8 ? t.at(r, c + 1) : -CUDART_INF_F;
        }
}

/* ---- Dropout ----------------------------------------------------------------------------------------------------- */

/* The eight keys of one Philox are those of SHARE lanes, STEP apart: each of them draws for another eight of the DRAWS
 * that they need together, makes a byte of them, and all exchange bytes. draw(i) makes the byte number i, use(i, byte)
 * takes it. */
template <int DRAWS, int SHARE, int STEP, class Draw, class Use>
__device__ inline void draw_together(Draw draw, Use use)
{
    static_assert(DRAWS % SHARE == 0, "the same number for each");
    const int lane = threadIdx.x % 32, mine = lane / STEP % SHARE;
#pragma unroll
    for (int i = 0; i < DRAWS; i += 4 * SHARE) {
        const int EACH = DRAWS - i < 4 * SHARE ? (DRAWS - i) / SHARE : 4;
        uint32_t four = 0;
#pragma unroll
        for (int n = 0; n < EACH; n++)
            four |= draw(i + n * SHARE + mine) << 8 * n;
#pragma unroll
        for (int j = 0; j < SHARE; j++) {
            const uint32_t theirs = __shfl_sync(~0u, four, lane + (j - mine) * STEP);
#pragma unroll
            for (int n = 0; n < EACH; n++)
                use(i + n * SHARE + j, theirs >> 8 * n);
        }
    }
}

/* The dropout bits of a lane's tile, packed: whether P of query r and key c is kept. */
template <class Tile> struct kept_bits {
    static constexpr int C = Tile::C;
    static_assert(32 % C == 0, "the bits of a query lie in one word");
    uint32_t words[(Tile::R * C + 31) / 32] = {};
    __device__ void add(int r, int c, uint32_t bits) { words[(r * C + c) / 32] |= bits << (r * C + c) % 32; }
    __device__ bool at(int r, int c) const { return words[(r * C + c) / 32] >> (r * C + c) % 32 & 1; }
};

template <int MT, int NT, class T>
__device__ inline void draw_tile(const query_major<MT, NT, T> &t, kept_bits<query_major<MT, NT, T>> &kept,
                                 const args &a, const span &s, const head &x)
{
    const uint64_t seed = seed_of(a);
    const int pair = threadIdx.x % 4 * 2;
    const int64_t first = s.r0 + t.n0 - pair;
    if (s.r_step != 1 || first % 8) {
#pragma unroll
        for (int r = 0; r < 2 * MT; r++)
            kept.add(r, 0, draw(t, r, a, s, x, seed));
        return;
    }
    draw_together<2 * MT * NT, 4, 1>(
        [&](int i) {
            const uint32_t p = (uint32_t)(uint64_t)(s.p0 + (t.i0 + i / NT / 2 * 16 + i / NT % 2 * 8) * s.p_step);
            const uint32_t eight = (uint32_t)(uint64_t)(first / 8 + i % NT);
            return kept_of_eight(philox(seed, make_uint4(eight, p, x.h, s.b)), a.drop_below);
        },
        [&](int i, uint32_t byte) { kept.add(i / NT, i % NT * 2, byte >> pair & 3); });
}

#endif
