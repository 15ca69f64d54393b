/* Forward in plain fp32 arithmetic, for every problem there is: O = softmax(S) V by the online softmax. A block owns
 * 128 rows of one head, or 64 of a wide one, and a slice of V's columns, and meets the keys a tile at a time; a head
 * with more than one slice computes its scores once for each. */
#include "launch.cuh"
#include "scores_fp32.cuh"

template <int WIDTH> using shared = shared_fp32<WIDTH>;

/* The threads of a row are neighbours. */
template <int GROUPS> __device__ static float row_max(float x)
{
#pragma unroll
    for (int lane = 2; lane < 2 * GROUPS; lane *= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}

template <int GROUPS> __device__ static float row_sum(float x)
{
#pragma unroll
    for (int lane = 2; lane < 2 * GROUPS; lane *= 2)
        x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

/* S = factor S where the band shows the key. */
template <int WIDTH> __device__ static void hide_outside(float (&S)[8][8], shared<WIDTH> &s, int n0, float factor)
{
    const int *low = s.low + s.row_of(0), *high = s.high + s.row_of(0), key = n0 + s.column_of(0);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const int first = low[s.rows_down(r)] - key, end = high[s.rows_down(r)] - key;
#pragma unroll
        for (int c = 0; c < 8; c++)
            S[r][c] = s.columns_on(c) >= first && s.columns_on(c) < end ? S[r][c] * factor : -CUDART_INF_F;
    }
}

/* S = factor S, P = exp(S - m'), l = l a + sum P, with a = exp(m - m') to rescale O by. l is the thread's own part of
 * the sum; m lies in shared memory, read and written by the neighbours that share a row. */
template <int WIDTH>
__device__ static void softmax_step(float (&S)[8][8], shared<WIDTH> &s, float factor, float *m, float (&l)[8],
                                    float (&rescale)[8])
{
    const bool first = s.t() == 0;
    m += s.row_of(0);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const float before = m[s.rows_down(r)];
        float most = before, sum = 0.0f;
#pragma unroll
        for (int c = 0; c < 8; c++) {
            S[r][c] *= factor;
            most = fmaxf(most, S[r][c]);
        }
        most = row_max<s.CG>(most);
        const float base = most == -CUDART_INF_F ? 0.0f : most;
        rescale[r] = exp2_fast((before - base) * LOG2E);
#pragma unroll
        for (int c = 0; c < 8; c++) {
            S[r][c] = exp2_fast((S[r][c] - base) * LOG2E);
            sum += S[r][c];
        }
        __syncwarp(); /* all have read it */
        if (first)
            m[s.rows_down(r)] = most;
        l[r] = l[r] * rescale[r] + sum;
    }
}

