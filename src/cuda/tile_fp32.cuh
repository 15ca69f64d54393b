/* The vocabulary of the portable kernels: products of tiles in plain fp32 fused multiply-adds, from memory of any
 * dtype, stride and alignment.
 *
 * A block of 128 threads owns ROWS rows and meets COLUMNS columns at a time: 128 x 64 for results 64 wide, 64 x 128
 * for results 128 wide, so that a thread's share of every tile and of every result is 8 x 8, in blocks of 4 x 4:
 *     row    of r:  4 g + r % 4 + 4 RG (r / 4)           g = thread / CG
 *     column of c:  4 t + c % 4 + 4 CG (c / 4)           t = thread % CG
 *
 * Operands pass through shared memory a piece at a time, the next one on its way while one is used:
 *     multiply_rows     X += A B^T       A ROWS rows, B COLUMNS rows, both in memory     (Q K^T, dO V^T)
 *     multiply_tile     Y += X B         X in shared memory, B COLUMNS rows in memory    (P V, dS K)
 * A thread reads four numbers of a row at once, 16 such chunks for 4 x 64 multiply-adds. Rows lie in shared memory in the
 * order r RG + g (c CG + t), so that what neighbouring threads read at once lies in different banks.
 *
 * A row is named by the offset of its first element, kept in shared memory; NOWHERE is a row of zeros. */
#ifndef HEED_CUDA_TILE_FP32_CUH
#define HEED_CUDA_TILE_FP32_CUH

#include "scores.cuh"
#include "sm75.cuh"

constexpr int THREADS = 128, STEP = 16; /* STEP: of multiply_rows, along the rows */

/* Width is that of the block's slice of the result: a wider head is cut into slices, one block each. UNROLL: how much of
 * a product is one stretch of code, in chunks of four. */
template <int WIDTH, int UNROLL_> struct shared_fp32 {
    static constexpr int UNROLL = UNROLL_;
    static constexpr int CG = WIDTH / 8, RG = THREADS / CG, ROWS = 8 * RG, COLUMNS = 8 * CG;
    static constexpr int SLICE_STEP = 2048 / WIDTH; /* of multiply_tile, rows */
    static constexpr int LINE = COLUMNS + 4;        /* of the tile */
    float stage[2][STEP * (ROWS + COLUMNS)];
    float tile[ROWS * LINE];
    int64_t row[2][ROWS], column[2][COLUMNS]; /* offsets: of Q and dO, or K and V */
    int low[128], high[128];                  /* of the queries, which may be rows or columns */
    float lse[128], delta[128];
    span sequence; /* here, and not in registers, for the few times they are looked at */
    head of;
    static __device__ int g() { return threadIdx.x / CG; }
    static __device__ int t() { return threadIdx.x % CG; }
    static __device__ int row_of(int r) { return 4 * g() + r % 4 + 4 * RG * (r / 4); }
    static __device__ int column_of(int c) { return 4 * t() + c % 4 + 4 * CG * (c / 4); }
    /* Where the thread's row r of the tile begins; and where any row does. */
    __device__ float *line(int r) { return tile + (r * RG + g()) * LINE; }
    __device__ float *line_at(int row) { return tile + ((row % 4 + row / (4 * RG) * 4) * RG + row / 4 % RG) * LINE; }
};

/* Which sequence and head the block works on. */
template <int WIDTH, int UNROLL>
__device__ inline void meet_head(shared_fp32<WIDTH, UNROLL> &s, const args &a, int b, int h)
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

/* Four numbers of a row from `column` on. */
__device__ inline float4 load_part(const rows_of &m, int64_t at, int column)
{
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; e++)
        x[e] = at != NOWHERE && column + e < m.width ? load(m.t, at + (column + e) * m.t.stride[3]) : 0.0f;
    return make_float4(x[0], x[1], x[2], x[3]);
}

