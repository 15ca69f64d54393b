/* The vocabulary of the portable kernels: products of tiles in plain fp32 fused multiply-adds, from memory of any
 * dtype, stride and alignment.
 *
 * A block of 128 threads owns ROWS rows and meets COLUMNS columns at a time: 128 x 64 for results 64 wide, 64 x 128
 * for results 128 wide, so that a thread's share of every tile and of every result is 8 x 8, in blocks of 4 x 4 (a
 * kernel with two results meets half as many columns, 8 x 4 to a thread: there are no registers for more):
 *     row    of r:  4 g + r % 4 + 4 RG (r / 4)           g = thread / CG
 *     column of c:  4 t + c % 4 + 4 CG (c / 4)           t = thread % CG
 *
 * Operands pass through shared memory a piece at a time, the next one on its way while one is used:
 *     multiply_rows     X += A B^T       A ROWS rows, B COLUMNS rows, both in memory     (Q K^T, dO V^T)
 *     multiply_tile     Y += X B         X in shared memory, B COLUMNS rows in memory    (P V, dS K)
 * The summed dimension comes first there, so that what a thread needs for one step lies together, and neighbouring
 * registers: an FMA whose operands all lie in one bank of the register file takes twice as long. PAD numbers between
 * lines keep threads that write side by side from meeting in one bank of shared memory.
 *
 * A row is named by the offset of its first element, kept in shared memory; NOWHERE is a row of zeros. */
#ifndef HEED_CUDA_TILE_FP32_CUH
#define HEED_CUDA_TILE_FP32_CUH

#include "scores.cuh"
#include "sm75.cuh"

constexpr int THREADS = 128, STEP = 16, PAD = 4; /* STEP: of multiply_rows, along the rows */

/* Width is that of the block's slice of the result: a wider head is cut into slices, one block each. N: a thread's
 * columns of a tile. */
template <int WIDTH, int N = 8> struct shared_fp32 {
    static constexpr int CG = WIDTH / 8, RG = THREADS / CG, ROWS = 8 * RG, COLUMNS = N * CG;
    static constexpr int SLICE_STEP = 2048 / WIDTH; /* of multiply_tile, rows */
    float stage[2][STEP * (ROWS + PAD + COLUMNS + PAD)];
    float tile[COLUMNS * ROWS + COLUMNS / 4 * PAD];
    int64_t row[2][ROWS], column[2][COLUMNS]; /* offsets: of Q and dO, or K and V */
    int low[128], high[128];                  /* of the queries, which may be rows or columns */
    float lse[128], delta[128];
    span sequence; /* here, and not in registers, for the few times they are looked at */
    head of;
    static __device__ int g() { return threadIdx.x / CG; }
    static __device__ int t() { return threadIdx.x % CG; }
    static __device__ int row_of(int r) { return 4 * g() + r % 4 + 4 * RG * (r / 4); }
    static __device__ int column_of(int c) { return 4 * t() + c % 4 + 4 * CG * (c / 4); }
};

/* Which sequence and head the block works on. */
template <int WIDTH, int N> __device__ inline void meet_head(shared_fp32<WIDTH, N> &s, const args &a, int b, int h)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        s.sequence = span_of(a, b);
        s.of = head_of(a, s.sequence, h);
    }
    __syncthreads();
}

/* ---- Memory to shared memory ------------------------------------------------------------------------------------- */

/* Rows of a tensor: `at` holds their offsets, columns from `width` on are zero. */
struct rows_of {
    const view &t;
    const int64_t *at;
    int width;
};

