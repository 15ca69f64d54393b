/* Operations on whole rows: delta, the merge of two partial results, the sink's gradient, and filling padding. Each is
 * one pass over its tensors, bound by memory; sums are taken in a fixed order, and in fp64: delta is a difference of large
 * sums. */
#include "launch.cuh"

constexpr int WARPS = 8;

struct rows_shape {
    int64_t heads, rows, count; /* count: batch * heads * rows */
    int width;
};

struct place {
    int64_t b, h, i;
};

/* Row number `row` of all. */
__device__ static place place_of(const rows_shape &n, int64_t row)
{
    place p;
    if (n.count <= UINT32_MAX) { /* the rule; dividing 64 bits takes a hundred instructions */
        const unsigned r = (unsigned)row / (unsigned)n.rows;
        p.i = (unsigned)row - r * (unsigned)n.rows;
        p.b = r / (unsigned)n.heads;
        p.h = r - (unsigned)p.b * (unsigned)n.heads;
    } else {
        p.i = row % n.rows;
        p.h = row / n.rows % n.heads;
        p.b = row / n.rows / n.heads;
    }
    return p;
}

__device__ static int64_t row_at(const view &t, const place &p) { return row_at(t, p.b, p.h, p.i); }

/* ---- Delta ------------------------------------------------------------------------------------------------------- */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int BLOCKS = 4; /* on a multiprocessor: Turing has no more threads */
#else
constexpr int BLOCKS = 6;
#endif

/* Eight lanes for each row, by PIECES of 16 bytes of type T or element by element. With few registers, so that many rows are
 * on their way at a time. */
template <class T, bool PIECES>
__global__ void __launch_bounds__(32 * WARPS, PIECES ? BLOCKS : 4)
    delta_rows(const __grid_constant__ view o, const __grid_constant__ view d_o, const __grid_constant__ view d_lse,
               const __grid_constant__ view delta, rows_shape n)
{
    const int64_t row = (int64_t)blockIdx.x * (4 * WARPS) + threadIdx.x / 8;
    const int lane = threadIdx.x % 8;
    double sum = 0;
    place p = {};
    if (row < n.count) {
        p = place_of(n, row);
        const int64_t x_at = row_at(o, p), y_at = row_at(d_o, p);
        constexpr int EACH = PIECES ? 16 / sizeof(T) : 1;
#pragma unroll 2
        for (int c = lane * EACH; c < n.width; c += 8 * EACH) {
            if constexpr (PIECES) {
                const uint4 piece[2] = { *(const uint4 *)((const T *)o.data + x_at + c),
                                         *(const uint4 *)((const T *)d_o.data + y_at + c) };
                const T *const x = (const T *)&piece[0], *const y = (const T *)&piece[1];
#pragma unroll
                for (int e = 0; e < EACH; e++)
                    sum += (double)(float)x[e] * (float)y[e];
            } else
                sum += (double)load(o, x_at + c * o.stride[3]) * load(d_o, y_at + c * d_o.stride[3]);
        }
    }
#pragma unroll
    for (int other = 4; other; other /= 2)
        sum += __shfl_xor_sync(~0u, sum, other);
    if (lane || row >= n.count)
        return;
    if (d_lse.data)
        sum -= load(d_lse, row_at(d_lse, p));
    store(delta, row_at(delta, p), (float)sum);
}

static heed_status launch_delta(const view &o, const view &d_o, const view &d_lse, const view &delta,
                                const int64_t shape[4], const heed_exec *x)
{
    rows_shape n = { shape[1], shape[2], shape[0] * shape[1] * shape[2], (int)shape[3] };
    const bool pieces = o.vector && d_o.vector && o.dtype == d_o.dtype && shape[3] % (o.dtype == HEED_F32 ? 4 : 8) == 0;
    const auto kernel = !pieces               ? delta_rows<float, false>
                        : o.dtype == HEED_F32 ? delta_rows<float, true>
                        : o.dtype == HEED_F16 ? delta_rows<__half, true>
                                              : delta_rows<__nv_bfloat16, true>;
    return launch(kernel, tiles_of(n.count, 4 * WARPS), 32 * WARPS, 0, x, o, d_o, d_lse, delta, n);
}

