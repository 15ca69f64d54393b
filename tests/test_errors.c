/* heed.h: "Arguments are checked before anything runs. On an error the outputs are untouched, the call returns a status
 * and heed_last_error() names the argument, what it was and what was expected." Every message is provoked here, by the
 * rules of errors.def; and what is odd but right is accepted. */
#include "internal.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* B = 2, Hq = 4, Hk = 2, Sq = 3, Sk = 5, D = Dv = 8, with room for the largest form. */
typedef struct memory {
    _Alignas(64) float q[512], k[512], v[512], o[512], lse[64], bias[128], alibi[16], sink[16];
    _Alignas(64) float d_o[512], d_lse[256], delta[64], d_q[512], d_k[512], d_v[512], d_bias[128], d_sink[16];
    _Alignas(64) uint8_t mask[128];
    int32_t lengths_q[2], lengths_k[2], offsets_q[3], offsets_k[3], table[6];
    _Alignas(64) char workspace[1 << 14];
} memory;

typedef struct call {
    heed_attention a;
    heed_gradient g;
    heed_exec x;
    memory *m;
} call;

static heed_tensor tensor(void *data, heed_dtype dtype, int64_t b, int64_t h, int64_t i, int64_t c)
{
    return (heed_tensor){ .data = data, .dtype = dtype, .shape = { b, h, i, c } };
}

static void strides(heed_tensor *t, int64_t b, int64_t h, int64_t i, int64_t c)
{
    t->stride[0] = b, t->stride[1] = h, t->stride[2] = i, t->stride[3] = c;
}

static call good(memory *m)
{
    call c = { .m = m };
    c.a.q = tensor(m->q, HEED_F32, 2, 4, 3, 8);
    c.a.k = tensor(m->k, HEED_F32, 2, 2, 5, 8);
    c.a.v = tensor(m->v, HEED_F32, 2, 2, 5, 8);
    c.a.o = tensor(m->o, HEED_F32, 2, 4, 3, 8);
    c.a.lse = tensor(m->lse, HEED_F32, 2, 4, 3, 1);
    c.g.d_o = tensor(m->d_o, HEED_F32, 2, 4, 3, 8);
    c.g.d_q = tensor(m->d_q, HEED_F32, 2, 4, 3, 8);
    c.g.d_k = tensor(m->d_k, HEED_F32, 2, 2, 5, 8);
    c.g.d_v = tensor(m->d_v, HEED_F32, 2, 2, 5, 8);
    c.x = (heed_exec){ .backend = HEED_REFERENCE, .workspace = m->workspace, .workspace_bytes = sizeof m->workspace };
    return c;
}

static void padded(call *c)
{
    memory *m = c->m;
    m->lengths_q[0] = 3, m->lengths_q[1] = 0;
    m->lengths_k[0] = 4, m->lengths_k[1] = 5;
    c->a.lengths_q = m->lengths_q;
    c->a.lengths_k = m->lengths_k;
}

static void ragged(call *c)
{
    memory *m = c->m;
    c->a.q = tensor(m->q, HEED_F32, 1, 4, 6, 8);
    c->a.k = tensor(m->k, HEED_F32, 1, 2, 10, 8);
    c->a.v = tensor(m->v, HEED_F32, 1, 2, 10, 8);
    c->a.o = tensor(m->o, HEED_F32, 1, 4, 6, 8);
    c->a.lse = tensor(m->lse, HEED_F32, 1, 4, 6, 1);
    for (int b = 0; b <= 2; b++)
        m->offsets_q[b] = 3 * b, m->offsets_k[b] = 5 * b;
    m->lengths_k[0] = 4, m->lengths_k[1] = 5;
    c->a.offsets_q = m->offsets_q;
    c->a.offsets_k = m->offsets_k;
    c->a.sequences = 2, c->a.max_rows = 3, c->a.max_keys = 5;
}

