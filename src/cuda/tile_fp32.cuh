/* The vocabulary of the portable kernels: products of tiles in plain fp32 fused multiply-adds, from memory of any
 * dtype, stride and alignment.
 *
 * A block owns 128 rows and meets 64 columns at a time. Its threads form 16 row groups times GROUPS column groups
 * (8 or 16); a thread's share of a 128 x 64 tile is 8 x (64 / GROUPS), in blocks of 4 x 4 so that each operand is read
 * from shared memory 16 bytes at a time:
 *     row    of r:  4 g + r % 4 + 64 (r / 4)             g = thread / GROUPS
 *     column of c:  4 t + c % 4 + 4 GROUPS (c / 4)       t = thread % GROUPS
 *
 * Operands pass through shared memory in steps of 8 along the summed dimension, two steps in flight:
 *     multiply_rows     X += A B^T       A 128 rows, B 64 rows, both in memory           (Q K^T, dO V^T)
 *     multiply_tile     Y += X B         X in shared memory, B 64 rows in memory         (P V, dS K)
 * A row is named by the offset of its first element, kept in shared memory; NOWHERE is a row of zeros. */
#ifndef HEED_CUDA_TILE_FP32_CUH
#define HEED_CUDA_TILE_FP32_CUH

#include "scores.cuh"

constexpr int ROWS = 128, COLUMNS = 64, STEP = 8;

/* Width is that of the block's slice of the result: a wider head is cut into slices, one block each. */
template <int GROUPS, int WIDTH> struct shared_fp32 {
    union {
        struct {
            float a[2][STEP][ROWS], b[2][STEP][COLUMNS];
        } rows;
        float slice[2][STEP][WIDTH];
    } stage;
    float tile[COLUMNS][ROWS];                /* a 128 x 64 tile, columns first, see tile_at() */
    int64_t row[2][ROWS], column[2][COLUMNS]; /* offsets: of Q and dO, or K and V */
    int low[ROWS], high[ROWS];
    float lse[ROWS], delta[ROWS];
    span sequence; /* here, and not in registers, for the few times they are looked at */
    head of;
};

/* Which sequence and head the block works on. */
template <int GROUPS, int WIDTH>
__device__ inline void meet_head(shared_fp32<GROUPS, WIDTH> &s, const args &a, int b, int h)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        s.sequence = span_of(a, b);
        s.of = head_of(a, s.sequence, h);
    }
    __syncthreads();
}

template <int GROUPS> __device__ inline int group_row() { return threadIdx.x / GROUPS * 4; }
template <int GROUPS> __device__ inline int group_column() { return threadIdx.x % GROUPS * 4; }
__device__ constexpr int row_of(int g, int r) { return g + r % 4 + 64 * (r / 4); }
template <int GROUPS> __device__ constexpr int column_of(int t, int c) { return t + c % 4 + 4 * GROUPS * (c / 4); }

/* ---- Memory to registers ----------------------------------------------------------------------------------------- */

template <int E> __device__ inline void unpack(float (&x)[E], const uint32_t (&words)[E / 2], int dtype)
{
#pragma unroll
    for (int e = 0; e < E; e += 2) {
        float2 pair = dtype == HEED_F16 ? __half22float2(*(const __half2 *)&words[e / 2])
                                        : __bfloat1622float2(*(const __nv_bfloat162 *)&words[e / 2]);
        x[e] = pair.x, x[e + 1] = pair.y;
    }
}

