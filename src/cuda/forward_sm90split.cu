/* Forward for fp32 on Hopper, head sizes to 256: each operand is two numbers of fp16 (split.cuh), and the rest is like
 * forward_sm90.cuh, whose planner and loader serve here too. To them a tensor of D columns of fp32 is one of 2 D columns
 * of fp16, which a pass before the kernel has written: hi, then lo. Q is met once, so where the copy engine can bring it as
 * it is the warpgroup splits it in its place. Two to four warpgroups of 64 rows each compute
 *
 *     S = Qlo Khi + Qhi Klo + Qhi Khi     P = 2^(c S - c m)     O += Plo Vhi + Phi Vlo + Phi Vhi
 *
 * over the keys from the first to the last, 64 at a time: under a causal mask the first rows of a tile are done before the
 * others, and their warpgroup is at the next tile meanwhile. The tensor core cuts where fp32 rounds, so each 64 keys of O are
 * summed by themselves and added to the others in fp32. Either the next S is in the tensor core together with the present
 * O; or, where this leaves registers for a fourth warpgroup, each has one product after the other. So it is above head size
 * 128 too, where O leaves no registers: P V is added to it 64 columns at a time, and at 256 there is room for 32 keys at a time.
 *
 * Where two numbers of fp16 do not hold what is needed for a score, or where something is infinite or not a number, the
 * rows are marked, and forward_split.cu computes them again. */
#include "forward_sm90.cuh"
#include "softmax_split.cuh"
#include "split_sm90.cuh"

/* TERMS: of scores_split.cuh. */
template <int HEAD_, int PARTS_, int GROUPS_, int STAGES_, int KEYS_ = SPLIT_ROWS, int TERMS_ = WITHOUT_TERMS>
struct split_shape {
    static constexpr int HEAD = HEAD_, PARTS = PARTS_, D = PARTS * HEAD, GROUPS = GROUPS_, ROWS = 64 * GROUPS,
                         KEYS = KEYS_, ALIGNED = SPLIT_ROWS, EDGES = ROWS;
    static constexpr int STAGES = STAGES_, THREADS = 128 + 128 * GROUPS, WARPS_OUT = 1; /* of none */
    static constexpr bool WIDE = HEAD > 128; /* O leaves no registers for all of P V */
    static constexpr int PRODUCER_REGISTERS = WIDE ? 56 : GROUPS == 2 ? 40 : 32;
    static constexpr int REGISTERS = WIDE ? 224 : GROUPS == 2 ? 232 : GROUPS == 3 ? 160 : 112;
    static constexpr bool DRAWS_EARLY = HEAD < 256; /* there are registers for it while S is on its way */
    static constexpr int TERMS = TERMS_;
    static constexpr bool OVERLAP = GROUPS < 4 && !WIDE && !TERMS, FORTH = true, FEW = false;

    /* Who sees the fewest keys of one tile, and is done with it first, sees the most of the next. */
    static __device__ int part(int group, int n) { return n % 2 ? GROUPS - 1 - group : group; }

    /* The rows of a head are shared out evenly, 64 at a time: the first few tiles have `least` times 64, the others 64
     * more. */
    static __device__ int first_row(int tile, int least, int few) { return 64 * (tile * least + max(tile - few, 0)); }
    static __device__ int sequences_together(const args &) { return 0; }
};

/* Shifts of K and of V of 32 blocks, one of each a lane, in one register: asked for block by block, each would hold up
 * its block for as long as memory takes. */
struct both_shifts {
    int bits;
    __device__ both_shifts(int k, int v)
        : bits((k & 0x7ff) | (k >> 16 & 1) << 11 | (v & 0xffff) << 16 | (v >> 16 & 1) << 15)
    {
    }
    __device__ shift k(int lane) const
    {
        const int x = __shfl_sync(~0u, bits, lane);
        return { (short)(x << 21 >> 21), (short)(x >> 11 & 1) };
    }
    __device__ shift v(int lane) const
    {
        const int x = __shfl_sync(~0u, bits, lane);
        return { (short)(x >> 16), (short)(x >> 15 & 1) };
    }
};

struct split_order {
    tile_order order;
    int exact_below; /* where the shifts of Q and K add up to less, two numbers of fp16 are not enough */
    float scale;     /* unshifted_scale() */
    bool q_whole;    /* Q comes as it is, and is split in its place */
};

template <class S> struct split_shared : forward_shared<S> {
    unsigned most[S::GROUPS][4]; /* of what each warp has of a Q that is split */
    shift q[S::GROUPS];
};