/* ---- Merge ------------------------------------------------------------------------------------------------------- */

__global__ void merge_rows(const __grid_constant__ view o, const __grid_constant__ view lse,
                           const __grid_constant__ view o2, const __grid_constant__ view lse2, rows_shape n)
{
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= n.count)
        return;
    const place p = place_of(n, row);
    int64_t lse_at = row_at(lse, p), o_at = row_at(o, p), o2_at = row_at(o2, p);
    double first = load(lse, lse_at), second = load(lse2, row_at(lse2, p));
    if (second == -CUDART_INF) /* that part saw no key; what its o holds does not matter */
        return;
    double m = fmax(first, second), w = exp(first - m), w2 = exp(second - m);
    for (int c = threadIdx.x % 32; c < n.width; c += 32) {
        int64_t at = o_at + c * o.stride[3];
        float x2 = load(o2, o2_at + c * o2.stride[3]);
        store(o, at, w == 0 ? x2 : (float)((w * load(o, at) + w2 * x2) / (w + w2)));
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        store(lse, lse_at, (float)(m + log(w + w2)));
}

struct part_results {
    int count;                    /* of parts */
    const float *o, *most, *sums; /* [part][row]; sums NULL: o is divided already, and most is lse */
    int64_t rows;
    int columns; /* of o */
};

/* Joins what parts of the keys gave for a row. A block has WARPS rows, a warp for each, or one, of which each warp has every
 * WARPSth 32 parts. A lane has EACH columns. What there is to be summed is asked for before it is known what it weighs: there
 * may be few rows, and nothing to do meanwhile. Which parts are summed together does not depend on how many follow that have
 * seen nothing. */
template <int EACH, bool ALONE>
__global__ void __launch_bounds__(32 * WARPS)
    merge_parts(const __grid_constant__ args a, const __grid_constant__ part_results p)
{
    constexpr int AT_ONCE = EACH > 1 ? 16 : 32, SHARE = ALONE ? 1 : WARPS;
    __shared__ float all[SHARE][32 * EACH + 1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = ALONE ? 0 : warp;
    const int c = (int)(blockIdx.y * 32 + lane) * EACH;
    const int64_t row = ALONE ? (int64_t)blockIdx.x * WARPS + warp : blockIdx.x, step = p.rows * p.columns;
    let_next_start();
    if (!a.uniform) /* else nothing of a sequence is in memory */
        wait_for_last();
    const rows_shape n = { a.Hq, a.Sq, p.rows, p.columns };
    const place at = place_of(n, min(row, n.count - 1));
    const span s = span_of(a, (int)at.b);
    wait_for_last();
    if (row >= n.count || at.i >= s.rows)
        return;

    float value[AT_ONCE][EACH], most, part_sum;
    auto ask_values = [&](int first) {
        const float *from = p.o + first * step + row * p.columns + min(c, p.columns - EACH);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++, from += step) {
            if (k % 4 == 0 && first + k >= p.count)
                break;
            if (first + k >= p.count) {
#pragma unroll
                for (int e = 0; e < EACH; e++)
                    value[k][e] = 0.0f;
            } else if constexpr (EACH == 4)
                *(float4 *)value[k] = *(const float4 *)from;
            else
                value[k][0] = *from;
        }
    };
    auto ask_weights = [&](int first) {
        const bool exists = first + lane < p.count;
        most = exists ? p.most[(first + lane) * p.rows + row] : -CUDART_INF_F;
        part_sum = !exists ? 0.0f : p.sums ? p.sums[(first + lane) * p.rows + row] : 1.0f;
    };
    ask_values(share * 32);
    ask_weights(share * 32);
    const float sink = a.sink.data ? load(a.sink, row_at(a.sink, 0, at.h, 0)) : -CUDART_INF_F;
    float m = most, x[EACH] = {}, sum = 0.0f, weight_of_lane = 0.0f;
    if constexpr (!ALONE)
#pragma unroll 8
        for (int part = lane; part < p.count; part += 32)
            m = fmaxf(m, p.most[part * p.rows + row]);
#pragma unroll
    for (int other = 16; other; other /= 2)
        m = fmaxf(m, __shfl_xor_sync(~0u, m, other));
    const bool seen = m != -CUDART_INF_F;
    m = fmaxf(m, sink);
    for (int first = share * 32; seen && first < p.count;) {
        if (first % 32 == 0)
            weight_of_lane = expf(most - m), sum += weight_of_lane * part_sum;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            if (k % 4 == 0 && first + k >= p.count)
                break;
            const float weight = __shfl_sync(~0u, weight_of_lane, (first + k) % 32);
#pragma unroll
            for (int e = 0; e < EACH; e++)
                x[e] += weight == 0.0f ? 0.0f : weight * value[k][e];
        }
        first += AT_ONCE;
        if (first % 32 == 0) {
            first += (SHARE - 1) * 32;
            if (ALONE || first >= p.count)
                break;
            ask_weights(first);
        }
        ask_values(first);
    }