static void paged(call *c)
{
    memory *m = c->m;
    c->a.k = tensor(m->k, HEED_F32, 5, 2, 2, 8);
    c->a.v = tensor(m->v, HEED_F32, 5, 2, 2, 8);
    for (int n = 0; n < 6; n++)
        m->table[n] = 4 - n % 5;
    m->table[5] = 99; /* beyond the length of the second sequence: never looked at */
    m->lengths_k[0] = 6, m->lengths_k[1] = 4;
    c->a.lengths_k = m->lengths_k;
    c->a.block_table = m->table;
    c->a.block_table_columns = 3;
}

static void delta(call *c)
{
    c->g.delta = tensor(c->m->delta, HEED_F32, 2, 4, 3, 1);
    c->a.o = (heed_tensor){ 0 };
}

static void bf16(call *c)
{
    c->a.q.dtype = c->a.k.dtype = c->a.v.dtype = c->a.o.dtype = c->g.d_o.dtype = HEED_BF16;
    c->g.accumulate = 1;
}

/* ---- Every rule ------------------------------------------------------------------------------------------------- */

enum kind { FORWARD, BACKWARD, FORWARD_RUN, BACKWARD_RUN };

#define RULE(kind, name, message, ...)                                                                                 \
    static void break_##name(call *c) { __VA_ARGS__; }
#include "errors.def"
#undef RULE

static const struct rule {
    enum kind kind;
    const char *name, *message;
    void (*change)(call *);
} rules[] = {
#define RULE(kind, name, message, ...) { kind, #name, message, break_##name },
#include "errors.def"
#undef RULE
};

static memory *new_memory(void)
{
    memory *m = aligned_alloc(64, sizeof *m);
    assert_non_null(m);
    memset(m, 0x3C, sizeof *m);
    return m;
}

static int begins_with(const char *text, const char *message)
{
    const char *gap = strstr(message, "...");
    if (strncmp(text, message, gap ? (size_t)(gap - message) : strlen(message)) != 0)
        return 0;
    return !gap || strstr(text, gap + 3);
}

static void expect(const struct rule *r, heed_status s, const char *where)
{
    if (s != HEED_BAD_ARGUMENT || !begins_with(heed_last_error(), r->message))
        fail_msg("%s, %s: status %s, message \"%s\", expected \"%s\"", r->name, where, heed_status_name(s),
                 heed_last_error(), r->message);
}

static void every_rule_has_its_message_and_leaves_memory_alone(void **state)
{
    (void)state;
    memory *m = new_memory(), *before = new_memory();
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        const struct rule *r = &rules[i];
        int backward = r->kind == BACKWARD || r->kind == BACKWARD_RUN;
        size_t bytes = 12345;
        call c = good(m);
        r->change(&c);
        memcpy(before, m, sizeof *m);
        expect(r, backward ? heed_backward(&c.a, &c.g, &c.x) : heed_forward(&c.a, &c.x), "call");
        if (r->kind == FORWARD || r->kind == BACKWARD) {
            expect(r, heed_workspace_size(&c.a, backward ? &c.g : NULL, &c.x, &bytes), "heed_workspace_size");
            assert_int_equal(bytes, 12345);
        }
        assert_memory_equal(before, m, sizeof *m);
    }
    free(m);
    free(before);
}

static void missing_structs_are_named(void **state)
{
    (void)state;
    memory *m = new_memory();
    call c = good(m);
    char text[64] = "as it was";
    assert_int_equal(heed_forward(NULL, &c.x), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "attention: is NULL");
    assert_int_equal(heed_forward(&c.a, NULL), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "exec: is NULL");
    assert_int_equal(heed_backward(&c.a, NULL, &c.x), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "gradient: is NULL");
    assert_int_equal(heed_workspace_size(&c.a, NULL, &c.x, NULL), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "bytes: is NULL");
    assert_int_equal(heed_explain(&c.a, NULL, &c.x, NULL, NULL, 9), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "text: is NULL, size is 9; expected room for text");
    assert_int_equal(heed_explain(&c.a, NULL, &c.x, NULL, text, 0), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "text: is given, size is 0; expected room for text");
    assert_int_equal(heed_explain(NULL, NULL, &c.x, NULL, text, sizeof text), HEED_BAD_ARGUMENT);
    assert_string_equal(text, "as it was");
    assert_int_equal(heed_merge(NULL, &c.a.lse, &c.a.v, &c.a.lse, &c.x), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "o: is NULL");
    assert_int_equal(heed_merge(NULL, &c.a.lse, &c.a.v, &c.a.lse, NULL), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "exec: is NULL");
    free(m);
}

