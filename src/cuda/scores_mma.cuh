/* Scores of the tensor-core kernels: what they may need, mask and bias on their way through shared memory, tiles of queries
 * as scores.cuh wants to see them, and their dropout. */
#ifndef HEED_CUDA_SCORES_MMA_CUH
#define HEED_CUDA_SCORES_MMA_CUH

#include "tile_mma.cuh"

/* ---- Kinds of scores --------------------------------------------------------------------------------------------- */

/* What the scores of a kernel may need beyond scale and band: nothing; a bias, or ALiBi, that S begins with; a mask; what
 * takes no more than a mask's tile of shared memory, so that it goes with a plain kernel's tiles; everything. */
enum { PLAIN, BEGUN, WITH_ALIBI, MASKED, UNBIASED, GENERAL };

__host__ __device__ constexpr bool begins(int scores) { return scores == BEGUN || scores == WITH_ALIBI; }

/* From this arch on there are plain and general kernels alone: for some of the others Blackwell's compilers are a few registers
 * short. */
constexpr int TWO_KINDS_ARCH = 100;

/* Those that have mask and bias in shared memory. */
__host__ __device__ constexpr bool copies_scores(int scores) { return scores >= MASKED; }

/* In the backward at head sizes to 64, where there is room for it beside two blocks, a bias that S begins with lies there too:
 * it is then there when it is asked for, and S may come before dP as in the plain kernel. */
constexpr int NEAR_ARCH = 90;
template <int D> __host__ __device__ constexpr bool near_bias(int scores, int arch)
{
    return scores == BEGUN && D == 64 && arch == NEAR_ARCH;
}
#if defined(__CUDA_ARCH__)
constexpr int THIS_ARCH = __CUDA_ARCH__ / 10;
#else
constexpr int THIS_ARCH = NEAR_ARCH;
#endif

/* Whether all that is added to q.k is ALiBi, or a bias of which eight keys are always one piece of memory and whose scale
 * is one for scale_own(). */
inline bool one_term(const args &a)
{
    if (a.softcap > 0 || a.drop_below || a.mask.data || a.scale < 1e-18f || !a.bias.data == !a.alibi.data)
        return false;
    return a.alibi.data || (a.bias.vector && a.bias.stride[3] == 1 && a.Sk % 8 == 0 && a.Sk < 1 << 28 &&
                            llabs(a.bias.stride[2]) < 1 << 28 && a.col == 0 && a.col_step == 1 &&
                            a.scale > 1.0f / 1024 && a.scale <= 1);
}

/* The head size that the kernels for a problem are compiled for. */
static inline int width_of(const args &a)
{
    const int width = HEED_MAX(a.D, a.Dv);
    return width <= 64 ? 64 : width <= 128 ? 128 : 256;
}

/* The least that will do on a GPU of the given arch. A Chip says to which head size it has kernels between plain and
 * general ones, to which they drop, and whether they take a softcap. They divide by the scale, which must not make
 * ALiBi's slope infinite. */
template <class Chip> static int scores_of(const args &a, int arch)
{
    const int D = width_of(a);
    if (!has_extras(a) && a.scale > 0)
        return PLAIN;
    if (D > Chip::UNBIASED_HEAD_DIM || arch >= TWO_KINDS_ARCH)
        return GENERAL;
    if (one_term(a))
        return a.bias.data ? BEGUN : WITH_ALIBI;
    if (a.mask.data && !a.bias.data && !a.alibi.data && !(a.softcap > 0) && !a.drop_below && a.scale > 0)
        return MASKED;
    if (a.bias.data || a.scale < 1e-18f || (a.softcap > 0 && !Chip::CAPS_UNBIASED) ||
        (a.drop_below && D > Chip::DROPS_UNBIASED))
        return GENERAL;
    return UNBIASED;
}

template <int VALUE> struct constant {
    static constexpr int value = VALUE;
};

