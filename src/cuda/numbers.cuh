/* The 16-bit types, as tags and as memory, and the few things that kernels do with them. CUDA's own headers for them have more
 * functions than the compiler reads in the time of a small kernel. */
#ifndef HEED_CUDA_NUMBERS_CUH
#define HEED_CUDA_NUMBERS_CUH

#include <stdint.h>

struct f16 {
    uint16_t bits;
    __device__ explicit operator float() const
    {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
};

struct bf16 {
    uint16_t bits;
    __device__ explicit operator float() const { return __uint_as_float((uint32_t)bits << 16); }
};

/* Either of them: a kernel of this type learns at run time which, so that there is one where there would be two. */
struct either {
    int is_bf16;
};

/* Calls something with the type as it is. Not for a single instruction: those that were there twice, each with a predicate,
 * made kernels of mma.sync 11 to 22% slower. */
template <class T, class Call> __device__ inline void with_type(T type, Call call) { call(type); }
template <class Call> __device__ inline void with_type(either type, Call call)
{
    if (type.is_bf16)
        call(bf16());
    else
        call(f16());
}

/* Rounded to nearest, ties to even. */
template <class T> __device__ inline T rounded(float x);
template <> __device__ inline f16 rounded<f16>(float x)
{
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ inline bf16 rounded<bf16>(float x)
{
    bf16 y;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    const uint32_t all = __float_as_uint(x);
    y.bits = x != x ? 0x7FFF : (uint16_t)((all + 0x7FFF + (all >> 16 & 1)) >> 16);
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
    return y;
}

/* Two numbers as the tensor core takes them, the first in the lower half. */
template <class T> __device__ inline uint32_t pack(float x, float y)
{
    return rounded<T>(x).bits | (uint32_t)rounded<T>(y).bits << 16;
}
template <class T> __device__ inline uint32_t pack(float x, float y, T) { return pack<T>(x, y); }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <> __device__ inline uint32_t pack<f16>(float x, float y)
{
    uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(both) : "f"(x), "f"(y));
    return both;
}
template <> __device__ inline uint32_t pack<bf16>(float x, float y)
{
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(both) : "f"(x), "f"(y));
    return both;
}
__device__ inline uint32_t pack(float x, float y, either type)
{
    uint32_t both;
    asm("{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\ncvt.rn.f16x2.f32 %0, %2, %1;\n@p cvt.rn.bf16x2.f32 %0, %2, %1;\n}"
        : "=&r"(both)
        : "f"(x), "f"(y), "r"(type.is_bf16));
    return both;
}
#endif

/* The same two as floats. */
__device__ inline float2 to_floats(uint32_t two, f16)
{
    float2 x; /* each by itself, so that the compiler may have them at different times */
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(x.x) : "r"(two));
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}" : "=f"(x.y) : "r"(two));
    return x;
}
__device__ inline float2 to_floats(uint32_t two, bf16)
{
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u));
}
__device__ inline float2 to_floats(uint32_t two, either type)
{
    return type.is_bf16 ? to_floats(two, bf16()) : to_floats(two, f16());
}

/* Products of two pairs. */
__device__ inline uint32_t times(uint32_t x, uint32_t y, f16)
{
    uint32_t z;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ inline uint32_t times(uint32_t x, uint32_t y, bf16)
{
    uint32_t z;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000)); /* -0 */
    return z;
}
__device__ inline uint32_t times(uint32_t x, uint32_t y, either type)
{
    return type.is_bf16 ? times(x, y, bf16()) : times(x, y, f16());
}
#endif

/* The larger ones of two pairs of fp16, and whether both of one are at least those of another. */
__device__ inline uint32_t larger(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("max.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ inline bool are_at_least(uint32_t x, uint32_t y)
{
    int are;
    asm("{\n.reg .pred low, high;\nsetp.ge.f16x2 low|high, %1, %2;\nand.pred low, low, high;\nselp.s32 %0, 1, 0, "
        "low;\n}"
        : "=r"(are)
        : "r"(x), "r"(y));
    return are;
}

#endif