/* E = 2, 4 or 8 elements of a row, from column c on, a multiple of E; zero from width on. */
template <int E> __device__ inline void load_part(float (&x)[E], const view &t, int64_t row, int c, int width)
{
    if (row != NOWHERE && t.vector && c + E <= width) {
        if (t.dtype == HEED_F32) {
            const float *from = (const float *)t.data + row + c;
#pragma unroll
            for (int e = 0; e < E; e += 4)
                if (E >= 4)
                    *(float4 *)&x[e] = *(const float4 *)(from + e);
                else
                    *(float2 *)&x[e] = *(const float2 *)(from + e);
        } else {
            const char *from = t.data + (row + c) * 2;
            uint32_t words[E / 2];
            if (E == 8)
                *(uint4 *)words = *(const uint4 *)from;
            else if (E == 4)
                *(uint2 *)words = *(const uint2 *)from;
            else
                words[0] = *(const uint32_t *)from;
            unpack<E>(x, words, t.dtype);
        }
        return;
    }
#pragma unroll
    for (int e = 0; e < E; e++)
        x[e] = row != NOWHERE && c + e < width ? load(t, row + (c + e) * t.stride[3]) : 0.0f;
}

/* ---- Products ---------------------------------------------------------------------------------------------------- */

template <int M, int N> __device__ inline void clear(float (&x)[M][N])
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
            x[m][n] = 0.0f;
}

template <int M, int N> __device__ inline void outer_product(float (&x)[M][N], const float (&a)[M], const float (&b)[N])
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
            x[m][n] = fmaf(a[m], b[n], x[m][n]);
}

/* X += A B^T over the given depth. Starts and ends with all threads in step. */
template <int GROUPS, int WIDTH>
__device__ inline void multiply_rows(float (&X)[8][COLUMNS / GROUPS], shared_fp32<GROUPS, WIDTH> &s, const view &A,
                                     const int64_t *a_rows, const view &B, const int64_t *b_rows, int depth)
{
    constexpr int EA = STEP * ROWS / (16 * GROUPS), EB = STEP * COLUMNS / (16 * GROUPS);
    const int a_row = threadIdx.x % ROWS, a_from = threadIdx.x / ROWS * EA;
    const int b_row = threadIdx.x % COLUMNS, b_from = threadIdx.x / COLUMNS * EB;
    const int64_t a_at = a_rows[a_row], b_at = b_rows[b_row];
    const int g = group_row<GROUPS>(), t = group_column<GROUPS>();
    float a_next[EA], b_next[EB];

    load_part<EA>(a_next, A, a_at, a_from, depth);
    load_part<EB>(b_next, B, b_at, b_from, depth);
    for (int step = 0, slot = 0; step < depth; step += STEP, slot ^= 1) {
#pragma unroll
        for (int e = 0; e < EA; e++)
            s.stage.rows.a[slot][a_from + e][a_row] = a_next[e];
#pragma unroll
        for (int e = 0; e < EB; e++)
            s.stage.rows.b[slot][b_from + e][b_row] = b_next[e];
        __syncthreads();
        if (step + STEP < depth) {
            load_part<EA>(a_next, A, a_at, step + STEP + a_from, depth);
            load_part<EB>(b_next, B, b_at, step + STEP + b_from, depth);
        }
#pragma unroll
        for (int k = 0; k < STEP; k++) {
            float a[8], b[COLUMNS / GROUPS];
            *(float4 *)&a[0] = *(float4 *)&s.stage.rows.a[slot][k][g];
            *(float4 *)&a[4] = *(float4 *)&s.stage.rows.a[slot][k][g + 64];
#pragma unroll
            for (int c = 0; c < COLUMNS / GROUPS; c += 4)
                *(float4 *)&b[c] = *(float4 *)&s.stage.rows.b[slot][k][column_of<GROUPS>(t, c)];
            outer_product(X, a, b);
        }
    }
    __syncthreads();
}

/* Rows 4 m4 .. +3 of one column of the shared tile. The permutation keeps both the writes, neighbouring threads at
 * columns 4 apart, and the reads, all threads at one column, free of bank conflicts. */
__device__ inline float4 *tile_at(float (*tile)[ROWS], int column, int m4)
{
    return (float4 *)&tile[column][4 * (m4 ^ (column / 4 % 8))];
}

