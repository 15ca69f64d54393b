/* heed_mpi: attention over sequences that are spread over the ranks of an MPI communicator. A small library on top of
 * heed.h, whose types it uses; libheed knows nothing of it.
 *
 * Every rank has some rows of q and some keys of k and v, its shard, in host memory. All ranks make the same call:
 *
 *     heed_attention a = {
 *         .q = { .data = q, .dtype = HEED_F32, .shape = { 1, 8, rows, 64 } },     this rank's rows
 *         .k = { .data = k, .dtype = HEED_F32, .shape = { 1, 8, rows, 64 } },
 *         .v = { .data = v, .dtype = HEED_F32, .shape = { 1, 8, rows, 64 } },
 *         .o = { .data = o, .dtype = HEED_F32, .shape = { 1, 8, rows, 64 } },
 *         .causal = 1,
 *     };
 *     heed_mpi m = { .comm = MPI_COMM_WORLD, .shards = HEED_MPI_ZIGZAG };
 *     if (heed_mpi_forward(&a, &m, &(heed_exec){ .backend = HEED_CPU }))
 *         fprintf(stderr, "%s\n", heed_mpi_last_error());
 *
 * and get what one rank with the whole sequence would: o and lse of their rows, gradients of their shards.
 *
 * K and V go round in a ring. In step d, rank r works on the keys of rank r - d, while those of the next step are on
 * their way to it from rank r - 1, or from their owner where rank r - 1 has no use for them: keys that no query of a
 * rank sees are not sent to it. In the backward their gradients follow, in fp32: each rank adds its part and sends them
 * on, or home. Partial results are fp32. The order of all sums is fixed: the same inputs give the same bits.
 *
 * Each call sends, from all P ranks together, for every pair of different ranks of which one sees keys of the other:
 *     forward     the owner's k and v
 *     backward    the owner's k and v, and as many elements in fp32
 * and 320 bytes from each rank to each other in which they tell what they were called with.
 *
 * A call allocates, with malloc, and frees before it returns: room for three shards of k and v, and in fp32 for two
 * results of its rows (forward), or for the gradients of its rows and of five shards of k and v (backward). */
#ifndef HEED_MPI_H
#define HEED_MPI_H

#include <heed.h>
#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Which tokens a rank has, of S in all over P ranks. Rows of a shard are in the order of their positions. */
typedef enum heed_mpi_shards {
    HEED_MPI_CONTIGUOUS = 0, /* one range after the other, of any lengths, also none */
    HEED_MPI_ZIGZAG = 1,     /* 2P ranges, as even as can be, longer ones first; rank r has ranges r and 2P-1-r */
    HEED_MPI_STRIPED = 2,    /* rank r has tokens r, r + P, r + 2P ... */
} heed_mpi_shards;

typedef struct heed_mpi {
    MPI_Comm comm; /* messages have tags 7400 to 7403: no receive of yours with a wildcard may be pending */
    heed_mpi_shards shards;
} heed_mpi;

/* The range number `range` (0, or for zigzag also 1) of a rank's tokens: its first token, and how far apart they are.
 * Returns how many they are; 0 where there is no such range. */
HEED_API int64_t heed_mpi_range(const heed_mpi *m, int64_t tokens, int ranks, int rank, int range, int64_t *first,
                                int64_t *step);

/* As heed_forward(), over all ranks. a: this rank's shard. Of its fields, align and positions must be 0, as they follow
 * from the shards (where there are more keys than rows in all, the last row stands at the last key); mask, bias, sink,
 * lengths, offsets and pages are HEED_UNSUPPORTED, and so are, where there is more than one rank, shards of more than
 * INT_MAX keys over the batch and the heads. x: HEED_CPU or HEED_REFERENCE; its workspace is not used.
 *
 * Where a rank's arguments are wrong, or ranks differ in a size, a dtype or an option, or make different calls, all of
 * them return an error, before anything is computed. What MPI reports is HEED_DEVICE_ERROR, if the communicator's error
 * handler lets MPI return at all: by default it ends all ranks. */
HEED_API heed_status heed_mpi_forward(const heed_attention *a, const heed_mpi *m, const heed_exec *x);

/* As heed_backward(), over all ranks: d_q, d_k and d_v, all of them. a has o and lse of the forward call. g: delta,
 * d_bias, d_sink and accumulate are HEED_UNSUPPORTED. */
HEED_API heed_status heed_mpi_backward(const heed_attention *a, const heed_gradient *g, const heed_mpi *m,
                                       const heed_exec *x);

/* What the last failing call of this thread found wrong; empty before the first. */
HEED_API const char *heed_mpi_last_error(void);

#ifdef __cplusplus
}
#endif

#endif /* HEED_MPI_H */
