/* Backward for Hopper, fp16 and bf16, head sizes to 256, with no workspace but two floats for each row of q. Three
 * kernels: what each query contributes (L and delta), dK and dV, dQ. Or one kernel for all three gradients, with dQ's
 * sums in memory (backward_sm90fused.cu), and what comes before and after it. */
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
    float *L, *delta; /* [batches][Hq][pitch] */
    uint2 *terms;     /* as many, where dQ is summed, of -L / c and -delta: both_terms(), */
    uint32_t *least;  /* whose last numbers are here */
    float inverse;    /* 1 / c */
    dq_sums sums;
    int *turns;    /* of as many places: they start at 0, as do */
    int *counters; /* of the two kernels that follow */
    int places, rows, pitch;
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
        const int64_t at = (int64_t)bh * t.pitch + own;
        if (!t.terms || a.d_sink.data)
            t.L[at] = none ? CUDART_INF_F : L, t.delta[at] = none ? 0.0f : delta + sum[0];
        if (t.terms) {
            const uint4 x = both_terms(none ? -CUDART_INF_F * t.inverse : -L * t.inverse,
                                       none ? 0.0f : -(delta + sum[0]));
            t.terms[at] = make_uint2(x.x, x.z), t.least[at] = x.y & 0xFFFF | x.w << 16;
        }
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

struct tables {
    term_rows terms;
    piece_table of[2]; /* keys, queries */
};

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

static int64_t pitch_of(const heed_problem *p) { return (p->a.q.shape[2] + 3) / 4 * 4; }

void heed_sm90_take_table(workspace *space, piece_table *t, const heed_problem *p, const heed_tensor *rows_of, int rows,
                          int grid)
{
    const size_t pieces = (size_t)(rows_of->shape[0] * rows_of->shape[2] / rows + p->B); /* see piece_at() */
    t->rows = rows, t->grid = grid, t->grouped = false;
    t->lengths = (int *)space->take((size_t)p->B * sizeof(int));
    t->pieces = (piece *)space->take(pieces * sizeof(piece));
    t->ranges = (int2 *)space->take(pieces * rows * sizeof(int2));
}

/* How many tiles the longest sequence has. */
static void count_tiles(const args &a, piece_table &keys, piece_table &queries)
{
    const int64_t count = a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0;
    keys.tiles = (int)tiles_of(count, keys.rows), queries.tiles = (int)tiles_of(a.Sq, queries.rows);
    keys.grouped = keys.grouped && keys.tiles > LEAVING; /* of no more, dQ may leave with the last */
}

heed_status heed_sm90_find_pieces(const args &a, piece_table &keys, piece_table &queries, const heed_exec *x)
{
    count_tiles(a, keys, queries);
    return launch(find_pieces, tiles_of((int64_t)a.B * (keys.tiles + queries.tiles), 4), 128, 0, x, a, keys, queries);
}

/* Whether dQ goes out with the only tile of keys, so that there is nothing to sum: can_leave() will say so, too. */
static bool has_one_tile(const heed_problem *p, const backward_form &form)
{
    const heed_attention &a = p->a;
    const bool same = !a.lengths_q && !a.lengths_k && !a.offsets_q && !a.offsets_k; /* length of all sequences */
    return form.all.leaves && p->full.keys > 0 && p->full.keys <= form.all.rows && same && p->left == HEED_UNBOUNDED &&
           p->right == HEED_UNBOUNDED && p->D % 8 == 0 && !p->g.accumulate && p->g.d_q.dtype != HEED_F32;
}