static void what_is_not_there_is_named(void **state)
{
    (void)state;
    heed_device_info device;
    heed_kernel_info kernel;
    assert_int_equal(heed_device_at(HEED_CPU, 0, NULL), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "info: is NULL");
    assert_int_equal(heed_device_at(HEED_CPU, 1, &device), HEED_NO_DEVICE);
    assert_string_equal(heed_last_error(), "index: is 1, this machine counts as one CPU");
    assert_int_equal(heed_device_at(HEED_CPU, -1, &device), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "index: is -1, expected 0 or more");
    assert_int_equal(heed_kernel_at(0, NULL), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "info: is NULL");
    assert_int_equal(heed_kernel_at(heed_kernel_total, &kernel), HEED_BAD_ARGUMENT);
    assert_true(begins_with(heed_last_error(), "index: is ..., the table has "));
#ifndef HEED_HAS_CUDA
    assert_int_equal(heed_device_at(HEED_CUDA, 0, &device), HEED_NO_DEVICE);
    assert_string_equal(heed_last_error(), "backend: is HEED_CUDA, but this build of heed has no CUDA backend");
#endif
}

static void expect_refused(const call *c, int backward, heed_status status, const char *message)
{
    memory *before = new_memory();
    memcpy(before, c->m, sizeof *before);
    assert_int_equal(backward ? heed_backward(&c->a, &c->g, &c->x) : heed_forward(&c->a, &c->x), status);
    if (!begins_with(heed_last_error(), message))
        fail_msg("\"%s\" instead of \"%s\"", heed_last_error(), message);
    assert_memory_equal(before, c->m, sizeof *before);
    free(before);
}

/* What is no mistake of the arguments leaves memory alone likewise. */
static void calls_that_cannot_run_are_named_and_leave_memory_alone(void **state)
{
    (void)state;
    memory *m = new_memory();
    for (int backward = 0; backward < 2; backward++) {
        call c = good(m);
        size_t bytes = 0;
        assert_int_equal(heed_workspace_size(&c.a, backward ? &c.g : NULL, &c.x, &bytes), HEED_OK);
        assert_true(bytes > 0);
        c.x.workspace_bytes = bytes - 1;
        expect_refused(&c, backward, HEED_NO_WORKSPACE,
                       backward ? "workspace_bytes: is ..., backward_reference_f32 needs "
                                : "workspace_bytes: is ..., forward_reference_f32 needs ");
        c.x.workspace = NULL;
        expect_refused(&c, backward, HEED_NO_WORKSPACE,
                       backward ? "workspace: is NULL, backward_reference_f32 needs "
                                : "workspace: is NULL, forward_reference_f32 needs ");
        c = good(m);
        c.x.kernel = "forward_cpu_plain_f32";
        expect_refused(&c, backward, HEED_UNSUPPORTED,
                       "kernel: forward_cpu_plain_f32 is for the forward in fp32 on the CPU, this is the ");
        c.x.backend = HEED_CUDA, c.x.device = 1000;
        expect_refused(&c, backward, HEED_NO_DEVICE, "");
    }
    free(m);
}

static void messages_are_cut_and_statuses_have_names(void **state)
{
    (void)state;
    char name[2000];
    memset(name, 'x', sizeof name);
    name[sizeof name - 1] = 0;
    assert_int_equal(heed_fail(HEED_UNSUPPORTED, "%s", name), HEED_UNSUPPORTED);
    assert_int_equal(strlen(heed_last_error()), 511);
    for (int s = HEED_OK; s <= HEED_DEVICE_ERROR; s++)
        for (int t = HEED_OK; t < s; t++)
            assert_string_not_equal(heed_status_name((heed_status)s), heed_status_name((heed_status)t));
    assert_string_equal(heed_status_name((heed_status)99), "unknown status");
    assert_string_equal(heed_dtype_name((heed_dtype)99), "unknown");
    assert_int_equal(heed_version(), HEED_VERSION);
    snprintf(name, sizeof name, "%d.%d.%d", HEED_VERSION_MAJOR, HEED_VERSION_MINOR, HEED_VERSION_PATCH);
    assert_string_equal(heed_version_string(), name);
}

