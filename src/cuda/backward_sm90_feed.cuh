/* What feeds the kernels of the Hopper backward. Each owns some rows, whose results stay in registers, and meets
 * the other side of the problem in tiles of 64 columns:
 *
 *     kernel     own rows       A operands   meets      B operands   results
 *     dK, dV     keys           K, V         queries    Q, dO        dK = dS^T Q, dV = P^T dO
 *     dQ         queries        Q, dO        keys       K, V         dQ = dS K
 *
 * Both compute S (or its transpose) = A1 B1^T and dP = A2 B2^T with their own side as rows, so that P and dS are left
 * operands of the next products without leaving their lanes. The warps of one warpgroup produce: one takes pieces of
 * work from a counter, says in shared memory what they are and has the copy engine bring the own tiles, two bring the
 * rings of B1 and B2, one what goes with them; where dQ is summed, two do all of this and two see to the sums. The other
 * warpgroups consume. Rows are masked by their range of visible columns; a column that belongs to another sequence is
 * zeroed in shared memory before anyone multiplies with it. */
#ifndef HEED_CUDA_BACKWARD_SM90_FEED_CUH
#define HEED_CUDA_BACKWARD_SM90_FEED_CUH

#include "scores.cuh"
#include "tile_sm90.cuh"

constexpr int COLUMNS = 64;

/* P = 2^(c S - L), or with a softcap (CAPPED) 2^(out tanh(in S) - L). */
struct score_rule {
    float c, in, out, out_inverse;
};

/* Sums of dQ, [Hq][strips][16 width]. A strip is 16 rows as a warp holds them: 8 columns of all rows lie together, and of
 * these four floats of each lane, which are those of two columns and of the rows r and r + 8. Each sequence begins a
 * strip. at(): from `row` on, a multiple of 16. */
struct dq_sums {
    float *data; /* NULL: there are none */
    int strips, width;
    __device__ float *at(int head, int first_strip, int row) const
    {
        return data + ((int64_t)head * strips + first_strip + row / 16) * (16 * width);
    }
};

/* The kernels' argument. L = lse * log2(e) and delta are arrays [batches][Hq][pitch], a number for each row of q. */
struct backward_job {
    args a;
    tensor_map own[2], other[2], out[2]; /* out: of dK and dV, */
    bool sent[2];                        /* where they are of 16 bits: see sends() */
    dq_sums sums;
    int *turns; /* by place_of(): how many tiles of keys, of all that the sequence has, a tile of dQ is past; 0: none */
    const float *L, *delta;
    const uint4 *terms; /* of as many rows, where dQ is summed: both_terms() */
    int pitch;
    score_rule rule;
    const struct piece *pieces; /* by piece_at() */
    const int2 *ranges;         /* of the columns that an own row sees, ROWS for each piece */
    const int *lengths;         /* own rows of each sequence */
    int *counter;               /* of the pieces that are taken, from 0 */
    int count, tiles, together; /* tiles of the longest sequence; heads that are worked on at the same time */
    bool any_order;             /* dQ may be summed in: see keep_turns() */
    bool second;                /* the kernel before has waited for all that this one needs */
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
    int tile;   /* of the own rows, counted from the sequence's first */
    int turns;  /* where the sequence's first tile of queries stands among those that wait for turns, */
    int sums;   /* and its first strip of rows among the sums */
    int turn;   /* of the own rows to add to dQ; */
    int ranges; /* where those of the own rows begin */
    int alone;  /* from this tile of columns on, they are the first */
    int begin[3], end[3], inside[3], outside[3];
};

/* Where tile `tile` of sequence b stands in a table. Sequences may lie end to end, and each may begin a tile. */
__device__ inline int piece_at(const args &a, bool keys, int rows, int b, int tile)
{
    const int32_t *offsets = keys ? a.offsets_k : a.offsets_q;
    const int64_t memory_rows = keys ? a.k_rows : a.q_rows;
    const int64_t first = offsets ? clamp(offsets[b], 0, (int)memory_rows) : b * memory_rows;
    return (int)(first / rows) + b + tile;
}