/* Returns the bytes that it takes; sums: of dQ, by one kernel for all gradients. */
static size_t lay_out(const heed_problem *p, const backward_form &form, bool sums, void *memory, tables *t)
{
    workspace space = { (char *)memory, 0 };
    const size_t terms = (size_t)(p->a.q.shape[0] * p->Hq * pitch_of(p)) * sizeof(float);
    const bool numbers = !sums || p->g.d_sink.data; /* L and delta are wanted as such */
    t->terms.L = (float *)space.take(numbers ? terms : 0);
    t->terms.delta = (float *)space.take(numbers ? terms : 0);
    t->terms.sums.data = NULL, t->terms.terms = NULL, t->terms.least = NULL;
    if (sums) {
        const int64_t rows = p->a.q.shape[0] * p->a.q.shape[2];
        dq_sums &to = t->terms.sums;
        to.strips = (int)(rows / 16 + p->B);
        to.width = HEED_MAX((int)(p->D + 7) / 8 * 8, narrowest_sums(form.all.head_dim));
        const int64_t rows_of_sums = has_one_tile(p, form) ? 0 : p->Hq * to.strips * 16;
        to.data = (float *)space.take((size_t)(rows_of_sums * to.width) * sizeof(float));
        t->terms.places = (int)((rows / COLUMNS + p->B) * p->Hq);
        t->terms.terms = (uint2 *)space.take(terms * 2);
        t->terms.least = (uint32_t *)space.take(terms);
        t->terms.turns = (int *)space.take((size_t)t->terms.places * TURN_APART * sizeof(int));
    }
    t->terms.counters = (int *)space.take(2 * sizeof(int));
    heed_sm90_take_table(&space, &t->of[0], p, &p->a.k, sums ? form.all.rows : form.dkv.rows, sums ? COLUMNS : 1);
    t->of[1] = {};
    t->of[1].rows = form.dq.rows;
    if (!sums)
        heed_sm90_take_table(&space, &t->of[1], p, &p->a.q, form.dq.rows, 1);
    return space.bytes;
}

/* Whether one kernel makes all gradients. A softcap takes registers that are not there beside dQ; and sums of dQ for few
 * keys or many narrow heads that share them may be larger than HEED_ROOM. Asked of one sequence and one head of keys, so
 * that neither the batch nor the heads decide about the bits. */
static bool has_sums(const heed_problem *p, const backward_form &form)
{
    if (!form.all.launch || !p->g.d_q.data || p->a.softcap > 0)
        return false;
    heed_problem one = *p;
    tables t;
    one.Hq = one.G, one.Hk = 1;
    if (!p->a.offsets_q && !p->a.offsets_k)
        one.B = one.a.q.shape[0] = one.a.k.shape[0] = 1;
    const int64_t rows = one.a.q.shape[0] * one.a.q.shape[2] * one.Hq + one.a.k.shape[0] * one.a.k.shape[2];
    return lay_out(&one, form, true, NULL, &t) <= HEED_ROOM((size_t)(rows * (p->D + p->Dv) * 2));
}

size_t heed_sm90_backward_bytes(const heed_problem *p, const backward_form &form)
{
    tables t;
    return lay_out(p, form, has_sums(p, form), NULL, &t);
}

/* Maps of the queries' side (Q, dO) and the keys' (K, V), for tiles of so many rows. */
static heed_status map_queries(tensor_map m[2], const heed_problem *p, const args &a, int rows)
{
    const int64_t batches = p->a.q.shape[0];
    heed_status status = heed_tensor_map(&m[0], a.q, a.D, a.q_rows, a.Hq, batches, rows);
    return status ? status : heed_tensor_map(&m[1], a.d_o, a.Dv, a.q_rows, a.Hq, batches, rows);
}

static heed_status map_keys(tensor_map m[2], const heed_problem *p, const args &a, view k, view v, int rows)
{
    const int64_t batches = p->a.k.shape[0], keys = a.col < a.k_rows ? (a.k_rows - 1 - a.col) / a.col_step + 1 : 0;
    if (keys) { /* those on the stride are the rows of a tensor of their own */
        k.data += a.col * k.stride[2] * 2, v.data += a.col * v.stride[2] * 2;
        k.stride[2] *= a.col_step, v.stride[2] *= a.col_step;
    }
    heed_status status = heed_tensor_map(&m[0], k, a.D, HEED_MAX(keys, 1), a.Hk, batches, rows);
    return status ? status : heed_tensor_map(&m[1], v, a.Dv, HEED_MAX(keys, 1), a.Hk, batches, rows);
}

/* Heads that are worked on at the same time. With a band their tiles differ in length, and longest first needs many to
 * choose from; but what they read should stay in the L2 cache. */
int heed_sm90_heads_together(const args &a, int heads, int64_t bytes_of_head)
{
    if (a.left >= FAR && a.right >= FAR)
        return 1;
    return (int)HEED_MAX(1, HEED_MIN(heads, ((int64_t)24 << 20) / HEED_MAX(bytes_of_head, 1)));
}

/* Whether dQ can leave with the last keys: it is of 16 bits, every row sees a key, and the copy engine, which writes whole
 * 16 bytes, writes nothing but rows. It is worth while where heads are short: the last keys have more to wait for, and a
 * pass over all sums is saved. */
