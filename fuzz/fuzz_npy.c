/* Any bytes as a .npy file: they are refused with a reason, or become an array all of whose elements can be read. */
#include "npy.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static size_t item_size(heed_dtype dtype)
{
    return dtype == HEED_F64 ? 8 : dtype == HEED_F32 ? 4 : dtype == HEED_F16 ? 2 : 1;
}

/* The farthest element by shape and strides is the last one of the buffer. */
static void touch_every_element(const npy_array *a)
{
    int64_t last = 0;
    for (int i = 0; i < a->rank; i++)
        last += (a->shape[i] - 1) * a->stride[i];
    if (a->count && last != a->count - 1)
        abort();
    volatile unsigned char sum = 0;
    for (size_t i = 0; i < (size_t)a->count * item_size(a->dtype); i++)
        sum = (unsigned char)(sum + ((const unsigned char *)a->data)[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!size)
        return 0;
    FILE *file = fmemopen((void *)(uintptr_t)data, size, "rb");
    if (!file)
        return 0;
    npy_array a;
    char why[NPY_WHY] = "";
    if (npy_read(file, (int64_t)size, &a, why)) {
        touch_every_element(&a);
        npy_free(&a);
    } else if (!*why || !memchr(why, 0, sizeof why))
        abort(); /* a refusal without a reason */
    fclose(file);
    return 0;
}
