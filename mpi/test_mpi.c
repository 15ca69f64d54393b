/* mpirun -n 3 test_mpi: what the ranks compute together is what one of them computes alone; wrong calls are errors on
 * all of them. Every rank makes the whole problem from the same numbers, takes its shard, and compares its part. */
#include "heed_mpi.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { B = 2, HQ = 4, HK = 2, D = 24, DV = 20, MOST = 96 };

static int rank, ranks, failures, checks;

static void expect(int condition, const char *what, const char *detail)
{
    checks++;
    if (condition)
        return;
    if (failures++ < 8)
        printf("rank %d of %d: %s: %s\n", rank, ranks, what, detail);
}

/* ---- What is sent ----------------------------------------------------------------------------------------------- */

static int64_t sent_bytes;

/* MPI's own way to look at its calls: this one is found first, and PMPI_Isend is the real one. */
int MPI_Isend(const void *data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *request)
{
    int bytes;
    MPI_Type_size(type, &bytes);
    sent_bytes += (int64_t)count * bytes;
    return PMPI_Isend(data, count, type, to, tag, comm, request);
}

static int64_t sent_by_all(void)
{
    int64_t all = 0;
    MPI_Allreduce(&sent_bytes, &all, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
    sent_bytes = 0;
    return all;
}

/* ---- A problem -------------------------------------------------------------------------------------------------- */

enum { Q, K, V, DO, O, DQ, DK, DV_, DLSE, LSE, TENSORS };

typedef struct problem {
    const char *name;
    heed_dtype dtype;
    int64_t rows, keys;
    heed_mpi_shards shards;
    const int64_t *lengths; /* of contiguous shards, where they are not as even as can be */
    int causal, windowed;
    int64_t left, right, stride;
    float softcap, dropout;
    int alibi, no_lse;
} problem;

static float next_number(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((int64_t)(*state >> 40) - (1 << 23)) / (1 << 22);
}

static size_t bytes_of(heed_dtype dtype) { return dtype == HEED_F64 ? 8 : dtype == HEED_F32 ? 4 : 2; }

static void put(void *data, heed_dtype dtype, int64_t at, float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (dtype == HEED_F64)
        ((double *)data)[at] = x;
    else if (dtype == HEED_F32)
        ((float *)data)[at] = x;
    else
        ((uint16_t *)data)[at] = (uint16_t)(bits >> 16); /* bf16, the numbers being short enough */
}

static double get(const void *data, heed_dtype dtype, int64_t at)
{
    if (dtype == HEED_F64)
        return ((const double *)data)[at];
    if (dtype == HEED_F32)
        return ((const float *)data)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)data)[at] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Which token of the whole row i of a rank's shard is. */
static int64_t token(const problem *p, int64_t tokens, int of, int64_t i)
{
    heed_mpi m = { .shards = p->shards };
    if (p->lengths) {
        for (int r = 0; r < of; r++)
            i += p->lengths[r];
        return i;
    }
    int64_t first, step, count = heed_mpi_range(&m, tokens, ranks, of, 0, &first, &step);
    if (i >= count) {
        i -= count;
        heed_mpi_range(&m, tokens, ranks, of, 1, &first, &step);
    }
    return first + i * step;
}

static int64_t length(const problem *p, int64_t tokens, int of)
{
    heed_mpi m = { .shards = p->shards };
    int64_t first, step;
    if (p->lengths)
        return p->lengths[of];
    return heed_mpi_range(&m, tokens, ranks, of, 0, &first, &step) +
           heed_mpi_range(&m, tokens, ranks, of, 1, &first, &step);
}

typedef struct tensors {
    heed_attention a;
    heed_gradient g;
    void *memory[TENSORS];
    float slopes[HQ];
} tensors;

