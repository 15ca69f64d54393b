/* What ranks tell each other before they compute: everything they must share, how long their shards are, and whether
 * something is wrong with their arguments. */
#ifndef HEED_MPI_AGREE_H
#define HEED_MPI_AGREE_H

#include "heed_mpi.h"

enum { MESSAGE = 128 };

/* An all-gather of these; 320 bytes. */
typedef struct call_words {
    int64_t pass; /* 0: forward, 1: backward */
    int64_t batch, query_heads, key_heads, head_dim, value_dim, dtype;
    int64_t causal, windowed, window_left, window_right, key_stride, shards;
    int64_t scale, zero_scale, softcap, dropout, seed; /* floats as their bits */
    int64_t alibi;
    int64_t status; /* from here on each rank's own */
    int64_t rows, keys;
    char message[MESSAGE];
    char unused[16];
} call_words;

/* Fills words, ranks of them, or returns the error that all ranks return. own: what is wrong on this rank, if
 * anything. */
heed_status agree(const heed_attention *a, const heed_mpi *m, int pass, heed_status own, call_words *words, int ranks);

/* Writes the message of this thread and returns status. */
heed_status fail(heed_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* HEED_OK, or HEED_DEVICE_ERROR with MPI's words. */
heed_status check_mpi(int code, const char *what);

#endif
