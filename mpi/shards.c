#include "ring.h"

static int64_t begin_of(int64_t tokens, int parts, int part)
{
    int64_t longer = tokens % parts;
    return tokens / parts * part + (part < longer ? part : longer);
}

int64_t heed_mpi_range(const heed_mpi *m, int64_t tokens, int ranks, int rank, int number, int64_t *first,
                       int64_t *step)
{
    *first = 0, *step = 1;
    if (m->shards == HEED_MPI_STRIPED) {
        *first = rank, *step = ranks;
        return number || rank >= tokens ? 0 : (tokens - rank + ranks - 1) / ranks;
    }
    int zigzag = m->shards == HEED_MPI_ZIGZAG, parts = zigzag ? 2 * ranks : ranks;
    if (number > zigzag)
        return 0;
    int part = number ? parts - 1 - rank : rank;
    *first = begin_of(tokens, parts, part);
    return begin_of(tokens, parts, part + 1) - *first;
}

range *ranges_of(const ring *c, range *table, int rank)
{
    return table + (size_t)((rank + c->ranks) % c->ranks) * RANGES;
}

int64_t count_of(const ring *c, range *table, int rank)
{
    const range *of = ranges_of(c, table, rank);
    return of[0].count + of[1].count;
}

heed_status lay_out(const ring *c, const call_words *words, int keys, range *table, int64_t *total)
{
    int64_t tokens = 0, first = 0;
    for (int r = 0; r < c->ranks; r++)
        tokens += keys ? words[r].keys : words[r].rows;
    for (int r = 0; r < c->ranks; r++) {
        int64_t have = keys ? words[r].keys : words[r].rows, want = 0;
        for (int n = 0; n < RANGES; n++) {
            range *to = &table[r * RANGES + n];
            to->count = heed_mpi_range(c->m, tokens, c->ranks, r, n, &to->first, &to->step);
            to->at = want, want += to->count;
        }
        if (c->m->shards == HEED_MPI_CONTIGUOUS)
            table[r * RANGES] = (range){ first, 1, want = have, 0 };
        if (have != want)
            return fail(HEED_BAD_ARGUMENT, "%s: rank %d has %lld tokens; of %lld over %d ranks it has %lld",
                        keys ? "k" : "q", r, (long long)have, (long long)tokens, c->ranks, (long long)want);
        first += have;
    }
    *total = tokens;
    return HEED_OK;
}

int sees(const ring *c, const range *q, const range *k)
{
    const heed_attention *a = c->a;
    if (!q->count || !k->count)
        return 0;
    int64_t low = q->first + c->offset, high = low + (q->count - 1) * q->step;
    int64_t first = k->first, last = k->first + (k->count - 1) * k->step;
    if (a->windowed && a->window_left >= 0 && a->window_left < low - first)
        first += (low - a->window_left - first + k->step - 1) / k->step * k->step;
    if (a->windowed && a->window_right >= 0 && a->window_right < last - high)
        last = high + a->window_right;
    if (a->causal && high < last)
        last = high;
    return first <= last;
}

int wants(const ring *c, int r, int distance)
{
    const range *q = ranges_of(c, c->rows, r % c->ranks), *k = ranges_of(c, c->keys, (r - distance) % c->ranks);
    for (int i = 0; i < RANGES; i++)
        for (int j = 0; j < RANGES; j++)
            if (sees(c, &q[i], &k[j]))
                return 1;
    return 0;
}
