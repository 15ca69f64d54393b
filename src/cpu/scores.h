/* What stands between a product Q K^T and its softmax: scale, softcap, bias, ALiBi, mask, the band. A block of scores is
 * a few rows of S with BC columns; column c is key n0 + c of the sequence. Plain attention passes through here at the
 * cost of a comparison for each row. */

/* A row of the problem: query head, row of the sequence, keys [first, last) of the band. */
typedef struct query {
    int64_t h, i, first, last;
} query;

typedef struct job {
    const heed_problem *p;
    const heed_plan *plan;
    float k_scale; /* a power of two, or 0, with the sign of scale: goes into K as it is packed */
    float s_scale; /* S = s_scale * (tile's product), at least 1 */
    int changes;   /* softcap, bias, ALiBi or mask: scores need a visit */
    int partial;   /* some rows may see keys that others do not */
    uint64_t seed;
    float keep_scale; /* 1 / (1 - dropout) */
    char *workspace;
    unsigned char *left; /* [B * Hk], or NULL: heads that HEED_SPLIT leaves to another kernel, which takes only them */
} job;

/* ---- Heads that are left to another kernel ---------------------------------------------------------------------- */

/* Parts of floats that are huge, or tiny as a whole, do not add up: AMX knows neither infinity less infinity nor numbers
 * below 2^-126. A head in which there are such numbers, of those that count, is computed once more by the AVX-512 kernel. So
 * are sequences that the planner would not have given to HEED_SPLIT if they were alone. Nothing else in the batch decides
 * about a head, nor do the threads. */
#define SPLIT_MOST 0x1p40f
#define SPLIT_LEAST 0x1p-90f

/* In the backward, where numbers meet that are products themselves, and gradients may be small as a whole. */
static inline int is_moderate(float top) { return (top <= 0x1p30f && top >= 0x1p-30f) || top == 0; }

static inline int is_left(const job *j, int64_t head)
{
    return j->left && __atomic_load_n(j->left + head, __ATOMIC_RELAXED) == !!HEED_SPLIT;
}

static inline void leave_head(const job *j, int64_t head) { __atomic_store_n(j->left + head, 1, __ATOMIC_RELAXED); }

static inline size_t left_bytes(const heed_problem *p) { return ((size_t)(p->B * p->Hk) + 63) / 64 * 64; }

/* Those that are known from the beginning. */
static inline void leave_short(job *j)
{
    const heed_problem *p = j->p;
    for (int64_t b = 0; b < p->B; b++) {
        heed_span s;
        heed_span_of(p, b, &s);
        int few = heed_are_few(p, s.rows, s.keys);
        memset(j->left + b * p->Hk, (few && !j->plan->forced) || j->s_scale > 0x1p20f, (size_t)p->Hk);
    }
}

#if HEED_SPLIT
/* What was left, by the kernel that takes all: its workspace follows the marks. */
typedef heed_status left_kernel(const heed_problem *, const heed_plan *, const heed_exec *, unsigned char *left);
static heed_status do_left(const job *j, const heed_exec *exec, left_kernel *kernel)
{
    const heed_problem *p = j->p;
    if (!memchr(j->left, 1, (size_t)(p->B * p->Hk)))
        return HEED_OK;
    heed_exec rest = *exec;
    rest.workspace = (char *)exec->workspace + left_bytes(p);
    return kernel(p, j->plan, &rest, j->left);
}
#endif

static void job_start(job *j, const heed_problem *p, const heed_plan *plan, const heed_exec *x, unsigned char *left)
{
    const heed_attention *a = &p->a;
    *j = (job){ .p = p, .plan = plan, .s_scale = 1, .workspace = x->workspace, .left = left };
    if (a->scale != 0) { /* only a power of two, as it rounds nothing; at most scale and 1, lest a product overflow */
        int exponent;
        frexpf(a->scale, &exponent);
        int power = HEED_MIN(exponent - 1, 0);
        j->s_scale = ldexpf(fabsf(a->scale), -power);
        j->k_scale = copysignf(ldexpf(1, power), a->scale);
    }
    j->changes = a->softcap > 0 || a->bias.data || a->alibi.data || a->mask.data;
    j->partial = p->left != HEED_UNBOUNDED || p->right != HEED_UNBOUNDED || a->mask.data || a->bias.data;
    j->seed = a->dropout_seed;
    j->keep_scale = 65536.0f / (float)(65536 - p->drop_below);
}

