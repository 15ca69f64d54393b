/* The gradient of a bias with mma.sync, for every family of kernels, in fp16 and bf16 on sm_80 and later:
 *
 *     dbias = sum of P (dP - delta)     over all that the bias is broadcast to
 *
 * A block owns 128 queries of dbias and, one after the other, the tiles of 64 keys of a strip. For each of them it meets in a
 * fixed order the pairs of a head and a sequence, and the queries and keys, that share it, computes S and dP of each, and sums
 * in registers what it writes once. Q and K, then dO and V, come 64 columns at a time, in two slots: the next ones are on their
 * way while one is multiplied, whichever tile or head they are of, and any head size is a number of such parts. Where a strip is
 * of one pair, its Q and dO may stay. On Hopper a cluster of blocks shares the pairs of a tile where there are few tiles. */
#include "differentiate_mma.cuh"
#include "launch.cuh"
#include "sm90.cuh"

constexpr int MT = 2, NT = 8, WARPS = 4, THREADS = 32 * WARPS, BR = 16 * MT * WARPS, BC = 8 * NT;
constexpr int PART = 64; /* columns of Q, K, dO and V at once */
constexpr int OWN_TILE = BR * PART * 2, KEY_TILE = BC * PART * 2;
constexpr int CLUSTER_ARCH = 90; /* where clusters were measured */
typedef score_tiles<BR, BC, false> extras;
typedef near_order<BC, false> order_of_keys;
static_assert(THREADS == BR, "a thread for each query");

/* How dbias is divided. */
struct division {
    int tiles, key_tiles, strip, strips; /* of queries; of keys; tiles of keys in a strip; strips */
    int keys;                            /* that are on the stride */
    int heads, pairs;                    /* that share an element: of one sequence, and of all */
    int parts_s, parts_dp;               /* of a row of q and k, and of d_o and v */
    int stays;                           /* Q and dO do: they have a slot for each part */
    int direct; /* what a block has summed is all, and leaves in pieces of 16 bytes; else a strip is one tile */
    __host__ __device__ int slots() const { return stays ? parts_s + parts_dp : 2; }
};

/* ---- Meetings ---------------------------------------------------------------------------------------------------- */

/* A tile of scores: of which tile of dbias, pair, first query and first key. */
struct place {
    int tile, pair, i0, n0;
};

/* What a block owns. */
struct ownership {
    int b, h; /* the first to share it */
    place first;
    int last_tile, last_pair;
};

struct meeting {
    place at;
    span sequence;
    head of;
    score_source from;
    key_rows own[2], other[2]; /* Q and dO; K and V */
    const char *lse, *delta;
    int rows, keys;  /* that there are */
    int tile_before; /* of the meeting before: what is summed so far is of it */
    bool exists, first;
    bool whole; /* all of its queries exist and see all of its keys */
    bool new_bias;
};

/* Keys first, then queries, then pairs, then tiles. */
__device__ static bool advance(place &p, const ownership &own, const args &a, const division &d)
{
    if (a.bias_shape[3] == 1 && (p.n0 += BC) < d.keys)
        return true;
    p.n0 = a.bias_shape[3] == 1 ? 0 : p.tile * BC;
    if (a.bias_shape[2] == 1 && (p.i0 += BR) < a.Sq)
        return true;
    p.i0 = own.first.i0;
    if (++p.pair < own.last_pair)
        return true;
    p.pair = own.first.pair;
    p.n0 += BC;
    return ++p.tile < own.last_tile;
}

/* Whether there is anything to see. */
__device__ static bool meet(meeting &m, const place &p, const ownership &own, const args &a, const division &d)
{
    const int b = own.b + p.pair / d.heads, h = own.h + p.pair % d.heads;
    const span q = span_of(a, b);
    m.rows = min(BR, q.rows - p.i0), m.keys = q.keys - p.n0;
    if (m.rows <= 0 || m.keys <= 0)
        return false;
    int first, last, low, high;
    band_of_row(a, q, p.i0, first, last);
    band_of_row(a, q, p.i0 + m.rows - 1, low, high);
    if (p.n0 >= max(last, high) || p.n0 + BC <= min(first, low))
        return false;
    m.whole = m.rows == BR && p.n0 >= max(first, low) && p.n0 + BC <= min(last, high);
    m.at = p, m.sequence = q, m.of = head_of(a, q, h), m.from = score_source_of(a, m.of);
    auto row = [&](const view &t, int size) { return t.data + row_at(t, q.q_batch, h, q.q_row + p.i0) * size; };
    m.own[0] = { row(a.q, 2), a.q.stride[2] * 2 }, m.own[1] = { row(a.d_o, 2), a.d_o.stride[2] * 2 };
    m.lse = row(a.lse, 4), m.delta = row(a.delta, 4);
    m.other[0] = keys_of(a, q, a.k, m.of.hk), m.other[1] = keys_of(a, q, a.v, m.of.hk);
    for (key_rows &k : m.other)
        k.first += p.n0 * k.step;
    return true;
}

