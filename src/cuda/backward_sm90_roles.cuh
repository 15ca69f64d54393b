/* The Hopper backward's dK and dV by two warpgroups in different roles, for head sizes whose dK and dV do not both fit
 * into the registers of one: the first computes S, P and dV, the second dP, dS and dK, of the same 64 keys; P passes
 * through shared memory. */
#ifndef HEED_CUDA_BACKWARD_SM90_ROLES_CUH
#define HEED_CUDA_BACKWARD_SM90_ROLES_CUH

#include "backward_sm90.cuh"

/* Where dK (which = 0) or dV of a group of 64 keys goes, and how many of these there are. */
struct key_rows {
    int64_t at;
    int rows;
};

__device__ inline key_rows rows_of(const args &a, const piece &w, int which, int group)
{
    return { row_at(which ? a.d_v : a.d_k, w.batch, w.head, a.col + (w.memory_row + group * 64) * a.col_step),
             w.rows - group * 64 };
}

template <class T, class C>
__device__ inline void store_keys(const float (&Y)[C::D / 2], int which, const args &a, const key_rows &to)
{
    const view &t = which ? a.d_v : a.d_k;
    const float scale = !which ? a.scale : C::DROPS ? a.keep_scale : 1.0f;
    if (t.data)
        store_result<T, C>(Y, scale, t, which ? a.Dv : a.D, a.accumulate, to.rows, to.at, t.stride[2] * a.col_step);
}

/* The first role meets one tile of queries. dV of a tile goes before S of the next, so that dO makes room early. first:
 * there is no tile before. */
template <class T, class C>
__device__ inline void meet_values(float (&dV)[C::D / 2], uint32_t (&P)[COLUMNS / 16][4], backward_shared<C> &s,
                                   const score_rule &rule, const int2 *range, int slot, int tile, bool first)
{
    const uint64_t K = tile_at(shared_address(s.own[0][0]) + slot * (int)sizeof(s.own[0]));
    float S[COLUMNS / 2];
    if (!first) {
        wait_second(s, tile - 1);
        wgmma_fence();
        multiply_columns<T, C::D, COLUMNS>(dV, P, second_tile(s, tile - 1)); /* dV += P^T dO, of the tile before */
        wgmma_commit();
    }
    wait_first(s, tile);
    wgmma_fence();
    multiply_rows<T, C::D, C::ROWS, COLUMNS>(S, K, first_tile(s, tile)); /* S^T = K Q^T */
    wgmma_commit();
    if (!first) {
        wgmma_wait<1>();
        release_second(s, tile - 1);
    }
    const int care = uniform(s.care[tile % C::FIRST][0]);
    wgmma_wait<0>();
    probabilities_by_column<C::CAPS>(S, s.L[tile % C::FIRST], rule, care, range);
    release_first(s, tile);
    pack_rows<T, COLUMNS>(P, S);
    wait_to_pass(s, tile);
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++)
        s.pass[tile % 2][k * 128 + threadIdx.x % 128] = make_uint4(P[k][0], P[k][1], P[k][2], P[k][3]);
    release(&s.pass_full[tile % 2]);
}

template <class T, class C> __device__ inline void values_role(const backward_job &p, backward_shared<C> &s)
{
    const args &a = p.a;
    int tile = 0;
    meet_pieces<C>(s, [&](const piece &w, int n) {
        const int slot = n % C::SLOTS;
        const int all = uniform(w.tiles) * a.G;
        float dV[C::D / 2];
        uint32_t P[COLUMNS / 16][4];
        const int2 *const range = &s.range[n % C::WORKS][threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4];
        clear(dV);
#pragma unroll 1
        for (int j = 0; j < all; j++, tile++)
            meet_values<T, C>(dV, P, s, p.rule, range, slot, tile, j == 0);
        const key_rows to = rows_of(a, w, 1, 0);
        release(&s.own_free[slot]); /* K is this warpgroup's alone, and not needed for what is left */
        if (all) {
            wait_second(s, tile - 1);
            wgmma_fence();
            multiply_columns<T, C::D, COLUMNS>(dV, P, second_tile(s, tile - 1));
            wgmma_commit();
            wgmma_wait<0>();
            release_second(s, tile - 1);
        }
        store_keys<T, C>(dV, 1, a, to);
    });
}

/* The second role: dK of a tile goes before dP of the next, so that Q makes room early. */
template <class T, class C>
__device__ inline void meet_keys(float (&dK)[C::D / 2], uint32_t (&dS)[COLUMNS / 16][4], backward_shared<C> &s,
                                 const score_rule &rule, int slot, int tile, bool first)
{
    const uint64_t V = tile_at(shared_address(s.own[0][1]) + slot * (int)sizeof(s.own[0]));
    float dP[COLUMNS / 2];
    uint32_t P[COLUMNS / 16][4];
    if (!first) {
        wgmma_fence();
        multiply_columns<T, C::D, COLUMNS>(dK, dS, first_tile(s, tile - 1)); /* dK += dS^T Q, of the tile before */
        wgmma_commit();
    }
    wait_second(s, tile);
    wgmma_fence();
    multiply_rows<T, C::D, C::ROWS, COLUMNS>(dP, V, second_tile(s, tile)); /* dP^T = V dO^T */
    wgmma_commit();
    if (!first) {
        wgmma_wait<1>();
        release_first(s, tile - 1);
    }
    wgmma_wait<0>();
    wait_passed(s, tile);
    wait_first(s, tile); /* Q's terms, and Q for the next round */
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++) {
        const uint4 x = s.pass[tile % 2][k * 128 + threadIdx.x % 128];
        P[k][0] = x.x, P[k][1] = x.y, P[k][2] = x.z, P[k][3] = x.w;
    }
    differentiate_by_column<T, C::CAPS>(dP, P, s.L[tile % C::FIRST], s.delta[tile % C::SECOND], rule);
    release(&s.pass_free[tile % 2]);
    release_second(s, tile);
    pack_rows<T, COLUMNS>(dS, dP);
}

template <class T, class C> __device__ inline void keys_role(const backward_job &p, backward_shared<C> &s)
{
    const args &a = p.a;
    int tile = 0;
    meet_pieces<C>(s, [&](const piece &w, int n) {
        const int slot = n % C::SLOTS;
        const int all = uniform(w.tiles) * a.G;
        float dK[C::D / 2];
        uint32_t dS[COLUMNS / 16][4];
        clear(dK);
        if (C::BY_ROLE)
            wait(shared_address(&s.values_full), n & 1);
#pragma unroll 1
        for (int j = 0; j < all; j++, tile++)
            meet_keys<T, C>(dK, dS, s, p.rule, slot, tile, j == 0);
        const key_rows to = rows_of(a, w, 0, 0);
        release(C::BY_ROLE ? &s.values_free : &s.own_free[slot]); /* V is */
        if (all) {
            wgmma_fence();
            multiply_columns<T, C::D, COLUMNS>(dK, dS, first_tile(s, tile - 1));
            wgmma_commit();
            wgmma_wait<0>();
            release_first(s, tile - 1);
        }
        store_keys<T, C>(dK, 0, a, to);
    });
}

#endif
