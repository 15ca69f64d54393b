/* Which CUDA kernel a problem gets on every GPU that heed knows, and what the planner says about the others. Needs the
 * kernels compiled, but no GPU: a chip is its numbers. */
#include "harness.h"

static const char *const gpus[] = { "t4",      "rtx2080", "a100", "rtx3090", "l4",
                                    "rtx4090", "h100",    "h200", "b200",    "rtx5090" };

static const heed_exec on_gpu = { .backend = HEED_CUDA };

static int has_cuda_rows(void)
{
    for (int i = 0; i < heed_kernel_total; i++)
        if (heed_kernels[i].backend == HEED_CUDA)
            return 1;
    return 0;
}

static heed_tensor shape(heed_dtype dtype, int64_t b, int64_t h, int64_t s, int64_t d)
{
    return (heed_tensor){ .dtype = dtype, .shape = { b, h, s, d } };
}

/* ---- The matrix of problems -------------------------------------------------------------------------------------- */

typedef struct sample {
    heed_attention a;
    heed_gradient g;
    heed_pass pass;
} sample;

static sample sample_of(heed_pass pass, heed_dtype dtype, int64_t rows, int64_t keys, int64_t D, int64_t Dv)
{
    sample s = { .pass = pass };
    s.a.q = shape(dtype, 2, 4, rows, D), s.a.k = shape(dtype, 2, 2, keys, D), s.a.v = shape(dtype, 2, 2, keys, Dv);
    s.a.o = shape(dtype, 2, 4, rows, Dv), s.a.lse = shape(HEED_F32, 2, 4, rows, 1);
    s.g.d_o = s.a.o, s.g.d_q = s.a.q, s.g.d_k = s.a.k, s.g.d_v = s.a.v;
    return s;
}

static sample sample_new(heed_pass pass, heed_dtype dtype, int64_t D, int64_t Dv)
{
    return sample_of(pass, dtype, 100, 96, D, Dv);
}

static void use_band(sample *s) { s->a.causal = 1; }
static void use_stride(sample *s) { s->a.key_stride = 3; }
static void use_mask(sample *s) { s->a.mask = shape(HEED_BOOL, 1, 1, 100, 96); }
static void use_bias(sample *s) { s->a.bias = shape(s->a.q.dtype, 1, 4, 100, 96); }
static void use_wide_bias(sample *s) { s->a.bias = shape(HEED_F32, 1, 4, 100, 96); }
static void use_loose_mask(sample *s)
{
    s->a.mask = shape(HEED_BOOL, 1, 1, 100, 96);
    memcpy(s->a.mask.stride, (int64_t[4]){ 0, 0, 97, 1 }, sizeof s->a.mask.stride);
}
static void use_stray_mask(sample *s)
{
    s->a.mask = shape(HEED_BOOL, 1, 1, 100, 96);
    memcpy(s->a.mask.stride, (int64_t[4]){ 0, 0, 104, 1 }, sizeof s->a.mask.stride);
}
static void use_stray_bias(sample *s)
{
    s->a.bias = shape(s->a.q.dtype, 1, 4, 100, 96);
    memcpy(s->a.bias.stride, (int64_t[4]){ 0, 9600, -96, 1 }, sizeof s->a.bias.stride);
}
static void use_repeated_bias(sample *s)
{
    s->a.bias = shape(s->a.q.dtype, 1, 4, 100, 96);
    memcpy(s->a.bias.stride, (int64_t[4]){ 0, 96, 0, 1 }, sizeof s->a.bias.stride);
}
static void use_softcap(sample *s) { s->a.softcap = 20; }
static void use_steep_softcap(sample *s) { s->a.softcap = 0.5f; }
static void use_alibi(sample *s) { s->a.alibi = shape(HEED_F32, 1, 4, 1, 1); }
static void use_sink(sample *s) { s->a.sink = shape(HEED_F32, 1, 4, 1, 1); }
static void use_dropout(sample *s) { s->a.dropout = 0.5f; }
static void use_lengths(sample *s)
{
    static const int32_t lengths[2];
    s->a.lengths_k = lengths;
}
static void use_unaligned(sample *s)
{
    const int64_t D = s->a.q.shape[3];
    memcpy(s->a.q.stride, (int64_t[4]){ 400 * (D + 1), 100 * (D + 1), D + 1, 1 }, sizeof s->a.q.stride);
}
static void use_reversed(sample *s)
{
    const int64_t D = s->a.q.shape[3];
    memcpy(s->a.q.stride, (int64_t[4]){ 400 * D, 100 * D, -D, 1 }, sizeof s->a.q.stride);
}
static void use_distance(sample *s)
{
    const int64_t D = s->a.q.shape[3];
    memcpy(s->a.q.stride, (int64_t[4]){ (int64_t)1 << 40, 100 * D, D, 1 }, sizeof s->a.q.stride);
}
static void use_repeated(sample *s)
{
    const int64_t D = s->a.k.shape[3];
    memcpy(s->a.k.stride, (int64_t[4]){ 400 * D, 100 * D, 0, 1 }, sizeof s->a.k.stride);
}
static void use_far_keys(sample *s)
{
    s->a.align = HEED_ALIGN_POSITION;
    s->a.key_step = (int64_t)1 << 32;
}
static void use_unequal(sample *s)
{
    s->a.v.shape[3] = s->a.o.shape[3] = s->g.d_o.shape[3] = s->g.d_v.shape[3] = s->a.q.shape[3] == 64 ? 128 : 64;
}
static void use_scale(sample *s) { s->a.scale = -1; }
static void use_zero_scale(sample *s) { s->a.zero_scale = 1; }
static void use_results(sample *s) { s->a.o.dtype = s->g.d_o.dtype = HEED_F32; }
static void use_gradients(sample *s) { s->g.d_k.dtype = HEED_F32; }
static void use_accumulate(sample *s)
{
    s->g.accumulate = 1;
    s->g.d_q.dtype = s->g.d_k.dtype = s->g.d_v.dtype = HEED_F32;
}