#pragma unroll
    for (int other = 16; other; other /= 2)
        sum += __shfl_xor_sync(~0u, sum, other);
    if constexpr (!ALONE) {
#pragma unroll
        for (int e = 0; e < EACH; e++)
            all[warp][lane * EACH + e] = x[e];
        all[warp][32 * EACH] = sum;
        __syncthreads();
        if (warp)
            return;
        for (int other = 1; other < WARPS; other++) {
#pragma unroll
            for (int e = 0; e < EACH; e++)
                x[e] += all[other][lane * EACH + e];
            sum += all[other][32 * EACH];
        }
    }
    sum += seen ? expf(sink - m) : 0.0f;
    const int64_t to = row_at(a.o, s.q_batch, at.h, s.q_row + at.i);
#pragma unroll
    for (int e = 0; e < EACH; e++)
        if (c + e < p.columns)
            store(a.o, to + (c + e) * a.o.stride[3], seen ? x[e] / sum : 0.0f);
    if (a.lse.data && c == 0)
        store(a.lse, row_at(a.lse, s.q_batch, at.h, s.q_row + at.i), seen ? m + logf(sum) : -CUDART_INF_F);
}

heed_status heed_cuda_merge_parts(const args &a, int parts, const float *o, const float *lse, const float *sums,
                                  const heed_plan *plan, const heed_exec *x)
{
    const part_results all = { parts, o, lse, sums, (int64_t)a.B * a.Hq * a.Sq, a.Dv };
    const bool alone = parts <= 32; /* many such rows are met with fewer instructions, few by more warps */
    const bool fours = alone && all.rows >= 8 * plan->device.units && a.Dv % 4 == 0;
    const auto kernel = fours ? merge_parts<4, true> : alone ? merge_parts<1, true> : merge_parts<1, false>;
    const dim3 blocks((unsigned)(alone ? tiles_of(all.rows, WARPS) : all.rows),
                      (unsigned)tiles_of(a.Dv, fours ? 128 : 32));
    return launch_early(kernel, blocks, dim3(32 * WARPS), 0, plan, x, a, all);
}

/* ---- The sink's gradient ----------------------------------------------------------------------------------------- */

/* d_sink = -sum over batch and rows of exp(sink - lse) delta. One block for each head. */
__global__ void __launch_bounds__(256) sink_gradient(const __grid_constant__ args a)
{
    __shared__ double sums[256];
    const int h = blockIdx.x;
    const float sink = load(a.sink, row_at(a.sink, 0, h, 0));
    double sum = 0;
    for (int b = 0; b < a.B; b++) {
        const span s = span_of(a, b);
        for (int i = threadIdx.x; i < s.rows; i += 256) {
            float lse = load(a.lse, row_at(a.lse, s.q_batch, h, s.q_row + i));
            if (lse != -CUDART_INF_F)
                sum -= exp(fmin((double)sink - lse, 0.0)) * load(a.delta, row_at(a.delta, s.q_batch, h, s.q_row + i));
        }
    }
    sums[threadIdx.x] = sum;
    for (int half = 128; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0)
        store(a.d_sink, row_at(a.d_sink, 0, h, 0), (float)sums[0]);
}

heed_status heed_cuda_sink_gradient(const args &a, const heed_exec *x)
{
    return a.d_sink.data ? launch(sink_gradient, a.Hq, 256, 0, x, a) : HEED_OK;
}