/* rows and keys of the whole, or of a shard; double makes the same numbers for the reference. */
static void make(tensors *t, const problem *p, heed_dtype dtype, int64_t rows, int64_t keys)
{
    static const int heads[TENSORS] = { HQ, HK, HK, HQ, HQ, HQ, HK, HK, HQ, HQ };
    static const int columns[TENSORS] = { D, D, DV, DV, DV, D, D, DV, 1, 1 };
    memset(t, 0, sizeof *t);
    heed_tensor *to[TENSORS] = { &t->a.q,   &t->a.k,   &t->a.v,   &t->g.d_o,   &t->a.o,
                                 &t->g.d_q, &t->g.d_k, &t->g.d_v, &t->g.d_lse, &t->a.lse };
    for (int n = 0; n < TENSORS; n++) {
        int64_t length = n == K || n == V || n == DK || n == DV_ ? keys : rows;
        heed_dtype type = n == DLSE || n == LSE ? (dtype == HEED_F64 ? HEED_F64 : HEED_F32) : dtype;
        t->memory[n] = calloc((size_t)(B * heads[n] * length * columns[n]) + 1, bytes_of(type));
        *to[n] = (heed_tensor){ t->memory[n], type, { B, heads[n], length, columns[n] }, { 0 } };
    }
    t->a.causal = p->causal, t->a.windowed = p->windowed;
    t->a.window_left = p->left, t->a.window_right = p->right;
    t->a.key_stride = p->stride, t->a.softcap = p->softcap;
    t->a.dropout = p->dropout, t->a.dropout_seed = 77;
    for (int h = 0; h < HQ; h++)
        t->slopes[h] = 0.05f * (float)(h + 1);
    if (p->alibi)
        t->a.alibi = (heed_tensor){ t->slopes, HEED_F32, { 1, HQ, 1, 1 }, { 0 } };
}

static void drop(tensors *t)
{
    for (int n = 0; n < TENSORS; n++)
        free(t->memory[n]);
}

/* The inputs, element by element of the whole; of a shard, those of its tokens. */
static void fill(tensors *t, const problem *p, int of)
{
    heed_tensor *inputs[] = { &t->a.q, &t->a.k, &t->a.v, &t->g.d_o, &t->g.d_lse };
    for (int n = 0; n < 5; n++) {
        heed_tensor *x = inputs[n];
        int64_t tokens = n == 1 || n == 2 ? p->keys : p->rows, at = 0;
        for (int64_t b = 0; b < B; b++)
            for (int64_t h = 0; h < x->shape[1]; h++)
                for (int64_t i = 0; i < x->shape[2]; i++)
                    for (int64_t c = 0; c < x->shape[3]; c++) {
                        int64_t row = of < 0 ? i : token(p, tokens, of, i);
                        uint64_t state = (uint64_t)((((n * B + b) * HQ + h) * MOST + row) * 32 + c) * 7919 + 13;
                        next_number(&state);
                        float value = roundf(next_number(&state) * 16) / 16; /* the same in every dtype */
                        put(x->data, x->dtype, at++, value);
                    }
    }
}

static void run_alone(tensors *t)
{
    heed_exec x = { .backend = HEED_REFERENCE };
    size_t forward, backward;
    heed_status s = heed_workspace_size(&t->a, NULL, &x, &forward);
    s = s ? s : heed_workspace_size(&t->a, &t->g, &x, &backward);
    x.workspace_bytes = s ? 0 : forward > backward ? forward : backward;
    x.workspace = aligned_alloc(64, (x.workspace_bytes + 64) / 64 * 64);
    s = s ? s : heed_forward(&t->a, &x);
    s = s ? s : heed_backward(&t->a, &t->g, &x);
    expect(!s, "alone", heed_last_error());
    free(x.workspace);
}

static void compare(const problem *p, const heed_tensor *part, const heed_tensor *whole, const char *name)
{
    double worst = 0, largest = 1, limit = p->dtype == HEED_F32 ? 2e-5 : 2e-2;
    int64_t tokens = whole->shape[2], at = 0;
    for (int64_t n = 0; n < B * whole->shape[1] * tokens * whole->shape[3]; n++)
        if (isfinite(get(whole->data, whole->dtype, n)))
            largest = fmax(largest, fabs(get(whole->data, whole->dtype, n)));
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < part->shape[1]; h++)
            for (int64_t i = 0; i < part->shape[2]; i++)
                for (int64_t c = 0; c < part->shape[3]; c++) {
                    int64_t row = token(p, tokens, rank, i);
                    double want = get(whole->data, whole->dtype,
                                      ((b * whole->shape[1] + h) * tokens + row) * whole->shape[3] + c);
                    double got = get(part->data, part->dtype, at++);
                    double off = want == got ? 0 : fabs(want - got);
                    worst = off <= worst ? worst : off; /* NaN counts as worst */
                }
    char text[160];
    snprintf(text, sizeof text, "%s is off by %g, the largest element being %g", name, worst, largest);
    expect(worst <= limit * largest, p->name, text);
}

/* ---- Tests ------------------------------------------------------------------------------------------------------ */

