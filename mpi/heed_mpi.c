/* The ring: its messages, and the work of its steps. */
#include "ring.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TAG_KEYS = 7400, TAG_GRADIENTS = 7402 };

/* ---- Messages --------------------------------------------------------------------------------------------------- */

typedef struct messages {
    MPI_Request all[16];
    int count;
    heed_status status;
} messages;

static int rank_at(const ring *c, int r) { return (r % c->ranks + c->ranks) % c->ranks; }

static void message(ring *c, messages *to, int sends, void *data, MPI_Datatype row, int64_t rows, int peer, int tag)
{
    if (to->status || !rows)
        return;
    MPI_Request *request = &to->all[to->count++];
    *request = MPI_REQUEST_NULL;
    int count = (int)(rows * c->a->k.shape[0] * c->a->k.shape[1]);
    to->status = sends
                     ? check_mpi(MPI_Isend(data, count, row, rank_at(c, peer), tag, c->m->comm, request), "MPI_Isend")
                     : check_mpi(MPI_Irecv(data, count, row, rank_at(c, peer), tag, c->m->comm, request), "MPI_Irecv");
}

/* The keys and values of rank `of`. */
static void block_message(ring *c, messages *to, int sends, char *block, int of, int peer)
{
    int64_t keys = count_of(c, c->keys, rank_at(c, of));
    size_t values = (size_t)(c->a->k.shape[0] * c->a->k.shape[1] * keys * c->a->k.shape[3]) * bytes_of(c->a->k.dtype);
    message(c, to, sends, block, c->key_row, keys, peer, TAG_KEYS);
    message(c, to, sends, block + values, c->value_row, keys, peer, TAG_KEYS + 1);
}

static void gradient_message(ring *c, messages *to, int sends, float *const *gradients, int of, int peer)
{
    int64_t keys = count_of(c, c->keys, rank_at(c, of));
    message(c, to, sends, gradients[0], c->key_gradient_row, keys, peer, TAG_GRADIENTS);
    message(c, to, sends, gradients[1], c->value_gradient_row, keys, peer, TAG_GRADIENTS + 1);
}

/* Step d's messages of keys and values for step d + 1. held: the block of step d. */
static void send_blocks(ring *c, messages *to, int d, char *held, char *room)
{
    int r = c->me;
    if (d + 1 >= c->ranks)
        return;
    if (wants(c, r, d + 1))
        block_message(c, to, 0, room, r - d - 1, d == 0 || wants(c, r - 1 + c->ranks, d) ? r - 1 : r - d - 1);
    if (wants(c, r + 1, d + 1) && (d == 0 || wants(c, r, d)))
        block_message(c, to, 1, held, r - d, r + 1);
    if (d > 0 && wants(c, r + d + 1, d + 1) && !wants(c, r + d, d))
        block_message(c, to, 1, c->block[0], r, r + d + 1);
}

static heed_status finish(messages *m)
{
    heed_status s = check_mpi(MPI_Waitall(m->count, m->all, MPI_STATUSES_IGNORE), "MPI_Waitall");
    return m->status ? m->status : s;
}

/* Lets MPI move on what is under way: many do so only inside a call. */
static void progress(messages *m)
{
    int done;
    if (m->count && !m->status)
        MPI_Testall(m->count, m->all, &done, MPI_STATUSES_IGNORE);
}

/* ---- Work ------------------------------------------------------------------------------------------------------- */

/* A call of heed with as much workspace as it wants. */
static heed_status compute(ring *c, const heed_attention *a, const heed_gradient *g)
{
    size_t bytes;
    heed_status s = heed_workspace_size(a, g, &c->x, &bytes);
    if (!s && bytes > c->x.workspace_bytes) {
        free(c->x.workspace);
        c->x.workspace_bytes = bytes;
        if (!(c->x.workspace = aligned_alloc(64, (bytes + 63) / 64 * 64)))
            return c->x.workspace_bytes = 0, fail(HEED_NO_WORKSPACE, "no memory for %zu bytes of workspace", bytes);
    }
    if (!s)
        s = g ? heed_backward(a, g, &c->x) : heed_forward(a, &c->x);
    return s ? fail(s, "%s", heed_last_error()) : HEED_OK;
}

/* Rows q of this rank against keys k of rank `of`, whose block is given. */
static heed_attention meeting(const ring *c, const range *q, const range *k, char *block, int of)
{
    heed_attention a = *c->a;
    int64_t keys = count_of(c, c->keys, of);
    size_t values = (size_t)(a.k.shape[0] * a.k.shape[1] * keys * a.k.shape[3]) * bytes_of(a.k.dtype);
    a.q = rows_of(a.q, q);
    a.k = rows_of(packed(block, a.k.dtype, a.k.shape, keys, a.k.shape[3]), k);
    a.v = rows_of(packed(block + values, a.v.dtype, a.v.shape, keys, a.v.shape[3]), k);
    a.align = HEED_ALIGN_POSITION;
    a.query_position = q->first + c->offset, a.query_step = q->step;
    a.key_position = k->first, a.key_step = k->step;
    return a;
}

