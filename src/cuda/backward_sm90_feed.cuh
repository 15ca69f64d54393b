/* What feeds the kernels of the Hopper backward (backward_sm90_block.cuh). The warps of one warpgroup produce: one takes pieces
 * of work from a counter, says in shared memory what they are and has the copy engine bring the own tiles, two bring the
 * rings of B1 and B2, one what goes with them; where dQ is summed, two do all of this and two see to the sums. The other
 * warpgroups consume. Rows are masked by their range of visible columns; a column that belongs to another sequence is
 * zeroed in shared memory before anyone multiplies with it. */
#ifndef HEED_CUDA_BACKWARD_SM90_FEED_CUH
#define HEED_CUDA_BACKWARD_SM90_FEED_CUH

#include "backward_sm90_block.cuh"

/* backward_sm90_scores.cuh, where C::TERMS. */
template <class C> __device__ inline bool are_sequences_together(const backward_job &p);
template <class C> __device__ inline void note_tile(backward_shared<C> &s, int tile, int head, int column);

/* backward_sm90split.cuh, where C::SPANS. */
template <class C> __device__ inline void note_span(const backward_job &p, backward_shared<C> &s, int slot, int b);

/* Which piece of work a number stands for: `together` heads at a time, and of these the longest rows first. Under a
 * causal mask the first keys meet most queries and the last queries most keys. Heads that are left over join the last ones:
 * alone they would be few long pieces, and most multiprocessors would wait for their end. */
template <class C>
__device__ inline void find_piece(const backward_job &p, int number, int &b, int &head, int &part, int &tile)
{
    const int parts = C::SHARES ? p.parts.most : 1, heads = C::KEYS ? p.a.Hk : p.a.Hq, all = parts * p.a.B * heads;
    const int last = (all - (C::ADDS ? 1 : p.together)) / p.together; /* chunk of heads */
    const int chunk = min(number / (p.together * p.tiles), last), left = number - chunk * p.together * p.tiles;
    const int width = chunk < last ? p.together : all - last * p.together;
    tile = left / width;
    int which = chunk * p.together + left - tile * width;
    part = C::SHARES ? which / (p.a.B * heads) : 0;
    which -= part * p.a.B * heads;
    b = which / heads, head = which - b * heads;
    if constexpr (C::TERMS)
        if (are_sequences_together<C>(p))
            head = which / p.a.B, b = which - head * p.a.B;
    if (!C::KEYS)
        tile = p.tiles - 1 - tile;
}

/* The first column of the tiles that own rows meet after those of `step` others. Heads that share keys meet a column one
 * after the other: else keys that meet fewer columns would be further ahead, with each head, of those whose turn is
 * before theirs. Where dQ is summed the last tile is first: then the tiles of keys that lie before come to each tile of
 * queries earlier, whatever the band, and nobody waits long. In fp32 it always is: a causal key weighs most in its first
 * queries, and what is added to a sum that is large already is rounded as that is. */
template <class C, class Work> __device__ inline int column_at(const Work &w, int step)
{
    return w.start + (C::LAST_FIRST ? w.tiles - 1 - step : step) * COLUMNS;
}

/* Zeroes rows live .. ROWS of a tile that has landed. */
template <int ROWS, int BYTES> __device__ inline void clear_rows(char *tile, int live)
{
    for (int i = live * 8 + threadIdx.x % 32; i < ROWS * 8; i += 32)
#pragma unroll
        for (int box = 0; box < BYTES / (ROWS * 128); box++)
            *(uint4 *)(tile + box * ROWS * 128 + i * 16) = make_uint4(0, 0, 0, 0);
}

/* One lane asks for a piece's own tiles, K to V or one of them, and arrives. */
template <class C>
__device__ inline void ask_for_own(const backward_job &p, backward_shared<C> &s, int n, uint32_t barrier, int first = 0,
                                   int last = 1)
{
    const piece &w = s.work[n % C::WORKS];
    arrive_expecting(barrier, (last - first + 1) * C::OWN_BYTES);
    for (int i = first; i <= last; i++)
        load_tile<C::D, C::ROWS>(shared_address(own_tile(s, n, i)), p.own[i], w.memory_row, w.head, w.batch, barrier);
}

