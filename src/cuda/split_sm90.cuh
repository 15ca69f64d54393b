/* Products of split operands (split.cuh) by Hopper's tensor core, over tiles of 64 columns:
 *
 *     S = A B^T   A and B in shared memory: a tile of 2 HEAD columns of fp16, hi and then lo, where lo carries 2^11
 *     T = P B     P in registers, where lo carries nothing
 *
 * Small products come first, so that only the last third of the additions rounds at full size, and one set of sums is
 * enough: the small part of S is multiplied by 2^-11 before the large one joins it, and what meets Blo is Phi 2^-11.
 *
 * PARTS: 2; or 1 where hi alone will do, which has the 11 bits of tf32, and by the powers of two its range: HEED_TF32. */
#ifndef HEED_CUDA_SPLIT_SM90_CUH
#define HEED_CUDA_SPLIT_SM90_CUH

#include "split.cuh"
#include "tile_sm90.cuh"

/* The shifts of the tiles to come, one a lane: asked for one by one, each would hold up its tile for as long as memory
 * takes. Of `count` tiles those from i on; at(i): where that of tile i is. The first are asked for by themselves, and early. */
struct shifts_ahead {
    int both;
    template <class Where> __device__ void ask(int i, int count, Where at)
    {
        both = *(const int *)at(min(i + (int)threadIdx.x % 32, count - 1));
    }
    template <class Where> __device__ shift get(int i, int count, Where at)
    {
        if (i && i % 32 == 0)
            ask(i, count, at);
        const int now = __shfl_sync(~0u, both, i % 32);
        return { (short)now, (short)(now >> 16) };
    }
};

/* S += A B^T, of one part of A, of A_ROWS rows, and one of B, of 2 N, named by where they begin. keep = 0: S = A B^T. */
template <int HEAD, int A_ROWS, int N>
__device__ inline void multiply_parts(float (&S)[N], uint64_t A, uint64_t B, int keep)
{
#pragma unroll
    for (int k = 0; k < HEAD / 16; k++)
        wgmma<__half, 2 * N>::template shared<0, 0>(S, on(A, k / 4 * A_ROWS * 128 + k % 4 * 32),
                                                    on(B, k / 4 * N * 256 + k % 4 * 32), k ? 1 : keep);
}

/* S = Alo Bhi + Ahi Blo. */
template <int HEAD, int A_ROWS, int N> __device__ inline void multiply_small(float (&S)[N], uint64_t A, uint64_t B)
{
    multiply_parts<HEAD, A_ROWS>(S, on(A, HEAD / 64 * A_ROWS * 128), B, 0);
    multiply_parts<HEAD, A_ROWS>(S, A, on(B, HEAD / 64 * N * 256), 1);
}

/* So many columns as a left operand in registers. */
template <int COLUMNS> using operand_of = uint32_t[COLUMNS / 16][4];
typedef operand_of<SPLIT_ROWS> operand;

/* 64 rows of 64 columns of A in registers, and how they, or the name of a tile, come from an address. */
template <int PARTS> struct held_rows {
    operand part[PARTS];
};

__device__ inline void take_rows(uint64_t &A, uint32_t address) { A = tile_at(address); }

template <int PARTS> __device__ inline void take_rows(held_rows<PARTS> &A, uint32_t address)
{
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16, half = threadIdx.x / 16 % 2;
#pragma unroll
    for (int i = 0; i < PARTS; i++)
#pragma unroll
        for (int k = 0; k < SPLIT_ROWS / 16; k++)
            load_matrices(A.part[i][k], address + (i * SPLIT_ROWS + row) * 128 + ((2 * k + half ^ row % 8) << 4));
}

__device__ inline void multiply_held(float (&S)[SPLIT_ROWS / 2], const operand &A, uint64_t B, int keep)
{
#pragma unroll
    for (int k = 0; k < SPLIT_ROWS / 16; k++)
        wgmma<__half, SPLIT_ROWS>::template registers<0>(S, A[k], on(B, k * 32), k ? 1 : keep);
}

