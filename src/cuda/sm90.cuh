/* Instructions of Hopper that CUDA C has no name for: one short function each. Shared memory is addressed by 32-bit
 * numbers, from shared_address().
 *
 *   barriers     mbarriers in shared memory: loads complete on them, warps wait on them
 *   TMA          the copy engine: boxes of a tensor into shared memory, described by a map
 *   wgmma        the tensor core: D[64][N] += A[64][16] B[16][N], issued by the four warps of a warpgroup
 *
 * Tiles of 16-bit elements lie in shared memory as boxes of 64 columns, one after the other, each rows x 128 bytes with
 * the 16-byte chunk c of row r at chunk c ^ (r % 8): the engine writes this order and the tensor core reads it.
 *
 * D in registers: lane t of warp w of the warpgroup holds
 *     d[4i], d[4i+1]     row 16w + t/4,      columns 8i + 2 (t%4), +1
 *     d[4i+2], d[4i+3]   row 16w + t/4 + 8,  the same columns
 * and A from registers has the same layout, two elements to a register: so a D, packed, is an A without any exchange. */
#ifndef HEED_CUDA_SM90_CUH
#define HEED_CUDA_SM90_CUH

#include "sm75.cuh"

#include <cuda.h>

/* ---- Barriers ---------------------------------------------------------------------------------------------------- */

__device__ inline void barrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/* After the inits, before any other thread or the copy engine uses the barriers. */
__device__ inline void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* An arrival, and so many bytes must have landed too. */
__device__ inline void arrive_expecting(uint32_t barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/* Waits for the end of the phase of that parity: 0, 1, 0, ... A fresh barrier counts as past the phase of parity 1. */
__device__ inline void wait(uint32_t barrier, int parity)
{
    asm volatile(
        "{\n.reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}

/* All threads of a cluster: who waits sees what was written before the others arrived, but for those who came empty-handed. */
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_arrive_empty() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/* Along z: a block's place in its cluster, how many there are, and the cluster's number. */
__device__ inline int cluster_place()
{
    int x;
    asm volatile("mov.u32 %0, %%cluster_ctaid.z;" : "=r"(x));
    return x;
}
__device__ inline int cluster_depth()
{
    int x;
    asm("mov.u32 %0, %%cluster_nctaid.z;" : "=r"(x));
    return x;
}
__device__ inline int cluster_height()
{
    int x;
    asm("mov.u32 %0, %%cluster_nctaid.y;" : "=r"(x));
    return x;
}
__device__ inline int cluster_number()
{
    int x;
    asm("mov.u32 %0, %%clusterid.z;" : "=r"(x));
    return x;
}

/* What that block of the cluster has at the same address. */
template <class T> __device__ inline T load_of_block(uint32_t address, int block);
template <> __device__ inline float load_of_block<float>(uint32_t address, int block)
{
    float x;
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];\n}"
                 : "=f"(x)
                 : "r"(address), "r"(block)
                 : "memory");
    return x;
}
template <> __device__ inline float4 load_of_block<float4>(uint32_t address, int block)
{
    float4 x;
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address), "r"(block)
                 : "memory");
    return x;
}

/* Whether that phase has ended, without waiting for it. */
__device__ inline bool is_over(uint32_t barrier, int parity)
{
    int over;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return over;
}

/* For some 30 ns. */
__device__ inline void nap() { asm volatile("nanosleep.u32 30;" ::: "memory"); }

/* Between ordinary accesses to shared memory and those of the copy engine or the tensor core, in the accessing thread. */
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* The same for global memory. */
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/* ---- Registers: a warpgroup gives some back, others take them ---------------------------------------------------- */

template <int COUNT> __device__ inline void fewer_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> __device__ inline void more_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* ---- TMA --------------------------------------------------------------------------------------------------------- */

/* The box at (column, row, head, batch). What lies outside the tensor arrives as zeros and counts as bytes. */
__device__ inline void load_box(uint32_t to, const CUtensorMap &map, int column, int row, int head, int batch,
                                uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
                 : "memory");
}

/* The same out of shared memory, as bulk_store() below; what lies outside the tensor is not written. */
__device__ inline void store_box(uint32_t from, const CUtensorMap &map, int column, int row, int head, int batch)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
                 "r"(column), "r"(row), "r"(head), "r"(batch), "r"(from)
                 : "memory");
}

