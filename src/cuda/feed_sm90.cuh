/* What feeds the warpgroups of the Hopper forward: the tiles of rows and their order, the warp that plans them, and the warp
 * that keeps the copy engine busy with them. */
#ifndef HEED_CUDA_FEED_SM90_CUH
#define HEED_CUDA_FEED_SM90_CUH

#include "tile_sm90.cuh"

/* What a warpgroup does between Q K^T and the exponentials where there is nothing to do: else see scores_sm90.cuh. */
struct no_terms {
    template <class Work> __device__ void begin(const Work &, int) {}
    template <class Work> __device__ void draw(const Work &, int, int) {}
    template <int N> __device__ bool apply(float (&)[N], int) { return true; } /* false: nothing is visible */
    template <int N> __device__ void drop(uint32_t (&)[N][4]) {}
    __device__ void finish(float (&)[2]) {}
};

/* What is fixed at compile time: head size, warpgroups of 64 rows each, keys at once, and how many blocks of K and of V
 * there is room for; OVERLAP: a warpgroup has the next S and the present O += P V in the tensor core together, else one
 * after the other; CAPPED: there is a softcap. */
template <int D_, int GROUPS_, int KEYS_, int STAGES_, bool OVERLAP_, bool CAPPED_ = false> struct forward_shape {
    static constexpr bool TERMS = false;  /* nothing is added to scores, or hides them, but the band */
    static constexpr bool LOWERS = false; /* no P that grows too far is lowered: see lower() */
    template <class T> using terms = no_terms;
    static constexpr int D = D_, GROUPS = GROUPS_, ROWS = 64 * GROUPS, KEYS = KEYS_, STAGES = STAGES_,
                         THREADS = 128 + 128 * GROUPS;
    static constexpr bool OVERLAP = OVERLAP_, CAPPED = CAPPED_;
    static constexpr int WARPS_OUT = 4 * GROUPS; /* that send rows out through shared memory */
    static constexpr bool HALVES = OVERLAP && KEYS > 64 && KEYS % 32 == 0; /* half a block can be taken by itself */
    static constexpr int ALIGNED = 1;    /* blocks of keys begin at multiples of this */
    static constexpr int EDGES = ROWS;   /* rows of the tile whose band cuts the keys into blocks: see few_shape */
    static constexpr bool EARLY = false; /* the next S is asked for before the present exponentials */
    static constexpr bool FEW = false;   /* a block for each tile: see forward_sm90few() */
    static constexpr bool FORTH = false; /* the first keys come first: see fetch_q() */

    /* What was tried and is not worth it; the shapes of bench/tune_sm90.cu choose otherwise. */
    static constexpr bool TURNS = false;       /* warpgroups issue their products in turn */
    static constexpr bool TENSOR_SUMS = false; /* the tensor core adds P up, not the lanes */
    static __device__ void prepare() {}        /* before all else, by all threads */
    template <int N, class X>
    static __device__ bool follow(float (&)[N], X &, float) /* S of a block whose maxima are */
    {                                                       /* left alone; true: they grew */
        return false;
    }

    static_assert(GROUPS >= 1 && GROUPS <= 4, "with more the registers do not suffice");
    static constexpr int PRODUCER_REGISTERS = GROUPS <= 2 ? 40 : 32,
                         REGISTERS = GROUPS == 1   ? 216 /* of two blocks on a multiprocessor */
                                     : GROUPS == 2 ? 232
                                     : GROUPS == 3 ? 160
                                                   : 112; /* what the one gives up the others take */

    /* Which 64 rows of tile n a warpgroup has. They change places, so that who sees few keys of one tile, as in causal
     * problems, or none, as at the end of a sequence, sees more of another. */
    static __device__ int part(int group, int n)
    {
        return GROUPS == 3 ? (group + n) % 3 : n % 2 ? GROUPS - 1 - group : group;
    }

    /* Of a tile; what follows it are numbers of tile_order, for those whose tiles differ in height. */
    static __device__ int first_row(int tile, int, int) { return tile * ROWS; }

    /* Heads come in the order of sequences; else so many sequences' same head together. */
    static __device__ int sequences_together(const args &) { return 0; }
};