/* ---- merge and delta -------------------------------------------------------------------------------------------- */

static void merge_has_its_rules(void **state)
{
    (void)state;
    memory *m = new_memory(), *before = new_memory();
    const heed_exec x = { .backend = HEED_CPU };
    const heed_tensor o = tensor(m->o, HEED_F32, 2, 4, 3, 8), lse = tensor(m->lse, HEED_F32, 2, 4, 3, 1);
    const heed_tensor o2 = tensor(m->d_o, HEED_BF16, 2, 4, 3, 8), lse2 = tensor(m->delta, HEED_F32, 2, 4, 3, 1);
    heed_tensor wide = o, narrow = o2, mask = o2, column = lse, half = lse2, still = o;
    wide.shape[3] = 9;
    narrow.shape[1] = 1;
    mask.dtype = HEED_BOOL;
    column.shape[3] = 2;
    half.dtype = HEED_F16;
    strides(&still, 96, 24, 0, 1);
    const struct {
        const heed_tensor *t[4];
        const char *message;
    } bad[] = {
        { { &wide, &lse, &o2, &lse2 }, "o2: head_dim is 8, o has 9" },
        { { &o, &lse, &narrow, &lse2 }, "o2: heads is 1, o has 4" },
        { { &o, &lse, &mask, &lse2 }, "o2: dtype is bool, expected fp32, fp16, bf16 or fp64" },
        { { &o, &column, &o2, &lse2 }, "lse: head_dim is 2, expected 1" },
        { { &o, &lse, &o2, &half }, "lse2: dtype is fp16, expected fp32" },
        { { &o, &lse, &o2, NULL }, "lse2: is NULL" },
        { { &o, &lse, &o, &lse2 }, "o: overlaps o2" },
        { { &o, &lse, &o2, &lse }, "lse: overlaps lse2" },
        { { &still, &lse, &o2, &lse2 }, "o: strides 96, 24, 0, 1 make its elements overlap each other" },
    };
    memcpy(before, m, sizeof *m);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(heed_merge(bad[i].t[0], bad[i].t[1], bad[i].t[2], bad[i].t[3], &x), HEED_BAD_ARGUMENT);
        if (!begins_with(heed_last_error(), bad[i].message))
            fail_msg("\"%s\" instead of \"%s\"", heed_last_error(), bad[i].message);
    }
    assert_memory_equal(before, m, sizeof *m);
    assert_int_equal(heed_merge(&o, &lse, &o2, &lse2, &(heed_exec){ .backend = HEED_CUDA, .device = 1000 }),
                     HEED_NO_DEVICE);
    assert_memory_equal(before, m, sizeof *m);
    assert_int_equal(heed_merge(&o, &lse, &o2, &lse2, &x), HEED_OK);
    assert_memory_not_equal(before, m, sizeof *m);
    free(m);
    free(before);
}

