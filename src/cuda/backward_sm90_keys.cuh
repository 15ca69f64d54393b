/* The Hopper backward's dK and dV, summed over all queries of all heads that share the keys, and with SUMS dQ beside
 * them. See backward_sm90_block.cuh. Two ways to spread the work over two warpgroups:
 *
 *     keys     each owns 64 keys and does everything for them
 *     roles    backward_sm90_roles.cuh: where dK and dV do not both fit into a warpgroup's registers */
#ifndef HEED_CUDA_BACKWARD_SM90_KEYS_CUH
#define HEED_CUDA_BACKWARD_SM90_KEYS_CUH

#include "backward_sm90_roles.cuh"
#include "backward_sm90_sums.cuh"

/* What a group holds while it meets queries. Tiles are counted over all work. */
template <class C> struct key_group {
    float dK[C::D / 2], dV[C::D / 2], S[COLUMNS / 2];
    uint32_t dS[COLUMNS / 16][4];
    uint64_t K, V;
    int group, slot; /* slot: of the work */
    int from, first; /* its first tile, and the first that the group meets */
    int care;        /* of the tile to come */
    uint32_t kept;   /* dropout, of this tile: see kept_element() */
};

/* backward_sm90_scores.cuh, where C::TERMS: from products to all that is in the exponent. */
template <class T, class C>
__device__ inline void apply_terms(const backward_job &p, key_group<C> &x, backward_shared<C> &s, int tile);

/* The same, where C::DROPS: which P of a tile are kept, those that go into dV, and dP to dS. */
template <class C>
__device__ inline void draw_kept(const backward_job &p, key_group<C> &x, backward_shared<C> &s, int tile);
template <class C> __device__ inline void drop(uint32_t (&P)[COLUMNS / 16][4], const key_group<C> &x);
template <class C>
__device__ inline void differentiate_kept(float (&dP)[COLUMNS / 2], const key_group<C> &x, const backward_shared<C> &s,
                                          int tile);

/* Whether a piece of work has all heads that share its keys. */
template <class C> __device__ inline bool is_whole(const backward_job &p, const piece &w)
{
    return !C::SHARES || w.heads == p.a.G;
}

/* Where heads are taken in parts, see part_sums: adds what those before have summed to dK (which = 0) or dV of a group of 64
 * keys, and leaves that to the next. Whether there is none, so that this is all. */
template <class C>
__device__ inline bool join_parts(float (&Y)[C::D / 2], int which, const backward_job &p, const piece &w, int group)
{
    const view &t = which ? p.a.d_v : p.a.d_k;
    const int part = w.part, width = which ? p.a.Dv : p.a.D;
    const bool last = w.first + w.heads == (w.head + 1) * p.a.G;
    const int thread = thread_anew() % 128, lane = thread % 32, top = thread / 32 * 16 + lane / 4;
    const int place = ((w.ranges / C::ROWS * p.a.Hk + w.head) * 2 + which) * C::GROUPS + group;
    const key_rows to = rows_of(p.a, w, which, group);
    const int64_t step = t.stride[2] * p.a.col_step;
    uint16_t *const most = (uint16_t *)t.data + to.at + top * step + lane % 4 * 2;
    uint4 *const rest = p.parts.rest + (int64_t)place * (C::D / 32 * 128) + thread;
    int *const turn = p.parts.turns + place * 4 + thread / 32;
    const auto exists = [&](int half, int column) { return top + half * 8 < to.rows && column < width; };
    const auto at = [&](int half, int column) { return (uint32_t *)(most + half * 8 * step + column); };
    while (part && uniform(see_turn(turn)) != part)
        ;
    if (part)
#pragma unroll
        for (int k = 0; k < C::D / 32; k++) {
            const uint4 r = __ldcg(rest + k * 128);
            const uint32_t low[4] = { r.x, r.y, r.z, r.w };
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float *const y = &Y[16 * k + 2 * i];
                const uint32_t high = exists(i % 2, 32 * k + i / 2 * 8) ? __ldcg(at(i % 2, 32 * k + i / 2 * 8)) : 0;
                y[0] += __uint_as_float(__byte_perm(high, low[i / 2], i % 2 ? 0x1060 : 0x1040) & 0xFFFFFF00u);
                y[1] += __uint_as_float(__byte_perm(high, low[i / 2], i % 2 ? 0x3270 : 0x3250) & 0xFFFFFF00u);
            }
        }
    if (last)
        return true;