static bool can_leave(const args &a)
{
    const span &s = a.all;
    const bool all = a.left >= FAR && a.right >= FAR && s.keys;
    return a.uniform && a.d_q.dtype != HEED_F32 && !a.accumulate && a.D % 8 == 0 &&
           (all || (s.unit && s.low < s.high && s.high > 0 && s.rows - 1 + s.low < s.keys));
}

/* dK and dV, or all gradients; units: multiprocessors. */
static heed_status run_keys(backward_job *job, const heed_problem *p, const tables &t, const backward_form &form,
                            int units, const heed_exec *x)
{
    const args &a = job->a;
    const bool all = job->sums.data;
    const piece_table &keys = t.of[0];
    const int heads = a.B * a.Hk;
    heed_status status;
    job->leaves = all && form.all.leaves && keys.tiles <= LEAVING && can_leave(a);
    job->pieces = keys.pieces, job->ranges = keys.ranges, job->lengths = keys.lengths;
    job->counter = t.terms.counters;
    job->tiles = keys.tiles, job->count = job->tiles * heads;
    /* Bytes of Q and dO; sums of dQ want room, too. Who works on a long head is in about the same half of it. */
    const int64_t met = (int64_t)(all ? HEED_MIN(a.Sq, HEED_MAX(2048, a.Sq / 2)) : a.Sq) * a.G * (a.D + a.Dv) * 2;
    job->together = heed_sm90_heads_together(a, heads, all ? met + met / 2 : met);
    /* That the tiles of a head follow each other, as they take turns, and do not all start at once; nor all end, where the
     * last ones wait for the others. */
    const int working = job->leaves ? units + units / 2 : units;
    if (all)
        job->together = (int)HEED_MAX(job->together, HEED_MIN(heads, tiles_of(working, job->tiles)));
    if ((a.left < FAR || a.right < FAR) && a.G > 1 && job->count <= 8 * units)
        job->together = heads; /* few tiles and long ones: longest first among all */
    if ((status = map_keys(job->own, p, a, a.k, a.v, keys.rows)) || (status = map_queries(job->other, p, a, COLUMNS)) ||
        (job->leaves && (status = heed_tensor_map(&job->out, a.d_q, a.D, a.q_rows, a.Hq, p->a.q.shape[0], 16))))
        return status;
    return (all ? form.all : form.dkv).launch(*job, HEED_MIN(units, job->count), x);
}

static heed_status run_queries(backward_job *job, const heed_problem *p, const tables &t, const backward_form &form,
                               int units, const heed_exec *x)
{
    const args &a = job->a;
    const piece_table &queries = t.of[1];
    const int heads = a.B * a.Hq;
    heed_status status;
    job->pieces = queries.pieces, job->ranges = queries.ranges, job->lengths = queries.lengths;
    job->counter = t.terms.counters + 1;
    job->tiles = queries.tiles, job->count = job->tiles * heads;
    job->together = heed_sm90_heads_together(a, heads, (int64_t)a.Sk / a.col_step * (a.D + a.Dv) * 2);
    if ((status = map_queries(job->own, p, a, queries.rows)) ||
        (status = map_keys(job->other, p, a, a.k, a.v, COLUMNS)))
        return status;
    return form.dq.launch(*job, HEED_MIN(units, job->count), x);
}

/* The kernel that comes second begins where the first has no more work. With a band, where heads are long, that is the one
 * for keys, whose pieces are shorter: the longest decide when all is done. */
static heed_status run(backward_job *job, const heed_problem *p, const tables &t, const backward_form &form, int units,
                       const heed_exec *x)
{
    const args &a = job->a;
    const bool all = job->sums.data, queries_first = (a.left < FAR || a.right < FAR) && t.of[0].tiles > 16;
    heed_status status = HEED_OK;
    job->second = job->leaves = false;
    for (int turn = 0; turn < 2 && !status; turn++) {
        const bool queries = turn != queries_first;
        if (queries ? a.d_q.data && !all : (a.d_k.data || a.d_v.data || all) && t.of[0].tiles)
            status = (queries ? run_queries : run_keys)(job, p, t, form, units, x), job->second = true;
    }
    return status;
}

