/* heed.h: "Parts of a sequence". However rows and keys are cut, parts folded together are the whole. */
#include "harness.h"

/* Rows or keys first, first + step, ... of the whole, whose positions are just these numbers. */
typedef struct cut {
    int64_t first, step, count;
} cut;

static void expect_ok(heed_status status)
{
    if (status)
        fail_msg("%s: %s", heed_status_name(status), heed_last_error());
}

/* The rows q and keys k of the whole, as a problem of its own. lse and delta are those of all rows. */
static test_case part_of(const test_case *whole, cut q, cut k)
{
    test_case part = *whole;
    heed_tensor *of_rows[] = {
        &part.a.q, &part.a.o, &part.a.lse, &part.g.d_o, &part.g.d_q, &part.g.d_lse, &part.g.delta
    };
    heed_tensor *of_keys[] = { &part.a.k, &part.a.v, &part.g.d_k, &part.g.d_v };
    heed_tensor *of_pairs[] = { &part.a.mask, &part.a.bias, &part.g.d_bias };
    for (int n = 0; n < COUNT(of_rows); n++)
        if (of_rows[n]->data)
            *of_rows[n] = slice(*of_rows[n], 2, q.first, q.step, q.count);
    for (int n = 0; n < COUNT(of_keys); n++)
        *of_keys[n] = slice(*of_keys[n], 2, k.first, k.step, k.count);
    for (int n = 0; n < COUNT(of_pairs); n++)
        if (of_pairs[n]->data)
            *of_pairs[n] = slice(slice(*of_pairs[n], 2, q.first, q.step, q.count), 3, k.first, k.step, k.count);
    part.a.align = HEED_ALIGN_POSITION;
    part.a.query_position = q.first, part.a.query_step = q.step;
    part.a.key_position = k.first, part.a.key_step = k.step;
    return part;
}

/* Forward, part by part, into the whole's o and lse, which begin as those of no key. */
static void forward_in_parts(test_case *c, const cut *qs, int q_count, const cut *ks, int k_count)
{
    heed_tensor o2 = case_tensor(c, c->a.o.dtype, c->a.o.shape, NULL);
    heed_tensor lse2 = case_tensor(c, HEED_F32, c->a.lse.shape, NULL), sink = c->a.sink;
    fill_bytes(&c->a.o, 0);
    for (int64_t n = 0; n < elements(&c->a.lse); n++)
        ((float *)c->a.lse.data)[n] = -INFINITY;
    c->a.sink.data = NULL;
    for (int i = 0; i < q_count; i++)
        for (int j = 0; j < k_count; j++) {
            test_case part = part_of(c, qs[i], ks[j]);
            heed_tensor o = part.a.o, lse = part.a.lse;
            part.a.o = slice(o2, 2, qs[i].first, qs[i].step, qs[i].count);
            part.a.lse = slice(lse2, 2, qs[i].first, qs[i].step, qs[i].count);
            case_forward(&part);
            expect_ok(heed_merge(&o, &lse, &part.a.o, &part.a.lse, &c->x));
        }
    c->a.sink = sink;
    if (sink.data) { /* "fold it in last, as a part of its own with o2 = 0 and lse2 = sink (both by zero strides)" */
        float *zero = case_memory(c, 64 * sizeof *zero, 0);
        memset(zero, 0, 64 * sizeof *zero);
        heed_tensor none = { .data = zero, .stride = { 0, 0, 0, 1 } },
                    logit = { .data = sink.data, .stride = { 0, 1, 0, 0 } };
        memcpy(none.shape, c->a.o.shape, sizeof none.shape);
        memcpy(logit.shape, c->a.lse.shape, sizeof logit.shape);
        expect_ok(heed_merge(&c->a.o, &c->a.lse, &none, &logit, &c->x));
    }
}

static void backward_in_parts(test_case *c, const cut *qs, int q_count, const cut *ks, int k_count)
{
    heed_tensor d_sink = c->g.d_sink;
    c->g.delta = case_tensor(c, HEED_F32, c->a.lse.shape, NULL);
    expect_ok(heed_delta(&c->a.o, &c->g.d_o, c->g.d_lse.data ? &c->g.d_lse : NULL, &c->g.delta, &c->x));
    fill_bytes(&c->g.d_q, 0);
    fill_bytes(&c->g.d_k, 0);
    fill_bytes(&c->g.d_v, 0);
    c->g.accumulate = 1;
    for (int i = 0; i < q_count; i++)
        for (int j = 0; j < k_count; j++) {
            test_case part = part_of(c, qs[i], ks[j]);
            if (i || j || q_count > 1)
                part.g.d_sink.data = NULL;
            case_backward(&part);
        }
    if (q_count > 1)
        c->g.d_sink.data = NULL; /* a sum over rows, of which each part has only some */
    expect_close(c, HEED_BACKWARD);
    c->g.d_sink = d_sink;
    c->g.accumulate = 0;
}

