/* The vocabulary of the portable kernels: products of tiles in plain fp32 fused multiply-adds, from memory of any
 * dtype, stride and alignment.
 *
 * A block of 128 threads owns ROWS rows and meets COLUMNS columns at a time: 128 x 64 for results 64 wide, 64 x 128
 * for results 128 wide, so that a thread's share of every tile and of every result is 8 x 8, in blocks of 4 x 4:
 *     row    of r:  4 g + r % 4 + 4 RG (r / 4)
 *     column of c:  4 t + c % 4 + 4 CG (c / 4)
 * Sixteen lanes are two g by eight t: then a load of 16 bytes, which many lanes want of the same place, takes two turns.
 *
 * Operands pass through shared memory a piece at a time, the next one on its way while one is used:
 *     multiply_rows     X += A B^T       A ROWS rows, B COLUMNS rows, both in memory     (Q K^T, dO V^T)
 *     multiply_tile     Y += X B         X in shared memory, B COLUMNS rows in memory    (P V, P^T dO, dS^T Q)
 *     multiply_turned   Z += X^T B       X turned, 64 of its columns, B ROWS rows in memory    (dS K)
 * All meet outer products of eight by eight: operands lie in shared memory by columns, 64 multiply-adds for four loads.
 *
 * A row is named by the offset of its first element, kept in shared memory; NOWHERE is a row of zeros. */
#ifndef HEED_CUDA_TILE_FP32_CUH
#define HEED_CUDA_TILE_FP32_CUH

#include "scores.cuh"
#include "sm75.cuh"

constexpr int THREADS = 128, STEP = 16; /* STEP: of multiply_rows, along the rows */

/* The thread's number, as if it were news: what follows from it is computed where it is needed. Kept in registers through a
 * whole kernel it would take those that products need. */
__device__ inline unsigned this_thread()
{
    unsigned x = threadIdx.x;
    asm volatile("" : "+r"(x));
    return x;
}

/* Width is that of the block's slice of the result: a wider head is cut into slices, one block each. */
template <int WIDTH> struct shared_fp32 {
    static constexpr int CG = WIDTH / 8, RG = THREADS / CG, ROWS = 8 * RG, COLUMNS = 8 * CG;
    static constexpr int SLICE_STEP = 2048 / WIDTH; /* of multiply_tile, rows */
    static constexpr int LINE = ROWS + 4;           /* of the tile */
    static constexpr int TURNED = COLUMNS + 4;      /* the same where it is turned: see turn_tile() */
    static constexpr int ROOM = STEP / 4 * 8;       /* see pieces */
    float stage[2][STEP * (ROWS + COLUMNS) + 2 * ROOM];
    float tile[WIDTH == 64 ? ROWS * TURNED : COLUMNS * LINE];
    int64_t row[2][ROWS], column[2][COLUMNS]; /* offsets: of Q and dO, or K and V */
    int low[128], high[128];                  /* of the queries, which may be rows or columns */
    float lse[128], delta[128];
    span sequence; /* here, and not in registers, for the few times they are looked at */
    head of;
    static __device__ int g_of(unsigned thread)
    {
        return thread % 2 + thread % 32 / (2 * CG) * 2 + thread / 32 * (32 / CG);
    }
    static __device__ int t_of(unsigned thread) { return thread / 2 % 8 + thread / 16 % (CG / 8) * 8; }
    static __device__ int g() { return g_of(this_thread()); }
    static __device__ int t() { return t_of(this_thread()); }
    static __device__ constexpr int rows_down(int r) { return r % 4 + 4 * RG * (r / 4); }
    static __device__ constexpr int columns_on(int c) { return c % 4 + 4 * CG * (c / 4); }
    static __device__ int row_of(int r) { return 4 * g() + rows_down(r); }
    static __device__ int column_of(int c) { return 4 * t() + columns_on(c); }
    /* Where the tile has the thread's share, and in it element (r, c) and four rows from r on: see write_tile(). */
    __device__ float *own()
    {
        const unsigned thread = this_thread();
        return tile + 4 * t_of(thread) * LINE + 4 * g_of(thread);
    }
    static __device__ constexpr int at(int r, int c) { return four_at(r ^ 1, c); }
    static __device__ constexpr int four_at(int r, int c) { return columns_on(c) * LINE + rows_down(r); }
};