/* The first keys that a range of rows meets give its result; later ones are folded into it. */
static heed_status forward_step(ring *c, char *block, int of, int *met, messages *on_their_way)
{
    const int64_t *shape = c->a->o.shape;
    heed_tensor o = packed(c->o, HEED_F32, shape, shape[2], shape[3]),
                lse = packed(c->lse, HEED_F32, shape, shape[2], 1);
    heed_tensor o2 = packed(c->o2, HEED_F32, shape, shape[2], shape[3]);
    heed_tensor lse2 = packed(c->lse2, HEED_F32, shape, shape[2], 1);
    heed_status s = HEED_OK;
    for (int i = 0; i < RANGES; i++)
        for (int j = 0; !s && j < RANGES; j++) {
            const range *q = &ranges_of(c, c->rows, c->me)[i], *k = &ranges_of(c, c->keys, of)[j];
            if (!sees(c, q, k))
                continue;
            heed_attention a = meeting(c, q, k, block, of);
            a.o = rows_of(met[i] ? o2 : o, q), a.lse = rows_of(met[i] ? lse2 : lse, q);
            s = compute(c, &a, NULL);
            if (!s && met[i]) {
                heed_tensor to = rows_of(o, q), lse_to = rows_of(lse, q);
                s = heed_merge(&to, &lse_to, &a.o, &a.lse, &c->x);
            }
            met[i] = 1;
            progress(on_their_way);
        }
    return s;
}

static heed_status forward_ring(ring *c)
{
    heed_status s = HEED_OK;
    const int64_t *shape = c->a->o.shape;
    size_t rows = (size_t)(shape[0] * shape[1] * shape[2]);
    int met[RANGES] = { 0 };
    fill(c->o, rows * (size_t)shape[3], 0);
    fill(c->lse, rows, -INFINITY);
    char *held = c->block[0], *room = c->block[1];
    for (int d = 0; d < c->ranks; d++) {
        messages m = { .count = 0 };
        send_blocks(c, &m, d, held, room);
        heed_status worked = wants(c, c->me, d) ? forward_step(c, held, rank_at(c, c->me - d), met, &m) : HEED_OK;
        heed_status moved = finish(&m); /* also after an error: the others are waiting for what this rank sends */
        s = s ? s : worked ? worked : moved;
        held = room, room = room == c->block[1] ? c->block[2] : c->block[1];
    }
    if (s)
        return s;
    heed_tensor o = packed(c->o, HEED_F32, shape, shape[2], shape[3]),
                lse = packed(c->lse, HEED_F32, shape, shape[2], 1);
    return deliver(c, o, &lse, c->a->o, c->a->lse);
}

heed_status heed_mpi_forward(const heed_attention *a, const heed_mpi *m, const heed_exec *x)
{
    ring c;
    heed_status s = open_ring(&c, 0, a, NULL, m, x);
    if (!s)
        s = forward_ring(&c);
    close_ring(&c);
    return s;
}

static heed_status backward_step(ring *c, const heed_gradient *g, char *block, int of, float *const *sums,
                                 messages *on_their_way)
{
    const heed_attention *whole = c->a;
    int64_t keys = count_of(c, c->keys, of);
    heed_tensor dq = packed(c->dq, HEED_F32, whole->q.shape, whole->q.shape[2], whole->q.shape[3]);
    heed_tensor dk = packed(sums[0], HEED_F32, whole->k.shape, keys, whole->k.shape[3]);
    heed_tensor dv = packed(sums[1], HEED_F32, whole->v.shape, keys, whole->v.shape[3]);
    heed_tensor delta = packed(c->delta, HEED_F32, whole->q.shape, whole->q.shape[2], 1);
    heed_status s = HEED_OK;
    for (int i = 0; i < RANGES; i++)
        for (int j = 0; !s && j < RANGES; j++) {
            const range *q = &ranges_of(c, c->rows, c->me)[i], *k = &ranges_of(c, c->keys, of)[j];
            if (!sees(c, q, k))
                continue;
            heed_attention a = meeting(c, q, k, block, of);
            a.o = rows_of(a.o, q), a.lse = rows_of(a.lse, q);
            heed_gradient part = { .d_o = rows_of(g->d_o, q),
                                   .delta = rows_of(delta, q),
                                   .d_q = rows_of(dq, q),
                                   .d_k = rows_of(dk, k),
                                   .d_v = rows_of(dv, k),
                                   .accumulate = 1 };
            s = compute(c, &a, &part);
            progress(on_their_way);
        }
    return s;
}

