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
static inline int64_t panels_size(int64_t keys, int64_t dim) { return round_up(keys, PANEL) * units_of(dim); }

/* What a key head or query head looks like in memory, once pages and strides are known. */
typedef struct source {
    const heed_problem *p;
    const heed_span *s;
    const heed_tensor *t;
    int64_t head, dim;
    int keys; /* rows are keys (k, v), not rows of q */
} source;

static inline const char *source_row(const source *x, int64_t n)
{
    int64_t at = x->keys ? heed_key_offset(x->p, x->s, x->t, x->head, n)
                         : x->s->q_batch * x->t->stride[0] + x->head * x->t->stride[1] +
                               (x->s->q_row + n) * x->t->stride[2];
    return (const char *)x->t->data + at * (int64_t)heed_dtype_size(x->t->dtype);
}

/* One row as units. With HEED_DOT the tensor is bf16 and scale a power of two, so that nothing is rounded; a float
 * tensor (dO of an fp32 o) is rounded to bf16. */
static void unit_row(float *to, const source *x, int64_t n, float scale)
{
#if HEED_DOT
    float wide[HEED_MAX_HEAD_DIM + W];
    const char *row = source_row(x, n);
    int64_t padded = 2 * units_of(x->dim);
    if (x->t->dtype == HEED_BF16 && x->t->stride[3] == 1 && scale == 1) {
        memcpy(to, row, (size_t)x->dim * 2);
        memset((uint16_t *)to + x->dim, 0, (size_t)(padded - x->dim) * 2);
        return;
    }
    load_row(wide, x->t->dtype, row, x->t->stride[3], x->dim, padded <= HEED_MAX_HEAD_DIM + W ? padded : x->dim, scale);
    for (int64_t c = 0; c < padded; c += 2 * W)
        vec_store_bf16_pair((uint16_t *)to + c, vec_load(wide + c), vec_load(wide + c + W));
#else
    load_row(to, x->t->dtype, source_row(x, n), x->t->stride[3], x->dim, units_of(x->dim), scale);
#endif
}

/* Keys [first, last) as panels into the head's buffer, `to` being the panel of key 0; first is a multiple of PANEL.
 * W rows at a time are transposed in registers, straight from memory where they are whole vectors. */
static void pack_panels(float *to, const source *x, int64_t first, int64_t last)
{
    int64_t units = units_of(x->dim);
    int direct = x->t->stride[3] == 1 && x->dim == units * PER_UNIT && (PER_UNIT == 1 || x->t->dtype == HEED_BF16);
    float rows[W][HEED_MAX_HEAD_DIM + W];
    for (int64_t n = first; n < round_up(last, PANEL); n += W) {
        float *panel = to + n / PANEL * PANEL * units + n % PANEL;
        const char *from[W];
        heed_dtype type = PER_UNIT == 1 ? x->t->dtype : HEED_F32; /* a pair of bf16 travels as a float */
        for (int64_t r = 0; r < W; r++) {
            if (direct && n + W <= last) {
                from[r] = source_row(x, n + r);
                continue;
            }
            if (n + r < last)
                unit_row(rows[r], x, n + r, 1);
            else
                memset(rows[r], 0, (size_t)units * sizeof(float));
            from[r] = (const char *)rows[r];
            type = HEED_F32;
        }
        for (int64_t u = 0; u < units; u += W) {
            vec t[W];
            UNROLL for (int r = 0; r < W; r++)
                t[r] = vec_load_as(type, from[r], u);
            vec_transpose(t);
            UNROLL for (int r = 0; r < W; r++)
                vec_store(panel + (u + r) * PANEL, t[r]);
        }
    }
}

/* Rows [first, last) stacked, `to` being row `first`, which is even. Columns padded to `width`. */
static void pack_stacked(float *to, const source *x, int64_t first, int64_t last, int64_t width)
{
#if HEED_DOT
    uint16_t pair[2][HEED_MAX_HEAD_DIM + 2 * W];
    for (int64_t n = first; n < last; n += 2, to += width) {
        unit_row((float *)pair[0], x, n, 1);
        if (n + 1 < last)
            unit_row((float *)pair[1], x, n + 1, 1);
        else
            memset(pair[1], 0, sizeof pair[1]);
        uint16_t *out = (uint16_t *)to;
        for (int64_t c = 0; c < width; c++) {
            out[2 * c] = c < x->dim ? pair[0][c] : 0;
            out[2 * c + 1] = c < x->dim ? pair[1][c] : 0;
        }
    }
#else
    for (int64_t n = first; n < last; n++, to += width)
        load_row(to, x->t->dtype, source_row(x, n), x->t->stride[3], x->dim, width, 1);
#endif
}

/* A float tensor whose rows are whole vectors, evenly spaced, is a right factor as it lies. */
static int usable_in_place(const heed_tensor *t, int64_t dim, const heed_problem *p)
{
    return PER_UNIT == 1 && t->dtype == HEED_F32 && t->stride[3] == 1 && dim % W == 0 && !(p->page && t == &p->a.k) &&
           !(p->page && t == &p->a.v);
}
