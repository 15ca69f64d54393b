/* tile.h's products on AMX, which multiplies 16 x 16 by 16 x 16 units in one instruction of 16 cycles. Units and layouts
 * are those of tile.h. A tile of C has up to 32 rows and 32 columns, in four registers:
 *
 *     A0   C00 C01        A0, A1: 16 rows of A, 16 units each     B0, B1: 16 units of B, 16 columns each
 *     A1   C10 C11
 *
 * One instruction sums its 16 pairs, the even and the odd numbers apart, before they meet C. So sums begin at multiples of
 * STEP units, wherever the first unit that counts may be: zeros before it change nothing, other groups would. */

#define STEP 16
#define C00 0 /* the compiler's macros want digits */
#define C01 1
#define C10 2
#define C11 3
#define A0 4
#define A1 5
#define B0 6
#define B1 7

enum { MOST_STEPS = 5, HALF = STEP * W }; /* HALF: floats of one register */

/* Products of bf16 are too short for it. */
static inline int64_t asking_steps(int64_t rows, int64_t vecs, int64_t K)
{
    return HEED_SPLIT ? tile_count(rows, MR) * ((vecs + NR - 1) / NR) * ((K + STEP - 1) / STEP) * (HEED_SPLIT - 1) : 0;
}

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

/* A of one tile of C: whole steps, `next` floats apart, and at `rest` the units that are left over, with zeros behind them.
 * HEED_SPLIT has whole steps only: there all that is multiplied is a copy. */
typedef struct amx_left {
    const float *data, *low, *rest;
    int64_t ld, next, steps, left_over, plane;
} amx_left;

/* Sums that are still in their registers. Storing four registers takes as long as four products, which do not wait for it
 * where the sums that follow begin one by one: each as soon as its register is stored. With `keep` they then meet C. */
typedef struct late_sums {
    float *to; /* NULL: none */
    int64_t ld;
    int low, wide;
    float *C;
    int64_t ldc;
    const float *keep;
} late_sums;

INLINE void add_to_kept(late_sums *late, int64_t rows)
{
    for (int64_t i = 0; i < rows; i++) {
        float *c = late->C + i * late->ldc;
        vec k = vec_set1(late->keep == keep_all ? 1 : late->keep[i]);
        for (int64_t w = 0; w < (1 + late->wide) * W; w += W)
            vec_store(c + w, vec_fma(k, vec_load(c + w), vec_load(late->to + i * late->ld + w)));
    }
}

/* All of it, before something else needs the registers or the sums. */
INLINE void store_late(late_sums *late)
{
    const long bytes = (long)(late->ld * 4);
    if (!late->to)
        return;
    _tile_stored(C00, late->to, bytes);
    if (late->wide)
        _tile_stored(C01, late->to + W, bytes);
    if (late->low) { /* a register without rows must not be named */
        _tile_stored(C10, late->to + 16 * late->ld, bytes);
        if (late->wide)
            _tile_stored(C11, late->to + 16 * late->ld + W, bytes);
    }
    memory_is_written();
    if (late->keep)
        add_to_kept(late, shaped);
    late->to = NULL;
}

/* A register's old sums to memory; its new ones begin with what C has, or with nothing. */
#define TURN(tile, row, column)                                                                                        \
    do {                                                                                                               \
        if (late->to)                                                                                                  \
            _tile_stored(tile, late->to + (row)*late->ld + (column), late_bytes);                                      \
        if (onto)                                                                                                      \
            _tile_loadd(tile, onto + (row)*ldc + (column), c_bytes);                                                   \
        else                                                                                                           \
            _tile_zero(tile);                                                                                          \
    } while (0)

/* Four products. With `late` they are the first of their sums. */
INLINE void add_products(const int low, const int wide, const int load_a, const int load_b, const float *a,
                         const float *a_low, long a_bytes, const float *b, long b_bytes, late_sums *late,
                         const float *onto, int64_t ldc)
{
    const long late_bytes = late ? (long)(late->ld * 4) : 0, c_bytes = (long)(ldc * 4);
    if (load_b)
        _tile_loadd(B0, b, b_bytes);
    if (load_a)
        _tile_loadd(A0, a, a_bytes);
    if (late)
        TURN(C00, 0, 0);
    _tile_dpbf16ps(C00, A0, B0);
    if (low) {
        if (load_a)
            _tile_loadd(A1, a_low, a_bytes);
        if (late)
            TURN(C10, 16, 0);
        _tile_dpbf16ps(C10, A1, B0);
    }
    if (wide) {
        if (load_b)
            _tile_loadd(B1, b + W, b_bytes);
        if (late)
            TURN(C01, 0, W);
        _tile_dpbf16ps(C01, A0, B1);
        if (low) {
            if (late)
                TURN(C11, 16, W);
            _tile_dpbf16ps(C11, A1, B1);
        }
    }
}

