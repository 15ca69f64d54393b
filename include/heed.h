/* heed: attention forward and backward on CPUs and NVIDIA GPUs.
 *
 * This header is the whole public interface and its manual. For each batch b and query head h, with the key head
 * h / (Hq/Hk):
 *
 *     S_ij  = softcap(scale * q_i . k_j) + bias_ij - slope_h * |p_i - r_j|    softcap(x) = c tanh(x/c) if c > 0, else x
 *     m_i   = max over visible j of S_ij                                    (and sink_h, where there is one)
 *     l_i   = sum over visible j of exp(S_ij - m_i)                         (plus exp(sink_h - m_i))
 *     o_i   = sum over visible j of exp(S_ij - m_i) / l_i * v_j
 *     lse_i = m_i + log l_i
 *
 * Key j is visible to row i when all of these agree: the band (causal, window), the key stride, the mask, the lengths.
 * A row that sees no key has o = 0 and lse = -inf, sink or not, and all its gradients are 0.
 *
 * A first call, on the CPU, four query heads for each key head, packed memory:
 *
 *     heed_attention a = {
 *         .q = { .data = q, .dtype = HEED_BF16, .shape = { 4, 16, 1024, 128 } },
 *         .k = { .data = k, .dtype = HEED_BF16, .shape = { 4,  4, 1024, 128 } },
 *         .v = { .data = v, .dtype = HEED_BF16, .shape = { 4,  4, 1024, 128 } },
 *         .o = { .data = o, .dtype = HEED_BF16, .shape = { 4, 16, 1024, 128 } },
 *         .causal = 1,
 *     };
 *     heed_exec x = { .backend = HEED_CPU };
 *     heed_status s = heed_workspace_size(&a, NULL, &x, &x.workspace_bytes);
 *     if (!s) {
 *         x.workspace = malloc(x.workspace_bytes);
 *         s = heed_forward(&a, &x);
 *     }
 *     if (s)
 *         fprintf(stderr, "%s: %s\n", heed_status_name(s), heed_last_error());
 *
 * Rules that hold for every call:
 *   - Every struct may be zero-initialised; zero is each field's default and its comment says what it means. New
 *     fields are added at the end, and the library gets a new SONAME.
 *   - Arguments are checked before anything runs. On an error the outputs are untouched, the call returns a status
 *     and heed_last_error() names the argument, what it was and what was expected.
 *   - heed allocates nothing, prints nothing, never aborts, and any number of threads may call it at once. Once the
 *     work of a call is done, nothing that it was given is read or written: of its last calls a thread keeps the
 *     descriptors, to know them again, and follows no pointer in them.
 *   - The same inputs give the same bits, whatever the number of threads, and the result for one (batch, head) does
 *     not depend on the rest of the batch. But for this: on a GPU the longest sequence of a ragged batch may decide
 *     which kernel all get; docs/numerics.md says when, and how to avoid it.
 */
#ifndef HEED_H
#define HEED_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HEED_VERSION_MAJOR 0
#define HEED_VERSION_MINOR 1
#define HEED_VERSION_PATCH 0
#define HEED_VERSION (HEED_VERSION_MAJOR * 10000 + HEED_VERSION_MINOR * 100 + HEED_VERSION_PATCH)

#if defined(_WIN32)
#define HEED_API
#else
#define HEED_API __attribute__((visibility("default")))
#endif

/* ---- Status ----------------------------------------------------------------------------------------------------- */

typedef enum heed_status {
    HEED_OK = 0,
    HEED_BAD_ARGUMENT = 1, /* an argument breaks a rule of this header */
    HEED_UNSUPPORTED = 2,  /* a legal problem that no kernel of this build can take on this device */
    HEED_NO_WORKSPACE = 3, /* exec.workspace is smaller than heed_workspace_size() says */
    HEED_NO_DEVICE = 4,    /* no such device on this machine */
    HEED_DEVICE_ERROR = 5, /* the device's runtime reported an error */
} heed_status;

/* "bad argument" and the like; never NULL. */
HEED_API const char *heed_status_name(heed_status status);

/* What the last failing call of this thread found wrong: "k: head_dim is 64, q has 128". Empty before the first
 * failure; valid until this thread's next failing call. */
HEED_API const char *heed_last_error(void);

/* The version of the library that is loaded, as HEED_VERSION counts, and as text: "0.1.0". */
HEED_API int heed_version(void);
HEED_API const char *heed_version_string(void);

/* ---- Tensors ---------------------------------------------------------------------------------------------------- */

typedef enum heed_dtype {
    HEED_F32 = 0,
    HEED_F16 = 1,
    HEED_BF16 = 2,
    HEED_F64 = 3,  /* HEED_REFERENCE only */
    HEED_BOOL = 4, /* one byte, any value but 0 is true; masks only */
} heed_dtype;

