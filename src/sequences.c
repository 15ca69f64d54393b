/* The rules of batches whose sequences differ in length: padded, ragged, paged. First those that the descriptor alone
 * decides; at the end, for memory that can be read, those that lengths, offsets and pages have to keep.
 */
#include "internal.h"
#include "numbers.h"

#include <inttypes.h>
#include <math.h>

#define BAD(...) return heed_fail(HEED_BAD_ARGUMENT, __VA_ARGS__)

heed_status heed_check_integers(const char *name, const void *data, size_t bytes)
{
    if ((uintptr_t)data % bytes)
        BAD("%s: is %p, expected a multiple of %zu bytes", name, data, bytes);
    return HEED_OK;
}

static heed_status check_count(const char *name, int64_t count, const char *needs, int is_there)
{
    if (count < 0 || count > INT32_MAX)
        BAD("%s: is %" PRId64 ", expected 0 to %d", name, count, INT32_MAX);
    if (count && !is_there)
        BAD("%s: is %" PRId64 ", which means nothing without %s", name, count, needs);
    return HEED_OK;
}

/* Which forms the call takes, and that what it says of them agrees. Planning has no pointers: counts speak for them. */
heed_status heed_check_forms(heed_attention *a, int planning)
{
    static const int32_t nowhere[1];
    heed_status s;
    int counted = planning && a->sequences > 0 && !a->offsets_q && !a->offsets_k;
    if (planning && a->block_table_columns > 0 && !a->block_table)
        a->block_table = nowhere;
    if (planning && a->block_table && !a->lengths_k)
        a->lengths_k = nowhere;
    if (counted)
        a->offsets_q = nowhere;
    if (counted && !a->block_table)
        a->offsets_k = nowhere;

    if (a->offsets_q && a->lengths_q)
        BAD("lengths_q: given together with offsets_q, which says the lengths already");
    if (a->offsets_k && a->block_table)
        BAD("offsets_k: given together with block_table: keys are ragged or paged, not both");
    if (a->block_table && !a->lengths_k)
        BAD("lengths_k: is NULL, a block_table needs it");
    if (a->offsets_q && !a->offsets_k && !a->block_table)
        BAD("offsets_q: a ragged q needs a ragged k (offsets_k) or a paged one (block_table)");
    if ((s = check_count("sequences", a->sequences, "offsets_q or offsets_k", a->offsets_q || a->offsets_k)) ||
        (s = check_count("max_rows", a->max_rows, "offsets_q", a->offsets_q != NULL)) ||
        (s = check_count("max_keys", a->max_keys, "offsets_k", a->offsets_k != NULL)) ||
        (s = check_count("block_table_columns", a->block_table_columns, "block_table", a->block_table != NULL)) ||
        (s = check_count("block_table_stride", a->block_table_stride, "block_table", a->block_table != NULL)) ||
        (s = heed_check_integers("lengths_q", a->lengths_q, 4)) ||
        (s = heed_check_integers("lengths_k", a->lengths_k, 4)) ||
        (s = heed_check_integers("offsets_q", a->offsets_q, 4)) ||
        (s = heed_check_integers("offsets_k", a->offsets_k, 4)) ||
        (s = heed_check_integers("block_table", a->block_table, 4)))
        return s;
    if (a->block_table_stride == 0)
        a->block_table_stride = a->block_table_columns;
    if (a->block_table_stride < a->block_table_columns)
        BAD("block_table_stride: is %" PRId64 ", block_table_columns is %" PRId64, a->block_table_stride,
            a->block_table_columns);
    return HEED_OK;
}

/* Rows of a ragged tensor need somebody to belong to, and a bound on how long the longest sequence is. */
static heed_status check_ragged(const char *rows_are, int64_t rows, int64_t sequences, const char *bound, int64_t most)
{
    if (rows > 0 && sequences == 0)
        BAD("sequences: is 0, expected how many sequences the %" PRId64 " %s belong to", rows, rows_are);
    if (rows > 0 && most == 0)
        BAD("%s: is 0, expected the length of the longest sequence", bound);
    return HEED_OK;
}

static heed_status size_rows(heed_problem *p)
{
    const heed_attention *a = &p->a;
    p->B = a->q.shape[0];
    p->Sq = a->q.shape[2];
    if (a->offsets_q) {
        if (a->q.shape[0] != 1)
            BAD("q: batch is %" PRId64 ", expected 1 with offsets_q", a->q.shape[0]);
        p->B = a->sequences;
        p->Sq = a->max_rows;
        return check_ragged("rows of q", a->q.shape[2], a->sequences, "max_rows", a->max_rows);
    }
    return HEED_OK;
}

