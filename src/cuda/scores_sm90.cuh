/* What the Hopper forward adds to its scores, a bias and ALiBi, what hides them besides the band, a mask, and what leaves P out
 * of O, dropout (dropout_sm90.cuh).
 *
 * Bias and mask of a warpgroup's 64 rows and a block of 64 keys come by the copy engine, in pieces of rows of 128 bytes (a
 * bias: 64 keys of 16 bits, or 32 of fp32) or 64 (a mask). Each warpgroup has a ring of buffers for its own pieces, which it
 * meets in the order bias, mask, block after block; what is the same for all rows comes as one row. In a piece the 16-byte
 * chunk c of row r lies at chunk c ^ (r % 8), in rows of 64 bytes at c ^ (r / 2 % 4): the engine writes this order, and lanes
 * that read a few rows at a time meet different banks. */
#ifndef HEED_CUDA_SCORES_SM90_CUH
#define HEED_CUDA_SCORES_SM90_CUH

#include "dropout_sm90.cuh"
#include "forward_sm90.cuh"

#include <type_traits>

/* ---- What there is ----------------------------------------------------------------------------------------------- */

constexpr int PIECE = 64 * 128;

template <class S> struct scored_shared : forward_shared<S> {
    alignas(1024) char piece[S::GROUPS][S::PIECES][PIECE];
    uint64_t full[S::GROUPS][S::PIECES], empty[S::GROUPS][S::PIECES];
};

/* A place in a ring of any length. */
template <int LENGTH> struct place_in_ring {
    int at = 0, parity = 0;
    __device__ void next()
    {
        if (++at == LENGTH)
            at = 0, parity ^= 1;
    }
};

/* ---- What brings it ---------------------------------------------------------------------------------------------- */

/* Asks for one piece. */
template <class S>
__device__ inline void fetch_piece(uint32_t to, uint32_t full, const term_maps &m, const forward_work<S::ROWS> &w,
                                   int part, int j, int piece)
{
    const bool is_bias = piece < m.bias_pieces;
    const tensor_map &from = is_bias ? m.bias : m.mask;
    const int rows = is_bias ? m.bias_rows : m.mask_rows;
    const int column = w.first + j * S::KEYS + (is_bias ? piece * 32 : 0), row = rows == 1 ? 0 : w.i0 + part * 64;
    arrive_expecting(full, rows * (is_bias ? 128 : 64));
    load_box(to, from.map, column, row, w.h * from.head_on, w.s.b * from.batch_on, full);
}

/* A lane for each warpgroup, which asks for the pieces of its rows as soon as there is room, whatever the others wait for.
 * Not by a wait, which would be all lanes'. */
template <class S> __device__ inline void fetch_terms(scored_shared<S> &sh, const term_maps &m, int group)
{
    const int pieces = m.bias_pieces + m.mask_pieces;
    place_in_ring<S::PIECES> at;
    int n = 0, j = -1, piece = 0; /* tile; block of it, -1: none yet; piece of that */
#pragma unroll 1
    for (int ends = 0; ends < 2;) {
        const forward_work<S::ROWS> &w = sh.work[n % AHEAD];
        const bool begins = j < 0;
        const uint32_t barrier = shared_address(begins ? &sh.planned[n % AHEAD] : &sh.empty[group][at.at]);
        if (!is_over(barrier, begins ? n / AHEAD % 2 : at.parity ^ 1)) {
            nap();
            continue;
        }
        const int part = S::part(group, n);
        if (begins) {
            ends += w.rows == 0;
            j = w.rows && pieces ? w.seen[part] - 1 : -1;
        } else {
            fetch_piece<S>(shared_address(sh.piece[group][at.at]), shared_address(&sh.full[group][at.at]), m, w, part,
                           j, piece);
            at.next();
            if (++piece == pieces)
                piece = 0, j--;
        }
        if (j < 0) {
            arrive(shared_address(&sh.closed[n % AHEAD]));
            n++;
        }
    }
}

/* ---- What a warpgroup does with it ------------------------------------------------------------------------------- */

__device__ inline float2 floats_of(uint32_t two, __half) { return __half22float2(*(const __half2 *)&two); }
__device__ inline float2 floats_of(uint32_t two, __nv_bfloat16)
{
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000));
}

