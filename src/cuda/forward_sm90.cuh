/* Forward for Hopper, fp16 and bf16. A block stays on its multiprocessor and takes tile after tile of rows: one warp plans
 * them, two keep the copy engine busy, and two to four warpgroups of 64 rows each compute
 *
 *     S = Q K^T     P = 2^(c S - c m)     O += P V
 *
 * over the keys from the last to the first, 64 to 128 at a time. They share K and V and nothing else: each goes from tile
 * to tile by itself, as far ahead of the others as the buffers reach, so that what one has to do between two tiles
 * happens under the products of the others.
 *
 * The maximum m only keeps the exponentials in range: any value near it gives the same result. So m is taken from the
 * first keys that a row sees and then left alone, which takes it off the critical path. Should a later key be so much
 * larger that P, a sum or O overflows (P can grow 2^127 times in bf16, 2^16 times in fp16), the tile is computed once
 * more, with the maximum of all keys so far. With a bias that is no exception: see lower() and is_open(). */
#ifndef HEED_CUDA_FORWARD_SM90_CUH
#define HEED_CUDA_FORWARD_SM90_CUH

#include "softmax_sm90.cuh"

/* ---- The warpgroups ---------------------------------------------------------------------------------------------- */

/* A value that all lanes have: said so, it goes into the registers that name tiles to the tensor core. */
__device__ inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }

/* Known to be 0, the compiler would make a copy of all that is done with it, for which there are no registers. */
__device__ inline float hidden_zero()
{
    float x;
    asm volatile("mov.b32 %0, 0;" : "=f"(x));
    return x;
}

