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

#include "feed_sm90.cuh"

/* ---- The warpgroups ---------------------------------------------------------------------------------------------- */

/* Hides what a row does not see. A lane has two rows, r and r + 8. */
template <class S> __device__ inline void hide(float (&s)[S::KEYS / 2], const forward_work<S::ROWS> &w, int row, int n0)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int low = w.low[row + 8 * r] - n0, high = w.high[row + 8 * r] - n0;
#pragma unroll
        for (int i = 0; i < S::KEYS / 8; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int n = 8 * i + e; /* and 2 (lane % 4), which the caller has added to n0 */
                if (n < low || n >= high)
                    s[4 * i + 2 * r + e] = -CUDART_INF_F;
            }
    }
}

/* softcap tanh(scale S / softcap), but for the factor, which the exponent takes. */
template <int N> __device__ inline void cap(float (&s)[N], const args &a)
{
    const float twice = 2.0f * LOG2E * a.scale / a.softcap;
#pragma unroll
    for (int i = 0; i < N; i++) {
        s[i] = fmaf(-2.0f, reciprocal_fast(exp2_fast(s[i] * twice) + 1.0f), 1.0f);
        if (i % 8 == 7) /* a few at a time, for the sake of registers */
            keep_order(__float_as_int(s[i]) & INT32_MAX);
    }
}

/* Two rows of a lane: offset is c m, l has the sum of the lane's own columns, and factor is what O has to be multiplied
 * with since the maximum grew. */
struct row_state {
    float m[2], offset[2], l[2], factor[2];
};

/* Brings the maxima up to this block. A maximum that grew little is left: P may reach 2^8. Where c m is so large that its
 * rounding matters to an exponent, m is subtracted from S instead, which holds for this block only: unless the next one is
 * refreshed too, the sum is spoilt. */
template <class S> __device__ inline void refresh_maxima(float (&s)[S::KEYS / 2], row_state &x, float c, bool again)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float most = s[2 * r];
#pragma unroll
        for (int i = 0; i < S::KEYS / 8; i++)
            most = fmaxf(most, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
        most = fmaxf(x.m[r], quad_max(most));
        if ((most - x.m[r]) * c < 8.0f)
            most = x.m[r];
        x.factor[r] = x.m[r] == -CUDART_INF_F ? 0.0f : exp2_fast((x.m[r] - most) * c);
        x.l[r] *= x.factor[r];
        x.m[r] = most, x.offset[r] = most == -CUDART_INF_F ? 0.0f : most * c;
        if (!(fabsf(x.offset[r]) < 1e7f)) {
#pragma unroll
            for (int i = 0; i < S::KEYS / 8; i++)
                s[4 * i + 2 * r] -= most, s[4 * i + 2 * r + 1] -= most;
            x.offset[r] = 0.0f;
            if (!again)
                x.l[r] = CUDART_NAN_F;
        }
    }
}

/* P = 2^(c S - c m), in place. */
template <class S> __device__ inline void exponentials(float (&s)[S::KEYS / 2], row_state &x, float c)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
        for (int i = 0; i < S::KEYS / 8; i++) {
            float *const p = &s[4 * i + 2 * r];
            p[0] = exp2_fast(fmaf(p[0], c, -x.offset[r]));
            p[1] = exp2_fast(fmaf(p[1], c, -x.offset[r]));
            sum0 += p[0], sum1 += p[1];
        }
        x.l[r] += sum0 + sum1;
    }
}

/* S of block j becomes P; true: O has to be multiplied with the factors. */
template <class S>
__device__ inline bool weigh(float (&s)[S::KEYS / 2], row_state &x, const args &a, const forward_work<S::ROWS> &w,
                             int row, int j, bool edge, float c, bool exact, bool &unset)
{
    const bool refresh = exact || edge || unset;
    bool grew = false;
    if (S::CAPPED)
        cap(s, a);
    if (edge)
        hide<S>(s, w, row, w.first + j * S::KEYS + threadIdx.x % 4 * 2);
    if (refresh) {
        refresh_maxima<S>(s, x, c, exact);
        grew = __any_sync(~0u, x.factor[0] != 1.0f || x.factor[1] != 1.0f);
        unset = __any_sync(~0u, x.m[0] == -CUDART_INF_F || x.m[1] == -CUDART_INF_F);
    }
    exponentials<S>(s, x, c);
    return grew;
}

/* The number of row i of a tile among the rows of all parts. */
template <int ROWS> __device__ inline int64_t part_row(const args &a, const forward_work<ROWS> &w, int i)
{
    return (((int64_t)w.part * a.B + w.s.b) * a.Hq + w.h) * a.Sq + w.i0 + i;
}