/* The same arithmetic in tiles of fewer rows, for problems whose Tall tiles are too few to fill the GPU. What a row gets
 * depends on its own 64 alone, but for where blocks of keys begin and which are at an edge, where a maximum may grow: that
 * is found for the tall tile that the row would be in. So bits are the same, and the number of heads may decide. */
template <class Tall, int GROUPS_, int STAGES_, bool EARLY_>
struct few_shape : forward_shape<Tall::D, GROUPS_, Tall::KEYS, STAGES_, true, Tall::CAPPED> {
    static constexpr int EDGES = Tall::ROWS,
                         RESIDENT = GROUPS_ == 1 && Tall::D <= 64 ? 2 : 1; /* blocks there is room for */
    static constexpr bool FEW = true, EARLY = EARLY_, HALVES = Tall::HALVES;
    static_assert(!EARLY || !HALVES, "attend_early() takes whole blocks");
    static_assert(EDGES % (64 * GROUPS_) == 0, "a tile is in one tall tile");
};

/* Where there are few rows and many keys, the keys are taken in parts: each is a tile by itself, with its own o and lse,
 * [part][batch][head][row], and these are merged. */
struct key_parts {
    int count, keys;
    float *o, *lse; /* with more than one */
};

/* The order of the tiles, to and fro over the blocks: who took a long tile of one round takes a short one of the next, as
 * even as a queue, and without one. First come heads in line, all tiles of each one after the other, so that the blocks
 * that meet its keys at the same time read them from memory once, and memory is read all the time. Then come groups of
 * heads whose keys fit the cache, and of each group the tiles with the most keys first, so that all blocks end together;
 * the next group starts with the blocks that had the least of this one. */
struct tile_order {
    int tiles, heads, in_line, group;
    int rounds[2], shift[2]; /* of a group, and of the heads in line: rounds, and tiles of the last if it is not full */
    key_parts by;
    int least = 0, few = 0; /* for first_row() */
};

/* head_bytes: K and V of a head; of_head: its tiles, where they are not as high as they can be. Where all tiles have as many
 * keys, all heads stand in line, also where the last tile of each has fewer rows, unless keys are many; where sequences are
 * long, none: groups come out more even, and memory is not what they wait for. In between an even number of rounds of them
 * do. */
template <class S>
tile_order order_of(const args &a, const key_parts &by, int64_t head_bytes, int blocks, int64_t of_head = 0)
{
    const int64_t cached = (int64_t)32 << 20, heads = (int64_t)a.B * a.Hq;
    const int64_t tiles = (of_head ? of_head : tiles_of(a.Sq, S::ROWS)) * by.count;
    const bool alike = a.left >= FAR && a.right >= FAR && !a.lengths_q && !a.offsets_q &&
                       (a.Sq % (of_head ? of_head * 64 : S::ROWS) == 0 || head_bytes <= (int64_t)2 << 20);
    const int64_t rounds = tiles * 16 <= blocks ? HEED_MAX(heads * tiles / blocks - 1, 0) / 2 * 2 : 0;
    const int64_t in_line = alike ? heads : rounds * blocks / tiles / a.G * a.G;
    const int64_t group = HEED_MIN(heads, HEED_MAX(1, cached / HEED_MAX(head_bytes, 1)) * a.G);
    const int64_t of[2] = { group * tiles, in_line * tiles };
    return { (int)tiles,
             (int)heads,
             (int)in_line,
             (int)group,
             { (int)tiles_of(of[0], blocks), (int)tiles_of(of[1], blocks) },
             { (int)(of[0] % blocks), (int)(of[1] % blocks) },
             by };
}

/* One tile of rows, as the planner hands it to the others. Blocks of keys are counted from `first` on. */
template <int ROWS> struct forward_work {
    span s;
    int turn, h, i0, rows;     /* turn: its number among the tiles of the block; rows = 0: there are no more */
    int64_t o_at, lse_at;      /* elements of o and of lse before the first row */
    int hk, first, blocks;     /* the keys that some row of the tile sees */
    int seen[4];               /* the first so many blocks are what 64 of the rows see */
    bool half[4];              /* and of the last of these no more than half */
    int end[4];                /* what is written of these 64 ends before this row of the tile */
    int clear_from, clear_to;  /* all rows see all keys of these blocks */
    int low[ROWS], high[ROWS]; /* the keys each row sees; only where not all blocks are clear */
};