/* One of the warpgroups: what it knows, and where it is in the stream of blocks. */
template <class T, class S> struct warpgroup {
    static constexpr int D = S::D, KEYS = S::KEYS;
    forward_shared<S> &sh;
    const args &a;
    const int group;
    const float c;
    bool exact; /* the maximum follows the keys */
    ring<S::STAGES> at;
    float sums[4]; /* with TENSOR_SUMS, a quarter of the sum of P in each lane: [0] and [2] */
    typename S::template terms<T> terms;

    __device__ int lane() const { return threadIdx.x % 32; }
    __device__ uint64_t Q() const { return tile_at(shared_address(sh.Q) + group * (int)sizeof sh.Q[0]); }
    __device__ uint64_t K(int stage) const { return on(tile_at(shared_address(sh.K)), stage * (int)sizeof sh.K[0]); }
    __device__ uint64_t V(int stage) const
    {
        return on(tile_at(shared_address(sh.V), KEYS * 128), stage * (int)sizeof sh.V[0]);
    }

    __device__ void release(uint64_t &empty)
    {
        if (lane() == 0)
            arrive(shared_address(&empty));
    }

    /* With TURNS: one turn for each block. */
    __device__ void take_turn()
    {
        if (S::TURNS)
            named_sync(1 + group, 256);
    }
    __device__ void pass_turn()
    {
        if (S::TURNS)
            named_arrive(1 + (group + 1) % S::GROUPS, 256);
    }

    /* Lets blocks pass that none of these rows sees. */
    __device__ void skip(int blocks)
    {
#pragma unroll 1
        for (; blocks > 0; blocks--, at.next()) {
            take_turn(), pass_turn();
            wait(shared_address(&sh.k_full[at.at()]), at.parity());
            release(sh.k_empty[at.at()]);
            wait(shared_address(&sh.v_full[at.at()]), at.parity());
            release(sh.v_empty[at.at()]);
        }
    }

    /* S = Q K^T for the block in this stage, or its first keys. */
    template <int N> __device__ void multiply_keys(float (&s)[N], int stage, int parity)
    {
        wait(shared_address(&sh.k_full[stage]), parity);
        wgmma_fence();
        multiply_rows<T, D, 64, KEYS, 2 * N>(s, Q(), K(stage));
        wgmma_commit();
    }

    /* O += P V, or O = P V, for the block that it is the turn of. */
    __device__ void multiply_values(float (&O)[D / 2], const uint32_t (&P)[KEYS / 16][4], int keep)
    {
        const int stage = uniform(at.at());
        wait(shared_address(&sh.v_full[stage]), at.parity());
        wgmma_fence();
        multiply_columns<T, D, KEYS>(O, P, V(stage), keep);
        if constexpr (S::TENSOR_SUMS)
            S::template add_up<T>(sums, P, keep);
        wgmma_commit();
    }

    __device__ void rescale(float (&O)[D / 2], const row_state &x)
    {
#pragma unroll
        for (int i = 0; i < D / 2; i++)
            O[i] *= x.factor[i / 2 % 2];
        if (S::TENSOR_SUMS)
            sums[0] *= x.factor[0], sums[2] *= x.factor[1];
    }

    /* Waits for the last O += P V, if there was any. */
    __device__ void finish(bool any = true)
    {
        wgmma_wait<0>();
        if (any) {
            release(sh.v_empty[at.at()]);
            at.next();
        }
    }

    /* Is block j at an edge? Then what is visible of it is found while its S is on the way. */
    template <int N>
    __device__ bool look_at(uint32_t (&visible)[2], const forward_work<S::ROWS> &w, int row, int j, int clear_from,
                            int clear_to)
    {
        const bool edge = j < clear_from || j >= clear_to;
        if (edge)
#pragma unroll
            for (int r = 0; r < 2; r++)
                visible[r] = visible_in<S, N / 2>(w, row + 8 * r, w.first + j * KEYS + threadIdx.x % 4 * 2);
        return edge;
    }

    /* Q K^T of block j becomes P; true: O has to be multiplied with the factors. */
    template <int N>
    __device__ bool weigh_terms(float (&s)[N], int j, row_state &x, bool edge, const uint32_t (&visible)[2],
                                bool &unset)
    {
        if (terms.apply(s, j))
            return weigh<S>(s, x, a, edge, visible, c, exact, unset);
#pragma unroll
        for (int i = 0; i < N; i++)
            s[i] = hidden_zero();
        return false;
    }

    /* P as the product with V wants it. */
    template <int N> __device__ void pack(uint32_t (&P)[KEYS / 16][4], const float (&s)[N])
    {
        pack_rows<T, KEYS>(P, s);
        terms.drop(P);
    }

    /* Q may be overwritten: nobody does where a block has one tile only. */
    __device__ void release_q()
    {
        if (!S::FEW)
            release(sh.q_empty[group]);
    }

    /* P of the block that a tile begins with, or of the first keys of it: causal rows often see no more than half. */
    template <int N>
    __device__ void begin(uint32_t (&P)[KEYS / 16][4], row_state &x, const forward_work<S::ROWS> &w, int row, int seen,
                          bool &unset)
    {
        float s[N / 2];
        const int stage = uniform(at.at());
        take_turn();
        multiply_keys(s, stage, at.parity());
        pass_turn();
        uint32_t visible[2];
        const bool edge = look_at<N>(visible, w, row, seen - 1, w.clear_from, w.clear_to);
        terms.draw(w, row, seen - 1);
        wgmma_wait<0>();
        release(sh.k_empty[stage]);
        if (seen == 1)
            release_q();
        weigh_terms(s, seen - 1, x, edge, visible, unset);
        pack(P, s);
    }

    /* The blocks of a tile, S and O += P V one after the other: the other warpgroups keep the tensor core busy. The last
     * O += P V is left running. */
    __device__ void attend_in_turn(float (&O)[D / 2], uint32_t (&P)[KEYS / 16][4], row_state &x,
                                   const forward_work<S::ROWS> &w, int row, int seen)
    {
        bool unset = true; /* some row of the warp has no maximum yet */
        const int clear_from = w.clear_from, clear_to = w.clear_to;
#pragma unroll 1
        for (int j = seen - 1; j >= 0; j--) {
            float s[KEYS / 2];
            finish(j != seen - 1);
            const int stage = uniform(at.at());
            take_turn();
            multiply_keys(s, stage, at.parity());
            pass_turn();
            uint32_t visible[2];
            const bool edge = look_at<KEYS>(visible, w, row, j, clear_from, clear_to);
            terms.draw(w, row, j);
            wgmma_wait<0>();
            release(sh.k_empty[stage]);
            if (j == 0)
                release_q();
            if (weigh_terms(s, j, x, edge, visible, unset) && j != seen - 1)
                rescale(O, x);
            pack(P, s);
            multiply_values(O, P, j != seen - 1);
        }
    }

    /* The same with the next S and the present O += P V in the tensor core together, and the exponentials of that S taken
     * under the latter. */
    __device__ void attend_overlapped(float (&O)[D / 2], uint32_t (&P)[KEYS / 16][4], row_state &x,
                                      const forward_work<S::ROWS> &w, int row, int seen, bool half)
    {
        bool unset = true;
        const int clear_from = w.clear_from, clear_to = w.clear_to;
        if (S::HALVES && half)
            begin<S::HALVES ? KEYS / 2 : KEYS>(P, x, w, row, seen, unset);
        else
            begin<KEYS>(P, x, w, row, seen, unset);
#pragma unroll 1
        for (int j = seen - 2; j >= 0; j--) {
            float s[KEYS / 2];
            ring<S::STAGES> ahead = at;
            ahead.next();
            const int stage = uniform(ahead.at());
            take_turn();
            multiply_keys(s, stage, ahead.parity());
            multiply_values(O, P, j != seen - 2);
            pass_turn();
            uint32_t visible[2];
            const bool edge = look_at<KEYS>(visible, w, row, j, clear_from, clear_to);
            terms.draw(w, row, j);
            wgmma_wait<1>();
            release(sh.k_empty[stage]);
            if (j == 0)
                release_q();
            const bool grew = weigh_terms(s, j, x, edge, visible, unset);
            keep_order(__float_as_int(S::TENSOR_SUMS ? s[0] + s[KEYS / 2 - 1] : x.l[0] + x.l[1]));
            finish();
            if (grew)
                rescale(O, x);
            pack(P, s);
        }
        multiply_values(O, P, seen > 1);
    }

    /* The same with the next S asked for as soon as the exponents of the present one are taken out of its registers, so
     * that it is there when these exponentials are done: for warpgroups that have few others to wait under. */
    __device__ void attend_early(float (&O)[D / 2], uint32_t (&P)[KEYS / 16][4], row_state &x,
                                 const forward_work<S::ROWS> &w, int row, int seen)
    {
        bool unset = true;
        const int clear_from = w.clear_from, clear_to = w.clear_to;
        float s[KEYS / 2];
        ring<S::STAGES> ahead = at;
        uint32_t visible[2];
        multiply_keys(s, uniform(ahead.at()), ahead.parity());
        wgmma_commit(); /* as if an O += P V had been asked for after it, as it is in the loop */
        bool edge = look_at<KEYS>(visible, w, row, seen - 1, clear_from, clear_to);
        wgmma_wait<1>();
#pragma unroll 1
        for (int j = seen - 1; j > 0; j--) {
            float e[KEYS / 2];
            release(sh.k_empty[ahead.at()]);
            ahead.next();
            const bool grew = settle<S>(s, x, a, edge, visible, c, exact, unset);
            wgmma_wait<0>(); /* by all warps, as it must be, where only some have rows that grew */
            if (grew && j != seen - 1)
                rescale(O, x);
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++)
                e[i] = fmaf(s[i], c, -x.offset[i / 2 % 2]);
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) /* not after the registers of s are given away */
                asm volatile("" : "+f"(e[i]));
            multiply_keys(s, uniform(ahead.at()), ahead.parity());
            exponentials<S, true>(e, x, c);
            edge = look_at<KEYS>(visible, w, row, j - 1, clear_from, clear_to);
            keep_order(__float_as_int(x.l[0] + x.l[1]));
            wgmma_wait<1>();
            if (j != seen - 1) {
                release(sh.v_empty[at.at()]);
                at.next();
            }
            pack_rows<T, KEYS>(P, e);
            multiply_values(O, P, j != seen - 1);
            wgmma_wait<1>();
        }
        release(sh.k_empty[ahead.at()]);
        release_q();
        const bool grew = weigh<S>(s, x, a, edge, visible, c, exact, unset);
        finish(seen > 1);
        if (grew && seen > 1)
            rescale(O, x);
        pack_rows<T, KEYS>(P, s);
        multiply_values(O, P, seen > 1);
    }

    /* All tiles, twice: the second time those only that went out of range. Of few tiles a block has one, and its Q stays. */
    __device__ void run(const tile_order &order)
    {
        if (group == S::GROUPS - 1)
            pass_turn(); /* the first is the first group's */
#pragma unroll 1
        for (int n = 0;; n += S::FEW ? 0 : 1) {
            wait(shared_address(&sh.q_full[group]), n % 2);
            const forward_work<S::ROWS> &w = sh.work[n % AHEAD];
            uint64_t &closed = sh.closed[n % AHEAD];
            if (w.rows == 0) {
                release_q(), release(closed);
                if (exact)
                    return;
                exact = true;
                continue;
            }
            float O[D / 2], divide[2];
            uint32_t P[KEYS / 16][4];
            row_state x = { { -CUDART_INF_F, -CUDART_INF_F }, {}, {}, { 1.0f, 1.0f } };
            const int part = S::part(group, n), warp = threadIdx.x / 32 % 4, row0 = part * 64 + warp * 16;
            const int seen = w.seen[part];
            skip(w.blocks - seen);
            terms.begin(w, row0 + lane() / 4);
            if (seen == 0)
                release_q();
            else if constexpr (S::EARLY)
                attend_early(O, P, x, w, row0 + lane() / 4, seen);
            else if (S::OVERLAP)
                attend_overlapped(O, P, x, w, row0 + lane() / 4, seen, w.half[part]);
            else
                attend_in_turn(O, P, x, w, row0 + lane() / 4, seen);
            if (S::TENSOR_SUMS && seen > 0) {
                wgmma_wait<0>();
                x.l[0] += sums[0], x.l[1] += sums[2];
            }
            bool good = conclude<S>(x, a, w, row0 + lane() / 4, order.by, divide);
            terms.finish(divide);
            const bool empty = __any_sync(~0u, divide[0] == 0.0f || divide[1] == 0.0f);
            finish(seen > 0);
            good &= send_out<T, S>(O, divide, empty, a, w, order.by, sh.out[group * 4 + warp], row0);
            if (!exact && seen > 0 && !good && (!S::FEW || lane() == 0)) /* whose arrival the others wait for */
                sh.fails(w.turn, S::part(group, only_now(n))); /* not part: the loop over keys wants its register */
            __syncwarp();
            release(closed);
            if (S::FEW) {
                if (exact)
                    return;
                exact = true;
                wait(shared_address(&closed), 0);
                const uint32_t parts = sh.failed_parts(0);
                if (!(parts >> part & 1)) {
                    if (parts)
                        skip(w.blocks);
                    return;
                }
            }
        }
    }
};

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