#pragma unroll
    for (int k = 0; k < C::D / 32; k++) {
        uint32_t low[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float *const y = &Y[16 * k + 2 * i];
            const auto rounded = [](float x) { return __float_as_uint(x) + (x == x ? 0x80 : 0); }; /* NaN remains so */
            const uint32_t u = rounded(y[0]), v = rounded(y[1]);
            if (exists(i % 2, 32 * k + i / 2 * 8))
                *at(i % 2, 32 * k + i / 2 * 8) = __byte_perm(u, v, 0x7632);
            low[i] = __byte_perm(u, v, 0x51);
        }
        rest[k * 128] = make_uint4(__byte_perm(low[0], low[1], 0x5410), __byte_perm(low[2], low[3], 0x5410),
                                   __byte_perm(low[4], low[5], 0x5410), __byte_perm(low[6], low[7], 0x5410));
    }
    __syncwarp();
    if (lane == 0)
        pass_turn(turn, part + 1);
    return false;
}

/* Adds up dQ of the tile before, where it is this group's turn. last: K is not needed any more. */
template <class T, class C>
__device__ inline void sum_behind(const backward_job &p, key_group<C> &x, backward_shared<C> &s, int tile,
                                  bool last = false)
{
    if (!C::OWNERS && tile > x.from && (tile - 1) % 2 == x.group)
        sum_queries<T, C>(p, s, x.slot, tile - 1, last);
    else if (last)
        release(&s.own_free[x.slot % C::SLOTS]);
}

/* Lets tiles pass that a group of keys does not meet: they add nothing to dQ, but others may. */
template <class T, class C>
__device__ inline int pass_by(const backward_job &p, key_group<C> &x, backward_shared<C> &s, int tile, int count)
{
    for (; count > 0; count--) {
        if constexpr (C::ADDS) {
            const uint32_t none[COLUMNS / 16][4] = {};
            hand_over<C>(p, s, none, tile, x.group);
            announce(p, s, tile);
            sum_behind<T, C>(p, x, s, tile);
        }
        if constexpr (C::TERMS)
            pass_scores(p, s, tile);
        tile = skip(s, tile, 1);
    }
    return tile;
}

/* K (0) or V (1) of a group of 64 keys. Where there are few registers, worked out for each product. */
template <class C> __device__ inline uint64_t keys_of(const key_group<C> &x, backward_shared<C> &s, int which)
{
    if (!C::TERMS)
        return which ? x.V : x.K;
    int slot = x.slot, group = x.group;
    if (C::NARROW)
        asm volatile("" : "+r"(slot), "+r"(group));
    return tile_at(shared_address(own_tile(s, slot, which)) + group * 8192);
}

/* The product's columns, which are queries, have terms that all rows share: -L / c for S^T (0), -delta for dP^T (1). One
 * more step of the product adds them. Read by each lane, they would have to wait for the tensor core to leave a way to
 * shared memory. */
template <class C>
__device__ inline void add_term(float (&S)[COLUMNS / 2], const backward_shared<C> &s, int tile, int which)
{
    if constexpr (C::ADDS)
        wgmma<__nv_bfloat16, COLUMNS>::template shared<0, 0>(
            S, small_tile_at(shared_address(s.ones[0]) + which * 128, (2 - which) * 128, 0),
            small_tile_at(shared_address(s.terms[0]) + tile % C::FIRST * (COLUMNS * 16), 0, 128), 1);
}

/* Elements FROM to TO of P, multiples of 8, as a left operand. */
template <class T, int FROM, int TO>
__device__ inline void pack_some(uint32_t (&P)[COLUMNS / 16][4], const float (&S)[COLUMNS / 2])
{
#pragma unroll
    for (int i = FROM / 2; i < TO / 2; i++)
        P[i / 4][i % 4] = pack<T>(S[2 * i], S[2 * i + 1]);
}

