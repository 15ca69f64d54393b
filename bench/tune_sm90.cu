/* The compile-time variants of the Hopper forward that are worth comparing: tile sizes, warpgroups, buffers, and ways that
 * the kernel does not go. bench/tune_sm90.py checks and times them all in one process; the shape that
 * src/cuda/forward_sm90.cu takes is the first of its head size here, and should be the best. The backward's are in
 * tune_sm90_backward.cu.
 *
 *     cmake -B build-tune -G Ninja -DHEED_BENCH=ON -DHEED_CUDA_ARCHITECTURES=90a-real && ninja -C build-tune tune_sm90
 *     python3 bench/tune_sm90.py --lib build-tune/libtune_sm90.so */
#include "cuda/forward_sm90.cuh"

/* ---- Ways that are switches of the kernel ------------------------------------------------------------------------ */

/* Warpgroups issue their products one after the other. */
template <class B> struct in_turns : B {
    static constexpr bool TURNS = true;
};

/* The maximum of each block is taken before its exponentials; O is multiplied where it grew by more than 2^8 in P. */
template <class B> struct maximum_of_all : B {
    template <int N> static __device__ bool follow(float (&s)[N], row_state &x, float c)
    {
        refresh_maxima(s, x, c, true);
        return __any_sync(~0u, x.factor[0] != 1.0f || x.factor[1] != 1.0f);
    }
};

/* The same, and O is multiplied for each block. */
template <class B> struct multiplied_always : B {
    template <int N> static __device__ bool follow(float (&s)[N], row_state &x, float c)
    {
        refresh_maxima(s, x, c, true);
        return true;
    }
};

/* The maximum of a block counts from the next one on. */
template <class B> struct maximum_late : B {
    template <int N> static __device__ bool follow(float (&s)[N], row_state &x, float c)
    {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float by = x.late[r] * c < 8.0f ? 0.0f : x.late[r];
            x.factor[r] = exp2_fast(-by * c);
            x.l[r] *= x.factor[r];
            x.m[r] += by, x.offset[r] = x.m[r] * c;
            float most = s[2 * r];
#pragma unroll
            for (int i = 0; i < N / 4; i++)
                most = fmaxf(most, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
            x.late[r] = fmaxf(x.late[r] - by, quad_max(most) - x.m[r]);
        }
        return __any_sync(~0u, x.factor[0] != 1.0f || x.factor[1] != 1.0f);
    }
};

/* Sums of P by the tensor core: P times 8 columns of 1/4, so that the four lanes of a row have the sum together. */
__device__ inline uint32_t *quarters()
{
    __shared__ __align__(128) uint32_t x[32]; /* 8 rows of 8 columns; all 16 rows are these, twice */
    return x;
}

template <class B> struct tensor_sums : B {
    static constexpr bool TENSOR_SUMS = true;

    static __device__ void prepare()
    {
        if (threadIdx.x < 32)
            quarters()[threadIdx.x] = pack<__nv_bfloat16>(0.25f, 0.25f);
        fence_async();
    }

    template <class T, int K> static __device__ void add_up(float (&d)[4], const uint32_t (&P)[K][4], int keep)
    {
        const uint64_t b = (shared_address(quarters()) & 0x3ffff) >> 4;
#pragma unroll
        for (int k = 0; k < K; k++)
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
                         "{%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 1;\n}"
                         : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                         : "r"(P[k][0]), "r"(P[k][1]), "r"(P[k][2]), "r"(P[k][3]), "l"(b), "r"(k ? 1 : keep));
    }
};

/* ---- Other orders of the tiles: see tile_order ------------------------------------------------------------------- */

/* One head after the other; groups of heads, the longest tiles of each first; one group of all heads. */
template <class B> struct all_in_line : B {
};
template <class B> struct all_in_groups : B {
};
template <class B> struct one_group : B {
};

template <class S>
static tile_order ordered(const args &a, const key_parts &by, int64_t bytes, int blocks, bool line, bool all)
{
    tile_order o = order_of<S>(a, by, bytes, blocks);
    o.in_line = line ? o.heads : 0;
    o.group = all ? o.heads : o.group;
    const int of[2] = { o.group * o.tiles, o.in_line * o.tiles };
    for (int i = 0; i < 2; i++)
        o.rounds[i] = (int)tiles_of(of[i], blocks), o.shift[i] = of[i] % blocks;
    return o;
}

