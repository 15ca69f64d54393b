/* The recent calls of this thread. Programs repeat themselves: a call that differs from an earlier one by its addresses
 * alone has the same problem and the same plan. So the last few are kept, and such a call is checked and planned by one
 * comparison, in a tenth of the time; for problems of a microsecond that time is most of the call.
 *
 *     as given      the caller's structs. Of an address the rules ask only whether it is NULL, and its last four bits
 *     problem       what check.c made of them; the new addresses are put into it
 *     reach         of each tensor and array of integers: its first and last byte, counted from its address. Where the
 *                   memory of a result or the workspace might meet another's, the call is checked in full
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
/* Those of which nothing is asked where they are not there. */
static const unsigned optional = 1 << 3 | 1 << 4 | 0xFu << 10 |
                                 3u << 15; /* d_bias, d_sink; mask to sink; d_lse, delta */
static const struct {
    int first, results, end;
} range_of[] = { [HEED_FORWARD] = { FIRST_OF_FORWARD, 2, END_OF_FORWARD }, [HEED_BACKWARD] = { 0, 5, TENSORS } };

static const size_t pointers[POINTERS] = { A(lengths_q), A(lengths_k),   A(offsets_q),
                                           A(offsets_k), A(block_table), A(dropout_seed_at) };

typedef struct kept {
    heed_attention a;
    heed_gradient g; /* of a backward */
    heed_exec x;
    int threads;
    heed_pass pass;
    heed_call call;
    int there, written;          /* how many tensors have an element, and how many of them are results */
    uint8_t tensor[1 + TENSORS]; /* which, from 1 on: results first */
    int64_t low[1 + TENSORS], high[1 + TENSORS];
    int pointers; /* whether there are any; each leads to so many bytes */
    int64_t reach[POINTERS];
} kept;