/* run(head size, kind of scores), as constants: a source has kernels for some KINDS. */
template <class Chip, int... KINDS, class Run> static heed_status run_kind(const args &a, int scores, Run run)
{
    heed_status status = HEED_OK;
    const auto meet = [&](auto width, auto kind) {
        constexpr int D = decltype(width)::value, KIND = decltype(kind)::value;
        if constexpr (D <= (KIND == PLAIN || KIND == GENERAL ? Chip::HEAD_DIM : Chip::UNBIASED_HEAD_DIM))
            if (D == width_of(a) && KIND == scores)
                status = run(width, kind);
    };
    (meet(constant<64>(), constant<KINDS>()), ...);
    (meet(constant<128>(), constant<KINDS>()), ...);
    (meet(constant<256>(), constant<KINDS>()), ...);
    return status;
}

/* What a kernel is given. S is in units of the scale, but with a bias that it begins with. For that scale = p f with a
 * power of two p and 1 <= f < 2: a block's own rows are multiplied by p, which is exact, and the tensor core adds q.k to
 * bias / f, which never is too large. */
struct mma_args : args {
    float unit, per_unit;                     /* of S: scale or f; 1 / unit. scale_log2 is that of the unit */
    int64_t q_step, d_o_step, k_step, v_step; /* bytes from row to row, and from visible key to key */
};

__host__ __device__ inline float power_in(float scale)
{
    union {
        float number;
        uint32_t bits;
    } x = { scale };
    x.bits &= 0x7F800000u;
    return x.number;
}

template <int SCORES> static mma_args with_unit(const args &a)
{
    mma_args x = {};
    (args &)x = a;
    x.unit = SCORES == BEGUN ? a.scale / power_in(a.scale) : a.scale;
    x.scale_log2 = x.unit * LOG2E, x.per_unit = 1 / x.unit;
    x.q_step = a.q.stride[2] * 2, x.d_o_step = a.d_o.stride[2] * 2;
    x.k_step = a.col_step * a.k.stride[2] * 2, x.v_step = a.col_step * a.v.stride[2] * 2;
    return x;
}

/* ---- Mask and bias in shared memory ------------------------------------------------------------------------------ */

/* How many neighbouring keys of a query are a lane's, in tiles with so many keys. */
__host__ __device__ constexpr int neighbours(int keys) { return keys % 32 ? 4 : 8; }

/* Which key is row r of a tile of keys, for that: columns 2 t, 2 t + 1 of every eight are those of lane t. Plain scores
 * need no other than the natural order. */
template <int KEYS, bool PLAIN> struct near_order {
    static constexpr int NEAR = PLAIN ? 2 : neighbours(KEYS), ALL = 4 * NEAR;
    __device__ int operator()(int r) const
    {
        return PLAIN ? r : r / ALL * ALL + r % 8 / 2 * NEAR + r % ALL / 8 * 2 + r % 2;
    }
};

/* Mask and bias of a tile of QUERIES x KEYS scores lie in shared memory as they do outside, a row for each query:
 * copied ahead, they cost no wait, and any layout outside is read in order. Rows are somewhat longer than KEYS
 * elements, so that what a warp reads at once lies in different banks: of key_major tiles some keys of every other
 * query, of query_major ones what four lanes read of neighbouring queries. */
template <int QUERIES, int KEYS, bool KEY_MAJOR> struct score_tiles {
    static constexpr int ROWS = QUERIES, COLUMNS = KEYS;
    static constexpr int most_bytes(int scores)
    {
        return !copies_scores(scores) ? 0 : ROWS * (pitch(1) + (scores == GENERAL ? pitch(4) : 0));
    }
    static __host__ __device__ constexpr int pitch(int size)
    {
        const int each = neighbours(KEYS) * size, together = 4 * each;
        return KEYS * size + (KEY_MAJOR || each > 16 ? 16 : KEYS * size / together % 2 ? 0 : together);
    }
    static __host__ __device__ int bias_bytes(const args &a)
    {
        return a.bias.data ? QUERIES * pitch(a.bias.dtype == HEED_F32 ? 4 : 2) : 0;
    }
    static __host__ __device__ int bytes(const args &a, int scores, bool near = false)
    {
        return near                     ? bias_bytes(a)
               : scores == BEGUN        ? ROWS * sizeof(char *) /* where each query's bias begins */
               : !copies_scores(scores) ? 0
                                        : bias_bytes(a) + (a.mask.data ? QUERIES * pitch(1) : 0);
    }
};