constexpr int AHEAD = 4;      /* tiles that are planned at a time */
constexpr int FAILURES = 256; /* words of them: of eight turns each, those after the last as its last */

template <class S> struct forward_shared {
    char Q[S::GROUPS][tile_bytes<S::D, 64>], K[S::STAGES][tile_bytes<S::D, S::KEYS>],
        V[S::STAGES][tile_bytes<S::D, S::KEYS>];
    char out[S::WARPS_OUT][16 * 128]; /* 64 columns of a warp's rows on their way out */
    uint64_t q_full[S::GROUPS], q_empty[S::GROUPS], k_full[S::STAGES], k_empty[S::STAGES], v_full[S::STAGES],
        v_empty[S::STAGES], v_landed, planned[AHEAD], closed[AHEAD];
    forward_work<S::ROWS> work[AHEAD]; /* tile number n of the block has work[n % AHEAD] */
    uint32_t failed[FAILURES];         /* four bits for each turn, one for each 64 rows of its tile */

    __device__ static int failed_at(int turn) { return 4 * (turn < FAILURES * 8 ? turn % 8 : 7); }
    __device__ uint32_t failed_parts(int turn) const
    {
        return failed[min(turn / 8, FAILURES - 1)] >> failed_at(turn) & 15;
    }
    __device__ void fails(int turn, int part)
    {
        atomicOr(&failed[min(turn / 8, FAILURES - 1)], 1u << (failed_at(turn) + part));
    }
};

/* A place in a ring of buffers, and the parity of its present use. */
template <int STAGES> struct ring {
    static_assert((STAGES & (STAGES - 1)) == 0, "a power of two");
    unsigned count = 0;
    __device__ int at() const { return (int)(count % STAGES); }
    __device__ int parity() const { return (int)(count / STAGES % 2); }
    __device__ void next() { count++; }
};

/* ---- The planner ------------------------------------------------------------------------------------------------- */

/* Keeps the compiler from computing with x ahead of the loop, into registers that are few here. */
__device__ inline int only_now(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}

/* band_of_row() where steps fit 32 bits, for a warp with few registers. */
__device__ inline void narrow_band(const args &a, const span &s, int i, int &first, int &last)
{
    const int64_t p = s.p0 - a.r0 + i * a.p_step; /* counted from the first key's position */
    const unsigned step = (unsigned)a.r_step;
    unsigned from = a.left >= FAR ? 0 : (unsigned)clamp(p - a.left, 0, INT32_MAX);
    unsigned to = a.right >= FAR ? INT32_MAX : (unsigned)clamp(p + a.right + 1, 0, INT32_MAX); /* one past the last */
    if (step != 1)
        from = (from + step - 1) / step, to = (to + step - 1) / step;
    first = (int)min(from, (unsigned)s.keys);
    last = max(first, (int)min(to, (unsigned)s.keys));
}

/* By a whole warp: fills w, false where the sequence has no rows there. wanted: a bit for each 64 of the rows; others see no
 * keys, and nothing of them is written. */