/* ---- The warpgroups ---------------------------------------------------------------------------------------------- */

/* O += T now. */
template <int N> __device__ inline void promote(float (&O)[N], const float (&T)[N], const float (&now)[2])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        O[i] = fmaf(T[i], now[i / 2 % 2], O[i]);
}

template <class S>
__device__ inline void write_rows(float (&O)[S::HEAD / 2], const split_state &x, int least, const args &a,
                                  const forward_work<S::ROWS> &w, int row)
{
    const float sink = a.sink.data ? load(a.sink, row_at(a.sink, 0, w.h, 0)) : -CUDART_INF_F;
    const int down = max(-250, min(250, -least)), half = down / 2;
    const float rest = power(down - half) * (S::TERMS ? a.keep_scale : 1.0f);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = row + 8 * r;
        float lse;
        const float sum = finish_row(quad_sum(x.l[r]), (x.offset[r] + P_TOP) / LOG2E, x.offset[r], sink, lse);
        const float divide = sum == 0.0f ? 0.0f : power(half) / sum;
        const float rounded_by = divide == 0.0f ? 0.0f : fmaf(-divide, sum, power(half)) / sum;
#pragma unroll
        for (int n = 0; n < S::HEAD / 4; n++) {
            float &o = O[n / 2 * 4 + 2 * r + n % 2];
            o = fmaf(o, divide, o * rounded_by) * rest;
        }
        if (a.lse.data && threadIdx.x % 4 == 0 && i < w.rows)
            store(a.lse, row_at(a.lse, w.s.q_batch, w.h, w.s.q_row + w.i0 + i), lse);
    }
    const int row0 = row - threadIdx.x % 32 / 4;
    store_rows_fp32<S::HEAD, 1>((const float(&)[1][S::HEAD / 8][4]) O, a.o, a.Dv, false, [&](int r) {
        return row0 + r < w.rows ? row_at(a.o, w.s.q_batch, w.h, w.s.q_row + w.i0 + row0 + r) : NOWHERE;
    });
}