static void delta_has_its_rules(void **state)
{
    (void)state;
    memory *m = new_memory(), *before = new_memory();
    const heed_exec x = { .backend = HEED_CPU }, elsewhere = { .backend = HEED_CUDA, .device = 1000 };
    const heed_tensor o = tensor(m->o, HEED_F32, 2, 4, 3, 8), d_o = tensor(m->d_o, HEED_BF16, 2, 4, 3, 8);
    const heed_tensor d_lse = tensor(m->d_lse, HEED_F32, 2, 4, 3, 1), out = tensor(m->delta, HEED_F32, 2, 4, 3, 1);
    heed_tensor few = d_lse, off = out, still = out;
    few.shape[2] = 2;
    off.data = (char *)off.data + 1;
    strides(&still, 12, 0, 1, 1);
    const struct {
        const heed_tensor *t[4];
        const char *message;
    } bad[] = {
        { { &o, NULL, NULL, &out }, "d_o: is NULL" },
        { { &o, &d_o, NULL, NULL }, "delta: is NULL" },
        { { &o, &d_o, &out, &out }, "delta: overlaps d_lse, expected memory of its own" },
        { { &o, &d_o, &few, &out }, "d_lse: rows is 2, o has 3" },
        { { &o, &d_o, NULL, &off }, "delta: data is 0x..., expected a multiple of 4 bytes for fp32" },
        { { &o, &d_o, NULL, &still }, "delta: strides 12, 0, 1, 1 make its elements overlap each other" },
    };
    memcpy(before, m, sizeof *m);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(heed_delta(bad[i].t[0], bad[i].t[1], bad[i].t[2], bad[i].t[3], &x), HEED_BAD_ARGUMENT);
        if (!begins_with(heed_last_error(), bad[i].message))
            fail_msg("\"%s\" instead of \"%s\"", heed_last_error(), bad[i].message);
    }
    assert_int_equal(heed_delta(&o, &d_o, NULL, &out, NULL), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "exec: is NULL");
    assert_int_equal(heed_delta(&o, &d_o, NULL, &out, &elsewhere), HEED_NO_DEVICE);
    assert_memory_equal(before, m, sizeof *m);
    assert_int_equal(heed_delta(&o, &d_o, &d_lse, &out, &x), HEED_OK);
    assert_int_equal(heed_delta(&o, &d_o, NULL, &out, &x), HEED_OK);
    assert_memory_not_equal(before, m, sizeof *m);
    free(m);
    free(before);
}

/* ---- Odd, but right --------------------------------------------------------------------------------------------- */

static void accept(const call *c, int backward)
{
    heed_problem p;
    if (heed_check(&c->a, backward ? &c->g : NULL, &c->x, 0, &p) || heed_check_lengths(&p))
        fail_msg("refused: %s", heed_last_error());
}

static void every_form_of_a_batch_is_accepted(void **state)
{
    (void)state;
    memory *m = new_memory();
    void (*const forms[])(call *) = { padded, ragged, paged, delta, bf16 };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        call c = good(m);
        accept(&c, 0);
        accept(&c, 1);
        forms[i](&c);
        if (forms[i] != delta)
            accept(&c, 0);
        if (forms[i] == delta || forms[i] == bf16 || forms[i] == padded)
            accept(&c, 1);
    }
    call c = good(m); /* rows in a batch, keys end to end */
    ragged(&c);
    c.a.q = tensor(m->q, HEED_F32, 2, 4, 3, 8), c.a.o = tensor(m->o, HEED_F32, 2, 4, 3, 8);
    c.a.lse = tensor(m->lse, HEED_F32, 2, 4, 3, 1);
    c.a.offsets_q = NULL, c.a.max_rows = 0;
    c.a.lengths_k = m->lengths_k;
    accept(&c, 0);
    free(m);
}

static void empty_sizes_need_no_data(void **state)
{
    (void)state;
    memory *m = new_memory();
    call c = good(m);
    c.a.k = c.a.v = tensor(NULL, HEED_F32, 2, 2, 0, 8);
    accept(&c, 0);
    assert_int_equal(heed_forward(&c.a, &c.x), HEED_OK);
    for (int i = 0; i < 192; i++)
        assert_true(m->o[i] == 0);
    c = good(m);
    c.a.q = c.a.o = c.g.d_o = c.g.d_q = tensor(NULL, HEED_F32, 2, 4, 0, 8);
    c.a.lse = tensor(NULL, HEED_F32, 2, 4, 0, 1);
    accept(&c, 0);
    accept(&c, 1);
    assert_int_equal(heed_forward(&c.a, &c.x), HEED_OK);
    free(m);
}