/* Mask or bias of one head. */
struct score_rows {
    const char *first;   /* of query 0 and key 0 */
    int64_t down, along; /* bytes from query to query, and from key to key */
    int vector;          /* keys are neighbours, and every sixteenth begins at a multiple of 16 bytes */
};

struct score_source {
    score_rows bias, mask;
};

__device__ inline score_rows score_rows_of(const args &a, const view &m, int64_t first, int size)
{
    score_rows x;
    x.first = m.data + (first + a.col * m.stride[3]) * size;
    x.down = m.stride[2] * size, x.along = a.col_step * m.stride[3] * size;
    x.vector = m.vector && x.along == size && (uintptr_t)x.first % 16 == 0;
    return x;
}

__device__ inline score_source score_source_of(const args &a, const head &x)
{
    return { score_rows_of(a, a.bias, x.bias, a.bias.dtype == HEED_F32 ? 4 : 2), score_rows_of(a, a.mask, x.mask, 1) };
}

/* The same of head h, from that of head 0. */
__device__ inline score_source at_head(score_source x, const args &a, int h)
{
    x.bias.first += h * a.bias.stride[1] * (a.bias.dtype == HEED_F32 ? 4 : 2);
    x.mask.first += h * a.mask.stride[1];
    return x;
}

/* Copies queries i0 .. and keys n0 .. of a mask or bias; those from `rows` and `keys` on are zero. */
template <int QUERIES, int KEYS, int THREADS, int SIZE>
__device__ inline void copy_scores(int thread, char *tile, int pitch, const score_rows &m, int i0, int n0, int rows,
                                   int keys)
{
    if (m.vector) {
        constexpr int CHUNKS = KEYS * SIZE / 16, ROWS_AT_ONCE = THREADS / CHUNKS;
        constexpr int UNROLL = HEED_TURING ? COPIES_IN_REGISTERS : QUERIES;
        const int row = thread / CHUNKS, at = thread % CHUNKS * 16;
        const int bytes = max(0, min(16, keys * SIZE - at));
        const char *from = m.first + (i0 + row) * m.down + (int64_t)n0 * SIZE + at;
        const int64_t step = ROWS_AT_ONCE * m.down;
        const uint32_t to = shared_address(tile + row * pitch + at);
        if (ROWS_AT_ONCE > QUERIES && row >= QUERIES)
            return;
        if (rows >= QUERIES && keys >= KEYS) { /* the rule, and a third of the instructions */
#if !HEED_TURING
            if (step == 0) /* the second cache would be asked for the same line by all */
#pragma unroll UNROLL
                for (int r = 0; r < QUERIES; r += ROWS_AT_ONCE)
                    copy_async_near(to + r * pitch, from);
            else
#endif
#pragma unroll UNROLL
                for (int r = 0; r < QUERIES; r += ROWS_AT_ONCE, from += step)
                    copy_async<16>(to + r * pitch, from, 16);
        } else
#pragma unroll 1
            for (int r = 0; r < QUERIES; r += ROWS_AT_ONCE, from += step)
                copy_async<16>(to + r * pitch, from, r + row < rows ? bytes : 0);
    } else {
        constexpr int UNROLL = HEED_TURING ? COPIES_IN_REGISTERS : 4;
        const char *from = m.first + i0 * m.down + n0 * m.along;
#pragma unroll UNROLL
        for (int e = thread; e < QUERIES * KEYS; e += THREADS) {
            const int r = e / KEYS, c = e % KEYS;
            const char *one = from + r * m.down + c * m.along;
            char *to = tile + r * pitch + c * SIZE;
            const bool real = r < rows && c < keys;
            if (SIZE == 1)
                *to = real ? *one : 0;
            else if (SIZE == 2)
                *(uint16_t *)to = real ? *(const uint16_t *)one : 0;
            else
                *(float *)to = real ? *(const float *)one : 0.0f;
        }
    }
}

