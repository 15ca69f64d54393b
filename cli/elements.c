/* One number of any dtype, to and from double. fp16 and bf16 are the same format with other field widths, so one pair
 * of functions serves both; they are exact and round once, and need not be fast. */
#include "cli.h"

#include <math.h>

typedef struct half_format {
    int exponent_bits, fraction_bits;
} half_format;
static const half_format fp16 = { 5, 10 }, bf16 = { 8, 7 };

static double widen(uint16_t half, half_format f)
{
    int bias = (1 << (f.exponent_bits - 1)) - 1, top = (1 << f.exponent_bits) - 1;
    int exponent = half >> f.fraction_bits & top, fraction = half & ((1 << f.fraction_bits) - 1);
    double magnitude;
    if (exponent == top)
        magnitude = fraction ? NAN : INFINITY;
    else if (exponent)
        magnitude = ldexp((1 << f.fraction_bits) + fraction, exponent - bias - f.fraction_bits);
    else
        magnitude = ldexp(fraction, 1 - bias - f.fraction_bits);
    return half & 0x8000 ? -magnitude : magnitude;
}

static uint16_t narrow(double x, half_format f)
{
    int bias = (1 << (f.exponent_bits - 1)) - 1, infinity = ((1 << f.exponent_bits) - 1) << f.fraction_bits;
    int sign = signbit(x) ? 0x8000 : 0, exponent;
    if (isnan(x))
        return (uint16_t)(sign | infinity | 1 << (f.fraction_bits - 1));
    x = fabs(x);
    frexp(x, &exponent);
    exponent--; /* now 2^exponent <= x < 2^(exponent+1) */
    if (x == 0)
        return (uint16_t)sign;
    if (isinf(x) || exponent > bias)
        return (uint16_t)(sign | infinity);
    if (exponent < 1 - bias)
        exponent = 1 - bias;
    /* The leading bit of units, which the format does not store, and a carry of the rounding both add to the exponent
     * field: it may so become the one of infinity, or leave the subnormals. */
    int units = (int)nearbyint(ldexp(x, f.fraction_bits - exponent));
    return (uint16_t)(sign | (((exponent + bias - 1) << f.fraction_bits) + units));
}

size_t element_size(heed_dtype dtype)
{
    switch (dtype) {
    case HEED_F32: return 4;
    case HEED_F16: return 2;
    case HEED_BF16: return 2;
    case HEED_F64: return 8;
    case HEED_BOOL: return 1;
    }
    return 0;
}

const char *dtype_name(heed_dtype dtype)
{
    switch (dtype) {
    case HEED_F32: return "fp32";
    case HEED_F16: return "fp16";
    case HEED_BF16: return "bf16";
    case HEED_F64: return "fp64";
    case HEED_BOOL: return "bool";
    }
    return "?";
}

double dtype_roundoff(heed_dtype dtype)
{
    switch (dtype) {
    case HEED_F32: return 0x1p-24;
    case HEED_F16: return 0x1p-11;
    case HEED_BF16: return 0x1p-8;
    case HEED_F64: return 0x1p-53;
    case HEED_BOOL: return 0;
    }
    return 0;
}

double element_load(const void *data, heed_dtype dtype, int64_t index)
{
    switch (dtype) {
    case HEED_F32: return ((const float *)data)[index];
    case HEED_F16: return widen(((const uint16_t *)data)[index], fp16);
    case HEED_BF16: return widen(((const uint16_t *)data)[index], bf16);
    case HEED_F64: return ((const double *)data)[index];
    case HEED_BOOL: return ((const uint8_t *)data)[index] != 0;
    }
    return 0;
}

void element_store(void *data, heed_dtype dtype, int64_t index, double x)
{
    switch (dtype) {
    case HEED_F32: ((float *)data)[index] = (float)x; break;
    case HEED_F16: ((uint16_t *)data)[index] = narrow(x, fp16); break;
    case HEED_BF16: ((uint16_t *)data)[index] = narrow(x, bf16); break;
    case HEED_F64: ((double *)data)[index] = x; break;
    case HEED_BOOL: ((uint8_t *)data)[index] = x != 0; break;
    }
}

double tensor_at(const heed_tensor *t, int64_t b, int64_t h, int64_t i, int64_t c)
{
    return element_load(t->data, t->dtype, b * t->stride[0] + h * t->stride[1] + i * t->stride[2] + c * t->stride[3]);
}