/* One buffer holds q, k and v, or their gradients, interleaved in every way in use: they share no element. */
static void packed_buffers_are_accepted(void **state)
{
    (void)state;
    enum { B = 2, S = 5, H = 4, D = 8 };
    static const int64_t layouts[][5] = {
        /* strides of batch, head, row; where k begins, where v begins */
        { S * 3 * H * D, D, 3 * H * D, H * D, 2 * H * D },         /* [B, S, 3, H, D] */
        { S * H * 3 * D, 3 * D, H * 3 * D, D, 2 * D },             /* [B, S, H, 3, D] */
        { 3 * H * S * D, S * D, D, H * S * D, 2 * H * S * D },     /* [B, 3, H, S, D] */
        { H * S * D, S * D, D, B * H * S * D, 2 * B * H * S * D }, /* [3, B, H, S, D] */
        { S * 3 * H * D + 7, D, 3 * H * D, H * D, 2 * H * D },     /* the first, batches 7 elements apart */
        { H * 3 * D, 3 * D, B * H * 3 * D, D, 2 * D },             /* [S, B, H, 3, D] */
        { S * 3 * H * D, 3, 3 * H * D, 1, 2 },                     /* [B, S, D, H, 3]: columns strided as well */
    };
    float *buffer = calloc(2 * 4 * B * S * H * D, sizeof *buffer);
    memory *m = new_memory();
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        const int64_t *l = layouts[i];
        int64_t column = l[1] == 3 ? 3 * H : 1;
        call c = good(m);
        heed_tensor *views[2][3] = { { &c.a.q, &c.a.k, &c.a.v }, { &c.g.d_q, &c.g.d_k, &c.g.d_v } };
        for (int n = 0; n < 6; n++) {
            heed_tensor *t = views[n / 3][n % 3];
            *t = tensor(buffer + n / 3 * 4 * B * S * H * D + (n % 3 ? l[2 + n % 3] : 0), HEED_F32, B, H, S, D);
            strides(t, l[0], l[1], l[2], column);
        }
        c.a.o = tensor(m->o, HEED_F32, B, H, S, D), c.a.lse = tensor(m->lse, HEED_F32, B, H, S, 1);
        c.g.d_o = tensor(m->d_o, HEED_F32, B, H, S, D);
        accept(&c, 0);
        accept(&c, 1);
    }
    free(buffer);
    free(m);
}

/* Lengths between the batches of o, which has room for them, a workspace there too, and next to each other: nothing is shared.
 * A workspace that was used before says nothing about how large the next must be. */
static void memory_between_that_of_others_is_accepted(void **state)
{
    (void)state;
    memory *m = new_memory();
    call c = good(m);
    padded(&c);
    memcpy(m->o + 96, m->lengths_k, sizeof m->lengths_k);
    c.a.lengths_k = (const int32_t *)(m->o + 96);
    strides(&c.a.o, 160, 24, 8, 1);
    c.x.workspace = m->o + 100, c.x.workspace_bytes = 4 * 60;
    accept(&c, 0);
    c.x.workspace_bytes++;
    assert_int_equal(heed_forward(&c.a, &c.x), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "workspace: overlaps o, expected memory of its own");
    size_t bytes;
    assert_int_equal(heed_workspace_size(&c.a, NULL, &c.x, &bytes), HEED_OK);
    free(m);
}

/* [B, S, Hq + 2 Hk, D], and o with lse as a ninth column. */
static void packed_buffers_of_unequal_heads_are_accepted(void **state)
{
    (void)state;
    memory *m = new_memory();
    call c = good(m);
    float *buffer = calloc(2 * 5 * 8 * 9, sizeof *buffer);
    c.a.q.shape[2] = c.g.d_o.shape[2] = 5;
    c.g.d_q = tensor(buffer, HEED_F32, 2, 4, 5, 8);
    c.g.d_k = tensor(buffer + 32, HEED_F32, 2, 2, 5, 8);
    c.g.d_v = tensor(buffer + 48, HEED_F32, 2, 2, 5, 8);
    strides(&c.g.d_q, 320, 8, 64, 1), strides(&c.g.d_k, 320, 8, 64, 1), strides(&c.g.d_v, 320, 8, 64, 1);
    c.a.o = tensor(m->o, HEED_F32, 2, 4, 5, 8);
    c.a.lse = tensor(m->o + 8, HEED_F32, 2, 4, 5, 1);
    strides(&c.a.o, 180, 45, 9, 1), strides(&c.a.lse, 180, 45, 9, 1);
    accept(&c, 0);
    accept(&c, 1);
    c.a.lse.data = m->o + 7;
    assert_int_equal(heed_forward(&c.a, &c.x), HEED_BAD_ARGUMENT);
    free(buffer);
    free(m);
}