static const struct feature {
    void (*use)(sample *s);
    unsigned bit;
    const char *words;
    int backward_only; /* or, for fp32 already the case */
} features[] = {
    { use_band, HEED_USES_BAND, "causal or window", 0 },
    { use_stride, HEED_USES_STRIDE, "key stride", 0 },
    { use_mask, HEED_USES_MASK, "mask", 0 },
    { use_bias, HEED_USES_BIAS, "bias", 0 },
    { use_wide_bias, HEED_USES_BIAS | HEED_USES_LOOSE, "bias", 0 },
    { use_loose_mask, HEED_USES_MASK | HEED_USES_LOOSE | HEED_USES_STRAY, "mask", 0 },
    { use_stray_mask, HEED_USES_MASK | HEED_USES_STRAY, "mask", 0 },
    { use_stray_bias, HEED_USES_BIAS | HEED_USES_STRAY, "bias", 0 },
    { use_repeated_bias, HEED_USES_BIAS, "bias", 0 },
    { use_softcap, HEED_USES_SOFTCAP, "softcap", 0 },
    { use_steep_softcap, HEED_USES_SOFTCAP | HEED_USES_STEEP, "softcap", 1 },
    { use_alibi, HEED_USES_ALIBI, "ALiBi", 0 },
    { use_sink, HEED_USES_SINK, "sink", 0 },
    { use_dropout, HEED_USES_DROPOUT, "dropout", 0 },
    { use_lengths, HEED_USES_LENGTHS, "ragged lengths", 0 },
    { use_unaligned, HEED_USES_UNALIGNED, "unaligned rows", 0 },
    { use_reversed, HEED_USES_REVERSED, "negative or very large strides, rows that repeat", 0 },
    { use_distance, HEED_USES_REVERSED, "negative or very large strides, rows that repeat", 0 },
    { use_repeated, HEED_USES_REVERSED, "negative or very large strides, rows that repeat", 0 },
    { use_far_keys, HEED_USES_SPREAD, "a key stride in a ragged batch, or keys very far apart", 0 },
    { use_unequal, HEED_USES_UNEQUAL, "different head sizes of q and v", 0 },
    { use_scale, HEED_USES_SCALE, "a scale of zero or less", 0 },
    { use_zero_scale, HEED_USES_SCALE, "a scale of zero or less", 0 },
    { use_results, HEED_USES_RESULTS, "o in another type than q", 0 },
    { use_gradients, HEED_USES_GRADIENTS, "gradients that are added to or of another type", 1 },
    { use_accumulate, HEED_USES_GRADIENTS, "gradients that are added to or of another type", 1 },
};

static heed_problem check(const sample *s)
{
    heed_problem p;
    if (heed_check(&s->a, s->pass == HEED_BACKWARD ? &s->g : NULL, &on_gpu, 1, &p))
        fail_msg("%s", heed_last_error());
    return p;
}

/* internal.h: "What a problem uses beyond plain dense attention". */
TEST(every_feature_is_seen_in_the_problem)
{
    for (int pass = HEED_FORWARD; pass <= HEED_BACKWARD; pass++) {
        sample plain = sample_new((heed_pass)pass, HEED_F16, 64, 64);
        heed_problem p = check(&plain);
        const unsigned always = pass == HEED_BACKWARD ? HEED_USES_ORDER : 0; /* sums in a fixed order are the default */
        assert_int_equal(heed_uses_of(&p), always);
        for (int n = 0; n < COUNT(features); n++) {
            if (features[n].backward_only && pass == HEED_FORWARD)
                continue;
            sample s = plain;
            features[n].use(&s);
            p = check(&s);
            if (heed_uses_of(&p) != (features[n].bit | always))
                fail_msg("%s: uses %#x instead of %#x", features[n].words, heed_uses_of(&p), features[n].bit | always);
        }
    }
}

/* ---- Chips ------------------------------------------------------------------------------------------------------- */

static int lines_in(const char *text)
{
    int lines = 0;
    for (; (text = strchr(text, '\n')); text++)
        lines++;
    return lines;
}

/* Bytes of q, k, v and o. */
static size_t inputs_of(const heed_problem *p)
{
    const heed_attention *a = &p->a;
    return (size_t)(heed_elements(&a->q) + heed_elements(&a->k) + heed_elements(&a->v) + heed_elements(&a->o)) *
           heed_dtype_size(a->q.dtype);
}

