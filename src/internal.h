/* What the files of src/ share. Four types to know, in the order in which a call meets them:
 *
 *     heed_problem   check.c makes it of the caller's structs: every default filled in, every rule checked
 *     heed_device    what a chip offers, in numbers; also chips that are not here
 *     heed_kernel    one row of kernels.def: what a kernel needs, and how to launch it
 *     heed_plan      plan.c's answer: the kernel, its threads and its workspace
 */
#ifndef HEED_INTERNAL_H
#define HEED_INTERNAL_H

#include "heed.h"

#if !defined(_WIN32)
#pragma GCC visibility push(hidden)
#endif

#define HEED_MAX_HEAD_DIM 512

#if defined(__x86_64__)
#define HEED_X86 1
#endif

#define HEED_MIN(a, b) ((a) < (b) ? (a) : (b))
#define HEED_MAX(a, b) ((a) > (b) ? (a) : (b))

/* ---- status.c --------------------------------------------------------------------------------------------------- */

/* Sets this thread's message and returns status, so that a rule reads: return heed_fail(HEED_BAD_ARGUMENT, "k: ..."). */
heed_status heed_fail(heed_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

size_t heed_dtype_size(heed_dtype dtype);
const char *heed_dtype_name(heed_dtype dtype); /* "fp32" */

/* ---- view.c ----------------------------------------------------------------------------------------------------- */

/* Checks one tensor by itself: a dtype out of the set (bit 1 << HEED_F32 and so on), sizes, reach, alignment, data.
 * Fills in its strides; where a size is 1 the stride becomes 0, or 1 for the columns. */
heed_status heed_view(const char *name, heed_tensor *t, unsigned dtypes);
int64_t heed_elements(const heed_tensor *t);

/* Whether elements of a view share memory with each other, or with those of another one. Viewed tensors only. */
int heed_addresses(const heed_tensor *t, uintptr_t *begin, uintptr_t *end); /* one past the last; 0: no such memory */
int heed_overlaps_itself(const heed_tensor *t);
int heed_overlap(const heed_tensor *t, const heed_tensor *u);

/* Where planning has no address it takes this one: well aligned, and never read. */
extern char heed_stand_in[64];

/* ---- The problem ------------------------------------------------------------------------------------------------ */

typedef enum heed_pass { HEED_FORWARD = 0, HEED_BACKWARD = 1 } heed_pass;

/* One sequence of the batch once lengths, offsets, pages, stride and positions are applied. Its rows are i = 0 ..
 * rows-1 and the keys it can see n = 0 .. keys-1; with a key stride, key n is number col + n * col_step of the
 * sequence. Everything that follows from those rules is in this struct, so kernels know nothing of them.
 *
 *     q, o, d_o, lse, d_q    batch index q_batch, memory row q_row + i
 *     k, v, d_k, d_v         batch index k_batch, memory row k_row + col + n * col_step        (not paged)
 *     mask, bias             batch index b, row i, column col + n * col_step
 *     positions              p_i = p0 + i * p_step, r_n = r0 + n * r_step
 */
typedef struct heed_span {
    int64_t b, q_batch, k_batch;
    int64_t q_row, rows;
    int64_t k_row, col, col_step, keys;
    int64_t p0, p_step, r0, r_step;
    int64_t padded_rows, padded_keys; /* rows and keys in memory, padding included: what must be set to zero */
} heed_span;

/* A checked call. In a and g every stride is filled in and is 0 where a size of 1 broadcasts (in mask, bias, alibi,
 * d_bias); scale, key_stride, steps and windows hold their effective values; absent tensors have data == NULL. */
typedef struct heed_problem {
    heed_pass pass;
    heed_attention a;
    heed_gradient g;   /* HEED_BACKWARD only */
    int64_t B;         /* sequences */
    int64_t Hq, Hk, G; /* query heads, key heads, query heads for each key head */
    int64_t Sq, Sk;    /* the longest a sequence can be */
    int64_t D, Dv;
    double scale; /* a.scale as the reference takes it: 1/sqrt(D) is seldom a float */
    int64_t page; /* rows of a page; 0: not paged */
    int64_t left,
        right; /* the band, causal folded in: p - left <= r <= p + right; HEED_UNBOUNDED where there is none */
    uint32_t drop_below; /* drop where the 16 random bits are less; 0: no dropout */
    int aligned; /* every tensor's data and its rows start at multiples of 16 bytes, and columns are contiguous */
    int nondeterministic;
    heed_precision precision;
    heed_span full; /* sequence 0 as if there were no lengths and offsets */
} heed_problem;

#define HEED_UNBOUNDED INT64_MAX

/* Fills p, or fails with a message. g == NULL: forward. planning: data pointers may be missing (heed_explain). */
heed_status heed_check(const heed_attention *a, const heed_gradient *g, const heed_exec *x, int planning,
                       heed_problem *p);
heed_status heed_check_exec(const heed_exec *x);
heed_status heed_check_integers(const char *name, const void *data, size_t bytes);
heed_status heed_check_forms(heed_attention *a, int planning); /* padded, ragged, paged: that they agree */
heed_status heed_size_sequences(heed_problem *p);              /* B, Sq, Sk and page, once q and k are viewed */
heed_status heed_check_merge(const heed_tensor *o, const heed_tensor *lse, const heed_tensor *o2,
                             const heed_tensor *lse2, heed_tensor normal[4]);
heed_status heed_check_delta(const heed_tensor *o, const heed_tensor *d_o, const heed_tensor *d_lse,
                             const heed_tensor *delta, heed_tensor normal[4]);

/* HEED_BAD_ARGUMENT where lengths, offsets or pages, which only now can be read, point out of bounds. CPU memory. */
heed_status heed_check_lengths(const heed_problem *p);
/* Results of rows that are in no sequence, 0 and -inf. CPU memory; on a GPU what comes before the kernels fills them. */
void heed_fill_strays(const heed_problem *p);
void heed_span_of(const heed_problem *p, int64_t b, heed_span *s);
void heed_span_full(const heed_problem *p, heed_span *s);

/* The keys n in [*first, *last) that the band lets row i see; *first == *last: none. */
void heed_band(const heed_problem *p, const heed_span *s, int64_t i, int64_t *first, int64_t *last);

/* The memory row of key n in tensor t (k or v), as an element offset from t->data for key head h. Pages resolved. */
int64_t heed_key_offset(const heed_problem *p, const heed_span *s, const heed_tensor *t, int64_t h, int64_t n);

/* ---- The device ------------------------------------------------------------------------------------------------- */

/* CPU instruction sets, each including those before it. */
typedef enum heed_isa { HEED_ISA_PLAIN, HEED_ISA_AVX2, HEED_ISA_AVX512, HEED_ISA_AVX512BF16, HEED_ISA_AMX } heed_isa;

typedef struct heed_device {
    heed_backend backend;
    char name[128];
    int units;           /* hardware threads, or multiprocessors */
    heed_isa isa;        /* CPU */
    int threads;         /* CPU: to be used by this call */
    int arch;            /* GPU: 10 * major + minor of the compute capability */
    size_t shared_bytes; /* GPU: shared memory that one block may have */
    size_t memory_bytes;
} heed_device;

heed_status heed_device_of(const heed_exec *x, heed_device *d);                      /* the one the call would run on */
heed_status heed_device_named(const char *chip, const heed_exec *x, heed_device *d); /* one that need not be here */
int heed_threads_of(const heed_exec *x);                                             /* CPU: that a call may use now */
const char *heed_isa_name(heed_isa isa);
const char *heed_kernel_of_environment(void); /* HEED_KERNEL as it stood at the first call; NULL: unset */

/* ---- The kernels ------------------------------------------------------------------------------------------------ */

/* What a problem uses beyond plain dense attention; a kernel lists those it can take. */
enum {
    HEED_USES_BAND = 1 << 0,
    HEED_USES_STRIDE = 1 << 1,
    HEED_USES_MASK = 1 << 2,
    HEED_USES_BIAS = 1 << 3,
    HEED_USES_SOFTCAP = 1 << 4,
    HEED_USES_ALIBI = 1 << 5,
    HEED_USES_SINK = 1 << 6,
    HEED_USES_DROPOUT = 1 << 7,
    HEED_USES_LENGTHS = 1 << 8, /* padded or ragged */
    HEED_USES_PAGES = 1 << 9,
    HEED_USES_UNALIGNED = 1 << 10,
    HEED_USES_REVERSED = 1 << 11,  /* q, k, v, o or a gradient: strides below 0 or of 2^40 bytes, rows that repeat */
    HEED_USES_UNEQUAL = 1 << 12,   /* D != Dv */
    HEED_USES_SCALE = 1 << 13,     /* a scale of zero or less: the largest q.k is then not the largest score */
    HEED_USES_RESULTS = 1 << 14,   /* o or d_o in another type than q */
    HEED_USES_GRADIENTS = 1 << 15, /* d_q, d_k or d_v in another type than q, or added to */
    HEED_USES_SPREAD = 1 << 16,    /* a key stride in a ragged batch, or keys more than 2^31 positions apart */
    HEED_USES_PLAIN = 1 << 17,     /* HEED_PLAIN, in fp32 */
    HEED_USES_ORDER = 1 << 18,     /* backward: sums in a fixed order */
    HEED_USES_LOOSE = 1 << 19,     /* a mask or bias of which eight keys are not always one piece of memory */
    HEED_USES_STRAY = 1 << 20,     /* a mask or bias that Hopper's copy engine cannot fetch */
    HEED_USES_STEEP = 1 << 21,     /* backward: a softcap below 1 */
    HEED_USES_ALL = (1 << 22) - 1,

    HEED_FOR_ROWS = 1 << 28,   /* of a kernel: what heed_are_few() says or is narrower gets it only by name, */
    HEED_FOR_LONG = 1 << 29,   /* what heed_is_long() does not call long likewise */
    HEED_ONLY_SMALL = 1 << 30, /* of a kernel: nothing beyond HEED_SMALL, */
    HEED_ONLY_SHORT = 1 << 27, /* or beyond HEED_SHORT: see heed_is_small() */
    HEED_FOR_ROOM = 1 << 26,   /* what it needs more bytes for than q, k, v and o have gets it only by name */
    HEED_FOR_TERMS = 1 << 25,  /* what heed_has_terms() says no to likewise, */
    HEED_FOR_FEW = 1 << 24,    /* and all but few rows against many keys, as heed_decodes() has it */
};
#define HEED_ROWS 128 /* docs/tuning/cpu.md */
#define HEED_NARROW 32
#define HEED_LONG 512 /* hopper_backward.md there */
/* docs/tuning/small.md has what chose these. */
#define HEED_SMALL (80 * 64)  /* rows or keys times head size */
#define HEED_SHORT 256        /* rows or keys, */
#define HEED_AT_ONCE 128      /* keys that such a kernel meets together, whatever the rows, */
#define HEED_AT_ONCE_WIDE 96  /* with head sizes above 64 */
#define HEED_SHORT_WIDE 192   /* with head sizes above 64 in fp32, or a mask or bias in 16 bits, */
#define HEED_SHORT_WIDEST 128 /* above 64 in 16 bits, or above 128 with more than scale and band; */
#define HEED_SHORT_TERMS 64   /* from here on others are better above 64 in fp32 with more than the scale */

#define HEED_MOST_ROWS 64 /* of a kernel for few rows and many keys, */
#define HEED_FEW_ROWS 8   /* and where it pays: fp32.md there, in 16 bits mma.md */
#define HEED_MANY_KEYS 257

#define HEED_ANY_ARCH INT32_MAX

struct heed_plan;
typedef struct heed_kernel {
    const char *name;
    heed_pass pass;
    heed_backend backend;
    heed_dtype dtype;
    int isa_or_arch;     /* the least heed_isa, or compute capability */
    int newest_arch;     /* GPU: machine code for one generation runs on none that comes after; HEED_ANY_ARCH: on all */
    size_t shared_bytes; /* GPU: shared memory that a block may want */
    int max_head_dim;
    unsigned uses; /* the HEED_USES_ it can take */
    size_t (*workspace)(const heed_problem *p, const struct heed_plan *plan);
    heed_status (*launch)(const heed_problem *p, const struct heed_plan *plan, const heed_exec *x);
} heed_kernel;

typedef struct heed_plan {
    const heed_kernel *kernel;
    heed_device device;
    int threads; /* CPU */
    int forced;  /* by name */
    size_t workspace_bytes;
} heed_plan;

typedef struct heed_text {
    char *data;
    size_t size, length;
} heed_text;

/* A call that has been checked and planned. */
typedef struct heed_call {
    heed_problem problem;
    heed_plan plan;
} heed_call;

/* The earlier call of this thread that this one repeats with other addresses, which have been put in: valid until the
 * next. NULL: there is none. A call that was planned in full is then remembered. */
heed_call *heed_recall(const heed_attention *a, const heed_gradient *g, const heed_exec *x);
void heed_remember(const heed_attention *a, const heed_gradient *g, const heed_exec *x, const heed_call *call);

/* The first row that fits. Pure. Where why is not NULL, a line for each row considered goes to it. */
heed_status heed_choose(const heed_problem *p, const heed_device *d, const char *forced, heed_plan *plan,
                        heed_text *why);
/* Whether the device has what the kernel's code needs; if not, why. */
int heed_runs_on(const heed_kernel *k, const heed_device *d, char *why, size_t size);
unsigned heed_uses_of(const heed_problem *p); /* the HEED_USES_ of a problem */
/* Whether rows and keys are as few as a kernel of these uses wants them, by what is the same for every batch, so that no
 * sequence meets another kernel because of the others; and head sizes are whole pieces of 16 bytes. If not, why. */
int heed_is_small(const heed_problem *p, unsigned uses, char *why, size_t size);

/* Whether so few rows see so many keys that reading those is what takes the time. */
static inline int heed_decodes(const heed_problem *p)
{
    return p->Sq <= HEED_FEW_ROWS && p->full.keys >= HEED_MANY_KEYS;
}

/* In fp32, of wide heads: whether something is added to scores, or hides them, and not only of a few. */
static inline int heed_has_wide_terms(const heed_problem *p)
{
    const int terms = p->a.mask.data || p->a.bias.data || p->a.alibi.data || p->a.scale <= 0;
    return p->a.q.dtype == HEED_F32 && terms && HEED_MAX(p->D, p->Dv) > 64 &&
           HEED_MAX(p->Sq, p->full.keys) >= HEED_SHORT_TERMS;
}

/* Whether there are so many rows or keys that it pays what the kernels of HEED_FOR_LONG do first: in fp32 with keys beyond
 * those of short sequences, or where others are slower still. */
static inline int heed_is_long(const heed_problem *p)
{
    const int sooner = p->a.q.dtype == HEED_F32 && (p->full.keys > HEED_SHORT_WIDE || HEED_MAX(p->D, p->Dv) > 128);
    return sooner || heed_has_wide_terms(p) || HEED_MAX(p->Sq, p->full.keys) >= HEED_LONG;
}

/* Keys up to which kernels for few of them are better at scores that something is added to or hides: those that they meet at
 * once; more in a forward with ALiBi alone, of which they load nothing, where they take the rows; fewer with dropout, but for
 * narrow forwards. */
static inline int heed_few_keys(const heed_problem *p)
{
    const int loads = p->a.mask.data || p->a.bias.data;
    const int narrow_forward = p->pass == HEED_FORWARD && HEED_MAX(p->D, p->Dv) <= 64;
    if (p->drop_below)
        return narrow_forward ? HEED_AT_ONCE : HEED_AT_ONCE / 2 - 1;
    return narrow_forward && !loads && p->Sq <= HEED_SHORT ? HEED_SHORT_WIDE : HEED_AT_ONCE;
}
/* And rows from which a backward pays that walks over them for each tile of keys. */
static inline int heed_fewest_rows(const heed_problem *p) { return p->pass == HEED_FORWARD ? 0 : 64; }
static inline int heed_has_terms(const heed_problem *p)
{
    return (p->a.mask.data || p->a.bias.data || p->a.alibi.data || p->drop_below) && p->full.keys > heed_few_keys(p) &&
           p->Sq >= heed_fewest_rows(p);
}

/* The largest head_dim that a kernel takes: of those with terms, the wider backward has no registers for dropout; of those
 * for few rows, 16 bits are the tensor core's. */
static inline int heed_widest(const heed_kernel *k, const heed_problem *p)
{
    const int drops = k->uses & HEED_FOR_TERMS && p->pass == HEED_BACKWARD && p->drop_below;
    const int halves = k->uses & HEED_FOR_FEW && k->dtype != HEED_F32;
    return drops ? HEED_MIN(k->max_head_dim, 96) : halves ? HEED_MIN(k->max_head_dim, 256) : k->max_head_dim;
}

/* Rows from which HEED_FOR_ROWS pays: fp32, twice as many if they are narrow, or see different keys; fp16, whose products
 * are fewer, half as many. And half as many keys. */
static inline int64_t heed_least_rows(const heed_problem *p)
{
    if (p->a.q.dtype == HEED_F16)
        return HEED_ROWS / 2;
    const int narrow = p->D + p->Dv < 128, banded = p->left != HEED_UNBOUNDED || p->right != HEED_UNBOUNDED;
    return (int64_t)HEED_ROWS << (narrow + banded);
}
static inline int heed_are_few(const heed_problem *p, int64_t rows, int64_t keys)
{
    return rows < heed_least_rows(p) || keys < heed_least_rows(p) / 2;
}
int heed_threads_for(const heed_device *d, double microseconds); /* of work on one thread */
extern const heed_kernel heed_kernels[];
extern const int heed_kernel_total;

/* ---- Dropout ---------------------------------------------------------------------------------------------------- */

/* Philox4x32 with 7 rounds: eight 16-bit numbers for the key positions r/8*8 .. +7 of one row.
 * Counter: { r / 8, p, head, batch }, all modulo 2^32; key: the seed. Key position r takes number r % 8:
 * half r % 8 % 2 (low first) of word r % 8 / 2. Positions may be negative: division rounds down. */
static inline void heed_philox(uint64_t seed, const uint32_t counter[4], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 7; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* 1 where P_ij is kept: position p of the row, r of the key. */
static inline int heed_keep(uint64_t seed, uint32_t drop_below, int64_t b, int64_t h, int64_t p, int64_t r)
{
    uint32_t counter[4] = { (uint32_t)(uint64_t)(r >> 3), (uint32_t)(uint64_t)p, (uint32_t)h, (uint32_t)b }, out[4];
    heed_philox(seed, counter, out);
    uint32_t lane = (uint32_t)(r & 7);
    return ((out[lane >> 1] >> (16 * (lane & 1))) & 0xFFFFu) >= drop_below;
}

/* ---- Backends --------------------------------------------------------------------------------------------------- */

#define HEED_DECLARE_CPU(isa)                                                                                          \
    size_t heed_forward_workspace_##isa(const heed_problem *, const heed_plan *);                                      \
    heed_status heed_forward_##isa(const heed_problem *, const heed_plan *, const heed_exec *);                        \
    heed_status heed_forward_left_##isa(const heed_problem *, const heed_plan *, const heed_exec *, unsigned char *);  \
    size_t heed_backward_workspace_##isa(const heed_problem *, const heed_plan *);                                     \
    heed_status heed_backward_##isa(const heed_problem *, const heed_plan *, const heed_exec *);                       \
    heed_status heed_backward_left_##isa(const heed_problem *, const heed_plan *, const heed_exec *, unsigned char *);
HEED_DECLARE_CPU(reference)
HEED_DECLARE_CPU(plain)
HEED_DECLARE_CPU(avx2)
HEED_DECLARE_CPU(avx512)
HEED_DECLARE_CPU(avx512bf16)
HEED_DECLARE_CPU(amx)
HEED_DECLARE_CPU(amxsplit)
HEED_DECLARE_CPU(amxhalf)

/* The two small operations on whole tensors, in double, element by element: cpu/combine.c. Checked tensors. */
void heed_merge_cpu(const heed_tensor tensors[4], int threads);
void heed_delta_cpu(const heed_tensor tensors[4], int threads);

#if !defined(_WIN32)
#pragma GCC visibility pop
#endif

#endif /* HEED_INTERNAL_H */