/* Dropout of a lane's two rows, which its quad shares: of a block's eights of keys a lane draws number lane % 4 and four on,
 * and gets columns 2 (lane % 4) and the next of all. */
struct row_drops {
    drop_source source;
    uint32_t eight; /* the lane's first of block 0 */
    uint32_t kept;  /* of the block: bit 16 e + 8 (i / 4) + 4 r + i % 4 for the lane's column e of eight i, in row r */

    static __device__ constexpr int eight_of(int bit) { return bit / 8 % 2 * 4 + bit % 4; }

    template <class Work> static __device__ uint32_t position(const Work &w, int row)
    {
        return (uint32_t)(uint64_t)(w.s.p0 + (w.i0 + row) * w.s.p_step);
    }

    template <class Work> __device__ void begin(const args &a, const Work &w)
    {
        source = { seed_of(a), (uint32_t)w.h, (uint32_t)w.s.b };
        eight = (uint32_t)(uint64_t)(w.s.r0 + w.first >> 3) + threadIdx.x % 4;
    }

    /* A block; row: the lane's first, on: keys of the tile before the block. */
    template <class Work> __device__ void draw(const args &a, const Work &w, int row, int on)
    {
        if (are_eights_whole(a)) {
            const uint32_t eights[2] = { eight + on / 8, eight + on / 8 + 4 };
            const drop_source::row_part rows[2] = { source.of_row(position(w, row)),
                                                    source.of_row(position(w, row + 8)) };
            kept = draw_four(source, eights, rows, a.drop_below);
            kept = exchange_bits(kept, 1, 1, 0x55555555);
            kept = exchange_bits(kept, 2, 2, 0x33333333);
            return;
        }
        kept = 0;
#pragma unroll 1
        for (int bit = 0; bit < 32; bit++) { /* rare, and would be long otherwise */
            const int column = eight_of(bit) * 8 + threadIdx.x % 4 * 2 + bit / 16;
            const int64_t key = w.s.r0 + (w.first + on + column) * w.s.r_step;
            kept |= (uint32_t)source.keeps(key, position(w, row + (bit & 4) * 2), a.drop_below) << bit;
        }
    }

    /* P is packed: its words are of two columns, and bits 16 apart become halves. */
    __device__ void apply(uint32_t (&P)[4][4]) const
    {
#pragma unroll
        for (int bit = 0; bit < 16; bit++) {
            const int i = eight_of(bit), r = bit / 4 % 2;
            P[i / 2][i % 2 * 2 + r] &= pick_bytes(kept << (7 - bit % 8), 0, 0xAA88 + 0x1111 * (bit / 8));
        }
    }
};