/* Turns are so many numbers apart: those who ask for one again and again should not hold up the others. */
constexpr int TURN_APART = 8;

__device__ inline int place_of(const args &a, int tile, int head) { return (tile * a.Hq + head) * TURN_APART; }

/* Pieces of the keys or of the queries, in the workspace. */
struct piece_table {
    int *lengths;
    piece *pieces;
    int2 *ranges;
    int rows, tiles; /* of a piece, of the longest sequence */
    int grid;        /* the first column of a piece is a multiple of this */
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
    heed_status (*launch)(const backward_job &job, int blocks, const heed_exec *x);
};

/* The kernels of a backward: dK with dV and dQ, and where there is one for all three, that. */
struct backward_form {
    backward_kernel dkv, dq, all;
};

/* backward_sm90_keys.cu, backward_sm90_queries.cu. */
backward_kernel heed_sm90_dkv(int head_dim), heed_sm90_dq(int head_dim);

/* backward_sm90.cu. The whole backward. */
size_t heed_sm90_backward_bytes(const heed_problem *p, const backward_form &form);
heed_status heed_sm90_backward(const heed_problem *p, const backward_form &form, const heed_exec *x);

/* ---- Shared memory ----------------------------------------------------------------------------------------------- */

/* Where a warpgroup has all of dK and dV, and as far as it has registers: S of the next tile is computed beside dS
 * (EARLY), dK beside the next P (LATE), dS from P as it was before rounding (EXACT), and the next tile is looked at in
 * time (AHEAD). Where dQ is computed beside them, by one more warpgroup that does nothing else (OWNER). */
enum { EARLY = 1, LATE = 2, EXACT = 4, AHEAD = 8, OWNER = 16 };

/* KEYS: the own rows are keys. SLOTS own tiles and FIRST and SECOND stages of the rings, powers of two. WAYS: of the
 * above. DS: where dQ, too, is computed and added up in memory, so many tiles of dS pass between warpgroups. PASS:
 * tiles of P do. */
template <bool KEYS_, int D_, int ROWS_, int SLOTS_, int FIRST_, int SECOND_, int WAYS_ = 0, int DS_ = 0, int PASS_ = 0>
struct backward_shape {
    static constexpr bool KEYS = KEYS_, ADDS = DS_ != 0, PACED = ADDS; /* PACED: see begin_exponentials() */
    static constexpr int D = D_, ROWS = ROWS_, SLOTS = SLOTS_, FIRST = FIRST_, SECOND = SECOND_, WAYS = WAYS_, DS = DS_,
                         PASS = PASS_;
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
    static constexpr bool APART = ADDS && SLOTS == 1; /* V comes before K: as soon as dV is out of its place */
    static constexpr bool NARROW = OWNERS && D > 96;  /* a warpgroup that has dK and dV has few registers beside them */
    static constexpr bool NUMBERS = KEYS && !ADDS;    /* L and delta are read as such, not multiplied: add_term() */
    static constexpr int WORKS = ADDS ? 2 : SLOTS;    /* pieces of work that are known at a time */
    static constexpr int OWN_BYTES = tile_bytes<D, ROWS>, BYTES = tile_bytes<D, COLUMNS>;
};

/* Where V comes apart from K, what else is waited for: that dK of the piece before has left, and V. */
enum { GONE = 2, VALUES = 3 };

