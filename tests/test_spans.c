/* Which keys a row sees, against the sentences of heed.h taken literally: thousands of small random batches of every
 * form, in which each pair (i, j) is asked about one by one. */
#include "internal.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { BATCH = 3, MOST = 12 };

static uint64_t random_state;

/* An integer from low to high, both included. */
static int64_t pick(int64_t low, int64_t high)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return low + (int64_t)((random_state >> 33) % (uint64_t)(high - low + 1));
}

typedef struct batch {
    heed_attention a;
    heed_gradient g;
    heed_problem p;
    int32_t lengths_q[BATCH], lengths_k[BATCH], offsets_q[BATCH + 1], offsets_k[BATCH + 1], table[BATCH * MOST];
    float data[2][BATCH * MOST * MOST];
} batch;

static heed_tensor view(float *data, int64_t b, int64_t rows)
{
    return (heed_tensor){ .data = data, .shape = { b, 1, rows, 1 } };
}

static void fill_offsets(int32_t offsets[BATCH + 1])
{
    offsets[0] = (int32_t)pick(0, 2);
    for (int b = 0; b < BATCH; b++)
        offsets[b + 1] = offsets[b] + (int32_t)pick(0, MOST);
}

static void random_rows(batch *t)
{
    int64_t Sq = pick(0, MOST);
    t->a.q = view(t->data[0], BATCH, Sq);
    for (int b = 0; b < BATCH; b++)
        t->lengths_q[b] = (int32_t)pick(0, Sq);
    if (pick(0, 1))
        t->a.lengths_q = t->lengths_q;
}

static void random_keys(batch *t)
{
    int64_t Sk = pick(0, MOST);
    t->a.k = view(t->data[1], BATCH, Sk);
    for (int b = 0; b < BATCH; b++)
        t->lengths_k[b] = (int32_t)pick(0, Sk);
    if (pick(0, 1))
        t->a.lengths_k = t->lengths_k;
}

static void random_ragged(batch *t, int rows_too)
{
    fill_offsets(t->offsets_k);
    t->a.k = view(t->data[1], 1, t->offsets_k[BATCH] + pick(0, 2));
    t->a.offsets_k = t->offsets_k;
    t->a.sequences = BATCH, t->a.max_keys = MOST + pick(0, 2);
    for (int b = 0; b < BATCH; b++)
        t->lengths_k[b] = (int32_t)pick(0, t->offsets_k[b + 1] - t->offsets_k[b]);
    t->a.lengths_k = pick(0, 1) ? t->lengths_k : NULL;
    if (!rows_too)
        return;
    fill_offsets(t->offsets_q);
    t->a.q = view(t->data[0], 1, t->offsets_q[BATCH]);
    t->a.offsets_q = t->offsets_q;
    t->a.lengths_q = NULL;
    t->a.max_rows = MOST;
}

static void random_pages(batch *t)
{
    int64_t page = pick(1, 4), columns = pick(0, 4), pages = pick(1, 6);
    t->a.k = view(t->data[1], pages, page);
    t->a.block_table = t->table;
    t->a.block_table_columns = columns;
    t->a.block_table_stride = columns + pick(0, 2);
    for (int n = 0; n < BATCH * MOST; n++)
        t->table[n] = (int32_t)pick(0, pages - 1);
    for (int b = 0; b < BATCH; b++)
        t->lengths_k[b] = (int32_t)pick(0, columns * page);
    t->a.lengths_k = t->lengths_k;
}

static void random_batch(batch *t)
{
    memset(t, 0, sizeof *t);
    random_rows(t);
    random_keys(t);
    int form = (int)pick(0, 3);
    if (form == 1 || form == 2)
        random_ragged(t, form == 1);
    if (form == 3)
        random_pages(t);

    heed_attention *a = &t->a;
    a->causal = (int)pick(0, 1);
    a->windowed = (int)pick(0, 1);
    a->window_left = a->windowed ? pick(-1, 6) : 0;
    a->window_right = a->windowed ? pick(-1, 6) : 0;
    a->key_stride = pick(0, 7);
    a->align = (heed_align)pick(0, 2);
    if (a->align == HEED_ALIGN_POSITION) {
        a->query_position = pick(-20, 20), a->query_step = pick(0, 5);
        a->key_position = pick(-20, 20), a->key_step = pick(0, 6);
    }
    a->v = a->k;
    a->o = a->q;
    a->o.data = a->q.shape[2] ? t->data[0] + BATCH * MOST * (MOST / 2) : NULL;
    if (heed_check(a, NULL, &(heed_exec){ .backend = HEED_REFERENCE }, 0, &t->p) || heed_check_lengths(&t->p))
        fail_msg("the batch is wrong: %s", heed_last_error());
}

