/* The warpgroups of the fp32 backward on Hopper that compute dQ: from the dS that the owners of keys pass on, or by themselves. */
#ifndef HEED_CUDA_BACKWARD_SM90SPLIT_DQ_CUH
#define HEED_CUDA_BACKWARD_SM90SPLIT_DQ_CUH

#include "backward_sm90split.cuh"

/* ---- From keys --------------------------------------------------------------------------------------------------- */

/* dS of a tile as it has been passed, with queries as rows. */
__device__ inline void read_across(float (&X)[COLUMNS / 2], const uint4 *pass)
{
    const int warp = threadIdx.x / 32 % 4, query = threadIdx.x % 32 / 4, key = threadIdx.x % 4 * 2;
    const float2 *const from = (const float2 *)pass + query % 2;
#pragma unroll
    for (int i = 0; i < 2; i++) /* queries, 8 apart */
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; k++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int thread = (key + e) * 4 + query / 2;
                const float2 two = from[((2 * warp + i) * 128 + k * 32 + place_to_pass(thread)) * 2];
                X[8 * k + 2 * i + e] = two.x, X[8 * k + 4 + 2 * i + e] = two.y;
            }
}

/* dQ = dS K of one tile after the other, sent to its sums: see keep_turns(). Where it LEAVES with the last keys, what others
 * have summed joins these here. */
template <int HEAD, class C, bool LEAVES> __device__ inline void sums_role(const split_job &p, split_shared<C> &s)
{
    const args &a = p.job.a;
    int tile = 0;
    meet_pieces<C>(s, [&](const piece &w, int n) {
        const int slot = n % C::SLOTS;
        const int all = uniform(w.tiles) * a.G;
        const uint64_t K = tile_at(shared_address(s.own[0][0]) + slot * (int)sizeof(s.own[0]), C::ROWS * 128);
        int k_shift = splits_own<C>(p) ? 0 : shift_at(p.own[0], w.batch, w.head, w.memory_row).s;
        const dq_share mine = LEAVES ? share_of<C>(p.job, w, tile) : dq_share{},
                       share = { uniform(mine.stored), uniform(mine.leaving), uniform(mine.end) };
        int column = column_at<C>(w, 0), heads = a.G; /* that have yet to meet it */
#pragma unroll 1
        for (int j = 0; j < all; j++, tile++) {
            float X[COLUMNS / 2], T[HEAD / 2];
            operand hi, lo;
            int by[2];
            wait(shared_address(&s.ds_full[tile % 2]), tile / 2 & 1);
            if (splits_own<C>(p) && j == 0)
                k_shift = s.found[slot][0].s;
            read_across(X, s.pass[tile % 2 * 2]);
            release(&s.pass_free[tile % 2]);
            raise_rows((float(&)[1][COLUMNS / 8][4]) X, by);
            split_weights(hi, lo, X);
            multiply_in_turn<HEAD, C::D / HEAD>(T, hi, lo, K);
            float first[2], second[2]; /* together a.scale 2^-by, which may be no number of fp32 */
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int down = max(-250, min(250, -(by[r] + TOP + k_shift)));
                first[r] = a.scale * given_back<COLUMNS / 16> * power(down / 2), second[r] = power(down - down / 2);
            }
#pragma unroll
            for (int i = 0; i < HEAD / 2; i++)
                T[i] *= first[i / 2 % 2], T[i] *= second[i / 2 % 2];
            wait(shared_address(&s.stage_free[tile % 2]), tile / 2 & 1 ^ !LEAVES); /* see take_turn() */
            float4 *const stage = s.stage[tile % 2] + threadIdx.x / 32 % 4 * (4 * HEAD) + threadIdx.x % 32;
            if (LEAVES && share.leaves(tile)) {
                if (share.reads(tile))
#pragma unroll
                    for (int i = 0; i < HEAD / 8; i++) {
                        const float4 x = stage[i * 32];
                        T[4 * i] += x.x, T[4 * i + 1] += x.y, T[4 * i + 2] += x.z, T[4 * i + 3] += x.w;
                    }
                const int top = column + threadIdx.x / 32 % 4 * 16, h = w.head * a.G + a.G - heads;
                store_rows_fp32<HEAD, 1>((const float(&)[1][HEAD / 8][4]) T, a.d_q, a.D, false, [&](int r) {
                    return top + r < w.columns ? row_at(a.d_q, w.other_batch, h, w.other_row + top + r) : NOWHERE;
                });
            } else {
#pragma unroll
                for (int i = 0; i < HEAD / 8; i++)
                    stage[i * 32] = make_float4(T[4 * i], T[4 * i + 1], T[4 * i + 2], T[4 * i + 3]);
            }
            fence_async();
            release(&s.staged[tile % 2]);
            if (--heads == 0)
                heads = a.G, column -= COLUMNS;
        }
        leave_piece(s, slot);
    });
}

