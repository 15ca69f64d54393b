/* What every test shares. A test_case holds one problem and owns its memory:
 *
 *     for_each_kernel(HEED_FORWARD, kernel) {
 *         test_case c = case_new(&kernel, (case_shape){ .Hq = 2, .Sq = 33, .D = 64 });
 *         c.a.causal = 1;
 *         case_check(&c);
 *         case_free(&c);
 *     }
 *
 * Memory before and after each buffer, between the elements of a strided view, in outputs and in workspaces holds
 * bytes 0xFF, which is NaN in every dtype: who reads it is found out by the result, who writes it by the guards.
 *
 * HEED_TEST_SEED    seed of all random numbers; every program prints the one it used
 * HEED_TEST_KERNEL  only the rows of the kernel table whose name contains this
 * HEED_TEST_CASES   how many problems test_random tries
 * HEED_TEST_SECONDS how long it does, in place of a number of problems
 */
#ifndef HEED_HARNESS_H
#define HEED_HARNESS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "internal.h"
#include "numbers.h"

#define TEST(name) static void name(void **state __attribute__((unused)))
#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))
#define RUN_TESTS(tests) (print_seed(), cmocka_run_group_tests(tests, NULL, NULL))

/* ---- Random numbers --------------------------------------------------------------------------------------------- */

uint64_t test_seed(void);
void print_seed(void);
void seed_random(uint64_t seed);
uint64_t random_bits(void);
int64_t random_int(int64_t least, int64_t most); /* both included */
double random_normal(void);
int one_in(int64_t n);

/* ---- Kernels ---------------------------------------------------------------------------------------------------- */

#define EITHER_PASS (-1)

/* Every row of the kernel table that runs on this machine. Each meets the same random numbers, so that what is right
 * is worked out once for all rows of a type. Such loops do not nest. */
#define for_each_kernel(pass, kernel)                                                                                  \
    for (heed_kernel_info kernel = next_kernel(pass, NULL); kernel.name; kernel = next_kernel(pass, kernel.name))
heed_kernel_info next_kernel(int pass, const char *after);
int keeps_order(const heed_kernel_info *kernel); /* of its sums; or it wants leave for any */

/* ---- A problem and its memory ----------------------------------------------------------------------------------- */

/* How a tensor lies in memory. Zero: packed, by leaving all strides 0. */
typedef struct test_layout {
    int order[4];   /* dimensions from the outermost to the innermost; all 0: batch, head, row, column */
    int64_t gap[4]; /* by dimension: elements that its stride skips beyond what lies inside it */
    int flip[4];    /* by dimension: 1: runs backwards in memory */
    int64_t offset; /* elements from an address aligned to 64 bytes to the lowest element */
} test_layout;
extern const test_layout BSHD;

#define EMPTY (-1) /* a size of 0, as 0 is the default */

typedef enum case_form { DENSE, PADDED, RAGGED, PAGED } case_form;

typedef struct case_shape {
    int64_t B, Hq, Hk, Sq, Sk, D, Dv; /* 0: 1, 1, Hq, 1, Sq, 1, D */
    int fp32_results;                 /* o, d_o and the gradients are fp32 whatever q is, */
    int fp32_gradients;               /* or the gradients alone, which is what kernels with tensor cores take */
    test_layout layout;               /* of q, k, v, o and their gradients */
    case_form form;
    const int32_t *rows_of, *keys_of; /* B lengths each; NULL: all Sq or Sk long, in RAGGED and PAGED too */
    int64_t page;                     /* PAGED: rows of a page; 0: 16 */
} case_shape;

typedef struct test_buffer {
    unsigned char *block, *data; /* data, bytes long, has a guard on each side inside block */
    size_t block_bytes, bytes;
    heed_tensor view;
} test_buffer;

typedef struct test_case {
    heed_attention a;
    heed_gradient g;
    heed_exec x;
    heed_kernel_info kernel;
    test_buffer buffers[128];
    int buffer_count;
} test_case;

/* q, k, v and d_o are random; the results of forward and backward are allocated. Padding holds NaN. A kernel without a
 * name is any: the planner is free to choose. */
test_case case_new(const heed_kernel_info *kernel, case_shape shape);
void case_free(test_case *c);
void free_since(test_case *c, int buffer_count); /* what was allocated since the case had this many buffers */

/* Memory with guards that lives as long as the case. */
void *case_memory(test_case *c, size_t bytes, size_t offset);
heed_tensor case_tensor(test_case *c, heed_dtype dtype, const int64_t shape[4], const test_layout *layout);
const int32_t *case_int32s(test_case *c, const int32_t *values, int64_t count);