template <class S>
__device__ inline bool find_work(const args &a, int turn, int head, int tile, int part, const tile_order &o,
                                 forward_work<S::ROWS> &w, uint32_t wanted = 15)
{
    const key_parts &by = o.by;
    const int lane = threadIdx.x % 32, i0 = S::first_row(tile, o.least, o.few);
    const auto band = [&](int i, int &low, int &high) {
        const int from = only_now(part) * by.keys, to = from + by.keys;
        narrow_band(a, w.s, i, low, high);
        low = min(max(low, from), to), high = max(low, min(high, to));
    };
    int rows = 0;
    if (lane == 0) {
        const int together = S::sequences_together(a), b = together ? head % together : head / a.Hq;
        w.s = span_of(a, b);
        w.turn = turn, w.h = together ? head / together : head % a.Hq, w.hk = w.h / a.G, w.i0 = i0;
        w.rows = rows = min(S::first_row(tile + 1, o.least, o.few), w.s.rows) - i0;
    }
    __syncwarp();
    if (__shfl_sync(~0u, rows, 0) <= 0) /* not read from w: the first lane may already be at the next tile */
        return false;
    int low, high; /* bands move one way: the first and the last row say it all */
    if constexpr (S::EDGES == S::ROWS)
        band(lane ? i0 + w.rows - 1 : i0, low, high);
    else { /* lanes 0 and 1 of these rows, 2 and 3 of the tall tile's */
        const int tall = i0 / S::EDGES * S::EDGES, end = lane < 2 ? i0 + w.rows : min(tall + S::EDGES, w.s.rows);
        band(lane % 2 ? end - 1 : lane ? tall : i0, low, high);
    }
    constexpr int of = S::EDGES == S::ROWS ? 0 : 2;
    const int low0 = __shfl_sync(~0u, low, of), high0 = __shfl_sync(~0u, high, of),
              low1 = __shfl_sync(~0u, low, of + 1), high1 = __shfl_sync(~0u, high, of + 1);
    const int first = min(low0, low1) / S::ALIGNED * S::ALIGNED, inside = max(low0, low1), outside = min(high0, high1);
    const int last = of ? max(__shfl_sync(~0u, high, 0), __shfl_sync(~0u, high, 1)) : max(high0, high1);
    const int blocks = last > first ? (last - first + S::KEYS - 1) / S::KEYS : 0;
    const int clear_from = (inside - first + S::KEYS - 1) / S::KEYS, clear_to = max(outside - first, 0) / S::KEYS;
    if (lane == 0)
        w.first = first, w.blocks = blocks, w.clear_from = clear_from, w.clear_to = clear_to;
    __syncwarp();
    if (w.clear_from > 0 || w.clear_to < w.blocks)
#pragma unroll 1
        for (int r = lane; r < S::ROWS; r += 32)
            band(min(i0 + r, w.s.rows - 1), w.low[r], w.high[r]);
    __syncwarp();
    if (lane < S::GROUPS) {
        const int i = lane * 64, last = min(i + 64, w.rows) - 1;
        int halves = 2 * w.blocks;
        const bool left_out = !(wanted >> lane & 1);
        if (i > last || left_out)
            halves = 0;
        else if (w.clear_to < w.blocks)
            halves = (max(max(w.high[i], w.high[last]) - w.first, 0) + S::KEYS / 2 - 1) / (S::KEYS / 2);
        w.seen[lane] = (halves + 1) / 2, w.half[lane] = halves % 2, w.end[lane] = left_out ? 0 : w.rows;
    } else if (only_now(lane) >= 30) {
        const bool o = only_now(lane) == 30;
        int64_t at = row_at(o ? a.o : a.lse, w.s.q_batch, w.h, w.s.q_row + w.i0);
        if (by.count > 1)
            at = ((((int64_t)part * only_now(a.B) + w.s.b) * only_now(a.Hq) + w.h) * a.Sq + w.i0) * (o ? a.Dv : 1);
        (o ? w.o_at : w.lse_at) = at;
    }
    return true;
}

/* The planner's warp: finds one tile after the other, or once more those that failed, and of these the 64 rows that did; with
 * terms all rows, whose scores come together. count: tiles so far. A tile of no rows ends the list. */
