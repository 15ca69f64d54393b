#include "ring.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Tensors ---------------------------------------------------------------------------------------------------- */

size_t bytes_of(heed_dtype dtype) { return dtype == HEED_F64 ? 8 : dtype == HEED_F32 ? 4 : 2; }

heed_tensor packed(void *data, heed_dtype dtype, const int64_t *shape, int64_t rows, int64_t columns)
{
    return (heed_tensor){
        .data = data,
        .dtype = dtype,
        .shape = { shape[0], shape[1], rows, columns },
        .stride = { shape[1] * rows * columns, rows * columns, columns, 1 },
    };
}

static heed_tensor with_strides(heed_tensor t)
{
    if (!t.stride[0] && !t.stride[1] && !t.stride[2] && !t.stride[3])
        return packed(t.data, t.dtype, t.shape, t.shape[2], t.shape[3]);
    return t;
}

heed_tensor rows_of(heed_tensor t, const range *r)
{
    t = with_strides(t);
    if (t.data)
        t.data = (char *)t.data + r->at * t.stride[2] * (int64_t)bytes_of(t.dtype);
    t.shape[2] = r->count;
    return t;
}

/* Any strides to packed memory; converts nothing. */
static void pack(const heed_tensor *from, char *to)
{
    heed_tensor t = with_strides(*from);
    size_t bytes = bytes_of(t.dtype);
    for (int64_t b = 0; b < t.shape[0]; b++)
        for (int64_t h = 0; h < t.shape[1]; h++)
            for (int64_t i = 0; i < t.shape[2]; i++) {
                const char *row = (const char *)t.data +
                                  (b * t.stride[0] + h * t.stride[1] + i * t.stride[2]) * (int64_t)bytes;
                if (t.stride[3] == 1)
                    memcpy(to, row, (size_t)t.shape[3] * bytes), to += (size_t)t.shape[3] * bytes;
                else
                    for (int64_t n = 0; n < t.shape[3]; n++, to += bytes)
                        memcpy(to, row + n * t.stride[3] * (int64_t)bytes, bytes);
            }
}

void fill(float *to, size_t count, float value)
{
    for (size_t n = 0; n < count; n++)
        to[n] = value;
}

/* As the merge with a part that saw no key, which converts. */
heed_status deliver(ring *c, heed_tensor from, const heed_tensor *lse_from, heed_tensor to, heed_tensor lse_to)
{
    heed_tensor none = packed(c->lse2, HEED_F32, to.shape, to.shape[2], 1);
    size_t rows = (size_t)(to.shape[0] * to.shape[1] * to.shape[2]);
    if (!rows)
        return HEED_OK;
    fill(c->lse2, rows, -INFINITY);
    heed_status s = heed_merge(&to, &none, &from, lse_from, &c->x);
    if (!s && lse_to.data) {
        heed_tensor got = with_strides(lse_to);
        const float *lse = lse_from->data;
        for (int64_t b = 0; b < got.shape[0]; b++)
            for (int64_t h = 0; h < got.shape[1]; h++)
                for (int64_t i = 0; i < got.shape[2]; i++)
                    ((float *)got.data)[b * got.stride[0] + h * got.stride[1] + i * got.stride[2]] = *lse++;
    }
    return s ? fail(s, "%s", heed_last_error()) : HEED_OK;
}

/* ---- Opening a call --------------------------------------------------------------------------------------------- */

