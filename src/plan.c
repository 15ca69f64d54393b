/* The planner: the first row of kernels.def that can take the problem on the device. Pure: it knows a device only as
 * numbers, so it plans as well for one that is not here, and every call with the same numbers gets the same answer. */
#include "internal.h"
#ifdef HEED_HAS_CUDA
#include "cuda/backend.h"
#endif

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- The table -------------------------------------------------------------------------------------------------- */

#define TYPE_f32 HEED_F32
#define TYPE_f16 HEED_F16
#define TYPE_bf16 HEED_BF16
#define TYPE_f64 HEED_F64

#define PASS_forward HEED_FORWARD
#define PASS_backward HEED_BACKWARD

/* clang-format off */
#define ROW(way, on, prefix, family, type, least, newest, shared, widest, takes)                                       \
    { .name = #way prefix #family "_" #type, .pass = PASS_##way, .backend = on, .dtype = TYPE_##type,                  \
      .isa_or_arch = least, .newest_arch = newest, .shared_bytes = shared, .max_head_dim = widest, .uses = takes,      \
      .workspace = heed_##way##_workspace_##family, .launch = heed_##way##_##family },
/* clang-format on */
#define ROW_OF(...) ROW(__VA_ARGS__) /* once more, for arguments that are lists themselves */
#define HOST_ROWS(on, prefix, family, type, isa)                                                                       \
    ROW(forward, on, prefix, family, type, isa, HEED_ANY_ARCH, 0, HEED_MAX_HEAD_DIM, HEED_USES_ALL)                    \
    ROW(backward, on, prefix, family, type, isa, HEED_ANY_ARCH, 0, HEED_MAX_HEAD_DIM, HEED_USES_ALL)

#define CPU_plain(type) HOST_ROWS(HEED_CPU, "_cpu_", plain, type, HEED_ISA_PLAIN)
#ifdef HEED_X86
#define CPU_avx2(type) HOST_ROWS(HEED_CPU, "_cpu_", avx2, type, HEED_ISA_AVX2)
#define CPU_avx512(type) HOST_ROWS(HEED_CPU, "_cpu_", avx512, type, HEED_ISA_AVX512)
#define CPU_avx512bf16(type) HOST_ROWS(HEED_CPU, "_cpu_", avx512bf16, type, HEED_ISA_AVX512BF16)
#define CPU_amx(type) HOST_ROWS(HEED_CPU, "_cpu_", amx, type, HEED_ISA_AMX)
#define CPU_amxsplit(type) SPLIT_ROWS(amxsplit, type)
#define CPU_amxhalf(type) SPLIT_ROWS(amxhalf, type)
#define SPLIT_ROWS(family, type)                                                                                       \
    ROW(forward, HEED_CPU, "_cpu_", family, type, HEED_ISA_AMX, HEED_ANY_ARCH, 0, HEED_MAX_HEAD_DIM,                   \
        (HEED_USES_ALL & ~HEED_USES_PLAIN) | HEED_FOR_ROWS)                                                            \
    ROW(backward, HEED_CPU, "_cpu_", family, type, HEED_ISA_AMX, HEED_ANY_ARCH, 0, HEED_MAX_HEAD_DIM,                  \
        (HEED_USES_ALL & ~(HEED_USES_PLAIN | HEED_USES_BIAS | HEED_USES_GRADIENTS)) | HEED_FOR_ROWS)
#else
#define CPU_avx2(type)
#define CPU_avx512(type)
#define CPU_avx512bf16(type)
#define CPU_amx(type)
#define CPU_amxsplit(type)
#define CPU_amxhalf(type)
#endif

/* The build says of each CUDA source whether it is compiled: HEED_HAS_forward_mma is 1 or 0. */
#ifdef HEED_HAS_CUDA
#define CUDA_FORWARD(family, type) CUDA_ROW(HEED_HAS_forward_##family, forward, family, type)
#define CUDA_BACKWARD(family, type) CUDA_ROW(HEED_HAS_backward_##family, backward, family, type)
#define CUDA_ROW(has, ...) CUDA_ROW_IF(has, __VA_ARGS__)
#define CUDA_ROW_IF(has, ...) CUDA_ROW_##has(__VA_ARGS__)
#define CUDA_ROW_0(way, family, type)
#define CUDA_ROW_1(way, family, type) ROW_OF(way, HEED_CUDA, "_cuda_", family, type, HEED_NEEDS_##way##_##family)
#else
#define CUDA_FORWARD(family, type)
#define CUDA_BACKWARD(family, type)
#endif

const heed_kernel heed_kernels[] = {
#define CPU(isa, type) CPU_##isa(type)
#define REFERENCE(type) HOST_ROWS(HEED_REFERENCE, "_", reference, type, HEED_ISA_PLAIN)
#include "kernels.def"
};
const int heed_kernel_total = (int)(sizeof heed_kernels / sizeof *heed_kernels);

/* ---- Words ------------------------------------------------------------------------------------------------------ */

static const char *const pass_names[] = { "forward", "backward" };
static const char *const backend_names[] = { "CPU", "CUDA", "reference" };
static const char *const use_names[] = { "causal or window",
                                         "key stride",
                                         "mask",
                                         "bias",
                                         "softcap",
                                         "ALiBi",
                                         "sink",
                                         "dropout",
                                         "ragged lengths",
                                         "paged cache",
                                         "unaligned rows",
                                         "negative or very large strides, rows that repeat",
                                         "different head sizes of q and v",
                                         "a scale of zero or less",
                                         "o in another type than q",
                                         "gradients that are added to or of another type",
                                         "a key stride in a ragged batch, or keys very far apart",
                                         "products by fp32 instructions alone",
                                         "sums in a fixed order",
                                         "a mask or bias that cannot be read eight keys at a time",
                                         "a mask or bias whose rows are not whole and at multiples of 16 bytes",
                                         "a softcap below 1" };

__attribute__((format(printf, 2, 3))) static void say(heed_text *text, const char *format, ...)
{
    if (!text || text->length + 1 >= text->size)
        return;
    size_t room = text->size - text->length;
    va_list arguments;
    va_start(arguments, format);
    int written = vsnprintf(text->data + text->length, room, format, arguments);
    va_end(arguments);
    text->length += written < 0 ? 0 : HEED_MIN((size_t)written, room - 1);
}

/* ---- What fits -------------------------------------------------------------------------------------------------- */

/* Strides that Hopper's copy engine cannot express. */
static int is_out_of_reach(const heed_tensor *t)
{
    const int64_t most = ((int64_t)1 << 40) / (int64_t)heed_dtype_size(t->dtype);
    for (int d = 0; d < 3; d++)
        if (t->stride[d] < 0 || t->stride[d] >= most)
            return 1;
    return 0;
}

static int is_reversed(const heed_tensor *t)
{
    return t->data && (is_out_of_reach(t) || (t->stride[2] == 0 && t->shape[2] > 1));
}

static int differs(const heed_tensor *t, const heed_tensor *q) { return t->data && t->dtype != q->dtype; }

/* Of a mask or bias: see HEED_USES_LOOSE. */
static int is_loose(const heed_tensor *t, const heed_problem *p)
{
    const int64_t size = (int64_t)heed_dtype_size(t->dtype);
    if (!t->data)
        return 0;
    int64_t all = (int64_t)(uintptr_t)t->data;
    for (int d = 0; d < 3; d++)
        all |= t->stride[d] * size;
    return t->stride[3] != 1 || p->Sk % 8 || p->a.key_stride > 1 || size > 2 || all % (8 * size);
}

/* Of a mask or bias: see HEED_USES_STRAY. Keys side by side, rows at multiples of 16 bytes. */
static int is_stray(const heed_tensor *t, const heed_problem *p)
{
    if (!t->data)
        return 0;
    int64_t all = (int64_t)(uintptr_t)t->data;
    for (int d = 0; d < 3; d++)
        all |= t->stride[d] * (int64_t)heed_dtype_size(t->dtype);
    return t->stride[3] != 1 || p->a.key_stride > 1 || all % 16 || is_out_of_reach(t);
}

unsigned heed_uses_of(const heed_problem *p)
{
    const heed_attention *a = &p->a;
    const heed_gradient *g = &p->g;
    const heed_tensor *const rows[] = { &a->q, &a->k, &a->v, &a->o, &g->d_o, &g->d_q, &g->d_k, &g->d_v };
    unsigned uses = 0;
    uses |= p->left != HEED_UNBOUNDED || p->right != HEED_UNBOUNDED ? HEED_USES_BAND : 0;
    uses |= a->key_stride > 1 ? HEED_USES_STRIDE : 0;
    uses |= a->mask.data ? HEED_USES_MASK : 0;
    uses |= a->bias.data ? HEED_USES_BIAS : 0;
    uses |= a->softcap > 0 ? HEED_USES_SOFTCAP : 0;
    uses |= a->softcap > 0 && a->softcap < 1 && p->pass == HEED_BACKWARD ? HEED_USES_STEEP : 0;
    uses |= a->alibi.data ? HEED_USES_ALIBI : 0;
    uses |= a->sink.data ? HEED_USES_SINK : 0;
    uses |= p->drop_below ? HEED_USES_DROPOUT : 0;
    uses |= a->lengths_q || a->lengths_k || a->offsets_q || a->offsets_k ? HEED_USES_LENGTHS : 0;
    uses |= p->page ? HEED_USES_PAGES : 0;
    uses |= !p->aligned ? HEED_USES_UNALIGNED : 0;
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++)
        uses |= is_reversed(rows[n]) ? HEED_USES_REVERSED : 0;
    uses |= p->D != p->Dv ? HEED_USES_UNEQUAL : 0;
    uses |= a->scale <= 0 ? HEED_USES_SCALE : 0;
    uses |= differs(&a->o, &a->q) || differs(&g->d_o, &a->q) ? HEED_USES_RESULTS : 0;
    uses |= g->accumulate || differs(&g->d_q, &a->q) || differs(&g->d_k, &a->q) || differs(&g->d_v, &a->q)
                ? HEED_USES_GRADIENTS
                : 0;
    uses |= (a->key_stride > 1 && a->offsets_k) || a->key_stride >= INT32_MAX / HEED_MAX(a->key_step, 1)
                ? HEED_USES_SPREAD
                : 0;
    uses |= p->precision == HEED_PLAIN && a->q.dtype == HEED_F32 ? HEED_USES_PLAIN : 0;
    uses |= p->pass == HEED_BACKWARD && !p->nondeterministic ? HEED_USES_ORDER : 0;
    uses |= is_loose(&a->mask, p) || is_loose(&a->bias, p) ? HEED_USES_LOOSE : 0;
    uses |= is_stray(&a->mask, p) || is_stray(&a->bias, p) ? HEED_USES_STRAY : 0;
    return uses;
}