template <class S>
__device__ inline void plan_tiles(forward_shared<S> &sh, const args &a, const tile_order &o, int &count, bool again)
{
    const int blocks = gridDim.x;
    const auto wait_closed = [&]() { wait(shared_address(&sh.closed[count % AHEAD]), count / AHEAD % 2 ^ 1); };
    const auto tell = [&]() {
        arrive(shared_address(&sh.planned[count % AHEAD]));
        count++;
    };
    int turn = 0, place = blockIdx.x;
#pragma unroll 1
    for (int head0 = 0, heads; head0 < o.heads; head0 += heads) {
        const int in_line = head0 < o.in_line;
        heads = in_line ? o.in_line : min(o.group, o.heads - head0);
#pragma unroll 1
        for (int round = 0; round < o.rounds[in_line]; round++, turn++) {
            const int at = round * blocks + (round % 2 ? blocks - 1 - only_now(place) : place);
            if (at >= heads * only_now(o.tiles) || (again && !sh.failed_parts(turn)))
                continue;
            const int by = in_line ? o.tiles : heads, quotient = at / by, rest = at - quotient * by;
            const int head = head0 + (in_line ? quotient : rest), tile = o.tiles - 1 - (in_line ? rest : quotient);
            const int parts = only_now(o.by.count);
            wait_closed();
            if (find_work<S>(a, turn, head, tile / parts, tile % parts, o, sh.work[count % AHEAD],
                             again && !S::TERMS ? sh.failed_parts(only_now(turn)) : 15))
                tell();
        }
        place += o.shift[in_line];
        if (place >= blocks)
            place -= blocks;
    }
    wait_closed();
    if (threadIdx.x % 32 == 0)
        sh.work[count % AHEAD].rows = 0;
    tell();
}

/* ---- The loaders ------------------------------------------------------------------------------------------------- */

/* Fetches Q, by one thread: 64 rows for each warpgroup, as soon as it is done with those of its tile before. count: tiles
 * so far. Where the last keys of a tile come last, who has its first rows may be done sooner. */
template <class S> __device__ inline void fetch_q(forward_shared<S> &sh, const tensor_map &q, int &count)
{
    for (bool more = true; more; count++) {
        const int n = count;
        const forward_work<S::ROWS> &w = sh.work[n % AHEAD];
        wait(shared_address(&sh.planned[n % AHEAD]), n / AHEAD % 2);
        more = w.rows > 0;
#pragma unroll 1
        for (int i = 0; i < S::GROUPS; i++) {
            const int group = S::FORTH ? S::part(i, n + 1) : i, part = S::part(group, n);
            const uint32_t full = shared_address(&sh.q_full[group]);
            const bool wanted = more && w.seen[part] > 0;
            const int row = w.s.q_row + w.i0 + part * 64, head = w.h, batch = w.s.q_batch;
            wait(shared_address(&sh.q_empty[group]), n % 2 ^ 1);
            if (wanted) {
                arrive_expecting(full, tile_bytes<S::D, 64>);
                load_tile<S::D, 64>(shared_address(sh.Q[group]), q, row, head, batch, full);
            } else
                arrive(full);
        }
    }
}

/* V rows beyond the end of the sequence belong to somebody else or to nobody: whatever they hold, 0 times it must be
 * 0. By a whole warp, which waits for the tile to land. */
template <class S> __device__ inline void clear_rows(forward_shared<S> &sh, char *V, int from, int &parity)
{
    wait(shared_address(&sh.v_landed), parity);
    parity ^= 1;
#pragma unroll 1
    for (int box = 0; box < (S::D + 63) / 64; box++)
#pragma unroll 1
        for (int chunk = from * 8 + threadIdx.x % 32; chunk < S::KEYS * 8; chunk += 32)
            *(uint4 *)(V + box * S::KEYS * 128 + chunk * 16) = make_uint4(0, 0, 0, 0);
    fence_async();
    __syncwarp();
}

/* Fetches K and V, by a warp. Tiles and their blocks are one long stream to it: K goes one block ahead of V, into the next
 * tile too. */
