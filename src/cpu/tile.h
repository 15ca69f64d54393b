/* Matrix products on register tiles. Every product of attention, forward and backward, is one of two forms:
 *
 *     C = A B      S = Q K^T, O += P V, dP = dO V^T, dQ += dS K       A is stored by rows:    A(r, k) = data[r * ld + k]
 *     C = A^T B    dV += P^T dO, dK += dS^T Q                         A is stored transposed: A(r, k) = data[k * ld + r]
 *
 * B is read W columns at a time: B(k, c) = data[c / (NR W) * next + k * ld + c % (NR W)]. With next = NR W that is a
 * matrix by rows, used where it lies; otherwise panels of NR W columns, which is how a transposed K is packed.
 *
 * Along k everything counts in units of 32 bits: a float, or with HEED_DOT a pair of bf16 that one instruction
 * multiplies and sums. A tile keeps R x N vectors of C in registers, R up to MR and N up to NR; its inner loop is one
 * broadcast and N multiply-adds for each row. */

#if HEED_DOT
#define vec_madd vec_dot
#define vec_scale_units vec_scale_pairs
#define PER_UNIT 2 /* elements in a unit */
#else
#define vec_madd vec_fma
#define vec_scale_units vec_mul
#define PER_UNIT 1
#endif

#define PANEL (NR * W)
#define each(i, n)                                                                                                     \
    _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++) /* unrolled, so that arrays become registers */
#define INLINE static inline __attribute__((always_inline))

typedef struct left {
    const float *data;
    int64_t ld;
    int transposed;
} left;

typedef struct right {
    const float *data;
    int64_t ld, next;
} right;

typedef void tile_fn(float *C, int64_t ldc, const float *A, int64_t lda, const float *B, int64_t ldb, int64_t K,
                     const float *keep);

static const float keep_all[1]; /* a value of keep, never read */

/* keep == NULL: C = A B. keep == keep_all: C += A B. Otherwise C_r = keep[r] C_r + (A B)_r. */
INLINE void tile(const int R, const int N, const int transposed, float *C, int64_t ldc, const float *A, int64_t lda,
                 const float *B, int64_t ldb, int64_t K, const float *keep)
{
    vec acc[MR][NR];
    each(r, R)
        each(n, N)
            acc[r][n] = !keep              ? vec_zero()
                        : keep == keep_all ? vec_load(C + r * ldc + n * W)
                                           : vec_mul(vec_set1(keep[r]), vec_load(C + r * ldc + n * W));

    const float *rows[(MR + 2) / 3]; /* a pointer serves three rows, so that all addresses stay in registers */
    each(g, (R + 2) / 3)
        rows[g] = A + 3 * g * lda;
    for (int64_t k = 0; k < K; k++) {
        vec b[NR];
        each(n, N)
            b[n] = vec_load(B + k * ldb + n * W);
        each(r, R) {
            vec a = vec_set1(transposed ? A[k * lda + r] : rows[r / 3][r % 3 * lda + k]);
            each(n, N)
                acc[r][n] = vec_madd(a, b[n], acc[r][n]);
        }
    }
    each(r, R)
        each(n, N)
            vec_store(C + r * ldc + n * W, acc[r][n]);
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

/* Rows are dealt to tiles evenly: 64 rows are 13+13+13+13+12 and not 14+14+14+14+8. */
static inline int64_t tile_count(int64_t rows) { return (rows + MR - 1) / MR; }
static inline int64_t tile_begin(int64_t rows, int64_t count, int64_t index) { return rows * index / count; }

/* C [rows x vecs W] = A B, or keep C + A B as in tile(); K in units. */
static void multiply(float *C, int64_t ldc, left A, right B, int64_t rows, int64_t vecs, int64_t K, const float *keep)
{
    int64_t count = tile_count(rows);
    for (int64_t t = 0; t < count; t++) {
        int64_t r = tile_begin(rows, count, t), R = tile_begin(rows, count, t + 1) - r;
        const float *a = A.data + (A.transposed ? r : r * A.ld), *kept = keep && keep != keep_all ? keep + r : keep;
        for (int64_t n = 0; n < vecs; n += NR) {
            int64_t N = HEED_MIN(NR, vecs - n);
            tiles[R - 1][N - 1][A.transposed](C + r * ldc + n * W, ldc, a, A.ld, B.data + n / NR * B.next, B.ld, K,
                                              kept);
        }
    }
}
