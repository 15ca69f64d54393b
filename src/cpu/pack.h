/* Inputs brought into the form that the tiles read. Elements become units (tile.h): floats, or with HEED_DOT pairs of
 * bf16. All widths are padded with zeros to whole vectors.
 *
 *     rows       [row][units]                        Q, dO as the left factor
 *     panels     [key / PANEL][unit of D][PANEL]     K^T, V^T as the right factor
 *     stacked    [row / PER_UNIT][columns]           V, K, Q, dO as the right factor: a unit holds PER_UNIT rows
 */

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t units_of(int64_t n) { return round_up((n + PER_UNIT - 1) / PER_UNIT, W); }

/* Floats for key rows of a head as panels of `dim` columns. */
static inline int64_t panels_size(int64_t keys, int64_t dim) { return round_up(keys, PANEL) * units_of(dim) * PLANES; }

/* Floats from one unit of stacked rows to the next, and of so many rows. AMX reads 16 of them for 64 bytes each, which powers
 * of two would crowd into a few sets of the first cache. */
static inline int64_t stacked_ld(int64_t width) { return width * PLANES + (HEED_AMX ? W : 0); }
static inline int64_t stacked_size(int64_t rows, int64_t width)
{
    return round_up(rows, HEED_SPLIT ? 2 * W : PER_UNIT) / PER_UNIT * stacked_ld(width);
}

/* The rows of one head of a tensor: row n lies at base + n * step, in bytes, unless the rows are keys of a paged cache. */
typedef struct source {
    const heed_problem *p;
    const heed_span *s;
    const heed_tensor *t;
    int64_t head, dim;
    const char *base;
    int64_t step;
    int64_t spacing; /* the same in elements */
    int paged;
    float *top;     /* with HEED_SPLIT, where given: raised to the largest magnitude of what is packed */
    float *squares; /* without, where given: |row|^2 of what is packed into panels, from row 0 on */
} source;

static inline source source_of(const heed_problem *p, const heed_span *s, const heed_tensor *t, int64_t head,
                               int64_t dim, int64_t first, int64_t spacing)
{
    int64_t size = t->dtype == HEED_F32 ? 4 : 2;
    const char *base = t->data ? (const char *)t->data + (first + head * t->stride[1]) * size : NULL;
    return (source){ p, s, t, head, dim, base, spacing * size, spacing, 0, NULL, NULL };
}

/* Rows of q, o and their gradients. */
static inline source rows_of(const heed_problem *p, const heed_span *s, const heed_tensor *t, int64_t head, int64_t dim)
{
    return source_of(p, s, t, head, dim, s->q_batch * t->stride[0] + s->q_row * t->stride[2], t->stride[2]);
}

/* Rows of k, v and their gradients: the keys of the span. */
static inline source keys_of(const heed_problem *p, const heed_span *s, const heed_tensor *t, int64_t head, int64_t dim)
{
    int64_t first = p->page ? 0 : s->k_batch * t->stride[0] + (s->k_row + s->col) * t->stride[2];
    source x = source_of(p, s, t, head, dim, first, t->stride[2] * s->col_step);
    x.paged = p->page != 0;
    return x;
}

static inline const char *source_row(const source *x, int64_t n)
{
    if (x->paged)
        return (const char *)x->t->data +
               heed_key_offset(x->p, x->s, x->t, x->head, n) * (x->t->dtype == HEED_F32 ? 4 : 2);
    return x->base + n * x->step;
}

/* Rows [first, last) are to be asked for (ahead.h). */
static void ask_for(ahead *a, source x, int64_t first, int64_t last)
{
    int64_t bytes = x.dim * (x.t->dtype == HEED_F32 ? 4 : 2);
    if (x.t->data && !x.paged && x.step >= bytes && first < last)
        ask_for_rows(a, x.base + first * x.step, last - first, x.step, bytes);
}

/* x * 0 is 0 or NaN: their sum over rows [first, last) of a vector or more. */
INLINE vec zeros_of_rows(heed_dtype type, const source *x, int64_t first, int64_t last)
{
    vec sum[4] = { vec_zero(), vec_zero(), vec_zero(), vec_zero() };
    for (int64_t n = first; n < last; n += 4) {
        const char *row[4];
        each(r, 4)
            row[r] = source_row(x, HEED_MIN(n + r, last - 1));
        int64_t c = 0;
#if HEED_DOT
        for (; type == HEED_BF16 && c + 2 * W <= x->dim; c += 2 * W)
            each(r, 4)
                sum[r] = vec_dot(vec_load((const float *)(const void *)row[r] + c / 2), vec_zero(), sum[r]);
#endif
        for (; c < x->dim; c += W)
            each(r, 4)
                sum[r] = vec_fma(vec_load_as(type, row[r], HEED_MIN(c, x->dim - W)), vec_zero(), sum[r]);
    }
    return vec_add(vec_add(sum[0], sum[1]), vec_add(sum[2], sum[3]));
}

