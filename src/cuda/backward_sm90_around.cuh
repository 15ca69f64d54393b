/* What comes before and after the large kernels of the Hopper backward: pieces of work, what each query contributes (L and
 * delta), and dQ from its sums. */
#ifndef HEED_CUDA_BACKWARD_SM90_AROUND_CUH
#define HEED_CUDA_BACKWARD_SM90_AROUND_CUH

#include "backward_sm90.cuh"

/* ---- Pieces of work ---------------------------------------------------------------------------------------------- */

__device__ inline int2 visible_columns(const args &a, const span &q, bool keys, int row)
{
    int2 r;
    if (keys)
        band_of_key(a, q, row, r.x, r.y);
    else
        band_of_row(a, q, row, r.x, r.y);
    return r;
}

/* The columns that keys row .. + rows of a sequence see, as describe() finds them; none: their end is 0. */
__device__ inline int2 columns_of(const args &a, const span &q, int row, int rows)
{
    const int top = threadIdx.x % 32 * 64;
    int first = INT32_MAX, last = 0;
    if (top < rows) {
        const int2 r0 = visible_columns(a, q, true, row + top);
        const int2 r1 = visible_columns(a, q, true, row + min(top + 64, rows) - 1);
        if (min(r0.x, r1.x) < max(r0.y, r1.y))
            first = min(r0.x, r1.x), last = max(r0.y, r1.y);
    }
    return make_int2(__reduce_min_sync(~0u, first), __reduce_max_sync(~0u, last));
}

/* When tile `tile` of the keys may add to dQ: after the nearest one before it that sees queries, and before the nearest
 * one after it. Grouped, after the one that follows it in its group where that sees the queries, else after the first of the
 * group before, which sees all that it sees. By a whole warp. */
__device__ inline void find_turn(const args &a, const span &q, int tile, int rows, bool grouped, piece &w)
{
    int before = tile - 1, after = tile + 1;
    int2 seen = make_int2(0, 0), next = seen;
    if (grouped) {
        const int tiles = (q.keys + rows - 1) / rows, group = group_of(grouped, tiles), first = tile / group * group;
        if (after < min(first + group, tiles))
            next = columns_of(a, q, after * rows, min(rows, q.keys - after * rows));
        if (threadIdx.x % 32 == 0)
            w.turn = first ? first - group + 1 : 0, w.alone = next.y ? next.x / COLUMNS : INT32_MAX;
        return;
    }
    while (before >= 0 && !(seen = columns_of(a, q, before * rows, rows)).y)
        before--;
    while (after * rows < q.keys && !(next = columns_of(a, q, after * rows, min(rows, q.keys - after * rows))).y)
        after++;
    if (threadIdx.x % 32 == 0) {
        w.turn = before + 1, w.alone = (seen.y + COLUMNS - 1) / COLUMNS;
        w.until = next.y ? next.x / COLUMNS : INT32_MAX;
    }
}

/* Own rows row .. + rows of a sequence, which exist. The first column is a multiple of grid. By a whole warp. */
__device__ inline void describe(const args &a, const span &q, bool keys, int row, int rows, int grid, piece &w)
{
    /* Lane g speaks for group g. Its rows' ranges grow with the row, so the outermost rows tell of all. */
    const int lane = threadIdx.x % 32, top = lane * 64;
    int first = INT32_MAX, last = 0, inside = 0, outside = 0;
    if (top < rows) {
        const int2 r0 = visible_columns(a, q, keys, row + top);
        const int2 r1 = visible_columns(a, q, keys, row + min(top + 64, rows) - 1);
        if (top + 64 <= rows) /* rows that do not exist would see what they must not */
            inside = max(r0.x, r1.x), outside = min(r0.y, r1.y);
        if (min(r0.x, r1.x) < max(r0.y, r1.y))
            first = min(r0.x, r1.x), last = max(r0.y, r1.y);
    }
    const int start = __reduce_min_sync(~0u, first) / grid * grid, stop = __reduce_max_sync(~0u, last);
    const bool empty = first == INT32_MAX;
    if (lane < 3) {
        w.begin[lane] = empty ? 0 : (first - start) / COLUMNS;
        w.end[lane] = empty ? 0 : (last - start + COLUMNS - 1) / COLUMNS;
        w.inside[lane] = inside, w.outside[lane] = outside;
    }
    if (lane)
        return;
    w.exists = 1, w.head = 0;
    w.start = start, w.tiles = start < stop ? (stop - start + COLUMNS - 1) / COLUMNS : 0;
    w.batch = keys ? q.k_batch : q.q_batch, w.memory_row = (keys ? q.k_row : q.q_row) + row;
    w.other_batch = keys ? q.q_batch : q.k_batch, w.other_row = keys ? q.q_row : q.k_row;
    w.columns = keys ? q.rows : q.keys;
}