/* Brings keys of which only so many belong to the sequence, for the cut-th time. Where their dS is summed, the others must
 * not be there. */
template <class C> __device__ inline void bring_some_keys(const backward_job &p, backward_shared<C> &s, int n, int cut)
{
    const piece &w = s.work[n % C::WORKS];
    const uint32_t barrier = shared_address(&s.landed[2]);
    if (threadIdx.x % 32 == 0)
        ask_for_own(p, s, n, barrier);
    wait(barrier, cut & 1);
    clear_rows<C::ROWS, C::OWN_BYTES>(own_tile(s, n, 0), w.rows);
    clear_rows<C::ROWS, C::OWN_BYTES>(own_tile(s, n, 1), w.rows);
    fence_async();
    if (C::APART)
        arrive(shared_address(&s.values_full));
    arrive(shared_address(&s.own_full[n % C::WORKS]));
}

/* Until piece n's own tile may be overwritten, or work that is done with the piece before may be counted as done. */
template <class C> __device__ inline void wait_own_free(backward_shared<C> &s, int n)
{
    wait(shared_address(&s.own_free[n % C::SLOTS]), n / C::SLOTS & 1 ^ 1);
}

/* Where L is this large, rounding may carry c S beyond it, and P must be kept from exceeding 1. */
__device__ inline bool is_large(float L) { return fabsf(L) > 65536.0f && fabsf(L) < CUDART_INF_F; }

/* What own rows need to know of a tile of columns: where it begins, or -1 where all of them see all of it, no L is large
 * and there is no softcap, so that it may go the short way. */
__device__ inline int care_for(const piece &w, int group, int column, bool any)
{
    return !any && column >= w.inside[group] && column + COLUMNS <= w.outside[group] ? -1 : column;
}

/* A number as the sum of three of bf16, and 0; infinity as the largest. */
__device__ inline uint2 three_terms(float x)
{
    x = -min_or_nan(-min_or_nan(x, 3.38e38f), 3.38e38f);
    const float high = __bfloat162float(__float2bfloat16_rn(x)), rest = x - high;
    const float middle = __bfloat162float(__float2bfloat16_rn(rest));
    return make_uint2(pack<__nv_bfloat16>(high, middle), pack<__nv_bfloat16>(rest - middle, 0.0f));
}

/* What a query adds to its column of S^T and of dP^T, as add_term() wants it. */
__device__ inline uint4 both_terms(float x, float y)
{
    const uint2 a = three_terms(x), b = three_terms(y);
    return make_uint4(a.x, a.y, b.x, b.y);
}

/* Whether the L behind terms is large. */
__device__ inline bool has_large(const backward_job &p, uint4 terms)
{
    const float high = fabsf(__uint_as_float(terms.x << 16));
    return high * fabsf(p.rule.c) > 65536.0f && high < 3.3e38f;
}

/* The term in place of an L that is left out: see is_left_out(). It adds nothing. */
constexpr float LEFT_OUT = 0x1p-120f;

__device__ inline bool has_left_out(uint4 terms) { return terms.x << 16 == __float_as_uint(LEFT_OUT); }

/* Where the columns are queries, what goes with each tile that a piece of work meets, asked for before there is room for
 * it: what it needs of care, and L and delta as numbers or as terms. Up to so many more tiles, from `step` of head h on.
 * The copy engine would want numbers at multiples of 16 bytes. */
