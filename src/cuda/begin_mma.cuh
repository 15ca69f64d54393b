/* Scores of the tensor-core kernels that begin with what is added to q.k, a bias or ALiBi, in the registers of S. */
#ifndef HEED_CUDA_BEGIN_MMA_CUH
#define HEED_CUDA_BEGIN_MMA_CUH

#include "scores_mma.cuh"

__device__ inline uint32_t times(uint32_t two, float p, __half)
{
    const __half2 x = __hmul2(*(__half2 *)&two, __float2half2_rn(p));
    return *(uint32_t *)&x;
}
#if !HEED_TURING
__device__ inline uint32_t times(uint32_t two, float p, __nv_bfloat16)
{
    const __nv_bfloat162 x = __hmul2(*(__nv_bfloat162 *)&two, __float2bfloat162_rn(p));
    return *(uint32_t *)&x;
}
__device__ inline uint32_t times(uint32_t two, float p, either type)
{
    return type.is_bf16 ? times(two, p, __nv_bfloat16()) : times(two, p, __half());
}
#endif

/* Multiplies so many bytes of shared memory by p, when all have arrived; a barrier must follow. */
template <int BYTES, int THREADS, class T> __device__ inline void scale_own(char *tile, float p, T type)
{
#pragma unroll 1
    for (int at = threadIdx.x * 16; at < BYTES; at += THREADS * 16) {
        uint4 &x = *(uint4 *)(tile + at);
        x = make_uint4(times(x.x, p, type), times(x.y, p, type), times(x.z, p, type), times(x.w, p, type));
    }
}

/* Where the bias of a head's query i begins. Queries lie few enough bytes apart (one_term). */
__device__ inline const char *bias_of_head(const args &a, int64_t first)
{
    return a.bias.data + first * (a.bias.dtype == HEED_F32 ? 4 : 2);
}
__device__ inline const char *bias_row(const args &a, const char *head, int i)
{
    return head + (int64_t)i * ((int)a.bias.stride[2] * (a.bias.dtype == HEED_F32 ? 4 : 2));
}

/* Asks for lines of the next tile's bias, so that they are near when it is begun. row(r): where that of row r begins. */
template <int QUERIES, int KEYS, int THREADS, class Row>
__device__ inline void prefetch_bias(int thread, const args &a, int n0, Row row)
{
    constexpr int OF_16_BITS = KEYS == 128 ? 1 : KEYS == 64 ? 0 : -1; /* lines to a row, as a power of two */
    const int wide = a.bias.dtype == HEED_F32, lines = max(OF_16_BITS + wide, 0);
#pragma unroll 1
    for (int i = thread; i < QUERIES << lines; i += THREADS)
        prefetch(row(i >> lines) + min((n0 << wide) * 2 + (i & ((1 << lines) - 1)) * 128, (a.Sk << wide) * 2 - 16));
}

/* S = number(r, c). */
template <class Tile, class Number> __device__ inline void begin_with(Tile &t, Number number)
{
#pragma unroll
    for (int r = 0; r < Tile::R; r++)
#pragma unroll
        for (int c = 0; c < Tile::C; c++)
            t.at(r, c) = number(r, c);
}

/* The bias of the lane's queries, which begins at row(r): use(r, c, words) for each piece of NEAR keys. Where there is no
 * such key it is zero; where not all of the queries exist, they begin at some_row(r). */
template <int SIZE, class Tile, class Row, class SomeRow, class Use>
__device__ inline void load_bias(const Tile &t, const args &a, bool all_exist, Row row, SomeRow some_row, Use use)
{
    constexpr int NEAR = Tile::NEIGHBOURS;
    const int last = a.Sk - NEAR - t.key(0);
    auto load_all = [&](auto begin, auto exists) {
#pragma unroll
        for (int r = 0; r < Tile::R; r++) {
            const char *from = begin(r) + (int64_t)t.key(0) * SIZE;
#pragma unroll
            for (int c = 0; c < Tile::C; c += NEAR)
                if (exists(Tile::apart(c)))
                    use(r, c, words_of<NEAR * SIZE>(from + Tile::apart(c) * SIZE, in_global()));
                else
                    use(r, c, words_of<NEAR * SIZE>());
        }
    };
    if (all_exist && Tile::apart(Tile::C - NEAR) <= last) /* the rule */
        load_all(row, [](int) { return true; });
    else
        load_all(some_row, [&](int c) { return c <= last; });
}

