/* The CPU kernels, compiled once for each instruction set: HEED_ISA names it, and with it the vector header. */
#include "internal.h"
#include "numbers.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define HEED_PASTE(a, b) a##_##b
#define HEED_PASTE2(a, b) HEED_PASTE(a, b)
#define ISA(name) HEED_PASTE2(name, HEED_ISA)

#if defined(__AVX512BF16__)
#define HEED_DOT 1 /* products of bf16 pairs; bf16 problems only, but for HEED_SPLIT */
#else
#define HEED_DOT 0
#endif
#if defined(__AMX_BF16__) || defined(__AMXBF16__) /* gcc; clang before 17 */
#define HEED_AMX 1                                /* the same pairs, in registers of 16 x 16 */
#else
#define HEED_AMX 0
#endif

#ifndef HEED_SPLIT
#define HEED_SPLIT 0 /* on AMX: each float is the sum of so many bf16, three for fp32 problems and two for fp16 */
#endif

#if defined(__AVX512F__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#else
#include "vec_plain.h"
#endif

#include "ahead.h"
#include "tile.h"
#include "vecmath.h"
#include "pack.h"
#include "parallel.h"
#include "scores.h"
#include "softmax.h"
#include "direct.h"
#include "forward_block.h"
#include "forward.h"
#include "backward_block.h"
#include "gradient.h"
#include "bias_gradient.h"
#include "backward.h"