template <class C>
__device__ inline void bring_terms(const backward_job &p, backward_shared<C> &s, const piece &w, int &h, int &step,
                                   int &tile, int more)
{
    const int lane = threadIdx.x % 32;
    for (; step < w.tiles && more; more--, tile++) {
        const int column = column_at<C>(w, step), head = first_head<C>(p, w) + h;
        const int64_t packed = (int64_t)(w.other_batch * p.a.Hq + head) * p.pitch + (w.other_row + column) + lane;
        const int first = tile % C::FIRST, second = tile % C::SECOND, live = w.columns - column - lane;
        const auto describe = [&](bool large) {
            const bool any = p.a.softcap > 0 || __any_sync(~0u, large);
            wait(shared_address(&s.first_free[first]), tile / C::FIRST & 1 ^ 1);
            if (lane < C::GROUPS)
                s.care[first][lane] = care_for(w, lane, column, any);
            if constexpr (C::TERMS)
                note_tile(s, tile, head, column);
        };
        if constexpr (C::NUMBERS) {
            const auto bring = [&](float *to, float x, float y, uint64_t *full) {
                to[lane] = x, to[lane + 32] = y;
                arrive(shared_address(full));
            };
            const float *L = p.L + packed, *delta = p.delta + packed;
            const float L0 = live > 0 ? L[0] : 0.0f, L1 = live > 32 ? L[32] : 0.0f;
            const float delta0 = live > 0 ? delta[0] : 0.0f, delta1 = live > 32 ? delta[32] : 0.0f;
            describe(is_large(L0) || is_large(L1));
            bring(s.L[first], L0, L1, &s.first_full[first]);
            wait(shared_address(&s.second_free[second]), tile / C::SECOND & 1 ^ 1);
            bring(s.delta[second], delta0, delta1, &s.second_full[second]);
        } else {
            const int64_t at = C::SHARES ? p.terms.at(w.other_batch, head, w.other_row + column + lane) : packed;
            const auto terms = [&](int row) {
                const int64_t i = C::SHARES ? at + row * p.terms.row : at + row, times = C::SHARES ? p.terms.times : 1;
                const uint2 most = live > row ? p.terms.most[i] : make_uint2(0, 0);
                const uint32_t least = live > row ? p.terms.least[i * times] : 0;
                return make_uint4(most.x, least & 0xFFFF, most.y, least >> 16);
            };
            const uint4 x = terms(0), y = terms(32);
            describe(has_large(p, x) || has_large(p, y) || (C::TERMS && (has_left_out(x) || has_left_out(y))));
            s.terms[first][lane] = x, s.terms[first][lane + 32] = y;
            fence_async();
            arrive(shared_address(&s.first_full[first]));
        }
        if (++h == heads_of<C>(p, w))
            h = 0, step++;
    }
}

/* Says what piece n is: `at` in the table, and of its head's queries those of `heads` from `first` on. */
template <class C>
__device__ inline void describe_piece(const backward_job &p, backward_shared<C> &s, int n, int at, int head, int part,
                                      int share)
{
    const int slot = n % C::WORKS, lane = threadIdx.x % 32;
    piece &w = s.work[slot];
    static_assert(sizeof(piece) <= 32 * sizeof(int), "one number a lane");
    if (lane < sizeof(piece) / sizeof(int))
        ((int *)&w)[lane] = ((const int *)&p.pieces[at])[lane];
#pragma unroll 2 /* there are few registers */
    for (int r = lane; !C::ADDS && r < C::ROWS; r += 32)
        s.range[slot][r] = p.ranges[(int64_t)at * C::ROWS + r];
    __syncwarp();
    if (lane == 0) {
        w.head = head;
        if (C::SHARES)
            w.part = part, w.first = head * p.a.G + part * share, w.heads = min(share, p.a.G - part * share);
    }
    __syncwarp();
    arrive(shared_address(&s.described[slot]));
}

/* The first producer warp: takes pieces of work and brings their own tiles. Where dQ is summed, the terms, too, before it
 * takes the next: who takes early and starts late would keep others waiting for their turn. If there is room for one own
 * tile only, the next piece is taken when the last columns of this one are asked for, so that its first columns arrive, and
 * it is known what to ask for, while the own tile is still in use. */