/* Rows of another pass, backend or type are no candidates. */
static int is_candidate(const heed_kernel *k, const heed_problem *p, const heed_device *d)
{
    return k->pass == p->pass && k->backend == d->backend && k->dtype == p->a.q.dtype;
}

int heed_runs_on(const heed_kernel *k, const heed_device *d, char *why, size_t size)
{
    if (k->backend != HEED_CUDA && (int)d->isa < k->isa_or_arch)
        snprintf(why, size, "needs %s, this device has %s", heed_isa_name((heed_isa)k->isa_or_arch),
                 heed_isa_name(d->isa));
    else if (k->backend == HEED_CUDA && d->arch < k->isa_or_arch)
        snprintf(why, size, "needs sm_%d, this device is sm_%d", k->isa_or_arch, d->arch);
    else if (k->backend == HEED_CUDA && d->arch > k->newest_arch)
        snprintf(why, size, "runs on nothing newer than sm_%d, this device is sm_%d", k->newest_arch, d->arch);
    else if (k->backend == HEED_CUDA && d->shared_bytes < k->shared_bytes)
        snprintf(why, size, "needs %zu KB of shared memory for a block, this device has %zu", k->shared_bytes / 1024,
                 d->shared_bytes / 1024);
    else
        return 1;
    return 0;
}