/* One warp for each tile of each sequence, of keys and then of queries. */
__device__ inline void fill_piece(const args &a, const piece_table &of_keys, const piece_table &of_queries, int number)
{
    const int lane = threadIdx.x % 32;
    const bool keys = number < a.B * of_keys.tiles;
    const piece_table &t = keys ? of_keys : of_queries;
    const int which = keys ? number : number - a.B * of_keys.tiles;
    if (which >= a.B * t.tiles)
        return;
    const int b = which / t.tiles, tile = which - b * t.tiles, row = tile * t.rows;
    const span q = span_of(a, b);
    const int rows = min(t.rows, (keys ? q.keys : q.rows) - row);
    if (tile == 0 && lane == 0)
        t.lengths[b] = keys ? q.keys : q.rows;
    if (rows <= 0)
        return;
    const int at = piece_at(a, keys, t.rows, b, tile);
    piece &w = t.pieces[at];
    if (lane < sizeof(piece) / sizeof(int)) /* it is copied whole, with what the kernels fill in */
        ((int *)&w)[lane] = 0;
    __syncwarp();
    describe(a, q, keys, row, rows, t.grid, w);
    if (lane == 0)
        w.ranges = at * t.rows, w.rows = rows, w.tile = tile, w.turns = piece_at(a, false, COLUMNS, b, 0),
        w.sums = piece_at(a, false, 16, b, 0);
    if (keys)
        find_turn(a, q, tile, t.rows, t.grouped, w);
    for (int r = lane; r < t.rows; r += 32)
        t.ranges[(int64_t)at * t.rows + r] = r < rows ? visible_columns(a, q, keys, row + r) : make_int2(0, 0);
}

__global__ void __launch_bounds__(128)
    find_pieces(const __grid_constant__ args a, const __grid_constant__ piece_table of_keys,
                const __grid_constant__ piece_table of_queries)
{
    let_next_start();
    fill_piece(a, of_keys, of_queries, blockIdx.x * 4 + threadIdx.x / 32);
}

/* ---- L and delta ------------------------------------------------------------------------------------------------- */

struct term_rows {
    float *L, *delta; /* as terms.least; delta, too, where the gradients of sink or bias want it */
    term_view terms;
    float inverse; /* 1 / c */
    dq_sums sums;
    part_sums parts;
    int *turns;    /* of as many places: they start at 0, as do those of the parts, and */
    int *counters; /* of the two kernels that follow */
    int places, part_places, rows, pitch;
    int64_t heads; /* batches * Hq */
};

template <class T> __device__ inline float dot_product(uint4 x, uint4 y)
{
    const uint32_t a[4] = { x.x, x.y, x.z, x.w }, b[4] = { y.x, y.y, y.z, y.w };
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 u = unpack2<T>(a[i]), v = unpack2<T>(b[i]);
        sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
    }
    return sum;
}

/* Blocks of eight warps. */
__host__ __device__ inline int piece_blocks(const args &a, const piece_table &of_keys, const piece_table &of_queries)
{
    return (a.B * (of_keys.tiles + of_queries.tiles) + 7) / 8;
}