/* The row that the planner should take, by the needs each states, and how many candidates come before it. */
static const heed_kernel *first_that_fits(const heed_problem *p, const heed_device *d, int *before)
{
    char why[128];
    *before = 0;
    for (int i = 0; i < heed_kernel_total; i++) {
        const heed_kernel *k = &heed_kernels[i];
        if (k->backend != HEED_CUDA || k->pass != p->pass || k->dtype != p->a.q.dtype)
            continue;
        if (d->arch >= k->isa_or_arch && d->arch <= k->newest_arch && d->shared_bytes >= k->shared_bytes &&
            HEED_MAX(p->D, p->Dv) <= heed_widest(k, p) && !(heed_uses_of(p) & ~k->uses) &&
            (!(k->uses & HEED_FOR_LONG) || heed_is_long(p)) && (!(k->uses & HEED_FOR_TERMS) || heed_has_terms(p)) &&
            (!(k->uses & HEED_ONLY_SHORT) || !heed_has_wide_terms(p)) &&
            (!(k->uses & HEED_FOR_FEW) || heed_decodes(p)) &&
            (!(k->uses & HEED_FOR_ROOM) || k->workspace(p, NULL) <= inputs_of(p)) &&
            heed_is_small(p, k->uses, why, sizeof why))
            return k;
        ++*before;
    }
    return NULL;
}

static void expect_plan(const char *gpu, const sample *s)
{
    char text[4096] = "", taken[160];
    int before;
    heed_device d;
    heed_problem p = check(s);
    const heed_gradient *g = s->pass == HEED_BACKWARD ? &s->g : NULL;
    assert_int_equal(heed_device_named(gpu, &on_gpu, &d), HEED_OK);
    const heed_kernel *k = first_that_fits(&p, &d, &before);
    if (!k || heed_explain(&s->a, g, &on_gpu, gpu, text, sizeof text))
        fail_msg("%s: nothing for %s, D %d, uses %#x: %s", gpu, heed_dtype_name(s->a.q.dtype), (int)p.D,
                 heed_uses_of(&p), heed_last_error());
    snprintf(taken, sizeof taken, "%s: taken, ", k->name);
    if (!strstr(text, taken) || lines_in(text) != before + 1)
        fail_msg("%s: \"%s\" instead of %d passed over and %s", gpu, text, before, taken);
}

/* spec: "any problem that heed.h allows runs on any GPU from sm_75 up". */
TEST(every_gpu_gets_the_first_kernel_that_fits_whatever_the_problem)
{
    static const int64_t head_dims[] = { 8, 32, 64, 80, 96, 128, 160, 192, 256, 264, 512 };
    if (!has_cuda_rows())
        skip();
    for (int gpu = 0; gpu < COUNT(gpus); gpu++)
        for (int pass = HEED_FORWARD; pass <= HEED_BACKWARD; pass++)
            for (int type = HEED_F32; type <= HEED_BF16; type++)
                for (int d = 0; d < COUNT(head_dims); d++) {
                    const sample plain = sample_new((heed_pass)pass, (heed_dtype)type, head_dims[d], head_dims[d]);
                    expect_plan(gpus[gpu], &plain);
                    for (int n = 0; n < COUNT(features); n++) {
                        sample s = plain;
                        features[n].use(&s);
                        expect_plan(gpus[gpu], &s);
                    }
                }
}

/* The first of the families named, best first, that this build has. */
static const char *best_of(const char *families, const char *pass, const char *type, char name[64])
{
    char list[64], *rest = list;
    snprintf(list, sizeof list, "%s", families);
    for (const char *family; (family = strtok_r(rest, " ", &rest));) {
        snprintf(name, 64, "%s_cuda_%s_%s", pass, family, type);
        for (int i = 0; i < heed_kernel_total; i++)
            if (!strcmp(heed_kernels[i].name, name))
                return name;
    }
    fail_msg("none of %s in %s", families, type);
    return NULL;
}

/* Plain attention with head sizes of today's models. */
TEST(every_generation_gets_its_family)
{
    static const struct {
        const char *gpu, *f32, *f16, *bf16;
    } expected[] = {
        { "t4", "portable", "turing portable", "portable" },
        { "rtx2080", "portable", "turing portable", "portable" },
        { "a100", "split portable", "mma portable", "mma portable" },
        { "rtx3090", "split portable", "mma portable", "mma portable" },
        { "l4", "split portable", "mma portable", "mma portable" },
        { "rtx4090", "split portable", "mma portable", "mma portable" },
        { "h100", "sm90split split portable", "sm90fused sm90 mma portable", "sm90fused sm90 mma portable" },
        { "h200", "sm90split split portable", "sm90fused sm90 mma portable", "sm90fused sm90 mma portable" },
        { "b200", "portable", "mma portable", "mma portable" },
        { "rtx5090", "portable", "mma portable", "mma portable" },
    };
    static const char *const passes[] = { "forward", "backward" }, *const types[] = { "f32", "f16", "bf16" };
    if (!has_cuda_rows())
        skip();
    for (int n = 0; n < COUNT(expected); n++)
        for (int pass = 0; pass < 2; pass++)
            for (int type = HEED_F32; type <= HEED_BF16; type++)
                for (int64_t D = 64; D <= 128; D += 64) {
                    const char *families = type == HEED_F32   ? expected[n].f32
                                           : type == HEED_F16 ? expected[n].f16
                                                              : expected[n].bf16;
                    sample s = sample_of((heed_pass)pass, (heed_dtype)type, 1100, 900, D, D);
                    char text[4096], name[64];
                    assert_int_equal(heed_explain(&s.a, pass ? &s.g : NULL, &on_gpu, expected[n].gpu, text,
                                                  sizeof text),
                                     HEED_OK);
                    best_of(families, passes[pass], types[type], name);
                    strcat(name, ": taken");
                    if (!strstr(text, name))
                        fail_msg("%s: \"%s\" instead of %s", expected[n].gpu, text, name);
                }
}

