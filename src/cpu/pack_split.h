/* pack.h's forms for HEED_SPLIT: each float becomes three bf16 (vec_parts), in three planes of pairs. A pair is made of
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
    vec a[3], b[3];
    vec_parts(x, a), vec_parts(y, b);
    each(i, 3)
        vec_store(to + i * plane, vec_join(a[i], b[i]));
}

static void raise_top(const source *x, vec top)
{
    float t = vec_largest(top);
    if (x->top && !(*x->top >= t)) /* NaN stays */
        *x->top = t;
}

/* Row n as floats, where it lies if it is whole vectors, else in `room` with zeros behind it. */
INLINE const float *float_row(const source *x, int64_t n, float *room, int64_t padded)
{
    const char *row = source_row(x, n);
    if (x->t->dtype == HEED_F32 && x->t->stride[3] == 1 && x->dim == padded)
        return (const float *)(const void *)row;
    load_row(room, x->t->dtype, row, x->t->stride[3], x->dim, padded);
    return room;
}

static left left_rows(const source *x, int64_t first, int64_t last, float *to, int64_t ld)
{
    float room[HEED_MAX_HEAD_DIM + 2 * W];
    int64_t units = units_of(x->dim);
    vec top = vec_zero();
    for (int64_t n = first; n < last; n++) {
        const float *row = float_row(x, n, room, 2 * units);
        for (int64_t c = 0; c < 2 * units; c += 2 * W) {
            vec a = vec_load(row + c), b = vec_load(row + c + W);
            top = vec_larger(vec_larger(top, a), b);
            store_parts(to + (n - first) * ld + c / 2, units, a, b);
        }
    }
    raise_top(x, top);
    return (left){ to, ld, 0, units };
}

static void unit_row(float *to, const source *x, int64_t n) { left_rows(x, n, n + 1, to, 0); }

static void pack_panels(float *to, const source *x, int64_t first, int64_t last, float scale)
{
    int64_t units = units_of(x->dim), plane = units * PANEL;
    float rooms[W][HEED_MAX_HEAD_DIM + 2 * W];
    static const float zeros[HEED_MAX_HEAD_DIM + 2 * W];
    vec top = vec_zero(), factor = vec_set1(scale);
    for (int64_t n = first; n < round_up(last, PANEL); n += W) {
        float *panel = to + n / PANEL * PANEL * units * PLANES + n % PANEL;
        const float *from[W];
        for (int64_t r = 0; r < W; r++)
            from[r] = n + r < last ? float_row(x, n + r, rooms[r], 2 * units) : zeros;
        for (int64_t c = 0; c < 2 * units; c += 2 * W) {
            vec a[W], b[W];
            each(r, W) {
                a[r] = vec_load(from[r] + c), b[r] = vec_load(from[r] + c + W);
                top = vec_larger(vec_larger(top, a[r]), b[r]);
            }
            vec_transpose(a), vec_transpose(b);
            each(r, W)
                store_parts(panel + (c / 2 + r) * PANEL, plane, vec_mul(a[r], factor), vec_mul(b[r], factor));
        }
    }
    raise_top(x, top);
}

static void pack_stacked(float *to, const source *x, int64_t first, int64_t last, int64_t width)
{
    float rooms[2][HEED_MAX_HEAD_DIM + W];
    static const float zeros[HEED_MAX_HEAD_DIM + W];
    vec top = vec_zero();
    for (int64_t n = first; n < last; n += 2 * W)
        for (int64_t r = n; r < n + W; r++, to += stacked_ld(width)) {
            const float *a = r < last ? float_row(x, r, rooms[0], width) : zeros;
            const float *b = r + W < last ? float_row(x, r + W, rooms[1], width) : zeros;
            for (int64_t c = 0; c < width; c += W) {
                vec p = vec_load(a + c), q = vec_load(b + c);
                top = vec_larger(vec_larger(top, p), q);
                store_parts(to + c, width, p, q);
            }
        }
    raise_top(x, top);
}

/* Rows [first, last) turned, room for `rows` of them; their units are those of stacked rows. */
static left pack_turned(float *to, const source *x, int64_t first, int64_t last, int64_t rows, int64_t width)
{
    int64_t plane = rows / 2, ld = PLANES * plane + W;
    float rooms[2 * W][HEED_MAX_HEAD_DIM + W];
    static const float zeros[HEED_MAX_HEAD_DIM + W];
    vec top = vec_zero();
    for (int64_t n = first; n < last; n += 2 * W) {
        const float *from[2 * W];
        for (int64_t r = 0; r < 2 * W; r++)
            from[r] = n + r < last ? float_row(x, n + r, rooms[r], width) : zeros;
        for (int64_t c = 0; c < width; c += W) {
            vec a[W], b[W];
            each(r, W) {
                a[r] = vec_load(from[r] + c), b[r] = vec_load(from[r + W] + c);
                top = vec_larger(vec_larger(top, a[r]), b[r]);
            }
            vec_transpose(a), vec_transpose(b);
            each(r, W)
                store_parts(to + (c + r) * ld + (n - first) / 2, plane, a[r], b[r]);
        }
    }
    raise_top(x, top);
    return (left){ to, ld, 0, plane };
}
