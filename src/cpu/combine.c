/* The two small operations on whole tensors: folding two partial results together, and delta. Rows are independent, so
 * the number of threads changes nothing; arithmetic is in double and each result is rounded once.
 *
 *     merge   w = exp(lse - m), w2 = exp(lse2 - m), m = max(lse, lse2)
 *             o = (w o + w2 o2) / (w + w2)      lse = m + log(w + w2)
 *     delta   dO . o - dlse
 */
#include "internal.h"
#include "numbers.h"

static int64_t row_at(const heed_tensor *t, const int64_t shape[4], int64_t row)
{
    int64_t i = row % shape[2], h = row / shape[2] % shape[1], b = row / shape[2] / shape[1];
    return b * t->stride[0] + h * t->stride[1] + i * t->stride[2];
}

static double load(const heed_tensor *t, int64_t index) { return heed_load(t->data, t->dtype, index); }

/* Rows are taken in pieces of this many columns. fp32 and bf16, of which partial results and their rows of dO mostly
 * are, have loops that compilers turn into vector instructions. */
enum { PIECE = 64 };

/* Columns [c, c + n) of a row that begins at `at`. */
static void load_piece(double to[PIECE], const heed_tensor *t, int64_t at, int64_t c, int64_t n)
{
    int packed = t->stride[3] == 1;
    if (packed && t->dtype == HEED_F32)
        for (int64_t i = 0; i < n; i++)
            to[i] = ((const float *)t->data)[at + c + i];
    else if (packed && t->dtype == HEED_BF16)
        for (int64_t i = 0; i < n; i++)
            to[i] = heed_bf16_to_f32(((const uint16_t *)t->data)[at + c + i]);
    else
        for (int64_t i = 0; i < n; i++)
            to[i] = load(t, at + (c + i) * t->stride[3]);
}

static void store_piece(const heed_tensor *t, int64_t at, int64_t c, int64_t n, const double from[PIECE])
{
    if (t->stride[3] == 1 && t->dtype == HEED_F32)
        for (int64_t i = 0; i < n; i++)
            ((float *)t->data)[at + c + i] = (float)from[i];
    else
        for (int64_t i = 0; i < n; i++)
            heed_store(t->data, t->dtype, at + (c + i) * t->stride[3], from[i]);
}

static void merge_row(const heed_tensor tensors[4], int64_t row)
{
    const heed_tensor *o = &tensors[0], *lse = &tensors[1], *o2 = &tensors[2], *lse2 = &tensors[3];
    int64_t lse_at = row_at(lse, o->shape, row), o_at = row_at(o, o->shape, row), o2_at = row_at(o2, o->shape, row);
    double a = load(lse, lse_at), a2 = load(lse2, row_at(lse2, o->shape, row));
    if (a2 == -INFINITY) /* that part saw no key; what its o holds does not matter */
        return;
    double m = a > a2 ? a : a2, w = exp(a - m), w2 = exp(a2 - m), share = w / (w + w2), share2 = w2 / (w + w2);
    for (int64_t c = 0; c < o->shape[3]; c += PIECE) {
        double x[PIECE], x2[PIECE];
        int64_t n = HEED_MIN(o->shape[3] - c, PIECE);
        load_piece(x2, o2, o2_at, c, n);
        if (a != -INFINITY) {
            load_piece(x, o, o_at, c, n);
            for (int64_t i = 0; i < n; i++)
                x2[i] = share * x[i] + share2 * x2[i];
        }
        store_piece(o, o_at, c, n, x2);
    }
    heed_store(lse->data, lse->dtype, lse_at, m + log(w + w2));
}

static void delta_row(const heed_tensor tensors[4], int64_t row)
{
    const heed_tensor *o = &tensors[0], *d_o = &tensors[1], *d_lse = &tensors[2], *delta = &tensors[3];
    int64_t o_at = row_at(o, o->shape, row), d_o_at = row_at(d_o, o->shape, row);
    double x[PIECE], y[PIECE], sums[PIECE] = { 0 }, sum = 0;
    for (int64_t c = 0; c < o->shape[3]; c += PIECE) {
        int64_t n = HEED_MIN(o->shape[3] - c, PIECE);
        load_piece(x, o, o_at, c, n);
        load_piece(y, d_o, d_o_at, c, n);
        for (int64_t i = 0; i < n; i++)
            sums[i] += x[i] * y[i];
    }
    for (int i = 0; i < PIECE; i++)
        sum += sums[i];
    if (d_lse->data)
        sum -= load(d_lse, row_at(d_lse, o->shape, row));
    heed_store(delta->data, delta->dtype, row_at(delta, o->shape, row), sum);
}

static void for_each_row(const heed_tensor tensors[4], int threads, void (*visit)(const heed_tensor *, int64_t))
{
    const int64_t *shape = tensors[0].shape, rows = shape[0] * shape[1] * shape[2];
    if (threads <= 1) {
        for (int64_t row = 0; row < rows; row++)
            visit(tensors, row);
        return;
    }
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static)
#endif
    for (int64_t row = 0; row < rows; row++)
        visit(tensors, row);
}

void heed_merge_cpu(const heed_tensor tensors[4], int threads) { for_each_row(tensors, threads, merge_row); }

void heed_delta_cpu(const heed_tensor tensors[4], int threads) { for_each_row(tensors, threads, delta_row); }