/* Inputs broadcast and run backwards; a size of 1 may have any stride. What the problem holds is regular. */
static void strides_are_made_regular(void **state)
{
    (void)state;
    memory *m = new_memory();
    heed_problem p;
    call c = good(m);
    strides(&c.a.k, 0, 40, -8, 1);
    c.a.k.data = m->k + 32;
    c.a.mask = tensor(m->mask, HEED_BOOL, 1, 4, 1, 5);
    strides(&c.a.mask, INT64_MAX, 5, INT64_MIN, 1);
    strides(&c.a.lse, 12, 3, 1, INT64_MAX);
    assert_int_equal(heed_check(&c.a, NULL, &c.x, 0, &p), HEED_OK);
    assert_memory_equal(p.a.q.stride, ((int64_t[4]){ 96, 24, 8, 1 }), 32);
    assert_memory_equal(p.a.k.stride, ((int64_t[4]){ 0, 40, -8, 1 }), 32);
    assert_memory_equal(p.a.mask.stride, ((int64_t[4]){ 0, 5, 0, 1 }), 32);
    assert_memory_equal(p.a.lse.stride, ((int64_t[4]){ 12, 3, 1, 1 }), 32);
    assert_true(p.aligned);
    c.a.bias = tensor(m->bias, HEED_F32, 1, 4, 3, 1);
    c.g.d_bias = tensor(m->d_bias, HEED_F32, 1, 4, 3, 1);
    assert_int_equal(heed_check(&c.a, &c.g, &c.x, 0, &p), HEED_OK);
    assert_memory_equal(p.a.bias.stride, ((int64_t[4]){ 0, 3, 1, 0 }), 32);
    assert_memory_equal(p.g.d_bias.stride, ((int64_t[4]){ 0, 3, 1, 0 }), 32);
    c.a.v.data = m->v + 1;
    assert_int_equal(heed_check(&c.a, NULL, &c.x, 0, &p), HEED_OK);
    assert_false(p.aligned);
    free(m);
}

static void defaults_are_filled_in(void **state)
{
    (void)state;
    memory *m = new_memory();
    heed_problem p;
    call c = good(m);
    c.a.dropout = 0.1f;
    assert_int_equal(heed_check(&c.a, NULL, &c.x, 0, &p), HEED_OK);
    assert_true(p.a.scale == (float)(1 / sqrt(8)) && p.a.key_stride == 1 && p.a.query_step == 1 && p.a.key_step == 1);
    assert_true(p.left == HEED_UNBOUNDED && p.right == HEED_UNBOUNDED && p.drop_below == 6554);
    assert_true(p.B == 2 && p.Hq == 4 && p.Hk == 2 && p.G == 2 && p.Sq == 3 && p.Sk == 5 && p.D == 8 && p.Dv == 8);
    c.a.dropout = 0.999999f;
    c.a.zero_scale = c.a.causal = c.a.windowed = 1;
    c.a.window_left = 2, c.a.window_right = 3;
    assert_int_equal(heed_check(&c.a, NULL, &c.x, 0, &p), HEED_OK);
    assert_true(p.a.scale == 0 && p.left == 2 && p.right == 0 && p.drop_below == 65535);
    delta(&c);
    c.a.o = good(m).a.o;
    c.g.d_lse = tensor(m->d_lse, HEED_F32, 2, 4, 3, 1);
    assert_int_equal(heed_check(&c.a, &c.g, &c.x, 0, &p), HEED_OK);
    assert_true(p.g.delta.data && !p.g.d_lse.data && !p.a.o.data); /* "then o and d_lse are not read" */
    free(m);
}