__device__ inline void prefetch_map(const CUtensorMap &map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/* Shared to global memory, so many bytes, a multiple of 16, some time: to be stored, or added as floats. What the thread
 * has started is committed, and then waited for: until it has been read, or until it is there. */
__device__ inline void bulk_store(float *to, uint32_t from, int bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

__device__ inline void bulk_add(float *to, uint32_t from, int bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

/* The other way round; the bytes complete on the barrier. */
__device__ inline void bulk_load(uint32_t to, const float *from, int bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/* ---- wgmma ------------------------------------------------------------------------------------------------------- */

/* Names a tile for the tensor core. Rows that are k (B transposed, as V in P V) need the bytes from one box of 64
 * columns to the next; rows that are m or n need nothing more. The next 16 of k are 32 bytes on within a box, or 16
 * rows, 2048 bytes on, where rows are k. */
__device__ inline uint64_t tile_at(uint32_t address, int box_bytes = 16)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(box_bytes >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* A tile of 16 columns in chunks of 16 bytes, rows being m or n: eight chunks, those of eight rows, lie together. on, down:
 * bytes from one such eight to that of the next 8 columns, and of the next 8 rows. */
__device__ inline uint64_t small_tile_at(uint32_t address, int on, int down)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(on >> 4) << 16 | (uint64_t)(down >> 4) << 32;
}

__device__ inline uint64_t on(uint64_t tile, int bytes) { return tile + (bytes >> 4); }

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/* Waits until at most so many committed groups are unfinished. */
template <int PENDING> __device__ inline void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Lists of operands: names "%0", ... in the instruction, and the registers behind them. */
#define NAMES16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES24 NAMES16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define NAMES32 NAMES24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES40 NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define NAMES48 NAMES40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES56 NAMES48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define NAMES64 NAMES56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES80 NAMES64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define NAMES88 NAMES80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define NAMES96 NAMES88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES112 NAMES96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define NAMES128 NAMES112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R8(i) R4(i), R4(i + 4)
#define R16_FROM(i) R8(i), R8(i + 8)
#define R16 R16_FROM(0)
#define R24 R16, R8(16)
#define R32 R24, R8(24)
#define R40 R32, R8(32)
#define R48 R40, R8(40)
#define R56 R48, R8(48)
#define R64 R56, R8(56)
#define R80 R64, R16_FROM(64)
#define R88 R80, R8(80)
#define R96 R88, R8(88)
#define R112 R96, R16_FROM(96)
#define R128 R112, R16_FROM(112)

/* wgmma<T, N>::shared(d, a, b, keep): both operands in shared memory. A_K, B_K: 1 where the operand's rows are k.
 * wgmma<T, N>::registers(d, a, b, keep): A from registers. keep = 0: D = A B, and the old D is not read.
 * The macro's arguments: N, the registers of D, and the numbers of the operands after them. */
template <class T, int N> struct wgmma;

#define WGMMA(T, type, N, d_count, i0, i1, i2, i3, i4, i5, i6)                                                         \
    template <> struct wgmma<T, N> {                                                                                   \
        template <int A_K, int B_K>                                                                                    \
        static __device__ inline void shared(float (&d)[d_count], uint64_t a, uint64_t b, int keep)                    \
        {                                                                                                              \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\n"                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" NAMES##d_count           \
                         "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";\n}"                                      \
                         : R##d_count                                                                                  \
                         : "l"(a), "l"(b), "r"(keep), "n"(A_K), "n"(B_K));                                             \
        }                                                                                                              \
        template <int B_K>                                                                                             \
        static __device__ inline void registers(float (&d)[d_count], const uint32_t (&a)[4], uint64_t b, int keep)     \
        {                                                                                                              \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\n"                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" NAMES##d_count           \
                         "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 ";\n}"                \
                         : R##d_count                                                                                  \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(B_K));                   \
        }                                                                                                              \
    };
#define WGMMA_BOTH(...) WGMMA(__half, "f16", __VA_ARGS__) WGMMA(__nv_bfloat16, "bf16", __VA_ARGS__)
WGMMA_BOTH(32, 16, 16, 17, 18, 19, 20, 21, 22)
WGMMA_BOTH(48, 24, 24, 25, 26, 27, 28, 29, 30)
WGMMA_BOTH(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA_BOTH(80, 40, 40, 41, 42, 43, 44, 45, 46)
WGMMA_BOTH(96, 48, 48, 49, 50, 51, 52, 53, 54)
WGMMA_BOTH(112, 56, 56, 57, 58, 59, 60, 61, 62)
WGMMA_BOTH(128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA_BOTH(160, 80, 80, 81, 82, 83, 84, 85, 86)
WGMMA_BOTH(176, 88, 88, 89, 90, 91, 92, 93, 94)
WGMMA_BOTH(192, 96, 96, 97, 98, 99, 100, 101, 102)
WGMMA_BOTH(256, 128, 128, 129, 130, 131, 132, 133, 134)

/* ---- Small arithmetic -------------------------------------------------------------------------------------------- */

/* Four 8 x 8 matrices into shared memory, as load_matrices() reads them. */
__device__ inline void store_matrices(uint32_t address, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x0), "r"(x1),
                 "r"(x2), "r"(x3)
                 : "memory");
}

__device__ inline void store_matrices_transposed(uint32_t address, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x0),
                 "r"(x1), "r"(x2), "r"(x3)
                 : "memory");
}

/* Ones from bit `from` on, so many of them. */
__device__ inline uint32_t bit_mask(int from, int count)
{
    uint32_t y;
    asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(y) : "r"(from), "r"(count));
    return y;
}

/* threadIdx.x, asked for again: nothing that follows from it takes a register until then. */
__device__ inline int thread_anew()
{
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

/* Smaller numbers than normal ones are 0 to it. */
__device__ inline float log2_fast(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* A nap that is never taken, for x >= 0: the assembler moves a wait for wgmma up past arithmetic that was to run in its
 * shadow, but not past this. (A loop that is never entered, it deletes.) */
__device__ inline void keep_order(int x)
{
    asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %0, 0;\n@p nanosleep.u32 1;\n}" ::"r"(x) : "memory");
}

#endif