/* The meeting after `last`, or the first one. */
__device__ static void find_next(meeting &m, const meeting *last, const ownership &own, const args &a,
                                 const division &d)
{
    place p = last ? last->at : own.first;
    bool more = !last || advance(p, own, a, d);
    while (more && !meet(m, p, own, a, d))
        more = advance(p, own, a, d);
    m.exists = more, m.first = !last;
    m.tile_before = last ? last->at.tile : own.first.tile;
    m.new_bias = !last || last->at.tile != p.tile;
}

struct shared_dbias {
    ownership block; /* looked at too rarely for registers */
    meeting met[2];
    float lse[2][BR], delta[2][BR];
    int low[BR], high[BR];
    __align__(1024) char keys[2][KEY_TILE];
    char own[2][OWN_TILE]; /* or more; then bias and mask */
    static constexpr int PITCH = BC + 4;
    __device__ float &sum(int row, int column) { return ((float *)keys)[row * PITCH + column]; } /* in the end */
};
static_assert(sizeof(float) * BR * shared_dbias::PITCH <= 2 * (KEY_TILE + OWN_TILE), "sums take the place of tiles");

/* Starts to copy a part of what a meeting needs: Q and K or dO and V. With the first come the facts of rows, which the meeting
 * before may still look at in its own slot; with the second, when its scores are done with, bias and mask, to tiles. */
__device__ static void start_part(shared_dbias &s, const meeting &m, int slot, int part, int stage, char *tiles,
                                  const args &a, const division &d)
{
    const bool values = part >= d.parts_s;
    const int column = (values ? part - d.parts_s : part) * PART, width = min(PART, (values ? a.Dv : a.D) - column);
    const key_rows &own = m.own[values], &other = m.other[values];
    if (!d.stays || m.first)
        copy_rows<PART, BR, THREADS>(shared_address(s.own) + (d.stays ? part : stage) * OWN_TILE,
                                     own.first + column * 2, (values ? a.d_o : a.q).stride[2] * 2, m.rows, width);
    copy_rows<PART, BC, THREADS>(shared_address(s.keys) + stage * KEY_TILE, other.first + column * 2,
                                 a.col_step * (values ? a.v : a.k).stride[2] * 2, m.keys, width, order_of_keys());
    const int row = threadIdx.x;
    if (part == 0) {
        const int real = row < m.rows ? 4 : 0;
        const int64_t at = min(row, m.rows - 1);
        copy_async<4>(shared_address(&s.lse[slot][row]), m.lse + at * a.lse.stride[2] * 4, real);
        copy_async<4>(shared_address(&s.delta[slot][row]), m.delta + at * a.delta.stride[2] * 4, real);
    }
    if (part == 1) {
        if (m.new_bias) { /* the tile's, of which this sequence may see less than another */
            const int rows = a.bias_shape[2] == 1 ? BR : a.bias_shape[2] - m.at.i0;
            const int keys = a.bias_shape[3] == 1 ? BC : d.keys - m.at.n0;
            auto copy = [&](auto size) {
                copy_scores<BR, BC, THREADS, size.value>(row, tiles, extras::pitch(size.value), m.from.bias, m.at.i0,
                                                         m.at.n0, rows, keys);
            };
            a.bias.dtype == HEED_F32 ? copy(constant<4>()) : copy(constant<2>());
        }
        if (a.mask.data)
            copy_scores<BR, BC, THREADS, 1>(row, tiles + extras::bias_bytes(a), extras::pitch(1), m.from.mask, m.at.i0,
                                            m.at.n0, m.rows, m.keys);
    }
    commit_copies();
}

/* ---- Results ----------------------------------------------------------------------------------------------------- */