/* A view of memory that the caller owns. Order of the four dimensions: batch, head, row, column. Element
 * (b, h, i, c) lies at data + b*stride[0] + h*stride[1] + i*stride[2] + c*stride[3], counted in elements. So every
 * order in memory, every packed qkv buffer and every expanded view is a matter of strides:
 *
 *     bhsd    stride = { H*S*D, S*D, D, 1 }       or all four strides 0: packed, the same thing
 *     bshd    stride = { S*H*D, D, H*D, 1 }
 *
 * Inputs may have zero (broadcast) and negative strides; the elements of an output must not overlap each other or
 * anything else that the call reads or writes. data must be aligned to its dtype. A tensor with data == NULL is absent,
 * which is legal where the field says "optional", and where the tensor holds no element. */
typedef struct heed_tensor {
    void *data;
    heed_dtype dtype;
    int64_t shape[4];
    int64_t stride[4];
} heed_tensor;

/* ---- The problem ------------------------------------------------------------------------------------------------ */

/* Where row i stands among the keys: its position p_i, which causal, window and ALiBi compare with the position r_j
 * of key j. Lq and Lk are the lengths of the sequence: Sq and Sk, or what lengths and offsets below say. */
typedef enum heed_align {
    HEED_ALIGN_BOTTOM_RIGHT = 0, /* p_i = i + Lk - Lq, r_j = j: the last row stands at the last key */
    HEED_ALIGN_TOP_LEFT = 1,     /* p_i = i,           r_j = j: the first row stands at the first key */
    HEED_ALIGN_POSITION = 2,     /* p_i = query_position + i*query_step, r_j = key_position + j*key_step:
                                    slices of a longer sequence, see "Parts of a sequence" below */
} heed_align;

typedef struct heed_attention {
    heed_tensor q;   /* [B, Hq, Sq, D]: fp32, fp16, bf16; D from 1 to 512 */
    heed_tensor k;   /* [B, Hk, Sk, D]: q's dtype; Hq is a multiple of Hk */
    heed_tensor v;   /* [B, Hk, Sk, Dv]: q's dtype; Dv from 1 to 512 */
    heed_tensor o;   /* [B, Hq, Sq, Dv]: q's dtype, or fp32. Written by forward, read by backward */
    heed_tensor lse; /* [B, Hq, Sq, 1], fp32, or fp64 as q. Optional in forward, which writes it; backward reads it */

    /* scale: 0 means 1/sqrt(D). For a scale of exactly zero leave it 0 and set zero_scale. */
    float scale;
    int zero_scale;
    float softcap; /* 0: none */

    /* The band. causal: r_j <= p_i. windowed: p_i - window_left <= r_j <= p_i + window_right, where -1 means no limit
     * on that side. Both may be set: then both must hold. */
    int causal;
    int windowed;
    int64_t window_left, window_right;
    heed_align align;
    int64_t query_position, key_position; /* HEED_ALIGN_POSITION only */
    int64_t query_step, key_step;         /* HEED_ALIGN_POSITION only; 0 means 1 */

    /* Strided attention: key j is visible only if r_j % key_stride == 0; 0 means 1. Costs as much as dense attention
     * over those keys; the others are never read. */
    int64_t key_stride;

    /* Optional. Each dimension of mask and bias is that of [B, Hq, Sq, Sk] or 1 (broadcast). */
    heed_tensor mask;  /* HEED_BOOL, true: attend */
    heed_tensor bias;  /* fp32 or q's dtype; -inf hides the key as a mask does */
    heed_tensor alibi; /* [B or 1, Hq, 1, 1], fp32: the slopes */
    heed_tensor sink;  /* [1, Hq, 1, 1], fp32: one more logit in each row's l_i, with no value */

    /* Dropout of P after normalisation, scaled by 1/(1-p). dropout: p in [0, 1), taken to the nearest multiple of
     * 2^-16. The bits depend on seed, batch, head, p_i and r_j alone: they are the same on every backend, in the
     * backward, and for any cut into parts. dropout_seed_at: optional, in the backend's memory; its value is added to
     * dropout_seed when the work runs, so that a captured graph draws anew at each replay. */
    float dropout;
    uint64_t dropout_seed;
    const uint64_t *dropout_seed_at;

    /* Sequences of different length; int32 in the backend's memory, all optional. Two forms, for each side:
     *   padded: lengths_q[b] rows and lengths_k[b] keys of sequence b count, the rest is padding: never read, its
     *           output and gradients are 0, its lse is -inf.
     *   ragged: offsets_q[B+1] / offsets_k[B+1]: sequences lie end to end in one, sequence b being rows offsets[b] to
     *           offsets[b+1]-1. Then q and o are [1, Hq, rows in all, D], k and v [1, Hk, keys in all, D], lse
     *           [1, Hq, rows in all, 1], B is `sequences`, and Sq and Sk, in the shapes of mask and bias, are
     *           max_rows and max_keys: bounds of the lengths that the caller promises. Rows outside of all sequences
     *           are padding, too.
     * A ragged q goes with a ragged k or a paged k. offsets and lengths for one side contradict each other, except
     * that lengths_k may shorten a ragged k. */
    const int32_t *lengths_q, *lengths_k;
    const int32_t *offsets_q, *offsets_k;
    int64_t sequences, max_rows, max_keys;

    /* Paged cache: k is [pages, Hk, page size, D], v is [pages, Hk, page size, Dv], and key j of sequence b lies in
     * row j % page size of page block_table[b * block_table_stride + j / page size]. int32, in the backend's memory.
     * Needs lengths_k. Sk is block_table_columns * page size. Forward only. */
    const int32_t *block_table;
    int64_t block_table_stride, block_table_columns;
} heed_attention;