typedef struct memory {
    kept calls[KEPT];
    int used, next, last; /* how many there are; which is replaced next; which was found or made last */
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

_Static_assert(sizeof(void *) != 8 || (sizeof(heed_attention) == 912 && sizeof(heed_gradient) == 648),
               "a new field has to be compared here, and new tensors and pointers be listed above");

static int alike(const void *address, const void *other)
{
    return !address == !other && !(((uintptr_t)address ^ (uintptr_t)other) % 16);
}

_Static_assert(offsetof(heed_tensor, stride) == offsetof(heed_tensor, shape) + sizeof(int64_t[4]),
               "the shape and the stride of a tensor are compared in one");

static int same_tensor(const heed_tensor *t, const heed_tensor *u)
{
    const size_t shape = offsetof(heed_tensor, shape);
    return alike(t->data, u->data) && t->dtype == u->dtype &&
           !memcmp((const char *)t + shape, (const char *)u + shape, sizeof t->shape + sizeof t->stride);
}

/* Field by field, as the bytes between the fields may be anything. */
static int same_options(const heed_attention *a, const heed_attention *b)
{
    int same = a->scale == b->scale && a->zero_scale == b->zero_scale && a->softcap == b->softcap &&
               a->causal == b->causal && a->windowed == b->windowed && a->window_left == b->window_left &&
               a->window_right == b->window_right && a->align == b->align && a->query_position == b->query_position &&
               a->query_step == b->query_step && a->key_position == b->key_position && a->key_step == b->key_step &&
               a->key_stride == b->key_stride && a->dropout == b->dropout && a->sequences == b->sequences &&
               a->max_rows == b->max_rows && a->max_keys == b->max_keys &&
               a->block_table_stride == b->block_table_stride && a->block_table_columns == b->block_table_columns;
    for (int n = 0; n < POINTERS; n++)
        same = same && alike(pointer_at(a, n), pointer_at(b, n));
    return same;
}

static int threads_of(const heed_exec *x) { return x->backend == HEED_CUDA ? 0 : heed_threads_of(x); }

static int same_exec(const kept *k, const heed_exec *x, int threads)
{
    return k->x.backend == x->backend && k->x.device == x->device && k->threads == threads &&
           k->x.nondeterministic == x->nondeterministic && k->x.precision == x->precision &&
           !k->x.kernel == !x->kernel && (!x->kernel || !strcmp(k->call.plan.kernel->name, x->kernel));
}

static int same_call(kept *k, const heed_attention *a, const heed_gradient *g, const heed_exec *x, int threads)
{
    const heed_pass pass = g ? HEED_BACKWARD : HEED_FORWARD;
    if (k->pass != pass || !same_exec(k, x, threads) || !same_options(&k->a, a) ||
        (g && k->g.accumulate != g->accumulate))
        return 0;
    for (int n = range_of[pass].first; n < range_of[pass].end; n++) {
        const heed_tensor *t = tensor_at(&k->a, &k->g, n), *u = tensor_at((heed_attention *)a, (heed_gradient *)g, n);
        if (!(optional >> n & 1 && !t->data && !u->data) && !same_tensor(t, u))
            return 0;
    }
    return 1;
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

/* Bytes that a pointer leads to, or more than that: what might overlap is then looked at closely. */
static int64_t reach_of_pointer(const heed_problem *p, int n)
{
    const int64_t most = (int64_t)1 << 56, each = HEED_MAX(p->a.block_table_stride, 1);
    if (pointers[n] == A(dropout_seed_at))
        return sizeof(uint64_t);
    return (int64_t)sizeof(int32_t) * (pointers[n] == A(block_table) ? HEED_MIN(p->B, most / each) * each : p->B + 1);
}

static int may_overlap(kept *k, const heed_exec *x)
{
    heed_problem *p = &k->call.problem;
    uintptr_t begin[1 + TENSORS], end[1 + TENSORS]; /* the workspace first, of which there may be none */
    begin[0] = (uintptr_t)x->workspace;
    end[0] = begin[0] ? begin[0] + HEED_MIN(x->workspace_bytes, UINTPTR_MAX - begin[0]) : 0;
    for (int i = 1; i <= k->there; i++) {
        const uintptr_t data = (uintptr_t)tensor_at(&p->a, &p->g, k->tensor[i])->data;
        begin[i] = data + (uintptr_t)k->low[i], end[i] = data + (uintptr_t)k->high[i];
        for (int j = 0; j < i && j <= k->written; j++)
            if (begin[j] < end[i] && begin[i] < end[j])
                return 1;
    }
    for (int n = 0; n < POINTERS && k->pointers; n++) {
        const uintptr_t data = (uintptr_t)pointer_at(&p->a, n), data_end = data + (uintptr_t)k->reach[n];
        for (int j = 0; data && j <= k->written; j++)
            if (begin[j] < data_end && data < end[j])
                return 1;
    }
    return 0;
}

heed_call *heed_recall(const heed_attention *a, const heed_gradient *g, const heed_exec *x)
{
    memory *m = &recent;
    if (!a || !x || x->threads < 0 || !m->used)
        return NULL;
    const int threads = threads_of(x);
    for (int n = 0, i = m->last; n < m->used; n++, i = i + 1 < m->used ? i + 1 : 0) {
        kept *k = &m->calls[i];
        if (!same_call(k, a, g, x, threads))
            continue;
        m->last = i;
        put_addresses(&k->call.problem, a, g);
        return may_overlap(k, x) ? NULL : &k->call;
    }
    return NULL;
}

void heed_remember(const heed_attention *a, const heed_gradient *g, const heed_exec *x, const heed_call *call)
{
    memory *m = &recent;
    kept *k = &m->calls[m->next];
    m->last = m->next;
    m->next = (m->next + 1) % KEPT;
    m->used = HEED_MAX(m->used, m->next ? m->next : KEPT);
    k->pass = g ? HEED_BACKWARD : HEED_FORWARD;
    k->a = *a, k->x = *x, k->threads = threads_of(x), k->call = *call;
    if (g)
        k->g = *g;
    k->there = k->written = 0;
    for (int n = range_of[k->pass].first; n < range_of[k->pass].end; n++) {
        const heed_tensor *t = tensor_at(&k->call.problem.a, &k->call.problem.g, n);
        uintptr_t begin = 0, end = 0;
        if (!t->data || heed_elements(t) == 0)
            continue;
        heed_addresses(t, &begin, &end);
        k->tensor[++k->there] = (uint8_t)n;
        k->low[k->there] = (int64_t)(begin - (uintptr_t)t->data);
        k->high[k->there] = (int64_t)(end - (uintptr_t)t->data);
        k->written += n < range_of[k->pass].first + range_of[k->pass].results;
    }
    k->pointers = 0;
    for (int n = 0; n < POINTERS; n++) {
        k->pointers |= pointer_at(a, n) != NULL;
        k->reach[n] = reach_of_pointer(&k->call.problem, n);
    }
}
