/* Instructions of Turing and Ampere that CUDA C has no name for: one short function each. Shared memory is addressed by
 * 32-bit numbers, from shared_address(). A source that defines HEED_LIKE_TURING does without what Ampere added on every
 * chip. */
#ifndef HEED_CUDA_SM75_CUH
#define HEED_CUDA_SM75_CUH

#if defined(HEED_LIKE_TURING) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800)
#define HEED_TURING 1
#else
#define HEED_TURING 0
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

/* Either 16-bit type: a kernel of this T learns at run time which, so that there is one where there would be two. */
struct either {
    int is_bf16;
};

/* Calls something with the type as it is. Not for a single instruction: those that were there twice, each with a predicate,
 * made kernels of mma.sync 11 to 22% slower. */
template <class T, class Call> __device__ inline void with_type(T type, Call call) { call(type); }
template <class Call> __device__ inline void with_type(either type, Call call)
{
    if (type.is_bf16)
        call(__nv_bfloat16());
    else
        call(__half());
}

__device__ inline uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* Named barriers, 1 to 15, of so many threads, whole warps: sync waits, arrive does not. */
__device__ inline void named_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline void named_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Four 8 x 8 matrices of 16-bit elements. Lane l names row l % 8 of matrix l / 8 by its address and receives elements
 * 2 (l % 4), +1 of row l / 4 of each; transposed: of column l / 4. */
__device__ inline void load_matrices(uint32_t (&x)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
}

__device__ inline void load_matrices_transposed(uint32_t (&x)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
}

/* An 8 x 8 matrix, of which lane l has elements 2 (l % 4), +1 of row l / 4, transposed. */
__device__ inline uint32_t transpose_matrix(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* C += A B for A 16 x 16 and B 16 x 8, with lane l = 4 g + t holding
 *     a  rows g and g + 8 of columns 2t, 2t+1, then of columns 2t+8, 2t+9
 *     b  column g of rows 2t, 2t+1, and of rows 2t+8, 2t+9
 *     c  columns 2t, 2t+1 of row g, and of row g + 8 */
__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half)
{
#if HEED_TURING
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

#if !HEED_TURING
__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

/* C += A B for A 16 x 8 and B 8 x 8 of tf32: fp32 of which 11 bits count. c as above, and
 *     a  rows g and g + 8 of column t, then of column t + 4
 *     b  column g of rows t and t + 4 */
__device__ inline void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Row `row` of rows that lie `step` bytes apart: one instruction, where the compiler would take three. */
__device__ inline const char *row_from(const char *first, int row, int step)
{
    const char *at;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(at) : "r"(row), "r"(step), "l"(first));
    return at;
}

/* 16 bytes of global memory, in the order of the program. */
__device__ inline uint4 load_16(const char *from)
{
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}

__device__ inline uint2 load_8(const char *from)
{
    uint2 x;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
    return x;
}

__device__ inline uint32_t load_4(const char *from)
{
    uint32_t x;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(from));
    return x;
}

__device__ inline void store_4(uint32_t to, uint32_t x)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

/* Brings a line into the second cache. */
__device__ inline void prefetch(const char *from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

/* 16 bytes, which others on the same multiprocessor are likely to want too. */
__device__ inline void copy_async_near(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/* BYTES, 4, 8 or 16, from global to shared memory, the first `real` of them read and the rest zero. On Turing, which
 * cannot copy behind a thread's back, done when the call returns. */
template <int BYTES = 16> __device__ inline void copy_async(uint32_t to, const void *from, int real)
{
#if HEED_TURING
    uint32_t x[4] = { 0, 0, 0, 0 };
    if (real == BYTES && BYTES == 16)
        *(uint4 *)x = *(const uint4 *)from;
    else if (real == BYTES && BYTES == 8)
        *(uint2 *)x = *(const uint2 *)from;
    else
        for (int i = 0; i < BYTES; i++)
            x[i / 4] |= i < real ? (uint32_t)((const uint8_t *)from)[i] << i % 4 * 8 : 0;
    if (BYTES == 16)
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                     : "memory");
    else if (BYTES == 8)
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(x[0]), "r"(x[1]) : "memory");
    else
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x[0]) : "memory");
#else
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(real), "n"(BYTES)
                     : "memory");
#endif
}

/* 16 bytes to shared memory, of zeros where they are not to be had: fewer instructions than a number of bytes. */
__device__ inline void copy_or_clear(uint32_t to, const void *from, bool exists)
{
#if HEED_TURING
    copy_async<16>(to, from, exists ? 16 : 0);
#else
    asm volatile("{\n.reg .pred absent;\nsetp.eq.s32 absent, %2, 0;\n"
                 "cp.async.cg.shared.global [%0], [%1], 16, absent;\n}" ::"r"(to),
                 "l"(from), "r"((int)exists)
                 : "memory");
#endif
}

__device__ inline void commit_copies()
{
#if !HEED_TURING
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING> __device__ inline void wait_copies()
{
#if !HEED_TURING
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

/* A number in global memory by which blocks of a grid take turns: what one wrote before it passed the turn on, another
 * finds after it has seen that. The writes may be other threads', if a barrier came between. */
__device__ inline int see_turn(const int *turn)
{
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(turn) : "memory");
    return x;
}

__device__ inline void pass_turn(int *turn, int to)
{
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(to) : "memory");
}

/* Where several pass it on, in any order. */
__device__ inline void advance_turn(int *turn, int by)
{
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(turn), "r"(by) : "memory");
}

/* The smaller of the two; NaN if either is. */
__device__ inline float min_or_nan(float x, float y)
{
#if !HEED_TURING
    float z;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
#else
    return x > y || y != y ? y : x;
#endif
}

__device__ inline float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float reciprocal_fast(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Over the four neighbouring lanes that share a row of a result. */
__device__ inline float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ inline float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

constexpr float LOG2E = 1.4426950408889634f;

/* Two numbers as the tensor core takes them, the first in the lower half. */
template <class T> __device__ inline uint32_t pack(float x, float y);
template <> __device__ inline uint32_t pack<__half>(float x, float y)
{
    __half2 both = __floats2half2_rn(x, y);
    return *(uint32_t *)&both;
}
template <> __device__ inline uint32_t pack<__nv_bfloat16>(float x, float y)
{
    __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
    return *(uint32_t *)&both;
}
template <class T> __device__ inline uint32_t pack(float x, float y, T) { return pack<T>(x, y); }
#if !HEED_TURING
__device__ inline uint32_t pack(float x, float y, either type)
{
    uint32_t both;
    asm("{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\n"
        "cvt.rn.f16x2.f32 %0, %2, %1;\n@p cvt.rn.bf16x2.f32 %0, %2, %1;\n}"
        : "=&r"(both)
        : "f"(x), "f"(y), "r"(type.is_bf16));
    return both;
}
#endif

/* The same two as floats. */
__device__ inline float2 to_floats(uint32_t two, __half) { return __half22float2(*(const __half2 *)&two); }
__device__ inline float2 to_floats(uint32_t two, __nv_bfloat16)
{
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u));
}
__device__ inline float2 to_floats(uint32_t two, either type)
{
    return type.is_bf16 ? to_floats(two, __nv_bfloat16()) : to_floats(two, __half());
}

#endif
