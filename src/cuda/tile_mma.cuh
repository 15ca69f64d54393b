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

/* Which tile of which head a block owns. Heads go in groups, so that what the blocks of a group read fits in the L2
 * cache, and in a group the first tiles of all heads go first: under a causal band those should be the long ones. */
struct tile_order {
    int tiles, heads, full_rounds;
    divisor round, group, rest; /* blocks of a round; heads in one, and in the last one */
    divisor heads_of_batch, heads_of_key, batches;
    int batches_first; /* the same head of all sequences in a row: they share a bias */
    int64_t blocks() const { return (int64_t)tiles * heads; }
    __device__ int find(int &b, int &h) const
    {
        const int r = round.divide(blockIdx.x), inside = blockIdx.x - r * round.number;
        const divisor &width = r < full_rounds ? group : rest;
        const int tile = width.divide(inside), head = r * group.number + inside - tile * width.number;
        const divisor &inner = batches_first ? batches : heads_of_batch;
        const int outer = inner.divide(head), rest_of_head = head - outer * inner.number;
        b = batches_first ? rest_of_head : outer;
        h = batches_first ? outer : rest_of_head;
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
    order.heads_of_batch = divisor_of(heads), order.heads_of_key = divisor_of(a.G), order.batches = divisor_of(a.B);
    order.batches_first = a.B > 1 && a.bias.data && a.bias.stride[0] == 0 && a.bias.stride[1] != 0;
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

/* Which of the rows in memory is row r of a tile. Any order moves the bits of r: of a sum of numbers that have no bit in
 * common it is the sum of theirs. */
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
    const int bytes = max(0, min(16, (width - chunk * 8) * 2)), mine = order(row);
    const char *from = first + mine * step + chunk * 16;
    const uint32_t to = chunk_at<D>(tile, row, chunk);
    constexpr int UNROLL = HEED_TURING ? COPIES_IN_REGISTERS : COUNT;
    auto copy = [&](auto size) {
#pragma unroll UNROLL
        for (int r = 0; r < COUNT; r += ROWS_AT_ONCE) {
            if (ROWS_AT_ONCE <= COUNT || row < COUNT)
                copy_async<16>((to ^ (r & 4) << 4) + r * D * 2, from + order(r) * step, size(mine + order(r)));
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
template <int D, int MT, int NT, class T>
__device__ inline void multiply_rows(float (&X)[MT][NT][4], uint32_t A, int a_row, uint32_t B, int b_row, T type)
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
                multiply(X[m][n], a[m], b[0], b[1], type);
                multiply(X[m][n + 1], a[m], b[2], b[3], type);
            }
        }
    }
}

template <int D, int MT, int NT>
__device__ inline void multiply_rows(float (&X)[MT][NT][4], uint32_t A, int a_row, uint32_t B, int b_row, either type)
{
    with_type(type, [&](auto known) { multiply_rows<D>(X, A, a_row, B, b_row, known); });
}

/* Columns 16 k .. + 16 of a tile of results become the left operand of the next product, without leaving their
 * lanes. */
template <int NT, class T> __device__ inline void pack_columns(uint32_t (&P)[4], const float (&X)[NT][4], int k, T type)
{
    P[0] = pack(X[2 * k][0], X[2 * k][1], type);
    P[1] = pack(X[2 * k][2], X[2 * k][3], type);
    P[2] = pack(X[2 * k + 1][0], X[2 * k + 1][1], type);
    P[3] = pack(X[2 * k + 1][2], X[2 * k + 1][3], type);
}

/* Y += X B for columns 16 k .. + 16 of X and as many rows of tile B, which is D wide. */
template <int D, int MT, int NT, class T>
__device__ inline void multiply_tile(float (&Y)[MT][D / 8][4], const float (&X)[MT][NT][4], int k, uint32_t B, T type)
{
    const int lane = threadIdx.x % 32;
    const uint32_t b_first = chunk_at<D>(B, lane % 16, lane / 16);
    uint32_t P[MT][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
        pack_columns(P[m], X[m], k, type);
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
        uint32_t b[4];
        load_matrices_transposed(b, along<D>(b_first, n) + k * 16 * D * 2);
#pragma unroll
        for (int m = 0; m < MT; m++) {
            multiply(Y[m][n], P[m], b[0], b[1], type);
            multiply(Y[m][n + 1], P[m], b[2], b[3], type);
        }
    }
}

/* Y += X B for all columns of X. */
template <int D, int MT, int NT, class T>
__device__ inline void multiply_tile(float (&Y)[MT][D / 8][4], const float (&X)[MT][NT][4], uint32_t B, T type)
{
    with_type(type, [&](auto known) {
#pragma unroll
        for (int k = 0; k < NT / 2; k++)
            multiply_tile<D>(Y, X, k, B, known);
    });
}

/* ---- Registers to memory ----------------------------------------------------------------------------------------- */

/* Writes the warp's 16 MT rows to t, row r at element offset where(r), which may be NOWHERE. 16-bit results
 * pass through the warp's own rows of a tile that is no longer needed, to leave in pieces of 16 bytes; so do fp32 results
 * that may have to be added to what is there (ADDS), as they would be a third of a kernel's code otherwise. */
template <int D, int MT, bool ADDS, class Where, class T>
__device__ inline void store_rows(const float (&Y)[MT][D / 8][4], const view &t, int width, bool accumulate,
                                  uint32_t tile, char *tile_memory, int row, Where where, T type)
{
    const int lane = threadIdx.x % 32, g = lane / 4, pair = lane % 4 * 2;
    if (!ADDS && t.dtype == HEED_F32) {
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
    if (ADDS && t.dtype == HEED_F32) { /* eight rows at a time; eight columns n of row r lie at place n ^ r */
        float *const rows = (float *)(tile_memory + row * D * 2);
        const int columns = min(width, D); /* of a row, others may have the rest */
#pragma unroll
        for (int part = 0; part < 2 * MT; part++) {
            __syncwarp();
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                *(float2 *)(rows + g * D + (n ^ g) * 8 + pair) = make_float2(Y[part / 2][n][part % 2 * 2],
                                                                             Y[part / 2][n][part % 2 * 2 + 1]);
            __syncwarp();
#pragma unroll 1
            for (int r = 0; r < 8; r++) {
                const int64_t at = where(row + part * 8 + r);
                if (at == NOWHERE)
                    continue;
#pragma unroll 1
                for (int c = lane; c < columns; c += 32) {
                    float &to = ((float *)t.data)[at + c];
                    to = rows[r * D + (c ^ r * 8)] + (accumulate ? to : 0.0f);
                }
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
                              pair * 2) = pack(Y[m][n][half * 2], Y[m][n][half * 2 + 1], type);
            }
    __syncwarp();
#pragma unroll 2
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

#endif