/* One tile, whose S is there. While its dS is computed (EARLY) or its dK, the tensor core has S of the next to do,
 * unless this is the last, and dK may take until the next P is computed (LATE). */
template <class T, class C, bool LAST>
__device__ inline void meet_tile(const backward_job &p, key_group<C> &x, backward_shared<C> &s, int tile)
{
    const score_rule whole = { 1.0f, 0.0f, 0.0f, 0.0f },
                     &rule = C::TERMS ? whole : p.rule; /* with terms, S has it all */
    constexpr int D = C::D;
    constexpr bool NEXT = (C::WAYS & EARLY) && !LAST;
    const int row = x.group * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    float dP[COLUMNS / 2], next[COLUMNS / 2];
    uint32_t P[COLUMNS / 16][4];
    const uint64_t dO = second_tile(s, tile);
    const float *const L = s.L[C::NUMBERS ? tile % C::FIRST : 0],
                       *const delta = s.delta[C::NUMBERS ? tile % C::SECOND : 0];
    const auto start_dP = [&] {
        wait_second(s, tile);
        if (C::APART)
            wait(shared_address(&s.values_full), x.slot);
        wgmma_fence();
        multiply_rows<T, D, C::ROWS, COLUMNS>(dP, keys_of(x, s, 1), dO); /* dP^T = V dO^T */
        add_term(dP, s, tile, 1);
        wgmma_commit();
    };
    const int2 *const range = C::ADDS ? p.ranges + s.work[x.slot].ranges + row : &s.range[x.slot][row];
    if (!C::NARROW)
        start_dP();
    if (!(C::WAYS & AHEAD))
        x.care = uniform(s.care[tile % C::FIRST][x.group]);
    keep_order(tile);
    if constexpr (C::DROPS)
        draw_kept<C>(p, x, s, tile);
    if constexpr (C::TERMS)
        apply_terms<T>(p, x, s, tile);
    if constexpr (C::NARROW) { /* S and dP do not fit in side by side, but the last quarter of S does */
        constexpr int MOST = COLUMNS / 8 * 3, ALL = COLUMNS / 2;
        probabilities_by_column<C::CAPS, C::ADDS, 0, MOST>(x.S, L, rule, x.care, range);
        pack_some<T, 0, MOST>(P, x.S);
        start_dP();
        keep_order(tile);
        probabilities_by_column<C::CAPS, C::ADDS, MOST, ALL>(x.S, L, rule, x.care, range);
        pack_some<T, MOST, ALL>(P, x.S);
    } else {
        probabilities_by_column<C::CAPS, C::ADDS>(x.S, L, rule, x.care, range);
        if (C::WAYS & LATE) {
            wgmma_wait<1>(); /* dK of the tile before */
            if (tile != x.first)
                release_first(s, tile - 1);
        }
        pack_rows<T, COLUMNS>(P, x.S);
        if constexpr (C::DROPS)
            drop<C>(P, x);
    }
    wgmma_fence();
    multiply_columns<T, D, COLUMNS>(x.dV, P, dO); /* dV += P^T dO */
    wgmma_commit();
    const auto start_next = [&] {
        wait_first(s, tile + 1);
        wgmma_fence();
        multiply_rows<T, D, C::ROWS, COLUMNS>(next, keys_of(x, s, 0),
                                              first_tile(s, tile + 1)); /* S^T = K Q^T of the next */
        add_term(next, s, tile + 1, 0);
        wgmma_commit();
        if (C::WAYS & AHEAD)
            x.care = uniform(s.care[(tile + 1) % C::FIRST][x.group]);
    };
    if (NEXT)
        start_next();
    wgmma_wait<NEXT ? 2 : 1>(); /* dP */
    if constexpr (C::DROPS)
        differentiate_kept<C>(dP, x, s, tile);
    else if (C::WAYS & EXACT)
        differentiate_by_column<C::CAPS, C::ADDS>(dP, x.S, L, delta, rule);
    else
        differentiate_by_column<T, C::CAPS, C::ADDS>(dP, P, L, delta, rule);
    if (C::NARROW)
        wgmma_wait<0>(); /* dV: dS takes the place of its P */
    pack_rows<T, COLUMNS>(x.dS, dP);
    if (C::APART && LAST)
        release(&s.values_free);
    if constexpr (C::ADDS) {
        hand_over<C>(p, s, x.dS, tile, x.group);
        if (!C::OWNERS) {
            if (!p.any_order) /* others wait for it */
                announce(p, s, tile);
            wgmma_wait<NEXT ? 1 : 0>(); /* dV, whose P makes room for dQ */
        }
    }
    if (!NEXT && !LAST && (!C::ADDS || C::OWNERS))
        start_next();
    wgmma_fence();
    multiply_columns<T, D, COLUMNS>(x.dK, x.dS, first_tile(s, tile)); /* dK += dS^T Q */
    wgmma_commit();
    if constexpr (C::ADDS) {
        if (C::OWNERS || p.any_order)
            announce(p, s, tile);
        sum_behind<T, C>(p, x, s, tile);
        if (!NEXT && !LAST && !C::OWNERS)
            start_next();
    }
    if constexpr (C::APART && LAST) {
        if (C::OWNERS)
            wgmma_wait<1>(); /* dV */
        if (is_whole<C>(p, s.work[x.slot]))
            store_keys<T, C>(x.dV, 1, p.a, rows_of(p.a, s.work[x.slot], 1, x.group));
    }
    wgmma_wait<(C::WAYS & LATE) && !LAST ? 1 : 0>();
    if (!LAST)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++)
            x.S[i] = next[i];
    if (!(C::WAYS & LATE) || LAST)
        release_first(s, tile);
    release_second(s, tile);
}