template <class C> __device__ inline void bring_own(const backward_job &p, backward_shared<C> &s)
{
    const int lane = threadIdx.x % 32;
    for (int n = 0, met = 0, cut = 0;;) {
        const int slot = n % C::WORKS;
        piece &w = s.work[slot];
        const uint32_t full = shared_address(&s.own_full[slot]);
        if (C::ADDS)
            wait(shared_address(&s.work_free[slot]), n / C::WORKS & 1 ^ 1);
        if (C::SOON && n)
            wait(shared_address(&s.soon), n - 1 & 1);
        const int number = uniform(lane ? 0 : atomicAdd(p.counter, 1));
        if (!C::ADDS && !C::SOON)
            wait_own_free(s, n);
        if (number >= p.count) {
            if (lane == 0)
                w.exists = 0;
            arrive(shared_address(&s.described[slot]));
            if (C::ADDS)
                wait_own_free(s, n);
            arrive(full);
            return;
        }
        int b, head, part, tile;
        find_piece<C>(p, number, b, head, part, tile);
        const int tiles = (p.lengths[b] + C::ROWS - 1) / C::ROWS;
        if (tile >= tiles)
            continue;
        if (C::ADDS) {
            const int group = group_of(p.grouped, tiles), first = tile / group * group;
            tile = first + min(first + group, tiles) - 1 - tile;
        }
        const int at = piece_at(p.a, C::KEYS, C::ROWS, b, tile);
        const int share = C::SHARES && p.parts.most > 1 ? heads_of_part(p.a.G, p.pieces[at].columns) : p.a.G;
        if (part * share >= p.a.G)
            continue;
        if constexpr (C::TERMS)
            note_sequence(s, slot, b);
        if constexpr (C::SPANS)
            note_span(p, s, slot, b);
        describe_piece(p, s, n, at, head, part, share);
        const bool some = C::ADDS && (p.a.lengths_k || p.a.offsets_k) && w.rows < C::ROWS;
        int h = 0, step = 0;
        if constexpr (C::APART) {
            bring_terms<C>(p, s, w, h, step, met, 1);
            if (n)
                wait(shared_address(&s.values_free), n - 1 & 1);
            if (!some && lane == 0)
                ask_for_own(p, s, n, full, 0, 0);
            else if (!some)
                arrive(full);
        }
        if (C::ADDS || C::SOON)
            wait_own_free(s, n);
        if constexpr (C::BY_ROLE) {
            if (lane == 0)
                ask_for_own(p, s, n, full, 0, 0);
            else
                arrive(full);
            wait(shared_address(&s.values_free), n & 1 ^ 1);
        }
        constexpr bool APART = C::APART || C::BY_ROLE;
        const uint32_t rest = APART ? shared_address(&s.values_full) : full;
        if (some)
            bring_some_keys(p, s, n, cut++);
        else if (lane == 0)
            ask_for_own(p, s, n, rest, APART ? 1 : 0);
        else
            arrive(rest);
        if (C::ADDS)
            bring_terms<C>(p, s, w, h, step, met, -1);
        n++;
    }
}

/* One tile of the columns' side into its ring. live: rows of it that belong to the sequence; cut: tiles before that had
 * others, too. */
template <class C, int RING>
__device__ inline void bring_tile(const backward_job &p, backward_shared<C> &s, const piece &w, int head, int column,
                                  int tile, int live, int cut)
{
    constexpr int STAGES = RING ? C::SECOND : C::FIRST;
    const int stage = tile % STAGES;
    char *const to = RING ? s.second[stage] : s.first[stage];
    const uint32_t full = shared_address(RING ? &s.second_full[stage] : &s.first_full[stage]);
    const uint32_t barrier = live < COLUMNS ? shared_address(&s.landed[RING]) : full;
    wait(shared_address(RING ? &s.second_free[stage] : &s.first_free[stage]), tile / STAGES & 1 ^ 1);
    if (threadIdx.x % 32 == 0) {
        arrive_expecting(barrier, C::BYTES);
        load_tile<C::D, COLUMNS>(shared_address(to), p.other[RING], w.other_row + column, head, w.other_batch, barrier);
    }
    if (live >= COLUMNS)
        return;
    wait(barrier, cut & 1);
    clear_rows<COLUMNS, C::BYTES>(to, live);
    fence_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        arrive(full);
}