/* Scores are those of sm90.cuh: a lane has columns 8 i + 2 (lane % 4) and the next, of rows lane / 4 and 8 more. */
template <class T, class S> struct scored_terms {
    scored_shared<S> &sh;
    const args &a;
    const term_maps &m;
    const int group;
    place_in_ring<S::PIECES> at;
    float slope, step, distance[2]; /* ALiBi: from the lane's first key in block 0 to its rows, and from key to key */
    row_drops drops;

    __device__ int row() const { return threadIdx.x / 32 % 4 * 16; } /* the warp's first, of 64 */

    /* The next piece, once it is there. */
    __device__ const char *meet_piece()
    {
        wait(shared_address(&sh.full[group][at.at]), at.parity);
        return sh.piece[group][at.at];
    }
    __device__ void leave_piece()
    {
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            arrive(shared_address(&sh.empty[group][at.at]));
        at.next();
    }

    /* S = scale S + bias. */
    __device__ void add_bias(float (&s)[32])
    {
        const int lane = threadIdx.x % 32, r = m.bias_rows == 1 ? 0 : row() + lane % 16;
        const uint32_t from = shared_address(meet_piece()) + r * 128 + (lane / 16 ^ r % 8) * 16;
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            uint32_t x[4];
            load_matrices(x, from ^ i * 16);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float2 both = floats_of(x[e], T());
                s[4 * i + 2 * e] = fmaf(s[4 * i + 2 * e], a.scale, both.x);
                s[4 * i + 2 * e + 1] = fmaf(s[4 * i + 2 * e + 1], a.scale, both.y);
            }
        }
        leave_piece();
    }

    /* The same in fp32. Neighbouring rows have their chunks in the same banks: so lanes of odd rows take columns 16 away
     * first, and what was loaded is then exchanged. */
    __device__ void add_wide_bias(float (&s)[32])
    {
        const int lane = threadIdx.x % 32, r = m.bias_rows == 1 ? 0 : row() + lane / 4;
        const bool odd = r % 2;
        const int from = r * 128 + ((lane % 4 / 2 ^ r % 8) * 16 ^ odd * 64) + lane % 2 * 8,
                  down = m.bias_rows == 1 ? 0 : 1024;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const char *const piece = meet_piece();
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float2 x = *(const float2 *)(piece + (from ^ i * 32) + r * down),
                                 y = *(const float2 *)(piece + (from ^ (i + 2) * 32) + r * down);
                    float *const near = &s[16 * half + 4 * i + 2 * r], *const far = near + 8;
                    near[0] = fmaf(near[0], a.scale, odd ? y.x : x.x);
                    near[1] = fmaf(near[1], a.scale, odd ? y.y : x.y);
                    far[0] = fmaf(far[0], a.scale, odd ? x.x : y.x);
                    far[1] = fmaf(far[1], a.scale, odd ? x.y : y.y);
                }
            leave_piece();
        }
    }

    /* S = factor S - slope |distance|. Where all keys are on one side of the warp's rows it is a line. */
    __device__ void add_alibi(float (&s)[32], int j, float factor)
    {
        const float on = (float)(j * S::KEYS) * step;
        const float d[2] = { distance[0] - on, distance[1] - on };
        const bool before = fminf(d[0], d[1]) >= 57.0f * step, after = fmaxf(d[0], d[1]) <= 0.0f;
        const bool all_before = __all_sync(~0u, before);
        if (all_before || __all_sync(~0u, after)) {
            const float rise = all_before ? slope : -slope;
#pragma unroll
            for (int i = 0; i < 32; i++)
                s[i] = fmaf(s[i], factor, fmaf((float)(i / 4 * 8 + i % 2), rise * step, -rise * d[i / 2 % 2]));
        } else
#pragma unroll
            for (int i = 0; i < 32; i++)
                s[i] = fmaf(s[i], factor, -slope * fabsf(fmaf((float)-(i / 4 * 8 + i % 2), step, d[i / 2 % 2])));
    }

    /* Most blocks of most masks hide nothing: then all bytes are 1. Of those that do, most hide all: false. */
    __device__ bool apply_mask(float (&s)[32])
    {
        const int lane = threadIdx.x % 32, on = m.mask_rows == 1 ? 0 : 1;
        const int some = on * (row() + lane % 16), own = on * (row() + lane / 4);
        const char *const piece = meet_piece();
        const uint32_t from = shared_address(piece) + some * 64 + (lane / 16 ^ some / 2 % 4) * 16;
        uint32_t x[4], y[4];
        load_matrices(x, from), load_matrices(y, from ^ 32);
        const bool all = __all_sync(~0u, (x[0] & x[1] & x[2] & x[3] & y[0] & y[1] & y[2] & y[3]) == 0x01010101);
        const bool any = all || __any_sync(~0u, x[0] | x[1] | x[2] | x[3] | y[0] | y[1] | y[2] | y[3]);
        if (any && !all) {
            const int first = own * 64 + (own / 2 % 4) * 16 + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const uint32_t two = *(const uint16_t *)(piece + (first ^ i / 2 * 16) + i % 2 * 8 + on * r * 512);
                    if (!(two & 0xff))
                        s[4 * i + 2 * r] = -CUDART_INF_F;
                    if (two < 0x100)
                        s[4 * i + 2 * r + 1] = -CUDART_INF_F;
                }
        }
        leave_piece();
        return any;
    }

    /* A tile of rows; row: the lane's first. */
    __device__ void begin(const forward_work<S::ROWS> &w, int row)
    {
        if (S::DROPS)
            drops.begin(a, w);
        if (!a.alibi.data)
            return;
        slope = load(a.alibi, row_at(a.alibi, w.s.b, w.h, 0));
        step = (float)w.s.r_step;
#pragma unroll
        for (int r = 0; r < 2; r++)
            distance[r] = (float)(w.s.p0 + (w.i0 + row + 8 * r) * w.s.p_step - w.s.r0 -
                                  (w.first + threadIdx.x % 4 * 2) * w.s.r_step);
    }

    /* Block j of it, from Q K^T to scores; false: the warp sees none of it. */
    __device__ bool apply(float (&s)[32], int j)
    {
        if (m.bias_pieces == 1)
            add_bias(s);
        else if (m.bias_pieces == 2)
            add_wide_bias(s);
        if (a.alibi.data)
            add_alibi(s, j, m.bias_pieces ? 1.0f : a.scale);
        return !m.mask_pieces || apply_mask(s);
    }

    /* Which P of block j are kept, while its Q K^T is on the way; those are left in P that go into O. */
    __device__ void draw(const forward_work<S::ROWS> &w, int row, int j)
    {
        if (S::DROPS)
            drops.draw(a, w, row, j * S::KEYS);
    }
    __device__ void drop(uint32_t (&P)[S::KEYS / 16][4])
    {
        if (S::DROPS)
            drops.apply(P);
    }

    /* What O is multiplied with in the end. */
    __device__ void finish(float (&divide)[2])
    {
        if (S::DROPS)
            divide[0] *= a.keep_scale, divide[1] *= a.keep_scale;
    }
};

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