/* 1 when rows [first, last) have no NaN and no infinity. */
static int rows_are_finite(const source *x, int64_t first, int64_t last)
{
    if (x->t->stride[3] == 1 && x->dim >= W)
        return vec_sum(FOR_TYPE(x->t->dtype, zeros_of_rows, x, first, last)) == 0;
    for (int64_t n = first; n < last; n++) {
        float row[HEED_MAX_HEAD_DIM], sum = 0;
        load_row(row, x->t->dtype, source_row(x, n), x->t->stride[3], x->dim, x->dim);
        for (int64_t c = 0; c < x->dim; c++)
            sum += row[c] * 0.0f;
        if (sum != 0)
            return 0;
    }
    return 1;
}

#if !HEED_SPLIT
/* One row as units. With HEED_DOT the tensor is bf16, or fp32 (dO of an fp32 o) and then rounded. */
static void unit_row(float *to, const source *x, int64_t n)
{
#if HEED_DOT
    float wide[HEED_MAX_HEAD_DIM + W];
    const char *row = source_row(x, n);
    int64_t padded = 2 * units_of(x->dim);
    if (x->t->dtype == HEED_BF16 && x->t->stride[3] == 1) {
        int64_t whole = x->dim / (2 * W) * W; /* units in whole vectors; behind them zeros, and the rest over these */
        if (2 * whole < x->dim)
            vec_store(to + whole, vec_zero());
        for (int64_t u = 0; u < whole; u += W)
            vec_store(to + u, vec_load((const float *)(const void *)row + u));
        memcpy(to + whole, row + 4 * whole, (size_t)(2 * x->dim - 4 * whole));
        return;
    }
    load_row(wide, x->t->dtype, row, x->t->stride[3], x->dim, padded);
    for (int64_t c = 0; c < padded; c += 2 * W)
        vec_store(to + c / 2, vec_to_pairs(vec_load(wide + c), vec_load(wide + c + W)));
#else
    load_row(to, x->t->dtype, source_row(x, n), x->t->stride[3], x->dim, units_of(x->dim));
#endif
}

#endif

/* One value of a unit: weight c of a row, row n of a stacked factor. */
static inline float unit_value(const void *data, int64_t pair, int64_t half)
{
#if HEED_DOT
    return heed_bf16_to_f32(((const uint16_t *)data)[2 * pair + half]);
#else
    return (void)half, ((const float *)data)[pair];
#endif
}

/* Whether floats in rows, step bytes apart, are worth a copy that is read `uses` times. Those of one head among many often
 * begin at multiples of a large power of two, and so crowd into a few sets of the first cache. Unsigned: the step of a single
 * row may be any number. */
static inline int are_crowded(uint64_t step, int64_t dim, int64_t uses)
{
    const uint64_t apart = HEED_MIN(step & (~step + 1), 4096); /* its largest power of two */
    return step != (uint64_t)dim * sizeof(float) && apart && uses >= (int64_t)((1 << 20) / apart);
}

#if HEED_SPLIT
#include "pack_split.h"
#else
/* Rows as a left factor: where they lie if their elements are units already, else copied to `room`, ld units apart. */
INLINE left left_rows(const source *x, int64_t first, int64_t last, float *room, int64_t ld)
{
    const heed_tensor *t = x->t;
    if (t->stride[3] == 1 && t->dtype == (PER_UNIT == 1 ? HEED_F32 : HEED_BF16) && x->dim % PER_UNIT == 0 &&
        x->spacing % PER_UNIT == 0 && (uintptr_t)source_row(x, first) % sizeof(float) == 0 &&
        (PER_UNIT == 2 || !are_crowded((uint64_t)x->step, x->dim, x->p->Sk)))
        return (left){ (const float *)(const void *)source_row(x, first), x->spacing / PER_UNIT, 0, 0 };
    for (int64_t n = first; n < last; n++)
        unit_row(room + (n - first) * ld, x, n);
    return (left){ room, ld, 0, 0 };
}

/* Keys [first, last), times a power of two, as panels; `to` is the panel of key 0 and first a multiple of PANEL. W rows at
 * a time are transposed in registers, straight from memory where they are whole vectors; the last W have zeros behind them,
 * and what is beyond in its panel is read by nobody. */