template <class Tile, class Rows> __device__ inline void subtract_rows(Tile &t, Rows L)
{
#pragma unroll
    for (int r = 0; r < Tile::R; r++)
#pragma unroll
        for (int c = 0; c < Tile::C; c++)
            t.at(r, c) -= L(r);
}

/* S = bias / f; LESS: S = bias / f - less(r). meanwhile(): what can be done while it comes. Each number takes an instruction
 * that is no copy: where words came as they are, the assembler had those of every other kind moved to where these had come. */
template <bool LESS, class Tile, class Row, class SomeRow, class Less, class Meanwhile>
__device__ inline void begin_with_bias(Tile &t, const mma_args &a, bool all_exist, Row row, SomeRow some_row, Less less,
                                       Meanwhile meanwhile)
{
    constexpr int NEAR = Tile::NEIGHBOURS;
    constexpr bool AT_ONCE = Tile::R * Tile::C > 64; /* fp32 is too many words to have them wait */
    auto take = [&](int r, int c, uint32_t word) { t.at(r, c) = __uint_as_float(word) * a.per_unit; };
    auto take_less = [&](int r, int c, float x, float l) { t.at(r, c) = LESS ? fmaf(x, a.per_unit, -l) : x; };
    if (a.bias.dtype == HEED_F32) {
        uint32_t x[Tile::R][Tile::C];
        if (AT_ONCE)
            meanwhile();
        load_bias<4>(t, a, all_exist, row, some_row, [&](int r, int c, const words_of<4 * NEAR> &part) {
#pragma unroll
            for (int e = 0; e < NEAR; e++)
                if (AT_ONCE)
                    take(r, c + e, part.x[e]);
                else
                    x[r][c + e] = part.x[e];
        });
        if (!AT_ONCE)
            meanwhile();
#pragma unroll
        for (int r = 0; r < Tile::R && !AT_ONCE; r++) {
            const float l = less(r);
#pragma unroll
            for (int c = 0; c < Tile::C; c++)
                if (LESS)
                    take_less(r, c, __uint_as_float(x[r][c]), l);
                else
                    take(r, c, x[r][c]);
        }
    } else {
        uint32_t x[Tile::R][Tile::C / 2];
        load_bias<2>(t, a, all_exist, row, some_row, [&](int r, int c, const words_of<2 * NEAR> &part) {
#pragma unroll
            for (int i = 0; i < NEAR / 2; i++)
                x[r][c / 2 + i] = part.x[i];
        });
        meanwhile();
#pragma unroll
        for (int r = 0; r < Tile::R; r++) {
            const float l = less(r);
#pragma unroll
            for (int c = 0; c < Tile::C; c += 2) {
                const float2 both = to_floats(x[r][c / 2], type_of<typename Tile::type>(a));
                take_less(r, c, both.x, l), take_less(r, c + 1, both.y, l);
            }
        }
        if (!LESS && a.per_unit != 1.0f)
            scale_scores(t, a.per_unit);
    }
}

/* A bias that is near is copied in pieces of 16 bytes. Where a thread's first piece is, of a tile that begins at `first`. */
template <class Tiles, int THREADS>
__device__ inline const char *own_pieces(int thread, const mma_args &a, const char *first)
{
    const int pieces = Tiles::COLUMNS / (a.bias.dtype == HEED_F32 ? 4 : 8); /* of a row */
    return bias_row(a, first, thread / pieces) + thread % pieces * 16;
}