template <int WIDTH>
__global__ void __launch_bounds__(THREADS, 2)
    forward_portable(const __grid_constant__ args a, int tiles, int slices, head_groups groups)
{
    extern __shared__ float4 memory[];
    auto &s = *(shared<WIDTH> *)memory;
    constexpr int ROWS = s.ROWS, COLUMNS = s.COLUMNS;
    const int slice = blockIdx.x % slices * WIDTH;
    const place own(blockIdx.x / slices, tiles, groups);
    const int i0 = (tiles - 1 - own.tile) * ROWS; /* under a causal band the longest come first */
    meet_head(s, a, own.head / a.Hq, own.head % a.Hq);
    const span &q = s.sequence;
    const head &x = s.of;
    if (i0 >= q.rows)
        return;
    const int rows = min(ROWS, q.rows - i0);
    if (threadIdx.x < ROWS) {
        const int i = i0 + threadIdx.x;
        s.row[0][threadIdx.x] = row_or_zeros(a.q, i < q.rows ? row_at(a.q, q.q_batch, x.h, q.q_row + i) : NOWHERE);
        s.lse[threadIdx.x] = -CUDART_INF_F;
        band_of_row(a, q, min(i, q.rows - 1), s.low[threadIdx.x], s.high[threadIdx.x]);
    }
    __syncthreads();
    float *m = s.lse, O[8][8], l[8];
    clear(O);
#pragma unroll
    for (int r = 0; r < 8; r++)
        l[r] = 0.0f;

    const rows_of Q = { a.q, s.row[0], a.D }, K = { a.k, s.column[0], a.D }, V = { a.v, s.column[1], a.Dv };
    const int first = min(s.low[0], s.low[rows - 1]), last = max(s.high[0], s.high[rows - 1]);
    const int inside = max(s.low[0], s.low[rows - 1]), outside = min(s.high[0], s.high[rows - 1]);
    int slot = 0;
    for (int n0 = first / 8 * 8; n0 < last; n0 += COLUMNS) {
        if (threadIdx.x < COLUMNS) {
            const int n = n0 + threadIdx.x;
            s.column[0][threadIdx.x] = row_or_zeros(a.k, n < q.keys ? key_at(a, q, a.k, x.hk, n) : NOWHERE);
            s.column[1][threadIdx.x] = row_or_zeros(a.v, n < q.keys ? key_at(a, q, a.v, x.hk, n) : NOWHERE);
        }
        __syncthreads();
        float S[8][8], factor = a.scale, rescale[8];
        clear(S);
        start_rows(s, slot, Q, K);
        auto then = [&](int free) { start_slice(s, free, V, 0, slice); };
        if (WIDTH == 64 || last - n0 > COLUMNS / 2)
            multiply_rows<16>(S, s, slot, Q, K, then); /* S  = Q K^T */
        else
            multiply_rows<16, 4>(S, s, slot, Q, K, then); /* the rest is hidden */
        const bool whole = n0 >= inside && n0 + COLUMNS <= outside;
        if (!whole && !has_extras(a)) {
            hide_outside(S, s, n0, factor);
            factor = 1.0f;
        } else if (has_extras(a)) {
            write_tile(s, S);
            if (scores_in_fours(a, q))
                for_each_query<false, 4>(s, i0, n0, [&](auto &some) { finish_scores(some, a.scale, a, q, x, whole); });
            else
                for_each_query<false, 1>(s, i0, n0, [&](auto &some) { score(some, a.scale, a, q, x, whole); });
            read_tile(s, S);
            factor = 1.0f;
        }
        softmax_step(S, s, factor, m, l, rescale);
        if (a.drop_below) {
            const uint64_t kept = draw_all<WIDTH, false>(a, q, x, i0, n0);
#pragma unroll
            for (int r = 0; r < 8; r++)
#pragma unroll
                for (int c = 0; c < 8; c++)
                    S[r][c] = kept >> (8 * r + c) & 1 ? S[r][c] * a.keep_scale : 0.0f;
        }
        write_tile(s, S);
        float PV[8][8]; /* summed apart: over many keys that is the more accurate */
        clear(PV);
        multiply_tile<16>(PV, s, slot, V, slice, last - n0); /* O  = a O + P V */
#pragma unroll
        for (int r = 0; r < 8; r++)
#pragma unroll
            for (int c = 0; c < 8; c++)
                O[r][c] = fmaf(O[r][c], rescale[r ^ 1], PV[r][c]);
    }

    __syncthreads(); /* m is that of the last tile */
    const float sink = a.sink.data ? load(a.sink, row_at(a.sink, 0, x.h, 0)) : -CUDART_INF_F;
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const int i = i0 + s.row_of(r);
        const float own = m[s.row_of(r)];
        float sum = row_sum<s.CG>(l[r]), most = fmaxf(own, sink), rescale = 0.0f;
        if (sum != 0.0f) { /* else the row saw no key */
            rescale = expf(own - most);
            sum = sum * rescale + expf(sink - most);
            rescale /= sum;
        }
#pragma unroll
        for (int c = 0; c < 8; c++)
            O[r ^ 1][c] *= rescale;
        if (a.lse.data && slice == 0 && s.t() == 0 && i < q.rows)
            store(a.lse, row_at(a.lse, q.q_batch, x.h, q.q_row + i), sum == 0.0f ? -CUDART_INF_F : most + logf(sum));
    }
    store_slice(O, s, a.o, slice, a.Dv, false,
                [&](int row) { return i0 + row < q.rows ? row_at(a.o, q.q_batch, x.h, q.q_row + i0 + row) : NOWHERE; });
}

template <int WIDTH> static heed_status run(const args &a, const heed_plan *plan, const heed_exec *x)
{
    const head_groups groups((int64_t)a.Hq * a.B, heads_at_once(plan), is_banded(a) ? 3 : 0);
    int64_t tiles = tiles_of(a.Sq, shared<WIDTH>::ROWS), slices = tiles_of(a.Dv, WIDTH);
    return launch(forward_portable<WIDTH>, tiles * slices * a.Hq * a.B, THREADS, sizeof(shared<WIDTH>), x, a,
                  (int)tiles, (int)slices, groups);
}

size_t heed_forward_workspace_portable(const heed_problem *p, const heed_plan *plan)
{
    (void)p, (void)plan;
    return 0;
}

heed_status heed_forward_portable(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    prologue call(p, x);
    if (call.status)
        return call.status;
    return call.a.Dv <= 64 ? run<64>(call.a, plan, x) : run<128>(call.a, plan, x);
}