static_assert(sizeof(shared_fp32<128>) <= 64 * 1024 - 64, "a block of Turing has 64 KB");

/* The order in which blocks begin. Tiles of a head read the same rows: all of a group of heads are done before the next
 * group begins, so that several of a head are in work at a time and find these rows in the second cache. In a group tiles
 * come one after the other, each of all heads. The last group may be `more` groups longer: where tiles are of unequal size,
 * the small ones of many heads come last. */
struct head_groups {
    unsigned heads, size, last; /* last: the first head of the last group */
    head_groups(int64_t heads, int64_t size, int64_t more)
        : heads((unsigned)heads), size((unsigned)HEED_MAX(1, HEED_MIN(size, heads)))
    {
        const int64_t before = heads / this->size - 1 - more;
        last = (unsigned)HEED_MAX(0, before) * this->size;
    }
};

struct place {
    unsigned tile, head, heads; /* heads: in the group */
    __device__ place(unsigned index, unsigned tiles, const head_groups &g)
    {
        const unsigned first = min(index / (tiles * g.size) * g.size, g.last);
        heads = first == g.last ? g.heads - first : g.size;
        index -= first * tiles;
        tile = index / heads, head = first + index % heads;
    }
};

/* So many heads, eight tiles of each, are in work at a time. */
static inline int64_t heads_at_once(const heed_plan *plan) { return plan->device.units / 4; }

static inline bool is_banded(const args &a) { return a.left < FAR || a.right < FAR; }

/* Which sequence and head the block works on. */
template <int WIDTH> __device__ inline void meet_head(shared_fp32<WIDTH> &s, const args &a, int b, int h)
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
    /* Whether 16 bytes are four numbers of a row. */
    __device__ bool in_chunks() const { return t.dtype == HEED_F32 && t.vector; }
};

/* What is read of a row of zeros, so that nobody who reads in chunks has to ask which rows exist. */
__device__ static const float4 zeros[HEED_MAX_HEAD_DIM / 4] = {};

/* The offset of a row as rows_of wants it. */
__device__ inline int64_t row_or_zeros(const view &t, int64_t at)
{
    return at == NOWHERE && t.dtype == HEED_F32 && t.vector ? (const float *)zeros - (const float *)t.data : at;
}

/* Four numbers of a row from `column` on. */
__device__ inline float4 load_part(const rows_of &m, int64_t at, int column)
{
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; e++)
        x[e] = at != NOWHERE && column + e < m.width ? load(m.t, at + (column + e) * m.t.stride[3]) : 0.0f;
    return make_float4(x[0], x[1], x[2], x[3]);
}

/* STEP columns of COUNT rows, from column `step` on, on their way into shared memory, where a column is a line. A thread
 * has a chunk of four columns of every 32nd row. Between the lines of two chunks there is room, so that a warp's stores meet
 * all banks. */
template <int COUNT> struct pieces {
    float4 part[COUNT / 32];
    static __device__ constexpr int line(int k) { return k * COUNT + k / 4 * 8; }
    static __device__ float *place(float *stage, unsigned thread) { return stage + line(thread % 4 * 4) + thread / 4; }
    static __device__ void put(float *to, float4 x)
    {
        to[0] = x.x, to[COUNT] = x.y, to[2 * COUNT] = x.z, to[3 * COUNT] = x.w;
    }
    __device__ void fetch(const rows_of &m, unsigned thread, int column)
    {
        const float *from = (const float *)m.t.data + column;
        const int64_t *at = m.at + thread / 4;
        asm volatile("" : "+l"(from)); /* one sum, to which offsets are added */
        __builtin_assume(__isGlobal(from));
#pragma unroll
        for (int i = 0; i < COUNT / 32; i++)
            part[i] = *(const float4 *)(from + at[i * 32]);
    }
    __device__ void store(float *stage, unsigned thread) const
    {
        float *to = place(stage, thread);
#pragma unroll
        for (int i = 0; i < COUNT / 32; i++)
            put(to + i * 32, part[i]);
    }
    /* From memory of any kind. */
    static __device__ void copy(float *stage, const rows_of &m, unsigned thread, int column)
    {
        float *to = place(stage, thread);
#pragma unroll 1
        for (int i = 0; i < COUNT / 32; i++)
            put(to + i * 32, load_part(m, m.at[thread / 4 + i * 32], column));
    }
};