template <int HEAD, int A_ROWS, int PARTS>
__device__ inline void multiply_parts(float (&S)[SPLIT_ROWS / 2], const held_rows<PARTS> &A, uint64_t B, int keep)
{
    multiply_held(S, A.part[0], B, keep);
}

template <int HEAD, int A_ROWS, int PARTS>
__device__ inline void multiply_small(float (&S)[SPLIT_ROWS / 2], const held_rows<PARTS> &A, uint64_t B)
{
    multiply_held(S, A.part[PARTS - 1], B, 0);
    multiply_held(S, A.part[0], on(B, SPLIT_ROWS * 128), 1);
}

template <int N> __device__ inline void lower(float (&S)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        S[i] *= SMALL;
}

__device__ inline void join(float (&S)[SPLIT_ROWS / 2], const float (&small)[SPLIT_ROWS / 2])
{
#pragma unroll
    for (int i = 0; i < SPLIT_ROWS / 2; i++)
        S[i] = fmaf(small[i], SMALL, S[i]);
}

template <int K, int N> __device__ inline void round_weights(uint32_t (&hi)[K][4], const float (&P)[N])
{
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        hi[i / 4][i % 4] = pack<__half>(P[2 * i], P[2 * i + 1]);
}

/* What rounding has left. */
template <int K, int N>
__device__ inline void split_rest(const uint32_t (&hi)[K][4], uint32_t (&lo)[K][4], const float (&P)[N])
{
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const float2 back = __half22float2(*(const __half2 *)&hi[i / 4][i % 4]);
        lo[i / 4][i % 4] = pack<__half>(P[2 * i] - back.x, P[2 * i + 1] - back.y);
    }
}

template <int K, int N>
__device__ inline void split_weights(uint32_t (&hi)[K][4], uint32_t (&lo)[K][4], const float (&P)[N])
{
    round_weights(hi, P);
    split_rest(hi, lo, P);
}

/* The same for rows that may hold nothing but small numbers, whose lo fp16 would not have: these are multiplied by
 * 2^raised. */
template <int K, int N>
__device__ inline void split_weights(uint32_t (&hi)[K][4], uint32_t (&lo)[K][4], float (&P)[N], int (&raised)[2])
{
    round_weights(hi, P);
    __half2 most[2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const __half2 two = *(const __half2 *)&hi[i / 4][i % 4];
        most[i % 2] = i < 2 ? two : __hmax2(most[i % 2], two);
    }
    raised[0] = raised[1] = 0;
    const __half2 both = __hmax2(__lows2half2(most[0], most[1]), __highs2half2(most[0], most[1]));
    if (__any_sync(~0u, !__hbge2(both, __float2half2_rn(0.5f)))) { /* a lane with a quarter of such a row, at least */
        raise_rows((float(&)[1][N / 4][4]) P, raised);
        round_weights(hi, P);
    }
    split_rest(hi, lo, P);
}

/* Phi 2^-11. */
template <int K> __device__ inline void lower(uint32_t (&less)[K][4], const uint32_t (&hi)[K][4])
{
#pragma unroll
    for (int i = 0; i < K * 4; i++) {
        const __half2 two = __hmul2(*(const __half2 *)&hi[i / 4][i % 4], __float2half2_rn(SMALL));
        less[i / 4][i % 4] = *(const uint32_t *)&two;
    }
}

/* T += Phi 2^-11 Blo + Phi Bhi; of one part T = Phi Bhi. The last rows of B first: where weights are largest in the first ones, as
 * those of a causal key are, each step would cut off a sum that is large already. */
