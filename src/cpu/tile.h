/* Matrix products on register tiles. Every product of attention, forward and backward, is one of two forms:
 *
 *     C = A B      S = Q K^T, O += P V, dP = dO V^T, dQ += dS K       A is stored by rows:    A(r, k) = data[r * ld + k]
 *     C = A^T B    dV += P^T dO, dK += dS^T Q                         A is stored transposed: A(r, k) = data[k * ld + r]
 *
 * B is read W columns at a time: B(k, c) = data[c / (NR W) * next + k * ld + c % (NR W)]. With next = NR W that is a
 * matrix by rows, used where it lies; otherwise panels of NR W columns, which is how a transposed K is packed.
 *
 * Along k everything counts in units of 32 bits: a float, or with HEED_DOT a pair of bf16 that one instruction
 * multiplies and sums. With HEED_SPLIT each float is the sum of two or three bf16, and there are as many planes of pairs,
 * `plane` floats apart. A tile keeps R x N vectors of C in registers, R up to MR and N up to NR; its inner loop is one
 * broadcast and N multiply-adds for each row. AMX has tiles of its own: tile_amx.h. */

#include <stdatomic.h>

#if HEED_DOT
#define vec_madd vec_dot
#define vec_term(a, b) vec_dot(a, b, vec_zero())
#define vec_scale_units vec_scale_pairs
#define PER_UNIT 2 /* elements in a unit */
#else
#define vec_madd vec_fma
#define vec_term vec_mul
#define vec_scale_units vec_mul
#define PER_UNIT 1
#endif

#define PANEL (NR * W)
#define PLANES (HEED_SPLIT ? HEED_SPLIT : 1)
#define INLINE static inline __attribute__((always_inline))
#if defined(__has_feature) /* clang */
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED
#endif
#if defined(SANITIZED)
#define UNROLLED /* or compilers take minutes */
#elif defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif
#define each(i, n) UNROLLED for (int i = 0; i < (n); i++) /* unrolled, so that arrays become registers */

typedef struct left {
    const float *data;
    int64_t ld;
    int transposed;
    int64_t plane;
} left;

typedef struct right {
    const float *data;
    int64_t ld, next, plane;
} right;

/* From row r on; from unit k of the sums on. */
static inline left left_from(left A, int64_t r, int64_t k)
{
    A.data += A.transposed ? r + k * A.ld : r * A.ld + k;
    return A;
}

/* From unit k of the sums on; from column c on, a multiple of PANEL. */
static inline right right_from(right B, int64_t k, int64_t c)
{
    B.data += k * B.ld + c / PANEL * B.next;
    return B;
}

#define BC 256        /* keys in a block */
#define LDS (BC + 16) /* floats from row to row of S: not a power of two, which would crowd the cache's sets */

/* Weights as units, the left factor of O: with HEED_SPLIT in a place of their own, else over S. */
#define WEIGHT_PLANE (BC / 2)
#define LDW (HEED_SPLIT ? PLANES * WEIGHT_PLANE + 16 : LDS)

static inline int64_t panel_count(int64_t columns) { return (columns + PANEL - 1) / PANEL; }

static const float keep_all[16] = { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 };

/* Rows are dealt to tiles evenly, in whole units: 64 rows are 13+13+13+13+12 and not 14+14+14+14+8. A flat tile of half
 * the height is nearly as fast, and where rows see different keys it computes fewer pairs that nobody sees. HEED_SPLIT has
 * whole tiles and what is left over, as rows are paired inside a tile. Where all rows see the same FEW keys, a softmax is
 * mostly waiting for its own results: a tile of the forward is two of the registers' there. */
#define FLAT (MR > 6 && !HEED_SPLIT ? MR / 2 : MR)
#define TALL (HEED_AMX ? MR : 2 * MR)
#define DIRECT_ROWS 32 /* few rows, which meet keys without a register tile (direct.h): at a time */
#define MOST_ROWS HEED_MAX(TALL, DIRECT_ROWS) /* of one softmax */
#define FEW (8 * W)
static inline int64_t tile_count(int64_t rows, int64_t height) { return (rows + height - 1) / height; }
static inline int64_t tile_begin(int64_t rows, int64_t count, int64_t index)
{
    if (HEED_SPLIT)
        return HEED_MIN(rows, index * MR);
    if (index == 0 || index == count) /* of few rows most: saves the division */
        return index ? rows : 0;
    return HEED_MIN(rows, (rows + PER_UNIT - 1) / PER_UNIT * index / count * PER_UNIT);
}

/* Work for vectors while AMX multiplies: step() does a piece of it, or nothing when all is done. */
typedef struct meanwhile {
    void (*step)(struct meanwhile *work);
} meanwhile;