/* A step of multiply_rows. */
template <int WIDTH> struct both_pieces {
    typedef shared_fp32<WIDTH> shared;
    pieces<shared::ROWS> a;
    pieces<shared::COLUMNS> b;
    unsigned thread;
    int column; /* of the thread, the first of its four columns */
    __device__ explicit both_pieces(int step) : thread(this_thread()), column((int)(step + thread % 4 * 4)) {}
    __device__ bool in_chunks(const rows_of &A, const rows_of &B) const
    {
        return A.in_chunks() && B.in_chunks() && column + 4 <= A.width;
    }
    __device__ void fetch(const rows_of &A, const rows_of &B)
    {
        a.fetch(A, thread, column);
        b.fetch(B, thread, column);
    }
    __device__ void store(shared &s, int slot) const
    {
        a.store(s.stage[slot], thread);
        b.store(s.stage[slot] + STEP * s.ROWS + s.ROOM, thread);
    }
    __device__ void copy(shared &s, int slot, const rows_of &A, const rows_of &B) const
    {
        pieces<shared::ROWS>::copy(s.stage[slot], A, thread, column);
        pieces<shared::COLUMNS>::copy(s.stage[slot] + STEP * s.ROWS + s.ROOM, B, thread, column);
    }
};

template <int WIDTH>
__device__ inline void start_rows(shared_fp32<WIDTH> &s, int slot, const rows_of &A, const rows_of &B)
{
    both_pieces<WIDTH> first(0);
    if (first.in_chunks(A, B)) {
        first.fetch(A, B);
        first.store(s, slot);
    } else
        first.copy(s, slot, A, B);
}