template <class S>
__device__ inline void consume_split(split_shared<S> &sh, const args &a, const split_tensors &split,
                                     const split_order &by)
{
    constexpr int K_BYTES = sizeof sh.K[0], V_BYTES = sizeof sh.V[0];
    const auto group = []() { return uniform(thread_anew() / 128) - 1; }; /* not kept: there are few registers */
    const uint32_t k_full = shared_address(sh.k_full), v_full = shared_address(sh.v_full),
                   k_empty = shared_address(sh.k_empty), v_empty = shared_address(sh.v_empty);
    const uint64_t Q = tile_at(shared_address(sh.Q) + group() * (int)sizeof sh.Q[0]),
                   K0 = tile_at(shared_address(sh.K)), V0 = tile_at(shared_address(sh.V), S::KEYS * 128);
    ring<S::STAGES> at; /* of V; K of a block comes before V of the one before it */
    const auto release = [&](uint32_t empty) {
        if (threadIdx.x % 32 == 0)
            arrive(empty);
    };
#pragma unroll 1
    for (int n = 0;; n++) {
        wait(shared_address(&sh.planned[n % AHEAD]), n / AHEAD % 2);
        const forward_work<S::ROWS> &w = sh.work[n % AHEAD];
        if (w.rows == 0)
            return;
        const auto part = [&]() { return S::part(group(), n); };
        const auto row = [&]() { return part() * 64 + thread_anew() / 32 % 4 * 16 + thread_anew() % 32 / 4; };
        /* What is clear to its 64 rows, and which block they see first, may not depend on what tile they are in: the number
         * of heads and the longest sequence of a batch decide on that. */
        const auto low = [&](int i) { return w.low[part() * 64 + i]; };
        const auto high = [&](int i) { return w.high[part() * 64 + i]; };
        const int from = w.clear_from > 0 ? (min(low(0), low(63)) - w.first) / S::KEYS : 0;
        const int seen = w.seen[part()] > from ? w.seen[part()] : 0;
        const int own = w.s.q_row + w.i0 + (part() * 64 < w.rows ? part() * 64 : 0);
        /* Where those of 32 blocks are, among them block j. */
        const auto shifts_at = [&](int j) {
            const int64_t first = split_at(split.k, w.s.k_batch, w.hk, w.s.k_row + w.first);
            const int key = min(j / 32 * 32 + (int)threadIdx.x % 32, w.blocks - 1) * S::KEYS;
            return first + key / SPLIT_ROWS * SPLIT_ROWS;
        };
        const int *const k_shifts = (const int *)split.k.shifts, *const v_shifts = (const int *)split.v.shifts;
        int first[2] = {}; /* asked for early, and looked at when Q is there */
        if (seen)
            first[0] = k_shifts[shifts_at(from)], first[1] = v_shifts[shifts_at(from)];
        wait(shared_address(&sh.q_full[group()]), n % 2);
        const shift *q_shift = split.q.shifts + split_at(split.q, w.s.q_batch, w.h, own);
        if (S::PARTS == 2 && by.q_whole) {
            q_shift = sh.q + group();
            if (seen > 0)
                split_in_place<S::HEAD>(sh.Q[group()], w.rows - part() * 64, sh.most[group()], sh.q[group()],
                                        1 + group());
        }
        const shift q = *q_shift;
        both_shifts asked(first[0], first[1]);
        bool again = seen > 0 && q.strange;
        split_state x = { { CUDART_INF_F, CUDART_INF_F }, {}, true, false };
        float O[S::HEAD / 2];
#pragma unroll
        for (int i = 0; i < S::HEAD / 2; i++)
            O[i] = 0.0f;
        int least = 1000, j = seen > 0 ? from : 0;
        operand_of<S::KEYS> hi, lo;
        /* What takes S of block j to logits. */
        const auto scale_of = [&](int j) {
            if (j && j % 32 == 0)
                asked = both_shifts(k_shifts[shifts_at(j)], v_shifts[shifts_at(j)]);
            const shift k = asked.k(j % 32);
            again |= q.s + k.s < by.exact_below || k.strange;
            if (S::TERMS)
                return logit_scale<S::HEAD>(by.scale, q.s + k.s);
            return fmaxf(fminf(times_power(a.scale, -q.s - k.s), 3e38f), 1.2e-38f); /* as 0 -inf would be NaN */
        };
        const auto is_edge = [&](int j) {
            const int key = w.first + j * S::KEYS;
            return (j < w.clear_from && max(low(0), low(63)) > key) ||
                   (j >= w.clear_to && min(high(0), high(63)) < key + S::KEYS);
        };
        const auto key_of = [&](int j) { return w.first + j * S::KEYS + thread_anew() % 4 * 2; };
        const auto weigh = [&](float(&s)[S::KEYS / 2], int j, float c, bool edge, float(&now)[2]) {
            const int key = key_of(j);
            if constexpr (S::TERMS) {
                lane_scores<false, S::KEYS / 2> t = { s, w.i0 + row(), key };
                const head of = head_of(a, w.s, w.h); /* found anew: there are few registers */
                add_terms<S::TERMS>(t, c, a, w.s, of, [](int, float) {});
            }
            if (edge)
                hide<S>(s, w, row(), key);
            if constexpr (S::TERMS) {
                again |= follow_maxima<S>(s, x, O);
                weigh_logits<S>(s, x);
            } else
                again |= weigh_split<S>(s, x, c, O, now, [&](int r) { return row() + 8 * r < w.rows; });
        };
        /* What takes P V of block j to O, which is in units of 2^-least, the least shift of the V so far. Of sums over few
         * keys nothing was cut. */
        const auto units_of = [&](int j, bool edge) {
            const shift v = asked.v(j % 32);
            again |= v.strange;
            if (v.s < least) {
                const float down = power(max(v.s - least, -127));
#pragma unroll
                for (int i = 0; i < S::HEAD / 2; i++)
                    O[i] *= down;
                least = v.s;
            }
            return power(max(least - v.s, -127)) * (edge ? 1.0f : given_back<S::KEYS / 16>);
        };
        uint32_t dropped = 0;
        const auto draw = [&](int j) {
            if constexpr (S::TERMS == WITH_ALL_TERMS)
                if (has_dropout<S::TERMS>(a))
                    dropped = draw_dropped<false, S::KEYS / 2>(a, w.s, w.h, w.i0 + row(), key_of(j));
        };
        /* P as it goes into O. What dropout leaves of a row may be small beside the largest. */
        const auto split_kept = [&](float(&s)[S::KEYS / 2], float(&now)[2]) {
            if (has_dropout<S::TERMS>(a)) {
                int raised[2];
                drop<false>(s, dropped);
                split_weights(hi, lo, s, raised);
                now[0] *= power(-raised[0]), now[1] *= power(-raised[1]);
            } else
                split_weights(hi, lo, s);
        };
        const auto release_q = [&]() { release(shared_address(&sh.q_empty[group()])); };
        const auto skip = [&](int blocks) {
#pragma unroll 1
            for (; blocks > 0; blocks--) {
                wait(k_full + 8 * at.at(), at.parity());
                release(k_empty + 8 * at.at());
                wait(v_full + 8 * at.at(), at.parity());
                release(v_empty + 8 * at.at());
                at.next();
            }
        };
        skip(j);
        if constexpr (!S::OVERLAP) {
            if (seen == 0)
                release_q();
#pragma unroll 1
            for (; j < seen; j++) {
                float s[S::KEYS / 2], none[2] = {}, now[2], c;
                bool edge;
                wait(k_full + 8 * at.at(), at.parity());
                multiply_scores<S::HEAD, 64, S::PARTS>(s, Q, on(K0, uniform(at.at()) * K_BYTES), [&]() {
                    c = scale_of(j), edge = is_edge(j);
                    now[0] = now[1] = units_of(j, edge);
                    asm volatile("" : "+f"(c), "+f"(now[0])); /* or they would be found only when S is there */
                    if (S::DRAWS_EARLY)
                        draw(j);
                });
                release(k_empty + 8 * at.at());
                if (j == seen - 1)
                    release_q();
                weigh(s, j, c, edge, none);
                if (!S::DRAWS_EARLY)
                    draw(j);
                split_kept(s, now);
                wait(v_full + 8 * at.at(), at.parity());
                if constexpr (S::WIDE) {
                    multiply_by_panels<S::HEAD, S::HEAD / 64>(hi, lo, on(V0, uniform(at.at()) * V_BYTES), 0,
                                                              [&](int panel, const float(&T)[32]) {
                                                                  promote((float(&)[32])O[panel * 32], T, now);
                                                              });
                    release(v_empty + 8 * at.at());
                } else {
                    float T[S::HEAD / 2];
                    multiply_in_turn<S::HEAD, S::PARTS>(T, hi, lo, on(V0, uniform(at.at()) * V_BYTES));
                    release(v_empty + 8 * at.at());
                    promote(O, T, now);
                }
                at.next();
            }
        } else {
            if (seen > 0) {
                float s[S::KEYS / 2], none[2] = {};
                wait(k_full + 8 * at.at(), at.parity());
                multiply_scores<S::HEAD, 64, S::PARTS>(s, Q, on(K0, uniform(at.at()) * K_BYTES));
                release(k_empty + 8 * at.at());
                weigh(s, j, scale_of(j), is_edge(j), none);
                split_weights(hi, lo, s);
            }
            float T[S::HEAD / 2], now[2] = {}; /* P V of a block is added to O when the next S is under way */
#pragma unroll
            for (int i = 0; i < S::HEAD / 2; i++)
                T[i] = 0.0f;
#pragma unroll 1
            for (; j < seen - 1; j++) { /* P V of block j and S of the next */
                float s[S::KEYS / 2], c;
                bool edge;
                const ring<S::STAGES> next = { at.count + 1 };
                wait(k_full + 8 * next.at(), next.parity());
                wait(v_full + 8 * at.at(), at.parity());
                const auto meanwhile = [&]() {
                    now[0] = now[1] = units_of(j, is_edge(j));
                    c = scale_of(j + 1), edge = is_edge(j + 1);
                    asm volatile("" : "+f"(c), "+f"(now[0])); /* or they would be found only when S is there */
                };
                multiply_both<S::HEAD, 64, S::PARTS>(
                    s, Q, on(K0, uniform(next.at()) * K_BYTES), T, hi, lo, on(V0, uniform(at.at()) * V_BYTES),
                    [&]() { promote(O, T, now); }, meanwhile);
                release(k_empty + 8 * next.at());
                weigh(s, j + 1, c, edge, now);
                keep_order(__float_as_int(x.l[0]));
                wgmma_wait<0>();
                split_weights(hi, lo, s);
                release(v_empty + 8 * at.at());
                at.next();
            }
            release_q();
            promote(O, T, now);
            if (seen > 0) {
                now[0] = now[1] = units_of(j, is_edge(j));
                wait(v_full + 8 * at.at(), at.parity());
                multiply_values<S::HEAD, S::PARTS>(T, hi, lo, on(V0, uniform(at.at()) * V_BYTES));
                release(v_empty + 8 * at.at());
                promote(O, T, now);
                at.next();
            }
        }
        write_rows<S>(O, x, least, a, w, row());
        const int first_row = part() * 64;
        if (S::TERMS) /* rows whose logits were all too low, as biases that stand for a mask may make them */
            again |= __any_sync(~0u, x.low && (x.offset[0] == CUDART_INF_F || x.offset[1] == CUDART_INF_F));
        if (again && threadIdx.x % 32 == 0 && first_row < w.rows)
            split.q.marks[split_at(split.q, w.s.q_batch, w.h, w.s.q_row + w.i0 + first_row)] = split.zeros[2] = 1;
        skip(w.blocks - seen);
        __syncwarp();
        release(shared_address(&sh.closed[only_now(n) % AHEAD]));
    }
}

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