/* All tiles of a piece of work. */
template <class T, class C>
__device__ inline int meet_all(const backward_job &p, key_group<C> &x, backward_shared<C> &s, int tile)
{
    const piece &w = s.work[x.slot];
    const int tiles = w.tiles, begin = C::ADDS ? tiles - w.end[x.group] : w.begin[x.group];
    const int end = C::ADDS ? tiles - w.begin[x.group] : w.end[x.group];
    x.from = tile;
    tile = pass_by<T, C>(p, x, s, tile, uniform(begin * heads_of<C>(p, w)));
    x.first = tile;
    const int last = uniform(tile + (end - begin) * heads_of<C>(p, w) - 1);
    if (uniform(begin < end)) {
        wait_first(s, tile);
        wgmma_fence();
        multiply_rows<T, C::D, C::ROWS, COLUMNS>(x.S, keys_of(x, s, 0), first_tile(s, tile));
        add_term(x.S, s, tile, 0);
        wgmma_commit();
        if (C::WAYS & AHEAD)
            x.care = uniform(s.care[tile % C::FIRST][x.group]);
        wgmma_wait<0>();
#pragma unroll 1
        for (; tile < last; tile++)
            meet_tile<T, C, false>(p, x, s, tile);
        meet_tile<T, C, true>(p, x, s, tile++);
    } else if constexpr (C::APART) {
        wait(shared_address(&s.values_full), x.slot); /* or it would come after the next K, which takes its place */
        release(&s.values_free);
        if (is_whole<C>(p, w))
            store_keys<T, C>(x.dV, 1, p.a, rows_of(p.a, w, 1, x.group));
    }
    tile = pass_by<T, C>(p, x, s, tile, uniform((tiles - end) * heads_of<C>(p, w)));
    if constexpr (C::ADDS)
        sum_behind<T, C>(p, x, s, tile, C::APART);
    return tile;
}

/* dK leaves, and dV where it has not yet. Heads in parts and whole ones go by the same code, but where there are no registers for
 * that. */