/* STEP columns of COUNT rows, from column `step` on. Chunks of a row are exchanged, see multiply_rows(). */
template <int COUNT> __device__ inline void copy_columns(float *stage, const rows_of &m, int step)
{
    constexpr int GROUPS = COUNT / 8, AT_ONCE = THREADS / 4;
    const int chunk = threadIdx.x % 4, place = threadIdx.x / 4, column = step + 4 * chunk;
    const int64_t *at = m.at + 4 * (place % GROUPS) + place / GROUPS;
    float *to = stage + place * STEP + 4 * (chunk ^ place / 2 % 4);
    auto down = [](int i) { return i / GROUPS % 4 + i / GROUPS / 4 * 4 * GROUPS; }; /* rows, for i places */
    if (m.t.dtype == HEED_F32 && m.t.vector) {
        const int bytes = max(0, min(16, (m.width - column) * 4));
#pragma unroll
        for (int i = 0; i < COUNT; i += AT_ONCE) {
            const int64_t row = at[down(i)];
            copy_async<16>(shared_address(to + i * STEP), m.t.data + (row == NOWHERE ? 0 : row + column) * 4,
                           row == NOWHERE ? 0 : bytes);
        }
    } else
#pragma unroll 1
        for (int i = 0; i < COUNT; i += AT_ONCE)
            *(float4 *)(to + i * STEP) = load_part(m, at[down(i)], column);
}

template <int WIDTH, int UNROLL>
__device__ inline void start_rows(shared_fp32<WIDTH, UNROLL> &s, int slot, const rows_of &A, const rows_of &B, int step)
{
    copy_columns<s.ROWS>(s.stage[slot], A, step);
    copy_columns<s.COLUMNS>(s.stage[slot] + STEP * s.ROWS, B, step);
    commit_copies();
}

/* Columns first .. first + WIDTH of rows `step` and following. */
template <int WIDTH, int UNROLL>
__device__ inline void start_slice(shared_fp32<WIDTH, UNROLL> &s, int slot, const rows_of &B, int step, int first)
{
    constexpr int PARTS = WIDTH / 4, AT_ONCE = THREADS / PARTS;
    const int column = first + threadIdx.x % PARTS * 4;
    const int64_t *at = B.at + step + threadIdx.x / PARTS;
    float *to = s.stage[slot] + threadIdx.x * 4;
    if (B.t.dtype == HEED_F32 && B.t.vector) {
        const int bytes = max(0, min(16, (B.width - column) * 4));
#pragma unroll
        for (int r = 0; r < s.SLICE_STEP; r += AT_ONCE) {
            const int64_t row = at[r];
            copy_async<16>(shared_address(to + r * WIDTH), B.t.data + (row == NOWHERE ? 0 : row + column) * 4,
                           row == NOWHERE ? 0 : bytes);
        }
    } else
#pragma unroll 1
        for (int r = 0; r < s.SLICE_STEP; r += AT_ONCE)
            *(float4 *)(to + r * WIDTH) = load_part(B, at[r], column);
    commit_copies();
}

/* ---- Products ---------------------------------------------------------------------------------------------------- */

__device__ inline void clear(float (&x)[8][8])
{
#pragma unroll
    for (int r = 0; r < 8; r++)
#pragma unroll
        for (int c = 0; c < 8; c++)
            x[r][c] = 0.0f;
}

__device__ inline void load_four(float *x, const float *from) { *(float4 *)x = *(const float4 *)from; }

/* X += A B^T. The first step must have been started, in slot; then(slot) may start the first of the next product. Ends
 * with slot being the one not in use. Chunk k of the row at place p lies where chunk k ^ p / 2 % 4 would: eight
 * neighbouring places are two rows of all banks. */
