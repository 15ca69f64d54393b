/* Descriptors made of bytes: a small legal problem, then edits that put hostile values into any of its fields. heed has
 * to answer each with a status, a message when it refuses, and nothing out of bounds when it does not: every tensor that
 * fits has a heap block of exactly its extent, so that ASan sees the first byte too many. Problems that no memory of
 * ours could hold are only planned, never run. Structs may be missing, and the workspace may be wrong in every way. */
#include "heed.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_BLOCK = 1 << 16, MAX_WORK = 1 << 15, MAX_SEQUENCES = 16, MAX_TABLE = 64, UNTOUCHED = 0xA5 };

#define CHECK(condition) ((condition) ? (void)0 : __builtin_trap())

/* ---- The input, zeros past its end ---------------------------------------------------------------------------------- */

typedef struct reader {
    const uint8_t *data;
    size_t size;
} reader;

static uint8_t byte(reader *r) { return r->size ? (r->size--, *r->data++) : 0; }

static int below(reader *r, int n) { return byte(r) % n; }

static uint64_t word(reader *r, int bytes)
{
    uint64_t w = 0;
    while (bytes--)
        w = w << 8 | byte(r);
    return w;
}

static float any_float(reader *r)
{
    uint32_t bits = (uint32_t)word(r, 4);
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static int64_t any_size(reader *r)
{
    static const int64_t hostile[] = {
        0, 1, -1, 2, 512, 513, INT32_MAX, INT64_C(1) << 32, INT64_C(1) << 61, INT64_MAX, INT64_MIN, INT64_MIN + 1
    };
    int n = below(r, 16);
    return n < 12 ? hostile[n] : (int8_t)byte(r);
}

/* ---- Problem -------------------------------------------------------------------------------------------------------- */

enum { Q, K, V, O, LSE, MASK, BIAS, ALIBI, SINK, D_O, D_LSE, DELTA, D_Q, D_K, D_V, D_BIAS, D_SINK, TENSORS };

/* What is wrong with the workspace. */
typedef enum flaw { NONE, SHORT, MISSING, ASTRAY, SHARED, FLAWS } flaw;

enum {
    ATTENTION = 1,
    GRADIENT = 2,
    EXEC = 4,
    TEXT = 8,
    LATER = 16
}; /* what is missing; from LATER on: of small calls */

typedef struct call {
    heed_attention a;
    heed_gradient g;
    heed_exec x;
    heed_tensor *tensor[TENSORS];
    char *block[TENSORS]; /* what to free */
    size_t bytes[TENSORS];
    int misplaced[TENSORS]; /* bytes by which data is off */
    int32_t numbers[4][MAX_SEQUENCES + 1], table[MAX_TABLE];
    uint64_t seeds[2];
    int backward, runnable;
    unsigned missing;
    flaw flaw;
} call;

static int is_output(int t) { return t == O || t == LSE || t >= D_Q; }

static void shape(call *c, int present, int t, heed_dtype dtype, int64_t b, int64_t h, int64_t rows, int64_t columns)
{
    if (present)
        *c->tensor[t] = (heed_tensor){ .data = c, .dtype = dtype, .shape = { b, h, rows, columns } };
}

static void legal_tensors(call *c, reader *r, unsigned with)
{
    int64_t B = 1 + below(r, 3), Hk = 1 + below(r, 2), Hq = Hk * (1 + below(r, 3)), Sq = below(r, 9), Sk = below(r, 17);
    int64_t D = 1 + below(r, 40), Dv = 1 + below(r, 40);
    heed_dtype type = (heed_dtype)below(r, 3), result = with & 2 ? HEED_F32 : type;
    shape(c, 1, Q, type, B, Hq, Sq, D);
    shape(c, 1, K, type, B, Hk, Sk, D);
    shape(c, 1, V, type, B, Hk, Sk, Dv);
    shape(c, 1, O, result, B, Hq, Sq, Dv);
    shape(c, with & (1 | 4), LSE, HEED_F32, B, Hq, Sq, 1);
    shape(c, with & 8, MASK, HEED_BOOL, B, 1, Sq, Sk);
    shape(c, with & 16, BIAS, HEED_F32, 1, Hq, Sq, Sk);
    shape(c, with & 32, ALIBI, HEED_F32, 1, Hq, 1, 1);
    shape(c, with & 64, SINK, HEED_F32, 1, Hq, 1, 1);
    c->backward = with & 1;
    if (!c->backward)
        return;
    shape(c, 1, D_O, result, B, Hq, Sq, Dv);
    shape(c, with & 128, D_LSE, HEED_F32, B, Hq, Sq, 1);
    shape(c, with & 256, D_Q, type, B, Hq, Sq, D);
    shape(c, with & 512, D_K, type, B, Hk, Sk, D);
    shape(c, with & 1024, D_V, HEED_F32, B, Hk, Sk, Dv);
    shape(c, (with & 2048) && (with & 16), D_BIAS, HEED_F32, 1, Hq, Sq, Sk);
    shape(c, (with & 4096) && (with & 64), D_SINK, HEED_F32, 1, Hq, 1, 1);
}

static void legal_rules(call *c, reader *r, unsigned with)
{
    heed_attention *a = &c->a;
    a->causal = with >> 13 & 1;
    a->align = (heed_align)(with >> 14 & 1);
    if (with & 1 << 15)
        a->windowed = 1, a->window_left = below(r, 6) - 1, a->window_right = below(r, 6) - 1;
    if (with & 1 << 16)
        a->key_stride = 1 + below(r, 5);
    if (with & 1 << 17)
        a->softcap = 2;
    if (with & 1 << 18)
        a->dropout = 0.25f, a->dropout_seed = byte(r);
    for (int i = 0; i < 4; i++)
        for (int n = 0; n <= MAX_SEQUENCES; n++)
            c->numbers[i][n] = with & 1 << 22 ? (int32_t)any_size(r) : below(r, 20);
    for (int n = 0; n < MAX_TABLE; n++)
        c->table[n] = below(r, 5) - 1;
    if (with & 1 << 19)
        a->lengths_q = c->numbers[0];
    if (with & 1 << 20)
        a->lengths_k = c->numbers[1];
    if (with & 1 << 21) {
        a->offsets_q = c->numbers[2], a->offsets_k = c->numbers[3];
        a->sequences = below(r, 4), a->max_rows = a->q.shape[2], a->max_keys = a->k.shape[2];
    }
    if (with & 1 << 23) {
        a->block_table = c->table;
        a->block_table_columns = a->block_table_stride = 1 + below(r, 4);
    }
    c->x.threads = 1;
}

static void legal_problem(call *c, reader *r)
{
    heed_attention *a = &c->a;
    heed_gradient *g = &c->g;
    heed_tensor *all[TENSORS] = { &a->q,    &a->k,     &a->v,    &a->o,      &a->lse,   &a->mask,
                                  &a->bias, &a->alibi, &a->sink, &g->d_o,    &g->d_lse, &g->delta,
                                  &g->d_q,  &g->d_k,   &g->d_v,  &g->d_bias, &g->d_sink };
    memcpy(c->tensor, all, sizeof all);
    unsigned with = (unsigned)word(r, 3);
    legal_tensors(c, r, with);
    legal_rules(c, r, with);
}

/* Some bytes from where it should be. */
static const void *off(const void *at, reader *r) { return (const char *)at + below(r, 8); }

/* One of the pointers to integers; those that are NULL come to be. */
static void edit_pointer(call *c, reader *r)
{
    heed_attention *a = &c->a;
    switch (below(r, 6)) {
    case 0: a->lengths_q = off(c->numbers[0], r); break;
    case 1: a->lengths_k = off(c->numbers[1], r); break;
    case 2: a->offsets_q = off(c->numbers[2], r); break;
    case 3: a->offsets_k = off(c->numbers[3], r); break;
    case 4: a->block_table = off(c->table, r); break;
    case 5: a->dropout_seed_at = off(c->seeds, r); break;
    }
}

/* One field, one value that nobody expects there. */
static void edit(call *c, reader *r)
{
    static const char *const kernels[] = { "forward_cpu_plain_f32",
                                           "backward_cpu_plain_f32",
                                           "forward_reference_bf16",
                                           "forward_cpu_avx2_f16",
                                           "backward_reference_f32",
                                           "",
                                           "%s%n" };
    heed_attention *a = &c->a;
    int64_t *sizes[] = { &a->window_left, &a->window_right, &a->query_position,     &a->key_position,
                         &a->query_step,  &a->key_step,     &a->key_stride,         &a->sequences,
                         &a->max_rows,    &a->max_keys,     &a->block_table_stride, &a->block_table_columns };
    heed_tensor *t = c->tensor[below(r, TENSORS)];
    int kind = byte(r);
    switch (kind < 240 ? kind % 16 : 16 + kind % 4) {
    case 0: t->dtype = (heed_dtype)(int8_t)byte(r); break;
    case 1:
    case 2: t->shape[below(r, 4)] = any_size(r); break;
    case 3:
    case 4: t->stride[below(r, 4)] = any_size(r); break;
    case 5: t->data = NULL; break;
    case 6: c->misplaced[below(r, TENSORS)] = below(r, 16); break;
    case 7: *t = *c->tensor[below(r, TENSORS)]; break;
    case 8: *sizes[below(r, 12)] = any_size(r); break;
    case 9: a->scale = any_float(r), a->zero_scale = below(r, 3) - 1; break;
    case 10: a->softcap = any_float(r); break;
    case 11: a->dropout = any_float(r); break;
    case 12: a->align = (heed_align)(int8_t)byte(r), a->causal = byte(r), a->windowed = below(r, 2); break;
    case 13: c->x.backend = (heed_backend)(int8_t)byte(r), c->x.device = (int8_t)byte(r); break;
    case 14: c->x.kernel = kernels[below(r, 7)], c->x.precision = (heed_precision)(int8_t)byte(r); break;
    case 15: c->g.accumulate = byte(r), c->x.threads = (int8_t)byte(r), c->x.nondeterministic = byte(r); break;
    case 16: edit_pointer(c, r); break;
    case 17: c->missing = byte(r); break;
    case 18: c->flaw = (flaw)below(r, FLAWS); break;
    case 19: a->dropout_seed_at = c->seeds, a->dropout = 0.5f; break;
    }
}

/* ---- Memory --------------------------------------------------------------------------------------------------------- */

static size_t dtype_bytes(heed_dtype dtype)
{
    switch (dtype) {
    case HEED_F64: return 8;
    case HEED_F32: return 4;
    case HEED_F16:
    case HEED_BF16: return 2;
    case HEED_BOOL: return 1;
    }
    return 0;
}

/* The elements from *low to *high that t spans, relative to data; 0 where they are too many for a block. */
static int extent(const heed_tensor *t, int64_t *low, int64_t *high)
{
    const int64_t *s = t->stride, *n = t->shape;
    int packed = !s[0] && !s[1] && !s[2] && !s[3];
    __int128 step[4] = { s[0], s[1], s[2], s[3] }, first = 0, last = 0;
    for (int i = 0; i < 4; i++)
        if (n[i] < 0 || n[i] > MAX_BLOCK)
            return 0;
    if (packed)
        step[3] = 1, step[2] = n[3], step[1] = step[2] * n[2], step[0] = step[1] * n[1];
    for (int i = 0; i < 4; i++)
        *(step[i] < 0 ? &first : &last) += step[i] * (n[i] - 1);
    if (!n[0] || !n[1] || !n[2] || !n[3])
        return *low = *high = 0, 1;
    if (first < -MAX_BLOCK || last > MAX_BLOCK)
        return 0;
    *low = (int64_t)first, *high = (int64_t)last + 1;
    return 1;
}

static int within(int64_t n, int64_t most) { return n >= 0 && n <= most; }

/* Gives each tensor its block; clears c->runnable where one cannot have any. */
static void place(call *c)
{
    for (int t = 0; t < TENSORS; t++) {
        heed_tensor *tensor = c->tensor[t];
        int64_t low = 0, high = 0, size = (int64_t)dtype_bytes(tensor->dtype);
        if (!tensor->data)
            continue;
        if (!size || !extent(tensor, &low, &high)) {
            c->runnable = 0;
            continue;
        }
        c->bytes[t] = (size_t)((high - low) * size + c->misplaced[t]);
        c->block[t] = malloc(c->bytes[t]);
        if (c->bytes[t] && !c->block[t])
            abort();
        for (size_t i = 0; i < c->bytes[t]; i++) /* inputs: small numbers in every dtype, some NaNs among them */
            c->block[t][i] = (char)(is_output(t) ? UNTOUCHED : (i * 37 + (size_t)t) % 61);
        tensor->data = c->block[t] + c->misplaced[t] - low * size;
    }
    __int128 work = 1;
    const int64_t factors[] = { c->a.q.shape[0], c->a.q.shape[1], c->a.q.shape[2], c->a.k.shape[0], c->a.k.shape[2] };
    for (int i = 0; i < 5 && work <= MAX_WORK; i++)
        work *= factors[i] > 1 ? factors[i] : 1;
    const heed_attention *a = &c->a;
    int64_t B = a->offsets_q || a->offsets_k ? a->sequences : a->q.shape[0];
    int64_t step = a->block_table_stride, columns = a->block_table_columns;
    if (work > MAX_WORK || !within(B, MAX_SEQUENCES) || a->max_rows > MAX_WORK || a->max_keys > MAX_WORK)
        c->runnable = 0;
    else if (a->block_table &&
             (!within(step, MAX_TABLE) || !within(columns, MAX_TABLE) || B * step + columns > MAX_TABLE))
        c->runnable = 0;
    if (c->x.backend == HEED_CUDA)
        c->runnable = 0;
}

/* ---- Calls ---------------------------------------------------------------------------------------------------------- */

static heed_status checked(heed_status s)
{
    CHECK(s >= HEED_OK && s <= HEED_DEVICE_ERROR);
    CHECK(s == HEED_OK || heed_last_error()[0]);
    return s;
}

/* A struct, or NULL where it is missing. */
static const void *unless(const call *c, unsigned missing, const void *at) { return c->missing & missing ? NULL : at; }

/* Puts `given` bytes into the exec, flawed if they are to be. Returns whether the call has to be refused for that. */
static int give_workspace(call *c, char *workspace, size_t given)
{
    c->x.workspace = workspace, c->x.workspace_bytes = given;
    if (given == 0)
        return 0;
    switch (c->flaw) {
    case SHORT: c->x.workspace_bytes = given - 1; return 1;
    case MISSING: c->x.workspace = NULL; return 1;
    case ASTRAY: c->x.workspace = workspace + 1 + given % 15; return 1;
    case SHARED: /* with q, which begins where its block does; of a large workspace that lies beyond the block */
        if (c->misplaced[Q] || !c->bytes[Q])
            return 0;
        c->x.workspace = c->block[Q];
        return 1;
    default: return 0;
    }
}

static void run(call *c, size_t workspace_bytes)
{
    char *workspace = NULL;
    if (workspace_bytes && !(workspace = aligned_alloc(16, (workspace_bytes + 31) / 16 * 16)))
        return;
    int flawed = give_workspace(c, workspace, workspace_bytes);
    const heed_attention *a = unless(c, ATTENTION, &c->a);
    const heed_exec *x = unless(c, EXEC, &c->x);
    heed_status s = checked(c->backward ? heed_backward(a, unless(c, GRADIENT, &c->g), x) : heed_forward(a, x));
    CHECK(s != HEED_OK || (a && x && !flawed && !(c->backward && c->missing & GRADIENT)));
    CHECK(s != HEED_NO_WORKSPACE || flawed || c->missing & GRADIENT); /* without it, the size was that of a forward */
    if (s) /* heed.h: "On an error the outputs are untouched" */
        for (int t = 0; t < TENSORS; t++)
            for (size_t i = 0; is_output(t) && i < c->bytes[t]; i++)
                CHECK((uint8_t)c->block[t][i] == UNTOUCHED);
    free(workspace);
}

static void run_small(call *c)
{
    const heed_exec *x = unless(c, EXEC, &c->x);
    checked(heed_delta(unless(c, LATER, &c->a.o), unless(c, LATER << 1, &c->g.d_o), unless(c, LATER << 2, &c->g.d_lse),
                       unless(c, LATER << 3, &c->g.delta), x));
    checked(heed_merge(unless(c, LATER << 3, &c->a.o), unless(c, LATER << 2, &c->a.lse),
                       unless(c, LATER << 1, &c->g.d_o), unless(c, LATER, &c->g.d_lse), x));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    reader r = { data, size };
    call c = { .runnable = 1 };
    legal_problem(&c, &r);
    while (r.size)
        edit(&c, &r);
    place(&c);

    const heed_attention *a = unless(&c, ATTENTION, &c.a);
    const heed_gradient *g = c.backward ? unless(&c, GRADIENT, &c.g) : NULL;
    const heed_exec *x = unless(&c, EXEC, &c.x);
    char text[512];
    memset(text, 'x', sizeof text);
    checked(heed_explain(a, g, x, size % 3 ? NULL : heed_chip_name((int)(size % 7)),
                         (char *)(uintptr_t)unless(&c, TEXT, text), sizeof text / 2));
    CHECK(text[sizeof text / 2] == 'x');

    size_t workspace_bytes = 0;
    heed_status sized = checked(heed_workspace_size(a, g, x, &workspace_bytes));
    if ((!sized || !a || !x) && c.runnable)
        run(&c, workspace_bytes);
    if (c.runnable)
        run_small(&c);
    for (int t = 0; t < TENSORS; t++)
        free(c.block[t]);
    return 0;
}