/* The lane's sums of a tile, where eight keys are whole pieces of 16 bytes. */
template <class Tile> __device__ static void store_tile(Tile &t, const args &a, int keys, int b, int h)
{
#pragma unroll
    for (int r = 0; r < Tile::R; r++) {
        const int64_t row = row_at(a.d_bias, b, h, t.row(r));
#pragma unroll
        for (int c = 0; c < Tile::C; c += 8) {
            if (t.row(r) >= a.bias_shape[2] || t.key(c) >= keys)
                continue;
            if (a.d_bias.dtype == HEED_F32) {
                float4 *const to = (float4 *)((float *)a.d_bias.data + row + t.key(c));
                to[0] = make_float4(t.at(r, c), t.at(r, c + 1), t.at(r, c + 2), t.at(r, c + 3));
                to[1] = make_float4(t.at(r, c + 4), t.at(r, c + 5), t.at(r, c + 6), t.at(r, c + 7));
            } else {
                auto two = [&](int e) { return pack(t.at(r, c + e), t.at(r, c + e + 1), type_of<either>(a)); };
                *(uint4 *)((uint16_t *)a.d_bias.data + row + t.key(c)) = make_uint4(two(0), two(2), two(4), two(6));
            }
        }
    }
}

/* The other way, through shared memory. Where bias has one row, or one column, for all, those of a tile are summed too; and so
 * is what the blocks of a cluster have. */
template <class Tile> __device__ static void sum_and_store(shared_dbias &s, Tile &t, const args &a, const division &d)
{
    constexpr bool CLUSTERS = THIS_ARCH == CLUSTER_ARCH;
    const bool one_row = a.bias_shape[2] == 1, one_column = a.bias_shape[3] == 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (one_column)
#pragma unroll
        for (int r = 0; r < Tile::R; r++) {
            float sum = 0.0f;
#pragma unroll
            for (int c = 0; c < Tile::C; c++)
                sum += t.at(r, c);
            sum += __shfl_xor_sync(~0u, sum, 1);
            t.at(r, 0) = sum + __shfl_xor_sync(~0u, sum, 2);
        }
    if (one_row)
#pragma unroll
        for (int c = 0; c < Tile::C; c++) {
            float sum = 0.0f;
#pragma unroll
            for (int r = 0; r < Tile::R; r++)
                sum += t.at(r, c);
#pragma unroll
            for (int step = 4; step < 32; step *= 2)
                sum += __shfl_xor_sync(~0u, sum, step);
            t.at(0, c) = sum;
        }
    __syncthreads(); /* nobody multiplies any more */
#pragma unroll
    for (int r = 0; r < Tile::R; r++)
#pragma unroll
        for (int c = 0; c < Tile::C; c++)
            if ((!one_row || (r == 0 && lane < 4)) && (!one_column || (c == 0 && lane % 4 == 0)))
                s.sum(one_row ? warp : t.row0 + t.down(r), one_column ? 0 : t.n0 + t.apart(c)) = t.at(r, c);
    __syncthreads();
    if (CLUSTERS)
        cluster_arrive(), cluster_wait();
    const int first = CLUSTERS ? cluster_place() : 0, blocks = CLUSTERS ? cluster_depth() : 1;
    const ownership &own = s.block;
    const int i0 = own.first.i0, n0 = own.first.n0, add = one_row ? WARPS : 1;
    const int rows = one_row ? 1 : min(BR, a.bias_shape[2] - i0), columns = one_column ? 1 : min(BC, d.keys - n0);
    for (int e = first * THREADS + threadIdx.x; e < rows * columns; e += blocks * THREADS) {
        const int row = e / columns, column = e % columns;
        float sum = 0.0f;
        for (int block = 0; block < blocks; block++)
            for (int r = row; r < row + add; r++)
                sum += CLUSTERS ? load_of_block<float>(shared_address(&s.sum(r, column)), block) : s.sum(r, column);
        const int64_t key = one_column ? 0 : a.col + (n0 + column) * a.col_step;
        store(a.d_bias, row_at(a.d_bias, own.b, own.h, one_row ? 0 : i0 + row) + key * a.d_bias.stride[3], sum);
    }
    if (CLUSTERS)
        cluster_arrive(), cluster_wait(); /* nobody leaves before all have read */
}

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

