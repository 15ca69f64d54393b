/* Tensors as memory: one view made regular, and whether two views share an element. */
#include "internal.h"

#include <inttypes.h>
#include <stdio.h>

_Alignas(64) char heed_stand_in[64];

/* "fp32, fp16 or bf16" */
static const char *dtype_list(unsigned dtypes, char *text, size_t size)
{
    size_t length = 0;
    text[0] = 0;
    for (int d = 0; dtypes >> d; d++)
        if (dtypes >> d & 1 && length < size) {
            const char *comma = length == 0 ? "" : dtypes >> d >> 1 ? ", " : " or ";
            length += (size_t)snprintf(text + length, size - length, "%s%s", comma, heed_dtype_name((heed_dtype)d));
        }
    return text;
}

static heed_status check_dtype(const char *name, const heed_tensor *t, unsigned dtypes)
{
    char expected[64];
    if (!heed_dtype_size(t->dtype))
        return heed_fail(HEED_BAD_ARGUMENT, "%s: dtype is %d, which is no heed_dtype", name, (int)t->dtype);
    if (!(dtypes >> t->dtype & 1))
        return heed_fail(HEED_BAD_ARGUMENT, "%s: dtype is %s, expected %s", name, heed_dtype_name(t->dtype),
                         dtype_list(dtypes, expected, sizeof expected));
    return HEED_OK;
}

int64_t heed_elements(const heed_tensor *t) { return t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3]; }

/* Sizes of 0 count as 1, so that every stride of a packed tensor is a number even if it has no element. */
static heed_status check_shape(const char *name, const heed_tensor *t)
{
    int64_t bytes = (int64_t)heed_dtype_size(t->dtype);
    int overflow = 0;
    for (int d = 0; d < 4; d++) {
        if (t->shape[d] < 0)
            return heed_fail(HEED_BAD_ARGUMENT, "%s: shape[%d] is %" PRId64 ", expected 0 or more", name, d,
                             t->shape[d]);
        overflow |= __builtin_mul_overflow(bytes, HEED_MAX(t->shape[d], 1), &bytes);
    }
    if (overflow)
        return heed_fail(HEED_BAD_ARGUMENT,
                         "%s: shape %" PRId64 " x %" PRId64 " x %" PRId64 " x %" PRId64
                         " is more bytes than 63 bits count",
                         name, t->shape[0], t->shape[1], t->shape[2], t->shape[3]);
    return HEED_OK;
}

static void fill_strides(heed_tensor *t)
{
    const int64_t *given = t->stride;
    int packed = (!given[0] && !given[1] && !given[2] && !given[3]) || heed_elements(t) == 0;
    int64_t next = 1;
    for (int d = 3; d >= 0; d--) {
        if (packed)
            t->stride[d] = next;
        if (t->shape[d] == 1)
            t->stride[d] = d == 3; /* such a stride is never used: columns that are alone count as contiguous */
        next *= HEED_MAX(t->shape[d], 1);
    }
}

/* No memory is longer, and sums of a few such lengths still fit into 63 bits. */
#define LONGEST ((int64_t)1 << 59)

/* Bytes from data to the lowest element's first byte (0 or less), and to the end of the highest's last. */
static int reach(const heed_tensor *t, int64_t *low, int64_t *high)
{
    int64_t size = (int64_t)heed_dtype_size(t->dtype);
    int overflow = 0;
    *low = 0, *high = 0;
    for (int d = 0; d < 4; d++) {
        int64_t far, *side = t->stride[d] < 0 ? low : high;
        overflow |= __builtin_mul_overflow(t->stride[d], t->shape[d] - 1, &far);
        overflow |= __builtin_add_overflow(*side, far, side);
    }
    overflow |= __builtin_mul_overflow(*low, size, low);
    overflow |= __builtin_mul_overflow(*high, size, high);
    overflow |= __builtin_add_overflow(*high, size, high);
    return !overflow && *low >= -LONGEST && *high <= LONGEST;
}

int heed_addresses(const heed_tensor *t, uintptr_t *begin, uintptr_t *end)
{
    int64_t low, high;
    if (!reach(t, &low, &high))
        return 0;
    return !__builtin_add_overflow((uintptr_t)t->data, low, begin) &&
           !__builtin_add_overflow((uintptr_t)t->data, high, end);
}

heed_status heed_view(const char *name, heed_tensor *t, unsigned dtypes)
{
    heed_status s;
    uintptr_t begin, end;
    if ((s = check_dtype(name, t, dtypes)) || (s = check_shape(name, t)))
        return s;
    fill_strides(t);
    if (heed_elements(t) == 0)
        return HEED_OK;
    if (!t->data)
        return heed_fail(HEED_BAD_ARGUMENT, "%s: data is NULL, its shape has %" PRId64 " elements", name,
                         heed_elements(t));
    if ((uintptr_t)t->data % heed_dtype_size(t->dtype))
        return heed_fail(HEED_BAD_ARGUMENT, "%s: data is %p, expected a multiple of %zu bytes for %s", name, t->data,
                         heed_dtype_size(t->dtype), heed_dtype_name(t->dtype));
    if (!heed_addresses(t, &begin, &end))
        return heed_fail(HEED_BAD_ARGUMENT,
                         "%s: strides %" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64
                         " reach beyond what memory holds",
                         name, t->stride[0], t->stride[1], t->stride[2], t->stride[3]);
    return HEED_OK;
}