/* Starts their copies, where so many rows are left, and keys from n0 on. What does not exist is zero. */
template <int QUERIES, class Tiles, int THREADS>
__device__ inline void bring_bias(int thread, char *tile, const mma_args &a, const char *from, int rows, int n0)
{
    auto copy = [&](auto size) {
        constexpr int SIZE = decltype(size)::value, PITCH = Tiles::pitch(SIZE);
        constexpr int PIECES = Tiles::COLUMNS * SIZE / 16, AT_ONCE = THREADS / PIECES; /* of a row, and rows */
        const int row = thread / PIECES, at = thread % PIECES * 16, down = (int)a.bias.stride[2] * SIZE;
        const uint32_t to = shared_address(tile) + row * PITCH + at;
        if (rows >= QUERIES && n0 + Tiles::COLUMNS <= a.Sk) /* the rule */
#pragma unroll
            for (int r = 0; r < QUERIES; r += AT_ONCE)
                copy_async<16>(to + r * PITCH, row_from(from, r, down), 16);
        else
#pragma unroll 1
            for (int r = 0; r < QUERIES; r += AT_ONCE)
                copy_async<16>(to + r * PITCH, row_from(from, r, down),
                               r + row < rows && n0 * SIZE + at < a.Sk * SIZE ? 16 : 0);
    };
    if (a.bias.dtype == HEED_F32)
        copy(constant<4>());
    else
        copy(constant<2>());
}

/* S = bias / f, from shared memory. */
template <class Tile> __device__ inline void begin_with_near_bias(Tile &t, const mma_args &a)
{
    constexpr int NEAR = Tile::NEIGHBOURS;
    if (a.bias.dtype == HEED_F32) {
#pragma unroll
        for (int r = 0; r < Tile::R; r++)
#pragma unroll
            for (int c = 0; c < Tile::C; c += NEAR) {
                const words_of<NEAR * 4> part(t.bias + t.down(r) * Tile::extras::pitch(4) + t.apart(c) * 4);
#pragma unroll
                for (int e = 0; e < NEAR; e++)
                    t.at(r, c + e) = __uint_as_float(part.x[e]) * a.per_unit;
            }
    } else {
#pragma unroll
        for (int r = 0; r < Tile::R; r++)
#pragma unroll
            for (int c = 0; c < Tile::C; c += NEAR) {
                const words_of<NEAR * 2> part(t.bias + t.down(r) * Tile::extras::pitch(2) + t.apart(c) * 2);
#pragma unroll
                for (int e = 0; e < NEAR; e += 2) {
                    const float2 both = to_floats(part.x[e / 2], type_of<typename Tile::type>(a));
                    t.at(r, c + e) = both.x, t.at(r, c + e + 1) = both.y;
                }
            }
        if (a.per_unit != 1.0f)
            scale_scores(t, a.per_unit);
    }
}

/* ALiBi. Where all keys are on one side of all of a warp's queries it is an instruction an element, else two. */
template <class Tile> __device__ inline void begin_with_alibi(Tile &t, const mma_args &a, const span &s, const head &h)
{
    const float unit = h.slope * a.per_unit, step = (float)s.r_step, down = (float)s.p_step;
    const float first = (float)(s.p0 + t.row(0) * s.p_step - s.r0 - t.key(0) * s.r_step);
    auto distance = [&](int r) { return fmaf((float)Tile::down(r), down, first); }; /* of key 0 */
    const float last = distance(Tile::R - 1);
    const bool before = fminf(first, last) >= Tile::apart(Tile::C - 1) * step, after = fmaxf(first, last) <= 0.0f;
    const bool all_before = __all_sync(~0u, before);
    if (all_before || __all_sync(~0u, after)) {
        const float slope = all_before ? unit : -unit;
        begin_with(t, [&](int r, int c) { return fmaf(Tile::apart(c) * step, slope, -slope * distance(r)); });
    } else
        begin_with(t, [&](int r, int c) { return -unit * fabsf(distance(r) - Tile::apart(c) * step); });
}

#endif
