/* The gradient of a bias in plain fp32 arithmetic, where dbias_mma.cu does not take it: a block owns a 128 x 64 tile of it and
 * meets every pair that this is broadcast to. */
#include "differentiate_fp32.cuh"
#include "launch.cuh"

/* dS of the tile at keys n0, from offsets and facts in shared memory, into X. then(slot): see multiply_rows(). */
template <int WIDTH, class Then>
__device__ static void query_tile(float (&X)[8][8], shared<WIDTH> &s, int &slot, const args &a, int i0, int n0,
                                  bool whole, bool to_scores, Then then)
{
    const span &q = s.sequence;
    const rows_of Q = { a.q, s.row[0], a.D }, K = { a.k, s.column[0], a.D };
    const rows_of dO = { a.d_o, s.row[1], a.Dv }, V = { a.v, s.column[1], a.Dv };
    if (threadIdx.x < s.COLUMNS) {
        const int n = n0 + threadIdx.x;
        s.column[0][threadIdx.x] = row_or_zeros(a.k, n < q.keys ? key_at(a, q, a.k, s.of.hk, n) : NOWHERE);
        s.column[1][threadIdx.x] = row_or_zeros(a.v, n < q.keys ? key_at(a, q, a.v, s.of.hk, n) : NOWHERE);
    }
    __syncthreads();
    start_rows(s, slot, Q, K);
    clear(X);
    multiply_rows<PART>(X, s, slot, Q, K, [](int) {}); /* S  = Q K^T */
    start_rows(s, slot, dO, V);
    write_tile(s, X);
    clear(X);
    multiply_rows<PART>(X, s, slot, dO, V, then); /* dP = dO V^T */
    differentiate<false>(X, s, a, i0, n0, whole, to_scores);
}

template <int WIDTH>
__device__ static void meet_queries(shared<WIDTH> &s, const args &a, const span &q, const head &x, int i0)
{
    __syncthreads();
    if (threadIdx.x < s.ROWS) {
        const int i = i0 + threadIdx.x;
        const row_facts f = facts_of(a, q, x, i);
        s.row[0][threadIdx.x] = row_or_zeros(a.q, i < q.rows ? row_at(a.q, q.q_batch, x.h, q.q_row + i) : NOWHERE);
        s.row[1][threadIdx.x] = row_or_zeros(a.d_o, i < q.rows ? row_at(a.d_o, q.q_batch, x.h, q.q_row + i) : NOWHERE);
        s.lse[threadIdx.x] = f.lse;
        s.delta[threadIdx.x] = f.delta;
        band_of_row(a, q, min(i, q.rows - 1), s.low[threadIdx.x], s.high[threadIdx.x]);
    }
    __syncthreads();
}

/* Where bias has one row, or one column, for all: those of a tile are summed too, in the shared tile, and the tiles of
 * the whole row or column are met by the one block that owns it. */
template <int WIDTH>
__device__ static void store_bias(const args &a, shared<WIDTH> &s, int b, int h, int i0, int n0, int keys)
{
    constexpr int ROWS = s.ROWS, COLUMNS = s.COLUMNS;
    const bool one_row = a.bias_shape[2] == 1, one_column = a.bias_shape[3] == 1;
    const int rows = one_row ? 1 : min(ROWS, a.bias_shape[2] - i0), columns = one_column ? 1 : min(COLUMNS, keys - n0);
    for (int e = threadIdx.x; e < rows * columns; e += blockDim.x) {
        const int row = e / columns, column = e % columns;
        float sum = 0.0f;
        for (int c = one_column ? 0 : column; c < (one_column ? COLUMNS : column + 1); c++)
            for (int r = one_row ? 0 : row; r < (one_row ? ROWS : row + 1); r++)
                sum += s.tile[c * s.LINE + (r ^ 1)];
        int64_t j = one_column ? 0 : a.col + (n0 + column) * a.col_step;
        store(a.d_bias, row_at(a.d_bias, b, h, one_row ? 0 : i0 + row) + j * a.d_bias.stride[3], sum);
    }
}

constexpr int BIAS_WIDTH = 64;

__global__ void __launch_bounds__(THREADS, 2)
    dbias_portable(const __grid_constant__ args a, int tiles, int key_tiles, int keys)
{
    extern __shared__ float4 memory[];
    auto &s = *(shared<BIAS_WIDTH> *)memory;
    constexpr int ROWS = s.ROWS, COLUMNS = s.COLUMNS;
    __shared__ int own_b, own_h, own_i, own_n; /* looked at too rarely for registers */
    const bool one_row = a.bias_shape[2] == 1, one_column = a.bias_shape[3] == 1;
    const bool one_head = a.bias_shape[1] == 1, one_batch = a.bias_shape[0] == 1;
    if (threadIdx.x == 0) {
        unsigned index = blockIdx.x;
        own_n = index % key_tiles * COLUMNS, own_i = index / key_tiles % tiles * ROWS;
        index = index / key_tiles / tiles;
        own_h = index % a.bias_shape[1], own_b = index / a.bias_shape[1];
    }
    __syncthreads();

    const span &q = s.sequence;
    const head &x = s.of;
    float sum[8][8];
    clear(sum);
    for (int b = own_b; b < (one_batch ? a.B : own_b + 1); b++) {
        for (int h = own_h; h < (one_head ? a.Hq : own_h + 1); h++) {
            meet_head(s, a, b, h);
            for (int i0 = own_i; i0 < (one_row ? q.rows : min(q.rows, own_i + 1)); i0 += ROWS) {
                meet_queries(s, a, q, x, i0);
                for (int n0 = own_n; n0 < (one_column ? q.keys : min(q.keys, own_n + 1)); n0 += COLUMNS) {
                    const int end = min(ROWS, q.rows - i0) - 1;
                    if (n0 >= max(s.high[0], s.high[end]) || n0 + COLUMNS <= min(s.low[0], s.low[end]))
                        continue;
                    float dS[8][8];
                    int slot = 0; /* not kept from tile to tile: registers are few */
                    query_tile(dS, s, slot, a, i0, n0, false, false, [](int) {});
#pragma unroll
                    for (int r = 0; r < 8; r++)
#pragma unroll
                        for (int c = 0; c < 8; c++)
                            sum[r][c] += dS[r][c];
                    __syncthreads();
                }
            }
        }
    }
    write_tile(s, sum);
    __syncthreads();
    store_bias(a, s, own_b, own_h, own_i, own_n, keys);
}

heed_status heed_cuda_bias_gradient_portable(const args &a, int keys, const heed_exec *x)
{
    typedef shared<BIAS_WIDTH> own;
    const int64_t tiles = tiles_of(a.bias_shape[2], own::ROWS);
    const int64_t key_tiles = a.bias_shape[3] == 1 ? 1 : tiles_of(keys, own::COLUMNS);
    return launch(dbias_portable, (int64_t)a.bias_shape[0] * a.bias_shape[1] * tiles * key_tiles, THREADS, sizeof(own),
                  x, a, (int)tiles, (int)key_tiles, keys);
}