template <int WIDTH, int UNROLL, class Then>
__device__ inline void multiply_rows(float (&X)[8][8], shared_fp32<WIDTH, UNROLL> &s, int &slot, const rows_of &A,
                                     const rows_of &B, Then then)
{
    const int a_turn = s.g() / 2 % 4 * 4, b_turn = s.t() / 2 % 4 * 4;
    for (int step = 0; step < A.width; step += STEP, slot ^= 1) {
        wait_copies<0>();
        __syncthreads();
        if (step + STEP < A.width)
            start_rows(s, slot ^ 1, A, B, step + STEP);
        else
            then(slot ^ 1);
        const float *a_rows = s.stage[slot] + STEP * s.g(), *b_rows = s.stage[slot] + STEP * (s.ROWS + s.t());
#pragma unroll UNROLL
        for (int k = 0; k < STEP; k += 4) {
            float b[8][4];
#pragma unroll
            for (int c = 0; c < 8; c++)
                load_four(b[c], b_rows + c * s.CG * STEP + (k ^ b_turn));
#pragma unroll
            for (int r = 0; r < 8; r++) {
                float a[4];
                load_four(a, a_rows + r * s.RG * STEP + (k ^ a_turn));
#pragma unroll
                for (int e = 0; e < 4; e++)
#pragma unroll
                    for (int c = 0; c < 8; c++)
                        X[r][c] = fmaf(a[e], b[c][e], X[r][c]);
            }
        }
    }
}

template <int WIDTH, int UNROLL>
__device__ inline void write_tile(shared_fp32<WIDTH, UNROLL> &s, const float (&X)[8][8])
{
#pragma unroll
    for (int r = 0; r < 8; r++)
#pragma unroll
        for (int c = 0; c < 8; c += 4)
            *(float4 *)(s.line(r) + s.column_of(c)) = *(const float4 *)&X[r][c];
}

template <int WIDTH, int UNROLL> __device__ inline void read_tile(shared_fp32<WIDTH, UNROLL> &s, float (&X)[8][8])
{
#pragma unroll
    for (int r = 0; r < 8; r++)
#pragma unroll
        for (int c = 0; c < 8; c += 4)
            load_four(&X[r][c], s.line(r) + s.column_of(c));
}

/* Y += X B for columns first .. first + WIDTH of B's rows, X being the shared tile, which all threads have written or
 * are about to have. The first step must have been started, as above. */