/* The sums are complete: writes lse; divide: what is left to multiply O with. False where something was out of range. */
template <class S>
__device__ inline bool conclude(const row_state &x, const args &a, const forward_work<S::ROWS> &w, int row,
                                const tile_order &order, float (&divide)[2])
{
    const float sink = a.sink.data && order.by.count == 1 ? load(a.sink, row_at(a.sink, 0, w.h, 0)) : -CUDART_INF_F;
    float size = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = row + 8 * r;
        float sum = quad_sum(x.l[r]), own = x.m[r] * (S::CAPPED ? a.softcap : a.scale), most = fmaxf(own, sink);
        size += fabsf(sum);
        divide[r] = 0.0f;
        if (sum != 0.0f) { /* else the row saw no key */
            const float factor = exp2_fast((own - most) * LOG2E);
            sum = sum * factor + exp2_fast((sink - most) * LOG2E);
            divide[r] = factor / sum;
        }
        if (threadIdx.x % 4 == 0 && i < w.rows) {
            float *const lse = order.by.count > 1 ? order.by.lse + part_row(a, w, i)
                               : a.lse.data
                                   ? (float *)a.lse.data + row_at(a.lse, w.s.q_batch, w.h, w.s.q_row + w.i0 + i)
                                   : NULL;
            if (lse)
                *lse = sum == 0.0f ? -CUDART_INF_F : most + logf(sum);
        }
    }
    return size < 1e37f;
}

/* A tile is over for this group: O is divided and leaves, 64 columns at a time, through a few rows of shared memory that
 * are the warp's own. The O of a part leaves as it is. False where something was out of range. */
template <class T, class S>
__device__ inline bool send_out(float (&O)[S::D / 2], const float (&divide)[2], const args &a,
                                const forward_work<S::ROWS> &w, const tile_order &order, char *out, int row0)
{
    const int lane = threadIdx.x % 32, rows = w.rows - row0;
    float size[4] = {};
#pragma unroll
    for (int i = 0; i < S::D / 2; i++) {
        size[i % 4] += fabsf(O[i]);
        O[i] *= divide[i / 2 % 2];
    }
    if (__any_sync(~0u, divide[0] == 0.0f || divide[1] == 0.0f)) /* without a key O may be anything */
#pragma unroll
        for (int i = 0; i < S::D / 2; i++)
            O[i] = divide[i / 2 % 2] == 0.0f ? 0.0f : O[i];
    if (order.by.count > 1) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i = lane / 4 + 8 * r;
            float *const o = order.by.o + part_row(a, w, row0 + i) * a.Dv;
            if (i < rows)
#pragma unroll
                for (int c = 0; c < S::D / 4; c++) {
                    const int column = c / 2 * 8 + lane % 4 * 2 + c % 2;
                    if (column < a.Dv)
                        o[column] = O[c / 2 * 4 + 2 * r + c % 2];
                }
        }
        return size[0] + size[1] + size[2] + size[3] < 1e37f;
    }
    const int64_t pitch = a.o.stride[2];
    T *o = (T *)a.o.data + row_at(a.o, w.s.q_batch, w.h, w.s.q_row + w.i0 + row0 + lane / 8) + lane % 8 * 8;
    const uint32_t to = shared_address(out) + lane % 16 * 128;
#pragma unroll
    for (int box = 0; box < (S::D + 63) / 64; box++, o += 64) {
#pragma unroll
        for (int c = 0; c < 8 && box * 8 + c < S::D / 8; c += 2) {
            const float *const x = &O[box * 32 + 4 * c];
            store_matrices(to + ((c + lane / 16) ^ (lane % 8)) * 16, pack<T>(x[0], x[1]), pack<T>(x[2], x[3]),
                           pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
        }
        __syncwarp();
        const int columns = a.Dv - box * 64;
#pragma unroll
        for (int e = 0; e < 16; e += 4) {
            const int i = e + lane / 8;
            if (i < rows && lane % 8 * 8 + 8 <= columns)
                *(uint4 *)(o + e * pitch) = *(const uint4 *)(out + i * 128 + (lane % 8 ^ i % 8) * 16);
        }
        if (columns < 64 && columns % 8) /* the last few, one by one */
#pragma unroll 1
            for (int i = lane / 8; i < min(rows, 16); i += 4) {
                const int x = columns / 8 * 8 + lane % 8;
                if (x < columns)
                    o[(i - lane / 8) * pitch + x - lane % 8 * 8] = ((const T *)(out + i * 128 +
                                                                                (columns / 8 ^ i % 8) * 16))[lane % 8];
            }
        __syncwarp();
    }
    return size[0] + size[1] + size[2] + size[3] < 1e37f;
}

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