static void pack_panels(float *to, const source *x, int64_t first, int64_t last, float scale)
{
    int64_t units = units_of(x->dim);
    int direct = x->t->stride[3] == 1 && x->dim == units * PER_UNIT && (PER_UNIT == 1 || x->t->dtype == HEED_BF16);
    float rows[W][HEED_MAX_HEAD_DIM + W];
    for (int64_t n = first; n < last; n += W) {
        float *panel = to + n / PANEL * PANEL * units + n % PANEL;
        const char *from[W];
        heed_dtype type = PER_UNIT == 1 ? x->t->dtype : HEED_F32; /* a pair of bf16 travels as a float */
        if (direct && n + W <= last)
            for (int64_t r = 0; r < W; r++)
                from[r] = source_row(x, n + r);
        else
            for (int64_t r = 0; r < W; r++) {
                if (n + r < last)
                    unit_row(rows[r], x, n + r);
                else
                    memset(rows[r], 0, (size_t)units * sizeof(float));
                from[r] = (const char *)rows[r];
                type = HEED_F32;
            }
        vec square[4] = { vec_zero(), vec_zero(), vec_zero(), vec_zero() };
        for (int64_t u = 0; u < units; u += W) {
            vec t[W];
            each(r, W)
                t[r] = vec_load_as(type, from[r], u);
            if (scale != 1)
                each(r, W)
                    t[r] = vec_scale_units(t[r], vec_set1(scale));
            vec_transpose(t);
            each(r, W)
                vec_store(panel + (u + r) * PANEL, t[r]);
            if (x->squares)
                each(r, W)
                    square[r % 4] = vec_madd(t[r], t[r], square[r % 4]);
        }
        if (x->squares)
            vec_store(x->squares + n, vec_add(vec_add(square[0], square[1]), vec_add(square[2], square[3])));
    }
}

/* Rows [first, last) stacked, `to` being row `first`, which is even. Columns padded to `width`. */
static void pack_stacked(float *to, const source *x, int64_t first, int64_t last, int64_t width)
{
#if HEED_DOT
    uint16_t pair[2][HEED_MAX_HEAD_DIM + 2 * W];
    int direct = x->t->stride[3] == 1 && x->dim % W == 0 && x->t->dtype == HEED_BF16;
    for (int64_t n = first; n < last; n += 2, to += stacked_ld(width)) {
        const uint16_t *a = pair[0], *b = pair[1];
        if (direct && n + 1 < last)
            a = (const uint16_t *)(const void *)source_row(x, n),
            b = (const uint16_t *)(const void *)source_row(x, n + 1);
        else {
            unit_row((float *)pair[0], x, n);
            if (n + 1 < last)
                unit_row((float *)pair[1], x, n + 1);
            else
                memset(pair[1], 0, sizeof pair[1]);
        }
        int64_t c = 0;
        for (; c + 2 * W <= width; c += 2 * W) {
            vec x = vec_load((const float *)(const void *)(a + c)), y = vec_load((const float *)(const void *)(b + c));
            vec_store(to + c, vec_zip(x, y, 0)), vec_store(to + c + W, vec_zip(x, y, 1));
        }
        if (c < width)
            vec_store(to + c, vec_load_pairs(a + c, b + c));
    }
#else
    for (int64_t n = first; n < last; n++, to += width)
        load_row(to, x->t->dtype, source_row(x, n), x->t->stride[3], x->dim, width);
#endif
}

#endif

/* Two vectors of a row, columns c and c + W, as units: those of column c, a multiple of 2 W, are at c / PER_UNIT. */
INLINE void store_units_of(float *row, int64_t c, vec x, vec y)
{
#if HEED_SPLIT
    store_parts(row + c / 2, WEIGHT_PLANE, x, y);
#elif HEED_DOT
    vec_store(row + c / 2, vec_to_pairs(x, y));
#else
    vec_store(row + c, x), vec_store(row + c + W, y);
#endif
}

/* Rows as a right factor where they lie: floats in whole vectors, evenly spaced, every step-th row of the tensor, used so
 * many times. Also where sums may be kept in place. */
static int usable_in_place(const heed_problem *p, const heed_tensor *t, int64_t dim, int64_t step, int64_t uses)
{
    return t->dtype == HEED_F32 && t->stride[3] == 1 && dim % W == 0 && !p->page &&
           !are_crowded((uint64_t)t->stride[2] * (uint64_t)step * sizeof(float), dim, uses);
}

/* Rows [first, last) as a right factor: where they lie, or stacked in `room`. */
static right right_rows(const source *x, int64_t first, int64_t last, float *room, int64_t width, int in_place)
{
    if (in_place)
        return (right){ (const float *)(const void *)source_row(x, first), x->spacing, PANEL, 0 };
    pack_stacked(room, x, first, last, width);
    return (right){ room, stacked_ld(width), PANEL, width };
}