/* PIECES: buffers of each warpgroup. DROPS: there is dropout, whose code would cost the others. */
template <class T_, int D, int GROUPS, int STAGES, bool OVERLAP, int PIECES_, bool DROPS_>
struct scored_shape : forward_shape<D, GROUPS, 64, STAGES, OVERLAP> {
    static constexpr bool TERMS = true, LOWERS = std::is_same_v<T_, __half>, DROPS = DROPS_;
    static constexpr int PIECES = PIECES_, ALIGNED = 16; /* so that pieces are of few lines of memory */
    template <class T> using terms = scored_terms<T, scored_shape>;

    /* A bias or mask of each head that all sequences share is read from memory once, where they meet it together. */
    static __device__ int sequences_together(const args &a)
    {
        return (a.bias.stride[0] == 0 && a.bias.stride[1] != 0) || (a.mask.stride[0] == 0 && a.mask.stride[1] != 0)
                   ? a.B
                   : 0;
    }
};

template <class T, class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    forward_sm90scores(const __grid_constant__ args a, const __grid_constant__ tensor_map q,
                       const __grid_constant__ tensor_map k, const __grid_constant__ tensor_map v,
                       const __grid_constant__ tile_order order, const __grid_constant__ term_maps m)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(1024) char memory[];
    auto &sh = *(scored_shared<S> *)memory;
    if (threadIdx.x < FAILURES)
        sh.failed[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        init_barriers<S>(sh, 5 * S::GROUPS + 1);
        for (int i = 0; i < S::GROUPS * S::PIECES; i++)
            barrier_init(shared_address(&sh.full[0][i]), 1), barrier_init(shared_address(&sh.empty[0][i]), 4);
        barrier_init_done();
        prefetch_map(q.map), prefetch_map(k.map), prefetch_map(v.map);
        if (m.bias_pieces)
            prefetch_map(m.bias.map);
        if (m.mask_pieces)
            prefetch_map(m.mask.map);
    }
    let_next_start();
    wait_for_last();
    __syncthreads();
    if (threadIdx.x < 128) {
        fewer_registers<S::PRODUCER_REGISTERS>();
        feed<S>(sh, a, q, k, v, order);
        if (threadIdx.x >= 96 && threadIdx.x < 96 + S::GROUPS)
            fetch_terms<S>(sh, m, threadIdx.x - 96);
    } else {
        more_registers<S::REGISTERS>();
        const int group = uniform(threadIdx.x / 128) - 1;
        warpgroup<T, S> g = { sh, a, group, unit_of<S>(a) * LOG2E, false, {}, {}, { sh, a, m, group, {} } };
        g.run(order);
    }
#endif
}

#endif