/* ---- Fill -------------------------------------------------------------------------------------------------------- */

/* A tensor and what to set it to; count is 0 where there is none. A tensor without gaps is so many pieces of 16 bytes,
 * whatever the order of its dimensions. */
struct filling {
    view t;
    rows_shape n;
    float value;
    int64_t pieces; /* 0: row by row */
    uint32_t bits;  /* of two elements of 16 bits or one of 32 */
};

/* Two at a time, as a launch takes longer than most of them. */
__global__ void fill(const __grid_constant__ filling first, const __grid_constant__ filling second)
{
    const filling &f = blockIdx.y ? second : first;
    for (int64_t i = (int64_t)blockIdx.x * (32 * WARPS) + threadIdx.x; i < f.pieces;
         i += (int64_t)gridDim.x * (32 * WARPS))
        ((uint4 *)f.t.data)[i] = make_uint4(f.bits, f.bits, f.bits, f.bits);
    if (f.pieces)
        return;
    for (int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; row < f.n.count;
         row += (int64_t)gridDim.x * WARPS) {
        int64_t at = row_at(f.t, place_of(f.n, row));
        for (int c = threadIdx.x % 32; c < f.n.width; c += 32)
            store(f.t, at + c * f.t.stride[3], f.value);
    }
}

/* Whether its elements lie side by side: taken by growing stride, each dimension begins where the ones before end. */
static bool is_dense(const view &t, const int64_t shape[4])
{
    int64_t end = 1;
    for (int dimensions = 0; dimensions < 4; dimensions++) {
        int next = 0;
        while (next < 4 && (shape[next] == 1 || t.stride[next] != end))
            next++;
        if (next < 4)
            end *= shape[next];
    }
    return end == shape[0] * shape[1] * shape[2] * shape[3];
}

static filling filling_of(const view &t, const int64_t shape[4], float value)
{
    const int64_t count = t.data ? shape[0] * shape[1] * shape[2] : 0;
    filling f = { t, { shape[1], shape[2], count, (int)shape[3] }, value, 0, 0 };
    const int64_t bytes = count * shape[3] * (t.dtype == HEED_F32 ? 4 : 2);
    if ((value == 0.0f || t.dtype == HEED_F32) && is_dense(t, shape) && bytes % 16 == 0 && (uintptr_t)t.data % 16 == 0)
        f.pieces = bytes / 16, memcpy(&f.bits, &value, sizeof value);
    return f;
}

static heed_status fill_both(const filling &first, const filling &second, const heed_exec *x)
{
    const int64_t one = first.pieces ? first.pieces / 32 : first.n.count,
                  other = second.pieces ? second.pieces / 32 : second.n.count;
    const int64_t blocks = HEED_MAX(HEED_MIN(tiles_of(HEED_MAX(one, other), WARPS), 16384), 1);
    void *arguments[] = { (void *)&first, (void *)&second };
    return heed_cuda_launch_grid((const void *)fill, dim3((unsigned)blocks, second.n.count ? 2 : 1), dim3(32 * WARPS),
                                 0, false, x, arguments);
}

heed_status heed_cuda_fill(const view &t, const int64_t shape[4], float value, const heed_exec *x)
{
    return !t.data ? HEED_OK : fill_both(filling_of(t, shape, value), filling(), x);
}

/* ---- Before the kernels ------------------------------------------------------------------------------------------ */

heed_status heed_cuda_prepare_forward(const heed_problem *p, const args &a, const heed_exec *x)
{
    if (!a.lengths_q && !a.offsets_q)
        return HEED_OK;
    return fill_both(filling_of(a.o, p->a.o.shape, 0.0f), filling_of(a.lse, p->a.lse.shape, -INFINITY), x);
}

size_t heed_cuda_delta_bytes(const heed_problem *p)
{
    const int64_t *shape = p->a.q.shape;
    return p->g.delta.data ? 0 : (size_t)(shape[0] * shape[1] * shape[2]) * sizeof(float);
}