/* Mask and, of kernels that have it there, bias for rows `row` .. + QUERIES of a tile that begins at query i0 and key n0, by so
 * many threads. */
template <int SCORES, class Tiles, int QUERIES, int THREADS>
__device__ inline void copy_mask_and_bias(int thread, char *tiles, int row, const args &a, const span &s,
                                          const score_source &from, int i0, int n0)
{
    constexpr int KEYS = Tiles::COLUMNS;
    const int rows = s.rows - i0 - row, keys = s.keys - n0;
    char *mask = tiles + (SCORES == GENERAL ? Tiles::bias_bytes(a) : 0) + row * Tiles::pitch(1);
    if (SCORES == GENERAL && a.bias.data && a.bias.dtype == HEED_F32)
        copy_scores<QUERIES, KEYS, THREADS, 4>(thread, tiles + row * Tiles::pitch(4), Tiles::pitch(4), from.bias,
                                               i0 + row, n0, rows, keys);
    else if (SCORES == GENERAL && a.bias.data)
        copy_scores<QUERIES, KEYS, THREADS, 2>(thread, tiles + row * Tiles::pitch(2), Tiles::pitch(2), from.bias,
                                               i0 + row, n0, rows, keys);
    if (SCORES >= MASKED && a.mask.data)
        copy_scores<QUERIES, KEYS, THREADS, 1>(thread, mask, Tiles::pitch(1), from.mask, i0 + row, n0, rows, keys);
}

/* A warp's scores with queries as rows, as scores.cuh wants to see them. low and high are in shared memory. A bias
 * is of fp32 or of type T. NEAR neighbouring keys are a lane's. */
template <int MT, int NT, class T = float, int NEAR = 2> struct query_major {
    static constexpr int R = 2 * MT, C = 2 * NT, NEIGHBOURS = NEAR;
    static constexpr bool EXACT = false;
    typedef T type;
    float (&X)[MT][NT][4];
    const int *lows, *highs; /* of the tile's first query */
    int i0, n0, row0;        /* first query and first key of this lane; its first row of the tile */
    const char *bias, *mask; /* of row0 and n0 in shared memory */
    bool hides;              /* the mask does */
    /* What the mask lets see: bits of four neighbouring keys lie eight apart, as their bytes do. */
    uint32_t seen[(R * C + 31) / 32];
    typedef score_tiles<0, 8 * NT, false> extras;
    static __device__ constexpr int seen_at(int r, int c) { return c % 4 * 8 + (r * C + c) % 32 / 4; }
    __device__ float &at(int r, int c) { return X[r / 2][c / 2][r % 2 * 2 + c % 2]; }
    static __device__ constexpr int down(int r) { return r / 2 * 16 + r % 2 * 8; }
    static __device__ constexpr int apart(int c) { return c / NEAR * (4 * NEAR) + c % NEAR; }
    __device__ int row(int r) const { return i0 + down(r); }
    __device__ int key(int c) const { return n0 + apart(c); }
    __device__ int low(int r) const { return lows[row0 + down(r)]; }
    __device__ int high(int r) const { return highs[row0 + down(r)]; }
};

/* Where a lane's first element of mask and bias lies, which is in the given row and column of the tile. */
template <int SCORES, class Extras, class Tile>
__device__ inline void point_at_tiles(Tile &t, const char *tiles, const args &a, int row, int column)
{
    const int size = a.bias.dtype == HEED_F32 ? 4 : 2;
    if (SCORES == GENERAL || SCORES == BEGUN)
        t.bias = tiles + row * Extras::pitch(size) + column * size;
    t.mask = tiles + (SCORES == GENERAL ? Extras::bias_bytes(a) : 0) + row * Extras::pitch(1) + column;
}