__global__ void __launch_bounds__(THREADS, 2)
    dbias_mma(const __grid_constant__ args a, const __grid_constant__ division d)
{
#if CHIP_RUNS_HERE
    typedef query_major<MT, NT, either, order_of_keys::NEAR> own_tile;
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(shared_dbias *)memory;
    char *const tiles = memory + sizeof(shared_dbias) + (d.slots() - 2) * OWN_TILE;
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16 * MT, column0 = lane % 4 * order_of_keys::NEAR;
    const int parts = d.parts_s + d.parts_dp;
    const ownership &own = s.block;
    if (threadIdx.x == 0) {
        ownership &own = s.block;
        const int strip = blockIdx.x % d.strips, rest = blockIdx.x / d.strips, head = rest / d.tiles;
        own.h = head % a.bias_shape[1], own.b = head / a.bias_shape[1];
        own.first.tile = strip * d.strip, own.last_tile = min(own.first.tile + d.strip, d.key_tiles);
        own.first.i0 = (d.tiles - 1 - rest % d.tiles) * BR, own.first.n0 = own.first.tile * BC;
        own.first.pair = (int)((int64_t)d.pairs * blockIdx.z / gridDim.z);
        own.last_pair = (int)((int64_t)d.pairs * (blockIdx.z + 1) / gridDim.z);
        find_next(s.met[0], NULL, own, a, d);
    }
    int slot = 0, stage = 0; /* which of two meetings, and of two places for its parts */
    __syncthreads();
    if (s.met[0].exists) {
#pragma unroll 1
        for (int part = 0; part < 2; part++)
            start_part(s, s.met[0], 0, part, part, tiles, a, d);
        wait_copies<1>();
    }
    __syncthreads();

    float sum[MT][NT][4];
    clear(sum);
    /* Those without a meeting are zeros. */
    auto store_tiles = [&](int tile, int end) {
        for (; tile < end; tile++) {
            own_tile t = { sum, NULL, NULL, own.first.i0 + row0 + lane / 4, tile * BC + column0, row0 + lane / 4 };
            store_tile(t, a, d.keys, own.b, own.h);
            clear(sum);
        }
    };
    for (; s.met[slot].exists; slot ^= 1) {
        const meeting &m = s.met[slot];
        if (d.direct)
            store_tiles(m.tile_before, m.at.tile);
        if (threadIdx.x == 0)
            find_next(s.met[slot ^ 1], &m, own, a, d);
        if (!m.whole) {
            int low = 0, high = 0;
            if (threadIdx.x < m.rows)
                band_of_row(a, m.sequence, m.at.i0 + threadIdx.x, low, high);
            s.low[threadIdx.x] = low, s.high[threadIdx.x] = high;
        }
        float X[MT][NT][4], P[MT][NT][4]; /* X: S, and then dP */
        own_tile tP = { P };
        kept_bits<own_tile> kept;
        clear(X);
#pragma unroll 1
        for (int part = 0; part < parts; stage ^= 1) {
            multiply_rows<PART>(X, shared_address(s.own) + (d.stays ? part : stage) * OWN_TILE, row0,
                                shared_address(s.keys) + stage * KEY_TILE, 0, type_of<either>(a));
            wait_copies<0>();
            __syncthreads(); /* all have multiplied this part, the next one is here, and the one after it is sent for */
            const bool same = part + 2 < parts;
            const int to = same ? slot : slot ^ 1;
            if (same || s.met[to].exists)
                start_part(s, s.met[to], to, same ? part + 2 : part + 2 - parts, stage, tiles, a, d);
            if (++part != d.parts_s)
                continue;
            own_tile t = { X, s.low, s.high, m.at.i0 + row0 + lane / 4, m.at.n0 + column0, row0 + lane / 4 };
            if (a.drop_below)
                draw_tile(t, kept, a, m.sequence, m.of);
            point_at_tiles<GENERAL, extras>(t, tiles, a, t.row0, column0);
            if (a.mask.data)
                take_mask(t);
            score(t, a.scale, a, m.sequence, m.of, m.whole);
#pragma unroll
            for (int r = 0; r < own_tile::R; r++) {
                const float lse = s.lse[slot][t.row0 + own_tile::down(r)];
                const float L = lse == -CUDART_INF_F ? CUDART_INF_F : lse; /* a row that sees nothing has P = 0 */
#pragma unroll
                for (int c = 0; c < own_tile::C; c++)
                    tP.at(r, c) = probability<true>(t.at(r, c), LOG2E, L);
            }
            clear(X);
        }
        own_tile t = { X }, all = { sum };
        if (a.drop_below)
            keep(t, kept, a.keep_scale);
#pragma unroll
        for (int r = 0; r < own_tile::R; r++) {
            const float delta = s.delta[slot][row0 + lane / 4 + own_tile::down(r)];
#pragma unroll
            for (int c = 0; c < own_tile::C; c++)
                if (tP.at(r, c) != 0.0f) /* P = 0 hides the pair, whatever dP came out as */
                    all.at(r, c) = fmaf(tP.at(r, c), t.at(r, c) - delta, all.at(r, c));
        }
    }
    if (d.direct)
        store_tiles(s.met[slot].tile_before, own.last_tile);
    else {
        own_tile t = { sum, NULL, NULL, row0 + lane / 4, column0, row0 + lane / 4 };
        sum_and_store(s, t, a, d);
    }
#endif
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

static size_t bytes_of(const args &a, const division &d)
{
    return sizeof(shared_dbias) + (d.slots() - 2) * OWN_TILE + extras::bytes(a, GENERAL);
}

static_assert(sizeof(shared_dbias) + extras::most_bytes(GENERAL) <= HEED_SHARED_SMALL);

/* How many blocks share a tile, so that a large GPU, of two such blocks on each unit, is full where there are few. It decides the
 * order of sums, and so must not depend on how many units there are. */
static int blocks_to_a_tile(int64_t tiles, int pairs, const heed_device &chip)
{
    constexpr int UNITS = 128, MOST = 8;
    int blocks = 1;
    while (chip.arch == CLUSTER_ARCH && blocks < MOST && tiles * blocks <= UNITS && blocks * 4 <= pairs)
        blocks *= 2;
    return blocks;
}

static heed_status run(const args &a, int keys, const heed_device &chip, const heed_exec *x)
{
    const int *shape = a.bias_shape;
    const bool one_row = shape[2] == 1, one_column = shape[3] == 1;
    division d = {};
    d.tiles = (int)tiles_of(shape[2], BR), d.key_tiles = one_column ? 1 : (int)tiles_of(keys, BC), d.keys = keys;
    d.heads = shape[1] == 1 ? a.Hq : 1, d.pairs = d.heads * (shape[0] == 1 ? a.B : 1);
    d.parts_s = (int)tiles_of(a.D, PART), d.parts_dp = (int)tiles_of(a.Dv, PART);
    const int64_t heads = (int64_t)shape[0] * shape[1], tiles = heads * d.tiles * d.key_tiles;
    const int shared_by = blocks_to_a_tile(tiles, d.pairs, chip);
    d.direct = shared_by == 1 && !one_row && !one_column && a.d_bias.vector && keys == a.Sk && keys % 8 == 0;
    d.strip = d.direct ? clamp(tiles / 2048, 1, 16) : 1; /* 2048 blocks leave no unit idle for long */
    d.strips = (int)tiles_of(d.key_tiles, d.strip);
    d.stays = d.pairs == 1 && d.strip > 1;
    d.stays = d.stays && 2 * (bytes_of(a, d) + 1024) <= chip.shared_bytes + 1024; /* beside another block */
    const int64_t blocks = heads * d.tiles * d.strips;
    const void *const kernel = (const void *)dbias_mma;
    void *arguments[] = { (void *)&a, (void *)&d };
    if (shared_by == 1)
        return heed_cuda_launch(kernel, blocks, THREADS, bytes_of(a, d), x, arguments);
    return heed_cuda_launch_grid(kernel, dim3((unsigned)blocks, 1, shared_by), dim3(THREADS), bytes_of(a, d), false, x,
                                 arguments, dim3(1, 1, shared_by));
}

/* Whether q, k, v and d_o are of one type of 16 bits and lie in whole pieces of 16 bytes. */
static bool is_for_mma(const args &a, const heed_device &chip)
{
    return chip.arch >= 80 && a.q.dtype != HEED_F32 && a.d_o.dtype == a.q.dtype && a.q.vector && a.k.vector &&
           a.v.vector && a.d_o.vector;
}

heed_status heed_cuda_bias_gradient(const args &a, const heed_exec *x)
{
    if (!a.d_bias.data)
        return HEED_OK;
    const int64_t shape[4] = { a.bias_shape[0], a.bias_shape[1], a.bias_shape[2], a.bias_shape[3] };
    const int keys = a.Sk > a.col ? (int)((a.Sk - 1 - a.col) / a.col_step) + 1 : 0;
    const bool empty = keys == 0 || a.Sq == 0 || a.B == 0;
    heed_device chip;
    heed_status status = HEED_OK;
    if (empty || (keys < a.Sk && shape[3] > 1)) /* the kernels reach keys on the stride */
        status = heed_cuda_fill(a.d_bias, shape, 0.0f, x);
    if (status || empty || (status = heed_cuda_device(x->device, &chip)))
        return status;
    return is_for_mma(a, chip) ? run(a, keys, chip, x) : heed_cuda_bias_gradient_portable(a, keys, x);
}