/* STEP columns of COUNT rows, from column `step` on, to lines, one for each column. */
template <int COUNT> __device__ inline void copy_columns(float *lines, const rows_of &m, int step)
{
    const int k = threadIdx.x % 8, first = threadIdx.x / 8;
    const int64_t down = m.t.stride[3];
    auto place = [&](int i, int half) { return lines + (k + 8 * half) * (COUNT + PAD) + first + i; };
    if (m.t.dtype == HEED_F32) {
#pragma unroll 4
        for (int i = 0; i < COUNT; i += THREADS / 8) {
            const int64_t at = m.at[first + i];
            const float *from = (const float *)m.t.data + (at == NOWHERE ? 0 : at + (step + k) * down);
#pragma unroll
            for (int half = 0; half < STEP / 8; half++) {
                const bool real = at != NOWHERE && step + k + 8 * half < m.width;
                copy_async<4>(shared_address(place(i, half)), real ? from + 8 * half * down : from, real ? 4 : 0);
            }
        }
    } else
#pragma unroll 4
        for (int i = 0; i < COUNT; i += THREADS / 8)
#pragma unroll
            for (int half = 0; half < STEP / 8; half++) {
                const int64_t at = m.at[first + i];
                const bool real = at != NOWHERE && step + k + 8 * half < m.width;
                *place(i, half) = real ? load(m.t, at + (step + k + 8 * half) * down) : 0.0f;
            }
}

template <int WIDTH, int N>
__device__ inline void start_rows(shared_fp32<WIDTH, N> &s, int slot, const rows_of &A, const rows_of &B, int step)
{
    copy_columns<s.ROWS>(s.stage[slot], A, step);
    copy_columns<s.COLUMNS>(s.stage[slot] + STEP * (s.ROWS + PAD), B, step);
    commit_copies();
}

/* Columns first .. first + WIDTH of rows `step` and following. */
template <int WIDTH, int N>
__device__ inline void start_slice(shared_fp32<WIDTH, N> &s, int slot, const rows_of &B, int step, int first)
{
    constexpr int PARTS = WIDTH / 4, AT_ONCE = THREADS / PARTS;
    const int own = threadIdx.x / PARTS, column = first + threadIdx.x % PARTS * 4;
    float *to = s.stage[slot] + threadIdx.x * 4;
    if (B.t.dtype == HEED_F32 && B.t.vector) {
        const int bytes = max(0, min(16, (B.width - column) * 4));
#pragma unroll
        for (int r = 0; r < s.SLICE_STEP; r += AT_ONCE) {
            const int64_t at = B.at[step + own + r];
            copy_async<16>(shared_address(to + r * WIDTH), B.t.data + (at == NOWHERE ? 0 : at + column) * 4,
                           at == NOWHERE ? 0 : bytes);
        }
    } else
#pragma unroll 2
        for (int r = 0; r < s.SLICE_STEP; r += AT_ONCE) {
            const int64_t at = B.at[step + own + r];
#pragma unroll
            for (int e = 0; e < 4; e++)
                to[r * WIDTH + e] = at != NOWHERE && column + e < B.width ? load(B.t, at + (column + e) * B.t.stride[3])
                                                                          : 0.0f;
        }
    commit_copies();
}

/* ---- Products ---------------------------------------------------------------------------------------------------- */