/* ---- Overlap, against the set of addresses ---------------------------------------------------------------------- */

enum { SPACE = 8192 };

static uint32_t next_random(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

/* Counts in seen[] how often each byte is an element's; returns the largest count. */
static int mark(const heed_tensor *t, const char *space, uint8_t *seen)
{
    int most = 0, size = (int)heed_dtype_size(t->dtype);
    memset(seen, 0, SPACE);
    for (int64_t n = 0; n < heed_elements(t); n++) {
        int64_t rest = n, at = (const char *)t->data - space;
        for (int d = 3; d >= 0; d--) {
            at += rest % t->shape[d] * t->stride[d] * size;
            rest /= t->shape[d];
        }
        for (int byte = 0; byte < size; byte++)
            seen[at + byte]++, most = HEED_MAX(most, seen[at + byte]);
    }
    return most;
}

static heed_tensor random_view(char *space, uint32_t *seed)
{
    static const heed_dtype dtypes[] = { HEED_F32, HEED_F16, HEED_BOOL };
    heed_tensor t = { .data = space + SPACE / 2, .dtype = dtypes[next_random(seed) % 3] };
    t.data = (char *)t.data + 4 * (next_random(seed) % 16);
    for (int d = 0; d < 4; d++) {
        t.shape[d] = 1 + next_random(seed) % 4;
        t.stride[d] = (int64_t)(next_random(seed) % 60) - 10;
    }
    assert_int_equal(heed_view("t", &t, 0xFF), HEED_OK);
    return t;
}

static void overlap_agrees_with_the_set_of_addresses(void **state)
{
    (void)state;
    static _Alignas(64) char space[SPACE];
    static uint8_t seen[2][SPACE];
    uint32_t seed = 1;
    int met = 0, apart = 0;
    for (int trial = 0; trial < 20000; trial++) {
        heed_tensor t = random_view(space, &seed), u = random_view(space, &seed);
        if (trial % 2) /* half of them of one family: the same strides, some bytes apart */
            memcpy(u.stride, t.stride, sizeof u.stride), u.dtype = t.dtype, memcpy(u.shape, t.shape, sizeof u.shape);
        int shared = 0, twice = mark(&t, space, seen[0]) > 1;
        mark(&u, space, seen[1]);
        for (int n = 0; n < SPACE; n++)
            shared |= seen[0][n] && seen[1][n];
        if (heed_overlap(&t, &u) != shared)
            fail_msg("trial %d: heed_overlap says %d", trial, !shared);
        if (twice && !heed_overlaps_itself(&t))
            fail_msg("trial %d: heed_overlaps_itself misses an overlap", trial);
        met += shared, apart += !shared;
    }
    assert_true(met > 1000 && apart > 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_rule_has_its_message_and_leaves_memory_alone),
        cmocka_unit_test(missing_structs_are_named),
        cmocka_unit_test(what_is_not_there_is_named),
        cmocka_unit_test(calls_that_cannot_run_are_named_and_leave_memory_alone),
        cmocka_unit_test(messages_are_cut_and_statuses_have_names),
        cmocka_unit_test(merge_has_its_rules),
        cmocka_unit_test(delta_has_its_rules),
        cmocka_unit_test(every_form_of_a_batch_is_accepted),
        cmocka_unit_test(empty_sizes_need_no_data),
        cmocka_unit_test(packed_buffers_are_accepted),
        cmocka_unit_test(memory_between_that_of_others_is_accepted),
        cmocka_unit_test(packed_buffers_of_unequal_heads_are_accepted),
        cmocka_unit_test(strides_are_made_regular),
        cmocka_unit_test(defaults_are_filled_in),
        cmocka_unit_test(overlap_agrees_with_the_set_of_addresses),
    };
    return cmocka_run_group_tests_name("errors", tests, NULL, NULL);
}