#define ORDER(KIND, SHAPE, line, all)                                                                                  \
    template <>                                                                                                        \
    tile_order order_of<KIND<SHAPE>>(const args &a, const key_parts &by, int64_t bytes, int blocks, int64_t)           \
    {                                                                                                                  \
        return ordered<SHAPE>(a, by, bytes, blocks, line, all);                                                        \
    }
using d64 = forward_shape<64, 4, 64, 8, false>;
using d128 = forward_shape<128, 2, 128, 2, true>;
using d256 = forward_shape<256, 2, 64, 2, true>;
ORDER(all_in_line, d64, true, false)
ORDER(all_in_groups, d64, false, false)
ORDER(one_group, d64, false, true)
ORDER(all_in_line, d128, true, false)
ORDER(all_in_groups, d128, false, false)
ORDER(one_group, d128, false, true)
ORDER(all_in_line, d256, true, false)
ORDER(all_in_groups, d256, false, false)
ORDER(one_group, d256, false, true)

/* ---- Pairs ------------------------------------------------------------------------------------------------------- */

/* Two blocks of a cluster take neighbouring tiles of a head, and each loads half of their K and V for both. */

struct pairs128 : d128 {
};

__device__ inline int pair_rank()
{
    int x;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
    return x;
}

__device__ inline uint32_t address_in(int rank, const void *p)
{
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
    return there;
}

__device__ inline void arrive_in(int rank, const void *barrier)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(rank, barrier)) : "memory");
}

__device__ inline void meet_pair()
{
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

/* Half of a tile's rows, to both blocks. */
__device__ inline void load_half(char *tile, const tensor_map &m, int row, int head, int batch, uint32_t full)
{
    const int half = pair_rank() * pairs128::KEYS / 2;
    for (int box = 0; box < pairs128::D / 64; box++)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(tile) +
                                                                     (box * pairs128::KEYS + half) * 128),
                     "l"(&m.map), "r"(box * 64), "r"(row + half), "r"(head * m.head_on), "r"(batch * m.batch_on),
                     "r"(full), "h"((short)3)
                     : "memory");
}

template <> __device__ inline void loader<pairs128>::load_k(int n, int j)
{
    const uint32_t full = shared_address(&sh.k_full[at_k.at()]);
    const auto &w = sh.work[n % AHEAD];
    wait(shared_address(&sh.k_empty[at_k.at()]), at_k.parity() ^ 1);
    if (leader) {
        arrive_expecting(full, KV_BYTES);
        load_half(sh.K[at_k.at()], k, w.s.k_row + w.first + j * pairs128::KEYS, w.hk, w.s.k_batch, full);
    }
    at_k.next();
}

template <> __device__ inline void loader<pairs128>::load_v(int n, int j)
{
    const uint32_t full = shared_address(&sh.v_full[at_v.at()]);
    const auto &w = sh.work[n % AHEAD];
    wait(shared_address(&sh.v_empty[at_v.at()]), at_v.parity() ^ 1);
    if (leader) {
        arrive_expecting(full, KV_BYTES);
        load_half(sh.V[at_v.at()], v, w.s.k_row + w.first + j * pairs128::KEYS, w.hk, w.s.k_batch, full);
    }
    at_v.next();
}

/* Buffers of K and V are free when both blocks are done with them. */
template <> __device__ inline void warpgroup<__nv_bfloat16, pairs128>::release(uint64_t &empty)
{
    const bool shared = (&empty >= sh.k_empty && &empty < sh.k_empty + pairs128::STAGES) ||
                        (&empty >= sh.v_empty && &empty < sh.v_empty + pairs128::STAGES);
    if (shared && lane() < 2)
        arrive_in(lane(), &empty);
    else if (!shared && lane() == 0)
        arrive(shared_address(&empty));
}

/* What one computes again the other does too. */
template <> __device__ inline void forward_shared<pairs128>::fails(int turn, int part)
{
    for (int rank = 0; rank < 2; rank++)
        asm volatile("red.relaxed.cluster.shared::cluster.or.b32 [%0], %1;" ::"r"(
                         address_in(rank, &failed[min(turn / 8, FAILURES - 1)])),
                     "r"(1u << (failed_at(turn) + part))
                     : "memory");
}