/* Whether scores need more than a scale and a band of steps of 1: wide rows leave no registers for it in a backward. */
static int is_general(const heed_problem *p)
{
    const unsigned more = HEED_USES_MASK | HEED_USES_BIAS | HEED_USES_ALIBI | HEED_USES_SCALE, uses = heed_uses_of(p);
    return uses & more || (uses & HEED_USES_BAND && (p->full.p_step != 1 || p->full.r_step != 1));
}

int heed_is_small(const heed_problem *p, unsigned uses, char *why, size_t size)
{
    if (!(uses & (HEED_ONLY_SMALL | HEED_ONLY_SHORT)))
        return 1;
    const heed_tensor *const rows[] = { &p->a.q, &p->a.k, &p->a.v, &p->a.o, &p->g.d_o };
    const int64_t bytes = (int64_t)heed_dtype_size(p->a.q.dtype), chunk = 16 / bytes, keys = p->full.keys;
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++)
        if (rows[n]->stride[2] > INT32_MAX / 4 / p->a.key_stride ||
            rows[n]->stride[2] < -INT32_MAX / 4 / p->a.key_stride) {
            snprintf(why, size, "does not take: rows so far apart");
            return 0;
        }
    const int64_t head_dim = HEED_MAX(HEED_MAX(p->D, p->Dv), 1);
    /* A forward of 16 bits that meets all keys at once takes as many rows as a launch holds blocks for. */
    const int any_rows = uses & HEED_ONLY_SHORT && p->pass == HEED_FORWARD && bytes == 2 &&
                         keys <= (head_dim <= 64    ? HEED_AT_ONCE
                                  : head_dim <= 192 ? HEED_AT_ONCE_WIDE
                                                    : 0) &&
                         p->Sq <= 65535 * 64;
    const int64_t most = any_rows ? keys : HEED_MAX(p->Sq, keys), width = bytes == 4 && head_dim > 32 ? 64 : head_dim;
    const int terms = bytes == 2 && (p->a.mask.data || p->a.bias.data), wide = head_dim > (bytes == 2 ? 64 : 128),
              general = wide && is_general(p); /* for which wide rows leave no registers */
    const int64_t limit = !(uses & HEED_ONLY_SHORT)         ? HEED_SMALL / width /* fp32 is computed as 32 or 64 */
                          : wide && (bytes == 2 || general) ? HEED_SHORT_WIDEST
                          : terms || head_dim > 64          ? HEED_SHORT_WIDE
                                                            : HEED_SHORT;
    if (most > limit)
        snprintf(why, size, "takes up to %" PRId64 " %s %s, these are %" PRId64, limit, keys == most ? "keys" : "rows",
                 terms ? "with a mask or bias" : "of this head_dim", most);
    else if (general && bytes == 2 && p->pass == HEED_BACKWARD)
        snprintf(why, size, "does not take: scores of more than scale and band, of this head_dim");
    else if (p->D % chunk || p->Dv % chunk)
        snprintf(why, size, "takes head_dim in multiples of %" PRId64 ", this is %" PRId64, chunk,
                 p->D % chunk ? p->D : p->Dv);
    else
        return 1;
    return 0;
}