/* ---- heed.h, word for word -------------------------------------------------------------------------------------- */

static int64_t rows_of(const heed_attention *a, int b)
{
    return a->offsets_q ? a->offsets_q[b + 1] - a->offsets_q[b] : a->lengths_q ? a->lengths_q[b] : a->q.shape[2];
}

static int64_t keys_of(const heed_attention *a, int b)
{
    if (a->lengths_k)
        return a->lengths_k[b];
    return a->offsets_k ? a->offsets_k[b + 1] - a->offsets_k[b] : a->k.shape[2];
}

static int64_t row_position(const heed_attention *a, int b, int64_t i)
{
    if (a->align == HEED_ALIGN_POSITION)
        return a->query_position + i * (a->query_step ? a->query_step : 1);
    return a->align == HEED_ALIGN_TOP_LEFT ? i : i + keys_of(a, b) - rows_of(a, b);
}

static int64_t key_position(const heed_attention *a, int64_t j)
{
    return a->align == HEED_ALIGN_POSITION ? a->key_position + j * (a->key_step ? a->key_step : 1) : j;
}

static int visible(const heed_attention *a, int b, int64_t i, int64_t j)
{
    int64_t p = row_position(a, b, i), r = key_position(a, j);
    if (r % (a->key_stride ? a->key_stride : 1) != 0)
        return 0;
    if (a->causal && !(r <= p))
        return 0;
    if (a->windowed && a->window_left != -1 && !(p - a->window_left <= r))
        return 0;
    if (a->windowed && a->window_right != -1 && !(r <= p + a->window_right))
        return 0;
    return 1;
}

/* Row of k in memory, counted over the whole tensor; there is one head with one column. */
static int64_t memory_row(const heed_attention *a, int b, int64_t j)
{
    int64_t rows = a->k.shape[2];
    if (a->block_table)
        return a->block_table[b * a->block_table_stride + j / rows] * rows + j % rows;
    return a->offsets_k ? a->offsets_k[b] + j : b * rows + j;
}

/* ---- Tests ------------------------------------------------------------------------------------------------------ */

static void compare_row(const batch *t, const heed_span *s, int b, int64_t i)
{
    const heed_attention *a = &t->a;
    int64_t first, last, n = 0;
    heed_band(&t->p, s, i, &first, &last);
    assert_true(0 <= first && first <= last && last <= s->keys);
    assert_int_equal(s->p0 + i * s->p_step, row_position(a, b, i));
    for (int64_t j = 0; j < keys_of(a, b); j++) {
        if (key_position(a, j) % (a->key_stride ? a->key_stride : 1))
            continue; /* the span leaves out what the stride hides, and nothing else */
        assert_int_equal(s->col + n * s->col_step, j);
        assert_int_equal(s->r0 + n * s->r_step, key_position(a, j));
        assert_int_equal(heed_key_offset(&t->p, s, &t->p.a.k, 0, n), memory_row(a, b, j));
        assert_int_equal(first <= n && n < last, visible(a, b, i, j));
        n++;
    }
    assert_int_equal(n, s->keys);
}

