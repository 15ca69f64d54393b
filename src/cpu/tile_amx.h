/* tile.h's products on AMX, which multiplies 16 x 16 by 16 x 16 units in one instruction of 16 cycles. Units and layouts
 * are those of tile.h. A tile of C has up to 32 rows and 32 columns, in four registers:
 *
 *     A0   C00 C01        A0, A1: 16 rows of A, 16 units each     B0, B1: 16 units of B, 16 columns each
 *     A1   C10 C11
 *
 * One instruction sums its 16 pairs, the even and the odd numbers apart, before they meet C. So sums begin at multiples of
 * STEP units, wherever the first unit that counts may be: zeros before it change nothing, other groups would. */

#define STEP 16
#define ASKING_TILES 0 /* they are too short for it */
#define C00 0          /* the compiler's macros want digits */
#define C01 1
#define C10 2
#define C11 3
#define A0 4
#define A1 5
#define B0 6
#define B1 7

enum { MOST_STEPS = 5, HALF = STEP * W }; /* HALF: floats of one register */

static _Thread_local int shaped; /* rows that the registers are configured for; 0: not at all */

static void shape_tiles(int rows)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = { .palette = 1 };
    if (shaped == rows)
        return;
    uint8_t top = (uint8_t)HEED_MIN(rows, 16), low = (uint8_t)(rows - top);
    const uint8_t of[8] = { top, top, low, low, top, low, STEP, STEP };
    for (int t = 0; t < 8; t++)
        config.rows[t] = of[t], config.row_bytes[t] = of[t] ? 64 : 0;
    _tile_loadconfig(&config);
    shaped = rows;
}

/* Somebody else's code may use the registers between two items of work, and the system saves them while they are used. */
static void leave_tiles(void)
{
    if (shaped)
        _tile_release();
    shaped = 0;
}

/* The compiler does not know that loading a register reads memory. */
#define memory_is_written() __asm__ volatile("" ::: "memory")

/* C += A B over whole steps; a_next: floats from a step of A to the next. */
INLINE void sum_steps(const int low, const int wide, const float *a, const float *a_low, int64_t lda, int64_t a_next,
                      const float *b, int64_t ldb, int64_t steps)
{
    const long a_bytes = (long)(lda * 4), b_bytes = (long)(ldb * 4);
    for (int64_t s = 0; s < steps; s++, a += a_next, a_low += a_next, b += STEP * ldb) {
        _tile_loadd(A0, a, a_bytes);
        _tile_loadd(B0, b, b_bytes);
        _tile_dpbf16ps(C00, A0, B0);
        if (wide) {
            _tile_loadd(B1, b + W, b_bytes);
            _tile_dpbf16ps(C01, A0, B1);
        }
        if (low) {
            _tile_loadd(A1, a_low, a_bytes);
            _tile_dpbf16ps(C10, A1, B0);
            if (wide)
                _tile_dpbf16ps(C11, A1, B1);
        }
    }
}

/* A of one tile of C: whole steps, and at `rest` the units that are left over, with zeros behind them. */
typedef struct amx_left {
    const float *data, *low, *rest;
    int64_t ld, next, steps, left_over;
} amx_left;

INLINE void product(const int low, const int wide, float *C, int64_t ldc, const amx_left *A, const float *B,
                    int64_t ldb)
{
    _Alignas(64) float rest[2 * HALF];
    _tile_zero(C00);
    _tile_zero(C01);
    if (low) { /* a register without rows must not be named */
        _tile_zero(C10);
        _tile_zero(C11);
    }
    sum_steps(low, wide, A->data, A->low, A->ld, A->next, B, ldb, A->steps);
    if (A->left_over) {
        for (int64_t k = 0; k < STEP; k++)
            each(n, 1 + wide)
                vec_store(rest + k * PANEL + n * W,
                          k < A->left_over ? vec_load(B + (A->steps * STEP + k) * ldb + n * W) : vec_zero());
        memory_is_written();
        sum_steps(low, wide, A->rest, A->rest + HALF, STEP, 0, rest, PANEL, 1);
    }
    const long c_bytes = (long)(ldc * 4);
    _tile_stored(C00, C, c_bytes);
    if (wide)
        _tile_stored(C01, C + W, c_bytes);
    if (low) {
        _tile_stored(C10, C + 16 * ldc, c_bytes);
        if (wide)
            _tile_stored(C11, C + 16 * ldc + W, c_bytes);
    }
}