/* Whether a candidate can take the problem; if not, why. */
static int fits(const heed_kernel *k, const heed_problem *p, const heed_device *d, char *why, size_t size)
{
    int64_t head_dim = HEED_MAX(p->D, p->Dv);
    unsigned lacks = heed_uses_of(p) & ~k->uses;
    if (!heed_runs_on(k, d, why, size))
        return 0;
    const int widest = heed_widest(k, p);
    if (head_dim > widest)
        snprintf(why, size, "takes head_dim up to %d%s, this is %" PRId64, widest,
                 widest < k->max_head_dim && k->uses & HEED_FOR_TERMS ? " with dropout" : "", head_dim);
    else if (lacks)
        snprintf(why, size, "does not take: %s", use_names[__builtin_ctz(lacks)]);
    else if (k->uses & HEED_FOR_FEW && p->Sq > HEED_MOST_ROWS) /* its workspace has all parts of the keys for each */
        snprintf(why, size, "takes up to %d rows, these are %" PRId64, HEED_MOST_ROWS, p->Sq);
    else if (k->uses & HEED_FOR_FEW && k->dtype != HEED_F32 && (p->D % 8 || p->Dv % 8)) /* 16 bytes at a time */
        snprintf(why, size, "takes head_dim in multiples of 8, this is %" PRId64, p->D % 8 ? p->D : p->Dv);
    else
        return heed_is_small(p, k->uses, why, size);
    return 0;
}

