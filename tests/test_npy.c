/* The .npy reader and writer of the command line: what NumPy writes is read, what does harm is refused by name, and
 * a file is written whole or not at all. */
#include "../cli/cli.h"
#include "../cli/npy.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A .npy file in memory: version, header text, data. */
typedef struct image {
    unsigned char bytes[70000];
    size_t size;
} image;

static image *image_new(int major, const char *header, const void *data, size_t data_size)
{
    static image m;
    size_t length = strlen(header), width = major == 1 ? 2 : 4;
    memcpy(m.bytes, "\x93NUMPY", 6);
    m.bytes[6] = (unsigned char)major;
    m.bytes[7] = 0;
    for (size_t i = 0; i < width; i++)
        m.bytes[8 + i] = (unsigned char)(length >> (8 * i));
    memcpy(m.bytes + 8 + width, header, length);
    if (data_size)
        memcpy(m.bytes + 8 + width + length, data, data_size);
    m.size = 8 + width + length + data_size;
    return &m;
}

static int image_read(image *m, npy_array *a, char why[NPY_WHY])
{
    FILE *file = fmemopen(m->bytes, m->size, "rb");
    assert_non_null(file);
    strcpy(why, "");
    int good = npy_read(file, (int64_t)m->size, a, why);
    fclose(file);
    return good;
}

static void expect_refusal(image *m, const char *reason)
{
    npy_array a = { 0 };
    char why[NPY_WHY];
    if (image_read(m, &a, why)) {
        npy_free(&a);
        fail_msg("was read, but should be refused with '%s'", reason);
    }
    if (!strstr(why, reason))
        fail_msg("refused with '%s', expected '%s'", why, reason);
    assert_null(a.data);
}

static const float six[6] = { 1, 2, 3, 4, 5, 6 };

static void every_version_is_read(void **state)
{
    (void)state;
    for (int major = 1; major <= 3; major++) {
        npy_array a;
        char why[NPY_WHY];
        image *m = image_new(major, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }  \n", six, sizeof six);
        if (!image_read(m, &a, why))
            fail_msg("version %d.0: %s", major, why);
        assert_int_equal(a.rank, 2);
        assert_int_equal(a.shape[0], 2);
        assert_int_equal(a.shape[1], 3);
        assert_int_equal(a.stride[0], 3);
        assert_int_equal(a.stride[1], 1);
        assert_int_equal(a.count, 6);
        assert_memory_equal(a.data, six, sizeof six);
        npy_free(&a);
    }
}

static void every_dtype_and_byte_order_is_read(void **state)
{
    (void)state;
    static const struct {
        const char *descr;
        heed_dtype dtype;
        size_t size;
        unsigned char one[8];
    } cases[] = {
        { "<f2", HEED_F16, 2, { 0x00, 0x3C } },
        { ">f2", HEED_F16, 2, { 0x3C, 0x00 } },
        { "<f4", HEED_F32, 4, { 0x00, 0x00, 0x80, 0x3F } },
        { ">f4", HEED_F32, 4, { 0x3F, 0x80, 0x00, 0x00 } },
        { "<f8", HEED_F64, 8, { 0, 0, 0, 0, 0, 0, 0xF0, 0x3F } },
        { ">f8", HEED_F64, 8, { 0x3F, 0xF0, 0, 0, 0, 0, 0, 0 } },
        { "|b1", HEED_BOOL, 1, { 1 } },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char header[128], why[NPY_WHY];
        npy_array a;
        snprintf(header, sizeof header, "{'descr': '%s', 'fortran_order': False, 'shape': (1,), }\n", cases[i].descr);
        if (!image_read(image_new(1, header, cases[i].one, cases[i].size), &a, why))
            fail_msg("%s: %s", cases[i].descr, why);
        assert_int_equal(a.dtype, cases[i].dtype);
        assert_true(element_load(a.data, a.dtype, 0) == 1);
        npy_free(&a);
    }
}

static void fortran_order_is_a_matter_of_strides(void **state)
{
    (void)state;
    npy_array a;
    char why[NPY_WHY];
    image *m = image_new(1, "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }\n", six, sizeof six);
    assert_true(image_read(m, &a, why));
    assert_int_equal(a.stride[0], 1);
    assert_int_equal(a.stride[1], 2);
    npy_free(&a);
}