/* The end of a piece is near. */
template <class C> __device__ inline bool tell_soon(backward_shared<C> &s)
{
    if (threadIdx.x % 32 == 0)
        arrive(shared_address(&s.soon));
    return true;
}

/* The second and third: the columns' side, one ring each; or the second both, where the third keeps the turns. */
template <class C, int RING> __device__ inline void bring_columns(const backward_job &p, backward_shared<C> &s)
{
    const args &a = p.a;
    const bool cuts = C::KEYS ? a.lengths_q || a.offsets_q : a.lengths_k || a.offsets_k;
    for (int n = 0, tile = 0, cut = 0;; n++) {
        const int slot = n % C::WORKS;
        const piece &w = s.work[slot];
        wait(shared_address(&s.described[slot]), n / C::WORKS & 1);
        if (!w.exists)
            return;
        bool told = !C::SOON || RING;
        for (int h = 0, step = 0; step < w.tiles; tile++) {
            if (!told && step == w.tiles - 1)
                told = tell_soon(s);
            const int column = column_at<C>(w, step), live = cuts ? w.columns - column : COLUMNS;
            const int head = C::KEYS ? first_head<C>(p, w) + h : w.head / a.G;
            bring_tile<C, RING>(p, s, w, head, column, tile, live, cut);
            if (C::ADDS)
                bring_tile<C, 1>(p, s, w, head, column, tile, live, cut);
            if constexpr (C::TERMS)
                bring_scores(p, s, slot, head, column, tile);
            cut += live < COLUMNS;
            if (!C::KEYS || ++h == heads_of<C>(p, w))
                h = 0, step++;
        }
        if (!told)
            tell_soon(s);
        if (!C::ADDS)
            wait_own_free(s, n);
        arrive(shared_address(C::ADDS ? &s.work_free[slot] : &s.own_free[n % C::SLOTS]));
    }
}

/* The fourth, where dQ is not summed. */
template <class C> __device__ inline void bring_all_terms(const backward_job &p, backward_shared<C> &s)
{
    for (int n = 0, tile = 0;; n++) {
        const int slot = n % C::WORKS;
        const piece &w = s.work[slot];
        wait(shared_address(&s.described[slot]), n / C::WORKS & 1);
        if (!w.exists)
            return;
        int h = 0, step = 0;
        bring_terms<C>(p, s, w, h, step, tile, -1);
        wait_own_free(s, n);
        arrive(shared_address(&s.own_free[n % C::SLOTS]));
    }
}

/* What who keeps turns needs to know of a piece, in registers: a load from shared memory takes long beside products that
 * read there, and others wait for their turn. */
struct turns_of {
    int start, tiles, columns, turn, alone, tile, turns, sums;
};

/* Has a tile's dQ, of head h and the rows from `row` on, added to the sums, when those of all keys before have been, and
 * tells the next. In any order, it is enough that the first has stored its own, as nobody zeroes the sums. Where dQ LEAVES
 * with the last keys, these have the sums brought to where their own will be, and then dQ sent out; room: the tile has been
 * given its place, and afterwards, whether the next but one has. */
