/* What a kernel of the Hopper backward is given, a job in pieces of work, and what a block of it holds in shared memory. Each
 * owns some rows, whose results stay in registers, and meets the other side of the problem in tiles of 64 columns:
 *
 *     kernel     own rows       A operands   meets      B operands   results
 *     dK, dV     keys           K, V         queries    Q, dO        dK = dS^T Q, dV = P^T dO
 *     dQ         queries        Q, dO        keys       K, V         dQ = dS K
 *
 * Both compute S (or its transpose) = A1 B1^T and dP = A2 B2^T with their own side as rows, so that P and dS are left
 * operands of the next products without leaving their lanes. */
#ifndef HEED_CUDA_BACKWARD_SM90_BLOCK_CUH
#define HEED_CUDA_BACKWARD_SM90_BLOCK_CUH

#include "scores.cuh"
#include "tile_sm90.cuh"

/* LEAVING: of so many tiles of keys at most, dQ leaves with the last ones. PART_TILES: tiles of queries that a part of the
 * heads over the same keys should meet, see part_sums. */
constexpr int COLUMNS = 64, LEAVING = 16, PART_TILES = 256;

/* P = 2^(c S - L), or with a softcap 2^(out t - L) of its tanh, t = 1 - 2 / (2^(in S) + 1). out_inverse: 0 without one. */
struct score_rule {
    float c, in, out, out_inverse;
    __device__ bool capped() const { return out_inverse > 0; }
    __device__ float tangent(float S) const { return fmaf(-2.0f, reciprocal_fast(exp2_fast(in * S) + 1.0f), 1.0f); }
};

/* Sums of dQ, [Hq][strips][16 width]. A strip is 16 rows as a warp holds them: 8 columns of all rows lie together, and of
 * these four floats of each lane, which are those of two columns and of the rows r and r + 8. Each sequence begins a
 * strip. They are as wide as dQ, not as the kernel, see narrowest_sums(). at(): from `row` on, a multiple of 16. */
struct dq_sums {
    float *data; /* NULL: there are none */
    int strips, width;
    __device__ float *at(int head, int first_strip, int row) const
    {
        return data + ((int64_t)head * strips + first_strip + row / 16) * (16 * width);
    }
};

/* What each row of q adds to its column of S^T and of dP^T, -L / c and -delta: both_terms(), of whose numbers `least` has the
 * last ones. They lie in the workspace, or where that would be too large in the rows of dQ, whose memory is free until dQ
 * goes out, when all have read them. */
struct term_view {
    uint2 *most; /* NULL: there are L and delta instead */
    uint32_t *least;
    int64_t batch; /* from one batch, head and row to the next; */
    int head, row;
    int times; /* of `least`, so many times as much */
    __device__ int64_t at(int b, int h, int i) const { return b * batch + (int64_t)h * head + (int64_t)i * row; }
};

/* Of heads that share keys several pieces of work may take a part each. They add up dK and dV one after the other, and what
 * the next is to add to lies in d_k and d_v, the upper 16 bits of each float, and here, 8 more. */
struct part_sums {
    int most;    /* parts there are, at most */
    int *turns;  /* how many have added, for each warp of each result of a tile of keys */
    uint4 *rest; /* as a warp's registers are */
};

/* Heads of a part, by the length of the sequence alone. */
__host__ __device__ inline int heads_of_part(int heads, int64_t rows)
{
    const int64_t parts = heads * ((rows + COLUMNS - 1) / COLUMNS) / PART_TILES;
    return parts <= 1 ? heads : parts >= heads ? 1 : (int)((heads + parts - 1) / parts);
}

/* The kernels' argument. L = lse * log2(e) and delta are arrays [batches][Hq][pitch], a number for each row of q. */
struct backward_job {
    args a;
    tensor_map own[2], other[2], out; /* out: of dQ, in strips of 16 rows, */
    bool leaves;                      /* where it leaves with the last keys: see dq_share */
    dq_sums sums;
    int *turns; /* by place_of(): how many tiles of keys, of all that the sequence has, a tile of dQ is past; 0: none */
    const float *L, *delta;
    int pitch;
    term_view terms; /* in place of L and delta where dQ is summed, */
    part_sums parts; /* where several pieces of work may share the heads of a tile of keys */
    score_rule rule;
    const struct piece *pieces; /* by piece_at() */
    const int2 *ranges;         /* of the columns that an own row sees, ROWS for each piece */
    const int *lengths;         /* own rows of each sequence */
    int *counter;               /* of the pieces that are taken, from 0 */
    int count, tiles, together; /* tiles of the longest sequence; heads that are worked on at the same time */
    bool any_order;             /* dQ may be summed in: see keep_turns() */
    bool second;                /* the kernel before has waited for all that this one needs */
    bool grouped;               /* the keys' order is that of group_of() */
    int more_dS, more_dQ;       /* 1: there is a second tile; where the kernel LENDS */
};

