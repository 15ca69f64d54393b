/* Forward in plain fp32 arithmetic, for every problem there is: O = softmax(S) V by the online softmax. A block owns
 * 128 rows of one head and a slice of V's columns, and meets the keys 64 at a time; a head with more than one slice
 * computes its scores once for each. */
#include "launch.cuh"
#include "tile_fp32.cuh"

/* One row of a thread's scores. */
template <int GROUPS> struct own_row {
    static constexpr int R = 1, C = COLUMNS / GROUPS;
    static constexpr bool EXACT = true;
    float (&X)[C];
    int i, n, first, last;
    __device__ float &at(int, int c) { return X[c]; }
    __device__ int row(int) const { return i; }
    static __device__ constexpr int apart(int c) { return column_of<GROUPS>(0, c); }
    __device__ int key(int c) const { return n + apart(c); }
    __device__ int low(int) const { return first; }
    __device__ int high(int) const { return last; }
};

/* The threads of a row are neighbours. */
template <int GROUPS> __device__ static float row_max(float x)
{
#pragma unroll
    for (int lane = 1; lane < GROUPS; lane *= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}

template <int GROUPS> __device__ static float row_sum(float x)
{
#pragma unroll
    for (int lane = 1; lane < GROUPS; lane *= 2)
        x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

/* P = exp(S - m'), l = l a + sum P, O = O a, with a = exp(m - m'); of one row. */
template <int GROUPS, int N>
__device__ static void softmax_step(float (&S)[COLUMNS / GROUPS], float &m, float &l, float (&O)[N])
{
    const float before = m, sum_before = l;
    float most = before, sum = 0.0f;
#pragma unroll
    for (int c = 0; c < COLUMNS / GROUPS; c++)
        most = fmaxf(most, S[c]);
    most = row_max<GROUPS>(most);
    const float base = most == -CUDART_INF_F ? 0.0f : most, rescale = expf(before - base);
#pragma unroll
    for (int c = 0; c < COLUMNS / GROUPS; c++) {
        S[c] = expf(S[c] - base);
        sum += S[c];
    }
    sum = row_sum<GROUPS>(sum);
    __syncwarp();
    if (threadIdx.x % GROUPS == 0)
        m = most, l = sum_before * rescale + sum;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < N; n++)
        O[n] *= rescale;
}

template <int GROUPS> __device__ static void drop(own_row<GROUPS> &t, const args &a, const span &s, const head &x)
{
    const uint32_t kept = draw(t, 0, a, s, x, seed_of(a));
#pragma unroll
    for (int c = 0; c < COLUMNS / GROUPS; c++)
        t.X[c] = kept >> c & 1 ? t.X[c] * a.keep_scale : 0.0f;
}

template <int GROUPS, int WIDTH>
__global__ void __launch_bounds__(16 * GROUPS, GROUPS == 8 ? 2 : 1)
    forward_portable(const __grid_constant__ args a, int tiles, int slices)
{
    extern __shared__ float4 memory[];
    auto &s = *(shared_fp32<GROUPS, WIDTH> *)memory;
    unsigned index = blockIdx.x;
    const int slice = index % slices * WIDTH;
    index /= slices;
    const int i0 = (tiles - 1 - index % tiles) * ROWS; /* under a causal band the longest come first */
    index /= tiles;
    meet_head(s, a, index / a.Hq, index % a.Hq);
    const span &q = s.sequence;
    const head &x = s.of;
    if (i0 >= q.rows)
        return;
    const int rows = min(ROWS, q.rows - i0);
    float *m = s.lse, *l = s.delta; /* of each row; written and read by the neighbours that share it */
    if (threadIdx.x < ROWS) {
        const int i = i0 + threadIdx.x;
        s.row[0][threadIdx.x] = i < q.rows ? row_at(a.q, q.q_batch, x.h, q.q_row + i) : NOWHERE;
        band_of_row(a, q, min(i, q.rows - 1), s.low[threadIdx.x], s.high[threadIdx.x]);
        m[threadIdx.x] = -CUDART_INF_F, l[threadIdx.x] = 0.0f;
    }
    __syncthreads();
    float O[8][WIDTH / GROUPS];
    clear(O);

    const int first = min(s.low[0], s.low[rows - 1]), last = max(s.high[0], s.high[rows - 1]);
    const int inside = max(s.low[0], s.low[rows - 1]), outside = min(s.high[0], s.high[rows - 1]);
    for (int n0 = first / 8 * 8; n0 < last; n0 += COLUMNS) {
        if (threadIdx.x < COLUMNS) {
            int n = n0 + threadIdx.x;
            s.column[0][threadIdx.x] = n < q.keys ? key_at(a, q, a.k, x.hk, n) : NOWHERE;
            s.column[1][threadIdx.x] = n < q.keys ? key_at(a, q, a.v, x.hk, n) : NOWHERE;
        }
        __syncthreads();
        float S[8][COLUMNS / GROUPS];
        clear(S);
        multiply_rows(S, s, a.q, s.row[0], a.k, s.column[0], a.D); /* S  = Q K^T */
        const bool whole = n0 >= inside && n0 + COLUMNS <= outside;
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const int row = row_of(group_row<GROUPS>(), r);
            own_row<GROUPS> own = { S[r], i0 + row, n0 + group_column<GROUPS>(), s.low[row], s.high[row] };
            score(own, a, q, x, whole);
            softmax_step<GROUPS>(S[r], m[row], l[row], O[r]);
            if (a.drop_below)
                drop(own, a, q, x);
        }
        write_tile(s, S);
        float PV[8][WIDTH / GROUPS]; /* summed apart: over many keys that is the more accurate */
        clear(PV);
        multiply_tile(PV, s, a.v, s.column[1], slice, a.Dv); /* O += P V */
#pragma unroll
        for (int r = 0; r < 8; r++)
#pragma unroll
            for (int n = 0; n < WIDTH / GROUPS; n++)
                O[r][n] += PV[r][n];
    }

    const float sink = a.sink.data ? load(a.sink, row_at(a.sink, 0, x.h, 0)) : -CUDART_INF_F;
    const int g = group_row<GROUPS>();
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const int row = row_of(g, r);
        float sum = l[row], most = fmaxf(m[row], sink), rescale = 0.0f;
        if (sum != 0.0f) { /* else the row saw no key */
            rescale = expf(m[row] - most);
            sum = sum * rescale + expf(sink - most);
            rescale /= sum;
        }
#pragma unroll
        for (int n = 0; n < WIDTH / GROUPS; n++)
            O[r][n] *= rescale;
        const int i_own = i0 + row;
        if (a.lse.data && slice == 0 && threadIdx.x % GROUPS == 0 && i_own < q.rows)
            store(a.lse, row_at(a.lse, q.q_batch, x.h, q.q_row + i_own),
                  sum == 0.0f ? -CUDART_INF_F : most + logf(sum));
    }
    store_slice<GROUPS, WIDTH>(O, a.o, slice, a.Dv, false, [&](int row) {
        return i0 + row < q.rows ? row_at(a.o, q.q_batch, x.h, q.q_row + i0 + row) : NOWHERE;
    });
}

template <int GROUPS, int WIDTH> static heed_status run(const args &a, const heed_exec *x)
{
    int64_t tiles = tiles_of(a.Sq, ROWS), slices = tiles_of(a.Dv, WIDTH);
    return launch(forward_portable<GROUPS, WIDTH>, tiles * slices * a.Hq * a.B, 16 * GROUPS,
                  sizeof(shared_fp32<GROUPS, WIDTH>), x, a, (int)tiles, (int)slices);
}

size_t heed_forward_workspace_portable(const heed_problem *p, const heed_plan *plan)
{
    (void)p, (void)plan;
    return 0;
}

heed_status heed_forward_portable(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    (void)plan;
    on_device device(x->device);
    args a;
    heed_status status = device.status;
    if (!status)
        status = heed_cuda_args(p, &a);
    if (!status)
        status = heed_cuda_prepare_forward(p, a, x);
    if (status)
        return status;
    return a.Dv <= 64 ? run<8, 64>(a, x) : run<16, 128>(a, x);
}