static void agrees_with_one_rank(const problem *p)
{
    tensors whole, part, again;
    make(&whole, p, HEED_F64, p->rows, p->keys);
    fill(&whole, p, -1);
    run_alone(&whole);
    heed_mpi m = { .comm = MPI_COMM_WORLD, .shards = p->shards };
    heed_exec x = { .backend = HEED_CPU, .threads = 1 };
    tensors *both[] = { &part, &again };
    for (int n = 0; n < 2; n++) {
        make(both[n], p, p->dtype, length(p, p->rows, rank), length(p, p->keys, rank));
        fill(both[n], p, rank);
        heed_tensor lse = both[n]->a.lse;
        if (p->no_lse) { /* optional in forward */
            both[n]->a.lse.data = NULL;
            expect(!heed_mpi_forward(&both[n]->a, &m, &x), p->name, heed_mpi_last_error());
            both[n]->a.lse = lse;
        }
        expect(!heed_mpi_forward(&both[n]->a, &m, &x), p->name, heed_mpi_last_error());
        expect(!heed_mpi_backward(&both[n]->a, &both[n]->g, &m, &x), p->name, heed_mpi_last_error());
    }
    compare(p, &part.a.o, &whole.a.o, "o");
    compare(p, &part.a.lse, &whole.a.lse, "lse");
    compare(p, &part.g.d_q, &whole.g.d_q, "d_q");
    compare(p, &part.g.d_k, &whole.g.d_k, "d_k");
    compare(p, &part.g.d_v, &whole.g.d_v, "d_v");
    heed_tensor *first[] = { &part.a.o, &part.g.d_q, &part.g.d_k, &part.g.d_v };
    heed_tensor *second[] = { &again.a.o, &again.g.d_q, &again.g.d_k, &again.g.d_v };
    for (int n = 0; n < 4; n++) {
        const int64_t *s = first[n]->shape;
        size_t bytes = (size_t)(s[0] * s[1] * s[2] * s[3]) * bytes_of(first[n]->dtype);
        expect(!memcmp(first[n]->data, second[n]->data, bytes), p->name, "a second time the bits are others");
    }
    drop(&whole), drop(&part), drop(&again);
}

static void strided_views(void)
{
    const problem p = { "bshd", HEED_F32, 50, 50, HEED_MPI_ZIGZAG, NULL, .causal = 1 };
    tensors packed, moved;
    heed_mpi m = { .comm = MPI_COMM_WORLD, .shards = p.shards };
    heed_exec x = { .backend = HEED_CPU, .threads = 1 };
    int64_t n = length(&p, 50, rank);
    make(&packed, &p, HEED_F32, n, n), make(&moved, &p, HEED_F32, n, n);
    fill(&packed, &p, rank);
    heed_tensor *from[] = { &packed.a.q, &packed.a.k, &packed.a.v }, *to[] = { &moved.a.q, &moved.a.k, &moved.a.v };
    for (int t = 0; t < 3; t++) {
        int64_t heads = from[t]->shape[1], columns = from[t]->shape[3];
        int64_t stride[4] = { n * heads * columns, columns, heads * columns, 1 };
        memcpy(to[t]->stride, stride, sizeof stride);
        for (int64_t at = 0; at < B * heads * n * columns; at++) {
            int64_t c = at % columns, i = at / columns % n, h = at / columns / n % heads, b = at / columns / n / heads;
            ((float *)to[t]->data)[b * stride[0] + h * stride[1] + i * stride[2] + c] = ((float *)from[t]->data)[at];
        }
    }
    expect(!heed_mpi_forward(&packed.a, &m, &x) && !heed_mpi_forward(&moved.a, &m, &x), "bshd", heed_mpi_last_error());
    expect(!memcmp(packed.a.o.data, moved.a.o.data, (size_t)(B * HQ * n * DV) * 4), "bshd", "other bits");
    drop(&packed), drop(&moved);
}