heed_status heed_cuda_prepare_backward(const heed_problem *p, args *a, const heed_exec *x, bool gaps)
{
    heed_status status = HEED_OK;
    if (!a->delta.data) {
        const int64_t *shape = p->g.d_o.shape;
        a->delta.data = (char *)x->workspace;
        a->delta.dtype = HEED_F32;
        a->delta.stride[0] = shape[1] * shape[2];
        a->delta.stride[1] = shape[2];
        a->delta.stride[2] = 1;
        a->delta.stride[3] = 1;
        status = launch_delta(a->o, a->d_o, a->d_lse, a->delta, shape, x);
    }
    if (a->accumulate)
        return status;
    if (!status && (a->lengths_q || a->offsets_q))
        status = heed_cuda_fill(a->d_q, p->g.d_q.shape, 0.0f, x);
    if (!status && (a->lengths_k || a->offsets_k || (gaps && (a->col_step != 1 || a->col)))) /* padding, and the gaps */
        status = fill_both(filling_of(a->d_k, p->g.d_k.shape, 0.0f), filling_of(a->d_v, p->g.d_v.shape, 0.0f), x);
    return status;
}

static int wants_delta(const heed_problem *p) { return p->g.d_sink.data || p->g.d_bias.data; }

size_t heed_cuda_others_bytes(const heed_problem *p) { return wants_delta(p) ? heed_cuda_delta_bytes(p) : 0; }

heed_status heed_cuda_prepare_others(const heed_problem *p, args *a, const heed_exec *x, bool gaps)
{
    char *const given = a->delta.data;
    if (!given && !wants_delta(p))
        a->delta.data = heed_stand_in; /* so that nobody computes it */
    heed_status status = heed_cuda_prepare_backward(p, a, x, gaps);
    if (!status)
        status = heed_cuda_sink_gradient(*a, x);
    if (!status)
        status = heed_cuda_bias_gradient(*a, x);
    a->delta.data = given;
    return status;
}

/* ---- Facts of each row ------------------------------------------------------------------------------------------- */

__global__ void row_facts(const __grid_constant__ args a, rows_shape n, float unit, float2 *facts)
{
    const int64_t row = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (row >= n.count)
        return;
    const place p = place_of(n, row);
    const float lse = load(a.lse, row_at(a.lse, p));
    float term = lse * unit;
    if (term == term)
        term = fminf(fmaxf(term, -3.4e38f), 3.4e38f);
    facts[row] = lse == -CUDART_INF_F ? make_float2(CUDART_INF_F, 0.0f)
                                      : make_float2(term, load(a.delta, row_at(a.delta, p)));
}

size_t heed_cuda_facts_bytes(const heed_problem *p)
{
    const int64_t *shape = p->a.q.shape;
    return ((size_t)(shape[0] * shape[1] * shape[2]) * sizeof(float2) + 15) / 16 * 16;
}

heed_status heed_cuda_row_facts(const args &a, float unit, float2 *facts, const heed_exec *x)
{
    rows_shape n = { a.Hq, a.q_rows, (a.offsets_q ? 1 : a.B) * (int64_t)a.Hq * a.q_rows, 1 };
    return launch(row_facts, tiles_of(n.count, 256), 256, 0, x, a, n, unit, facts);
}

/* ---- heed_merge and heed_delta ----------------------------------------------------------------------------------- */

heed_status heed_merge_cuda(const heed_tensor tensors[4], const heed_exec *x)
{
    on_device device(x->device);
    const int64_t *shape = tensors[0].shape;
    rows_shape n = { shape[1], shape[2], shape[0] * shape[1] * shape[2], (int)shape[3] };
    return device.status
               ? device.status
               : launch(merge_rows, tiles_of(n.count, WARPS), 32 * WARPS, 0, x, heed_cuda_view(tensors[0]),
                        heed_cuda_view(tensors[1]), heed_cuda_view(tensors[2]), heed_cuda_view(tensors[3]), n);
}

heed_status heed_delta_cuda(const heed_tensor tensors[4], const heed_exec *x)
{
    on_device device(x->device);
    return device.status ? device.status
                         : launch_delta(heed_cuda_view(tensors[0]), heed_cuda_view(tensors[1]),
                                        heed_cuda_view(tensors[2]), heed_cuda_view(tensors[3]), tensors[0].shape, x);
}