/* Columns first .. first + WIDTH of rows `step` and following. */
template <int WIDTH>
__device__ inline void start_slice(shared_fp32<WIDTH> &s, int slot, const rows_of &B, int step, int first)
{
    constexpr int PARTS = WIDTH / 4, AT_ONCE = THREADS / PARTS;
    const unsigned thread = this_thread();
    const int column = first + (int)(thread % PARTS * 4);
    const int64_t *at = B.at + step + thread / PARTS;
    float *to = s.stage[slot] + thread * 4;
    if (B.in_chunks() && (column + 4 <= B.width || column >= B.width)) {
        const float *from = (const float *)B.t.data + (column < B.width ? column : 0);
        asm volatile("" : "+l"(from));
        int64_t rows[s.SLICE_STEP / AT_ONCE];
#pragma unroll
        for (int r = 0; r < s.SLICE_STEP; r += AT_ONCE)
            rows[r / AT_ONCE] = at[r];
#pragma unroll
        for (int r = 0; r < s.SLICE_STEP; r += AT_ONCE)
            copy_or_clear(shared_address(to + r * WIDTH), from + rows[r / AT_ONCE], column < B.width);
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

__device__ inline void load_eight(float (&x)[8], const float *from, int apart)
{
    load_four(x, from);
    load_four(x + 4, from + apart);
}

/* X += the sum of COUNT outer products: load(part, k, a, b) brings number part + k, the next pair on its way while one is
 * used, and meanwhile() is done while the first is. PART of them are one stretch of code: a kernel of many products must mind
 * the instruction cache. Rows are met up and down in turns, so that of what a multiply-add reads there is always something
 * that the last one read. */
template <int PART, int COUNT, int C = 8, class Load, class Meanwhile>
__device__ inline void add_products(float (&X)[8][8], Load load, Meanwhile meanwhile)
{
    float a[2][8], b[2][8];
    load(0, 0, a[0], b[0]);
    meanwhile();
#pragma unroll 1
    for (int part = 0; part < COUNT; part += PART)
#pragma unroll
        for (int k = 0; k < PART; k++) {
            if (k + 1 < PART)
                load(part, k + 1, a[(k + 1) % 2], b[(k + 1) % 2]);
            else
                load((part + PART) % COUNT, 0, a[0], b[0]); /* after the last the first again, unused */
#pragma unroll
            for (int c = 0; c < C; c++)
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int r = c % 2 ? 7 - i : i;
                    X[r][c] = fmaf(a[k % 2][r], b[k % 2][c], X[r][c]);
                }
        }
}

/* X += A B^T, with C = 4 the first half of its columns alone. The first step must have been started, in slot; then(slot) may
 * start the first of the next product. Ends with slot being the one not in use. */
template <int PART, int C = 8, int WIDTH, class Then>
__device__ inline void multiply_rows(float (&X)[8][8], shared_fp32<WIDTH> &s, int &slot, const rows_of &A,
                                     const rows_of &B, Then then)
{
    typedef pieces<shared_fp32<WIDTH>::ROWS> step_a;
    typedef pieces<shared_fp32<WIDTH>::COLUMNS> step_b;
    const int g = 4 * s.g(), t = 4 * s.t();
    for (int step = 0; step < A.width; step += STEP, slot ^= 1) {
        __syncthreads();
        both_pieces<WIDTH> next(step + STEP);
        const bool in_chunks = next.in_chunks(A, B);
        const float *a_at = s.stage[slot] + g, *b_at = s.stage[slot] + STEP * s.ROWS + s.ROOM + t;
        add_products<PART, STEP, C>(
            X,
            [&](int part, int k, float(&a)[8], float(&b)[8]) {
                load_eight(a, a_at + step_a::line(part) + step_a::line(k), 4 * s.RG);
                load_four(b, b_at + step_b::line(part) + step_b::line(k));
                if (C > 4)
                    load_four(b + 4, b_at + step_b::line(part) + step_b::line(k) + 4 * s.CG);
            },
            [&] {
                if (in_chunks)
                    next.fetch(A, B);
                else if (step + STEP < A.width)
                    next.copy(s, slot ^ 1, A, B);
                else
                    then(slot ^ 1);
            });
        if (in_chunks)
            next.store(s, slot ^ 1);
    }
}

/* The shared tile holds X by columns, with neighbouring rows exchanged: registers that are stored together are of both
 * banks in turn, as are those that are loaded together, and a multiply-add wants its factor and its sum from different
 * ones. What is multiplied out of the tile has its rows exchanged too, and back again when it is written itself. */
template <int WIDTH> __device__ inline void write_tile(shared_fp32<WIDTH> &s, const float (&X)[8][8])
{
    float *own = s.own();
#pragma unroll
    for (int c = 0; c < 8; c++)
#pragma unroll
        for (int r = 0; r < 8; r += 4)
            *(float4 *)(own + s.four_at(r, c)) = make_float4(X[r + 1][c], X[r][c], X[r + 3][c], X[r + 2][c]);
}

template <int WIDTH> __device__ inline void read_tile(shared_fp32<WIDTH> &s, float (&X)[8][8])
{
    const float *own = s.own();
#pragma unroll
    for (int c = 0; c < 8; c++)
#pragma unroll
        for (int r = 0; r < 8; r += 4) {
            float four[4];
            load_four(four, own + s.four_at(r, c));
            X[r + 1][c] = four[0], X[r][c] = four[1], X[r + 3][c] = four[2], X[r + 2][c] = four[3];
        }
}

/* Y += X B for columns first .. first + WIDTH of B's rows, X being the shared tile, which all threads have written or
 * are about to have, and zero from column `depth` on. The first step must have been started, as above. */
template <int PART, int WIDTH>
__device__ inline void multiply_tile(float (&Y)[8][8], shared_fp32<WIDTH> &s, int &slot, const rows_of &B, int first,
                                     int depth)
{
    const int g = 4 * s.g(), t = 4 * s.t();
    depth = min(depth, s.COLUMNS);
#pragma unroll 1
    for (int step = 0; step < depth; step += s.SLICE_STEP, slot ^= 1) {
        wait_copies<0>();
        __syncthreads();
        const float *a_at = s.tile + step * s.LINE + g, *b_at = s.stage[slot] + t;
        add_products<PART, s.SLICE_STEP>(
            Y,
            [&](int part, int k, float(&a)[8], float(&b)[8]) {
                load_eight(a, a_at + (part + k) * s.LINE, 4 * s.RG);
                load_eight(b, b_at + (part + k) * WIDTH, 4 * s.CG);
            },
            [&] {
                if (step + s.SLICE_STEP < depth)
                    start_slice(s, slot ^ 1, B, step + s.SLICE_STEP, first);
            });
    }
}

/* The tile turned, so that its columns are what is multiplied out of it: X by rows, and none exchanged. */
template <int WIDTH> __device__ inline void turn_tile(shared_fp32<WIDTH> &s, const float (&X)[8][8])
{
    float *own = s.tile + s.row_of(0) * s.TURNED + s.column_of(0);
#pragma unroll
    for (int r = 0; r < 8; r++)
#pragma unroll
        for (int c = 0; c < 8; c += 4)
            *(float4 *)(own + s.rows_down(r) * s.TURNED + s.columns_on(c)) = make_float4(X[r][c], X[r][c + 1],
                                                                                         X[r][c + 2], X[r][c + 3]);
}

/* A result of UNIT rows: a thread has row() + down(r). Where it is too small for all threads, each half of them has the sum
 * over half of what is summed. */
constexpr int UNIT = 64;

template <int WIDTH> struct unit_of {
    static constexpr int HALVES = 128 / WIDTH;
    static __device__ int half() { return shared_fp32<WIDTH>::g() / (UNIT / 8); }
    static __device__ int row() { return shared_fp32<WIDTH>::g() % (UNIT / 8) * 4; }
    static __device__ constexpr int down(int r) { return r % 4 + UNIT / 2 * (r / 4); }
};

/* Z += X^T B for UNIT of the turned tile's columns, from `column` on, and columns first .. first + WIDTH of B's rows. The
 * first step must have been started. */
template <int PART, int WIDTH>
__device__ inline void multiply_turned(float (&Z)[8][8], shared_fp32<WIDTH> &s, int &slot, const rows_of &B, int first,
                                       int column)
{
    typedef unit_of<WIDTH> unit;
    constexpr int COUNT = s.SLICE_STEP / unit::HALVES;
    const int row = unit::half() * COUNT, g = unit::row(), t = 4 * s.t();
#pragma unroll 1
    for (int step = 0; step < s.ROWS; step += s.SLICE_STEP, slot ^= 1) {
        wait_copies<0>();
        __syncthreads();
        const float *a_at = s.tile + (step + row) * s.TURNED + column + g, *b_at = s.stage[slot] + row * WIDTH + t;
        add_products<PART, COUNT>(
            Z,
            [&](int part, int k, float(&a)[8], float(&b)[8]) {
                load_eight(a, a_at + (part + k) * s.TURNED, UNIT / 2);
                load_eight(b, b_at + (part + k) * WIDTH, 4 * s.CG);
            },
            [&] {
                if (step + s.SLICE_STEP < s.ROWS)
                    start_slice(s, slot ^ 1, B, step + s.SLICE_STEP, first);
            });
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
template <int WIDTH, class Offset>
__device__ inline void store_slice(const float (&Y)[8][8], shared_fp32<WIDTH> &s, const view &t, int first, int width,
                                   bool accumulate, Offset row_offset)
{
    write_tile(s, Y);
#pragma unroll 1
    for (int r = 0; r < 8; r++) {
        const int64_t row = row_offset(s.row_of(r));
        if (row != NOWHERE)
#pragma unroll 1
            for (int c = 0; c < 8; c += 4) {
                const float *four = s.own() + s.four_at(r, c);
                store_part(t, row, first + s.column_of(c), width,
                           make_float4(four[0], four[s.LINE], four[2 * s.LINE], four[3 * s.LINE]), accumulate);
            }
    }
}

#endif