template <int N> __device__ inline void clear(float (&x)[8][N])
{
#pragma unroll
    for (int m = 0; m < 8; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
            x[m][n] = 0.0f;
}

__device__ inline void load_four(float *x, const float *from) { *(float4 *)x = *(const float4 *)from; }

template <int N> __device__ inline void outer_product(float (&x)[8][N], const float (&a)[8], const float (&b)[N])
{
#pragma unroll
    for (int c = 0; c < N; c++)
#pragma unroll
        for (int r = 0; r < 8; r++)
            x[r][c] = fmaf(a[r], b[c], x[r][c]);
}

/* X += A B^T. The first step must have been started, in slot; then(slot) may start the first of the next product. Ends
 * with slot being the one not in use. */
template <int WIDTH, int N, class Then>
__device__ inline void multiply_rows(float (&X)[8][N], shared_fp32<WIDTH, N> &s, int &slot, const rows_of &A,
                                     const rows_of &B, Then then)
{
    for (int step = 0; step < A.width; step += STEP, slot ^= 1) {
        wait_copies<0>();
        __syncthreads();
        if (step + STEP < A.width)
            start_rows(s, slot ^ 1, A, B, step + STEP);
        else
            then(slot ^ 1);
        const float *a_lines = s.stage[slot] + 4 * s.g(), *b_lines = s.stage[slot] + STEP * (s.ROWS + PAD) + 4 * s.t();
#pragma unroll
        for (int k = 0; k < STEP; k++) {
            float a[8], b[N];
            load_four(a, a_lines + k * (s.ROWS + PAD));
            load_four(a + 4, a_lines + k * (s.ROWS + PAD) + 4 * s.RG);
#pragma unroll
            for (int c = 0; c < N; c += 4)
                load_four(b + c, b_lines + k * (s.COLUMNS + PAD) + s.CG * c);
            outer_product(X, a, b);
        }
    }
}

/* Row `row` and following of one column of the shared tile. */
template <int WIDTH, int N> __device__ inline float *tile_at(shared_fp32<WIDTH, N> &s, int column, int row)
{
    return s.tile + column * s.ROWS + column / 4 * PAD + row;
}

template <int WIDTH, int N> __device__ inline void write_tile(shared_fp32<WIDTH, N> &s, const float (&X)[8][N])
{
#pragma unroll
    for (int c = 0; c < N; c++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(float4 *)tile_at(s, s.column_of(c), s.row_of(4 * half)) = make_float4(X[4 * half][c], X[4 * half + 1][c],
                                                                                    X[4 * half + 2][c],
                                                                                    X[4 * half + 3][c]);
}

/* Y += X B for columns first .. first + WIDTH of B's rows, X being the shared tile, which all threads have written or
 * are about to have. The first step must have been started, as above. */
template <int WIDTH, int N>
__device__ inline void multiply_tile(float (&Y)[8][8], shared_fp32<WIDTH, N> &s, int &slot, const rows_of &B, int first)
{
#pragma unroll 1
    for (int step = 0; step < s.COLUMNS; step += s.SLICE_STEP, slot ^= 1) {
        wait_copies<0>();
        __syncthreads();
        if (step + s.SLICE_STEP < s.COLUMNS)
            start_slice(s, slot ^ 1, B, step + s.SLICE_STEP, first);
        const float *a_columns = tile_at(s, step, 4 * s.g()), *b_rows = s.stage[slot] + 4 * s.t();
#pragma unroll
        for (int k = 0; k < s.SLICE_STEP; k++) {
            float a[8], b[8];
            load_four(a, a_columns + k * s.ROWS + k / 4 * PAD);
            load_four(a + 4, a_columns + k * s.ROWS + k / 4 * PAD + 4 * s.RG);
            load_four(b, b_rows + k * WIDTH);
            load_four(b + 4, b_rows + k * WIDTH + 4 * s.CG);
            outer_product(Y, a, b);
        }
    }
}

/* ---- Registers to memory ----------------------------------------------------------------------------------------- */

__device__ inline void store_part(const view &t, int64_t row, int c, int width, float4 x, bool accumulate)
{
    if (t.vector && c + 4 <= width && t.dtype == HEED_F32) {
        float4 *to = (float4 *)((float *)t.data + row + c);
        if (accumulate) {
            float4 old = *to;
            x.x += old.x, x.y += old.y, x.z += old.z, x.w += old.w;
        }
        *to = x;
        return;
    }
    const float part[4] = { x.x, x.y, x.z, x.w };
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int64_t at = row + (c + e) * t.stride[3];
        if (c + e < width)
            store(t, at, accumulate ? load(t, at) + part[e] : part[e]);
    }
}

/* A thread's share of a slice of the result, columns first .. first + WIDTH; row_offset(r) may be NOWHERE. */
template <int WIDTH, class Offset>
__device__ inline void store_slice(const float (&Y)[8][8], const view &t, int first, int width, bool accumulate,
                                   Offset row_offset)
{
    typedef shared_fp32<WIDTH> s;
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const int64_t row = row_offset(s::row_of(r));
        if (row == NOWHERE)
            continue;
#pragma unroll
        for (int c = 0; c < 8; c += 4)
            store_part(t, row, first + s::column_of(c), width,
                       make_float4(Y[r][c], Y[r][c + 1], Y[r][c + 2], Y[r][c + 3]), accumulate);
    }
}