template <class S> struct loader {
    static constexpr int KV_BYTES = tile_bytes<S::D, S::KEYS>;
    static constexpr bool ALONE = S::STAGES == 1; /* K of the next block has to wait until S of this one is done */
    forward_shared<S> &sh;
    const tensor_map &k, &v;
    const bool ragged, leader; /* ragged: rows may follow a sequence that are not its own */
    ring<S::STAGES> at_k, at_v;
    int landed, count; /* count: tiles so far */

    /* Starts the next tile; its blocks, or -1 where there are no more tiles. */
    __device__ int next_tile()
    {
        const int n = count++;
        wait(shared_address(&sh.planned[n % AHEAD]), n / AHEAD % 2);
        return sh.work[n % AHEAD].rows ? sh.work[n % AHEAD].blocks : -1;
    }

    /* Tile n is not looked at any more. */
    __device__ void close(int n)
    {
        __syncwarp();
        if (leader)
            arrive(shared_address(&sh.closed[n % AHEAD]));
    }

    /* The first key of a tile's block that so many others follow. */
    __device__ int key_of(const forward_work<S::ROWS> &w, int left) const
    {
        return w.first + (S::FORTH ? w.blocks - 1 - left : left) * S::KEYS;
    }

    __device__ void load_k(int n, int left)
    {
        const uint32_t full = shared_address(&sh.k_full[at_k.at()]);
        const forward_work<S::ROWS> &w = sh.work[n % AHEAD];
        wait(shared_address(&sh.k_empty[at_k.at()]), at_k.parity() ^ 1);
        if (leader) {
            arrive_expecting(full, KV_BYTES);
            load_tile<S::D, S::KEYS>(shared_address(sh.K[at_k.at()]), k, w.s.k_row + key_of(w, left), w.hk, w.s.k_batch,
                                     full);
        }
        at_k.next();
    }

    __device__ void load_v(int n, int left)
    {
        const forward_work<S::ROWS> &w = sh.work[n % AHEAD];
        const int n0 = key_of(w, left);
        const bool foreign = ragged && n0 + S::KEYS > w.s.keys;
        const uint32_t full = shared_address(&sh.v_full[at_v.at()]), on = foreign ? shared_address(&sh.v_landed) : full;
        wait(shared_address(&sh.v_empty[at_v.at()]), at_v.parity() ^ 1);
        if (leader) {
            arrive_expecting(on, KV_BYTES);
            load_tile<S::D, S::KEYS>(shared_address(sh.V[at_v.at()]), v, w.s.k_row + n0, w.hk, w.s.k_batch, on);
        }
        if (foreign) {
            clear_rows<S>(sh, sh.V[at_v.at()], w.s.keys - n0, landed);
            if (leader)
                arrive(full);
        }
        at_v.next();
    }

    /* The one tile that the block has. */
    __device__ void load_alone()
    {
        const int blocks = sh.work[0].blocks;
        for (int j = blocks; j >= 0; j--) {
            if (j > 0)
                load_k(0, j - 1);
            if (j < blocks)
                load_v(0, j);
        }
    }

    __device__ void run()
    {
        bool first = true;
        for (int blocks = 0, next = 0; blocks >= 0;
             blocks = next, first = false) { /* first comes a tile of no blocks */
            const int n = count - 1;
            for (int j = max(blocks - 1, 0); j >= 0; j--) {
                if (ALONE && blocks)
                    load_v(n, j);
                if (j == 0)
                    next = next_tile();
                const int ahead = (j > 0 ? j : next) - 1;
                if (ahead >= 0)
                    load_k(j > 0 ? n : n + 1, ahead);
                if (!ALONE && blocks)
                    load_v(n, j);
            }
            if (!first)
                close(n);
        }
        close(count - 1);
    }
};

/* By one thread. closers: arrivals that close a tile. */
template <class S, class Shared> __device__ inline void init_barriers(Shared &sh, int closers)
{
    for (int i = 0; i < S::GROUPS; i++)
        barrier_init(shared_address(&sh.q_full[i]), 1), barrier_init(shared_address(&sh.q_empty[i]), 4);
    for (int i = 0; i < S::STAGES; i++) {
        barrier_init(shared_address(&sh.k_full[i]), 1), barrier_init(shared_address(&sh.k_empty[i]), 4 * S::GROUPS);
        barrier_init(shared_address(&sh.v_full[i]), 1), barrier_init(shared_address(&sh.v_empty[i]), 4 * S::GROUPS);
    }
    for (int i = 0; i < AHEAD; i++)
        barrier_init(shared_address(&sh.planned[i]), 32), barrier_init(shared_address(&sh.closed[i]), closers);
    barrier_init(shared_address(&sh.v_landed), 1);
}

#endif