template <class C, bool LEAVES, class Work>
__device__ inline void take_turn(const backward_job &p, backward_shared<C> &s, const Work &w, const dq_share &share,
                                 int tile, int h, int row, bool &room)
{
    const int after = LEAVES || row / COLUMNS < w.alone ? w.turn : p.grouped ? w.tile + 2 : 0;
    const bool first = LEAVES ? !share.adds(tile) : after == 0, last = LEAVES && share.leaves(tile);
    const int slot = stage_slot<C, LEAVES>(p, tile);
    const uint32_t stage = shared_address(C::LENDS ? s.stage[0] + slot * (s.lent_stage - s.stage[0]) : s.stage[slot]),
                   free = shared_address(&s.stage_free[slot]);
    const int bytes = min(COLUMNS, (w.columns - row + 15) / 16 * 16) * p.sums.width * (int)sizeof(float);
    int *const turn = p.turns + place_of(p.a, w.turns + row / COLUMNS, h);
    float *sums = p.sums.at(h, w.sums, row);
    asm volatile("" : "+l"(sums)); /* known before the turn comes: from then on others wait */
    if (LEAVES && !room && !share.reads(tile))
        arrive(free);
    while (!first && (p.any_order && !last ? see_turn(turn) == 0 : see_turn(turn) != after))
        ;
    fence_async_global();
    if (LEAVES && share.reads(tile)) {
        arrive_expecting(free, bytes);
        bulk_load(stage, sums, bytes, free);
    }
    wait(shared_address(&s.staged[tile % 2]), tile / 2 & 1);
    if (last) {
        if constexpr (LEAVES && !C::NUMBERS) /* else it has gone from the registers */
            for (int strip = 0; strip < COLUMNS / 16; strip++)
                for (int i = 0; i * 64 < C::D; i++)
                    store_box(strip_at<C>(stage, p.sums.width, strip) + i * 2048, p.out.map, i * 64,
                              w.other_row + row + strip * 16, h * p.out.head_on, w.other_batch * p.out.batch_on);
    } else if (first)
        bulk_store(sums, stage, bytes);
    else
        bulk_add(sums, stage, bytes);
    bulk_commit();
    bulk_wait_read();
    room = !LEAVES || (tile + 2 < share.end && !share.reads(tile + 2));
    if (room)
        arrive(free);
    if (last || (!LEAVES && p.any_order && !first))
        return;
    bulk_wait();
    fence_async_global();
    if (LEAVES && p.any_order && !first)
        advance_turn(turn, w.tile + 1 - w.turn);
    else
        pass_turn(turn, w.tile + 1);
}

/* Where dQ is summed, the third and the fourth, for even and odd tiles: it takes longer to take turns than to compute
 * another tile. So a row's sum is always taken in the same order of the keys. The keys before are in work or done, as pieces
 * of work are taken in their order: somebody always has no one to wait for. */
template <class C, bool LEAVES> __device__ inline void keep_turns(const backward_job &p, backward_shared<C> &s, int odd)
{
    if (threadIdx.x % 32)
        return;
    bool room = false;
    for (int n = 0, tile = 0;; n++) {
        const int slot = n % C::WORKS;
        const piece &w = s.work[slot];
        wait(shared_address(&s.described[slot]), n / C::WORKS & 1);
        if (!w.exists)
            return;
        const int heads = heads_of<C>(p, w);
        const auto keep = [&](const auto &w, int head, const dq_share &share) {
            for (int h = 0, step = 0; step < w.tiles; tile++) {
                if (tile % 2 == odd)
                    take_turn<C, LEAVES>(p, s, w, share, tile, head + h, column_at<C>(w, step), room);
                if (++h == heads)
                    h = 0, step++;
            }
        };
        if constexpr (LEAVES)
            keep(w, first_head<C>(p, w), share_of<C>(p, w, tile));
        else
            keep(turns_of{ w.start, w.tiles, w.columns, w.turn, w.alone, w.tile, w.turns, w.sums }, first_head<C>(p, w),
                 dq_share{});
        arrive(shared_address(&s.work_free[slot]));
    }
}

template <class C> __device__ inline void produce(const backward_job &p, backward_shared<C> &s)
{
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 0)
        bring_own<C>(p, s);
    else if (warp == 1)
        bring_columns<C, 0>(p, s);
    else if (C::OWNERS && p.leaves)
        keep_turns<C, true>(p, s, warp - 2);
    else if (C::ADDS)
        keep_turns<C, false>(p, s, warp - 2);
    else if (warp == 2)
        bring_columns<C, 1>(p, s);
    else if (C::KEYS)
        bring_all_terms<C>(p, s);
}

#endif
