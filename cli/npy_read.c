/* Reads .npy files, also those made to do harm.
 *
 *     "\x93NUMPY"  major  minor  header length (2 bytes; 4 from version 2.0)  header  data
 *
 * The header is a Python dictionary literal with the keys descr, fortran_order and shape, in any order and spacing. It
 * is parsed here as exactly that; what is not understood is refused by name. */
#include "npy.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <errno.h>

/* NumPy's own headers for plain arrays are below 200 bytes. */
enum { PREFIX = 8, MOST_HEADER = 1 << 16 };

static int refuse(char *why, const char *format, ...) __attribute__((format(printf, 2, 3)));
static int refuse(char *why, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, NPY_WHY, format, arguments);
    va_end(arguments);
    return 0;
}

/* ---- The header ------------------------------------------------------------------------------------------------- */

typedef struct header {
    char descr[16];
    int fortran;
    int rank;
    int64_t shape[NPY_RANK];
} header;

static void skip_space(const char **c)
{
    while (isspace((unsigned char)**c))
        ++*c;
}

static int accept(const char **c, char wanted)
{
    skip_space(c);
    if (**c != wanted)
        return 0;
    ++*c;
    return 1;
}

static int parse_string(const char **c, char *to, size_t size)
{
    skip_space(c);
    char quote = **c;
    if (quote != '\'' && quote != '"')
        return 0;
    const char *end = strchr(*c + 1, quote);
    if (!end || (size_t)(end - *c) > size)
        return 0;
    memcpy(to, *c + 1, (size_t)(end - *c - 1));
    to[end - *c - 1] = 0;
    *c = end + 1;
    return 1;
}

static int parse_bool(const char **c, int *to)
{
    skip_space(c);
    *to = !strncmp(*c, "True", 4);
    if (!*to && strncmp(*c, "False", 5))
        return 0;
    *c += *to ? 4 : 5;
    return 1;
}

static int parse_shape(const char **c, header *h, char *why)
{
    if (!accept(c, '('))
        return refuse(why, "shape is not a tuple");
    h->rank = 0;
    while (!accept(c, ')')) {
        skip_space(c);
        if (**c == '-')
            return refuse(why, "shape has a negative size");
        if (!isdigit((unsigned char)**c))
            return refuse(why, "shape is not a tuple of whole numbers");
        char *end;
        errno = 0;
        long long n = strtoll(*c, &end, 10);
        if (errno)
            return refuse(why, "shape has a size beyond 2^63");
        if (h->rank == NPY_RANK)
            return refuse(why, "has more than %d dimensions", NPY_RANK);
        h->shape[h->rank++] = n;
        *c = end + (*end == 'L'); /* Python 2 wrote long integers so */
        if (!accept(c, ',')) {
            skip_space(c);
            if (**c != ')')
                return refuse(why, "shape is not a tuple of whole numbers");
        }
    }
    return 1;
}

static int parse_descr(const char **c, header *h, char *why)
{
    skip_space(c);
    if (**c == '[' || **c == '(')
        return refuse(why, "has a structured dtype; fp16, fp32, fp64 or bool is expected");
    if (!parse_string(c, h->descr, sizeof h->descr))
        return refuse(why, "descr is not a short string");
    return 1;
}

static int parse_header(const char *c, header *h, char *why)
{
    enum { DESCR = 1, FORTRAN = 2, SHAPE = 4, ALL = 7 };
    int seen = 0;
    if (!accept(&c, '{'))
        return refuse(why, "the header is not a dictionary");
    while (!accept(&c, '}')) {
        char key[16];
        if (!parse_string(&c, key, sizeof key) || !accept(&c, ':'))
            return refuse(why, "the header is not a dictionary of descr, fortran_order and shape");
        int which = !strcmp(key, "descr")           ? DESCR
                    : !strcmp(key, "fortran_order") ? FORTRAN
                    : !strcmp(key, "shape")         ? SHAPE
                                                    : 0;
        if (!which || (seen & which))
            return refuse(why, "the header has %s key", which ? "a repeated" : "an unknown");
        seen |= which;
        if (which == DESCR && !parse_descr(&c, h, why))
            return 0;
        if (which == FORTRAN && !parse_bool(&c, &h->fortran))
            return refuse(why, "fortran_order is neither True nor False");
        if (which == SHAPE && !parse_shape(&c, h, why))
            return 0;
        if (!accept(&c, ',')) {
            skip_space(&c);
            if (*c != '}')
                return refuse(why, "the header's entries are not separated by commas");
        }
    }
    skip_space(&c);
    if (*c)
        return refuse(why, "the header goes on after its dictionary");
    if (seen != ALL)
        return refuse(why, "the header lacks %s",
                      !(seen & DESCR)     ? "descr"
                      : !(seen & FORTRAN) ? "fortran_order"
                                          : "shape");
    return 1;
}

/* ---- From the header to an array -------------------------------------------------------------------------------- */

static int host_is_little(void) { return *(const char *)&(const int){ 1 }; }

static int apply_descr(const char *descr, npy_array *a, int *swapped, char *why)
{
    static const struct {
        const char *name;
        heed_dtype dtype;
    } known[] = {
        { "f2", HEED_F16 },
        { "f4", HEED_F32 },
        { "f8", HEED_F64 },
        { "b1", HEED_BOOL },
    };
    char order = *descr;
    if (order && strchr("<>=|", order))
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            if (!strcmp(descr + 1, known[i].name)) {
                a->dtype = known[i].dtype;
                *swapped = (order == '<' && !host_is_little()) || (order == '>' && host_is_little());
                return 1;
            }
    char printable[16];
    for (size_t i = 0; i < sizeof printable; i++)
        printable[i] = descr[i] && !isprint((unsigned char)descr[i]) ? '?' : descr[i];
    return refuse(why, "dtype is '%s'%s; fp16, fp32, fp64 or bool is expected", printable,
                  strchr(descr, 'O') ? " (Python objects)" : "");
}