/* Whether a kernel that can take the problem is better left for others, longer ones mostly. Looks at nothing that a call with
 * another batch or other heads would change. */
static int is_for_others(const heed_kernel *k, const heed_problem *p, char *why, size_t size)
{
    const int64_t most = HEED_MAX(p->Sq, p->full.keys);
    if (k->uses & HEED_FOR_LONG && !heed_is_long(p))
        snprintf(why, size, "is for %d rows or keys and more, these are at most %" PRId64, HEED_LONG, most);
    else if (k->uses & HEED_ONLY_SHORT && heed_has_wide_terms(p))
        snprintf(why, size,
                 "is for fewer than %d rows and keys with more than the scale at this head_dim, these are %" PRId64,
                 HEED_SHORT_TERMS, most);
    else if (k->uses & HEED_FOR_ROWS && heed_are_few(p, p->Sq, p->full.keys))
        snprintf(why, size,
                 "is for %" PRId64 " rows and half as many keys or more, these are at most %" PRId64 " and %" PRId64,
                 heed_least_rows(p), p->Sq, p->full.keys);
    else if (k->uses & HEED_FOR_TERMS && p->Sq < heed_fewest_rows(p))
        snprintf(why, size, "is for %d rows and more, these are at most %" PRId64, heed_fewest_rows(p), p->Sq);
    else if (k->uses & HEED_FOR_TERMS && !heed_has_terms(p))
        snprintf(why, size, "is for a mask, a bias, ALiBi or dropout over more than %d keys", heed_few_keys(p));
    else if (k->uses & HEED_FOR_FEW && !heed_decodes(p))
        snprintf(why, size, "is for up to %d rows and %d keys or more, these are %" PRId64 " and %" PRId64,
                 HEED_FEW_ROWS, HEED_MANY_KEYS, p->Sq, p->full.keys);
    else if (k->uses & HEED_FOR_ROWS && p->D + p->Dv < 2 * HEED_NARROW)
        snprintf(why, size, "is for head_dim %d and more, this is %" PRId64, HEED_NARROW, p->D);
    else
        return 0;
    return 1;
}

/* Whether its workspace would be larger than q, k, v and o: many sequences of few rows, in few and narrow heads. */
static int wants_too_much(const heed_kernel *k, const heed_problem *p, const heed_device *d, char *why, size_t size)
{
    const heed_attention *a = &p->a;
    const int64_t elements = heed_elements(&a->q) + heed_elements(&a->k) + heed_elements(&a->v) + heed_elements(&a->o);
    const size_t inputs = (size_t)elements * heed_dtype_size(a->q.dtype);
    if (!(k->uses & HEED_FOR_ROOM))
        return 0;
    const size_t bytes = k->workspace(p, &(heed_plan){ .kernel = k, .device = *d });
    snprintf(why, size, "would need %zu bytes of workspace, q, k, v and o are %zu", bytes, inputs);
    return bytes > inputs;
}

static const heed_kernel *named(const char *name)
{
    for (int i = 0; i < heed_kernel_total; i++)
        if (!strcmp(heed_kernels[i].name, name))
            return &heed_kernels[i];
    return NULL;
}

/* ---- Threads ---------------------------------------------------------------------------------------------------- */

/* Below this, waking a team and waiting for it costs more than it saves. */
#define SMALL_MICROSECONDS 50
/* What one thread may be expected to compute in a microsecond, in FLOP: half of what a current core reaches. */
#define FLOP_PER_MICROSECOND 50e3

/* All or one, never some number in between: an OpenMP runtime that sees teams of changing size ends and starts
 * threads from call to call, which costs more than a thread too many. */
