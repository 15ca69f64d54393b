/* The recent calls of this thread. Programs repeat themselves: a call that differs from an earlier one by its addresses
 * alone has the same problem and the same plan. So the last few are kept, and such a call is checked and planned by one
 * comparison, in a tenth of the time; for problems of a microsecond that time is most of the call.
 *
 *     description   the caller's structs with each address reduced to what the rules ask of it: NULL or not, and its
 *                   last four bits
 *     problem       what check.c made of them; the new addresses are put into it
 *     reach         of each tensor: its first and last byte, counted from its address. Where the memory of a result
 *                   might meet that of another tensor, the call is checked in full
 */
#include "internal.h"

#include <stddef.h>
#include <string.h>

enum { KEPT = 4, TENSORS = 17, POINTERS = 6 };

#define A(field) offsetof(heed_attention, field)
#define G(field) offsetof(heed_gradient, field)
/* The tensors of a backward, results first; in their midst those of a forward, results first, which are all that
 * heed_attention has. */
enum { FIRST_OF_FORWARD = 5, END_OF_FORWARD = 14 };
static const size_t tensors[TENSORS] = { G(d_q),   G(d_k),  G(d_v), G(d_bias), G(d_sink), A(o),
                                         A(lse),   A(q),    A(k),   A(v),      A(mask),   A(bias),
                                         A(alibi), A(sink), G(d_o), G(d_lse),  G(delta) };
static const struct {
    int first, results, end;
} range_of[] = { [HEED_FORWARD] = { FIRST_OF_FORWARD, 2, END_OF_FORWARD }, [HEED_BACKWARD] = { 0, 5, TENSORS } };

static const size_t pointers[POINTERS] = { A(lengths_q), A(lengths_k),   A(offsets_q),
                                           A(offsets_k), A(block_table), A(dropout_seed_at) };

typedef struct description {
    heed_attention a;
    heed_backend backend;
    int device, threads, nondeterministic, forced;
    heed_precision precision;
    heed_pass pass;
    heed_gradient g; /* last: a forward has none, and is not compared so far */
} description;

typedef struct kept {
    description as;
    heed_call call;
    int64_t low[TENSORS], high[TENSORS]; /* equal: the tensor is not there, or has no element */
} kept;

typedef struct memory {
    kept calls[KEPT];
    int used, next;
} memory;

static _Thread_local memory recent;

static heed_tensor *tensor_at(heed_attention *a, heed_gradient *g, int n)
{
    return (heed_tensor *)((char *)(n >= FIRST_OF_FORWARD && n < END_OF_FORWARD ? (void *)a : (void *)g) + tensors[n]);
}

static const void *pointer_at(const heed_attention *a, int n)
{
    const void *pointer;
    memcpy(&pointer, (const char *)a + pointers[n], sizeof pointer);
    return pointer;
}

static void set_pointer_at(heed_attention *a, int n, const void *pointer)
{
    memcpy((char *)a + pointers[n], &pointer, sizeof pointer);
}

static void *reduced(const void *address) { return address ? (void *)(16 + (uintptr_t)address % 16) : NULL; }

_Static_assert(sizeof(void *) != 8 || (sizeof(heed_attention) == 912 && sizeof(heed_gradient) == 648),
               "a new field has to be described here, and new tensors and pointers be listed above");

/* Field by field over zeros, as the bytes between the fields of the caller's structs may be anything. */
static void describe_attention(const heed_attention *a, heed_attention *d)
{
    d->scale = a->scale, d->zero_scale = a->zero_scale, d->softcap = a->softcap;
    d->causal = a->causal, d->windowed = a->windowed;
    d->window_left = a->window_left, d->window_right = a->window_right, d->align = a->align;
    d->query_position = a->query_position, d->query_step = a->query_step;
    d->key_position = a->key_position, d->key_step = a->key_step, d->key_stride = a->key_stride;
    d->dropout = a->dropout;
    d->sequences = a->sequences, d->max_rows = a->max_rows, d->max_keys = a->max_keys;
    d->block_table_stride = a->block_table_stride, d->block_table_columns = a->block_table_columns;
    for (int n = 0; n < POINTERS; n++)
        set_pointer_at(d, n, reduced(pointer_at(a, n)));
}