static heed_status check(int backward, const heed_attention *a, const heed_gradient *g, const heed_mpi *m,
                         const heed_exec *x)
{
    if (!a || !x || (backward && !g))
        return fail(HEED_BAD_ARGUMENT, "%s: is NULL", !a ? "attention" : !x ? "exec" : "gradient");
    if (x->backend != HEED_CPU && x->backend != HEED_REFERENCE)
        return fail(HEED_UNSUPPORTED, "backend: is %d, expected HEED_CPU or HEED_REFERENCE: memory of the host",
                    x->backend);
    if (m->shards < HEED_MPI_CONTIGUOUS || m->shards > HEED_MPI_STRIPED)
        return fail(HEED_BAD_ARGUMENT, "shards: is %d, expected 0 to 2", m->shards);
    if (a->align || a->query_position || a->key_position || a->query_step || a->key_step)
        return fail(HEED_BAD_ARGUMENT, "align, positions and steps: expected 0, as they follow from the shards");
    if (a->mask.data || a->bias.data || a->sink.data || a->lengths_q || a->lengths_k || a->offsets_q || a->offsets_k ||
        a->block_table || a->dropout_seed_at || a->q.dtype == HEED_F64)
        return fail(HEED_UNSUPPORTED,
                    "mask, bias, sink, lengths, offsets, pages, dropout_seed_at and fp64: expected none");
    if (g && (g->accumulate || g->delta.data || g->d_bias.data || g->d_sink.data))
        return fail(HEED_UNSUPPORTED, "accumulate, delta, d_bias and d_sink: expected none");
    if (g && (!g->d_q.data || !g->d_k.data || !g->d_v.data) && a->q.shape[2] && a->k.shape[2])
        return fail(HEED_BAD_ARGUMENT, "d_q, d_k and d_v: one of them is absent, expected all");
    heed_exec exec = *x; /* and everything that heed.h says of the shard by itself */
    size_t bytes;
    heed_status s = heed_workspace_size(a, g, &exec, &bytes);
    return s ? fail(s, "%s", heed_last_error()) : HEED_OK;
}

/* Memory for everything at once, cut into pieces of 64 bytes. */
typedef struct cutter {
    char *at;
    size_t bytes;
} cutter;

static void *cut(cutter *c, size_t bytes)
{
    void *piece = c->at ? c->at + c->bytes : NULL;
    c->bytes += (bytes + 63) / 64 * 64;
    return piece;
}

static void cut_all(ring *c, cutter *from, int backward)
{
    const heed_attention *a = c->a;
    int64_t most = 0;
    for (int r = 0; r < c->ranks; r++)
        most = count_of(c, c->keys, r) > most ? count_of(c, c->keys, r) : most;
    size_t heads = (size_t)(a->k.shape[0] * a->k.shape[1]),
           rows = (size_t)(a->q.shape[0] * a->q.shape[1] * a->q.shape[2]);
    size_t columns[2] = { (size_t)a->k.shape[3], (size_t)a->v.shape[3] };
    for (int n = 0; n < 3; n++)
        c->block[n] = cut(from, heads * (size_t)most * (columns[0] + columns[1]) * bytes_of(a->k.dtype));
    for (int n = 0; n < 2 && backward; n++) {
        c->home[n] = cut(from, heads * (size_t)most * columns[n] * sizeof(float));
        c->sums[0][n] = cut(from, heads * (size_t)most * columns[n] * sizeof(float));
        c->sums[1][n] = cut(from, heads * (size_t)most * columns[n] * sizeof(float));
        c->returning[n] = cut(from, heads * (size_t)most * columns[n] * sizeof(float));
        c->arriving[n] = cut(from, heads * (size_t)most * columns[n] * sizeof(float));
    }
    size_t keys = heads * (size_t)most, scratch = rows > keys ? rows : keys; /* lse2 also serves to deliver dk and dv */
    c->lse2 = cut(from, scratch * sizeof(float));
    c->lse = cut(from, scratch * sizeof(float));
    if (backward) {
        c->dq = cut(from, rows * columns[0] * sizeof(float));
        c->delta = cut(from, rows * sizeof(float));
    } else {
        c->o = cut(from, rows * columns[1] * sizeof(float));
        c->o2 = cut(from, rows * columns[1] * sizeof(float));
    }
}

static heed_status row_type(int64_t bytes, MPI_Datatype *type)
{
    heed_status s = check_mpi(MPI_Type_contiguous((int)bytes, MPI_BYTE, type), "MPI_Type_contiguous");
    return s ? s : check_mpi(MPI_Type_commit(type), "MPI_Type_commit");
}

/* A communicator whose ranks can talk. */
static heed_status check_comm(const heed_mpi *m)
{
    int inter = 0;
    if (!m || m->comm == MPI_COMM_NULL)
        return fail(HEED_BAD_ARGUMENT, "%s", m ? "comm: is MPI_COMM_NULL" : "mpi: is NULL");
    heed_status s = check_mpi(MPI_Comm_test_inter(m->comm, &inter), "MPI_Comm_test_inter");
    return inter ? fail(HEED_BAD_ARGUMENT, "comm: is an intercommunicator, expected one group of ranks") : s;
}