/* One tile of own rows of a sequence and the columns that they see, the same for all heads. Of each group of 64 rows:
 * the tiles begin .. end that it meets, and the columns inside .. outside that all its rows see. */
struct piece {
    int exists, rows;           /* 0: there is no more work */
    int batch, memory_row;      /* where the own rows lie; memory_row counts rows on the key stride */
    int start, tiles;           /* first column; tiles of each head */
    int other_batch, other_row; /* where column 0 lies */
    int columns;                /* that the sequence has */
    int head;
    int first, heads, part; /* of the own rows' heads, those of the columns; parts before these */
    int tile;               /* of the own rows, counted from the sequence's first */
    int turns;              /* where the sequence's first tile of queries stands among those that wait for turns, */
    int sums;               /* and its first strip of rows among the sums */
    int turn;               /* of the own rows to add to dQ; */
    int ranges;             /* where those of the own rows begin */
    int alone; /* from this tile of columns on, they are the first, or if grouped, after the tile that follows them, */
    int until; /* and before this one the last */
    int begin[3], end[3], inside[3], outside[3];
};

/* Where tile `tile` of sequence b stands in a table. Sequences that lie end to end begin a tile each. */
__device__ inline int piece_at(const args &a, bool keys, int rows, int b, int tile)
{
    const int32_t *offsets = keys ? a.offsets_k : a.offsets_q;
    const int memory_rows = (int)(keys ? a.k_rows : a.q_rows);
    return (offsets ? clamp(offsets[b], 0, memory_rows) / rows + b : b * ((memory_rows + rows - 1) / rows)) + tile;
}

/* Where dQ leaves with the last keys, of the tiles that a piece of work meets, counted over all work: those before `stored`
 * are the first of their sums, and those from `leaving` on the last, which go out as dQ and not to the sums. */
struct dq_share {
    int stored, leaving, end;
    __device__ bool adds(int tile) const { return tile >= stored; }
    __device__ bool leaves(int tile) const { return tile >= leaving; }
    __device__ bool reads(int tile) const { return tile >= stored && tile >= leaving; }
};

/* Of the heads of the columns, those that a piece of work has: the first, and how many. */
template <class C> __device__ inline int first_head(const backward_job &p, const piece &w)
{
    return C::SHARES ? w.first : w.head * p.a.G;
}

template <class C> __device__ inline int heads_of(const backward_job &p, const piece &w)
{
    return C::SHARES ? w.heads : p.a.G;
}

/* from: the piece's first tile. */
template <class C> __device__ inline dq_share share_of(const backward_job &p, const piece &w, int from)
{
    const int heads = heads_of<C>(p, w);
    const int end = w.start / COLUMNS + w.tiles;
    return { from + clamp(end - w.alone, 0, w.tiles) * heads, from + clamp(end - w.until, 0, w.tiles) * heads,
             from + w.tiles * heads };
}

/* Where a strip of 16 rows of a tile of dQ lies on its way out, in boxes of 64 columns from a multiple of 1024 bytes on, as
 * the copy engine wants them: within the place of its sums, which its warp has read by then. */
template <class C> __device__ inline uint32_t strip_at(uint32_t stage, int width, int strip)
{
    if (C::D == 64 && width <= 32)
        return stage + width * 256 + strip * 2048; /* there is room behind all sums */
    return stage + strip * (width * 64) + 1023 & ~1023u;
}

/* So that there is room for the boxes, and at D = 128, where the stage begins anywhere, for what comes before. */
__host__ __device__ constexpr int narrowest_sums(int head_dim) { return head_dim == 64 ? 8 : head_dim == 96 ? 64 : 80; }

/* Turns are so many numbers apart: those who ask for one again and again should not hold up the others. */
constexpr int TURN_APART = 8;

__device__ inline int place_of(const args &a, int tile, int head) { return (tile * a.Hq + head) * TURN_APART; }

/* Under a causal mask each tile of keys meets two tiles of queries fewer than the one before. Of so many neighbours, if
 * they are grouped, the last begins and adds to dQ first: who takes the next group began two tiles of queries after the one
 * that it follows, which is as long as it waits for its turn. By the length of the sequence alone. */