/* Python reads any spelling of the dictionary, and so must we. */
static void headers_may_be_spelled_differently(void **state)
{
    (void)state;
    static const char *const spellings[] = {
        "{'shape': (2, 3), 'fortran_order': False, 'descr': '<f4'}",
        "{\"descr\":\"<f4\",\"fortran_order\":False,\"shape\":(2,3,)}\n",
        "  { 'descr' : '<f4' , 'fortran_order' : False , 'shape' : ( 2 , 3 ) , }   \n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }\n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2, 1, 3), }\n",
    };
    for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++) {
        npy_array a;
        char why[NPY_WHY];
        if (!image_read(image_new(1, spellings[i], six, sizeof six), &a, why))
            fail_msg("%s: %s", spellings[i], why);
        assert_int_equal(a.count, 6);
        npy_free(&a);
    }
}

static void empty_and_zero_dimensional_arrays_are_read(void **state)
{
    (void)state;
    npy_array a;
    char why[NPY_WHY];
    image *m = image_new(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (), }", six, 4);
    assert_true(image_read(m, &a, why));
    assert_int_equal(a.rank, 0);
    assert_int_equal(a.count, 1);
    npy_free(&a);
    m = image_new(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 0), }", NULL, 0);
    assert_true(image_read(m, &a, why));
    assert_int_equal(a.count, 0);
    assert_non_null(a.data);
    npy_free(&a);
}

#define HEADER(descr, shape) "{'descr': " descr ", 'fortran_order': False, 'shape': " shape ", }\n"

static void bad_headers_are_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *header, *reason;
    } cases[] = {
        { "", "not a dictionary" },
        { "[1, 2]", "not a dictionary" },
        { "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)", "not separated by commas" },
        { "{'descr': '<f4', 'fortran_order': False}", "lacks shape" },
        { "{'descr': '<f4', 'shape': (2, 3)}", "lacks fortran_order" },
        { "{'fortran_order': False, 'shape': (2, 3)}", "lacks descr" },
        { "{'descr': '<f4', 'descr': '<f4'}", "a repeated key" },
        { "{'descr': '<f4', 'colour': 1}", "an unknown key" },
        { "{'descr': '<f4' 'shape': (2, 3)}", "not separated by commas" },
        { "{'descr': '<f4', 'fortran_order': Maybe, 'shape': (2, 3)}", "neither True nor False" },
        { HEADER("'<f4'", "(2, 3)") "x", "goes on after" },
        { HEADER("'<f4'", "6"), "not a tuple" },
        { HEADER("'<f4'", "(2, 'x')"), "not a tuple of whole numbers" },
        { HEADER("'<f4'", "(2 3)"), "not a tuple of whole numbers" },
        { HEADER("'<f4'", "(-2, -3)"), "negative size" },
        { HEADER("'<f4'", "(99999999999999999999,)"), "beyond 2^63" },
        { HEADER("'<f4'", "(1, 1, 1, 2, 3)"), "more than 4 dimensions" },
        { HEADER("[('a', '<f4')]", "(2, 3)"), "structured dtype" },
        { HEADER("'|O'", "(2, 3)"), "Python objects" },
        { HEADER("'<i4'", "(2, 3)"), "dtype is '<i4'" },
        { HEADER("'<c8'", "(2, 3)"), "dtype is '<c8'" },
        { HEADER("'<f16'", "(2, 3)"), "dtype is '<f16'" },
        { HEADER("'f4'", "(2, 3)"), "dtype is 'f4'" },
        { HEADER("''", "(2, 3)"), "dtype is ''" },
        { HEADER("'<f4 and a very long tail'", "(2, 3)"), "not a short string" },
        { HEADER("7", "(2, 3)"), "not a short string" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_refusal(image_new(1, cases[i].header, six, sizeof six), cases[i].reason);
}

/* None of these may ask for memory: the sizes are compared with the file first. */
static void claims_that_the_file_cannot_hold_are_refused(void **state)
{
    (void)state;
    expect_refusal(image_new(1, HEADER("'<f4'", "(2, 4)"), six, sizeof six), "cut short");
    expect_refusal(image_new(1, HEADER("'<f4'", "(2, 2)"), six, sizeof six), "8 bytes after the array");
    expect_refusal(image_new(1, HEADER("'<f4'", "(1000000000000,)"), six, sizeof six), "cut short");
    expect_refusal(image_new(1, HEADER("'<f8'", "(9223372036854775807,)"), six, sizeof six), "cut short");
    expect_refusal(image_new(1, HEADER("'<f4'", "(4294967296, 4294967296)"), six, sizeof six), "more elements");
    expect_refusal(image_new(1, HEADER("'<f4'", "(0, 4294967296, 4294967296)"), six, 0), "more elements");
}

static void damaged_beginnings_are_refused(void **state)
{
    (void)state;
    image *m = image_new(1, HEADER("'<f4'", "(2, 3)"), six, sizeof six);
    m->bytes[1] = 'X';
    expect_refusal(m, "not a .npy file");
    m->bytes[1] = 'N', m->bytes[6] = 9;
    expect_refusal(m, "version 9.0");
    m->bytes[6] = 1, m->bytes[20] = 0;
    expect_refusal(m, "damaged header");
    m = image_new(1, HEADER("'<f4'", "(2, 3)"), six, sizeof six);
    for (size_t size = 1; size < 60; size++) { /* cut anywhere before the data */
        m->size = size;
        expect_refusal(m, size < 8 ? "not a .npy file" : "ends inside its header");
    }
    m = image_new(2, HEADER("'<f4'", "(2, 3)"), six, sizeof six);
    m->bytes[11] = 0xFF; /* a header of 4 GB */
    expect_refusal(m, "ends inside its header");
    char *spaces = malloc(66001);
    memset(spaces, ' ', 66000);
    spaces[66000] = 0;
    expect_refusal(image_new(2, spaces, NULL, 0), "header of 66000 bytes");
    free(spaces);
}

/* ---- Writing ---------------------------------------------------------------------------------------------------- */

static char folder[64];

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "test_npy.XXXXXX");
    return !mkdtemp(folder);
}

