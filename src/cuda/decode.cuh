/* What the kernels for few rows against many keys have in common. Each block has a part of the keys of one head of k, and rows of
 * all heads of q that share it; what the parts give, o before its division, the largest score and the sum, lies in the workspace
 * and is merged in their order by rows.cu. Parts are always the same keys, so that bits do not depend on how many heads or
 * sequences there are. */
#ifndef HEED_CUDA_DECODE_CUH
#define HEED_CUDA_DECODE_CUH

#include "launch.cuh"
#include "scores.cuh"

constexpr int PART = 256;

struct parts_of_keys {
    int count;              /* of a head */
    float *o, *most, *sums; /* [part][batch][head][row], o with Dv numbers each */
    divisor groups, parts, heads, rows;
    float scale_in_cap; /* scale / softcap: a division is a call */
};

/* What a block has; first_row is among those that share a head of k. */
struct own_part {
    int part, hk, b, first_row;
};

__device__ inline own_part own_part_of(const parts_of_keys &of, int rows)
{
    const int number = of.groups.divide(blockIdx.x), head = of.parts.divide(number), b = of.heads.divide(head);
    return { number - head * (int)of.parts.number, head - b * (int)of.heads.number, b,
             (int)(blockIdx.x - number * of.groups.number) * rows };
}

/* Row n of those that share keys: row n % Sq of head n / Sq of the group. */
struct own_row {
    int i, h, low, high; /* low = high = 0: there is no such row */
    int64_t result;      /* where its results are among those of all parts */
};

__device__ inline own_row own_row_of(const args &a, const span &s, const parts_of_keys &of, const own_part &x, int n)
{
    const int g = of.rows.divide(x.first_row + n), i = x.first_row + n - g * a.Sq, h = x.hk * a.G + min(g, a.G - 1);
    own_row own = { i, h, 0, 0, (((int64_t)x.part * a.B + s.b) * a.Hq + h) * a.Sq + i };
    if (g < a.G && i < s.rows)
        band_of_row(a, s, i, own.low, own.high);
    return own;
}

/* forward_decode_mma.cu: 16 bits. */
heed_status heed_cuda_decode_mma(const args &a, const parts_of_keys &parts, const heed_plan *plan, const heed_exec *x);

/* One block for each part of each head of k and each so many rows. */
template <class Kernel>
static heed_status launch_parts(Kernel kernel, int rows, int threads, size_t shared_bytes, const args &a,
                                parts_of_keys parts, const heed_plan *plan, const heed_exec *x)
{
    const int64_t groups = tiles_of((int64_t)a.G * a.Sq, rows), blocks = (int64_t)a.B * a.Hk * parts.count * groups;
    parts.groups = divisor_of(groups), parts.parts = divisor_of(parts.count);
    parts.heads = divisor_of(a.Hk), parts.rows = divisor_of(a.Sq);
    if (blocks == 0 || blocks > INT32_MAX) /* says if it cannot */
        return launch(kernel, blocks, threads, shared_bytes, x, a, parts);
    const dim3 grid((unsigned)blocks);
    return launch_early(kernel, grid, dim3(threads), room_for_one(shared_bytes, grid, plan), plan, x, a, parts);
}

#endif