template <int GROUPS, int WIDTH>
__device__ inline void write_tile(shared_fp32<GROUPS, WIDTH> &s, const float (&X)[8][COLUMNS / GROUPS])
{
    const int g = group_row<GROUPS>() / 4, t = group_column<GROUPS>();
#pragma unroll
    for (int c = 0; c < COLUMNS / GROUPS; c++) {
        int column = column_of<GROUPS>(t, c);
        *tile_at(s.tile, column, g) = make_float4(X[0][c], X[1][c], X[2][c], X[3][c]);
        *tile_at(s.tile, column, g + 16) = make_float4(X[4][c], X[5][c], X[6][c], X[7][c]);
    }
}

/* The element of the shared tile that thread owns as X[r][c]. */
template <int GROUPS, int WIDTH> __device__ inline float &own_element(shared_fp32<GROUPS, WIDTH> &s, int r, int c)
{
    float4 *four = tile_at(s.tile, column_of<GROUPS>(group_column<GROUPS>(), c),
                           group_row<GROUPS>() / 4 + 16 * (r / 4));
    return ((float *)four)[r % 4];
}

/* Y += X B for columns first .. first + WIDTH of B's rows, X being the shared tile. Starts and ends with all threads
 * in step; the tile must have been written before. */
template <int GROUPS, int WIDTH>
__device__ inline void multiply_tile(float (&Y)[8][WIDTH / GROUPS], shared_fp32<GROUPS, WIDTH> &s, const view &B,
                                     const int64_t *b_rows, int first, int width)
{
    constexpr int THREADS = 16 * GROUPS, EACH = STEP * WIDTH / THREADS, E = EACH < 4 ? EACH : 4, PARTS = EACH / E;
    constexpr int APART = THREADS * E / WIDTH; /* rows between a thread's parts */
    const int b_row = threadIdx.x * E / WIDTH, b_from = threadIdx.x * E % WIDTH;
    const int g = group_row<GROUPS>() / 4, t = group_column<GROUPS>();
    float next[PARTS][E];

#pragma unroll
    for (int part = 0; part < PARTS; part++)
        load_part<E>(next[part], B, b_rows[b_row + part * APART], first + b_from, width);
    for (int step = 0, slot = 0; step < COLUMNS; step += STEP, slot ^= 1) {
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int e = 0; e < E; e++)
                s.stage.slice[slot][b_row + part * APART][b_from + e] = next[part][e];
        __syncthreads();
        if (step + STEP < COLUMNS)
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                load_part<E>(next[part], B, b_rows[step + STEP + b_row + part * APART], first + b_from, width);
#pragma unroll
        for (int k = 0; k < STEP; k++) {
            float a[8], b[WIDTH / GROUPS];
            *(float4 *)&a[0] = *tile_at(s.tile, step + k, g);
            *(float4 *)&a[4] = *tile_at(s.tile, step + k, g + 16);
#pragma unroll
            for (int c = 0; c < WIDTH / GROUPS; c += 4)
                *(float4 *)&b[c] = *(float4 *)&s.stage.slice[slot][k][column_of<GROUPS>(t, c)];
            outer_product(Y, a, b);
        }
    }
    __syncthreads();
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
template <int GROUPS, int WIDTH, class Offset>
__device__ inline void store_slice(const float (&Y)[8][WIDTH / GROUPS], const view &t, int first, int width,
                                   bool accumulate, Offset row_offset)
{
    const int g = group_row<GROUPS>(), column = group_column<GROUPS>();
#pragma unroll
    for (int r = 0; r < 8; r++) {
        int64_t row = row_offset(row_of(g, r));
        if (row == NOWHERE)
            continue;
#pragma unroll
        for (int c = 0; c < WIDTH / GROUPS; c += 4)
            store_part(t, row, first + column_of<GROUPS>(column, c), width,
                       make_float4(Y[r][c], Y[r][c + 1], Y[r][c + 2], Y[r][c + 3]), accumulate);
    }
}

#endif