/* What the first warpgroup does but for the warp that is left, one role a warp. */
template <class S>
__device__ inline void feed(forward_shared<S> &sh, const args &a, const tensor_map &q, const tensor_map &k,
                            const tensor_map &v, const tile_order &order)
{
    int tiles = 0;
    if (threadIdx.x < 32) {
        loader<S> l = { sh, k, v, a.lengths_k || a.offsets_k, threadIdx.x == 0, {}, {}, 0, 0 };
#pragma unroll 1
        for (int run = 0; run < 2; run++)
            l.run();
    } else if (threadIdx.x < 64) {
#pragma unroll 1
        for (int again = 0; again < 2; again++) {
            plan_tiles<S>(sh, a, order, tiles, again);
            const int end = tiles - 1; /* when all are past it, it is known which tiles failed */
            wait(shared_address(&sh.closed[end % AHEAD]), end / AHEAD % 2);
        }
    } else if (threadIdx.x == 64) {
#pragma unroll 1
        for (int run = 0; run < 2; run++)
            fetch_q<S>(sh, q, tiles);
    }
}

template <class T, class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    forward_sm90(const __grid_constant__ args a, const __grid_constant__ tensor_map q,
                 const __grid_constant__ tensor_map k, const __grid_constant__ tensor_map v,
                 const __grid_constant__ tile_order order)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(1024) char memory[];
    auto &sh = *(forward_shared<S> *)memory;
    if (threadIdx.x < FAILURES)
        sh.failed[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        init_barriers<S>(sh, 4 * S::GROUPS + 1);
        barrier_init_done();
        prefetch_map(q.map), prefetch_map(k.map), prefetch_map(v.map);
    }
    S::prepare();
    let_next_start();
    wait_for_last();
    __syncthreads();
    if (threadIdx.x < 128) {
        fewer_registers<S::PRODUCER_REGISTERS>();
        feed<S>(sh, a, q, k, v, order);
    } else {
        more_registers<S::REGISTERS>();
        warpgroup<T, S> g = { sh, a, uniform(threadIdx.x / 128) - 1, unit_of<S>(a) * LOG2E, false, {}, {}, {} };
        g.run(order);
    }