static void check_parts(const cut *qs, int q_count, const cut *ks, int k_count, void (*change)(test_case *))
{
    for_each_kernel(HEED_BACKWARD, kernel) {
        if (kernel.dtype == HEED_F64) /* accumulating takes fp32 */
            continue;
        test_case c = case_new(&kernel, (case_shape){
                                            .B = 2, .Hq = 4, .Hk = 2, .Sq = 48, .D = 16, .Dv = 24, .fp32_results = 1 });
        change(&c);
        forward_in_parts(&c, qs, q_count, ks, k_count);
        expect_close(&c, HEED_FORWARD);
        backward_in_parts(&c, qs, q_count, ks, k_count);
        case_free(&c);
    }
}

static const cut whole[] = { { 0, 1, 48 } };
static const cut blocks[] = { { 0, 1, 20 }, { 20, 1, 1 }, { 21, 1, 27 } };
static const cut stripes[] = { { 0, 3, 16 }, { 1, 3, 16 }, { 2, 3, 16 } };
static const cut zigzag[] = { { 0, 1, 12 }, { 36, 1, 12 }, { 12, 1, 12 }, { 24, 1, 12 } };

static void nothing(test_case *c) { (void)c; }

static void causal(test_case *c) { c->a.causal = 1; }

static void everything(test_case *c)
{
    case_bias(c, HEED_F32, 2, 4, 48, 48);
    case_mask(c, 2, 1, 48, 48, 0.7);
    case_alibi(c, 1);
    case_d_lse(c);
    c->a.softcap = 5;
    c->a.windowed = 1;
    c->a.window_left = 17, c->a.window_right = 4;
    c->a.key_stride = 2;
    c->a.dropout = 0.25f;
    c->a.dropout_seed = 3;
}

static void causal_with_sink(test_case *c)
{
    c->a.causal = 1;
    case_sink(c);
}

TEST(blocks_of_keys_fold_into_the_whole) { check_parts(whole, 1, blocks, 3, nothing); }

TEST(causal_blocks_of_keys_fold_into_the_whole) { check_parts(whole, 1, blocks, 3, causal); }

TEST(causal_blocks_of_rows_and_keys_fold_into_the_whole) { check_parts(blocks, 3, blocks, 3, causal); }

TEST(causal_stripes_fold_into_the_whole) { check_parts(stripes, 3, stripes, 3, causal); }

TEST(a_causal_zigzag_folds_into_the_whole) { check_parts(zigzag, 4, zigzag, 4, causal); }

TEST(blocks_with_everything_fold_into_the_whole) { check_parts(blocks, 3, zigzag, 4, everything); }

TEST(stripes_with_everything_fold_into_the_whole) { check_parts(stripes, 3, stripes, 3, everything); }

TEST(a_sink_is_folded_in_last) { check_parts(whole, 1, stripes, 3, causal_with_sink); }

/* ---- heed_merge and heed_delta alone ---------------------------------------------------------------------------- */

static heed_tensor row_of(heed_dtype dtype, void *data, int64_t columns)
{
    return (heed_tensor){ .data = data, .dtype = dtype, .shape = { 1, 1, 1, columns } };
}

static void merge_floats(float *o, float *lse, float *o2, float *lse2)
{
    heed_tensor to = row_of(HEED_F32, o, 2), tl = row_of(HEED_F32, lse, 1);
    heed_tensor to2 = row_of(HEED_F32, o2, 2), tl2 = row_of(HEED_F32, lse2, 1);
    expect_ok(heed_merge(&to, &tl, &to2, &tl2, &(heed_exec){ 0 }));
}

TEST(two_parts_merged_by_hand)
{
    float o[2] = { 1, -1 }, lse = logf(1), o2[2] = { 5, 3 }, lse2 = logf(3);
    merge_floats(o, &lse, o2, &lse2);
    assert_true(fabsf(o[0] - 4) < 1e-6f && fabsf(o[1] - 2) < 1e-6f && fabsf(lse - logf(4)) < 1e-6f);
}