/* So many neighbouring bytes of memory as words. */
struct in_global {
};
template <int BYTES> struct words_of {
    uint32_t x[(BYTES + 3) / 4] = {};
    __device__ words_of() {}
    __device__ words_of(const char *p, in_global)
    {
        if constexpr (BYTES == 4)
            x[0] = load_4(p);
        else if constexpr (BYTES == 8)
            *(uint2 *)x = load_8(p);
        else
#pragma unroll
            for (int i = 0; i < BYTES / 16; i++)
                ((uint4 *)x)[i] = load_16(p + 16 * i);
    }
    __device__ explicit words_of(const char *p)
    {
        if constexpr (BYTES == 2)
            x[0] = *(const uint16_t *)p;
        else if constexpr (BYTES == 4)
            x[0] = *(const uint32_t *)p;
        else if constexpr (BYTES == 8)
            *(uint2 *)x = *(const uint2 *)p;
        else
#pragma unroll
            for (int i = 0; i < BYTES / 16; i++)
                ((uint4 *)x)[i] = ((const uint4 *)p)[i];
    }
};

template <int MT, int NT, class T, int NEAR>
__device__ inline void add_bias(query_major<MT, NT, T, NEAR> &t, float factor, const args &a, const span &,
                                const head &)
{
    typedef typename query_major<MT, NT, T, NEAR>::extras extras;
    if (a.bias.dtype == HEED_F32) {
#pragma unroll
        for (int r = 0; r < 2 * MT; r++)
#pragma unroll
            for (int c = 0; c < 2 * NT; c += NEAR) {
                const words_of<NEAR * 4> row(t.bias + t.down(r) * extras::pitch(4) + t.apart(c) * 4);
#pragma unroll
                for (int e = 0; e < NEAR; e++)
                    t.at(r, c + e) = fmaf(t.at(r, c + e), factor, __uint_as_float(row.x[e]));
            }
    } else {
#pragma unroll
        for (int r = 0; r < 2 * MT; r++)
#pragma unroll
            for (int c = 0; c < 2 * NT; c += NEAR) {
                const words_of<NEAR * 2> row(t.bias + t.down(r) * extras::pitch(2) + t.apart(c) * 2);
#pragma unroll
                for (int e = 0; e < NEAR; e += 2) {
                    const float2 both = to_floats(row.x[e / 2], type_of<T>(a));
                    t.at(r, c + e) = fmaf(t.at(r, c + e), factor, both.x);
                    t.at(r, c + e + 1) = fmaf(t.at(r, c + e + 1), factor, both.y);
                }
            }
    }
}