/* Where the edges of the Hopper kernels with terms are: keys by number, head sizes, and how the copy engine wants a mask. */
TEST(masks_and_biases_on_hopper_get_their_own_kernels)
{
    static const struct {
        heed_pass pass;
        int64_t rows, keys, D, pitch; /* of the mask; 0: none, -1: none but ALiBi, -2: none but dropout */
        const char *says;
    } problems[] = {
        { HEED_FORWARD, 1, HEED_AT_ONCE + 1, 64, 144, "sm90scores_bf16: taken" },
        { HEED_FORWARD, 300, 1000, 128, 1008, "sm90scores_bf16: taken" },
        { HEED_FORWARD, 300, HEED_AT_ONCE, 64, 128,
          "sm90scores_bf16: passed over: is for a mask, a bias, ALiBi or dropout over more than 128 keys" },
        { HEED_FORWARD, 300, 1000, 136, 1008, "sm90scores_bf16: passed over: takes head_dim up to 128, this is 136" },
        { HEED_FORWARD, 300, 1000, 64, 1000,
          "sm90scores_bf16: passed over: does not take: a mask or bias whose rows are not whole and at multiples of 16 "
          "bytes" },
        { HEED_FORWARD, 300, 1000, 64, 0, "sm90scores_bf16: passed over: is for a mask" },
        { HEED_FORWARD, HEED_SHORT, HEED_SHORT_WIDE, 64, -1,
          "sm90scores_bf16: passed over: is for a mask, a bias, ALiBi or dropout over more than 192 keys" },
        { HEED_FORWARD, HEED_SHORT, HEED_SHORT_WIDE + 1, 64, -1, "sm90scores_bf16: taken" },
        { HEED_FORWARD, HEED_SHORT + 1, HEED_AT_ONCE + 1, 64, -1, "sm90scores_bf16: taken" },
        { HEED_FORWARD, HEED_SHORT, HEED_AT_ONCE + 1, 72, -1, "sm90scores_bf16: taken" },
        { HEED_BACKWARD, 300, HEED_AT_ONCE + 1, 64, 144, "sm90scores_bf16: taken" },
        { HEED_BACKWARD, 300, 1000, 56, 1008, "sm90scores_bf16: taken" },
        { HEED_BACKWARD, HEED_SHORT, HEED_AT_ONCE + 1, 64, -1, "sm90scores_bf16: taken" },
        { HEED_BACKWARD, 300, HEED_AT_ONCE, 64, 128,
          "sm90scores_bf16: passed over: is for a mask, a bias, ALiBi or dropout over more than 128 keys" },
        { HEED_BACKWARD, 63, 1000, 64, 1008, "sm90scores_bf16: passed over: is for 64 rows and more" },
        { HEED_BACKWARD, 64, 1000, 64, 1008, "sm90scores_bf16: taken" },
        { HEED_BACKWARD, 300, 1000, 128, 1008, "sm90scores_bf16: taken" },
        { HEED_BACKWARD, 300, 1000, 136, 1008, "sm90scores_bf16: passed over: takes head_dim up to 128, this is 136" },
        { HEED_BACKWARD, 300, 1000, 64, 0, "sm90scores_bf16: passed over: is for a mask" },
        { HEED_FORWARD, 300, HEED_AT_ONCE + 1, 64, -2, "sm90scores_bf16: taken" },
        { HEED_FORWARD, 300, HEED_AT_ONCE, 64, -2,
          "sm90scores_bf16: passed over: is for a mask, a bias, ALiBi or dropout over more than 128 keys" },
        { HEED_FORWARD, 300, 64, 128, -2, "sm90scores_bf16: taken" },
        { HEED_FORWARD, 300, 63, 128, -2,
          "sm90scores_bf16: passed over: is for a mask, a bias, ALiBi or dropout over more than 63 keys" },
        { HEED_BACKWARD, 64, 64, 64, -2, "sm90scores_bf16: taken" },
        { HEED_BACKWARD, 64, 63, 64, -2,
          "sm90scores_bf16: passed over: is for a mask, a bias, ALiBi or dropout over more than 63 keys" },
        { HEED_BACKWARD, 300, 1000, 96, -2, "sm90scores_bf16: taken" },
        { HEED_BACKWARD, 300, 1000, 104, -2,
          "sm90scores_bf16: passed over: takes head_dim up to 96 with dropout, this is 104" },
    };
    char best[64];
    if (!has_cuda_rows() || !strstr(best_of("sm90scores portable", "forward", "bf16", best), "sm90scores"))
        skip(); /* built without it */
    for (int n = 0; n < COUNT(problems); n++) {
        char text[4096];
        sample s = sample_of(problems[n].pass, HEED_BF16, problems[n].rows, problems[n].keys, problems[n].D,
                             problems[n].D);
        const heed_gradient *const g = s.pass == HEED_BACKWARD ? &s.g : NULL;
        if (problems[n].pitch == -1)
            use_alibi(&s);
        if (problems[n].pitch == -2)
            s.a.dropout = 0.1f;
        if (problems[n].pitch > 0) {
            s.a.mask = shape(HEED_BOOL, 1, 1, problems[n].rows, problems[n].keys);
            memcpy(s.a.mask.stride, (int64_t[4]){ 0, 0, problems[n].pitch, 1 }, sizeof s.a.mask.stride);
        }
        assert_int_equal(heed_explain(&s.a, g, &on_gpu, "h200", text, sizeof text), HEED_OK);
        if (!strstr(text, problems[n].says))
            fail_msg("\"%s\" without \"%s\"", text, problems[n].says);
    }
}