constexpr int TURNS = 4; /* rows for each group of lanes: all are asked for before any is used */

/* What comes before the large kernels, in one launch: the first blocks find pieces of work, and in the others LANES lanes
 * have a row, 8 columns each. In the end a quarter of them has the sum of each row. */
template <class T, int LANES>
__global__ void __launch_bounds__(256)
    find_terms(const __grid_constant__ args a, const __grid_constant__ term_rows t,
               const __grid_constant__ piece_table of_keys, const __grid_constant__ piece_table of_queries)
{
    constexpr int GROUPS = 256 / LANES, SHARE = LANES / TURNS;
    let_next_start();
    const int block = blockIdx.x - piece_blocks(a, of_keys, of_queries);
    if (block < 0) {
        fill_piece(a, of_keys, of_queries, blockIdx.x * 8 + threadIdx.x / 32);
        return;
    }
    const int chunks = (t.rows + GROUPS * TURNS - 1) / (GROUPS * TURNS), bh = block / chunks;
    const int first = (block - bh * chunks) * GROUPS * TURNS + threadIdx.x / LANES;
    const int b = bh / a.Hq, h = bh - b * a.Hq, lane = threadIdx.x % LANES, own = first + lane / SHARE * GROUPS;
    const T *const x = (const T *)a.o.data + row_at(a.o, b, h, first);
    const T *const y = (const T *)a.d_o.data + row_at(a.d_o, b, h, first);
    const int c = lane * 8, columns = a.delta.data ? 0 : min(8, a.Dv - c);
    uint4 o[TURNS], d_o[TURNS];
    float sum[TURNS], lse = 0.0f, delta = 0.0f;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        o[turn] = d_o[turn] = make_uint4(0, 0, 0, 0);
        if (columns == 8 && first + turn * GROUPS < t.rows) {
            o[turn] = __ldcs((const uint4 *)(x + turn * GROUPS * a.o.stride[2] + c)); /* nobody asks again */
            d_o[turn] = *(const uint4 *)(y + turn * GROUPS * a.d_o.stride[2] + c);
        }
    }
    if (own < t.rows) {
        lse = load(a.lse, row_at(a.lse, b, h, own));
        delta = a.delta.data   ? load(a.delta, row_at(a.delta, b, h, own))
                : a.d_lse.data ? -load(a.d_lse, row_at(a.d_lse, b, h, own))
                               : 0.0f;
    }
    if (block == 0 && threadIdx.x < 2)
        t.counters[threadIdx.x] = 0;
    for (int64_t n = (int64_t)block * 256 + threadIdx.x; t.sums.data && n < t.places;
         n += (int64_t)(gridDim.x - blockIdx.x + block) * 256)
        t.turns[n * TURN_APART] = 0;
    for (int64_t n = (int64_t)block * 256 + threadIdx.x; n < t.part_places;
         n += (int64_t)(gridDim.x - blockIdx.x + block) * 256)
        t.parts.turns[n] = 0;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        sum[turn] = dot_product<T>(o[turn], d_o[turn]);
        if (columns < 8 && first + turn * GROUPS < t.rows)
            for (int e = c; e < c + columns; e++)
                sum[turn] = fmaf((float)x[turn * GROUPS * a.o.stride[2] + e],
                                 (float)y[turn * GROUPS * a.d_o.stride[2] + e], sum[turn]);
    }
#pragma unroll
    for (int rows = TURNS / 2, lanes = LANES / 2; rows; rows /= 2, lanes /= 2) /* half of them keep half of the rows */
#pragma unroll
        for (int r = 0; r < rows; r++) {
            const bool high = threadIdx.x & lanes;
            const float given = __shfl_xor_sync(~0u, high ? sum[r] : sum[r + rows], lanes);
            sum[r] = (high ? sum[r + rows] : sum[r]) + given;
        }