template <class C> struct backward_shared {
    char own[C::SLOTS][2][C::OWN_BYTES];
    char first[C::FIRST][C::BYTES];
    char second[C::SECOND][C::BYTES];
    char dS[C::ADDS ? C::DS : 1][C::ADDS ? C::ROWS * 128 : 16]; /* [64 queries][ROWS keys], in boxes of 64 keys */
    uint4 terms[C::ADDS ? C::FIRST : 1][C::ADDS ? COLUMNS : 1],
        ones[3][C::ADDS ? 8 : 1]; /* see add_term(); memcheck wants 2 KB from each on */
    float4 stage[C::ADDS ? 2 : 1][C::ADDS ? COLUMNS * C::D / 4 : 1]; /* tiles of dQ on their way to the sums */
    uint4 pass[C::PASS ? C::PASS : 1][C::PASS ? COLUMNS / 16 * 128 : 1];
    float L[C::NUMBERS ? C::FIRST : 1][C::NUMBERS ? COLUMNS : 1];
    float delta[C::NUMBERS ? C::SECOND : 1][C::NUMBERS ? COLUMNS : 1]; /* of the tiles in the rings */
    int care[C::KEYS ? C::FIRST : 1][C::GROUPS];                       /* see care_for() */
    int2 range[C::ADDS ? 1 : C::WORKS][C::ADDS ? 1 : C::ROWS];         /* of the columns that an own row sees */
    piece work[C::WORKS];
    uint64_t described[C::WORKS], own_full[C::SLOTS], own_free[C::SLOTS];
    uint64_t first_full[C::FIRST], first_free[C::FIRST], second_full[C::SECOND], second_free[C::SECOND];
    uint64_t work_free[C::ADDS ? C::WORKS : 1], staged[C::ADDS ? 2 : 1], stage_free[C::ADDS ? 2 : 1];
    uint64_t pass_full[C::PASS ? 2 : 1], pass_free[C::PASS ? 2 : 1]; /* as those before, of even and odd tiles */
    uint64_t leaving[C::APART ? 4 : 1]; /* dK and dV of a piece are ready to; and what follows them, see above */
    uint64_t landed[3], ds_full[C::ADDS ? C::DS : 1], ds_free[C::ADDS ? C::DS : 1];
};

template <class C> __device__ inline void init_barriers(backward_shared<C> &s)
{
    constexpr int PRODUCERS = C::ADDS ? 32 + 1 + 1 : C::KEYS ? 96 : 64; /* threads that read of the piece of work */
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::SLOTS; i++) {
            barrier_init(shared_address(&s.own_full[i]), 32);
            barrier_init(shared_address(&s.own_free[i]), 128 * (C::CONSUMERS + C::OWNERS) + (C::ADDS ? 0 : PRODUCERS));
        }
        for (int i = 0; i < C::WORKS; i++) {
            barrier_init(shared_address(&s.described[i]), 32);
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
            barrier_init(shared_address(&s.ds_full[i]), 128 * C::CONSUMERS);
            barrier_init(shared_address(&s.ds_free[i]), 128);
        }
        if (C::PASS)
            for (int i = 0; i < 2; i++) {
                barrier_init(shared_address(&s.pass_full[i]), 128);
                barrier_init(shared_address(&s.pass_free[i]), 128);
            }
        if (C::ADDS) {
            for (int i = 0; C::APART && i < 4; i++)
                barrier_init(shared_address(&s.leaving[i]), i < GONE ? 128 * C::CONSUMERS : 32);
            for (int i = 0; i < 2; i++) {
                barrier_init(shared_address(&s.staged[i]), 128);
                barrier_init(shared_address(&s.stage_free[i]), 1);
            }
        }
        barrier_init_done();
    }
    if (C::ADDS && threadIdx.x < 24) { /* eight times 1, 1, 1, 0 for the one and for the other, and zeros for both */
        const int which = threadIdx.x / 8;
        const uint2 one = make_uint2(0x3F803F80, 0x3F80), none = make_uint2(0, 0), x = which == 0 ? one : none,
                    y = which == 1 ? one : none;
        s.ones[which][threadIdx.x % 8] = make_uint4(x.x, x.y, y.x, y.y);
        fence_async();
    }
    __syncthreads();
}

/* Known to be the same in all lanes. */
__device__ inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }

/* Tiles of dS pass in a ring. A result may lie in two that follow each other: bytes from one to the next. */
template <class C> __device__ inline int dS_box(int tile)
{
    return ((tile + 1) % C::DS - tile % C::DS) * (C::ROWS * 128);
}

/* ---- The producer ------------------------------------------------------------------------------------------------ */

/* Which piece of work a number stands for: `together` heads at a time, and of these the longest rows first. Under a
 * causal mask the first keys meet most queries and the last queries most keys. */