/* What the wgmma kernels for fp32 do before they start takes longer than a short problem. */
TEST(long_fp32_problems_get_their_own_kernels_on_hopper)
{
    static const char *const names[] = { "forward_cuda_sm90split_f32", "backward_cuda_sm90split_f32" };
    char best[64];
    if (!has_cuda_rows() || strcmp(best_of("sm90split portable", "forward", "f32", best), names[0]))
        skip(); /* built without them */
    for (int pass = 0; pass < 2; pass++)
        for (int64_t S = 192; S <= 193; S++) {
            const int64_t D = S == 193 ? 6 : 66; /* others are for multiples of 4 */
            sample s = sample_new((heed_pass)pass, HEED_F32, D, D);
            heed_tensor *const rows[] = { &s.a.q, &s.a.o, &s.a.lse, &s.g.d_o, &s.g.d_q,
                                          &s.a.k, &s.a.v, &s.g.d_k, &s.g.d_v };
            char text[4096], line[96];
            for (int n = 0; n < COUNT(rows); n++)
                rows[n]->shape[2] = n < 5 ? 100 : S;
            snprintf(line, sizeof line, "%s: %s", names[pass],
                     S == 193 ? "taken" : "passed over: is for 512 rows or keys and more, these are at most 192");
            assert_int_equal(heed_explain(&s.a, pass ? &s.g : NULL, &on_gpu, "h200", text, sizeof text), HEED_OK);
            if (!strstr(text, line))
                fail_msg("\"%s\" instead of %s", text, line);
        }
}

/* docs/tuning/fp32.md: they take what scores and weights may be beyond scale and band, at all of their head sizes. */
TEST(long_fp32_problems_with_softcap_or_dropout_get_them_too)
{
    char best[64];
    if (!has_cuda_rows() || !strstr(best_of("sm90split portable", "forward", "f32", best), "sm90split"))
        skip(); /* built without them */
    for (int pass = 0; pass < 2; pass++)
        for (int64_t D = 64; D <= 256; D += 64)
            for (int which = 1; which <= 3; which++) {
                sample s = sample_of((heed_pass)pass, HEED_F32, 1100, 900, D, D);
                char text[4096];
                if (which & 1)
                    use_softcap(&s);
                if (which & 2)
                    use_dropout(&s);
                assert_int_equal(heed_explain(&s.a, pass ? &s.g : NULL, &on_gpu, "h200", text, sizeof text), HEED_OK);
                if (!strstr(text, "_cuda_sm90split_f32: taken"))
                    fail_msg("\"%s\" at head size %d", text, (int)D);
            }
}