__device__ inline int group_of(bool grouped, int tiles) { return grouped && tiles > LEAVING ? min(tiles / 8, 16) : 1; }

/* Pieces of the keys or of the queries, in the workspace. */
struct piece_table {
    int *lengths;
    piece *pieces;
    int2 *ranges;
    int rows, tiles; /* of a piece, of the longest sequence */
    int grid;        /* the first column of a piece is a multiple of this */
    bool grouped;
};

/* The workspace, part by part. */
struct workspace {
    char *next;
    size_t bytes;
    void *take(size_t size)
    {
        char *part = next + bytes;
        bytes += (size + 15) / 16 * 16;
        return part;
    }
};

/* backward_sm90.cu: room for the pieces of a tensor in tiles of so many rows; all pieces of keys and queries; and how
 * many heads are worked on at a time. */
void heed_sm90_take_table(workspace *space, piece_table *t, const heed_problem *p, const heed_tensor *rows_of, int rows,
                          int grid);
heed_status heed_sm90_find_pieces(const args &a, piece_table &keys, piece_table &queries, const heed_exec *x);
int heed_sm90_heads_together(const args &a, int heads, int64_t bytes_of_head);

/* A kernel for head sizes up to one, and what it takes of a problem: rows of the own tile. */
struct backward_kernel {
    int head_dim, rows;
    bool leaves; /* it can see dQ out */
    heed_status (*launch)(const backward_job &job, int blocks, const heed_exec *x);
};

/* The kernels of a backward: dK with dV and dQ, and where there is one for all three, that, and one by part_sums, which also
 * finds terms wherever they lie. */
struct backward_form {
    backward_kernel dkv, dq, all, parts;
};

/* backward_sm90_keys.cu, backward_sm90_queries.cu. */
backward_kernel heed_sm90_dkv(int head_dim), heed_sm90_dq(int head_dim);

/* backward_sm90.cu. The whole backward. */
size_t heed_sm90_backward_bytes(const heed_problem *p, const backward_form &form);
heed_status heed_sm90_backward(const heed_problem *p, const backward_form &form, const heed_exec *x);

/* ---- Shared memory ----------------------------------------------------------------------------------------------- */

/* Where a warpgroup has all of dK and dV, and as far as it has registers: S of the next tile is computed beside dS
 * (EARLY), dK beside the next P (LATE), dS from P as it was before rounding (EXACT), and the next tile is looked at in
 * time (AHEAD). Where dQ is computed beside them, by one more warpgroup that does nothing else (OWNER), and of heads that share
 * keys, by several pieces of work (SHARED). */
enum { EARLY = 1, LATE = 2, EXACT = 4, AHEAD = 8, OWNER = 16, SHARED = 32 };

/* KEYS: the own rows are keys. SLOTS own tiles and FIRST and SECOND stages of the rings. WAYS: of the
 * above. DS: where dQ, too, is computed and added up in memory, so many tiles of dS pass between warpgroups. PASS:
 * tiles of P do. */