static size_t item_size(heed_dtype dtype)
{
    return dtype == HEED_F64 ? 8 : dtype == HEED_F32 ? 4 : dtype == HEED_F16 ? 2 : 1;
}

/* Sizes, strides and the number of elements; refuses what the bytes that follow the header cannot hold. */
static int apply_shape(const header *h, int64_t bytes, npy_array *a, char *why)
{
    int64_t item = (int64_t)item_size(a->dtype);
    a->rank = h->rank;
    a->count = 1;
    int empty = 0;
    for (int i = 0; i < h->rank; i++)
        empty |= h->shape[i] == 0;
    for (int i = 0; i < h->rank; i++) {
        a->shape[i] = h->shape[i];
        /* Also where another size is 0: the strides are products of the others. */
        if (h->shape[i] && __builtin_mul_overflow(a->count, h->shape[i], &a->count))
            return refuse(why, "shape has more elements than memory has bytes");
    }
    for (int i = 0, step = 0; i < h->rank; i++) {
        int d = h->fortran ? i : h->rank - 1 - i, before = h->fortran ? d - 1 : d + 1;
        a->stride[d] = step++ ? a->stride[before] * (a->shape[before] ? a->shape[before] : 1) : 1;
    }
    if (empty)
        a->count = 0;
    int64_t needed;
    if (__builtin_mul_overflow(a->count, item, &needed) || needed > bytes)
        return refuse(why, "is cut short: the shape needs %lld elements of %lld bytes, the file has %lld bytes of data",
                      (long long)a->count, (long long)item, (long long)bytes);
    if (needed < bytes)
        return refuse(why, "has %lld bytes after the array", (long long)(bytes - needed));
    return 1;
}

static void swap_bytes(unsigned char *data, int64_t count, size_t size)
{
    for (unsigned char *x = data, *end = data + (size_t)count * size; x < end; x += size)
        for (size_t i = 0; i < size / 2; i++) {
            unsigned char byte = x[i];
            x[i] = x[size - 1 - i];
            x[size - 1 - i] = byte;
        }
}

/* The header's text, from malloc; *left is set to the bytes that follow it. */
static char *read_header(FILE *file, int64_t size, int64_t *left, char *why)
{
    unsigned char prefix[PREFIX], digits[4] = { 0 };
    if (size < PREFIX || fread(prefix, 1, PREFIX, file) != PREFIX || memcmp(prefix, "\x93NUMPY", 6)) {
        refuse(why, "is not a .npy file");
        return NULL;
    }
    int major = prefix[6], minor = prefix[7];
    if (major < 1 || major > 3 || minor != 0) {
        refuse(why, "is in version %d.%d of the .npy format; 1.0, 2.0 and 3.0 are known", major, minor);
        return NULL;
    }
    size_t width = major == 1 ? 2 : 4;
    if (fread(digits, 1, width, file) != width) {
        refuse(why, "ends inside its header");
        return NULL;
    }
    uint32_t length = digits[0] | (uint32_t)digits[1] << 8 | (uint32_t)digits[2] << 16 | (uint32_t)digits[3] << 24;
    *left = size - PREFIX - (int64_t)width - (int64_t)length;
    if (*left < 0) {
        refuse(why, "ends inside its header");
        return NULL;
    }
    if (length > MOST_HEADER) {
        refuse(why, "has a header of %u bytes; no plain array needs more than %d", (unsigned)length, MOST_HEADER);
        return NULL;
    }
    char *text = malloc((size_t)length + 1);
    if (!text) {
        refuse(why, "no memory for its header");
        return NULL;
    }
    if (fread(text, 1, length, file) != length || memchr(text, 0, length)) {
        refuse(why, "has a damaged header");
        free(text);
        return NULL;
    }
    text[length] = 0;
    return text;
}

int npy_read(FILE *file, int64_t size, npy_array *array, char why[NPY_WHY])
{
    npy_array a = { 0 };
    header h = { 0 };
    int64_t left;
    int swapped = 0;
    char *text = read_header(file, size, &left, why);
    int good = text && parse_header(text, &h, why) && apply_descr(h.descr, &a, &swapped, why) &&
               apply_shape(&h, left, &a, why);
    free(text);
    if (!good)
        return 0;
    size_t item = item_size(a.dtype), bytes = (size_t)a.count * item;
    if (!(a.data = malloc(bytes ? bytes : 1)))
        return refuse(why, "no memory for its %zu bytes", bytes);
    if (fread(a.data, 1, bytes, file) != bytes) {
        free(a.data);
        return refuse(why, "could not be read to its end");
    }
    if (swapped)
        swap_bytes(a.data, a.count, item);
    *array = a;
    return 1;
}

int npy_load(const char *path, npy_array *array, char why[NPY_WHY])
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return refuse(why, "%s", strerror(errno));
    struct stat facts;
    int good = 0;
    if (fstat(fileno(file), &facts))
        refuse(why, "%s", strerror(errno));
    else if (!S_ISREG(facts.st_mode))
        refuse(why, "is not a regular file");
    else
        good = npy_read(file, facts.st_size, array, why);
    fclose(file);
    return good;
}

void npy_free(npy_array *array)
{
    free(array->data);
    array->data = NULL;
}