/* Where the edge is, and that the planner says on which side of it a problem lies. */
TEST(few_rows_and_keys_get_kernels_of_their_own)
{
    static const struct {
        int64_t rows, keys, D;
        const char *says;
        heed_dtype type;
        const char *gpu;
    } problems[] = {
        { 1, HEED_MANY_KEYS, 512, "forward_cuda_decode_f32: taken", HEED_F32, "a100" },
        { HEED_FEW_ROWS, HEED_MANY_KEYS, 30, "forward_cuda_decode_f32: taken", HEED_F32, "h200" },
        { 1, HEED_MANY_KEYS - 1, 64,
          "forward_cuda_decode_f32: passed over: is for up to 8 rows and 257 keys or more, these are 1 and 256",
          HEED_F32, "h200" },
        { HEED_FEW_ROWS + 1, 1000, 64,
          "forward_cuda_decode_f32: passed over: is for up to 8 rows and 257 keys or more, these are 9 and 1000",
          HEED_F32, "h200" },
        { HEED_MOST_ROWS + 1, 1000, 64, "forward_cuda_decode_f32: passed over: takes up to 64 rows, these are 65",
          HEED_F32, "h200" },
        { 1, 1000, 64, "forward_cuda_portable_f32: taken", HEED_F32, "t4" },
        { 1, HEED_MANY_KEYS, 256, "forward_cuda_decode_bf16: taken", HEED_BF16, "a100" },
        { HEED_FEW_ROWS, HEED_MANY_KEYS, 24, "forward_cuda_decode_f16: taken", HEED_F16, "rtx4090" },
        { HEED_FEW_ROWS + 1, 1000, 64,
          "forward_cuda_decode_bf16: passed over: is for up to 8 rows and 257 keys or more, these are 9 and 1000",
          HEED_BF16, "h200" },
        { 1, 1000, 264, "forward_cuda_decode_bf16: passed over: takes head_dim up to 256, this is 264", HEED_BF16,
          "h200" },
        { 1, 1000, 64, "forward_cuda_turing_f16: taken", HEED_F16, "t4" },
        { HEED_SMALL / 64, HEED_SMALL / 64, 64, "small_f32: taken", HEED_F32, "a100" },
        { HEED_SMALL / 32, HEED_SMALL / 32, 32, "small_f32: taken", HEED_F32, "h200" },
        { HEED_SMALL / 64 + 1, 70, 64, "small_f32: passed over: takes up to 80 rows of this head_dim, these are 81",
          HEED_F32, "a100" },
        { 70, HEED_SMALL / 32 + 1, 32, "small_f32: passed over: takes up to 160 keys of this head_dim, these are 161",
          HEED_F32, "a100" },
        { HEED_SMALL / 64 + 1, 70, 36, "small_f32: passed over: takes up to 80 rows of this head_dim, these are 81",
          HEED_F32, "a100" },
        { 70, 70, 30, "small_f32: passed over: takes head_dim in multiples of 4, this is 30", HEED_F32, "a100" },
        { 70, 70, 72, "small_f32: passed over: takes head_dim up to 64, this is 72", HEED_F32, "a100" },
        { 70, 70, 64, "small_f16: taken", HEED_F16, "a100" },
        { HEED_SMALL / 64 + 1, 1, 64, "sm90exact_f32: taken", HEED_F32, "h200" },
        { HEED_SHORT, HEED_SHORT, 36, "sm90exact_f32: taken", HEED_F32, "h200" },
        { 70, HEED_SHORT + 1, 64, "sm90exact_f32: passed over: takes up to 256 keys of this head_dim, these are 257",
          HEED_F32, "h200" },
        { HEED_SHORT_WIDE, HEED_SHORT_WIDE, 128, "sm90exact_f32: taken", HEED_F32, "h200" },
        { 70, HEED_SHORT_WIDE + 1, 72,
          "sm90exact_f32: passed over: takes up to 192 keys of this head_dim, these are 193", HEED_F32, "h200" },
        { HEED_SHORT_WIDE, HEED_SHORT_WIDE, 256, "sm90exact_f32: taken", HEED_F32, "h200" },
        { 70, HEED_SHORT_WIDE + 1, 136, "sm90split_f32: taken", HEED_F32, "h200" },
        { HEED_SHORT_WIDE + 1, 70, 136, "sm90split_f32: taken", HEED_F32, "h200" },
        { 1, 1, 8, "sm90short_f16: taken", HEED_F16, "h200" },
        { HEED_SHORT, HEED_SHORT, 64, "sm90short_bf16: taken", HEED_BF16, "h200" },
        { HEED_SHORT + 1, HEED_AT_ONCE + 1, 64,
          "sm90short_f16: passed over: takes up to 256 rows of this head_dim, these are 257", HEED_F16, "h200" },
        { 1000, HEED_AT_ONCE, 64, "forward_cuda_sm90short_f16: taken", HEED_F16, "h200" },
        { 1000, 70, 64, "sm90exact_f32: passed over: takes up to 256 rows of this head_dim, these are 1000", HEED_F32,
          "h200" },
        { 70, 70, 60, "sm90short_f16: passed over: takes head_dim in multiples of 8, this is 60", HEED_F16, "h200" },
        { HEED_SHORT_WIDEST, HEED_SHORT_WIDEST, 128, "sm90short_bf16: taken", HEED_BF16, "h200" },
        { HEED_SHORT_WIDEST, HEED_SHORT_WIDEST, 256, "forward_cuda_sm90short_f16: taken", HEED_F16, "h200" },
        { 1000, HEED_AT_ONCE_WIDE, 192, "forward_cuda_sm90short_f16: taken", HEED_F16, "h200" },
        { 70, HEED_SHORT_WIDEST + 1, 72,
          "sm90short_f16: passed over: takes up to 128 keys of this head_dim, these are 129", HEED_F16, "h200" },
    };
    heed_kernel_info first;
    for (int index = 0;; index++) {
        if (heed_kernel_at(index, &first) != HEED_OK)
            skip(); /* a build without them */
        if (strstr(first.name, "_cuda_sm90short_f16"))
            break;
    }
    for (int n = 0; n < COUNT(problems); n++)
        for (int pass = 0; pass < (strstr(problems[n].says, "forward") ? 1 : 2); pass++) {
            char text[4096];
            sample s = sample_of((heed_pass)pass, problems[n].type, problems[n].rows, problems[n].keys, problems[n].D,
                                 problems[n].D);
            const int64_t step = (problems[n].D + 7) / 8 * 8; /* aligned, so that the head size alone decides */
            heed_tensor *const all[] = { &s.a.q, &s.a.k, &s.a.v, &s.a.o, &s.g.d_o, &s.g.d_q, &s.g.d_k, &s.g.d_v };
            for (int t = 0; t < COUNT(all); t++)
                memcpy(all[t]->stride, (int64_t[4]){ 4000 * step, 1000 * step, step, 1 }, sizeof all[t]->stride);
            assert_int_equal(heed_explain(&s.a, pass ? &s.g : NULL, &on_gpu, problems[n].gpu, text, sizeof text),
                             HEED_OK);
            if (!strstr(text, problems[n].says))
                fail_msg("\"%s\" without \"%s\"", text, problems[n].says);
        }
}

/* There are no registers for more than two tiles of them, docs/tuning/small.md. */
TEST(wide_rows_with_more_than_scale_and_band_meet_fewer_keys)
{
    char text[4096];
    for (int more = 0; more < 2; more++)
        for (int pass = 0; pass < 2; pass++) {
            const char
                *const says = more ? "sm90exact_f32: passed over: takes up to 128 keys of this head_dim, these are 129"
                                   : "sm90exact_f32: taken";
            sample s = sample_of((heed_pass)pass, HEED_F32, 70, 2 * (HEED_SHORT_WIDEST + more), 136, 136);
            s.a.causal = 1, s.a.key_stride = 2;
            if (!has_cuda_rows() ||
                heed_explain(&s.a, pass ? &s.g : NULL, &on_gpu, "h200", text, sizeof text) != HEED_OK ||
                !strstr(text, "sm90exact_f32"))
                skip(); /* a build without them */
            if (!strstr(text, says))
                fail_msg("\"%s\" without \"%s\"", text, says);
        }
}