#pragma unroll
    for (int lanes = SHARE / 2; lanes; lanes /= 2)
        sum[0] += __shfl_xor_sync(~0u, sum[0], lanes);
    if (lane % SHARE == 0 && own < t.rows) {
        /* A row that saw no key has L = +inf, so P = 0. Else L is kept finite, so that c S - L is not inf - inf. */
        const float L = -min_or_nan(-min_or_nan(lse * LOG2E, 3.4e38f), 3.4e38f);
        const bool none = lse == -CUDART_INF_F;
        const int64_t at = t.terms.at(b, h, own);
        const float all = none ? 0.0f : delta + sum[0];
        if (!t.terms.most || a.d_sink.data || a.d_bias.data)
            t.delta[at * t.terms.times] = all;
        if (t.terms.most) {
            const float term = none ? -CUDART_INF_F * t.inverse : is_left_out(a, lse) ? LEFT_OUT : -L * t.inverse;
            const float kept = 1.0f - (float)a.drop_below * 0x1p-16f; /* see differentiate_kept() */
            const uint4 x = both_terms(term, -all * kept);
            t.terms.most[at] = make_uint2(x.x, x.z), t.terms.least[at * t.terms.times] = x.y & 0xFFFF | x.w << 16;
        } else
            t.L[at] = none ? CUDART_INF_F : L;
    }
}

template <class T>
static heed_status launch_terms(const args &a, const term_rows &t, const piece_table &of_keys,
                                const piece_table &of_queries, const heed_exec *x)
{
    const int lanes = a.Dv <= 64 ? 8 : a.Dv <= 128 ? 16 : 32;
    return launch(lanes == 8    ? find_terms<T, 8>
                  : lanes == 16 ? find_terms<T, 16>
                                : find_terms<T, 32>,
                  piece_blocks(a, of_keys, of_queries) + t.heads * tiles_of(t.rows, 256 / lanes * TURNS), 256, 0, x, a,
                  t, of_keys, of_queries);
}

/* ---- dQ from its sums -------------------------------------------------------------------------------------------- */

/* A block for each tile of each head; each thread takes 8 columns of two rows at a time. */
template <class T>
__global__ void __launch_bounds__(128)
    finish_dq(const __grid_constant__ args a, const __grid_constant__ term_rows t, int tiles)
{
    const int h = blockIdx.x % a.Hq, tile = blockIdx.x / a.Hq % tiles, b = blockIdx.x / a.Hq / tiles;
    wait_for_last();
    const int groups = t.sums.width / 8, strip = piece_at(a, false, 16, b, 0);
    const span q = span_of(a, b);
    const bool any = t.turns[place_of(a, piece_at(a, false, COLUMNS, b, tile), h)]; /* else nothing is there */
    for (int n = threadIdx.x; n < COLUMNS / 2 * groups; n += 128) {
        const int i = tile * COLUMNS + n / (8 * groups) * 16 + n % 8, group = n / 8 % groups, columns = a.D - group * 8;
        if (i >= q.rows || columns <= 0)
            continue;
        const float *from = t.sums.at(h, strip, i) + group * 128 + n % 8 * 16;
        float y[2][8];
#pragma unroll
        for (int lane = 0; lane < 4; lane++) {
            const float4 x = any ? *(const float4 *)(from + lane * 4) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            y[0][lane * 2] = x.x * a.scale, y[0][lane * 2 + 1] = x.y * a.scale;
            y[1][lane * 2] = x.z * a.scale, y[1][lane * 2 + 1] = x.w * a.scale;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (i + r * 8 >= q.rows)
                continue;
            const int64_t at = row_at(a.d_q, q.q_batch, h, q.q_row + i + r * 8) + group * 8;
            const float *const x = y[r];
            if (columns >= 8 && a.d_q.dtype != HEED_F32)
                *(uint4 *)((uint16_t *)a.d_q.data + at) = make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]),
                                                                     pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
            else
#pragma unroll
                for (int e = 0; e < 8; e++)
                    if (e < columns)
                        store(a.d_q, at + e, x[e] + (a.accumulate ? load(a.d_q, at + e) : 0.0f));
        }
    }
}

#endif