template <int WIDTH, int UNROLL>
__device__ inline void multiply_tile(float (&Y)[8][8], shared_fp32<WIDTH, UNROLL> &s, int &slot, const rows_of &B,
                                     int first)
{
#pragma unroll 1
    for (int step = 0; step < s.COLUMNS; step += s.SLICE_STEP, slot ^= 1) {
        wait_copies<0>();
        __syncthreads();
        if (step + s.SLICE_STEP < s.COLUMNS)
            start_slice(s, slot ^ 1, B, step + s.SLICE_STEP, first);
        const float *a_rows = s.line(0) + step, *b_rows = s.stage[slot] + 4 * s.t();
#pragma unroll UNROLL
        for (int k = 0; k < s.SLICE_STEP; k += 4) {
            float a[8][4];
#pragma unroll
            for (int r = 0; r < 8; r++)
                load_four(a[r], a_rows + r * s.RG * s.LINE + k);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float b[8];
                load_four(b, b_rows + (k + e) * WIDTH);
                load_four(b + 4, b_rows + (k + e) * WIDTH + 4 * s.CG);
#pragma unroll
                for (int c = 0; c < 8; c++)
#pragma unroll
                    for (int r = 0; r < 8; r++)
                        Y[r][c] = fmaf(a[r][e], b[c], Y[r][c]);
            }
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

/* A thread's share of a slice of the result, columns first .. first + WIDTH, by way of the shared tile, which nobody else
 * reads any more; row_offset(r) may be NOWHERE. */
template <int WIDTH, int UNROLL, class Offset>
__device__ inline void store_slice(const float (&Y)[8][8], shared_fp32<WIDTH, UNROLL> &s, const view &t, int first,
                                   int width, bool accumulate, Offset row_offset)
{
    write_tile(s, Y);
#pragma unroll 1
    for (int r = 0; r < 8; r++) {
        const int64_t row = row_offset(s.row_of(r));
        if (row != NOWHERE)
#pragma unroll 1
            for (int c = 0; c < 8; c += 4)
                store_part(t, row, first + s.column_of(c), width, *(const float4 *)(s.line(r) + s.column_of(c)),
                           accumulate);
    }
}

/* ---- Scores ------------------------------------------------------------------------------------------------------ */

/* A thread's scores of one query as scores.cuh wants to see them: its query number `which`, times eight keys. Queries are
 * the tile's rows, or with KEY_MAJOR its columns. */
template <int WIDTH, bool KEY_MAJOR> struct own_scores {
    typedef shared_fp32<WIDTH, 1> s;
    static constexpr int R = 1, C = 8;
    static constexpr bool EXACT = true;
    static constexpr int FOUR_KEYS = 4 * (KEY_MAJOR ? s::RG : s::CG);
    float X[8];
    const int *lows, *highs; /* of the tile's first query */
    int i0, n0;              /* the tile's first query and key */
    int which;
    __device__ int down() const { return KEY_MAJOR ? s::column_of(which) : s::row_of(which); }
    __device__ float &at(int, int c) { return X[c]; }
    __device__ int row(int) const { return i0 + down(); }
    static __device__ constexpr int apart(int c) { return c % 4 + FOUR_KEYS * (c / 4); }
    __device__ int key(int c) const { return n0 + 4 * (KEY_MAJOR ? s::g() : s::t()) + apart(c); }
    __device__ int low(int) const { return lows[down()]; }
    __device__ int high(int) const { return highs[down()]; }
};

/* change(scores) for each of a thread's queries in the shared tile. A loop of few instructions, as what is done to
 * scores can be long, and rare beside the products. */
template <bool KEY_MAJOR, int WIDTH, int UNROLL, class Change>
__device__ inline void for_each_query(shared_fp32<WIDTH, UNROLL> &s, int i0, int n0, Change change)
{
#pragma unroll 1
    for (int which = 0; which < 8; which++) {
        own_scores<WIDTH, KEY_MAJOR> S = { {}, s.low, s.high, i0, n0, which };
        auto place = [&](int key) {
            return KEY_MAJOR ? s.line(key) + s.column_of(which) : s.line(which) + s.column_of(key);
        };
#pragma unroll
        for (int key = 0; key < 8; key++)
            S.X[key] = *place(key);
        change(S);
#pragma unroll
        for (int key = 0; key < 8; key++)
            *place(key) = S.X[key];
    }
}

/* A thread's dropout bits: bit 8 r + c is set where P of its query r and key c is kept. Eight keys of one Philox are
 * those of two neighbouring threads, which share the draws where they are of one warp, as with queries for rows. */
template <int WIDTH, bool KEY_MAJOR>
__device__ inline uint64_t draw_all(const args &a, const span &s, const head &x, int i0, int n0)
{
    typedef own_scores<WIDTH, KEY_MAJOR> tile;
    constexpr int OTHER = KEY_MAJOR ? shared_fp32<WIDTH, 1>::CG : 1; /* lanes to the neighbour */
    const uint64_t seed = seed_of(a);
    tile t = { {}, NULL, NULL, i0, n0, 0 };
    const int64_t first = s.r0 + n0;
    uint64_t kept = 0;
    if (s.r_step != 1 || first % 8) {
#pragma unroll 1
        for (t.which = 0; t.which < 8; t.which++)
            kept |= (uint64_t)draw(t, 0, a, s, x, seed) << 8 * t.which;
        return kept;
    }
    /* The thread with the lower keys draws the first eight, which hold c = 0 .. 3 of both, and the other the rest. */
    const int upper = t.key(0) - n0 & 4 ? 1 : 0;
    const uint32_t eight = (uint32_t)(uint64_t)((s.r0 + t.key(upper * 4)) >> 3);
#pragma unroll 1
    for (t.which = 7; t.which >= 0; t.which--) {
        const uint32_t p = (uint32_t)(uint64_t)(s.p0 + t.row(0) * s.p_step);
        const uint32_t mine = kept_of_eight(philox(seed, make_uint4(eight, p, x.h, s.b)), a.drop_below);
        const uint32_t theirs = __shfl_xor_sync(~0u, mine, OTHER);
        const uint32_t low = (upper ? theirs : mine) >> 4 * upper, high = (upper ? mine : theirs) >> 4 * upper;
        kept = kept << 8 | (low & 15) | (high & 15) << 4;
    }
    return kept;
}

#endif