/* MPI counts in ints. */
static heed_status check_messages(const ring *c)
{
    int64_t heads = c->a->k.shape[0] * c->a->k.shape[1];
    for (int r = 0; heads && c->ranks > 1 && r < c->ranks; r++)
        if (count_of(c, c->keys, r) > INT_MAX / heads)
            return fail(HEED_UNSUPPORTED,
                        "k: rank %d has batch * heads = %lld times %lld keys, a message takes %d in all", r,
                        (long long)heads, (long long)count_of(c, c->keys, r), INT_MAX);
    return HEED_OK;
}

heed_status open_ring(ring *c, int backward, const heed_attention *a, const heed_gradient *g, const heed_mpi *m,
                      const heed_exec *x)
{
    memset(c, 0, sizeof *c);
    c->key_row = c->value_row = c->key_gradient_row = c->value_gradient_row = MPI_DATATYPE_NULL;
    c->a = a, c->m = m;
    heed_status s = check_comm(m);
    if (!s)
        s = check_mpi(MPI_Comm_size(m->comm, &c->ranks), "MPI_Comm_size");
    if (!s)
        s = check_mpi(MPI_Comm_rank(m->comm, &c->me), "MPI_Comm_rank");
    if (s)
        return s;
    call_words *words = malloc((size_t)c->ranks * sizeof *words);
    c->rows = calloc((size_t)c->ranks * RANGES * 2, sizeof *c->rows);
    c->keys = c->rows ? c->rows + c->ranks * RANGES : NULL;
    if (!words || !c->rows) { /* too little memory even to say so: the others find out by MPI's error handler */
        free(words);
        return fail(HEED_NO_WORKSPACE, "no memory for the descriptions of %d ranks", c->ranks);
    }
    s = agree(a, m, backward, check(backward, a, g, m, x), words, c->ranks);
    int64_t rows, keys;
    if (!s)
        s = lay_out(c, words, 0, c->rows, &rows);
    if (!s)
        s = lay_out(c, words, 1, c->keys, &keys);
    if (!s)
        s = check_messages(c);
    free(words);
    if (s)
        return s;
    c->offset = keys - rows;
    c->x = *x, c->x.workspace = NULL, c->x.workspace_bytes = 0;
    cutter measure = { NULL, 0 };
    cut_all(c, &measure, backward);
    int64_t size = (int64_t)bytes_of(a->k.dtype);
    if ((s = row_type(a->k.shape[3] * size, &c->key_row)) || (s = row_type(a->v.shape[3] * size, &c->value_row)) ||
        (s = row_type(a->k.shape[3] * 4, &c->key_gradient_row)) ||
        (s = row_type(a->v.shape[3] * 4, &c->value_gradient_row)))
        return s;
    c->memory = malloc(measure.bytes);
    int none = !c->memory, anyone = 0;
    s = check_mpi(MPI_Allreduce(&none, &anyone, 1, MPI_INT, MPI_MAX, m->comm), "MPI_Allreduce");
    if (!s && anyone)
        s = fail(HEED_NO_WORKSPACE, "this rank needs %zu bytes; %s", measure.bytes,
                 none ? "there are not so many" : "another one has not enough memory");
    if (s)
        return s;
    cutter use = { c->memory, 0 };
    cut_all(c, &use, backward);
    pack(&a->k, c->block[0]);
    pack(&a->v, c->block[0] + (size_t)(a->k.shape[0] * a->k.shape[1] * a->k.shape[2] * a->k.shape[3]) * (size_t)size);
    return HEED_OK;
}

void close_ring(ring *c)
{
    MPI_Datatype *types[] = { &c->key_row, &c->value_row, &c->key_gradient_row, &c->value_gradient_row };
    for (int n = 0; n < 4; n++)
        if (*types[n] != MPI_DATATYPE_NULL)
            MPI_Type_free(types[n]);
    free(c->memory);
    free(c->rows);
    free(c->x.workspace);
}