/* What backward reads and writes besides heed_attention, of which o and lse are forward's results.
 *
 *     P = exp(S - lse)   dV = P^T dO   dP = dO V^T   delta_i = dO_i . o_i - dlse_i
 *     dS = P * (dP - delta)   dQ = scale dS K   dK = scale dS^T Q   dbias = dS
 *     dsink = -sum_i exp(sink - lse_i) delta_i
 *
 * Any of the results may be absent: then it is not computed. */
typedef struct heed_gradient {
    heed_tensor d_o;   /* [B, Hq, Sq, Dv]: o's dtype. Input */
    heed_tensor d_lse; /* [B, Hq, Sq, 1], lse's types. Optional input: the gradient of lse */
    heed_tensor delta; /* [B, Hq, Sq, 1], lse's types. Optional input, of heed_delta(): o and d_lse are then not read */
    heed_tensor d_q;   /* like q, in q's dtype or fp32 */
    heed_tensor d_k;   /* like k, in k's dtype or fp32 */
    heed_tensor d_v;   /* like v, in v's dtype or fp32 */
    heed_tensor d_bias; /* bias's shape, fp32 or bias's dtype: summed over the dimensions that bias broadcasts */
    heed_tensor d_sink; /* [1, Hq, 1, 1], fp32: summed over batch and rows */
    int accumulate;     /* 1: add to d_q, d_k and d_v, which are fp32, in place of overwriting them */
} heed_gradient;

/* ---- How to run ------------------------------------------------------------------------------------------------- */

typedef enum heed_backend {
    HEED_CPU = 0,
    HEED_CUDA = 1,
    HEED_REFERENCE = 2, /* plain loops in double on the CPU: the definition of correct, slow */
} heed_backend;

typedef enum heed_precision {
    HEED_EXACT = 0, /* fp32 inputs are multiplied with fp32 accuracy */
    HEED_TF32 = 1,  /* fp32 inputs may be multiplied in tf32 where that is faster */
    HEED_PLAIN = 2, /* as HEED_EXACT, and by fp32 instructions alone, not by tensor cores that take them in parts */
} heed_precision;

typedef struct heed_exec {
    heed_backend backend;
    int device;      /* HEED_CUDA: which one, in the order of the CUDA runtime */
    void *stream;    /* HEED_CUDA: a cudaStream_t; NULL is the default stream. Calls return before the work is done.
                     Elsewhere ignored: the work is done when the call returns. */
    void *workspace; /* heed_workspace_size() bytes in the backend's memory, or more, aligned to 16 bytes and apart from
                        all else that the call reads or writes; free to be reused as soon as the call's work is done.
                        What it holds before does not matter. */
    size_t workspace_bytes;
    int threads; /* HEED_CPU: at most this many; 0: what heed_set_threads() said, else OpenMP's number. One thread is
                    used for work of some microseconds and inside a parallel region of the caller's; never more than
                    256, or than the hardware has where that is more. A process made by fork() asks for 1 if calls
                    before the fork used more: OpenMP's threads stay behind, and it would wait for them. */
    int nondeterministic; /* 1: sums may be taken in any order where that is faster */
    heed_precision precision;
    const char *kernel; /* force this row of the kernel table; HEED_UNSUPPORTED where it cannot take the problem. NULL:
                           the row that the environment variable HEED_KERNEL named at the first call, unless it is one
                           of the other pass, else the best. */
} heed_exec;

/* How many threads a call with exec.threads == 0 uses on the CPU; 0 goes back to OpenMP's number. Process-wide. */
HEED_API void heed_set_threads(int threads);