/* Optional inputs, random, of the shape given (1: broadcast), with the gradient's tensor where there is one. */
void case_mask(test_case *c, int64_t B, int64_t H, int64_t Sq, int64_t Sk, double density);
void case_bias(test_case *c, heed_dtype dtype, int64_t B, int64_t H, int64_t Sq, int64_t Sk);
void case_alibi(test_case *c, int64_t B);
void case_sink(test_case *c);
void case_d_lse(test_case *c);

/* B, Sq and Sk as mask and bias count them. */
int64_t case_sequences(const test_case *c);
int64_t case_rows(const test_case *c);
int64_t case_keys(const test_case *c);

/* One line for a message: the kernel, every field that is not its default, the seed. */
const char *case_text(const test_case *c);

/* ---- Elements --------------------------------------------------------------------------------------------------- */

int64_t element(const heed_tensor *t, int64_t b, int64_t h, int64_t i, int64_t c); /* broadcasts sizes of 1 */
int64_t nth(const heed_tensor *t, int64_t n); /* element number n in the order of the dimensions */
double get(const heed_tensor *t, int64_t b, int64_t h, int64_t i, int64_t c);
void set(const heed_tensor *t, int64_t b, int64_t h, int64_t i, int64_t c, double x);
int64_t elements(const heed_tensor *t);
double *unpack(test_case *c, const heed_tensor *t); /* in the order of the dimensions, packed */
void fill_normal(const heed_tensor *t, double sigma);
void fill_row(const heed_tensor *t, int64_t b, int64_t h, int64_t i, double x);
void fill_bytes(const heed_tensor *t, int byte); /* each element; 0xFF is NaN */
heed_tensor slice(heed_tensor t, int dimension, int64_t first, int64_t step, int64_t count);

/* ---- Running ---------------------------------------------------------------------------------------------------- */

/* Through the public calls, with a workspace of exactly the size asked for. The kernel is the case's own row for its
 * pass, and the row of the same family for the other pass. */
heed_status case_try(test_case *c, heed_pass pass);
int case_takes(const test_case *c, const heed_kernel_info *kernel);      /* whether that row itself does, not another */
heed_status case_exec(const test_case *c, heed_pass pass, heed_exec *x); /* all but the workspace, whose size it says */
int64_t runs_of(const char *kernel); /* how often this row itself ran, not one in its place */
void case_forward(test_case *c);     /* fails the test unless HEED_OK, or where a guard or a gap was written */
void case_backward(test_case *c);
void case_guards(const test_case *c);

/* ---- A GPU: gpu.c ------------------------------------------------------------------------------------------------ */

/* Where there is a GPU, memory that it reads and writes at the same addresses as the CPU, and calls that return when
 * the work is done, so that most tests need not know which backend they run on. */
int has_gpu(void);
void *block_new(size_t bytes);
void block_free(void *block, size_t bytes);
const char *gpu_finish(void); /* waits for all work; NULL, or what went wrong */
const char *gpu_reset(void);  /* a new context; every block is gone */

/* ---- Results: compare.c ------------------------------------------------------------------------------------------ */

enum { OUT_O, OUT_LSE, OUT_DQ, OUT_DK, OUT_DV, OUT_DBIAS, OUT_DSINK, OUTPUTS };

/* Packed, in double, in memory of the case; NULL where the output is absent. Gradients only for a backward kernel. */
typedef struct results {
    double *at[OUTPUTS];
} results;

heed_tensor *output_of(test_case *c, int which);
results case_results(test_case *c);   /* what the kernel left in the outputs of its passes */
results case_reference(test_case *c); /* HEED_REFERENCE on fp64 copies of the inputs, in fp64 throughout */

/* naive.c: the plain computation, matmul, softmax, matmul and their gradients, in fp32 with each step rounded to the
 * dtype, written from heed.h alone. magnitude: what rounding errors of each output are proportional to. */
results case_naive(test_case *c, results *magnitude);

/* Same bits, NaN included. */
void expect_same_bits(const test_case *c, const char *what, const heed_tensor *x, const heed_tensor *y);

/* Every element of the outputs of this pass agrees with the reference to within what rounding explains. */
void expect_close(test_case *c, heed_pass pass);
void forget_answers(void); /* which it keeps for other rows with the same problem */

/* Runs the case's own pass, and forward before backward, then expect_close. */
void case_check(test_case *c);

#endif /* HEED_HARNESS_H */
