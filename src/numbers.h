/* Numbers in memory: one element of any dtype to and from double, exact on the way in, rounded to nearest even on the
 * way out. For code that is read rather than timed; the kernels convert whole vectors. */
#ifndef HEED_NUMBERS_H
#define HEED_NUMBERS_H

#include "heed.h"

#include <math.h>
#include <string.h>

static inline float heed_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 0x3FFu, bits;
    if (exponent == 31)
        bits = sign | 0x7F800000u | fraction << 13;
    else if (exponent)
        bits = sign | (exponent + 112) << 23 | fraction << 13;
    else {
        float f = (float)fraction * 0x1p-24f; /* zero and the subnormals */
        return sign ? -f : f;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline float heed_bf16_to_f32(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint16_t heed_f32_to_bf16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f)
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

static inline uint16_t heed_f32_to_f16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    bits &= 0x7FFFFFFFu;
    if (bits > 0x7F800000u)
        return (uint16_t)(sign | 0x7E00u);
    if (bits >= 0x477FF000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7C00u);
    if (bits < 0x38800000u) { /* below 2^-14: subnormal, in steps of 2^-24 */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        return (uint16_t)(sign | (uint16_t)lrintf(magnitude * 0x1p24f));
    }
    bits -= 112u << 23;
    return (uint16_t)(sign | (uint16_t)((bits + 0xFFFu + (bits >> 13 & 1u)) >> 13));
}

/* Narrowing from double goes through float; to keep that from rounding twice the float is rounded to odd. */
static inline float heed_round_to_odd(double x)
{
    float f = (float)x;
    if ((double)f == x || f != f || isinf(f))
        return f;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (!(bits & 1u)) { /* inexact and even: the other neighbour of x is odd */
        bits += (fabs((double)f) < fabs(x)) ? 1u : (uint32_t)-1;
        memcpy(&f, &bits, 4);
    }
    return f;
}

static inline double heed_load(const void *data, heed_dtype dtype, int64_t index)
{
    switch (dtype) {
    case HEED_F32: return ((const float *)data)[index];
    case HEED_F16: return heed_f16_to_f32(((const uint16_t *)data)[index]);
    case HEED_BF16: return heed_bf16_to_f32(((const uint16_t *)data)[index]);
    case HEED_F64: return ((const double *)data)[index];
    case HEED_BOOL: return ((const uint8_t *)data)[index] != 0;
    }
    return 0;
}

static inline void heed_store(void *data, heed_dtype dtype, int64_t index, double x)
{
    switch (dtype) {
    case HEED_F32: ((float *)data)[index] = (float)x; break;
    case HEED_F16: ((uint16_t *)data)[index] = heed_f32_to_f16(heed_round_to_odd(x)); break;
    case HEED_BF16: ((uint16_t *)data)[index] = heed_f32_to_bf16(heed_round_to_odd(x)); break;
    case HEED_F64: ((double *)data)[index] = x; break;
    case HEED_BOOL: ((uint8_t *)data)[index] = x != 0; break;
    }
}

#endif /* HEED_NUMBERS_H */