__global__ void __launch_bounds__(pairs128::THREADS, 1)
    forward_pairs(const __grid_constant__ args a, const __grid_constant__ tensor_map q,
                  const __grid_constant__ tensor_map k, const __grid_constant__ tensor_map v,
                  const __grid_constant__ tile_order order)
{
#if __CUDA_ARCH__ >= 900
    using S = pairs128;
    extern __shared__ __align__(1024) char memory[];
    __shared__ uint64_t agreed;
    auto &sh = *(forward_shared<S> *)memory;
    if (threadIdx.x < FAILURES)
        sh.failed[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::GROUPS; i++)
            barrier_init(shared_address(&sh.q_full[i]), 1), barrier_init(shared_address(&sh.q_empty[i]), 4);
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(shared_address(&sh.k_full[i]), 1), barrier_init(shared_address(&sh.k_empty[i]), 8 * S::GROUPS);
            barrier_init(shared_address(&sh.v_full[i]), 1), barrier_init(shared_address(&sh.v_empty[i]), 8 * S::GROUPS);
        }
        for (int i = 0; i < AHEAD; i++)
            barrier_init(shared_address(&sh.planned[i]), 32),
                barrier_init(shared_address(&sh.closed[i]), 4 * S::GROUPS + 1);
        barrier_init(shared_address(&agreed), 32);
        barrier_init_done();
    }
    meet_pair();
    if (threadIdx.x < 128) {
        fewer_registers<S::PRODUCER_REGISTERS>();
        int tiles = 0;
        if (threadIdx.x < 32) {
            loader<S> l = { sh, k, v, false, threadIdx.x == 0, {}, {}, 0, 0 };
#pragma unroll 1
            for (int run = 0; run < 2; run++)
                l.run();
        } else if (threadIdx.x < 64) {
#pragma unroll 1
            for (int again = 0; again < 2; again++) {
                plan_tiles<S>(sh, a, order, tiles, again);
                const int end = tiles - 1;
                wait(shared_address(&sh.closed[end % AHEAD]), end / AHEAD % 2);
                if (!again) {
                    asm volatile("fence.acq_rel.cluster;" ::: "memory"); /* which tiles failed */
                    arrive_in(pair_rank() ^ 1, &agreed);
                    wait(shared_address(&agreed), 0);
                    asm volatile("fence.acq_rel.cluster;" ::: "memory");
                }
            }
        } else if (threadIdx.x == 64) {
#pragma unroll 1
            for (int run = 0; run < 2; run++)
                fetch_q<S>(sh, q, tiles);
        }
    } else {
        more_registers<S::REGISTERS>();
        warpgroup<__nv_bfloat16, S> g = { sh, a, uniform(threadIdx.x / 128) - 1, a.scale * LOG2E, false, {}, {} };
        g.run(order);
    }
    meet_pair(); /* nobody leaves while the other may still reach into his memory */
#endif
}

/* Only where all tiles of a head have the same keys, and their number is even. */
static heed_status launch_pairs(const args &a, const key_parts &by, int units, const heed_exec *x)
{
    using S = pairs128;
    const int64_t tiles = tiles_of(a.Sq, S::ROWS), total = tiles * a.B * a.Hq;
    if (a.left < FAR || a.right < FAR || a.lengths_q || a.lengths_k || a.offsets_q || a.offsets_k || a.Sq % S::ROWS ||
        tiles % 2 || a.col_step != 1 || units % 2 || a.D != S::D || a.Dv != S::D)
        return heed_fail(HEED_UNSUPPORTED, "pairs take full attention over an even number of whole tiles");
    tensor_map q, k, v;
    heed_status status = heed_tensor_map(&q, a.q, a.D, a.q_rows, a.Hq, a.B, 64);
    if (!status)
        status = heed_tensor_map(&k, a.k, a.D, a.k_rows, a.Hk, a.B, S::KEYS / 2);
    if (!status)
        status = heed_tensor_map(&v, a.v, a.Dv, a.k_rows, a.Hk, a.B, S::KEYS / 2);
    if (status)
        return status;
    const int blocks = (int)HEED_MIN(total, units);
    const tile_order order = order_of<d128>(a, by, a.k_rows * (a.D + a.Dv) * 2, blocks);
    cudaLaunchAttribute pair = {};
    pair.id = cudaLaunchAttributeClusterDimension;
    pair.val.clusterDim = { 2, 1, 1 };
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks), config.blockDim = dim3(S::THREADS);
    config.dynamicSmemBytes = sizeof(forward_shared<S>), config.stream = (cudaStream_t)x->stream;
    config.attrs = &pair, config.numAttrs = 1;
    cudaError_t error = cudaFuncSetAttribute((const void *)forward_pairs, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             (int)config.dynamicSmemBytes);
    void *arguments[] = { (void *)&a, &q, &k, &v, (void *)&order };
    if (!error)
        error = cudaLaunchKernelExC(&config, (const void *)forward_pairs, arguments);
    return heed_cuda_status(error, "launching pairs");
}