template <int HEAD, int PARTS>
__device__ inline void multiply_large(float (&T)[HEAD / 2], const operand &hi, const operand &less, uint64_t B)
{
    if (PARTS == 2)
        multiply_columns<__half, HEAD, SPLIT_ROWS>(T, less, on(B, HEAD / 64 * SPLIT_ROWS * 128));
#pragma unroll
    for (int k = SPLIT_ROWS / 16 - 1; k >= 0; k--)
        wgmma<__half, HEAD>::template registers<1>(T, hi[k], on(B, k * 2048),
                                                   PARTS == 2 || k < SPLIT_ROWS / 16 - 1 ? 1 : 0);
}

struct nothing {
    __device__ void operator()() const {}
};

/* ---- Whole products ---------------------------------------------------------------------------------------------- */

/* S = A B^T, and waits for it: with the sums of multiply_both(), so that a score is the same to the last bit wherever it
 * is computed. What it is off by then cancels in P = exp(S - lse). meanwhile(): scalars that are needed with S. */
template <int HEAD, int A_ROWS, int PARTS, int N, class Rows, class Work = nothing>
__device__ inline void multiply_scores(float (&S)[N], const Rows &A, uint64_t B, Work meanwhile = {})
{
    wgmma_fence();
    if (PARTS == 2) {
        multiply_small<HEAD, A_ROWS>(S, A, B);
        wgmma_commit();
        meanwhile();
        wgmma_wait<0>();
        lower(S);
        wgmma_fence();
    }
    if constexpr (HEAD > SCORE_COLUMNS) {
        float rest[N];
        constexpr int BOXES = SCORE_COLUMNS / 64;
        multiply_parts<SCORE_COLUMNS, A_ROWS>(S, A, B, 1);
        multiply_parts<HEAD - SCORE_COLUMNS, A_ROWS>(rest, on(A, BOXES * A_ROWS * 128), on(B, BOXES * N * 256), 0);
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < N; i++)
            S[i] += rest[i];
        return;
    }
    multiply_parts<HEAD, A_ROWS>(S, A, B, PARTS == 2);
    wgmma_commit();
    if (PARTS == 1)
        meanwhile();
    wgmma_wait<0>();
}

/* The same with small and large sums apart, to be joined, and without a wait in between. */
template <int HEAD, int A_ROWS, int PARTS>
__device__ inline void start_apart(float (&S)[SPLIT_ROWS / 2], float (&small)[SPLIT_ROWS / 2], uint64_t A, uint64_t B)
{
    wgmma_fence();
    if (PARTS == 2)
        multiply_small<HEAD, A_ROWS>(small, A, B);
    multiply_parts<HEAD, A_ROWS>(S, A, B, 0);
    wgmma_commit();
}

template <int HEAD, int A_ROWS, int PARTS, class Work>
__device__ inline void multiply_apart(float (&S)[SPLIT_ROWS / 2], uint64_t A, uint64_t B, Work meanwhile)
{
    float small[SPLIT_ROWS / 2];
    start_apart<HEAD, A_ROWS, PARTS>(S, small, A, B);
    meanwhile();
    wgmma_wait<0>();
    if (PARTS == 2)
        join(S, small);
}

/* T = P C, and waits for it. */
template <int HEAD, int PARTS>
__device__ inline void multiply_values(float (&T)[HEAD / 2], const operand &hi, const operand &lo, uint64_t C)
{
    operand less;
    lower(less, hi);
    wgmma_fence();
    if (PARTS == 2)
        multiply_columns<__half, HEAD, SPLIT_ROWS>(T, lo, C, 0);
    multiply_large<HEAD, PARTS>(T, hi, less, C);
    wgmma_commit();
    wgmma_wait<0>();
}

/* The same without a place for Phi 2^-11: lo is spoilt. */
template <int HEAD, int PARTS>
__device__ inline void multiply_in_turn(float (&T)[HEAD / 2], const operand &hi, operand &lo, uint64_t C)
{
    wgmma_fence();
    if (PARTS == 2) {
        multiply_columns<__half, HEAD, SPLIT_ROWS>(T, lo, C, 0);
        wgmma_commit();
        wgmma_wait<0>();
        lower(lo, hi);
        wgmma_fence();
    }
    multiply_large<HEAD, PARTS>(T, hi, lo, C);
    wgmma_commit();
    wgmma_wait<0>();
}