/* heed_mpi.h: "for every pair of different ranks of which one sees keys of the other: the owner's k and v". */
static void sends_what_is_seen(void)
{
    enum { EACH = 24 };
    static const problem all[] = {
        { "full", HEED_BF16, 0, 0, HEED_MPI_CONTIGUOUS, .causal = 0 },
        { "causal", HEED_BF16, 0, 0, HEED_MPI_CONTIGUOUS, .causal = 1 },
        { "causal, zigzag", HEED_BF16, 0, 0, HEED_MPI_ZIGZAG, .causal = 1 },
        { "window", HEED_BF16, 0, 0, HEED_MPI_CONTIGUOUS, .causal = 1, .windowed = 1, .left = EACH, .right = -1 },
        { "itself", HEED_BF16, 0, 0, HEED_MPI_CONTIGUOUS, .causal = 1, .windowed = 1, .left = 0, .right = 0 },
    };
    const int64_t pairs[] = { ranks * (ranks - 1), ranks * (ranks - 1) / 2, ranks * (ranks - 1), ranks - 1, 0 };
    for (int n = 0; n < 5; n++) {
        problem p = all[n];
        tensors t;
        char text[96];
        p.rows = p.keys = EACH * ranks;
        heed_mpi m = { .comm = MPI_COMM_WORLD, .shards = p.shards };
        heed_exec x = { .backend = HEED_CPU, .threads = 1 };
        make(&t, &p, p.dtype, EACH, EACH);
        fill(&t, &p, rank);
        int64_t block = (int64_t)B * HK * EACH * (D + DV), want = pairs[n] * block * 2;
        sent_by_all();
        expect(!heed_mpi_forward(&t.a, &m, &x), p.name, heed_mpi_last_error());
        int64_t got = sent_by_all();
        snprintf(text, sizeof text, "forward sends %lld bytes, expected %lld", (long long)got, (long long)want);
        expect(got == want, p.name, text);
        want = pairs[n] * block * (2 + 4);
        expect(!heed_mpi_backward(&t.a, &t.g, &m, &x), p.name, heed_mpi_last_error());
        got = sent_by_all();
        snprintf(text, sizeof text, "backward sends %lld bytes, expected %lld", (long long)got, (long long)want);
        expect(got == want, p.name, text);
        drop(&t);
    }
}

