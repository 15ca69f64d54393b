/* numbers.h: "exact on the way in, rounded to nearest even on the way out". */
#include "harness.h"

static uint16_t narrow(heed_dtype dtype, double x)
{
    _Alignas(8) uint16_t memory[4] = { 0 };
    heed_store(memory, dtype, 0, x);
    return memory[0];
}

static double widen(heed_dtype dtype, uint16_t bits)
{
    _Alignas(8) uint16_t memory[4] = { bits };
    return heed_load(memory, dtype, 0);
}

static const struct {
    heed_dtype dtype;
    uint16_t infinity;
} types[] = { { HEED_F16, 0x7C00 }, { HEED_BF16, 0x7F80 } };

TEST(every_16_bit_number_survives_the_way_through_double)
{
    for (int t = 0; t < 2; t++)
        for (uint32_t bits = 0; bits <= types[t].infinity; bits++) {
            assert_int_equal(narrow(types[t].dtype, widen(types[t].dtype, (uint16_t)bits)), bits);
            assert_int_equal(narrow(types[t].dtype, widen(types[t].dtype, (uint16_t)(bits | 0x8000))), bits | 0x8000);
        }
}

/* Between each number and the next: the middle goes to the even one, anything beside it to the nearer one. A middle
 * plus the smallest double step is where rounding to float first would go wrong. */
TEST(the_nearest_number_is_taken_and_in_the_middle_the_even_one)
{
    for (int t = 0; t < 2; t++)
        for (uint32_t bits = 0; bits + 1 < types[t].infinity; bits++) {
            heed_dtype dtype = types[t].dtype;
            double middle = (widen(dtype, (uint16_t)bits) + widen(dtype, (uint16_t)(bits + 1))) / 2;
            assert_int_equal(narrow(dtype, middle), bits + (bits & 1));
            assert_int_equal(narrow(dtype, nextafter(middle, 0)), bits);
            assert_int_equal(narrow(dtype, nextafter(middle, INFINITY)), bits + 1);
            assert_int_equal(narrow(dtype, -nextafter(middle, INFINITY)), (bits + 1) | 0x8000);
        }
}

TEST(what_is_too_large_becomes_infinity_and_nan_stays_nan)
{
    for (int t = 0; t < 2; t++) {
        heed_dtype dtype = types[t].dtype;
        double largest = widen(dtype, (uint16_t)(types[t].infinity - 1));
        double half_step = (largest - widen(dtype, (uint16_t)(types[t].infinity - 2))) / 2;
        assert_int_equal(narrow(dtype, nextafter(largest + half_step, 0)), types[t].infinity - 1);
        assert_int_equal(narrow(dtype, largest + half_step), types[t].infinity);
        assert_int_equal(narrow(dtype, 1e300), types[t].infinity);
        assert_int_equal(narrow(dtype, -INFINITY), types[t].infinity | 0x8000);
        assert_true(isnan(widen(dtype, narrow(dtype, NAN))) && isnan(widen(dtype, 0xFFFF)));
    }
}

TEST(any_byte_but_0_is_true)
{
    uint8_t bytes[] = { 0, 1, 255 };
    assert_true(heed_load(bytes, HEED_BOOL, 0) == 0 && heed_load(bytes, HEED_BOOL, 1) == 1);
    assert_true(heed_load(bytes, HEED_BOOL, 2) == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_16_bit_number_survives_the_way_through_double),
        cmocka_unit_test(the_nearest_number_is_taken_and_in_the_middle_the_even_one),
        cmocka_unit_test(what_is_too_large_becomes_infinity_and_nan_stays_nan),
        cmocka_unit_test(any_byte_but_0_is_true),
    };
    return RUN_TESTS(tests);
}