/* The same where T is too wide to be in registers beside what it is added to: 64 columns at a time, PANELS of them from `first`
 * on, to add(panel, T). */
template <int HEAD, int PANELS, int K, class Add>
__device__ inline void multiply_by_panels(const uint32_t (&hi)[K][4], const uint32_t (&lo)[K][4], uint64_t C, int first,
                                          Add add)
{
    constexpr int BYTES = K * 16 * 128;
    uint32_t less[K][4];
    lower(less, hi);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        float T[32];
        const uint64_t large = on(C, (first + panel) * BYTES);
        wgmma_fence();
        multiply_columns<__half, 64, K * 16>(T, lo, large, 0);
        multiply_columns<__half, 64, K * 16>(T, less, on(large, HEAD / 64 * BYTES));
#pragma unroll
        for (int k = K - 1; k >= 0; k--)
            wgmma<__half, 64>::template registers<1>(T, hi[k], on(large, k * 2048), 1);
        wgmma_commit();
        wgmma_wait<0>();
        add(panel, T);
    }
}

/* Both, and waits for S. T is still under way. There are no registers for large and small sums apart, so there are waits
 * in between. lo is spoilt. before(): what has to be done with the last T, under the first products of S. meanwhile():
 * scalars that are needed with S, and would hold it up when it is there. */
template <int HEAD, int A_ROWS, int PARTS, class Rows, class Before = nothing, class Work = nothing>
__device__ inline void multiply_both(float (&S)[SPLIT_ROWS / 2], const Rows &A, uint64_t B, float (&T)[HEAD / 2],
                                     const operand &hi, operand &lo, uint64_t C, Before before = {},
                                     Work meanwhile = {})
{
    if (PARTS == 1)
        before();
    wgmma_fence();
    if (PARTS == 2) {
        multiply_small<HEAD, A_ROWS>(S, A, B);
        wgmma_commit();
        before();
        wgmma_fence();
        multiply_columns<__half, HEAD, SPLIT_ROWS>(T, lo, C, 0);
        wgmma_commit();
        wgmma_wait<1>();
        lower(S);
        wgmma_fence();
    }
    multiply_parts<HEAD, A_ROWS>(S, A, B, PARTS == 2);
    wgmma_commit();
    if (PARTS == 2) {
        wgmma_wait<1>();
        lower(lo, hi);
        wgmma_fence();
    }
    multiply_large<HEAD, PARTS>(T, hi, lo, C);
    wgmma_commit();
    meanwhile();
    wgmma_wait<1>();
}

/* Both in the other order, and waits for T. S is still under way. Of two warpgroups, one in either order, one reads two
 * operands from shared memory while the other reads one: two at a time are all that it can give. */
template <int HEAD, int A_ROWS, int PARTS, class Rows>
__device__ inline void multiply_both_values_first(float (&S)[SPLIT_ROWS / 2], const Rows &A, uint64_t B,
                                                  float (&T)[HEAD / 2], const operand &hi, operand &lo, uint64_t C)
{
    wgmma_fence();
    if (PARTS == 2) {
        multiply_columns<__half, HEAD, SPLIT_ROWS>(T, lo, C, 0);
        wgmma_commit();
        multiply_small<HEAD, A_ROWS>(S, A, B);
        wgmma_commit();
        wgmma_wait<1>();
        lower(lo, hi);
        wgmma_fence();
    }
    multiply_large<HEAD, PARTS>(T, hi, lo, C);
    wgmma_commit();
    if (PARTS == 2) {
        wgmma_wait<1>();
        lower(S);
        wgmma_fence();
    }
    multiply_parts<HEAD, A_ROWS>(S, A, B, PARTS == 2);
    wgmma_commit();
    wgmma_wait<1>();
}