/* docs/tuning/small.md: what is read for each score leaves the kernels for short sequences behind. */
TEST(wide_rows_with_terms_get_the_kernels_of_long_ones_soon)
{
    char text[4096];
    for (int more = 0; more < 2; more++)
        for (int pass = 0; pass < 2; pass++) {
            sample s = sample_of((heed_pass)pass, HEED_F32, 20, HEED_SHORT_TERMS - 1 + more, 72, 72);
            s.a.scale = -1;
            if (!has_cuda_rows() ||
                heed_explain(&s.a, pass ? &s.g : NULL, &on_gpu, "h200", text, sizeof text) != HEED_OK ||
                !strstr(text, "sm90exact_f32"))
                skip(); /* a build without them */
            if (!strstr(text, more ? "sm90split_f32: taken" : "sm90exact_f32: taken"))
                fail_msg("\"%s\" with %d keys", text, HEED_SHORT_TERMS - 1 + more);
        }
}

/* heed.h: HEED_PLAIN, "by fp32 instructions alone". */
TEST(plain_fp32_gets_no_tensor_cores)
{
    if (!has_cuda_rows())
        skip();
    for (int pass = 0; pass < 2; pass++) {
        sample s = sample_new((heed_pass)pass, HEED_F32, 64, 64);
        heed_exec x = on_gpu;
        char text[4096];
        x.precision = HEED_PLAIN;
        assert_int_equal(heed_explain(&s.a, pass ? &s.g : NULL, &x, "h200", text, sizeof text), HEED_OK);
        assert_non_null(strstr(text, "_cuda_portable_f32: taken"));
    }
}

/* ---- Reasons ----------------------------------------------------------------------------------------------------- */

TEST(a_chip_without_what_a_kernel_needs_is_told_why)
{
    const heed_kernel k = { .backend = HEED_CUDA, .isa_or_arch = 80, .newest_arch = 90, .shared_bytes = 160 * 1024 };
    const struct {
        int arch;
        size_t shared_bytes;
        const char *why;
    } cases[] = {
        { 75, 65536, "needs sm_80, this device is sm_75" },
        { 86, 101376, "needs 160 KB of shared memory for a block, this device has 99" },
        { 100, 232448, "runs on nothing newer than sm_90, this device is sm_100" },
        { 90, 160 * 1024 - 1, "needs 160 KB of shared memory for a block, this device has 159" },
        { 80, 160 * 1024, NULL },
        { 90, 232448, NULL },
    };
    for (int n = 0; n < COUNT(cases); n++) {
        const heed_device d = { .backend = HEED_CUDA, .arch = cases[n].arch, .shared_bytes = cases[n].shared_bytes };
        char why[128] = "";
        assert_int_equal(heed_runs_on(&k, &d, why, sizeof why), cases[n].why == NULL);
        assert_string_equal(why, cases[n].why ? cases[n].why : "");
    }
}

/* Forced, a row that lacks a feature says which; any row will do. */
TEST(a_kernel_that_lacks_a_feature_says_which)
{
    for (int i = 0; i < heed_kernel_total; i++) {
        const heed_kernel *k = &heed_kernels[i];
        for (int n = 0; n < COUNT(features) && k->backend == HEED_CUDA; n++) {
            sample s = sample_new(k->pass, k->dtype, 64, 64);
            features[n].use(&s);
            const heed_problem p = check(&s);
            if (k->uses & features[n].bit || !(heed_uses_of(&p) & features[n].bit))
                continue;
            const heed_device d = { .backend = HEED_CUDA, .arch = k->isa_or_arch, .shared_bytes = k->shared_bytes };
            char text[512] = "", expected[256];
            heed_plan plan;
            assert_int_equal(heed_choose(&p, &d, k->name, &plan, &(heed_text){ text, sizeof text, 0 }),
                             HEED_UNSUPPORTED);
            snprintf(expected, sizeof expected, "%s: forced, but it does not take: %s\n", k->name, features[n].words);
            assert_string_equal(text, expected);
        }
    }
}

TEST(a_head_size_beyond_a_kernel_says_so)
{
    for (int i = 0; i < heed_kernel_total; i++) {
        const heed_kernel *k = &heed_kernels[i];
        if (k->backend != HEED_CUDA || k->max_head_dim == HEED_MAX_HEAD_DIM)
            continue;
        const sample s = sample_new(k->pass, k->dtype, k->max_head_dim + 8, 64);
        const heed_problem p = check(&s);
        const heed_device d = { .backend = HEED_CUDA, .arch = k->isa_or_arch, .shared_bytes = k->shared_bytes };
        heed_plan plan;
        char expected[256];
        assert_int_equal(heed_choose(&p, &d, k->name, &plan, NULL), HEED_UNSUPPORTED);
        snprintf(expected, sizeof expected, "kernel: %s takes head_dim up to %d, this is %d", k->name, k->max_head_dim,
                 k->max_head_dim + 8);
        assert_string_equal(heed_last_error(), expected);
    }
}

/* A row that nothing comes before would never be passed over, and one that nothing follows must take everything. */
TEST(the_last_row_of_each_type_takes_everything_from_turing_on)
{
    const heed_kernel *last[2][HEED_BF16 + 1] = { { 0 } };
    if (!has_cuda_rows())
        skip();
    for (int i = 0; i < heed_kernel_total; i++)
        if (heed_kernels[i].backend == HEED_CUDA)
            last[heed_kernels[i].pass][heed_kernels[i].dtype] = &heed_kernels[i];
    for (int pass = 0; pass < 2; pass++)
        for (int type = HEED_F32; type <= HEED_BF16; type++) {
            const heed_kernel *k = last[pass][type];
            assert_non_null(k);
            assert_int_equal(k->uses, HEED_USES_ALL);
            assert_int_equal(k->max_head_dim, HEED_MAX_HEAD_DIM);
            assert_true(k->isa_or_arch <= 75 && k->newest_arch == HEED_ANY_ARCH && k->shared_bytes <= 65536);
        }
}