/* The height of tiles where rows see up to so many keys. */
static inline int64_t tile_height(const job *j, int64_t keys) { return j->partial && keys <= BC ? FLAT : MR; }

/* Likewise in the forward. */
static inline int64_t forward_height(const job *j, int64_t keys)
{
    return !j->partial && keys <= FEW ? TALL : tile_height(j, keys);
}

static inline void query_at(const heed_problem *p, const heed_span *s, int64_t h, int64_t i, query *q)
{
    q->h = h, q->i = i, q->first = 0, q->last = s->keys;
    if (p->left != HEED_UNBOUNDED || p->right != HEED_UNBOUNDED)
        heed_band(p, s, i, &q->first, &q->last);
}

/* Of row q and keys [n, n + count): the bias as floats, or 1 and 0 of a mask. The columns need not be neighbours. What the row
 * below reads in the next tile is asked for: a whole matrix of them comes from memory. */
static void load_bias(float *out, const heed_tensor *t, const heed_span *s, query q, int64_t n, int64_t count)
{
    int64_t step = t->stride[3] * s->col_step, size = (int64_t)heed_dtype_size(t->dtype),
            below = t->stride[2] * size * MR;
    const char *row = (const char *)t->data + (s->b * t->stride[0] + q.h * t->stride[1] + q.i * t->stride[2] +
                                               (s->col + n * s->col_step) * t->stride[3]) *
                                                  size;
    if (below && step == 1 && q.i + MR < s->rows)
        for (int64_t at = 0; at < count * size; at += LINE)
            __builtin_prefetch(row + below + at, 0, 2);
    if (t->dtype == HEED_BOOL && step == 1) /* in vectors, as the compiler knows the step */
        for (int64_t c = 0; c < count; c++)
            out[c] = ((const uint8_t *)row)[c] ? 1.0f : 0.0f;
    else if (t->dtype == HEED_BOOL)
        for (int64_t c = 0; c < count; c++)
            out[c] = ((const uint8_t *)row)[c * step] ? 1.0f : 0.0f;
    else
        load_row(out, t->dtype, row, step, count, count);
}

static const float lane_numbers[16] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };

/* -inf to columns [from, to) of the block at key n0 that the row's band leaves out. They begin and end with whole vectors. */
static inline void hide_columns(float *s, const query *q, int64_t n0, int64_t from, int64_t to)
{
    int64_t first = HEED_MIN(HEED_MAX(q->first - n0, from), to), last = HEED_MAX(HEED_MIN(q->last - n0, to), first);
    vec hidden = vec_set1(-INFINITY), index = vec_load(lane_numbers);
    for (int64_t c = from; c < first; c += W)
        vec_store(s + c, vec_less(index, vec_set1((float)(first - c)), hidden, vec_load(s + c)));
    for (int64_t c = HEED_MAX(last / W * W, from); c < to; c += W)
        vec_store(s + c, vec_less(index, vec_set1((float)(last - c)), vec_load(s + c), hidden));
}

