/* Forward for Hopper, fp16 and bf16. A block stays on its multiprocessor and takes tile after tile of rows: one warp
 * plans them, one keeps the copy engine busy, and two or three warpgroups of 64 rows each compute
 *
 *     S = Q K^T     P = 2^(c S - c m)     O += P V
 *
 * over the keys from the last to the first, 64 to 128 at a time. The next S and the present O += P V are in the tensor
 * core together, and the exponentials of that S are taken under the latter.
 *
 * The maximum m only keeps the exponentials in range: any value near it gives the same result. So m is taken from the
 * first keys that a row sees and then left alone, which takes it off the critical path. Should a later key be so much
 * larger that P, a sum or O overflows (P can grow 2^127 times in bf16, 2^16 times in fp16), the tile is computed once
 * more, with the maximum of all keys so far. */
#ifndef HEED_CUDA_FORWARD_SM90_CUH
#define HEED_CUDA_FORWARD_SM90_CUH

#include "softmax_sm90.cuh"

/* ---- The warpgroups ---------------------------------------------------------------------------------------------- */

/* A value that all lanes have: said so, it goes into the registers that name tiles to the tensor core. */
__device__ inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }

/* One of the warpgroups. Each step takes P of one block to O += P V and makes S and P of the next, which at the end of a
 * tile is the first of the next tile: the tensor core has the one to do while the exponentials of the other are taken.
 * Two copies of this: a short one for the blocks within a tile, and one for all that can happen between tiles. */
