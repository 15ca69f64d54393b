/* Dropout in the Hopper kernels. Of 64 x 64 scores a warp has 16 rows and needs 128 Philox, four for each lane. Each lane draws
 * other four, of eight keys each, while a product is on its way, and then lanes exchange bits until each has those of its own
 * scores, which are one word. Of 64 x 32 scores it is half as many. */
#ifndef HEED_CUDA_DROPOUT_SM90_CUH
#define HEED_CUDA_DROPOUT_SM90_CUH

#include "scores.cuh"

/* Whether eight neighbouring keys from a multiple of eight on are those of one Philox. */
__device__ inline bool are_eights_whole(const args &a) { return a.r_step == 1 && a.r0 % 8 == 0; }

/* Both halves of two words added, neither into the other. */
__device__ inline uint32_t add_halves(uint32_t x, uint32_t y)
{
    uint32_t sums;
    asm("add.u16x2 %0, %1, %2;" : "=r"(sums) : "r"(x), "r"(y));
    return sums;
}

/* Four bytes of x and y, which have numbers 0 to 3 and 4 to 7; with 8 more, the byte's highest bit throughout. */
__device__ inline uint32_t pick_bytes(uint32_t x, uint32_t y, uint32_t numbers)
{
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(x), "r"(y), "r"(numbers));
    return bytes;
}

/* The highest bits of both halves: whether the half is no less than `below`, that is, whether taking it away borrows nothing. */
__device__ inline uint32_t reach(uint32_t two, uint32_t below)
{
    const uint32_t bound = below * 0x10001, difference = add_halves(two, (0x10000 - below) * 0x10001);
    return (two & ~bound) | (~difference & (two | ~bound));
}

/* Two Philox x and y: sets bit first + 16 e + 8 i + n where number 2 n + e of x (i = 0) or y is no less than drop_below. */
__device__ inline void keep_both(uint32_t &kept, int first, const uint4 &x, const uint4 &y, uint32_t drop_below)
{
    const uint32_t of_x[4] = { x.x, x.y, x.z, x.w }, of_y[4] = { y.x, y.y, y.z, y.w };
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const uint32_t four = pick_bytes(reach(of_x[n], drop_below), reach(of_y[n], drop_below), 0xFBD9);
        kept |= four & 0x01010101u << (first + n);
    }
}

/* The numbers of two eights of keys and two rows: bit 16 e + 8 i + 4 r + n is set where key 2 n + e of eight i is kept in row
 * r. */
__device__ inline uint32_t draw_four(const drop_source &source, const uint32_t (&eights)[2],
                                     const drop_source::row_part (&rows)[2], uint32_t drop_below)
{
    const drop_source::keys_part keys[2] = { source.of_keys(eights[0]), source.of_keys(eights[1]) };
    uint32_t kept = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint4 x = source.numbers<true>(keys[0], rows[r]), y = source.numbers<true>(keys[1], rows[r]);
        keep_both(kept, 4 * r, x, y, drop_below);
    }
    return kept;
}

/* Those of one eight and two rows: bit 16 e + 8 r + n is set where key 2 n + e is kept in row r. */
__device__ inline uint32_t draw_two(const drop_source &source, uint32_t eight, const drop_source::row_part (&rows)[2],
                                    uint32_t drop_below)
{
    const drop_source::keys_part keys = source.of_keys(eight);
    uint32_t kept = 0;
    keep_both(kept, 0, source.numbers<true>(keys, rows[0]), source.numbers<true>(keys, rows[1]), drop_below);
    return kept;
}

/* A step of a transposition: `shift` is one bit of the numbers of bits, `without` those that do not have it, and `lanes` is one
 * of the lanes' numbers. Bits that have the one and not the other change places. */
__device__ inline uint32_t exchange_bits(uint32_t x, int lanes, int shift, uint32_t without)
{
    const int up = (threadIdx.x & lanes) / lanes * shift;
    const uint32_t own = without << up, other = __shfl_xor_sync(~0u, x, lanes);
    return (x & own) | (__funnelshift_l(other, other, shift - 2 * up) & ~own);
}

#endif