/* The last rank does something wrong; all of them must hear of it. */
static void wrong_calls(void)
{
    const problem p = { "wrong", HEED_F32, 40, 40, HEED_MPI_CONTIGUOUS, .lengths = NULL };
    heed_mpi m = { .comm = MPI_COMM_WORLD };
    heed_exec x = { .backend = HEED_CPU, .threads = 1 };
    int odd = rank == ranks - 1, others = ranks > 1;
    static const char *const says[] = { "causal: is 0 on rank 0 and 1 on rank",
                                        "q: heads: is 4 on rank 0 and 2 on rank",
                                        "head_dim",
                                        "mask, bias, sink",
                                        "expected HEED_CPU",
                                        "the call",
                                        "shards: is 7",
                                        "zero_scale: is 0 on rank 0 and 1 on rank",
                                        "alibi",
                                        "attention: is NULL",
                                        "exec: is NULL",
                                        "gradient: is NULL",
                                        "a message takes 2147483647" };
    for (int n = 0; n < 12 + others; n++) { /* the last one is about messages */
        tensors t;
        char mask[1] = { 1 };
        float slopes[HQ] = { 1, 1, 1, odd && n == 8 ? 2 : 1 };
        make(&t, &p, HEED_F32, length(&p, 40, rank), length(&p, 40, rank));
        heed_mpi mine = m;
        heed_exec exec = x;
        if (odd && n == 0)
            t.a.causal = 1;
        if (odd && n == 1)
            t.a.q.shape[1] = t.a.o.shape[1] = t.a.lse.shape[1] = 2;
        if (odd && n == 2)
            t.a.k.shape[3] = 8;
        if (odd && n == 3)
            t.a.mask = (heed_tensor){ mask, HEED_BOOL, { 1, 1, 1, 1 }, { 0 } };
        if (odd && n == 4)
            exec.backend = HEED_CUDA;
        if (odd && n == 6)
            mine.shards = (heed_mpi_shards)7;
        if (odd && n == 7)
            t.a.zero_scale = 1;
        if (n == 8)
            t.a.alibi = (heed_tensor){ slopes, HEED_F32, { 1, HQ, 1, 1 }, { 0 } };
        if (odd && n == 12) { /* the same key again and again */
            t.a.k.shape[2] = t.a.v.shape[2] = 3000000000;
            memcpy(t.a.k.stride, (int64_t[4]){ 1, 1, 0, 1 }, sizeof t.a.k.stride);
            memcpy(t.a.v.stride, t.a.k.stride, sizeof t.a.v.stride);
        }
        heed_status s = (odd && n == 5) || n == 11
                            ? heed_mpi_backward(&t.a, odd && n == 11 ? NULL : &t.g, &mine, &exec)
                            : heed_mpi_forward(odd && n == 9 ? NULL : &t.a, &mine, odd && n == 10 ? NULL : &exec);
        int alone_is_right = !others && (n == 0 || n == 1 || n == 5 || n == 7 || n == 8);
        expect(alone_is_right ? !s : s && strstr(heed_mpi_last_error(), says[n]), says[n], heed_mpi_last_error());
        drop(&t);
    }
    heed_attention a = { .causal = 1 }; /* what the others cannot hear of */
    heed_mpi nowhere = { .comm = MPI_COMM_NULL };
    expect(heed_mpi_forward(&a, NULL, &x) && strstr(heed_mpi_last_error(), "mpi: is NULL"), "m", heed_mpi_last_error());
    expect(heed_mpi_forward(&a, &nowhere, &x) && strstr(heed_mpi_last_error(), "MPI_COMM_NULL"), "comm",
           heed_mpi_last_error());
    if (others) {
        MPI_Comm part;
        MPI_Comm_split(MPI_COMM_WORLD, rank == 0, rank, &part);
        MPI_Intercomm_create(part, 0, MPI_COMM_WORLD, rank == 0, 1, &nowhere.comm);
        expect(heed_mpi_forward(&a, &nowhere, &x) && strstr(heed_mpi_last_error(), "intercommunicator"), "comm",
               heed_mpi_last_error());
        MPI_Comm_free(&nowhere.comm), MPI_Comm_free(&part);
    }
    tensors t; /* lengths that are not those of a layout */
    make(&t, &p, HEED_F32, 10 + 2 * rank, 10 + 2 * rank);
    m.shards = HEED_MPI_ZIGZAG;
    heed_status s = heed_mpi_forward(&t.a, &m, &x);
    expect(others ? s && strstr(heed_mpi_last_error(), "q: rank 0 has 10 tokens") : !s, "lengths",
           heed_mpi_last_error());
    drop(&t);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    static const int64_t few[] = { 3, 0, 21, 1 };
    int64_t sum = 0;
    for (int r = 0; r < ranks && ranks <= 4; r++)
        sum += few[r];
    static const char *const layouts[] = { "contiguous", "zigzag", "striped" };
    for (int layout = 0; layout < 3; layout++)
        for (int dtype = 0; dtype < 2; dtype++) {
            const problem all[] = {
                { "full", .rows = 53, .keys = 53 },
                { "causal", .rows = 53, .keys = 53, .causal = 1 },
                { "window", .rows = 53, .keys = 53, .windowed = 1, .left = 6, .right = 2 },
                { "any window", .rows = 53, .keys = 53, .windowed = 1, .left = INT64_MAX, .right = INT64_MAX },
                { "causal window", .rows = 53, .keys = 53, .causal = 1, .windowed = 1, .left = 9, .right = -1 },
                { "stride", .rows = 53, .keys = 53, .causal = 1, .stride = 3 },
                { "fewer rows", .rows = 17, .keys = 53, .causal = 1 },
                { "fewer keys", .rows = 53, .keys = 5 },
                { "alibi, softcap", .rows = 53, .keys = 53, .causal = 1, .alibi = 1, .softcap = 4, .no_lse = 1 },
                { "dropout", .rows = 53, .keys = 53, .causal = 1, .dropout = 0.3f },
            };
            for (size_t n = 0; n < sizeof all / sizeof *all; n++) {
                problem p = all[n];
                char name[64];
                p.shards = (heed_mpi_shards)layout, p.dtype = dtype ? HEED_BF16 : HEED_F32;
                snprintf(name, sizeof name, "%s, %s, %s", p.name, layouts[layout], dtype ? "bf16" : "fp32");
                p.name = name;
                agrees_with_one_rank(&p);
            }
        }
    if (ranks <= 4) {
        agrees_with_one_rank(&(problem){ "uneven", HEED_F32, sum, sum, 0, few, .causal = 1 });
        agrees_with_one_rank(&(problem){ "uneven, full", HEED_F32, sum, sum, .lengths = few });
        agrees_with_one_rank(
            &(problem){ "uneven, window", HEED_F32, sum, sum, 0, few, .windowed = 1, .left = 2, .right = 2 });
    }
    strided_views();
    sends_what_is_seen();
    wrong_calls();
    int all = 0;
    MPI_Allreduce(&failures, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%d ranks: %d checks on each, %d failures in all\n", ranks, checks, all);
    MPI_Finalize();
    return all != 0;
}
