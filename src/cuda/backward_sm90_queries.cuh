/* The Hopper backward's dQ: each warpgroup owns 64 queries and has S and dP of the next keys computed while dS of the
 * ones before meets K. See backward_sm90.cuh. */
#ifndef HEED_CUDA_BACKWARD_SM90_QUERIES_CUH
#define HEED_CUDA_BACKWARD_SM90_QUERIES_CUH

#include "backward_sm90.cuh"

template <class T, class C> __device__ inline void queries(const backward_job &p, backward_shared<C> &s, int group)
{
    constexpr int D = C::D;
    const args &a = p.a;
    const int lane = threadIdx.x % 32, row = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const score_rule &rule = p.rule;
    int tile = 0;
    meet_pieces<C>(s, [&](const piece &w, int n) {
        const int slot = n % C::SLOTS;
        const uint64_t Q = tile_at(shared_address(s.own[slot][0]) + group * 8192);
        const uint64_t dO = tile_at(shared_address(s.own[slot][1]) + group * 8192);
        const int64_t at = ((int64_t)w.batch * a.Hq + w.head) * p.pitch + w.memory_row;
        const int r0 = min(row, w.rows - 1), r1 = min(row + 8, w.rows - 1); /* rows that do not exist see no column */
        const float L[2] = { p.L[at + r0], p.L[at + r1] }, delta[2] = { p.delta[at + r0], p.delta[at + r1] };
        const bool careful = rule.capped() || __any_sync(~0u, is_large(L[0]) || is_large(L[1]));
        const int inside = uniform(careful ? INT32_MAX : w.inside[group]), outside = uniform(w.outside[group]);
        const int begin = uniform(w.begin[group]), end = uniform(w.end[group]), tiles = uniform(w.tiles);
        int column = w.start + begin * COLUMNS;
        float dQ[D / 2];
        uint32_t dS[COLUMNS / 16][4];
        clear(dQ);
        tile = skip(s, tile, begin);
#pragma unroll 1
        for (int j = begin; j < end; j++, tile++, column += COLUMNS) {
            float S[COLUMNS / 2], dP[COLUMNS / 2];
            if (j > begin) { /* first, so that K of the tile before makes room early */
                wgmma_fence();
                multiply_columns<T, D, COLUMNS>(dQ, dS, first_tile(s, tile - 1)); /* dQ += dS K, of the tile before */
                wgmma_commit();
            }
            wait_first(s, tile);
            wgmma_fence();
            multiply_rows<T, D, C::ROWS, COLUMNS>(S, Q, first_tile(s, tile)); /* S  = Q K^T */
            wgmma_commit();
            wait_second(s, tile);
            wgmma_fence();
            multiply_rows<T, D, C::ROWS, COLUMNS>(dP, dO, second_tile(s, tile)); /* dP = dO V^T */
            wgmma_commit();
            if (j > begin) {
                wgmma_wait<2>();
                release_first(s, tile - 1);
            }
            wgmma_wait<1>();
            probabilities_by_row(S, L, rule, column >= inside && column + COLUMNS <= outside,
                                 &s.range[n % C::WORKS][row], column + lane % 4 * 2);
            keep_order(tile);
            wgmma_wait<0>();
            release_second(s, tile);
            differentiate_by_row(dP, S, delta);
            pack_rows<T, COLUMNS>(dS, dP);
        }
        const int64_t to = row_at(a.d_q, w.batch, w.head, w.memory_row + group * 64);
        const int rows = w.rows - group * 64;
        release(&s.own_free[slot]); /* Q and dO are not needed for what is left */
        if (begin < end) {
            wgmma_fence();
            multiply_columns<T, D, COLUMNS>(dQ, dS, first_tile(s, tile - 1));
            wgmma_commit();
            wgmma_wait<0>();
            release_first(s, tile - 1);
        }
        tile = skip(s, tile, tiles - end);
        store_result<T, C>(dQ, a.scale, a.d_q, a.D, a.accumulate, rows, to, a.d_q.stride[2]);
    });
}

template <class T, class C>
__global__ void __launch_bounds__(C::THREADS, 1) dq_sm90(const __grid_constant__ backward_job p)
{
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(backward_shared<C> *)memory;
    init_barriers(s);
    if (!p.second)
        wait_for_last();
    let_next_start(); /* not before: dK's and dV's kernel relies on what this one has waited for */
    const int group = uniform(threadIdx.x / 128);
    if (group == C::CONSUMERS) {
        fewer_registers<C::FEW>();
        produce<C>(p, s);
        wait_for_last(); /* when this kernel has ended, so has the one before */
        return;
    }
    more_registers<C::MANY>();
    queries<T, C>(p, s, group);
}

template <class C> static heed_status run_queries(const backward_job &p, int blocks, const heed_exec *x)
{
    static_assert(sizeof(backward_shared<C>) <= 227 * 1024, "what a block may have on sm_90");
    return launch_next(p.a.q.dtype == HEED_F16 ? dq_sm90<__half, C> : dq_sm90<__nv_bfloat16, C>, blocks, C::THREADS,
                       sizeof(backward_shared<C>), x, p);
}

template <class C> static backward_kernel queries_kernel() { return { C::D, C::ROWS, false, run_queries<C> }; }

#endif