template <class T, class C> __device__ inline void leave(const backward_job &p, key_group<C> &x, backward_shared<C> &s)
{
    constexpr bool ONCE = C::SHARES && C::D < 128;
    const piece &w = s.work[x.slot];
    const key_rows values = rows_of(p.a, w, 1, x.group), keys = rows_of(p.a, w, 0, x.group);
    const bool whole = is_whole<C>(p, w);
    if (C::ADDS && whole)
        release(&s.work_free[x.slot]); /* from here on w is another's */
    if (!C::APART)
        release(&s.own_free[x.slot % C::SLOTS]);
    if constexpr (C::SHARES)
        if (ONCE || !whole) {
#pragma unroll 1
            for (int which = 1; which >= 0; which--) {        /* dV, and dK in its place */
                const bool left = C::APART && whole && which; /* before this */
                const key_rows to = { which ? values.at : keys.at, which ? values.rows : keys.rows };
                if (!left && (which ? p.a.d_v : p.a.d_k).data && (whole || join_parts<C>(x.dV, which, p, w, x.group)))
                    store_keys<T, C>(x.dV, which, p.a, ONCE ? to : rows_of(p.a, w, which, x.group));
                if (which)
#pragma unroll
                    for (int i = 0; i < C::D / 2; i++)
                        x.dV[i] = x.dK[i];
            }
            if (!whole)
                release(&s.work_free[x.slot]);
            return;
        }
    if constexpr (!ONCE) {
        if (!C::APART)
            store_keys<T, C>(x.dV, 1, p.a, values);
        store_keys<T, C>(x.dK, 0, p.a, keys);
    }
}

template <class T, class C> __device__ inline void keys(const backward_job &p, backward_shared<C> &s, int group)
{
    int tile = 0;
    meet_pieces<C>(s, [&](const piece &, int n) {
        key_group<C> x;
        x.group = group;
        clear(x.dK), clear(x.dV);
        x.K = tile_at(shared_address(own_tile(s, n, 0)) + x.group * 8192);
        x.V = tile_at(shared_address(own_tile(s, n, 1)) + x.group * 8192);
        x.slot = n % C::WORKS;
        if constexpr (C::TERMS)
            begin_terms(p, x, s);
        tile = meet_all<T, C>(p, x, s, tile);
        leave<T, C>(p, x, s);
    });
}

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

template <class T, class C> __device__ inline void find_gradients(const backward_job &p, backward_shared<C> &s)
{
    init_barriers(s);
    if (!p.second)
        wait_for_last();
    let_next_start(); /* not before: dQ's kernel relies on what this one has waited for */
    const int group = uniform(threadIdx.x / 128);
    if (group == C::CONSUMERS + C::OWNERS) {
        fewer_registers<C::FEW>();
        produce<C>(p, s);
        if (p.second)
            wait_for_last(); /* when this kernel has ended, so has the one before */
        return;
    }
    if constexpr (C::OWNERS != 0)
        if (group == C::CONSUMERS) {
            fewer_registers<C::SOME>();
            if (p.leaves)
                own_queries<T, C, true>(p, s);
            else
                own_queries<T, C, false>(p, s);
            return;
        }
    more_registers<C::MANY>();
    if constexpr (C::PASS != 0) {
        if (group == 0)
            values_role<T, C>(p, s);
        else
            keys_role<T, C>(p, s);
    } else
        keys<T, C>(p, s, group);
}

template <class T, class C>
__global__ void __launch_bounds__(C::THREADS, 1) dkv_sm90(const __grid_constant__ backward_job p)
{
    extern __shared__ __align__(1024) char memory[];
    find_gradients<T, C>(p, *(backward_shared<C> *)memory);
}

template <class C> static heed_status run_keys(const backward_job &p, int blocks, const heed_exec *x)
{
    static_assert(sizeof(backward_shared<C>) <= 227 * 1024, "what a block may have on sm_90");
    return launch_next(p.a.q.dtype == HEED_F16 ? dkv_sm90<__half, C> : dkv_sm90<__nv_bfloat16, C>, blocks, C::THREADS,
                       sizeof(backward_shared<C>), x, p);
}

template <class C> static backward_kernel keys_kernel() { return { C::D, C::ROWS, C::OWNERS != 0, run_keys<C> }; }

#endif