/* ---- Scores ------------------------------------------------------------------------------------------------------ */

/* Some of a thread's scores as scores.cuh wants to see them: COUNT of its queries from `first` on, times eight
 * keys. Queries are the tile's rows, or with KEY_MAJOR its columns. */
template <int WIDTH, bool KEY_MAJOR, int COUNT> struct own_scores {
    typedef shared_fp32<WIDTH> s;
    static constexpr int R = COUNT, C = 8;
    static constexpr bool EXACT = true;
    static constexpr int FOUR_KEYS = 4 * (KEY_MAJOR ? s::RG : s::CG);
    float X[COUNT][8];
    const int *lows, *highs; /* of the tile's first query */
    int i0, n0;              /* the tile's first query and key */
    int first;
    __device__ int down(int r) const { return KEY_MAJOR ? s::column_of(first + r) : s::row_of(first + r); }
    __device__ float &at(int r, int c) { return X[r][c]; }
    __device__ int row(int r) const { return i0 + down(r); }
    static __device__ constexpr int apart(int c) { return c % 4 + FOUR_KEYS * (c / 4); }
    __device__ int key(int c) const { return n0 + 4 * (KEY_MAJOR ? s::g() : s::t()) + apart(c); }
    __device__ int low(int r) const { return lows[down(r)]; }
    __device__ int high(int r) const { return highs[down(r)]; }
};

/* A thread's dropout bits: bit 8 r + c is set where P of its query r and key c is kept. Eight keys of one Philox are
 * those of two neighbouring threads, which share the draws where they are of one warp, as with queries for rows. */
template <int WIDTH, bool KEY_MAJOR, int QUERIES>
__device__ inline uint64_t draw_all(const args &a, const span &s, const head &x, int i0, int n0)
{
    typedef own_scores<WIDTH, KEY_MAJOR, QUERIES> tile;
    constexpr int OTHER = KEY_MAJOR ? shared_fp32<WIDTH>::CG : 1; /* lanes to the neighbour */
    const uint64_t seed = seed_of(a);
    const tile t = { {}, NULL, NULL, i0, n0, 0 };
    const int64_t first = s.r0 + n0;
    uint64_t kept = 0;
    if (s.r_step != 1 || first % 8) {
#pragma unroll 1
        for (int r = 0; r < QUERIES; r++)
            kept |= (uint64_t)draw(t, r, a, s, x, seed) << 8 * r;
        return kept;
    }
    /* The thread with the lower keys draws the first eight, which hold c = 0 .. 3 of both, and the other the rest. */
    const int upper = t.key(0) - n0 & 4 ? 1 : 0;
    const uint32_t eight = (uint32_t)(uint64_t)((s.r0 + t.key(upper * 4)) >> 3);
#pragma unroll 1
    for (int r = QUERIES - 1; r >= 0; r--) {
        const uint32_t p = (uint32_t)(uint64_t)(s.p0 + t.row(r) * s.p_step);
        const uint32_t mine = kept_of_eight(philox(seed, make_uint4(eight, p, x.h, s.b)), a.drop_below);
        const uint32_t theirs = __shfl_xor_sync(~0u, mine, OTHER);
        const uint32_t low = (upper ? theirs : mine) >> 4 * upper, high = (upper ? mine : theirs) >> 4 * upper;
        kept = kept << 8 | (low & 15) | (high & 15) << 4;
    }
    return kept;
}

#endif