/* heed.h: "A part that saw no key (lse = -inf) leaves the other as it is." */
TEST(a_part_without_keys_leaves_the_other_as_it_is)
{
    float o[2] = { 1, -1 }, lse = 2, nothing_seen = -INFINITY, garbage[2] = { NAN, INFINITY };
    merge_floats(o, &lse, garbage, &nothing_seen);
    assert_true(o[0] == 1 && o[1] == -1 && lse == 2);
    float empty[2] = { NAN, NAN }, empty_lse = -INFINITY;
    merge_floats(empty, &empty_lse, o, &lse);
    assert_true(empty[0] == 1 && empty[1] == -1 && empty_lse == 2);
    float both[2] = { 0, 0 }, both_lse = -INFINITY;
    merge_floats(both, &both_lse, garbage, &nothing_seen);
    assert_true(both[0] == 0 && both[1] == 0 && both_lse == -INFINITY);
}

TEST(parts_with_huge_lse_merge_without_overflow)
{
    static const float sizes[] = { 1e3f, 1e30f, 3.4e38f };
    for (int n = 0; n < COUNT(sizes); n++) {
        float o[2] = { 1, 2 }, lse = sizes[n], o2[2] = { 3, 4 }, lse2 = -sizes[n];
        merge_floats(o, &lse, o2, &lse2);
        assert_true(o[0] == 1 && o[1] == 2 && lse == sizes[n]);
        lse2 = sizes[n];
        merge_floats(o, &lse, o2, &lse2);
        assert_true(o[0] == 2 && o[1] == 3 && isfinite(lse));
    }
}

TEST(merge_takes_every_dtype)
{
    for (heed_dtype x = HEED_F32; x <= HEED_F64; x++)
        for (heed_dtype y = HEED_F32; y <= HEED_F64; y++) {
            double memory[2], memory2[2];
            float lse = logf(3), lse2 = logf(1);
            heed_tensor o = row_of(x, memory, 2), o2 = row_of(y, memory2, 2);
            heed_tensor tl = row_of(HEED_F32, &lse, 1), tl2 = row_of(HEED_F32, &lse2, 1);
            set(&o, 0, 0, 0, 0, 4), set(&o, 0, 0, 0, 1, -8);
            set(&o2, 0, 0, 0, 0, 8), set(&o2, 0, 0, 0, 1, 8);
            expect_ok(heed_merge(&o, &tl, &o2, &tl2, &(heed_exec){ 0 }));
            assert_true(fabs(get(&o, 0, 0, 0, 0) - 5) < 1e-2 && fabs(get(&o, 0, 0, 0, 1) + 4) < 1e-2);
        }
}

/* heed.h: "delta_i = dO_i . o_i - dlse_i". */
TEST(delta_by_hand)
{
    float o[2] = { 1, 2 }, d_o[2] = { 3, -5 }, d_lse = 0.5f, delta = NAN;
    heed_tensor to = row_of(HEED_F32, o, 2), td = row_of(HEED_F32, d_o, 2);
    heed_tensor tl = row_of(HEED_F32, &d_lse, 1), out = row_of(HEED_F32, &delta, 1);
    expect_ok(heed_delta(&to, &td, &tl, &out, &(heed_exec){ 0 }));
    assert_true(delta == -7.5f);
    expect_ok(heed_delta(&to, &td, NULL, &out, &(heed_exec){ 0 }));
    assert_true(delta == -7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_of_keys_fold_into_the_whole),
        cmocka_unit_test(causal_blocks_of_keys_fold_into_the_whole),
        cmocka_unit_test(causal_blocks_of_rows_and_keys_fold_into_the_whole),
        cmocka_unit_test(causal_stripes_fold_into_the_whole),
        cmocka_unit_test(a_causal_zigzag_folds_into_the_whole),
        cmocka_unit_test(blocks_with_everything_fold_into_the_whole),
        cmocka_unit_test(stripes_with_everything_fold_into_the_whole),
        cmocka_unit_test(a_sink_is_folded_in_last),
        cmocka_unit_test(two_parts_merged_by_hand),
        cmocka_unit_test(a_part_without_keys_leaves_the_other_as_it_is),
        cmocka_unit_test(parts_with_huge_lse_merge_without_overflow),
        cmocka_unit_test(merge_takes_every_dtype),
        cmocka_unit_test(delta_by_hand),
    };
    return RUN_TESTS(tests);
}