static size_t size_of(heed_pass pass) { return pass == HEED_BACKWARD ? sizeof(description) : offsetof(description, g); }

static void describe(const heed_attention *a, const heed_gradient *g, const heed_exec *x, description *d)
{
    const heed_pass pass = g ? HEED_BACKWARD : HEED_FORWARD;
    memset(d, 0, size_of(pass));
    d->pass = pass;
    describe_attention(a, &d->a);
    if (g)
        d->g.accumulate = g->accumulate;
    for (int n = range_of[pass].first; n < range_of[pass].end; n++) {
        const heed_tensor *from = tensor_at((heed_attention *)a, (heed_gradient *)g, n);
        heed_tensor *to = tensor_at(&d->a, &d->g, n);
        to->data = reduced(from->data), to->dtype = from->dtype;
        memcpy(to->shape, from->shape, sizeof to->shape);
        memcpy(to->stride, from->stride, sizeof to->stride);
    }
    d->backend = x->backend, d->device = x->device;
    d->threads = x->backend == HEED_CUDA ? 0 : heed_threads_of(x);
    d->nondeterministic = x->nondeterministic, d->precision = x->precision, d->forced = x->kernel != NULL;
}

/* Puts the addresses of a and g into the problem. A tensor that the check has taken out stays out. */
static void put_addresses(heed_problem *p, const heed_attention *a, const heed_gradient *g)
{
    for (int n = range_of[p->pass].first; n < range_of[p->pass].end; n++) {
        heed_tensor *t = tensor_at(&p->a, &p->g, n);
        if (t->data)
            t->data = tensor_at((heed_attention *)a, (heed_gradient *)g, n)->data;
    }
    for (int n = 0; n < POINTERS; n++)
        set_pointer_at(&p->a, n, pointer_at(a, n));
    p->a.dropout_seed = a->dropout_seed;
}

static int may_overlap(kept *k)
{
    heed_problem *p = &k->call.problem;
    const int first = range_of[p->pass].first, results = range_of[p->pass].results;
    uintptr_t begin[TENSORS], end[TENSORS];
    int there = 0, written = 0, overlap = 0;
    for (int n = first; n < range_of[p->pass].end; n++) {
        uintptr_t data = (uintptr_t)tensor_at(&p->a, &p->g, n)->data;
        begin[there] = data + (uintptr_t)k->low[n], end[there] = data + (uintptr_t)k->high[n];
        there += k->low[n] != k->high[n];
        written += n < first + results && k->low[n] != k->high[n];
    }
    for (int i = 0; i < written; i++)
        for (int j = i + 1; j < there; j++)
            overlap |= begin[i] < end[j] && begin[j] < end[i];
    return overlap;
}

static int same_kernel(const kept *k, const char *forced)
{
    return !forced || !strcmp(k->call.plan.kernel->name, forced);
}

heed_call *heed_recall(const heed_attention *a, const heed_gradient *g, const heed_exec *x)
{
    memory *m = &recent;
    if (!a || !x || x->threads < 0 || !m->used)
        return NULL;
    description d;
    describe(a, g, x, &d);
    for (kept *k = m->calls; k < m->calls + m->used; k++)
        if (k->as.pass == d.pass && !memcmp(&k->as, &d, size_of(d.pass)) && same_kernel(k, x->kernel)) {
            put_addresses(&k->call.problem, a, g);
            return may_overlap(k) ? NULL : &k->call;
        }
    return NULL;
}

void heed_remember(const heed_attention *a, const heed_gradient *g, const heed_exec *x, const heed_call *call)
{
    memory *m = &recent;
    kept *k = &m->calls[m->next];
    m->next = (m->next + 1) % KEPT;
    m->used = HEED_MAX(m->used, m->next ? m->next : KEPT);
    describe(a, g, x, &k->as);
    k->call = *call;
    for (int n = range_of[k->as.pass].first; n < range_of[k->as.pass].end; n++) {
        const heed_tensor *t = tensor_at(&k->call.problem.a, &k->call.problem.g, n);
        uintptr_t begin = 0, end = 0;
        if (t->data && heed_elements(t) > 0)
            heed_addresses(t, &begin, &end);
        k->low[n] = (int64_t)(begin - (uintptr_t)t->data), k->high[n] = (int64_t)(end - (uintptr_t)t->data);
    }
}