#endif
}

/* The warp that feeds the one tile of a block: Q, K and V, and K and V once more where some rows went out of range. */
template <class S>
__device__ inline void feed_alone(forward_shared<S> &sh, const args &a, const tensor_map &q, const tensor_map &k,
                                  const tensor_map &v)
{
    forward_work<S::ROWS> &w = sh.work[0];
    loader<S> l = { sh, k, v, a.lengths_k || a.offsets_k, threadIdx.x == 0, {}, {}, 0, 0 };
    for (int i = 0; i < S::GROUPS && l.leader; i++) {
        const uint32_t full = shared_address(&sh.q_full[i]);
        if (w.seen[i] > 0) {
            arrive_expecting(full, tile_bytes<S::D, 64>);
            load_tile<S::D, 64>(shared_address(sh.Q[i]), q, w.s.q_row + w.i0 + i * 64, w.h, w.s.q_batch, full);
        } else
            arrive(full);
    }
    l.load_alone();
    wait(shared_address(&sh.closed[0]), 0);
    if (sh.failed_parts(0))
        l.load_alone();
}

/* The same where there are so few tiles that each has a block of its own: nothing is planned ahead, and what a block is to do
 * it finds out while the kernel before it ends. All that counts is when the first S is there, and how long one block of keys
 * takes after the other. */
