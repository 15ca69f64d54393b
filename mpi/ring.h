/* One call on one rank: who has which tokens, the memory it works in, and how it begins and ends. */
#ifndef HEED_MPI_RING_H
#define HEED_MPI_RING_H

#include "agree.h"

enum { RANGES = 2 }; /* of tokens, in a shard */

typedef struct range {
    int64_t first, step, count, at; /* positions, and where they begin in the shard */
} range;

/* One call on one rank. */
typedef struct ring {
    const heed_mpi *m;
    const heed_attention *a;
    heed_exec x;
    int ranks, me;
    range *rows, *keys; /* [ranks][RANGES] */
    int64_t offset;     /* what is added to the position of rows */
    MPI_Datatype key_row, value_row, key_gradient_row, value_gradient_row;
    void *memory;   /* everything below */
    char *block[3]; /* keys, then values, packed: this rank's own, that of this step, that of the next */
    float *o, *lse, *o2, *lse2, *dq, *delta;
    /* Gradients of keys and of values: this rank's, those of two steps, and what comes in for both. */
    float *home[2], *sums[2][2], *arriving[2], *returning[2];
} ring;

/* ---- Who has what (shards.c) ---- */

/* The ranges of a rank, by any number that is congruent to it, in c->rows or c->keys; how many tokens they are. */
range *ranges_of(const ring *c, range *table, int rank);
int64_t count_of(const ring *c, range *table, int rank);

/* Fills a table from what all ranks told; total: the tokens of all. */
heed_status lay_out(const ring *c, const call_words *words, int keys, range *table, int64_t *total);

/* Whether a row of q may see a key of k; whether rank r works on keys of the rank that far behind it. These follow from
 * what all ranks know, so that both sides of every message agree on it without asking. */
int sees(const ring *c, const range *q, const range *k);
int wants(const ring *c, int r, int distance);

/* ---- Memory (open.c) ---- */

size_t bytes_of(heed_dtype dtype);
heed_tensor packed(void *data, heed_dtype dtype, const int64_t *shape, int64_t rows, int64_t columns);
heed_tensor rows_of(heed_tensor t, const range *r);
void fill(float *to, size_t count, float value);

/* Checks, agrees with the other ranks, lays out, allocates, packs k and v. close_ring() follows in any case. */
heed_status open_ring(ring *c, int backward, const heed_attention *a, const heed_gradient *g, const heed_mpi *m,
                      const heed_exec *x);
void close_ring(ring *c);

/* A result in fp32 to where the caller wants it, in the caller's dtype. lse_to may be absent. */
heed_status deliver(ring *c, heed_tensor from, const heed_tensor *lse_from, heed_tensor to, heed_tensor lse_to);

#endif
