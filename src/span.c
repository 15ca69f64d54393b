/* From a batch of sequences to the rows and keys of one: lengths, offsets, pages, key stride and positions end here.
 *
 * The key stride makes the visible keys an arithmetic progression. Key j stands at r_j = key_position + j * key_step
 * and is visible when key_stride divides r_j. With g = gcd(key_step, key_stride) that has no solution unless g divides
 * key_position, and else one in every key_stride / g keys:
 *
 *     (key_step / g) * j = -key_position / g      modulo key_stride / g
 */
#include "internal.h"

__extension__ typedef __int128 wide;

/* By 1 nearly always, and for every row: the slow instruction is worth avoiding. */
static int64_t floor_divide(int64_t a, int64_t b) { return b == 1 ? a : a / b - (a % b < 0); }

static int64_t ceil_divide(int64_t a, int64_t b) { return b == 1 ? a : a / b + (a % b > 0); }

static int64_t add_saturated(int64_t a, int64_t b)
{
    int64_t sum;
    if (__builtin_add_overflow(a, b, &sum))
        return b < 0 ? INT64_MIN : INT64_MAX;
    return sum;
}

/* gcd(a, m), and *inverse with a * *inverse = gcd modulo m, by Euclid's extended algorithm. a, m > 0. */
static int64_t gcd_and_inverse(int64_t a, int64_t m, int64_t *inverse)
{
    int64_t r0 = m, r1 = a, t0 = 0, t1 = 1;
    while (r1) {
        int64_t quotient = r0 / r1, r2 = r0 % r1, t2 = t0 - quotient * t1;
        r0 = r1, r1 = r2, t0 = t1, t1 = t2;
    }
    *inverse = t0 < 0 ? t0 + m / r0 : t0;
    return r0;
}

/* The first j >= 0 with position + j * step divisible by stride, or -1; *every: how many keys until the next. */
static int64_t first_visible(int64_t position, int64_t step, int64_t stride, int64_t *every)
{
    if (step == 1 && stride == 1) { /* nearly always */
        *every = 1;
        return 0;
    }
    int64_t inverse, gcd = gcd_and_inverse(step % stride ? step % stride : stride, stride, &inverse);
    *every = stride / gcd;
    if (position % gcd)
        return -1;
    int64_t target = -(position / gcd) % *every;
    return (int64_t)((wide)(target < 0 ? target + *every : target) * inverse % *every);
}

static void place_rows(const heed_problem *p, heed_span *s)
{
    const int32_t *offsets = p->a.offsets_q, *lengths = p->a.lengths_q;
    int64_t b = s->b;
    s->q_batch = offsets ? 0 : b;
    s->q_row = offsets ? offsets[b] : 0;
    s->padded_rows = offsets ? (int64_t)offsets[b + 1] - offsets[b] : p->Sq;
    s->rows = lengths ? lengths[b] : s->padded_rows;
}

/* Returns the number of keys, those that the stride hides included. */
static int64_t place_keys(const heed_problem *p, heed_span *s)
{
    const int32_t *offsets = p->a.offsets_k, *lengths = p->a.lengths_k;
    int64_t b = s->b;
    s->k_batch = offsets ? 0 : b;
    s->k_row = offsets ? offsets[b] : 0;
    s->padded_keys = offsets ? (int64_t)offsets[b + 1] - offsets[b] : p->Sk;
    return lengths ? lengths[b] : s->padded_keys;
}

/* Positions, and which of so many keys are seen. */
static void place_positions(const heed_problem *p, int64_t length, heed_span *s)
{
    const heed_attention *a = &p->a;
    int64_t r_first = 0, r_each = 1;
    s->p_step = 1;
    if (a->align == HEED_ALIGN_BOTTOM_RIGHT)
        s->p0 = length - s->rows;
    if (a->align == HEED_ALIGN_POSITION) {
        s->p0 = a->query_position, s->p_step = a->query_step;
        r_first = a->key_position, r_each = a->key_step;
    }

    int64_t first = first_visible(r_first, r_each, a->key_stride, &s->col_step);
    if (first >= 0 && first < length) {
        s->col = first;
        s->keys = (length - 1 - first) / s->col_step + 1;
    }
    s->r0 = r_first + s->col * r_each;
    if (s->col_step >= p->Sk)
        s->col_step = 1; /* no sequence takes a second step, and this one could be too large to multiply */
    s->r_step = s->col_step * r_each;
}

void heed_span_of(const heed_problem *p, int64_t b, heed_span *s)
{
    *s = (heed_span){ .b = b };
    place_rows(p, s);
    place_positions(p, place_keys(p, s), s);
}

void heed_span_full(const heed_problem *p, heed_span *s)
{
    *s = (heed_span){ .rows = p->Sq, .padded_rows = p->Sq, .padded_keys = p->Sk };
    place_positions(p, p->Sk, s);
}

void heed_band(const heed_problem *p, const heed_span *s, int64_t i, int64_t *first, int64_t *last)
{
    int64_t ahead = s->p0 + i * s->p_step - s->r0; /* of key 0; within 2^62, but a window may be any number */
    int64_t from = 0, to = s->keys;
    if (p->left != HEED_UNBOUNDED)
        from = ceil_divide(add_saturated(ahead, -p->left), s->r_step);
    if (p->right != HEED_UNBOUNDED)
        to = add_saturated(floor_divide(add_saturated(ahead, p->right), s->r_step), 1);
    *first = HEED_MIN(HEED_MAX(from, 0), s->keys);
    *last = HEED_MAX(HEED_MIN(to, s->keys), *first);
}

int64_t heed_key_offset(const heed_problem *p, const heed_span *s, const heed_tensor *t, int64_t h, int64_t n)
{
    int64_t j = s->col + n * s->col_step, batch = s->k_batch, row = s->k_row + j;
    if (p->page) {
        batch = p->a.block_table[s->b * p->a.block_table_stride + j / p->page];
        row = j % p->page;
    }
    return batch * t->stride[0] + h * t->stride[1] + row * t->stride[2];
}
