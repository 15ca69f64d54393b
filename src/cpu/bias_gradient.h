/* The gradients that are sums over many (batch, head, row): dbias and dsink. They are taken in a pass of their own, in
 * which each element of the result has one owner, who adds in a fixed order and in double.
 *
 * dbias has a size of 1 wherever bias is broadcast. An owner is a (batch, head, block of rows, block of keys) of dbias,
 * where a broadcast dimension counts as one: it walks over all that the dimension stands for, computing dS again. */

#if !HEED_SPLIT
/* Row i of dbias, from column `first` on, every step-th: n numbers. */
static void store_bias(const heed_tensor *t, int64_t b, int64_t h, int64_t i, int64_t first, int64_t step,
                       const float *from, int64_t n)
{
    int64_t at = b * t->stride[0] + h * t->stride[1] + i * t->stride[2] + first * t->stride[3];
    store_row((char *)t->data + at * (int64_t)heed_dtype_size(t->dtype), t->dtype, t->stride[3] * step, from, n, 1);
}

/* Columns that the key stride leaves out have no owner. */
static void clear_bias(const heed_tensor *t)
{
    static const float zeros[BC];
    for (int64_t b = 0; b < t->shape[0]; b++)
        for (int64_t h = 0; h < t->shape[1]; h++)
            for (int64_t i = 0; i < t->shape[2]; i++)
                for (int64_t c = 0; c < t->shape[3]; c += BC)
                    store_bias(t, b, h, i, c, 1, zeros, HEED_MIN(BC, t->shape[3] - c));
}

/* Sums of dS over the blocks of an owner, [rows or 1][keys or 1]. */
static void add_to_bias(const backward_block *b, double *sums, const float *dS, int one_row, int one_column)
{
    for (int64_t r = 0; r < b->rows; r++) {
        int64_t first = HEED_MAX(b->row[r].first, b->n0) - b->n0, last = HEED_MIN(b->row[r].last, b->n1) - b->n0;
        double *to = sums + (one_row ? 0 : r) * BC;
        for (int64_t c = first; c < last && one_column; c++)
            to[0] += dS[r * LDS + c];
        for (int64_t c = first; c < last && !one_column; c++)
            to[c] += dS[r * LDS + c];
    }
}

static void bias_owned(void *context, int64_t index, int thread)
{
    const backward_run *x = context;
    const heed_problem *p = x->j.p;
    const heed_tensor *t = &p->g.d_bias;
    int one_row = t->shape[2] == 1, one_column = t->shape[3] == 1;
    int64_t columns = one_column ? 1 : x->f.key_blocks, blocks = one_row ? 1 : x->f.row_blocks;
    int64_t key_block = index % columns, block = index / columns % blocks;
    int64_t h = index / columns / blocks % t->shape[1], batch = index / columns / blocks / t->shape[1];
    backward_block b;
    float *dS = at_bytes(&x->j, x->f.bias) + thread * bias_room();
    double *sums = (double *)(void *)(dS + BQ * LDS);
    int64_t col = 0, col_step = 1; /* the stride is the same for all sequences, but one without keys does not know it */
    memset(sums, 0, BQ * BC * sizeof *sums);
    block_of_thread(&b, x, thread);
    for (int64_t bi = 0; bi < p->B; bi++) {
        if (t->shape[0] != 1 && bi != batch)
            continue;
        heed_span_of(p, bi, &b.span);
        if (b.span.keys)
            col = b.span.col, col_step = b.span.col_step;
        for (int64_t kb = one_column ? 0 : key_block; kb < (one_column ? x->f.key_blocks : key_block + 1); kb++)
            for (int64_t hk = 0; hk < p->Hk; hk++) {
                int64_t n0 = kb * x->f.key_block, n1 = HEED_MIN(n0 + x->f.key_block, b.span.keys);
                if (n0 >= n1 || (t->shape[1] != 1 && h / p->G != hk))
                    continue;
                b.hk = hk;
                load_keys(&b, n0, n1);
                for (int64_t hq = hk * p->G; hq < (hk + 1) * p->G; hq++)
                    for (int64_t i = one_row ? 0 : block; i < (one_row ? x->f.row_blocks : block + 1); i++) {
                        row_bounds bounds = *bounds_of(x, &b.span, i);
                        if ((t->shape[1] != 1 && hq != h) || i * x->f.block >= b.span.rows || kb < bounds.first ||
                            kb > bounds.last)
                            continue;
                        load_rows(&b, hq, i * x->f.block);
                        for (int64_t tile = 0; tile < b.score_tiles; tile++)
                            score_rows(&b, tile, dS);
                        add_to_bias(&b, sums, dS, one_row, one_column);
                    }
            }
    }
    int64_t rows = one_row ? 1 : HEED_MIN(x->f.block, p->Sq - block * x->f.block), first = key_block * x->f.key_block;
    int64_t keys = one_column ? 1 : HEED_MIN(x->f.key_block, x->f.keys - first), column = col + first * col_step;
    if (one_column)
        column = 0;
    /* With a key stride the last block may reach beyond the last column. */
    while (keys > 0 && column + (keys - 1) * col_step >= t->shape[3])
        keys--;
    for (int64_t r = 0; r < rows; r++) {
        float row[BC];
        for (int64_t c = 0; c < keys; c++)
            row[c] = (float)sums[r * BC + c];
        store_bias(t, batch, h, block * x->f.block + r, column, col_step, row, keys);
    }
}

#endif

/* dsink_h = -sum over batch and rows of exp(sink_h - lse_i) delta_i; rows that see no key give nothing. */
static void sink_owned(void *context, int64_t h, int thread)
{
    const backward_run *x = context;
    const heed_problem *p = x->j.p;
    const heed_tensor *lse = &p->a.lse;
    double sink = ((const float *)p->a.sink.data)[h * p->a.sink.stride[1]], sum = 0;
    (void)thread;
    for (int64_t b = 0; b < p->B; b++) {
        heed_span s;
        heed_span_of(p, b, &s);
        for (int64_t i = 0; i < s.rows; i++) {
            float l = ((const float *)
                           lse->data)[s.q_batch * lse->stride[0] + h * lse->stride[1] + (s.q_row + i) * lse->stride[2]];
            if (l != -INFINITY)
                sum -= exp(sink - l) * at_bytes(&x->j, x->f.delta)[row_index(x, &s, h, i)];
        }
    }
    ((float *)p->g.d_sink.data)[h * p->g.d_sink.stride[1]] = (float)sum;
}