/* Scale, softcap, bias, ALiBi and mask of the columns that the band lets a row see. */
static void change_row(const job *j, const heed_span *span, query q, float *s, float *slope, int64_t n0, int64_t from,
                       int64_t to)
{
    const heed_attention *a = &j->p->a;
    int64_t first = HEED_MAX(q.first - n0, from), last = HEED_MIN(q.last - n0, to);
    if (first >= last)
        return;
    float bias[BC + W], mask[BC + W];
    if (a->bias.data)
        load_bias(bias + first, &a->bias, span, q, n0 + first, last - first);
    if (a->mask.data)
        load_bias(mask + first, &a->mask, span, q, n0 + first, last - first);
    float alibi = a->alibi.data
                      ? ((const float *)a->alibi.data)[span->b * a->alibi.stride[0] + q.h * a->alibi.stride[1]]
                      : 0;
    float cap = a->softcap, per_cap = cap > 0 ? 1 / cap : 0;
    int64_t distance = span->r0 + (n0 + first) * span->r_step - (span->p0 + q.i * span->p_step);
    vec hidden = vec_set1(-INFINITY); /* the last steps may run over columns that are reset when all is done */
    for (int64_t c = first; c < last; c += W)
        vec_store(s + c, vec_mul(vec_load(s + c), vec_set1(j->s_scale)));
    if (cap > 0)
        for (int64_t c = first; c < last; c += W) {
            vec t = vec_tanh(vec_mul(vec_load(s + c), vec_set1(per_cap)));
            vec_store(s + c, vec_mul(t, vec_set1(cap)));
            if (slope)
                vec_store(slope + c, vec_sub(vec_set1(1), vec_mul(t, t)));
        }
    if (a->bias.data)
        for (int64_t c = first; c < last; c += W) {
            vec x = vec_load(bias + c);
            vec sum = vec_add(vec_load(s + c), x);
            vec_store(s + c, vec_less(x, vec_set1(-FLT_MAX), hidden, sum)); /* also if s is NaN */
        }
    if (alibi != 0)
        for (int64_t c = first; c < last; c++)
            s[c] -= alibi * (float)fabs((double)(distance + (c - first) * span->r_step));
    if (a->mask.data)
        for (int64_t c = first; c < last; c += W)
            vec_store(s + c, vec_less(vec_load(mask + c), vec_set1(1), hidden, vec_load(s + c)));
}

/* S of one row from the tile's products, columns [from, to) of the block at key n0, in place; -inf where the row does
 * not see the key. slope, where wanted: the derivative of the softcap. */
static inline void adjust_row(const job *j, const heed_span *span, query q, float *s, float *slope, int64_t n0,
                              int64_t from, int64_t to)
{
    if (j->changes)
        change_row(j, span, q, s, slope, n0, from, to);
    hide_columns(s, &q, n0, from, to);
}

/* out[c] = keep_scale where dropout keeps the pair, else 0; key n0 + c. Eight neighbouring positions share a draw: all draws
 * of the row come first, which a compiler makes vectors of. */
static void keep_row(const job *j, const heed_span *s, query q, float *out, int64_t n0, int64_t from, int64_t to)
{
    uint32_t words[BC + 1][4];
    uint16_t numbers[(BC + 1) * 8];
    const int64_t step = s->r_step, r = s->r0 + (n0 + from) * step, keys = HEED_MIN(to, s->keys - n0) - from;
    const int dense = step < 8; /* else each key has a draw of its own */
    const int64_t draws = dense && keys > 0 ? ((r + (keys - 1) * step) >> 3) - (r >> 3) + 1 : keys;
    const uint32_t row = (uint32_t)(s->p0 + q.i * s->p_step), head = (uint32_t)q.h, batch = (uint32_t)s->b;
    for (int64_t i = 0; i < draws; i++) {
        uint32_t counter[4] = { (uint32_t)(dense ? (r >> 3) + i : (r + i * step) >> 3), row, head, batch };
        heed_philox(j->seed, counter, words[i]);
    }
    for (int64_t i = 0; i < draws; i++)
        each(k, 8)
            numbers[8 * i + k] = (uint16_t)(words[i][k / 2] >> (16 * (k % 2)));
    const uint32_t below = j->p->drop_below;
    const float kept = j->keep_scale;
    if (step == 1)
        for (int64_t c = 0; c < keys; c++)
            out[from + c] = numbers[(r & 7) + c] < below ? 0 : kept;
    else
        for (int64_t c = 0; c < keys; c++)
            out[from + c] = numbers[dense ? (r & 7) + c * step : 8 * c + ((r + c * step) & 7)] < below ? 0 : kept;
    for (int64_t c = HEED_MAX(from, s->keys - n0); c < to; c++)
        out[c] = 0; /* beyond the last key */
}