/* ---- The list ---------------------------------------------------------------------------------------------------- */

struct variant {
    const char *name;
    heed_dtype dtype;
    int head_dim;
    heed_status (*launch)(const args &, const key_parts &, int units, const heed_exec *);
};

/* Head size; warpgroups, keys at once, buffers for K and for V; S and O += P V together; softcap. */
#define SHAPE(D, ...)                                                                                                  \
    {                                                                                                                  \
#__VA_ARGS__, HEED_BF16, D, forward_sm90_launch < __nv_bfloat16, forward_shape < D, __VA_ARGS__>>              \
    }
#define WAY(D, KIND)                                                                                                   \
    {                                                                                                                  \
#KIND, HEED_BF16, D, forward_sm90_launch < __nv_bfloat16, KIND < d##D>>                                        \
    }
static const variant variants[] = {
    SHAPE(64, 4, 64, 8, false),  SHAPE(64, 4, 64, 2, false),
    SHAPE(64, 4, 96, 4, false),  SHAPE(64, 3, 64, 4, false),
    SHAPE(64, 3, 112, 4, true),  SHAPE(64, 3, 128, 4, true),
    SHAPE(64, 2, 128, 4, true),  WAY(64, in_turns),
    WAY(64, maximum_of_all),     WAY(64, multiplied_always),
    WAY(64, maximum_late),       WAY(64, tensor_sums),
    WAY(64, all_in_line),        WAY(64, all_in_groups),
    WAY(64, one_group),          SHAPE(96, 4, 64, 2, false),
    SHAPE(96, 3, 96, 2, true),   SHAPE(96, 4, 48, 4, false),
    SHAPE(96, 2, 128, 2, true),  SHAPE(128, 2, 128, 2, true),
    SHAPE(128, 2, 112, 2, true), SHAPE(128, 2, 64, 4, true),
    SHAPE(128, 2, 64, 2, true),  SHAPE(128, 2, 128, 2, false),
    SHAPE(128, 3, 64, 4, false), SHAPE(128, 3, 96, 2, false),
    SHAPE(128, 3, 64, 2, true),  SHAPE(128, 3, 80, 2, true),
    WAY(128, in_turns),          WAY(128, maximum_of_all),
    WAY(128, multiplied_always), WAY(128, maximum_late),
    WAY(128, tensor_sums),       { "pairs (cluster, multicast)", HEED_BF16, 128, launch_pairs },
    WAY(128, all_in_line),       WAY(128, all_in_groups),
    WAY(128, one_group),         SHAPE(192, 2, 64, 2, true),
    SHAPE(192, 2, 96, 2, true),  SHAPE(192, 3, 64, 2, false),
    SHAPE(256, 2, 64, 2, true),  SHAPE(256, 2, 48, 2, true),
    SHAPE(256, 2, 64, 2, false), WAY(256, in_turns),
    WAY(256, maximum_of_all),    WAY(256, maximum_late),
    WAY(256, tensor_sums),       WAY(256, all_in_line),
    WAY(256, all_in_groups),     WAY(256, one_group),
};

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int tune_count(void) { return sizeof variants / sizeof *variants; }
EXPORT const char *tune_name(int n) { return variants[n].name; }
EXPORT int tune_dtype(int n) { return variants[n].dtype; }
EXPORT int tune_head_dim(int n) { return variants[n].head_dim; }
EXPORT const char *tune_error(void) { return heed_last_error(); }

EXPORT int tune_forward(int n, const heed_attention *a, const heed_exec *x)
{
    heed_problem p;
    heed_device d;
    heed_status status = heed_check(a, NULL, x, 0, &p);
    if (!status)
        status = heed_device_of(x, &d);
    if (status)
        return status;
    prologue begin(&p, x);
    return begin.status ? begin.status : variants[n].launch(begin.a, { 1, INT32_MAX, NULL, NULL }, d.units, x);
}