template <class T, class S>
__global__ void __launch_bounds__(S::THREADS, S::RESIDENT)
    forward_sm90few(const __grid_constant__ args a, const __grid_constant__ tensor_map q,
                    const __grid_constant__ tensor_map k, const __grid_constant__ tensor_map v,
                    const __grid_constant__ tile_order order)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(1024) char memory[];
    auto &sh = *(forward_shared<S> *)memory;
    forward_work<S::ROWS> &w = sh.work[0];
    if (threadIdx.x == 0) {
        init_barriers<S>(sh, 4 * S::GROUPS);
        barrier_init_done();
        prefetch_map(q.map), prefetch_map(k.map), prefetch_map(v.map);
        sh.failed[0] = 0;
    }
    let_next_start();
    if (!a.uniform)
        wait_for_last(); /* which may write the lengths */
    if (threadIdx.x / 32 == 1) {
        const int tile = (int)blockIdx.x / order.heads, head = (int)blockIdx.x - tile * order.heads;
        find_work<S>(a, 0, head, order.tiles - 1 - tile, 0, order, w);
    }
    wait_for_last();
    __syncthreads();
    if (w.rows <= 0)
        return;
    if (threadIdx.x < 128) {
        fewer_registers<S::PRODUCER_REGISTERS>();
        if (threadIdx.x < 32)
            feed_alone<S>(sh, a, q, k, v);
    } else {
        more_registers<S::REGISTERS>();
        warpgroup<T, S> g = { sh, a, uniform(threadIdx.x / 128) - 1, unit_of<S>(a) * LOG2E, false, {}, {}, {} };
        g.run(order);
    }