/* How many elements the gradients of keys (n = 0) or values (1) of a rank have. */
static int64_t gradient_elements(const ring *c, int n, int of)
{
    const int64_t *shape = n ? c->a->v.shape : c->a->k.shape;
    return shape[0] * shape[1] * count_of(c, c->keys, rank_at(c, of)) * shape[3];
}

static void add(const ring *c, float *const *to, float *const *what, int of)
{
    for (int n = 0; n < 2; n++)
        for (int64_t i = 0; i < gradient_elements(c, n, of); i++)
            to[n][i] += what[n][i];
}

static void clear(const ring *c, float *const *gradients, int of)
{
    for (int n = 0; n < 2; n++)
        fill(gradients[n], (size_t)gradient_elements(c, n, of), 0);
}

/* In step d the gradients of step d - 1 go on to the next rank, or home, while those of step d are computed; what other
 * ranks have for them comes in meanwhile and is added. */
static heed_status backward_ring(ring *c, const heed_gradient *g)
{
    heed_status s = HEED_OK;
    int r = c->me, last = c->ranks, worked = 0; /* whether there was something to do in the step before */
    char *held = c->block[0], *room = c->block[1];
    for (int d = 0; d <= last; d++) {
        float *const *mine = c->sums[d % 2], *const *before = c->sums[(d + 1) % 2], *const *to = d ? mine : c->home;
        int works = d < last && wants(c, r, d), from_others = works && d > 1 && wants(c, r - 1 + last, d - 1);
        int comes_home = d > 1 && wants(c, r + d - 1, d - 1) && !(d < last && wants(c, r + d, d));
        messages m = { .count = 0 };
        send_blocks(c, &m, d, held, room);
        if (worked && d > 1)
            gradient_message(c, &m, 1, before, r - d + 1, d < last && wants(c, r + 1, d) ? r + 1 : r - d + 1);
        if (from_others)
            gradient_message(c, &m, 0, c->arriving, r - d, r - 1);
        if (comes_home)
            gradient_message(c, &m, 0, c->returning, r, r + d - 1);
        if (d == 0 || works)
            clear(c, to, r - d);
        heed_status step = works ? backward_step(c, g, held, rank_at(c, r - d), to, &m) : HEED_OK;
        heed_status moved = finish(&m); /* also after an error: the others are waiting for what this rank sends */
        s = s ? s : step ? step : moved;
        if (from_others)
            add(c, to, c->arriving, r - d);
        if (comes_home)
            add(c, c->home, c->returning, r);
        worked = works;
        held = room, room = room == c->block[1] ? c->block[2] : c->block[1];
    }
    return s;
}

static heed_status deliver_gradients(ring *c, const heed_gradient *g)
{
    const heed_attention *a = c->a;
    heed_tensor from[] = {
        packed(c->dq, HEED_F32, a->q.shape, a->q.shape[2], a->q.shape[3]),
        packed(c->home[0], HEED_F32, a->k.shape, a->k.shape[2], a->k.shape[3]),
        packed(c->home[1], HEED_F32, a->v.shape, a->v.shape[2], a->v.shape[3]),
    };
    const heed_tensor *to[] = { &g->d_q, &g->d_k, &g->d_v };
    heed_status s = HEED_OK;
    for (int n = 0; !s && n < 3; n++) {
        heed_tensor lse = packed(c->lse, HEED_F32, from[n].shape, from[n].shape[2], 1);
        fill(c->lse, (size_t)(from[n].shape[0] * from[n].shape[1] * from[n].shape[2]), 0);
        s = deliver(c, from[n], &lse, *to[n], (heed_tensor){ .data = NULL });
    }
    return s;
}

heed_status heed_mpi_backward(const heed_attention *a, const heed_gradient *g, const heed_mpi *m, const heed_exec *x)
{
    ring c;
    heed_status s = open_ring(&c, 1, a, g, m, x);
    if (!s) {
        size_t rows = (size_t)(a->q.shape[0] * a->q.shape[1] * a->q.shape[2]);
        heed_tensor delta = packed(c.delta, HEED_F32, a->q.shape, a->q.shape[2], 1);
        fill(c.dq, rows * (size_t)a->q.shape[3], 0);
        if (rows && (s = heed_delta(&a->o, &g->d_o, g->d_lse.data ? &g->d_lse : NULL, &delta, &c.x)))
            fail(s, "%s", heed_last_error());
        heed_status went = backward_ring(&c, g);
        s = s ? s : went;
        s = s ? s : deliver_gradients(&c, g);
    }
    close_ring(&c);
    return s;
}