/* ---- Splitting where they are met once --------------------------------------------------------------------------- */

/* 64 rows of X as the copy engine has brought them, of which so many are there, become hi and lo in their place. By a
 * warpgroup. As they came each has 32 columns in a panel of 128 bytes. */
template <int HEAD>
__device__ inline void split_in_place(char *X, int rows, unsigned (&most)[4], shift &found, int barrier)
{
    constexpr int EACH = HEAD / 2, PANEL = SPLIT_ROWS * 128;
    const unsigned thread = (unsigned)thread_anew() % 128, row = thread % 64, half = thread / 64;
    char *const first = X + row * 128;
    const auto chunk = [&](unsigned n) { return first + n / 8 * PANEL + (n % 8 ^ row % 8) * 16; };
    float x[EACH], most_of[4] = {}; /* or NaN */
#pragma unroll
    for (int i = 0; i < EACH; i += 4)
        *(float4 *)&x[i] = *(const float4 *)chunk(half * (EACH / 4) + i / 4);
    if ((int)row >= rows)
#pragma unroll
        for (int i = 0; i < EACH; i++)
            x[i] = 0.0f;
    const auto take = [](float &most, float y) { asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(y)); };
#pragma unroll
    for (int i = 0; i < EACH; i++)
        take(most_of[i % 4], fabsf(x[i]));
    take(most_of[0], most_of[1]), take(most_of[2], most_of[3]), take(most_of[0], most_of[2]);
    const unsigned of_warp = __reduce_max_sync(~0u, __float_as_uint(most_of[0]));
    if (thread % 32 == 0)
        most[thread / 32] = of_warp;
    named_sync(barrier, 128);
    const unsigned bits = max(max(most[0], most[1]), max(most[2], most[3]));
    const int s = shift_of(bits);
    multiply_by_power(x, s);
#pragma unroll
    for (int i = 0; i < EACH; i += 8) {
        uint32_t hi[4], lo[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            split_pair(x[i + 2 * e], x[i + 2 * e + 1], hi[e], lo[e]);
        char *const to = chunk(half * (EACH / 8) + i / 8);
        *(uint4 *)to = make_uint4(hi[0], hi[1], hi[2], hi[3]);
        *(uint4 *)(to + HEAD / 64 * PANEL) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    }
    if (thread == 0)
        found = { (short)s, (short)(bits >= 0x7F800000u) };
    fence_async();
    named_sync(barrier, 128);
}

/* Whether the copy engine can take rows of fp32 as they are: see plan.c. */
inline bool is_whole(const heed_tensor &x, const view &t)
{
    bool whole = t.vector && (t.stride[2] != 0 || x.shape[2] <= 1);
    for (int d = 0; d < 3; d++)
        whole = whole && t.stride[d] >= 0 && t.stride[d] < (int64_t)1 << 38;
    return whole;
}

/* These to the copy engine: a row is one of twice as many numbers of 16 bits. */
inline heed_status whole_map(tensor_map *m, view t, int width, int64_t rows, int heads, int batches, int box_rows)
{
    t.dtype = HEED_F16;
    for (int64_t &stride : t.stride)
        stride *= 2;
    return heed_tensor_map(m, t, 2 * width, rows, heads, batches, box_rows);
}

/* A split tensor to the copy engine: so many parts of `head` columns of fp16. rows: of each head, those that are there. */
inline heed_status split_map(tensor_map *m, const split_rows &x, int head, int parts, int64_t rows, int batches,
                             int box_rows)
{
    const int64_t row = 2 * head, all = x.head_rows * row;
    const view t = { x.rows, { x.heads * all, all, row, 1 }, HEED_F16, 1 };
    return heed_tensor_map(m, t, parts * head, rows, x.heads, batches, box_rows);
}

#endif