int heed_threads_for(const heed_device *d, double microseconds)
{
    return microseconds < SMALL_MICROSECONDS ? 1 : HEED_MAX(d->threads, 1);
}

static double microseconds_of(const heed_problem *p)
{
    double visible = (double)p->Sk;
    if (p->left != HEED_UNBOUNDED && p->right != HEED_UNBOUNDED)
        visible = HEED_MIN(visible, (double)p->left + (double)p->right + 1);
    else if (p->right == 0)
        visible /= 2;
    double pairs = (double)p->B * (double)p->Hq * (double)p->Sq * visible / (double)p->a.key_stride;
    double flop = 2 * pairs * (double)(p->D + p->Dv);
    return flop * (p->pass == HEED_BACKWARD ? 2.5 : 1) / FLOP_PER_MICROSECOND;
}

static int threads_of(const heed_problem *p, const heed_device *d)
{
    return d->backend == HEED_CPU ? heed_threads_for(d, microseconds_of(p)) : 1;
}

/* ---- The choice ------------------------------------------------------------------------------------------------- */

static heed_status take(const heed_kernel *k, const heed_problem *p, const heed_device *d, int forced, heed_plan *plan,
                        heed_text *why)
{
    *plan = (heed_plan){ .kernel = k, .device = *d, .threads = threads_of(p, d), .forced = forced };
    plan->workspace_bytes = k->workspace(p, plan);
    if (d->backend == HEED_CUDA)
        say(why, "%s: taken, %zu bytes of workspace\n", k->name, plan->workspace_bytes);
    else
        say(why, "%s: taken, %d thread%s, %zu bytes of workspace\n", k->name, plan->threads,
            plan->threads == 1 ? "" : "s", plan->workspace_bytes);
    return HEED_OK;
}

static heed_status take_forced(const char *forced, const heed_problem *p, const heed_device *d, heed_plan *plan,
                               heed_text *why)
{
    const heed_kernel *k = named(forced);
    char reason[128];
    if (!k)
        return heed_fail(HEED_BAD_ARGUMENT, "kernel: there is no %.64s; `heed info` lists those there are", forced);
    if (is_candidate(k, p, d) && fits(k, p, d, reason, sizeof reason))
        return take(k, p, d, 1, plan, why);
    if (!is_candidate(k, p, d))
        snprintf(reason, sizeof reason, "is for the %s in %s on the %s, this is the %s in %s on the %s",
                 pass_names[k->pass], heed_dtype_name(k->dtype), backend_names[k->backend], pass_names[p->pass],
                 heed_dtype_name(p->a.q.dtype), backend_names[d->backend]);
    say(why, "%s: forced, but it %s\n", k->name, reason);
    return heed_fail(HEED_UNSUPPORTED, "kernel: %s %s", k->name, reason);
}

heed_status heed_choose(const heed_problem *p, const heed_device *d, const char *forced, heed_plan *plan,
                        heed_text *why)
{
    char reason[128];
    int candidates = 0;
    if (forced)
        return take_forced(forced, p, d, plan, why);
    for (int i = 0; i < heed_kernel_total; i++) {
        const heed_kernel *k = &heed_kernels[i];
        if (!is_candidate(k, p, d))
            continue;
        if (fits(k, p, d, reason, sizeof reason) && !is_for_others(k, p, reason, sizeof reason) &&
            !wants_too_much(k, p, d, reason, sizeof reason))
            return take(k, p, d, 0, plan, why);
        say(why, "%s: passed over: %s\n", k->name, reason);
        candidates++;
    }
    const char *pass = pass_names[p->pass], *type = heed_dtype_name(p->a.q.dtype);
    if (candidates)
        return heed_fail(HEED_UNSUPPORTED, "no %s kernel for %s takes this problem on %s; the last of %d %s", pass,
                         type, d->name, candidates, reason);
    say(why, "no row of the table is for the %s in %s on the %s\n", pass, type, backend_names[d->backend]);
    return heed_fail(HEED_UNSUPPORTED, "this build of heed has no %s kernel for %s on the %s backend (%s)", pass, type,
                     backend_names[d->backend], d->name);
}