static void spans_and_bands_are_what_the_header_says(void **state)
{
    (void)state;
    static batch t;
    int64_t pairs = 0;
    for (int trial = 0; trial < 8000; trial++) {
        random_state = (uint64_t)trial;
        random_batch(&t);
        for (int b = 0; b < BATCH; b++) {
            heed_span s;
            heed_span_of(&t.p, b, &s);
            if (s.rows != rows_of(&t.a, b))
                fail_msg("trial %d: %d rows", trial, (int)s.rows);
            assert_int_equal(s.b, b);
            assert_int_equal(s.q_batch * t.p.Sq + s.q_row, t.a.offsets_q ? t.a.offsets_q[b] : b * t.p.Sq);
            assert_int_equal(s.padded_rows, t.a.offsets_q ? s.rows : t.p.Sq);
            if (t.a.offsets_k)
                assert_int_equal(s.padded_keys, t.a.offsets_k[b + 1] - t.a.offsets_k[b]);
            else
                assert_int_equal(s.padded_keys, t.p.Sk);
            for (int64_t i = 0; i < s.rows; i++)
                compare_row(&t, &s, b, i);
            pairs += s.rows * s.keys;
        }
    }
    assert_true(pairs > 50000);
}

/* Numbers near the ends of their range saturate in place of wrapping around. */
static void huge_windows_strides_and_positions_hold(void **state)
{
    (void)state;
    const int64_t far = ((int64_t)1 << 61) - 8, windows[] = { 0, 3, INT64_MAX - 1, INT64_MAX };
    static float data[3][64];
    for (int n = 0; n < 4 * 4 * 4; n++) {
        heed_attention a = { .q = view(data[0], 1, 5), .k = view(data[1], 1, 7), .v = view(data[1], 1, 7) };
        heed_problem p;
        heed_span s;
        int64_t first, last;
        a.o = view(data[2], 1, 5);
        a.windowed = 1;
        a.window_left = windows[n % 4], a.window_right = windows[n / 4 % 4];
        a.align = HEED_ALIGN_POSITION;
        a.query_position = n & 16 ? far : -far, a.key_position = n & 32 ? far : -far;
        a.key_stride = 1;
        assert_int_equal(heed_check(&a, NULL, &(heed_exec){ .backend = HEED_REFERENCE }, 0, &p), HEED_OK);
        heed_span_of(&p, 0, &s);
        for (int64_t i = 0; i < 5; i++) {
            heed_band(&p, &s, i, &first, &last);
            for (int64_t j = 0; j < 7; j++) {
                __extension__ typedef __int128 wide;
                wide position = (wide)a.query_position + i, r = (wide)a.key_position + j;
                int seen = position - a.window_left <= r && r <= position + a.window_right;
                assert_int_equal(first <= j && j < last, seen);
            }
        }
    }
}

static void a_stride_longer_than_the_keys_leaves_one_key_or_none(void **state)
{
    (void)state;
    static float data[2][64];
    heed_attention a = { .q = view(data[0], 1, 1), .k = view(data[1], 1, 7), .v = view(data[1], 1, 7) };
    heed_problem p;
    heed_span s;
    a.o = view(data[0] + 8, 1, 1);
    a.key_stride = INT64_MAX;
    assert_int_equal(heed_check(&a, NULL, &(heed_exec){ .backend = HEED_REFERENCE }, 0, &p), HEED_OK);
    heed_span_of(&p, 0, &s);
    assert_true(s.keys == 1 && s.col == 0 && s.r0 == 0);
    a.align = HEED_ALIGN_POSITION;
    a.key_position = -12, a.key_step = 4, a.key_stride = INT64_MAX / 2;
    assert_int_equal(heed_check(&a, NULL, &(heed_exec){ .backend = HEED_REFERENCE }, 0, &p), HEED_OK);
    heed_span_of(&p, 0, &s);
    assert_true(s.keys == 1 && s.col == 3 && s.r0 == 0);
    a.key_position = 1;
    assert_int_equal(heed_check(&a, NULL, &(heed_exec){ .backend = HEED_REFERENCE }, 0, &p), HEED_OK);
    heed_span_of(&p, 0, &s);
    assert_int_equal(s.keys, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(spans_and_bands_are_what_the_header_says),
        cmocka_unit_test(huge_windows_strides_and_positions_hold),
        cmocka_unit_test(a_stride_longer_than_the_keys_leaves_one_key_or_none),
    };
    return cmocka_run_group_tests_name("spans", tests, NULL, NULL);
}