/* With HEED_SPLIT a = a0 + a1 + a2 and b = b0 + b1 + b2, each part some 2^-8 of the one before: of the nine products six
 * count. Of two parts each three do, or if the sums are to be those of floats all four: which of a, which of b. */
#if HEED_SPLIT == 2
static const int of_a[] = { 1, 1, 0, 0 }, of_b[] = { 1, 0, 0, 1 };
#else
static const int of_a[] = { 0, 0, 1, 1, 2, 0 }, of_b[] = { 2, 1, 1, 0, 0, 0 };
#endif
#define PRODUCTS (HEED_SPLIT ? (int)(sizeof of_a / sizeof *of_a) : 0)

/* Sums over whole steps, the first of which begins them where `late` is given. */
INLINE void sum_steps(const int low, const int wide, const int as_floats, const amx_left *A, const float *b,
                      int64_t ldb, int64_t b_plane, meanwhile *work, ahead *next, late_sums *late, const float *onto,
                      int64_t ldc)
{
    const int first = HEED_SPLIT == 2 && !as_floats; /* product */
    const float *a = A->data, *a_low = A->low;
    const long a_bytes = (long)(A->ld * 4), b_bytes = (long)(ldb * 4);
    for (int64_t s = 0; s < A->steps; s++, a += A->next, a_low += A->next, b += STEP * ldb) {
        if (!HEED_SPLIT) {
            if (late && s == 0)
                add_products(low, wide, 1, 1, a, a_low, a_bytes, b, b_bytes, late, onto, ldc);
            else
                add_products(low, wide, 1, 1, a, a_low, a_bytes, b, b_bytes, NULL, NULL, 0);
        }
        each(i, PRODUCTS) { /* four instructions take 64 cycles, in which vectors are free for a piece of other work */
            if (i < first)
                continue;
            const int load_a = i == first || of_a[i] != of_a[i - 1], load_b = i == first || of_b[i] != of_b[i - 1];
            const float *x = a + of_a[i] * A->plane, *y = b + of_b[i] * b_plane;
            const float *x_low = a_low + of_a[i] * A->plane;
            if (i == first && late && s == 0)
                add_products(low, wide, 1, 1, x, x_low, a_bytes, y, b_bytes, late, onto, ldc);
            else
                add_products(low, wide, load_a, load_b, x, x_low, a_bytes, y, b_bytes, NULL, NULL, 0);
            if (i == first && late && s == 0) {
                memory_is_written();
                if (late->to && late->keep)
                    add_to_kept(late, shaped);
            }
            if (work)
                work->step(work);
            if (next && i % 3 == 1)
                ask(next);
        }
    }
}