template <bool KEYS_, int D_, int ROWS_, int SLOTS_, int FIRST_, int SECOND_, int WAYS_ = 0, int DS_ = 0, int PASS_ = 0>
struct backward_shape {
    static constexpr bool KEYS = KEYS_, ADDS = DS_ != 0;
    static constexpr int D = D_, ROWS = ROWS_, SLOTS = SLOTS_, FIRST = FIRST_, SECOND = SECOND_, WAYS = WAYS_, DS = DS_,
                         PASS = PASS_, HEAD = D; /* HEAD: columns of dQ */
    static constexpr int GROUPS = ROWS / 64, CONSUMERS = PASS ? 2 : GROUPS, OWNERS = WAYS & OWNER ? 1 : 0,
                         THREADS = 128 * (CONSUMERS + OWNERS + 1);
    /* Registers that producers and dQ's owner keep of what each thread starts with, and those that consumers get. */
    static constexpr int FEW = OWNERS || CONSUMERS > 2 ? 32
                               : ADDS                  ? 40
                                                       : 24,
                         SOME = 64,
                         MANY = OWNERS          ? (512 - FEW - SOME) / 2
                                : CONSUMERS > 2 ? 160
                                                : (504 - FEW) / 2;
    static constexpr bool LAST_FIRST = ADDS;          /* of the columns: see column_at() */
    static constexpr bool APART = ADDS && SLOTS == 1; /* V comes after K: see own_tile() */
    static constexpr bool NARROW = OWNERS && D > 96;  /* a warpgroup that has dK and dV has few registers beside them */
    static constexpr bool NUMBERS = KEYS && !ADDS;    /* L and delta are read as such, not multiplied: add_term() */
    static constexpr bool CAPS = !ADDS;               /* there may be a softcap: see way_for() */
    static constexpr bool SHARES = WAYS & SHARED;     /* a piece of work may have a part of the heads: part_sums */
    static constexpr bool SOON = !ADDS && SLOTS == 1; /* the next piece is known before the own tile is free */
    static constexpr bool BY_ROLE = SOON && PASS;     /* K and V come apart: each has a role that gives it back */
    static constexpr int WORKS = ADDS || SOON ? 2 : SLOTS; /* pieces of work that are known at a time */
    static constexpr int OWN_BYTES = tile_bytes<D, ROWS>, BYTES = tile_bytes<D, COLUMNS>;
    static constexpr int STAGE_AT = ADDS && D < 128 ? 1024 : 16; /* a multiple of this */
    /* Scores have a bias, a mask or ALiBi, for which there are so many bytes: backward_sm90_scores.cuh. Where these are too
     * few, the kernel LENDS the second tile of dS, or of dQ, or both, to a problem that needs more. DROPS: there is dropout,
     * whose code would cost the others. */
    static constexpr bool TERMS = false, DROPS = false, LENDS = false;
    static constexpr bool SPANS = false; /* what is known of the sequence of a piece lies beside it */
    static constexpr int SCORE_BYTES = 0;
};

template <class C> struct backward_shared {
    char own[C::SLOTS][2][C::OWN_BYTES];
    char first[C::FIRST][C::BYTES];
    char second[C::SECOND][C::BYTES];
    /* [64 queries][ROWS keys], in boxes of 64 keys; dS of a P that passes takes its place. */
    char dS[C::ADDS && !C::PASS ? C::DS : 1][C::ADDS && !C::PASS ? C::ROWS * 128 : 16];
    /* A bias or mask; where the last dS or the tile of dQ behind this are lent, with them. */
    char scores[C::SCORE_BYTES];
    float4 lent_stage[C::LENDS ? COLUMNS * C::HEAD / 4 : 0];
    uint4 terms[C::ADDS && !C::NUMBERS ? C::FIRST : 1][C::ADDS && !C::NUMBERS ? COLUMNS : 1],
        ones[3][C::ADDS && !C::NUMBERS ? 8 : 1]; /* see add_term(); memcheck wants 2 KB from each on */
    /* Tiles of dQ on their way to the sums. At D = 128 there is no room to align them. */
    alignas(C::STAGE_AT) float4 stage[C::ADDS && !C::LENDS ? 2 : 1][C::ADDS ? COLUMNS * C::HEAD / 4 : 1];
    uint4 pass[C::PASS][COLUMNS / 16 * 128];
    float L[C::NUMBERS ? C::FIRST : 1][C::NUMBERS ? COLUMNS : 1];
    float delta[C::NUMBERS ? C::SECOND : 1][C::NUMBERS ? COLUMNS : 1]; /* of the tiles in the rings */
    int care[C::KEYS ? C::FIRST : 1][C::GROUPS];                       /* see care_for() */
    int2 range[C::ADDS ? 1 : C::WORKS][C::ADDS ? 1 : C::ROWS];         /* of the columns that an own row sees */
    piece work[C::WORKS];
    uint64_t described[C::WORKS], own_full[C::WORKS], own_free[C::SLOTS];
    uint64_t first_full[C::FIRST], first_free[C::FIRST], second_full[C::SECOND], second_free[C::SECOND];
    uint64_t work_free[C::ADDS ? C::WORKS : 1], staged[C::ADDS ? 2 : 1], stage_free[C::ADDS ? 2 : 1];
    uint64_t pass_full[C::PASS ? 2 : 1], pass_free[C::PASS ? 2 : 1]; /* as those before, of even and odd tiles */
    uint64_t soon;                     /* the piece of work has but one more tile to ask for */
    uint64_t values_full, values_free; /* where V comes apart from K: it is there, and not needed any more */
    uint64_t landed[3], ds_full[C::ADDS ? C::DS : 1], ds_free[C::ADDS ? C::DS : 1];
};