#if HEED_AMX
#include "tile_amx.h"
#else
#define STEP 1 /* units that are summed before they meet C: sums begin at multiples of it */
static inline void leave_tiles(void) {}

/* How many steps of what is asked for ahead multiply() takes: one for each tile. */
static inline int64_t asking_steps(int64_t rows, int64_t vecs, int64_t K)
{
    (void)K;
    return tile_count(rows, MR) * ((vecs + NR - 1) / NR);
}

/* A pointer serves three rows, so that all addresses stay in registers. */
#define GROUPS(R) (((R) + 2) / 3)
#define ROW(groups, r, ld) (groups[(r) / 3] + (r) % 3 * (ld))

/* The terms of one k, which begin the sums of a tile. */
INLINE void sum_first(const int R, const int N, const int transposed, vec acc[MR][NR], const float *A, int64_t lda,
                      const float *B)
{
    const float *rows[GROUPS(MR)];
    vec b[NR];
    each(g, GROUPS(R))
        rows[g] = A + 3 * g * lda;
    each(n, N)
        b[n] = vec_load(B + n * W);
    each(r, R) {
        vec a = vec_set1(transposed ? A[r] : *ROW(rows, r, lda));
        each(n, N)
            acc[r][n] = vec_term(a, b[n]);
    }
}

/* Those of the K that follow. */
INLINE void sum_more(const int R, const int N, const int transposed, vec acc[MR][NR], const float *A, int64_t lda,
                     const float *B, int64_t ldb, int64_t K)
{
    const float *rows[GROUPS(MR)];
    each(g, GROUPS(R))
        rows[g] = A + 3 * g * lda;
    for (int64_t k = 0; k < K; k++) {
        vec b[NR];
        each(n, N)
            b[n] = vec_load(B + k * ldb + n * W);
        each(r, R) {
            vec a = vec_set1(transposed ? A[k * lda + r] : ROW(rows, r, lda)[k]);
            each(n, N)
                acc[r][n] = vec_madd(a, b[n], acc[r][n]);
        }
    }
}

/* ---- Any product ------------------------------------------------------------------------------------------------ */

typedef void tile_fn(float *C, int64_t ldc, const float *A, int64_t lda, const float *B, int64_t ldb, int64_t K,
                     const float *keep);

/* keep == NULL: C = A B. Otherwise C_r = keep[r] C_r + (A B)_r. The product is summed by itself before it meets C: short
 * sums are more exact, and C may arrive late. */
INLINE void tile(const int R, const int N, const int transposed, float *C, int64_t ldc, const float *A, int64_t lda,
                 const float *B, int64_t ldb, int64_t K, const float *keep)
{
    vec acc[MR][NR];
    sum_first(R, N, transposed, acc, A, lda, B);
    sum_more(R, N, transposed, acc, A + (transposed ? lda : 1), lda, B + ldb, ldb, K - 1);
    if (keep)
        each(r, R) {
            vec k = vec_set1(keep[r]);
            each(n, N)
                vec_store(C + n * W, vec_fma(k, vec_load(C + n * W), acc[r][n]));
            C += ldc;
        }
    else
        each(r, R) {
            each(n, N)
                vec_store(C + n * W, acc[r][n]);
            C += ldc;
        }
}

#define TILE(R, N, T)                                                                                                  \
    static void tile_##R##_##N##_##T(float *C, int64_t ldc, const float *A, int64_t lda, const float *B, int64_t ldb,  \
                                     int64_t K, const float *keep)                                                     \
    {                                                                                                                  \
        tile(R, N, T, C, ldc, A, lda, B, ldb, K, keep);                                                                \
    }
#define TILES(R) TILE(R, 1, 0) TILE(R, 2, 0) TILE(R, 1, 1) TILE(R, 2, 1)
#define TILE_NAMES(R) { { tile_##R##_1_0, tile_##R##_1_1 }, { tile_##R##_2_0, tile_##R##_2_1 } },

#if MR == 14
#define EACH_R(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#elif MR == 12
#define EACH_R(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#else
#define EACH_R(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif
EACH_R(TILES)
static tile_fn *const tiles[MR][NR][2] = { EACH_R(TILE_NAMES) }; /* [rows - 1][vectors - 1][transposed] */

/* C [rows x vecs W] = A B, or keep C + A B as in tile(); K in units. Meanwhile asking_steps() of `next`, where given. Inline, as
 * are those below: A and B, just made, would be stored in parts and loaded as a whole, for which a load waits. */