template <class T, class S>
__device__ inline void consume(forward_shared<S> &sh, const args &a, const tile_order &order)
{
    constexpr bool OVERLAP = S::Q_STAGES == 2; /* of tiles: the first S of one and the last P V of another */
    constexpr int KEYS = S::KEYS, D = S::D, GROUPS = S::GROUPS, K_BYTES = sizeof sh.K[0], V_BYTES = sizeof sh.V[0];
    const int lane = threadIdx.x % 32, group = uniform(threadIdx.x / 128) - 1;
    const int row = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const float c = (S::CAPPED ? a.softcap : a.scale) * LOG2E;
    const row_state fresh = { { -CUDART_INF_F, -CUDART_INF_F }, {}, {}, { 1.0f, 1.0f } };
    const uint32_t q_full = shared_address(sh.q_full), q_empty = shared_address(sh.q_empty),
                   k_full = shared_address(sh.k_full), v_full = shared_address(sh.v_full),
                   k_empty = shared_address(sh.k_empty), v_empty = shared_address(sh.v_empty);
    const uint64_t Q0 = tile_at(shared_address(sh.Q) + group * 64 * 128), K0 = tile_at(shared_address(sh.K)),
                   V0 = tile_at(shared_address(sh.V), KEYS * 128);
    float O[D / 2];
    uint32_t P[KEYS / 16][4];
    row_state x;
    int n = -1, j = 0, keep = 0;                    /* P is that of block j of tile n; keep = 0: its first */
    bool open = false, real = false, ended = false; /* tile n is open; P is that of a block; there are no more tiles */
    bool exact = !S::FIRST;
    ring<S::K_STAGES> at_k;
    ring<S::V_STAGES> at_v;
    const auto release = [&](uint32_t empty, auto &at) {
        if (lane == 0)
            arrive(empty + 8 * at.at());
        at.next();
    };
    const auto take_turn = [&]() {
        if (S::TURNS)
            named_sync(8 + group, 256);
    };
    const auto pass_turn = [&]() {
        if (S::TURNS)
            named_arrive(8 + (group + 1) % GROUPS, 256);
    };
    const auto send = [&](int n, const float(&divide)[2], bool good) {
        const forward_work<S::ROWS> &w = sh.work[n % AHEAD];
        good &= send_out<T, S>(O, divide, a, w, order, sh.out[threadIdx.x / 32 - 4], row - lane / 4);
        if (S::FIRST && !exact && real && !good)
            sh.fails(w.turn);
        __syncwarp();
        if (lane == 0)
            arrive(shared_address(&sh.closed[n % AHEAD]));
    };
    const auto q_desc = [&](int n) { return on(Q0, S::Q_STAGES == 1 ? 0 : uniform(n % 2) * (int)sizeof sh.Q[0]); };
    const auto skip = [&](int unseen, bool keys, bool values) {
#pragma unroll 1
        for (int i = 0; i < unseen; i++) {
            if (keys) {
                wait(k_full + 8 * at_k.at(), at_k.parity());
                take_turn(), pass_turn();
                release(k_empty, at_k);
            }
            if (values) {
                wait(v_full + 8 * at_v.at(), at_v.parity());
                release(v_empty, at_v);
            }
        }
    };
    if (S::TURNS && group == GROUPS - 1)
        pass_turn(); /* the first turn is the first group's */

    for (;;) {
        float divide[2];
        if (!OVERLAP && open) { /* the last O += P V of tile n by itself */
            if (real)
                wait(v_full + 8 * at_v.at(), at_v.parity());
            wgmma_fence();
            multiply_columns<T, D, KEYS>(O, P, on(V0, uniform(at_v.at()) * V_BYTES), keep);
            wgmma_commit();
            const bool good = conclude<S>(x, a, sh.work[n % AHEAD], row, order, divide);
            wgmma_wait<0>();
            if (real)
                release(v_empty, at_v);
            send(n, divide, good);
            open = false;
        }

        /* What comes after tile n? */
        bool next = false;
        int seen = 0, unseen = 0;
        if (!ended) {
            wait(q_full + (n + 1) % 2 * 8, (n + 1) / 2 % 2);
            const forward_work<S::ROWS> &w = sh.work[(n + 1) % AHEAD];
            ended = w.rows == 0;
            seen = w.seen[group], unseen = w.blocks - seen;
            next = !ended && seen > 0 && (!open || unseen < S::V_STAGES);
            if (!ended && !open) {
                skip(unseen, true, true), unseen = 0;
                if (seen == 0) { /* nothing to see: as if it had been seen */
                    n++;
                    if (lane == 0)
                        arrive(q_empty + n % 2 * 8);
                    x = fresh;
                    open = true, real = false;
                    continue;
                }
            }
            if (next)
                skip(unseen, true, false); /* their V comes after the last of tile n */
        }
        if (!next && !open) { /* the run is over */
            n++;
            if (lane == 0)
                arrive(q_empty + n % 2 * 8), arrive(shared_address(&sh.closed[n % AHEAD]));
            if (S::FIRST)
                named_sync(1, 64 + 128 * GROUPS); /* now it is known which tiles failed */
            if (exact)
                break;
            exact = true, ended = false;
            continue;
        }

        /* The last O += P V of tile n, if one is open, and the first S and P of the next, if there is one. Products that
         * are not wanted are computed all the same, of whatever there is, and not used. */
        bool good = true, unset = true; /* unset: some row of the warp has no maximum yet */
        {
            float s[KEYS / 2];
            const uint64_t K = on(K0, uniform(at_k.at()) * K_BYTES), V = on(V0, uniform(at_v.at()) * V_BYTES);
            if (next) {
                wait(k_full + 8 * at_k.at(), at_k.parity());
                take_turn();
            }
            if (OVERLAP && real)
                wait(v_full + 8 * at_v.at(), at_v.parity());
            wgmma_fence();
            multiply_rows<T, D, S::ROWS, KEYS>(s, q_desc(n + 1), K);
            wgmma_commit();
            if (OVERLAP) {
                multiply_columns<T, D, KEYS>(O, P, V, keep);
                wgmma_commit();
            }
            if (next)
                pass_turn();
            if (OVERLAP && open)
                good = conclude<S>(x, a, sh.work[n % AHEAD], row, order, divide);
            wgmma_wait<OVERLAP>();
            if (next) {
                release(k_empty, at_k);
                if (seen == 1 && lane == 0)
                    arrive(q_empty + (n + 1) % 2 * 8);
                const forward_work<S::ROWS> &w = sh.work[(n + 1) % AHEAD];
                x = fresh;
                j = seen - 1;
                weigh<S>(s, x, a, w, row, j, j < w.clear_from || j >= w.clear_to, c, exact, unset);
                keep_order(__float_as_int(x.l[0] + x.l[1]));
            }
            wgmma_wait<0>();
            if (OVERLAP && real)
                release(v_empty, at_v);
            pack_rows<T, KEYS>(P, s);
            if (OVERLAP && open)
                send(n, divide, good);
            if (next)
                skip(unseen, false, true);
        }
        open = real = next, keep = 0;
        if (!next)
            continue;
        n++;
        const forward_work<S::ROWS> &w = sh.work[n % AHEAD];
        const int clear_from = w.clear_from, clear_to = w.clear_to;
        const uint64_t Q = q_desc(n);
        while (j > 0) {
            j--;
            float s[KEYS / 2];
            const uint64_t K = on(K0, uniform(at_k.at()) * K_BYTES), V = on(V0, uniform(at_v.at()) * V_BYTES);
            wait(k_full + 8 * at_k.at(), at_k.parity());
            wait(v_full + 8 * at_v.at(), at_v.parity());
            take_turn();
            wgmma_fence();
            multiply_rows<T, D, S::ROWS, KEYS>(s, Q, K);
            wgmma_commit();
            multiply_columns<T, D, KEYS>(O, P, V, keep);
            wgmma_commit();
            pass_turn();
            keep = 1;
            wgmma_wait<1>();
            release(k_empty, at_k);
            if (j == 0 && lane == 0)
                arrive(q_empty + n % 2 * 8); /* the tile's last S */
            const bool grew = weigh<S>(s, x, a, w, row, j, j < clear_from || j >= clear_to, c, exact, unset);
            keep_order(__float_as_int(x.l[0] + x.l[1]));
            wgmma_wait<0>();
            release(v_empty, at_v);
            if (grew)
#pragma unroll
                for (int i = 0; i < D / 2; i++)
                    O[i] *= x.factor[i / 2 % 2];
            pack_rows<T, KEYS>(P, s);
        }
    }
    if (S::TURNS && group == 0)
        take_turn(); /* which nobody uses */
}

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