/* Bytes that are not 0 become 1. */
__device__ inline uint32_t ones(uint32_t bytes)
{
    return (((bytes & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | bytes) >> 7 & 0x01010101u;
}

/* Takes the mask's bytes, of which nearly all are 0 or 1, as bits. Whether the warp has any. */
template <int MT, int NT, class T, int NEAR> __device__ inline bool take_mask(query_major<MT, NT, T, NEAR> &t)
{
    typedef query_major<MT, NT, T, NEAR> tile;
    auto take = [&](auto bits) {
#pragma unroll
        for (uint32_t &x : t.seen)
            x = 0;
#pragma unroll
        for (int r = 0; r < tile::R; r++)
#pragma unroll
            for (int c = 0; c < tile::C; c += NEAR) {
                const words_of<NEAR> row(t.mask + t.down(r) * tile::extras::pitch(1) + t.apart(c));
#pragma unroll
                for (int e = 0; e < NEAR; e += 4)
                    t.seen[(r * tile::C + c) / 32] += bits(row.x[e / 4]) << tile::seen_at(r, c + e);
            }
    };
    uint32_t all = 0;
    take([&](uint32_t bytes) { return all |= bytes, bytes; });
    if (__any_sync(~0u, all & ~0x01010101u))
        take([](uint32_t bytes) { return ones(bytes); });
    uint32_t any = 0, every = ~0u;
#pragma unroll
    for (uint32_t x : t.seen)
        any |= x, every &= x;
    t.hides = !__all_sync(~0u, every == ~0u);
    return __any_sync(~0u, any);
}

template <int MT, int NT, class T, int NEAR>
__device__ inline void apply_mask(query_major<MT, NT, T, NEAR> &t, const args &, const span &, const head &)
{
    if (!t.hides)
        return;
#pragma unroll
    for (int bit = 0; bit < (t.R * t.C + 31) / 32 * 32; bit++) { /* in this order a few at a time become predicates */
        const int i = bit / 32 * 32 + bit % 8 * 4 + bit % 32 / 8, r = i / t.C, c = i % t.C;
        if (i < t.R * t.C)
            t.at(r, c) = t.seen[i / 32] >> t.seen_at(r, c) & 1 ? t.at(r, c) : -CUDART_INF_F;
    }
}

/* ---- Dropout ----------------------------------------------------------------------------------------------------- */

/* The dropout bits of a lane's tile, packed: whether P of query r and key c is kept. */
template <class Tile> struct kept_bits {
    static constexpr int C = Tile::C;
    static_assert(32 % C == 0, "the bits of a query lie in one word");
    uint32_t words[(Tile::R * C + 31) / 32] = {};
    __device__ void add(int r, int c, uint32_t bits) { words[(r * C + c) / 32] |= bits << (r * C + c) % 32; }
    __device__ void add_at(int r, int c, uint32_t bits) { words[r * C / 32] |= bits << (r * C % 32 + c); } /* any c */
    __device__ void add_row(int row, uint32_t bits) /* of any number, without an index into registers */
    {
#pragma unroll
        for (int r = 0; r < Tile::R; r++)
            add(r, 0, row == r ? bits : 0);
    }
    __device__ bool at(int r, int c) const { return words[(r * C + c) / 32] >> (r * C + c) % 32 & 1; }
};

template <int MT, int NT, class T, int NEAR>
__device__ inline void draw_tile(const query_major<MT, NT, T, NEAR> &t, kept_bits<query_major<MT, NT, T, NEAR>> &kept,
                                 const args &a, const span &s, const head &x)
{
    const drop_source source = { seed_of(a), (uint32_t)x.h, (uint32_t)s.b };
    const int64_t first = s.r0 + t.n0;
    const bool rare = s.r_step != 1 || first % NEAR;
    const uint32_t eight = (uint32_t)(uint64_t)(first >> 3);
    auto position = [&](int r) { return (uint32_t)(uint64_t)(s.p0 + t.row(r) * s.p_step); };
    auto own = [&](uint32_t bits) { return NEAR == 8 ? bits : bits >> (first & 4) & 15; };
    constexpr int GROUPS = 2 * NT / NEAR;
    if (GROUPS == 1 || rare) { /* loops, as they would be long otherwise */
#pragma unroll 1
        for (int r = 0; r < 2 * MT; r++)
            kept.add_row(r, rare ? draw(t, r, a, s, x, source.seed)
                                 : own(kept_of_eight(philox(source.seed, make_uint4(eight, position(r), x.h, s.b)),
                                                     a.drop_below)));
        return;
    }
    constexpr bool KEPT = GROUPS > 2; /* else what depends on rows is not worth registers */
    drop_source::row_part rows[2 * MT];
#pragma unroll
    for (int r = 0; r < 2 * MT; r++)
        rows[r] = source.of_row(position(r));
#pragma unroll 1
    for (int c = 0; c < 2 * NT; c += NEAR) {
        const drop_source::keys_part keys = source.of_keys(eight + t.apart(c) / 8);
#pragma unroll
        for (int r = 0; r < 2 * MT; r++)
            kept.add_at(r, c, own(source.kept(keys, KEPT ? rows[r] : source.of_row(position(r)), a.drop_below)));
    }
}

#endif
