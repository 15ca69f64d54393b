/* pack.h's forms for HEED_SPLIT: each float becomes two or three bf16 (vec_parts), in as many planes of pairs. A pair is made of
 * numbers that lie W apart, among 2 W that follow each other, and not of neighbours: so pairs are joined without moving
 * anything between lanes. All that is packed is padded with zeros to whole steps of sums (tile_amx.h).
 *
 *     rows       [row][plane][unit of D]                      the unit of columns c and c + W is c / (2 W) W + c % W
 *     panels     [key / PANEL][plane][unit of D][PANEL]
 *     stacked    [unit of rows][plane][columns], W more       likewise with rows
 *     turned     [column][plane][unit of rows], W more        Q^T and dO^T as the left factor
 */

/* Planes of two vectors. */
INLINE void store_parts(float *to, int64_t plane, vec x, vec y)
{
    vec a[PLANES], b[PLANES];
    vec_parts(x, a), vec_parts(y, b);
    each(i, PLANES)
        vec_store(to + i * plane, vec_join(a[i], b[i]));
}

static void raise_top(const source *x, vec top)
{
    float t = vec_largest(top);
    if (x->top && !(*x->top >= t)) /* NaN stays */
        *x->top = t;
}

/* Rows are read where they lie if they are whole vectors, fp32 or with two parts fp16; else by way of `room`, as floats with
 * zeros behind them. */
static inline int are_whole(const source *x, heed_dtype type, int64_t padded)
{
    return x->t->dtype == type && x->t->stride[3] == 1 && x->dim == padded;
}

INLINE const void *whole_row(heed_dtype type, const source *x, int64_t n, float *room, int64_t padded)
{
    const char *row = source_row(x, n);
    if (type == HEED_F16 || are_whole(x, HEED_F32, padded))
        return row;
    load_row(room, x->t->dtype, row, x->t->stride[3], x->dim, padded);
    return room;
}

/* f(type, x, padded, ...) with the type that whole_row() gives, a constant. */
#define FOR_ROWS(f, x, padded, ...)                                                                                    \
    (HEED_SPLIT == 2 && are_whole(x, HEED_F16, padded) ? f(HEED_F16, x, padded, __VA_ARGS__)                           \
                                                       : f(HEED_F32, x, padded, __VA_ARGS__))

INLINE void split_rows(heed_dtype type, const source *x, int64_t padded, int64_t first, int64_t last, float *to,
                       int64_t ld)
{
    float room[HEED_MAX_HEAD_DIM + 2 * W];
    vec top = vec_zero();
    for (int64_t n = first; n < last; n++, to += ld) {
        const void *row = whole_row(type, x, n, room, padded);
        for (int64_t c = 0; c < padded; c += 2 * W) {
            vec a = vec_load_as(type, row, c), b = vec_load_as(type, row, c + W);
            if (x->top)
                top = vec_larger(vec_larger(top, a), b);
            store_parts(to + c / 2, padded / 2, a, b);
        }
    }
    raise_top(x, top);
}

static left left_rows(const source *x, int64_t first, int64_t last, float *to, int64_t ld)
{
    FOR_ROWS(split_rows, x, 2 * units_of(x->dim), first, last, to, ld);
    return (left){ to, ld, 0, units_of(x->dim) };
}

static void unit_row(float *to, const source *x, int64_t n) { left_rows(x, n, n + 1, to, 0); }

static const float zero_row[HEED_MAX_HEAD_DIM + 2 * W];

INLINE void split_panels(heed_dtype type, const source *x, int64_t padded, int64_t first, int64_t last, float *to,
                         float scale)
{
    int64_t units = padded / 2, plane = units * PANEL;
    float rooms[W][HEED_MAX_HEAD_DIM + 2 * W];
    vec top = vec_zero(), factor = vec_set1(scale);
    for (int64_t n = first; n < round_up(last, PANEL); n += W) {
        float *panel = to + n / PANEL * PANEL * units * PLANES + n % PANEL;
        const void *from[W];
        for (int64_t r = 0; r < W; r++)
            from[r] = n + r < last ? whole_row(type, x, n + r, rooms[r], padded) : zero_row;
        for (int64_t c = 0; c < padded; c += 2 * W) {
            vec a[W], b[W];
            each(r, W) {
                a[r] = vec_load_as(type, from[r], c), b[r] = vec_load_as(type, from[r], c + W);
                top = vec_larger(vec_larger(top, a[r]), b[r]);
            }
            vec_transpose(a), vec_transpose(b);
            each(r, W)
                store_parts(panel + (c / 2 + r) * PANEL, plane, vec_mul(a[r], factor), vec_mul(b[r], factor));
        }
    }
    raise_top(x, top);
}

static void pack_panels(float *to, const source *x, int64_t first, int64_t last, float scale)
{
    FOR_ROWS(split_panels, x, 2 * units_of(x->dim), first, last, to, scale);
}

INLINE void split_stacked(heed_dtype type, const source *x, int64_t width, int64_t first, int64_t last, float *to)
{
    float rooms[2][HEED_MAX_HEAD_DIM + W];
    vec top = vec_zero();
    for (int64_t n = first; n < last; n += 2 * W)
        for (int64_t r = n; r < n + W; r++, to += stacked_ld(width)) {
            const void *a = r < last ? whole_row(type, x, r, rooms[0], width) : zero_row;
            const void *b = r + W < last ? whole_row(type, x, r + W, rooms[1], width) : zero_row;
            for (int64_t c = 0; c < width; c += W) {
                vec p = vec_load_as(type, a, c), q = vec_load_as(type, b, c);
                if (x->top)
                    top = vec_larger(vec_larger(top, p), q);
                store_parts(to + c, width, p, q);
            }
        }
    raise_top(x, top);
}

static void pack_stacked(float *to, const source *x, int64_t first, int64_t last, int64_t width)
{
    FOR_ROWS(split_stacked, x, width, first, last, to);
}

INLINE void split_turned(heed_dtype type, const source *x, int64_t width, int64_t first, int64_t last, float *to,
                         int64_t ld, int64_t plane)
{
    float rooms[2 * W][HEED_MAX_HEAD_DIM + W];
    vec top = vec_zero();
    for (int64_t n = first; n < last; n += 2 * W) {
        const void *from[2 * W];
        for (int64_t r = 0; r < 2 * W; r++)
            from[r] = n + r < last ? whole_row(type, x, n + r, rooms[r], width) : zero_row;
        for (int64_t c = 0; c < width; c += W) {
            vec a[W], b[W];
            each(r, W) {
                a[r] = vec_load_as(type, from[r], c), b[r] = vec_load_as(type, from[r + W], c);
                top = vec_larger(vec_larger(top, a[r]), b[r]);
            }
            vec_transpose(a), vec_transpose(b);
            each(r, W)
                store_parts(to + (c + r) * ld + (n - first) / 2, plane, a[r], b[r]);
        }
    }
    raise_top(x, top);
}

/* Rows [first, last) turned, room for `rows` of them; their units are those of stacked rows. */
static left pack_turned(float *to, const source *x, int64_t first, int64_t last, int64_t rows, int64_t width)
{
    int64_t plane = rows / 2, ld = PLANES * plane + W;
    FOR_ROWS(split_turned, x, width, first, last, to, ld, plane);
    return (left){ to, ld, 0, plane };
}