INLINE void multiply(float *C, int64_t ldc, left A, right B, int64_t rows, int64_t vecs, int64_t K, const float *keep,
                     ahead *next)
{
    int64_t count = tile_count(rows, MR);
    for (int64_t t = 0; t < count; t++) {
        int64_t r = tile_begin(rows, count, t), R = tile_begin(rows, count, t + 1) - r;
        const float *a = A.data + (A.transposed ? r : r * A.ld), *kept = keep && keep != keep_all ? keep + r : keep;
        for (int64_t n = 0; n < vecs; n += NR) {
            int64_t N = HEED_MIN(NR, vecs - n);
            if (next)
                ask(next);
            tiles[R - 1][N - 1][A.transposed](C + r * ldc + n * W, ldc, a, A.ld, B.data + n / NR * B.next, B.ld, K,
                                              kept);
        }
    }
}

/* ---- S = Q K^T and dP = dO V^T ---------------------------------------------------------------------------------- */

/* The error of a sum of floats grows with each term, as the sum does, and that of S dominates all others. So floats are
 * summed in two halves that are added at the end: 1.4 times as exact.
 *
 * Storing a tile at once would leave the multipliers idle: a vector takes as long to store as two take to multiply. So
 * old sums are stored row by row, while the first terms of the next ones are computed. */
#define HALVES (PER_UNIT == 1)

/* Old sums to C, or onto C; their successors begin with the terms at A and B. */
INLINE void sum_turn(const int R, const int N, const int onto, vec acc[MR][NR], float *C, const float *A, int64_t lda,
                     const float *B)
{
    const float *rows[GROUPS(MR)];
    vec b[NR];
    each(g, GROUPS(R))
        rows[g] = A + 3 * g * lda;
    each(n, N)
        b[n] = vec_load(B + n * W);
    each(r, R) {
        vec a = vec_set1(*ROW(rows, r, lda));
        each(n, N) {
            float *c = C + r * LDS + n * W;
            vec_store(c, onto ? vec_add(vec_load(c), acc[r][n]) : acc[r][n]);
            acc[r][n] = vec_term(a, b[n]);
        }
    }
}

/* R rows, panel after panel. Before panel 0 there are no old sums: zeros go to its place, whatever that holds. */
INLINE void scores(const int R, const int N, float *C, const float *A, int64_t lda, const right *from, int64_t panels,
                   int64_t K)
{
    vec acc[MR][NR];
    right B = *from;
    float *old = C;
    int64_t half = HALVES ? K / 2 : K;
    each(r, R)
        each(n, N)
            acc[r][n] = vec_zero();
    for (int64_t p = 0; p < panels; p++, B.data += B.next) {
        sum_turn(R, N, HALVES, acc, old, A, lda, B.data);
        sum_more(R, N, 0, acc, A + 1, lda, B.data + B.ld, B.ld, half - 1);
        old = C + p * PANEL;
        if (HALVES) {
            sum_turn(R, N, 0, acc, old, A + half, lda, B.data + half * B.ld);
            atomic_signal_fence(memory_order_seq_cst); /* or a compiler holds on to the first half, and must spill */
            sum_more(R, N, 0, acc, A + half + 1, lda, B.data + (half + 1) * B.ld, B.ld, K - half - 1);
        }
    }
    each(r, R)
        each(n, N) {
            float *c = old + r * LDS + n * W;
            vec_store(c, HALVES ? vec_add(vec_load(c), acc[r][n]) : acc[r][n]);
        }
}

typedef void scores_fn(float *C, const float *A, int64_t lda, const right *B, int64_t panels, int64_t K);

#define SCORES(R, N)                                                                                                   \
    static void scores_##R##_##N(float *C, const float *A, int64_t lda, const right *B, int64_t panels, int64_t K)     \
    {                                                                                                                  \
        scores(R, N, C, A, lda, B, panels, K);                                                                         \
    }
#define SCORES_PAIR(R) SCORES(R, 1) SCORES(R, 2)
#define SCORES_NAMES(R) { scores_##R##_1, scores_##R##_2 },
EACH_R(SCORES_PAIR)
static scores_fn *const scores_of[MR][NR] = { EACH_R(SCORES_NAMES) }; /* [rows - 1][vectors - 1] */

/* C [rows x vecs W] = A B for up to MR rows that are LDS apart; K in units. */
INLINE void multiply_scores(float *C, left A, right B, int64_t rows, int64_t vecs, int64_t K, meanwhile *work)
{
    (void)work;
    int64_t panels = vecs / NR;
    if (K == 1) {
        multiply(C, LDS, A, B, rows, vecs, K, NULL, NULL);
        return;
    }
    if (panels)
        scores_of[rows - 1][NR - 1](C, A.data, A.ld, &B, panels, K);
    B.data += panels * B.next;
    if (vecs % NR)
        scores_of[rows - 1][0](C + panels * PANEL, A.data, A.ld, &B, 1, K);
}
#endif