/* Rows as they are needed, from columns: 16 x 16 units at a time. */
static void turn_left(float *to, const float *A, int64_t lda, int64_t R, int64_t K)
{
    for (int64_t k = 0; k < K; k += STEP)
        for (int64_t r = 0; r < 32; r += 16, to += HALF) {
            vec t[W];
            if (r >= R)
                continue;
            for (int64_t i = 0; i < STEP; i++)
                t[i] = k + i < K ? vec_load(A + (k + i) * lda + r) : vec_zero();
            vec_transpose(t);
            for (int64_t i = 0; i < W; i++)
                vec_store(to + i * STEP, t[i]);
        }
}

static amx_left left_of(float *room, const float *A, int64_t lda, int transposed, int64_t R, int64_t K)
{
    amx_left a = { A, A + 16 * lda, room, lda, STEP, K / STEP, K % STEP };
    if (transposed) {
        turn_left(room, A, lda, R, K);
        a.data = room, a.low = room + HALF, a.rest = room + a.steps * 2 * HALF, a.ld = STEP, a.next = 2 * HALF;
    } else if (a.left_over)
        for (int64_t r = 0; r < R; r++)
            _mm512_store_ps(room + r * STEP,
                            _mm512_maskz_loadu_ps((__mmask16)((1u << a.left_over) - 1), A + r * lda + a.steps * STEP));
    memory_is_written();
    return a;
}

/* As tile.h says: C [rows x vecs W] = A B, or keep C + A B; K in units, of which a transposed A has at most BQ / 2. */
static void multiply(float *C, int64_t ldc, left A, right B, int64_t rows, int64_t vecs, int64_t K, const float *keep,
                     ahead *next)
{
    (void)next;
    _Alignas(64) float room[MOST_STEPS * 2 * HALF], sums[32 * PANEL];
    int64_t count = tile_count(rows, MR);
    for (int64_t t = 0; t < count; t++) {
        int64_t r = tile_begin(rows, count, t), R = tile_begin(rows, count, t + 1) - r;
        amx_left a = left_of(room, A.data + (A.transposed ? r : r * A.ld), A.ld, A.transposed, R, K);
        shape_tiles((int)R);
        for (int64_t n = 0; n < vecs; n += NR) {
            float *c = C + r * ldc + n * W, *to = keep ? sums : c;
            int64_t N = HEED_MIN(NR, vecs - n), ld = keep ? PANEL : ldc;
            const float *b = B.data + n / NR * B.next;
            if (R > 16)
                N == 2 ? product(1, 1, to, ld, &a, b, B.ld) : product(1, 0, to, ld, &a, b, B.ld);
            else
                N == 2 ? product(0, 1, to, ld, &a, b, B.ld) : product(0, 0, to, ld, &a, b, B.ld);
            for (int64_t i = 0; keep && i < R; i++) {
                vec k = vec_set1(keep == keep_all ? 1 : keep[r + i]);
                for (int64_t w = 0; w < N * W; w += W)
                    vec_store(c + i * ldc + w, vec_fma(k, vec_load(c + i * ldc + w), vec_load(sums + i * PANEL + w)));
            }
        }
    }
}

/* For up to MR rows that are LDS apart. */
static void multiply_scores(float *C, left A, right B, int64_t rows, int64_t vecs, int64_t K)
{
    multiply(C, LDS, A, B, rows, vecs, K, NULL, NULL);
}

#undef C00
#undef C01
#undef C10
#undef C11
#undef A0
#undef A1
#undef B0
#undef B1