template <class C> __device__ inline void find_piece(const backward_job &p, int number, int &b, int &head, int &tile)
{
    const int heads = C::KEYS ? p.a.Hk : p.a.Hq, all = p.a.B * heads;
    const int chunk = number / (p.together * p.tiles), left = number - chunk * p.together * p.tiles;
    const int width = min(p.together, all - chunk * p.together);
    tile = left / width;
    const int which = chunk * p.together + left - tile * width;
    b = which / heads, head = which - b * heads;
    if (!C::KEYS)
        tile = p.tiles - 1 - tile;
}

/* The first column of the tiles that own rows meet after those of `step` others. Heads that share keys meet a column one
 * after the other: else keys that meet fewer columns would be further ahead, with each head, of those whose turn is
 * before theirs. Where dQ is summed the last tile is first: then the tiles of keys that lie before come to each tile of
 * queries earlier, whatever the band, and nobody waits long. */
template <class C> __device__ inline int column_at(const piece &w, int step)
{
    return w.start + (C::ADDS ? w.tiles - 1 - step : step) * COLUMNS;
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
__device__ inline void ask_for_own(const backward_job &p, backward_shared<C> &s, int slot, uint32_t barrier,
                                   int first = 0, int last = 1)
{
    const piece &w = s.work[slot];
    arrive_expecting(barrier, (last - first + 1) * C::OWN_BYTES);
    for (int i = first; i <= last; i++)
        load_tile<C::D, C::ROWS>(shared_address(s.own[slot % C::SLOTS][i]), p.own[i], w.memory_row, w.head, w.batch,
                                 barrier);
}

/* Brings keys of which only so many belong to the sequence. Where their dS is summed, the others must not be there. */
template <class C> __device__ inline void bring_some_keys(const backward_job &p, backward_shared<C> &s, int n)
{
    const int slot = n % C::WORKS;
    const piece &w = s.work[slot];
    const uint32_t barrier = shared_address(&s.landed[2]);
    if (threadIdx.x % 32 == 0)
        ask_for_own(p, s, slot, barrier);
    wait(barrier, n & 1);
    clear_rows<C::ROWS, C::OWN_BYTES>(s.own[slot % C::SLOTS][0], w.rows);
    clear_rows<C::ROWS, C::OWN_BYTES>(s.own[slot % C::SLOTS][1], w.rows);
    fence_async();
    if (C::APART)
        arrive(shared_address(&s.leaving[VALUES]));
    arrive(shared_address(&s.own_full[slot % C::SLOTS]));
}

/* Whether dK (0) or dV (1) of a piece leaves by the copy engine: not where rows of its tile are another sequence's. */
template <class C> __device__ inline bool sends(const backward_job &p, const piece &w, int which)
{
    return p.sent[which] && !((p.a.lengths_k || p.a.offsets_k) && w.rows < C::ROWS);
}

/* Sends dK or dV of piece n out of boxes of 64 columns, `box` bytes apart, and waits until they have been read. */
template <class C>
__device__ inline void send(const backward_job &p, backward_shared<C> &s, int n, int which, const char *from, int box)
{
    const piece &w = s.work[n % C::WORKS];
    wait(shared_address(&s.leaving[which]), n & 1);
    if (threadIdx.x % 32 == 0 && sends<C>(p, w, which)) {
        const tensor_map &m = p.out[which];
        for (int i = 0; i * 64 < C::D; i++)
            store_box(shared_address(from) + i * box, m.map, i * 64, w.memory_row, w.head * m.head_on,
                      w.batch * m.batch_on);
        bulk_commit();
        bulk_wait_read();
    }
    __syncwarp();
}

template <class C> __device__ inline void send_values(const backward_job &p, backward_shared<C> &s, int n)
{
    send(p, s, n, 1, s.own[0][1], C::ROWS * 128);
}

/* tile: the first of the next piece. See leave(). */
template <class C> __device__ inline void send_keys(const backward_job &p, backward_shared<C> &s, int n, int tile)
{
    send(p, s, n, 0, s.dS[tile % C::DS], dS_box<C>(tile));
    arrive(shared_address(&s.leaving[GONE]));
}

/* Until piece n's own tile may be overwritten, or work that is done with the piece before may be counted as done. */
template <class C> __device__ inline void wait_own_free(backward_shared<C> &s, int n)
{
    wait(shared_address(&s.own_free[n % C::SLOTS]), n / C::SLOTS & 1 ^ 1);
}

/* Where L is this large, rounding may carry c S beyond it, and P must be kept from exceeding 1. */
__device__ inline bool is_large(float L) { return fabsf(L) > 65536.0f && fabsf(L) < CUDART_INF_F; }

/* What own rows need to know of a tile of columns: where it begins, or -1 where all of them see all of it and no L is
 * large, so that it may go the short way. */
__device__ inline int care_for(const piece &w, int group, int column, bool large)
{
    return !large && column >= w.inside[group] && column + COLUMNS <= w.outside[group] ? -1 : column;
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

/* Where L, delta and terms of a head's rows from `column` on stand. */
__device__ inline int64_t term_at(const backward_job &p, const piece &w, int head, int column)
{
    return (int64_t)(w.other_batch * p.a.Hq + head) * p.pitch + (w.other_row + column);
}

/* Where the columns are queries, what goes with each tile that a piece of work meets, asked for before there is room for
 * it: what it needs of care, and L and delta as numbers or as terms. Up to so many more tiles, from `step` of head h on.
 * The copy engine would want numbers at multiples of 16 bytes. */
template <class C>
__device__ inline void bring_terms(const backward_job &p, backward_shared<C> &s, const piece &w, int &h, int &step,
                                   int &tile, int more)
{
    const int lane = threadIdx.x % 32;
    for (; step < w.tiles && more; more--, tile++) {
        const int column = column_at<C>(w, step);
        const int64_t at = term_at(p, w, w.head * p.a.G + h, column) + lane;
        const int first = tile % C::FIRST, second = tile % C::SECOND, live = w.columns - column - lane;
        const auto describe = [&](bool large) {
            const bool any = p.a.softcap > 0 || __any_sync(~0u, large);
            wait(shared_address(&s.first_free[first]), tile / C::FIRST & 1 ^ 1);
            if (lane < C::GROUPS)
                s.care[first][lane] = care_for(w, lane, column, any);
        };
        if constexpr (C::NUMBERS) {
            const auto bring = [&](float *to, float x, float y, uint64_t *full) {
                to[lane] = x, to[lane + 32] = y;
                arrive(shared_address(full));
            };
            const float *L = p.L + at, *delta = p.delta + at;
            const float L0 = live > 0 ? L[0] : 0.0f, L1 = live > 32 ? L[32] : 0.0f;
            const float delta0 = live > 0 ? delta[0] : 0.0f, delta1 = live > 32 ? delta[32] : 0.0f;
            describe(is_large(L0) || is_large(L1));
            bring(s.L[first], L0, L1, &s.first_full[first]);
            wait(shared_address(&s.second_free[second]), tile / C::SECOND & 1 ^ 1);
            bring(s.delta[second], delta0, delta1, &s.second_full[second]);
        } else {
            const uint4 none = make_uint4(0, 0, 0, 0), *const terms = p.terms + at;
            const uint4 x = live > 0 ? terms[0] : none, y = live > 32 ? terms[32] : none;
            describe(has_large(p, x) || has_large(p, y));
            s.terms[first][lane] = x, s.terms[first][lane + 32] = y;
            fence_async();
            arrive(shared_address(&s.first_full[first]));
        }
        if (++h == p.a.G)
            h = 0, step++;
    }
}

/* Says what piece n is: `at` in the table. */
template <class C>
__device__ inline void describe_piece(const backward_job &p, backward_shared<C> &s, int n, int at, int head)
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
    if (lane == 0)
        w.head = head;
    __syncwarp();
    arrive(shared_address(&s.described[slot]));
}

/* The first producer warp: takes pieces of work and brings their own tiles. Where dQ is summed, the terms, too, before it
 * takes the next: who takes early and starts late would keep others waiting for their turn. If there is room for one own
 * tile only, the first columns of the next piece arrive while it is still in use. */
template <class C> __device__ inline void bring_own(const backward_job &p, backward_shared<C> &s)
{
    const int lane = threadIdx.x % 32;
    for (int n = 0, met = 0;;) {
        const int slot = n % C::WORKS;
        piece &w = s.work[slot];
        const uint32_t full = shared_address(&s.own_full[n % C::SLOTS]);
        if (C::ADDS)
            wait(shared_address(&s.work_free[slot]), n / C::WORKS & 1 ^ 1);
        const int number = uniform(lane ? 0 : atomicAdd(p.counter, 1));
        if (!C::ADDS)
            wait_own_free(s, n);
        if (number >= p.count) {
            if (lane == 0)
                w.exists = 0;
            arrive(shared_address(&s.described[slot]));
            if constexpr (C::APART)
                if (n)
                    send_values(p, s, n - 1), send_keys(p, s, n - 1, met);
            if (C::ADDS)
                wait_own_free(s, n);
            arrive(full);
            return;
        }
        int b, head, tile;
        find_piece<C>(p, number, b, head, tile);
        if (tile * C::ROWS >= p.lengths[b])
            continue;
        describe_piece(p, s, n, piece_at(p.a, C::KEYS, C::ROWS, b, tile), head);
        const bool some = C::ADDS && (p.a.lengths_k || p.a.offsets_k) && w.rows < C::ROWS;
        const int before = met; /* the first tile after the last piece */
        int h = 0, step = 0;
        if constexpr (C::APART) {
            bring_terms<C>(p, s, w, h, step, met, 1);
            if (n)
                send_values(p, s, n - 1);
            if (!some && lane == 0)
                ask_for_own(p, s, slot, shared_address(&s.leaving[VALUES]), 1);
            else if (!some)
                arrive(shared_address(&s.leaving[VALUES]));
        }
        if (C::ADDS)
            wait_own_free(s, n);
        if (some)
            bring_some_keys(p, s, n);
        else if (lane == 0) {
            arrive(shared_address(&s.landed[2])); /* whose phase says how many pieces there were */
            ask_for_own(p, s, slot, full, 0, C::APART ? 0 : 1);
        } else
            arrive(full);
        if constexpr (C::APART) {
            bring_terms<C>(p, s, w, h, step, met, 1);
            if (n)
                send_keys(p, s, n - 1, before);
        }
        if (C::ADDS)
            bring_terms<C>(p, s, w, h, step, met, -1);
        n++;
    }
}

/* One tile of the columns' side into its ring. live: rows of it that belong to the sequence. */
template <class C, int RING>
__device__ inline void bring_tile(const backward_job &p, backward_shared<C> &s, const piece &w, int head, int column,
                                  int tile, int live)
{
    constexpr int STAGES = RING ? C::SECOND : C::FIRST;
    const int stage = tile % STAGES;
    char *const to = RING ? s.second[stage] : s.first[stage];
    const uint32_t full = shared_address(RING ? &s.second_full[stage] : &s.first_full[stage]);
    const uint32_t barrier = live < COLUMNS ? shared_address(&s.landed[RING]) : full;
    wait(shared_address(RING ? &s.second_free[stage] : &s.first_free[stage]), tile / STAGES & 1 ^ 1);
    if (threadIdx.x % 32 == 0) {
        if (live >= COLUMNS)
            arrive(shared_address(&s.landed[RING])); /* whose phase says how many tiles there were */
        arrive_expecting(barrier, C::BYTES);
        load_tile<C::D, COLUMNS>(shared_address(to), p.other[RING], w.other_row + column, head, w.other_batch, barrier);
    }
    if (live >= COLUMNS)
        return;
    wait(barrier, tile & 1);
    clear_rows<COLUMNS, C::BYTES>(to, live);
    fence_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        arrive(full);
}

/* The second and third: the columns' side, one ring each; or the second both, where the third keeps the turns. */
template <class C, int RING> __device__ inline void bring_columns(const backward_job &p, backward_shared<C> &s)
{
    const args &a = p.a;
    const bool cuts = C::KEYS ? a.lengths_q || a.offsets_q : a.lengths_k || a.offsets_k;
    for (int n = 0, tile = 0;; n++) {
        const int slot = n % C::WORKS;
        const piece &w = s.work[slot];
        wait(shared_address(&s.described[slot]), n / C::WORKS & 1);
        if (!w.exists)
            return;
        for (int h = 0, step = 0; step < w.tiles; tile++) {
            const int column = column_at<C>(w, step), live = cuts ? w.columns - column : COLUMNS;
            const int head = C::KEYS ? w.head * a.G + h : w.head / a.G;
            bring_tile<C, RING>(p, s, w, head, column, tile, live);
            if (C::ADDS)
                bring_tile<C, 1>(p, s, w, head, column, tile, live);
            if (!C::KEYS || ++h == a.G)
                h = 0, step++;
        }
        if (!C::ADDS)
            wait_own_free(s, n);
        arrive(shared_address(C::ADDS ? &s.work_free[slot] : &s.own_free[slot]));
    }
}

/* The fourth, where dQ is not summed. */
template <class C> __device__ inline void bring_all_terms(const backward_job &p, backward_shared<C> &s)
{
    for (int n = 0, tile = 0;; n++) {
        const int slot = n % C::SLOTS;
        const piece &w = s.work[slot];
        wait(shared_address(&s.described[slot]), n / C::SLOTS & 1);
        if (!w.exists)
            return;
        int h = 0, step = 0;
        bring_terms<C>(p, s, w, h, step, tile, -1);
        arrive(shared_address(&s.own_free[slot]));
    }
}

/* Has a tile's dQ, of head h and the rows from `row` on, added to the sums, when those of all keys before have been, and
 * tells the next. In any order, it is enough that the first has stored its own, as nobody zeroes the sums. */
template <class C>
__device__ inline void take_turn(const backward_job &p, backward_shared<C> &s, const piece &w, int tile, int h, int row)
{
    const bool first = row / COLUMNS >= w.alone;
    int *const turn = p.turns + place_of(p.a, w.turns + row / COLUMNS, h);
    while (!first && (p.any_order ? see_turn(turn) == 0 : see_turn(turn) != w.turn))
        ;
    fence_async_global();
    wait(shared_address(&s.staged[tile % 2]), tile / 2 & 1);
    const uint32_t stage = shared_address(s.stage[tile % 2]);
    const int bytes = min(COLUMNS, (w.columns - row + 15) / 16 * 16) * C::D * (int)sizeof(float);
    if (first)
        bulk_store(p.sums.at(h, w.sums, row), stage, bytes);
    else
        bulk_add(p.sums.at(h, w.sums, row), stage, bytes);
    bulk_commit();
    bulk_wait_read();
    arrive(shared_address(&s.stage_free[tile % 2]));
    if (p.any_order && !first)
        return;
    bulk_wait();
    fence_async_global();
    pass_turn(turn, w.tile + 1);
}

/* Where dQ is summed, the third and the fourth, for even and odd tiles: it takes longer to take turns than to compute
 * another tile. So a row's sum is always taken in the order of the keys. The keys before are in work or done, as pieces
 * of work are taken in their order: somebody always has no one to wait for. */
template <class C> __device__ inline void keep_turns(const backward_job &p, backward_shared<C> &s, int odd)
{
    if (threadIdx.x % 32)
        return;
    for (int n = 0, tile = 0;; n++) {
        const int slot = n % C::WORKS;
        const piece &w = s.work[slot];
        wait(shared_address(&s.described[slot]), n / C::WORKS & 1);
        if (!w.exists)
            return;
        for (int h = 0, step = 0; step < w.tiles; tile++) {
            if (tile % 2 == odd)
                take_turn<C>(p, s, w, tile, w.head * p.a.G + h, column_at<C>(w, step));
            if (++h == p.a.G)
                h = 0, step++;
        }
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
    else if (C::ADDS)
        keep_turns<C>(p, s, warp - 2);
    else if (warp == 2)
        bring_columns<C, 1>(p, s);
    else if (C::KEYS)
        bring_all_terms<C>(p, s);
}

#endif