#endif
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

/* With what the kernel wants to know besides. */
template <class S, class Shared, class Kernel, class... More>
heed_status forward_sm90_start(Kernel kernel, const args &a, const key_parts &by, int units, const heed_exec *x,
                               const More &...more)
{
    static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of one block");
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
    heed_status status = heed_tensor_map(&q, a.q, a.D, a.q_rows, a.Hq, q_batches, 64);
    if (!status)
        status = heed_tensor_map(&k, keys, a.D, rows, a.Hk, k_batches, S::KEYS);
    if (!status)
        status = heed_tensor_map(&v, values, a.Dv, rows, a.Hk, k_batches, S::KEYS);
    if (status)
        return status;
    const int blocks = (int)(S::FEW ? total : HEED_MIN(total, units));
    const tile_order order = order_of<S>(a, by, rows * (a.D + a.Dv) * 2, blocks);
    if (total == blocks) /* a block for each tile: what it does before its first load is worth hiding */
        return launch_next(kernel, blocks, S::THREADS, sizeof(Shared), x, a, q, k, v, order, more...);
    return launch(kernel, blocks, S::THREADS, sizeof(Shared), x, a, q, k, v, order, more...);
}

/* As S where its tiles fit on the GPU all at once, or as the first of the Taller ones that does; the last takes any number. */
template <class T, class S, class... Taller>
heed_status forward_sm90_launch(const args &a, const key_parts &by, int units, const heed_exec *x)
{
    if constexpr (S::FEW) {
        if (by.count > 1 || tiles_of(a.Sq, S::ROWS) * a.B * a.Hq > S::RESIDENT * units)
            return forward_sm90_launch<T, Taller...>(a, by, units, x);
        return forward_sm90_start<S, forward_shared<S>>(forward_sm90few<T, S>, a, by, units, x);
    } else
        return forward_sm90_start<S, forward_shared<S>>(forward_sm90<T, S>, a, by, units, x);
}

/* Few rows and many keys are taken in parts, so that a small batch fills the device. Parts are whole blocks of 64 and 128
 * keys; the more rows, the more a part costs, and the longer it is. */
inline key_parts parts_of(const heed_problem *p)
{
    const int64_t keys = p->full.keys;
    const int64_t part = p->Sq <= 16 ? 1024 : p->Sq <= 64 ? 2048 : 8192;
    if (p->Sq > 1024 || keys < HEED_MAX(2 * part, 3072) || p->a.offsets_q || p->a.offsets_k)
        return { 1, INT32_MAX, NULL, NULL };
    return { (int)tiles_of(keys, part), (int)part, NULL, NULL };
}

inline int64_t part_rows(const heed_problem *p) { return p->B * p->Hq * p->Sq; }

inline size_t forward_sm90_workspace(const heed_problem *p)
{
    const int parts = parts_of(p).count;
    return parts > 1 ? (size_t)(parts * part_rows(p) * (p->Dv + 1)) * sizeof(float) : 0;
}

/* run: launches the kernel for a problem in one type. */
template <class Run>
heed_status forward_sm90_run(const heed_problem *p, const heed_plan *plan, const heed_exec *x, Run run)
{
    prologue begin(p, x);
    if (begin.status)
        return begin.status;
    const args &a = begin.a;
    key_parts by = parts_of(p);
    if (by.count > 1) {
        by.o = (float *)x->workspace;
        by.lse = by.o + by.count * part_rows(p) * a.Dv;
    }
    heed_status status = run(a, by, plan->device.units, x);
    return status || by.count == 1 ? status : heed_cuda_merge_parts(a, by.count, by.o, by.lse, NULL, plan, x);
}

#endif