/* ---- Overlap ---------------------------------------------------------------------------------------------------- *
 *
 * The addresses of a view are a lattice: begin + sum of n_d * stride_d, 0 <= n_d < size_d, once a negative stride is
 * walked from its other end, in bytes here. Strides descend, and rest[d] is the length in bytes of what dimensions
 * d and after span together, so rest[dims] is one element.
 */
typedef struct lattice {
    uintptr_t begin;
    int dims;
    int64_t stride[4], size[4], rest[5];
} lattice;

static void lattice_of(const heed_tensor *t, lattice *l)
{
    uintptr_t end;
    heed_addresses(t, &l->begin, &end);
    l->dims = 0;
    for (int d = 0; d < 4; d++) {
        if (t->shape[d] == 1 || t->stride[d] == 0)
            continue;
        int64_t stride = (t->stride[d] < 0 ? -t->stride[d] : t->stride[d]) * (int64_t)heed_dtype_size(t->dtype);
        int at = l->dims++;
        for (; at > 0 && l->stride[at - 1] < stride; at--)
            l->stride[at] = l->stride[at - 1], l->size[at] = l->size[at - 1];
        l->stride[at] = stride, l->size[at] = t->shape[d];
    }
    l->rest[l->dims] = (int64_t)heed_dtype_size(t->dtype);
    for (int d = l->dims - 1; d >= 0; d--)
        l->rest[d] = l->rest[d + 1] + l->stride[d] * (l->size[d] - 1);
}

/* No two elements share memory where each stride steps over all that the smaller ones span. There are odd views for
 * which the reverse does not hold (sizes 2 and 3 with strides 3 and 2); nobody asks for an output like that. */
int heed_overlaps_itself(const heed_tensor *t)
{
    lattice l;
    if (heed_elements(t) == 0)
        return 0;
    for (int d = 0; d < 4; d++)
        if (t->shape[d] > 1 && t->stride[d] == 0)
            return 1;
    lattice_of(t, &l);
    for (int d = 0; d < l.dims; d++)
        if (l.stride[d] < l.rest[d + 1])
            return 1;
    return 0;
}

/* Does a from dimension i on, placed at 0, meet b from dimension j on, placed at shift? Both are walked from the
 * outside in along the larger stride, and only at those steps at which the spans still touch. A stride that both have
 * is walked once, by the difference of the two indices: so q, k and v side by side in one buffer, which interleave at
 * every row but never meet, are told apart in a handful of steps. The walk is exact; only if it takes more than
 * `budget` steps, which needs strides with nothing in common, does it give up and report an overlap. */
static int meet(const lattice *a, int i, const lattice *b, int j, int64_t shift, int *budget)
{
    if (shift >= a->rest[i] || -shift >= b->rest[j])
        return 0;
    if ((i == a->dims && j == b->dims) || --*budget < 0)
        return 1;
    int64_t step_a = i < a->dims ? a->stride[i] : 0, step_b = j < b->dims ? b->stride[j] : 0;
    int64_t step = HEED_MAX(step_a, step_b);
    int next_i = i + (step_a == step), next_j = j + (step_b == step);
    int64_t most = step_a == step ? a->size[i] - 1 : 0, least = step_b == step ? 1 - b->size[j] : 0;

    /* At n the spans touch where shift - n * step < a's rest and n * step - shift < b's rest. */
    int64_t before = shift - a->rest[next_i]; /* the first n is the one past floor(before / step) */
    int64_t first = HEED_MAX(before / step - (before % step < 0) + 1, least);
    for (int64_t n = first; n <= most && n * step - shift < b->rest[next_j]; n++)
        if (meet(a, next_i, b, next_j, shift - n * step, budget))
            return 1;
    return 0;
}

int heed_overlap(const heed_tensor *t, const heed_tensor *u)
{
    enum { STEPS = 1000 };
    uintptr_t begin_t, end_t, begin_u, end_u;
    lattice a, b;
    if (heed_elements(t) == 0 || heed_elements(u) == 0)
        return 0;
    heed_addresses(t, &begin_t, &end_t);
    heed_addresses(u, &begin_u, &end_u);
    if (begin_t >= end_u || begin_u >= end_t)
        return 0;
    lattice_of(t, &a);
    lattice_of(u, &b);
    return meet(&a, 0, &b, 0, (int64_t)(b.begin - a.begin), &(int){ STEPS });
}