template <class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    forward_sm90split(const __grid_constant__ args a, const __grid_constant__ tensor_map q,
                      const __grid_constant__ tensor_map k, const __grid_constant__ tensor_map v,
                      const __grid_constant__ split_tensors split, const __grid_constant__ split_order by)
{
#if __CUDA_ARCH__ >= 900
    let_next_start();
    extern __shared__ __align__(1024) char memory[];
    auto &sh = *(split_shared<S> *)memory;
    if (threadIdx.x == 0) {
        init_barriers<S>(sh, 4 * S::GROUPS + 1);
        barrier_init_done();
        prefetch_map(q.map), prefetch_map(k.map), prefetch_map(v.map);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        fewer_registers<S::PRODUCER_REGISTERS>();
        int tiles = 0;
        if (threadIdx.x < 32) {
            wait_for_last();
            loader<S> l = { sh, k, v, a.lengths_k || a.offsets_k, threadIdx.x == 0, {}, {}, 0, 0 };
            l.run();
        } else if (threadIdx.x < 64)
            plan_tiles<S>(sh, a, by.order, tiles, false);
        else if (threadIdx.x == 64) {
            if (!by.q_whole) /* it is the pass that writes it */
                wait_for_last();
            fetch_q<S>(sh, q, tiles);
        }
    } else {
        more_registers<S::REGISTERS>();
        wait_for_last();
        consume_split<S>(sh, a, split, by);
    }
#endif
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

/* Tiles of a head: as high as they can be, or lower where all blocks together are done sooner with those. Rows that see
 * half of the keys on average are done when the longest tile is, or when all blocks have had their share. */
template <class S> static int64_t choose_tiles(const args &a, int units)
{
    const int clocks[] = { 0, 29, 31, 37, 46 }; /* of 64 keys, in hundreds, by warpgroups that have rows */
    const int64_t parts = tiles_of(a.Sq, 64), heads = (int64_t)a.B * a.Hq;
    int64_t best = tiles_of(a.Sq, S::ROWS), least = INT64_MAX;
    if (S::HEAD >= 128 && S::PARTS == 2 && heads * parts <= units)
        best = parts; /* 64 rows take 29 for 40 of 128: less where there is room for all at once */
    for (int groups = S::GROUPS; groups > 0 && S::GROUPS == 4; groups--) {
        const int64_t tiles = tiles_of(parts, groups), rounds = tiles_of(heads * tiles, units);
        const int64_t halves = a.left >= FAR && a.right >= FAR ? 2 * rounds * units
                                                               : HEED_MAX(2 * units, heads * (tiles + 1));
        if (halves * clocks[groups] < least)
            best = tiles, least = halves * clocks[groups];
    }
    return best;
}

template <class S>
static heed_status run(const args &a, const split_tensors &split, bool q_whole, int units, const heed_exec *x)
{
    static_assert(sizeof(split_shared<S>) <= 227 * 1024, "shared memory of one block");
    const int64_t tiles = choose_tiles<S>(a, units), heads = (int64_t)a.B * a.Hq, total = tiles * heads;
    if (total == 0)
        return HEED_OK;
    if (total > INT32_MAX - 1024)
        return heed_fail(HEED_UNSUPPORTED, "the problem has %lld tiles, a launch holds %d", (long long)total,
                         INT32_MAX - 1024);
    const int q_batches = a.offsets_q ? 1 : a.B, k_batches = a.offsets_k ? 1 : a.B;
    tensor_map q, k, v;
    const int64_t keys = a.offsets_k ? a.k_rows : a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0;
    const bool any = keys > 0; /* no key: nothing will be loaded, but a map must show something */
    heed_status status = q_whole ? whole_map(&q, a.q, a.D, a.q_rows, a.Hq, q_batches, 64)
                                 : split_map(&q, split.q, S::HEAD, S::PARTS, a.q_rows, q_batches, 64);
    if (!status)
        status = split_map(&k, any ? split.k : split.q, S::HEAD, S::PARTS, any ? keys : a.q_rows, k_batches, S::KEYS);
    if (!status)
        status = split_map(&v, any ? split.v : split.q, S::HEAD, S::PARTS, any ? keys : a.q_rows, k_batches, S::KEYS);
    if (status)
        return status;
    const int blocks = (int)HEED_MIN(total, units);
    const int64_t parts = tiles_of(a.Sq, 64);
    split_order by = { order_of<S>(a, { 1, INT32_MAX, NULL, NULL }, keys * S::D * 4, blocks, tiles),
                       split_exact_below(a), unshifted_scale(a), q_whole };
    by.order.least = (int)(parts / tiles), by.order.few = (int)(tiles - parts % tiles);
    constexpr int BYTES = sizeof(split_shared<S>);
    /* Where each block has one tile, and with head sizes to 64, it gains to have begun when the pass ends. */
    return S::HEAD == 64 || total <= units
               ? launch_next(forward_sm90split<S>, blocks, S::THREADS, BYTES, x, a, q, k, v, split, by)
               : launch(forward_sm90split<S>, blocks, S::THREADS, BYTES, x, a, q, k, v, split, by);
}

static size_t lay_out(const heed_problem *p, void *memory, split_tensors &split)
{
    const size_t used = split_place(p, SPLIT_KEYS | SPLIT_QUERIES, (char *)memory, split);
    split.zeros = (int *)((char *)memory + used);
    split.q.marks = split.zeros + 3;
    return used + (size_t)(3 + p->a.q.shape[0] * p->Hq * p->a.q.shape[2]) * sizeof(int);
}

size_t heed_forward_workspace_sm90split(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    split_tensors split = {};
    return lay_out(p, NULL, split);
}

heed_status heed_forward_sm90split(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    const prologue start(p, x);
    const args &a = start.a;
    const int units = plan->device.units;
    split_tensors split = {};
    lay_out(p, x->workspace, split);
    const int width = split_width(a);
    const bool terms = has_terms(a), all = terms_of(a) == WITH_ALL_TERMS;
    split.hi_only = p->precision == HEED_TF32 && width <= 128 && !terms;
    split.columns = width <= 128 ? width : split_columns(a);
    const bool q_whole = !split.hi_only && is_whole(p->a.q, a.q);
    split_tensors pass = split;
    if (q_whole)
        pass.q.rows = NULL;
    heed_status status = start.status ? start.status : heed_cuda_split(a, pass, false, NULL, x);
    if (!status && split.hi_only)
        status = width == 64 ? run<split_shape<64, 1, 3, 4>>(a, split, q_whole, units, x)
                             : run<split_shape<128, 1, 2, 4>>(a, split, q_whole, units, x);
    else if (!status && terms)
        status = split.columns == 64
                     ? (all ? run<split_shape<64, 2, 3, 4, 64, WITH_ALL_TERMS>>
                            : run<split_shape<64, 2, 3, 4, 64, WITH_SOME_TERMS>>)(a, split, q_whole, units, x)
                 : split.columns == 128
                     ? (all ? run<split_shape<128, 2, 2, 2, 64, WITH_ALL_TERMS>>
                            : run<split_shape<128, 2, 2, 2, 64, WITH_SOME_TERMS>>)(a, split, q_whole, units, x)
                 : split.columns == 192
                     ? run<split_shape<192, 2, 2, 1, 64, WITH_ALL_TERMS>>(a, split, q_whole, units, x)
                     : run<split_shape<256, 2, 2, 1, 32, WITH_ALL_TERMS>>(a, split, q_whole, units, x);
    else if (!status)
        status = split.columns == 64    ? run<split_shape<64, 2, 4, 4>>(a, split, q_whole, units, x)
                 : split.columns == 128 ? run<split_shape<128, 2, 2, 2>>(a, split, q_whole, units, x)
                 : split.columns == 192 ? run<split_shape<192, 2, 2, 1>>(a, split, q_whole, units, x)
                                        : run<split_shape<256, 2, 2, 1, 32>>(a, split, q_whole, units, x);
    const marked only = { split.zeros + 2, NULL, split.q.marks };
    if (!status && width == 256 && (q_whole || split.columns < width)) { /* what is marked wants all in its own way */
        pass = split;
        pass.columns = 0, pass.zeros = pass.q.marks = NULL;
        status = heed_cuda_split(a, pass, true, only.any, x);
    }
    return status ? status : heed_cuda_forward_marked(a, split, only, 2 * units, x);
}