/* ---- Calls ------------------------------------------------------------------------------------------------------ */

/* Bytes of workspace that heed_forward (g == NULL) or heed_backward (g != NULL) needs for this problem. Linear in the
 * number of tokens. Looks at no tensor's contents, but at the pointers' alignment. May be 0. */
HEED_API heed_status heed_workspace_size(const heed_attention *a, const heed_gradient *g, const heed_exec *x,
                                         size_t *bytes);

/* Computes a->o, and a->lse where given. */
HEED_API heed_status heed_forward(const heed_attention *a, const heed_exec *x);

/* Computes the gradients that g asks for. */
HEED_API heed_status heed_backward(const heed_attention *a, const heed_gradient *g, const heed_exec *x);

/* ---- Parts of a sequence ---------------------------------------------------------------------------------------- *
 *
 * For sequences that are spread over devices or read in pieces. Cut the keys as you like; for each part call
 * heed_forward with HEED_ALIGN_POSITION, k and v of the part, an fp32 o and an lse, and fold the results together with
 * heed_merge. key_step and query_step describe striped cuts, in which neighbours in memory are several positions
 * apart. A sink belongs to no part: fold it in last, as a part of its own with o2 = 0 and lse2 = sink, which one row of
 * zeros and the Hq sinks can stand for (o2 with strides { 0, 0, 0, 1 }, lse2 with { 0, 1, 0, 0 }); a row that saw no
 * key in any part then has lse = sink. Give the sink to one of the backward calls if d_sink is wanted.
 *
 * Backward: merge first; heed_delta() from the merged o; then for each part heed_backward with the merged lse, that
 * delta, and accumulate = 1 for the gradients that several parts share. */

/* (o, lse) = the result over the union of the keys behind (o, lse) and (o2, lse2). In place; o and o2 are
 * [B, Hq, Sq, Dv] of any floating dtype, lse and lse2 [B, Hq, Sq, 1] fp32, or fp64 where o is. A part that saw no key
 * (lse = -inf) leaves the other as it is. Needs no workspace. */
HEED_API heed_status heed_merge(const heed_tensor *o, const heed_tensor *lse, const heed_tensor *o2,
                                const heed_tensor *lse2, const heed_exec *x);

/* delta_i = dO_i . o_i - dlse_i into delta, [B, Hq, Sq, 1] fp32, or fp64 where o is; d_lse may be NULL. Needs no
 * workspace. */
HEED_API heed_status heed_delta(const heed_tensor *o, const heed_tensor *d_o, const heed_tensor *d_lse,
                                const heed_tensor *delta, const heed_exec *x);

/* ---- Looking inside --------------------------------------------------------------------------------------------- */

/* Writes to text, as lines ending in '\n', which kernel the problem gets and why each row before it in the table was
 * passed over. chip: NULL for the device of x, or the name of one that need not be here: "t4", "a100", "h200",
 * "avx2" ... (heed_chip_name lists them); a GPU gets HEED_UNSUPPORTED from a library that was built without CUDA
 * kernels. Cuts the text at size - 1 bytes. Pointers in a may be NULL: the plan then takes them as present and well
 * aligned where the shape says that they exist. */
HEED_API heed_status heed_explain(const heed_attention *a, const heed_gradient *g, const heed_exec *x, const char *chip,
                                  char *text, size_t size);

/* The names heed_explain knows; NULL from index on when there are no more. */
HEED_API const char *heed_chip_name(int index);

/* The kernel table in order of preference. HEED_BAD_ARGUMENT when index is past its end. */
typedef struct heed_kernel_info {
    const char *name; /* "forward_cpu_avx512_f32" */
    heed_backend backend;
    int backward;     /* 0: forward, 1: backward */
    heed_dtype dtype; /* of q, k and v */
    int max_head_dim;
    int runs_here; /* the machine has the device and instructions it needs */
} heed_kernel_info;
HEED_API heed_status heed_kernel_at(int index, heed_kernel_info *info);

/* A device of this machine. HEED_NO_DEVICE when there is none of that index. */
typedef struct heed_device_info {
    char name[128];      /* "AMD EPYC 9654", "NVIDIA H200" */
    char features[128];  /* "avx2 avx512 avx512bf16", "sm_90" */
    int units;           /* hardware threads, or multiprocessors */
    int threads;         /* HEED_CPU: what a call with exec.threads == 0 would use */
    size_t memory_bytes; /* 0: unknown */
} heed_device_info;
HEED_API heed_status heed_device_at(heed_backend backend, int index, heed_device_info *info);

#ifdef __cplusplus
}
#endif

#endif /* HEED_H */