/* ---- By the owners of queries ------------------------------------------------------------------------------------ */

template <int HEAD, class C, int GROUP> __device__ inline void queries_role(const split_job &p, split_shared<C> &s)
{
    constexpr int PARTS = C::D / HEAD;
    const args &a = p.job.a;
    const int lane = threadIdx.x % 32, row = GROUP * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    int tile = 0;
    meet_pieces<C>(s, [&](const piece &w, int n) {
        const int slot = n % C::SLOTS;
        const uint64_t Q = tile_at(shared_address(s.own[slot][0]) + GROUP * 8192);
        const uint64_t dO = tile_at(shared_address(s.own[slot][1]) + GROUP * 8192);
        const int64_t at = ((int64_t)w.batch * a.Hq + w.head) * p.job.pitch + w.memory_row;
        const int r0 = min(row, w.rows - 1), r1 = min(row + 8, w.rows - 1); /* rows that do not exist see no column */
        const float L[2] = { p.job.L[at + r0], p.job.L[at + r1] };
        const float delta[2] = { p.job.delta[at + r0], p.job.delta[at + r1] };
        const int64_t own = split_at(p.own[0], w.batch, w.head, w.memory_row) + (GROUP * 64 < w.rows ? GROUP * 64 : 0);
        const int q_shift = p.own[0].shifts[own].s, g_shift = p.own[1].shifts[own].s;
        bool again = p.own[0].shifts[own].strange | p.own[1].shifts[own].strange;
        if (C::SPANS)
            again |= __any_sync(~0u, is_vast_log2(L[0]) || is_vast_log2(L[1]));
        const int inside = uniform(w.inside[GROUP]), outside = uniform(w.outside[GROUP]);
        const int begin = uniform(w.begin[GROUP]), end = uniform(w.end[GROUP]), tiles = uniform(w.tiles);
        int column = w.start + begin * COLUMNS;
        shifts_ahead k_shifts, v_shifts;
        const int met = (int)split_at(p.other[0], w.other_batch, w.head / a.G, w.other_row + column);
        gradient<HEAD> dQ;
        operand hi, lo;
        int by[2] = {}, before = 0; /* of dS and K of the tile before */
        const auto of_k = [&](int i) { return p.other[0].shifts + met + i * COLUMNS; };
        const auto of_v = [&](int i) { return p.other[1].shifts + met + i * COLUMNS; };
        if (begin < end)
            k_shifts.ask(0, end - begin, of_k), v_shifts.ask(0, end - begin, of_v);
        tile = skip(s, tile, begin);
        shift k = {};
        /* From S of a tile to P, times the slope of a softcap. */
        const auto finish = [&](float(&S)[COLUMNS / 2], int j) {
            k = k_shifts.get(j - begin, end - begin, of_k);
            float c, slope[COLUMNS / 2];
            if constexpr (C::SPANS) {
                const span &q = s.spans[n % C::WORKS];
                lane_scores<false, COLUMNS / 2> t = { S, w.tile * C::ROWS + row, column + lane % 4 * 2 };
                add_terms<C::KIND>(t, logit_scale<HEAD>(p.scale, q_shift + k.s), a, q, head_of(a, q, w.head),
                                   [&](int e, float x) { slope[e] = x; });
                c = LOG2E;
            } else
                c = exponent_scale<HEAD>(a, q_shift + k.s);
            weigh(S, c, column >= inside && column + COLUMNS <= outside, &s.range[slot][row], column + lane % 4 * 2,
                  [&](int e) { return L[e / 2 % 2]; });
            if (has_cap<C::KIND>(a))
#pragma unroll
                for (int e = 0; e < COLUMNS / 2; e++)
                    S[e] *= slope[e];
        };
        const auto add = [&](const float(&T)[HEAD / 2]) {
            release_first(s, tile - 1);
            const int all_of_it[2] = { by[0] + before, by[1] + before };
            dQ.add(T, all_of_it);
        };
#pragma unroll 1
        for (int j = begin; j < end; j++, tile++, column += COLUMNS) {
            float S[COLUMNS / 2], dP[COLUMNS / 2];
            wait_first(s, tile);
            if (j == begin) {
                multiply_scores<HEAD, C::ROWS, PARTS>(S, Q, first_tile(s, tile)); /* S = Q K^T */
                finish(S, j);
            } else {
                float T[HEAD / 2];
                multiply_both<HEAD, C::ROWS, PARTS>(S, Q, first_tile(s, tile), T, hi, lo, first_tile(s, tile - 1));
                const auto complete = [&]() {
                    keep_order(tile);
                    wgmma_wait<0>();
                    add(T); /* dQ += dS K of the tile before */
                };
                if (C::SPANS) { /* terms leave no registers for T */
                    complete();
                    if (C::KIND == WITH_ALL_TERMS)
                        dQ.settle();
                }
                finish(S, j);
                if (!C::SPANS)
                    complete();
            }
            wait_second(s, tile);
            uint32_t dropped = 0;
            multiply_apart<HEAD, C::ROWS, PARTS>(dP, dO, second_tile(s, tile),
                                                 [&]() { /* dP = dO V^T */
                                                         if constexpr (C::SPANS)
                                                             if (has_dropout<C::KIND>(a))
                                                                 dropped = draw_dropped<false, COLUMNS / 2>(
                                                                     a, s.spans[n % C::WORKS], w.head,
                                                                     w.tile * C::ROWS + row, column + lane % 4 * 2);
                                                 });
            release_second(s, tile);
            if (has_dropout<C::KIND>(a))
                sign_dropped<false>(S, dropped);
            const shift v = v_shifts.get(j - begin, end - begin, of_v);
            again |= k.strange || v.strange || q_shift + k.s < p.exact_below;
            differentiate<C::KIND>(
                dP, g_shift + v.s, a,
                [&](int i) { return make_float4(S[4 * i], S[4 * i + 1], S[4 * i + 2], S[4 * i + 3]); },
                [&](int e) { return delta[e / 2 % 2]; }, by, [](int, const float *) {});
            before = k.s;
            split_weights(hi, lo, dP);
        }
        if (begin < end) {
            float T[HEAD / 2];
            multiply_values<HEAD, C::D / HEAD>(T, hi, lo, first_tile(s, tile - 1));
            add(T);
        }
        tile = skip(s, tile, tiles - end);
        dQ.write(a.scale, a.d_q, a.D, w.rows - GROUP * 64,
                 [&](int r) { return row_at(a.d_q, w.batch, w.head, w.memory_row + GROUP * 64 + r); });
        if (again && GROUP * 64 < w.rows && threadIdx.x % 32 == 0)
            p.own[0].marks[own] = *p.any = 1;
        release(&s.own_free[slot]);
    });
}

#endif
