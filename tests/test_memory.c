/* heed.h: the workspace is "Linear in the number of tokens", and asked for in advance. */
#include "harness.h"

static size_t workspace_of(const heed_kernel_info *kernel, case_shape shape)
{
    test_case c = case_new(kernel, shape);
    size_t bytes = 0;
    c.x.kernel = kernel->name;
    c.x.threads = 4;
    c.x.nondeterministic = 1;   /* leave that some rows need, and none refuses */
    if (case_takes(&c, kernel)) /* some rows are for small problems only */
        assert_int_equal(heed_workspace_size(&c.a, kernel->backward ? &c.g : NULL, &c.x, &bytes), HEED_OK);
    case_free(&c);
    return bytes;
}

/* Four times the tokens take at most about four times the memory, where a matrix of scores would take sixteen. */
TEST(the_workspace_is_linear_in_tokens)
{
    for_each_kernel(EITHER_PASS, kernel) {
        size_t small = workspace_of(&kernel, (case_shape){ .Hq = 2, .Hk = 1, .Sq = 1024, .D = 16 });
        size_t large = workspace_of(&kernel, (case_shape){ .Hq = 2, .Hk = 1, .Sq = 4096, .D = 16 });
        assert_true(large <= 4 * small + 4096);
    }
}

/* A ragged batch pays for the tokens there are, not for as many of the longest sequence. */
TEST(a_ragged_workspace_is_linear_in_tokens)
{
    enum { B = 200, LONGEST = 2000 };
    int32_t lengths[B];
    for (int b = 0; b < B; b++)
        lengths[b] = b ? 1 : LONGEST;
    for_each_kernel(EITHER_PASS, kernel) {
        size_t one = workspace_of(&kernel, (case_shape){ .Sq = LONGEST, .D = 16 });
        size_t many = workspace_of(&kernel,
                                   (case_shape){
                                       .B = B, .D = 16, .form = RAGGED, .rows_of = lengths, .keys_of = lengths });
        assert_true(many <= 5 * one + (1 << 20)); /* some of it for each of four threads */
    }
}

/* heed.h: HEED_NO_WORKSPACE, "exec.workspace is smaller than heed_workspace_size() says", and "On an error the outputs
 * are untouched". */
TEST(one_byte_too_few_is_refused)
{
    for_each_kernel(HEED_FORWARD, kernel) {
        test_case c = case_new(&kernel, (case_shape){ .Hq = 2, .Sq = 50, .D = 32 });
        heed_tensor unwritten = case_tensor(&c, c.a.o.dtype, c.a.o.shape, NULL);
        c.x.kernel = kernel.name;
        assert_int_equal(heed_workspace_size(&c.a, NULL, &c.x, &c.x.workspace_bytes), HEED_OK);
        if (c.x.workspace_bytes) {
            c.x.workspace = case_memory(&c, --c.x.workspace_bytes, 0);
            assert_int_equal(heed_forward(&c.a, &c.x), HEED_NO_WORKSPACE);
            expect_same_bits(&c, "o", &unwritten, &c.a.o);
        }
        case_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_workspace_is_linear_in_tokens),
        cmocka_unit_test(a_ragged_workspace_is_linear_in_tokens),
        cmocka_unit_test(one_byte_too_few_is_refused),
    };
    return RUN_TESTS(tests);
}