template <class T, class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    forward_sm90(const __grid_constant__ args a, const __grid_constant__ tensor_map q,
                 const __grid_constant__ tensor_map k, const __grid_constant__ tensor_map v,
                 const __grid_constant__ tile_order order)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(1024) char memory[];
    auto &sh = *(forward_shared<S> *)memory;
    if (threadIdx.x < 64)
        sh.failed[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++)
            barrier_init(shared_address(&sh.q_full[i]), 1), barrier_init(shared_address(&sh.q_empty[i]), 4 * S::GROUPS);
        for (int i = 0; i < S::K_STAGES; i++)
            barrier_init(shared_address(&sh.k_full[i]), 1), barrier_init(shared_address(&sh.k_empty[i]), 4 * S::GROUPS);
        for (int i = 0; i < S::V_STAGES; i++)
            barrier_init(shared_address(&sh.v_full[i]), 1), barrier_init(shared_address(&sh.v_empty[i]), 4 * S::GROUPS);
        for (int i = 0; i < AHEAD; i++)
            barrier_init(shared_address(&sh.planned[i]), 32),
                barrier_init(shared_address(&sh.closed[i]), 4 * S::GROUPS);
        barrier_init(shared_address(&sh.v_landed), 1);
        barrier_init_done();
        prefetch_map(q.map), prefetch_map(k.map), prefetch_map(v.map);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        fewer_registers<S::PRODUCER_REGISTERS>();
        constexpr int RUNS = S::FIRST ? 2 : 1, ALL = 64 + 128 * S::GROUPS;
        if (threadIdx.x < 32) {
            loader<S> l = { sh, q, k, v, a.lengths_k || a.offsets_k, threadIdx.x == 0, {}, {}, 0, 0 };
            for (int run = 0; run < RUNS; run++) {
                l.run();
                if (S::FIRST)
                    named_sync(1, ALL);
            }
        } else if (threadIdx.x < 64) {
            int tiles = 0;
            for (int run = 0; run < RUNS; run++) {
                plan_tiles<S>(sh, a, order, tiles, run);
                if (S::FIRST)
                    named_sync(1, ALL);
            }
        }
    } else {
        more_registers<S::REGISTERS>();
        consume<T, S>(sh, a, order);
    }
#endif
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

template <class T, class S>
heed_status forward_sm90_launch(const args &a, const key_parts &by, int units, const heed_exec *x)
{
    static_assert(sizeof(forward_shared<S>) <= 227 * 1024, "shared memory of one block");
    const int64_t tiles = tiles_of(a.Sq, S::ROWS) * by.count, heads = (int64_t)a.B * a.Hq, total = tiles * heads;
    if (total == 0)
        return HEED_OK;
    if (total > INT32_MAX - 1024)
        return heed_fail(HEED_UNSUPPORTED, "the problem has %lld tiles, a launch holds %d", (long long)total,
                         INT32_MAX - 1024);
    view keys = a.k, values = a.v; /* as if only the keys on the stride existed */
    keys.data += a.col * a.k.stride[2] * 2, keys.stride[2] *= a.col_step;
    values.data += a.col * a.v.stride[2] * 2, values.stride[2] *= a.col_step;
    int64_t rows = (a.k_rows - a.col + a.col_step - 1) / HEED_MAX(a.col_step, 1);
    if (rows <= 0) /* no key: nothing will be loaded, but a map must show something */
        keys = values = a.q, rows = 1;
    const int q_batches = a.offsets_q ? 1 : a.B, k_batches = a.offsets_k ? 1 : a.B;
    tensor_map q, k, v;
    heed_status status = heed_tensor_map(&q, a.q, a.D, a.q_rows, a.Hq, q_batches, S::ROWS);
    if (!status)
        status = heed_tensor_map(&k, keys, a.D, rows, a.Hk, k_batches, S::KEYS);
    if (!status)
        status = heed_tensor_map(&v, values, a.Dv, rows, a.Hk, k_batches, S::KEYS);
    if (status)
        return status;
    const int64_t cached = (int64_t)32 << 20, head_bytes = rows * (a.D + a.Dv) * 2, blocks = HEED_MIN(total, units);
    const bool even = a.left >= FAR && a.right >= FAR && !a.lengths_q && !a.offsets_q;
    const int64_t group = even ? heads : HEED_MIN(heads, HEED_MAX(1, cached / head_bytes) * a.G);
    const tile_order order = {
        (int)tiles, (int)heads, even, (int)group, (int)tiles_of(group * tiles, blocks), (int)(group * tiles % blocks),
        by
    };
    return launch(forward_sm90<T, S>, blocks, S::THREADS, sizeof(forward_shared<S>), x, a, q, k, v, order);
}

#endif