static heed_status size_keys(heed_problem *p)
{
    const heed_attention *a = &p->a;
    const int64_t *k = a->k.shape;
    p->Sk = k[2];
    if (a->block_table) {
        p->page = k[2];
        if (p->page < 1)
            BAD("k: page size is %" PRId64 ", expected 1 or more", p->page);
        if (__builtin_mul_overflow(a->block_table_columns, p->page, &p->Sk))
            BAD("block_table_columns: is %" PRId64 ", which times the page size of %" PRId64 " is over 63 bits",
                a->block_table_columns, p->page);
        return HEED_OK;
    }
    if (a->offsets_k) {
        if (k[0] != 1)
            BAD("k: batch is %" PRId64 ", expected 1 with offsets_k", k[0]);
        if (a->sequences != p->B)
            BAD("sequences: is %" PRId64 ", q has batch %" PRId64, a->sequences, p->B);
        p->Sk = a->max_keys;
        return check_ragged("keys of k", k[2], a->sequences, "max_keys", a->max_keys);
    }
    if (k[0] != p->B)
        BAD("k: batch is %" PRId64 ", q has %" PRId64, k[0], p->B);
    return HEED_OK;
}

heed_status heed_size_sequences(heed_problem *p)
{
    heed_status s = size_rows(p);
    return s ? s : size_keys(p);
}

/* ---- What only memory tells ------------------------------------------------------------------------------------- */

static heed_status check_offsets(const char *name, const int32_t *offsets, int64_t sequences, int64_t rows)
{
    if (offsets[0] < 0)
        BAD("%s[0]: is %d, expected 0 or more", name, offsets[0]);
    for (int64_t b = 0; b < sequences; b++)
        if (offsets[b + 1] < offsets[b])
            BAD("%s[%" PRId64 "]: is %d, less than the %d before it", name, b + 1, offsets[b + 1], offsets[b]);
    if (offsets[sequences] > rows)
        BAD("%s[%" PRId64 "]: is %d, there are %" PRId64 " rows in all", name, sequences, offsets[sequences], rows);
    return HEED_OK;
}

/* Each length: what `lengths` says, within what `offsets` has room for, else that room; and at most `most`. */
static heed_status check_each(const char *const names[3], const int32_t *lengths, const int32_t *offsets,
                              int64_t sequences, int64_t most)
{
    for (int64_t b = 0; b < sequences; b++) {
        int64_t room = offsets ? (int64_t)offsets[b + 1] - offsets[b] : most, length = lengths ? lengths[b] : room;
        if (length < 0 || length > room)
            BAD("%s[%" PRId64 "]: is %" PRId64 ", expected 0 to %" PRId64, names[0], b, length, room);
        if (length > most)
            BAD("%s: sequence %" PRId64 " has length %" PRId64 ", %s is %" PRId64, names[1], b, length, names[2], most);
    }
    return HEED_OK;
}

static heed_status check_pages(const heed_problem *p)
{
    const heed_attention *a = &p->a;
    for (int64_t b = 0; b < p->B; b++)
        for (int64_t column = 0; column * p->page < a->lengths_k[b]; column++) {
            int32_t page = a->block_table[b * a->block_table_stride + column];
            if (page < 0 || page >= a->k.shape[0])
                BAD("block_table: page %" PRId64 " of sequence %" PRId64 " is %d, k has %" PRId64 " pages", column, b,
                    page, a->k.shape[0]);
        }
    return HEED_OK;
}

heed_status heed_check_lengths(const heed_problem *p)
{
    static const char *const names_q[3] = { "lengths_q", "offsets_q", "max_rows" };
    static const char *const names_k[3] = { "lengths_k", "offsets_k", "max_keys" };
    const heed_attention *a = &p->a;
    heed_status s;
    if ((a->offsets_q && (s = check_offsets("offsets_q", a->offsets_q, p->B, a->q.shape[2]))) ||
        (a->offsets_k && (s = check_offsets("offsets_k", a->offsets_k, p->B, a->k.shape[2]))) ||
        (s = check_each(names_q, a->lengths_q, a->offsets_q, p->B, p->Sq)) ||
        (s = check_each(names_k, a->lengths_k, a->offsets_k, p->B, p->Sk)))
        return s;
    return p->page ? check_pages(p) : HEED_OK;
}

/* Rows of a ragged tensor that no sequence has. */
static void fill_strays(const heed_tensor *t, const int32_t *offsets, int64_t sequences, double value)
{
    if (!t->data || !offsets)
        return;
    for (int64_t h = 0; h < t->shape[1]; h++)
        for (int64_t i = 0; i < t->shape[2]; i++)
            if (i >= offsets[0] && i < offsets[sequences])
                i = offsets[sequences] - 1; /* and on behind them */
            else
                for (int64_t c = 0; c < t->shape[3]; c++)
                    heed_store(t->data, t->dtype, h * t->stride[1] + i * t->stride[2] + c * t->stride[3], value);
}

void heed_fill_strays(const heed_problem *p)
{
    const heed_attention *a = &p->a;
    const heed_gradient *g = &p->g;
    if (p->pass == HEED_FORWARD) {
        fill_strays(&a->o, a->offsets_q, p->B, 0);
        fill_strays(&a->lse, a->offsets_q, p->B, -INFINITY);
    } else if (!g->accumulate) {
        fill_strays(&g->d_q, a->offsets_q, p->B, 0);
        fill_strays(&g->d_k, a->offsets_k, p->B, 0);
        fill_strays(&g->d_v, a->offsets_k, p->B, 0);
    }
}