/* C = A B, or onto + A B; late, and first what was late before, whose rows and columns are as many. */
INLINE void product(const int low, const int wide, const int as_floats, late_sums *late, float *to, int64_t ld,
                    const float *onto, const amx_left *A, const float *B, int64_t ldb, int64_t b_plane, meanwhile *work,
                    ahead *next)
{
    _Alignas(64) float rest[2 * HALF];
    if (late->low != low || late->wide != wide)
        store_late(late);
    sum_steps(low, wide, as_floats, A, B, ldb, b_plane, work, next, late, onto, ld);
    if (!HEED_SPLIT && A->left_over) {
        const amx_left last = { .data = A->rest, .low = A->rest + HALF, .ld = STEP, .steps = 1 };
        for (int64_t k = 0; k < STEP; k++)
            each(n, 1 + wide)
                vec_store(rest + k * PANEL + n * W,
                          k < A->left_over ? vec_load(B + (A->steps * STEP + k) * ldb + n * W) : vec_zero());
        memory_is_written();
        if (A->steps)
            sum_steps(low, wide, 0, &last, rest, PANEL, 0, NULL, NULL, NULL, NULL, 0);
        else
            sum_steps(low, wide, 0, &last, rest, PANEL, 0, NULL, NULL, late, onto, ld);
    }
    *late = (late_sums){ .to = to, .ld = ld, .low = low, .wide = wide };
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

static amx_left left_of(float *room, left A, int64_t R, int64_t K)
{
    amx_left a = { A.data, A.data + 16 * A.ld, room, A.ld, STEP, K / STEP, K % STEP, A.plane };
    if (HEED_SPLIT)
        a.steps = (K + STEP - 1) / STEP;
    else if (A.transposed) {
        turn_left(room, A.data, A.ld, R, K);
        a.data = room, a.low = room + HALF, a.rest = room + a.steps * 2 * HALF, a.ld = STEP, a.next = 2 * HALF;
    } else if (a.left_over)
        for (int64_t r = 0; r < R; r++)
            _mm512_store_ps(room + r * STEP, _mm512_maskz_loadu_ps((__mmask16)((1u << a.left_over) - 1),
                                                                   A.data + r * A.ld + a.steps * STEP));
    memory_is_written();
    return a;
}

/* C_r = keep[r] C_r, r < rows: most are 1. */
static void scale_rows(float *C, int64_t ldc, int64_t rows, int64_t vecs, const float *keep)
{
    for (int64_t r = 0; r < rows; r++, C += ldc)
        for (int64_t c = 0; keep[r] != 1 && c < vecs * W; c += W)
            vec_store(C + c, vec_mul(vec_set1(keep[r]), vec_load(C + c)));
    memory_is_written();
}

/* As tile.h says: C [rows x vecs W] = A B, or keep C + A B; K in units, of which a transposed A has at most BQ / 2. */
INLINE void multiply_all(const int as_floats, float *C, int64_t ldc, left A, right B, int64_t rows, int64_t vecs,
                         int64_t K, const float *keep, meanwhile *work, ahead *next)
{
    _Alignas(64) float room[MOST_STEPS * 2 * HALF], sums[32 * PANEL];
    late_sums late = { .to = NULL };
    int64_t count = tile_count(rows, MR);
    int apart = HEED_SPLIT && keep; /* short sums are more exact */
    if (!HEED_SPLIT && keep && keep != keep_all)
        scale_rows(C, ldc, rows, vecs, keep);
    for (int64_t t = 0; t < count; t++) {
        int64_t r = tile_begin(rows, count, t), R = tile_begin(rows, count, t + 1) - r;
        if (shaped != R)
            store_late(&late);
        amx_left a = left_of(room, left_from(A, r, 0), R, K);
        shape_tiles((int)R);
        for (int64_t n = 0; n < vecs; n += NR) {
            float *c = C + r * ldc + n * W, *to = apart ? sums : c, *onto = keep && !apart ? c : NULL;
            int64_t N = HEED_MIN(NR, vecs - n), ld = apart ? PANEL : ldc;
            const float *b = B.data + n / NR * B.next;
            if (R > 16)
                N == 2 ? product(1, 1, as_floats, &late, to, ld, onto, &a, b, B.ld, B.plane, work, next)
                       : product(1, 0, as_floats, &late, to, ld, onto, &a, b, B.ld, B.plane, work, next);
            else
                N == 2 ? product(0, 1, as_floats, &late, to, ld, onto, &a, b, B.ld, B.plane, work, next)
                       : product(0, 0, as_floats, &late, to, ld, onto, &a, b, B.ld, B.plane, work, next);
            if (apart)
                late.C = c, late.ldc = ldc, late.keep = keep == keep_all ? keep : keep + r;
        }
    }
    store_late(&late);
}

static void multiply(float *C, int64_t ldc, left A, right B, int64_t rows, int64_t vecs, int64_t K, const float *keep,
                     ahead *next)
{
    if (HEED_SPLIT && next && next->count)
        multiply_all(0, C, ldc, A, B, rows, vecs, K, keep, NULL, next);
    else
        multiply_all(0, C, ldc, A, B, rows, vecs, K, keep, NULL, NULL);
}

#if HEED_SPLIT
/* A panel of C, up to MR rows, which is late. */
static void multiply_panel(late_sums *late, float *C, int64_t ldc, left A, right B, int64_t rows, int64_t K,
                           meanwhile *work, ahead *next)
{
    const amx_left a = { A.data, A.data + 16 * A.ld, NULL, A.ld, STEP, K / STEP, 0, A.plane };
    memory_is_written();
    if (shaped != rows)
        store_late(late);
    shape_tiles((int)rows);
    if (rows > 16)
        product(1, 1, 1, late, C, ldc, NULL, &a, B.data, B.ld, B.plane, work, next);
    else
        product(0, 1, 1, late, C, ldc, NULL, &a, B.data, B.ld, B.plane, work, next);
}
#endif

/* For up to MR rows that are LDS apart, as floats would be multiplied; and meanwhile some work, where given. */
static void multiply_scores(float *C, left A, right B, int64_t rows, int64_t vecs, int64_t K, meanwhile *work)
{
    if (HEED_SPLIT && work)
        multiply_all(1, C, LDS, A, B, rows, vecs, K, NULL, work, NULL);
    else
        multiply_all(1, C, LDS, A, B, rows, vecs, K, NULL, NULL, NULL);
}

#undef TURN
#undef C00
#undef C01
#undef C10
#undef C11
#undef A0
#undef A1
#undef B0
#undef B1