/* Rows begin at multiples of 16 bytes. */
static heed_tensor padded(heed_dtype dtype, int64_t b, int64_t h, int64_t s, int64_t d)
{
    heed_tensor t = shape(dtype, b, h, s, d);
    const int64_t row = (d + 7) / 8 * 8;
    memcpy(t.stride, (int64_t[4]){ h * s * row, s * row, row, 1 }, sizeof t.stride);
    return t;
}

/* A backward of 16 bits on Hopper; of so many sequences end to end, or of a batch of 3. */
static void expect_room(const heed_device *d, const int64_t heads[2], int64_t rows, int64_t keys, int64_t D, int64_t Dv,
                        int sequences)
{
    static const int32_t offsets[1];
    const int64_t batch = sequences ? 1 : 3;
    const heed_dtype type = rows % 2 ? HEED_F16 : HEED_BF16;
    sample s = { .pass = HEED_BACKWARD };
    s.a.q = padded(type, batch, heads[0], rows, D), s.a.k = padded(type, batch, heads[1], keys, D);
    s.a.v = padded(type, batch, heads[1], keys, Dv), s.a.o = padded(type, batch, heads[0], rows, Dv);
    s.a.lse = shape(HEED_F32, batch, heads[0], rows, 1);
    s.g.d_o = s.a.o, s.g.d_q = s.a.q, s.g.d_k = s.a.k, s.g.d_v = s.a.v;
    if (D % 3 == 0)
        s.a.sink = s.g.d_sink = shape(HEED_F32, 1, heads[0], 1, 1);
    if (sequences)
        s.a.offsets_q = s.a.offsets_k = offsets, s.a.sequences = sequences, s.a.max_rows = rows, s.a.max_keys = keys;
    const heed_problem p = check(&s);
    heed_plan plan;
    assert_int_equal(heed_choose(&p, d, NULL, &plan, NULL), HEED_OK);
    if (strstr(plan.kernel->name, "sm90") && plan.workspace_bytes > inputs_of(&p))
        fail_msg("%s, D %d, Dv %d, %d rows, %d keys, %d and %d heads, %d sequences: %zu bytes for %zu of q, k, v and o",
                 plan.kernel->name, (int)D, (int)Dv, (int)rows, (int)keys, (int)heads[0], (int)heads[1], (int)p.B,
                 plan.workspace_bytes, inputs_of(&p));
}

TEST(the_backwards_workspace_is_no_larger_than_its_inputs)
{
    static const int64_t sizes[] = { 1, 2, 7, 8, 16, 24, 32, 40, 64, 72, 80, 96, 104, 112, 128, 136, 192, 200, 256 };
    static const int64_t lengths[] = { 1, 2, 15, 64, 129, 193, 257, 511, 512, 600, 1000, 4096, 65536 };
    static const int64_t heads[][2] = { { 1, 1 }, { 2, 1 }, { 4, 4 }, { 8, 4 }, { 8, 1 }, { 16, 1 }, { 64, 1 } };
    static const int sequences[] = { 0, 1, 30, 1000 };
    heed_device d;
    if (!has_cuda_rows())
        skip();
    assert_int_equal(heed_device_named("h200", &on_gpu, &d), HEED_OK);
    for (int n = 0; n < COUNT(sizes); n++)
        for (int l = 0; l < COUNT(lengths) * COUNT(lengths); l++)
            for (int h = 0; h < COUNT(heads); h++)
                for (int i = 0; i < COUNT(sequences); i++) {
                    const int64_t rows = lengths[l / COUNT(lengths)], keys = lengths[l % COUNT(lengths)];
                    expect_room(&d, heads[h], rows, keys, sizes[n], sizes[n], sequences[i]);
                    expect_room(&d, heads[h], rows, keys, sizes[n], 64, sequences[i]);
                    expect_room(&d, heads[h], rows, keys, 128, sizes[n], sequences[i]);
                }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_feature_is_seen_in_the_problem),
        cmocka_unit_test(every_gpu_gets_the_first_kernel_that_fits_whatever_the_problem),
        cmocka_unit_test(every_generation_gets_its_family),
        cmocka_unit_test(masks_and_biases_on_hopper_get_their_own_kernels),
        cmocka_unit_test(long_fp32_problems_get_their_own_kernels_on_hopper),
        cmocka_unit_test(long_fp32_problems_with_softcap_or_dropout_get_them_too),
        cmocka_unit_test(few_rows_and_keys_get_kernels_of_their_own),
        cmocka_unit_test(wide_rows_with_more_than_scale_and_band_meet_fewer_keys),
        cmocka_unit_test(wide_rows_with_terms_get_the_kernels_of_long_ones_soon),
        cmocka_unit_test(plain_fp32_gets_no_tensor_cores),
        cmocka_unit_test(a_chip_without_what_a_kernel_needs_is_told_why),
        cmocka_unit_test(a_kernel_that_lacks_a_feature_says_which),
        cmocka_unit_test(a_head_size_beyond_a_kernel_says_so),
        cmocka_unit_test(the_last_row_of_each_type_takes_everything_from_turing_on),
        cmocka_unit_test(the_backwards_workspace_is_no_larger_than_its_inputs),
    };
    return RUN_TESTS(tests);
}