template <class C> __device__ inline void init_barriers(backward_shared<C> &s)
{
    constexpr int PRODUCERS = C::ADDS ? 32 + 1 + 1 : C::KEYS ? 96 : 64; /* threads that read of the piece of work */
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::SLOTS; i++)
            barrier_init(shared_address(&s.own_free[i]),
                         128 * (C::BY_ROLE ? 1 : C::CONSUMERS + C::OWNERS) + (C::ADDS ? 0 : PRODUCERS));
        for (int i = 0; i < C::WORKS; i++) {
            barrier_init(shared_address(&s.described[i]), 32);
            barrier_init(shared_address(&s.own_full[i]), 32);
            if (C::ADDS)
                barrier_init(shared_address(&s.work_free[i]), 128 * (C::CONSUMERS + C::OWNERS) + PRODUCERS);
        }
        for (int i = 0; i < C::FIRST; i++) {
            barrier_init(shared_address(&s.first_full[i]), C::KEYS ? 33 : 1);
            barrier_init(shared_address(&s.first_free[i]), 128 * C::CONSUMERS);
        }
        for (int i = 0; i < C::SECOND; i++) {
            barrier_init(shared_address(&s.second_full[i]), C::NUMBERS ? 33 : 1);
            barrier_init(shared_address(&s.second_free[i]), 128 * C::CONSUMERS);
        }
        for (int i = 0; i < 3; i++)
            barrier_init(shared_address(&s.landed[i]), 1);
        for (int i = 0; i < C::DS; i++) {
            barrier_init(shared_address(&s.ds_full[i]), C::PASS ? 128 : 128 * C::CONSUMERS);
            barrier_init(shared_address(&s.ds_free[i]), 128);
        }
        if (C::PASS)
            for (int i = 0; i < 2; i++) {
                barrier_init(shared_address(&s.pass_full[i]), 128);
                barrier_init(shared_address(&s.pass_free[i]), 128);
            }
        if (C::SOON)
            barrier_init(shared_address(&s.soon), 1);
        if (C::ADDS || C::BY_ROLE) {
            barrier_init(shared_address(&s.values_full), 32);
            barrier_init(shared_address(&s.values_free), 128 * (C::BY_ROLE ? 1 : C::CONSUMERS));
        }
        if (C::ADDS) {
            for (int i = 0; i < 2; i++) {
                barrier_init(shared_address(&s.staged[i]), 128);
                barrier_init(shared_address(&s.stage_free[i]), 1);
            }
        }
        barrier_init_done();
    }
    if (C::ADDS && !C::NUMBERS &&
        threadIdx.x < 24) { /* eight times 1, 1, 1, 0 for the one and for the other, and zeros for both */
        const int which = threadIdx.x / 8;
        const uint2 one = make_uint2(0x3F803F80, 0x3F80), none = make_uint2(0, 0), x = which == 0 ? one : none,
                    y = which == 1 ? one : none;
        s.ones[which][threadIdx.x % 8] = make_uint4(x.x, x.y, y.x, y.y);
        fence_async();
    }
    __syncthreads();
}

/* Where piece n has K (0) and V (1). If there is room for one own tile only, the next K comes where V was, which is not
 * needed as long as K is, and the next V where K was. */
template <class C> __device__ inline char *own_tile(backward_shared<C> &s, int n, int which)
{
    return C::APART ? s.own[0][n + which & 1] : s.own[n % C::SLOTS][which];
}

/* A large lse and the bias that made it so must meet before either is rounded: such a lse is not among the terms of S. */
__device__ inline bool is_left_out(const args &a, float lse)
{
    return a.bias.data && fabsf(lse) > 4096.0f && fabsf(lse) < CUDART_INF_F;
}

/* Which of the tiles of dS, and of those of dQ that wait for their turn, a tile of queries has, and the parity of its turn
 * there. */
template <class C> __device__ inline int dS_slot(const backward_job &p, int tile)
{
    return C::LENDS ? tile & p.more_dS : tile % C::DS;
}

template <class C> __device__ inline int dS_parity(const backward_job &p, int tile)
{
    return (C::LENDS ? tile >> p.more_dS : tile / C::DS) & 1;
}

/* Where dQ LEAVES with the last keys, there are two of the latter. Where the kernel LENDS, they lie apart. */
template <class C, bool LEAVES> __device__ inline int stage_slot(const backward_job &p, int tile)
{
    return C::LENDS && !LEAVES ? tile & p.more_dQ : tile % 2;
}

template <class C, bool LEAVES> __device__ inline int stage_parity(const backward_job &p, int tile)
{
    return (C::LENDS && !LEAVES ? tile >> p.more_dQ : tile / 2) & 1;
}

/* Known to be the same in all lanes. */
__device__ inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }

#endif