static score_rule rule_of(const args &a)
{
    const bool capped = a.softcap > 0;
    return { a.scale * LOG2E, capped ? a.scale / a.softcap : 0.0f, a.softcap * LOG2E,
             capped ? 1.0f / (a.softcap * LOG2E) : 0.0f };
}

/* What comes before the large kernels: pieces of work and terms. a->delta becomes that of the terms. */
static heed_status prepare(const heed_problem *p, args *a, tables *t, const heed_exec *x)
{
    t->terms.rows = a->q_rows, t->terms.pitch = (int)pitch_of(p);
    t->terms.heads = p->a.q.shape[0] * a->Hq;
    t->of[0].grouped = t->terms.sums.data && !x->nondeterministic && a->left >= FAR && a->right < FAR;
    count_tiles(*a, t->of[0], t->of[1]);
    if (t->terms.sums.data)
        t->of[1].tiles = 0; /* dQ has no kernel of its own */
    heed_status status = a->q.dtype == HEED_F16 ? launch_terms<__half>(*a, t->terms, t->of[0], t->of[1], x)
                                                : launch_terms<__nv_bfloat16>(*a, t->terms, t->of[0], t->of[1], x);
    view &delta = a->delta;
    delta.data = (char *)t->terms.delta, delta.dtype = HEED_F32;
    delta.stride[0] = (int64_t)a->Hq * t->terms.pitch, delta.stride[1] = t->terms.pitch;
    delta.stride[2] = delta.stride[3] = 1;
    if (!status)
        status = heed_cuda_prepare_backward(p, a, x);
    return status ? status : heed_cuda_sink_gradient(*a, x);
}

/* A tensor without elements has no map; then the sums are over nothing. */
static int is_nothing(const heed_problem *p)
{
    return !heed_elements(&p->a.q) || !heed_elements(&p->a.k) || !heed_elements(&p->a.v);
}

static heed_status clear_all(const heed_problem *p, const args &a, const heed_exec *x)
{
    if (a.accumulate)
        return HEED_OK;
    heed_status status = heed_cuda_fill(a.d_q, p->g.d_q.shape, 0.0f, x);
    status = status ? status : heed_cuda_fill(a.d_k, p->g.d_k.shape, 0.0f, x);
    return status ? status : heed_cuda_fill(a.d_v, p->g.d_v.shape, 0.0f, x);
}

heed_status heed_sm90_backward(const heed_problem *p, const backward_form &form, const heed_exec *x)
{
    on_device device(x->device);
    heed_device chip;
    backward_job job;
    tables t;
    heed_status status = device.status;
    if (status || (status = heed_cuda_device(x->device, &chip)) || (status = heed_cuda_args(p, &job.a)))
        return status;
    lay_out(p, form, has_sums(p, form), x->workspace, &t);
    job.rule = rule_of(job.a);
    if (t.terms.sums.data && fabsf(job.rule.c) < 1e-30f)
        job.rule.c = 1e-30f; /* so that there is an L / c */
    t.terms.inverse = 1.0f / job.rule.c;
    const term_rows &terms = t.terms;
    if ((status = prepare(p, &job.a, &t, x)))
        return status;
    if (is_nothing(p))
        return clear_all(p, job.a, x);
    job.L = terms.L, job.delta = terms.delta, job.terms = terms.terms, job.least = terms.least, job.pitch = terms.pitch;
    job.sums = terms.sums, job.turns = terms.turns, job.any_order = x->nondeterministic;
    job.grouped = t.of[0].grouped;
    status = run(&job, p, t, form, chip.units, x);
    if (status || !job.sums.data || job.leaves)
        return status;
    const int tiles = (int)tiles_of(job.a.Sq, COLUMNS);
    return launch_next(job.a.q.dtype == HEED_F16 ? finish_dq<__half> : finish_dq<__nv_bfloat16>,
                       (int64_t)tiles * job.a.B * job.a.Hq, 128, 0, x, job.a, terms, tiles);
}

static backward_form form_of(const heed_problem *p)
{
    const int head_dim = (int)HEED_MAX(p->D, p->Dv);
    return { heed_sm90_dkv(head_dim), heed_sm90_dq(head_dim), {} };
}

size_t heed_backward_workspace_sm90(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return heed_sm90_backward_bytes(p, form_of(p));
}

heed_status heed_backward_sm90(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    (void)plan;
    return heed_sm90_backward(p, form_of(p), x);
}