static const char *in_folder(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static int files_in_folder(void)
{
    int count = 0;
    DIR *d = opendir(folder);
    for (struct dirent *e; (e = readdir(d));)
        count += e->d_name[0] != '.';
    closedir(d);
    return count;
}

static int remove_folder(void **state)
{
    (void)state;
    unlink(in_folder("a.npy"));
    return rmdir(folder);
}

static void what_is_written_is_read_back(void **state)
{
    (void)state;
    for (heed_dtype dtype = HEED_F32; dtype <= HEED_BOOL; dtype++) {
        double space[6];
        npy_array a = { .data = space, .dtype = dtype, .rank = 2, .shape = { 3, 2 }, .stride = { 2, 1 }, .count = 6 };
        npy_array b;
        npy_output output;
        char why[NPY_WHY];
        for (int i = 0; i < 6; i++)
            element_store(space, dtype, i, dtype == HEED_BOOL ? i % 2 : 0.5 * i - 1);
        assert_true(npy_stage(&output, in_folder("a.npy"), &a, why));
        assert_true(npy_commit(&output, why));
        npy_discard(&output);
        if (!npy_load(in_folder("a.npy"), &b, why))
            fail_msg("%s: %s", dtype_name(dtype), why);
        assert_int_equal(b.dtype, dtype == HEED_BF16 ? HEED_F32 : dtype);
        assert_int_equal(b.shape[0], 3);
        for (int i = 0; i < 6; i++)
            assert_true(element_load(b.data, b.dtype, i) == element_load(space, dtype, i));
        npy_free(&b);
    }
}

static void nothing_changes_before_the_commit(void **state)
{
    (void)state;
    float one = 1, two = 2;
    npy_array a = { .data = &one, .dtype = HEED_F32, .rank = 1, .shape = { 1 }, .stride = { 1 }, .count = 1 }, b;
    npy_output output;
    char why[NPY_WHY];
    assert_true(npy_stage(&output, in_folder("a.npy"), &a, why) && npy_commit(&output, why));
    npy_discard(&output);
    a.data = &two;
    assert_true(npy_stage(&output, in_folder("a.npy"), &a, why));
    assert_int_equal(files_in_folder(), 2);
    npy_discard(&output);
    assert_int_equal(files_in_folder(), 1);
    assert_true(npy_load(in_folder("a.npy"), &b, why));
    assert_true(*(float *)b.data == 1);
    npy_free(&b);
}

static void a_failing_write_says_why_and_leaves_nothing(void **state)
{
    (void)state;
    float one = 1;
    npy_array a = { .data = &one, .dtype = HEED_F32, .rank = 1, .shape = { 1 }, .stride = { 1 }, .count = 1 };
    npy_output output;
    char why[NPY_WHY];
    int before = files_in_folder();
    assert_false(npy_stage(&output, in_folder("none/a.npy"), &a, why));
    assert_string_equal(why, "No such file or directory");
    assert_false(npy_stage(&output, folder, &a, why));
    assert_string_equal(why, "Is a directory");
    assert_false(npy_stage(&output, "/dev/full", &a, why)); /* and it is still a device */
    assert_string_equal(why, "No space left on device");
    assert_int_equal(files_in_folder(), before);
    npy_discard(&output);
}

static void what_is_no_file_is_not_read(void **state)
{
    (void)state;
    npy_array a;
    char why[NPY_WHY];
    assert_false(npy_load(in_folder("none.npy"), &a, why));
    assert_string_equal(why, "No such file or directory");
    assert_false(npy_load("/dev/zero", &a, why));
    assert_string_equal(why, "is not a regular file");
}

/* ---- Numbers ---------------------------------------------------------------------------------------------------- */

static void halves_survive_the_way_through_double(void **state)
{
    (void)state;
    for (int t = 0; t < 2; t++)
        for (uint32_t bits = 0; bits < 65536; bits++) {
            heed_dtype dtype = t ? HEED_BF16 : HEED_F16;
            uint16_t in = (uint16_t)bits, out;
            double x = element_load(&in, dtype, 0);
            element_store(&out, dtype, 0, x);
            if (isnan(x) ? !isnan(element_load(&out, dtype, 0)) : in != out)
                fail_msg("%s 0x%04x became 0x%04x", dtype_name(dtype), in, out);
        }
}

static void halves_round_to_nearest_even(void **state)
{
    (void)state;
    static const struct {
        double x;
        heed_dtype dtype;
        uint16_t bits;
    } cases[] = {
        { 1 + 0x1p-11, HEED_F16, 0x3C00 }, { 1 + 0x1p-11 + 0x1p-40, HEED_F16, 0x3C01 },
        { 1 + 0x3p-11, HEED_F16, 0x3C02 }, { 65519.99, HEED_F16, 0x7BFF },
        { 65520, HEED_F16, 0x7C00 },       { -1e300, HEED_F16, 0xFC00 },
        { 0x1p-25, HEED_F16, 0x0000 },     { 0x1.8p-24, HEED_F16, 0x0002 },
        { 0x1.ffep-15, HEED_F16, 0x0400 }, { -0.0, HEED_F16, 0x8000 },
        { 1 + 0x1p-8, HEED_BF16, 0x3F80 }, { 1 + 0x3p-8, HEED_BF16, 0x3F82 },
        { 0x1.ffp127, HEED_BF16, 0x7F80 }, { 0x1p-133, HEED_BF16, 0x0001 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint16_t bits;
        element_store(&bits, cases[i].dtype, 0, cases[i].x);
        if (bits != cases[i].bits)
            fail_msg("%a became 0x%04x, expected 0x%04x", cases[i].x, bits, cases[i].bits);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_version_is_read),
        cmocka_unit_test(every_dtype_and_byte_order_is_read),
        cmocka_unit_test(fortran_order_is_a_matter_of_strides),
        cmocka_unit_test(headers_may_be_spelled_differently),
        cmocka_unit_test(empty_and_zero_dimensional_arrays_are_read),
        cmocka_unit_test(bad_headers_are_refused_by_name),
        cmocka_unit_test(claims_that_the_file_cannot_hold_are_refused),
        cmocka_unit_test(damaged_beginnings_are_refused),
        cmocka_unit_test(what_is_written_is_read_back),
        cmocka_unit_test(nothing_changes_before_the_commit),
        cmocka_unit_test(a_failing_write_says_why_and_leaves_nothing),
        cmocka_unit_test(what_is_no_file_is_not_read),
        cmocka_unit_test(halves_survive_the_way_through_double),
        cmocka_unit_test(halves_round_to_nearest_even),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
