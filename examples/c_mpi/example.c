/* mpirun -n 3 ./example: causal attention over 3000 tokens that no rank has all of. */
#include <heed_mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { H = 4, D = 32, TOKENS = 3000, ROW = 1000 };

int main(int argc, char **argv)
{
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);

    /* Zigzag: a range from the front and one from the back, so that all ranks see equally many keys. */
    heed_mpi m = { .comm = MPI_COMM_WORLD, .shards = HEED_MPI_ZIGZAG };
    int64_t first[2], step, count[2];
    for (int n = 0; n < 2; n++)
        count[n] = heed_mpi_range(&m, TOKENS, ranks, rank, n, &first[n], &step);
    int64_t rows = count[0] + count[1], here = -1;

    float *q = calloc((size_t)(H * rows * D), sizeof *q), *k = calloc((size_t)(H * rows * D), sizeof *k);
    float *v = calloc((size_t)(H * rows * D), sizeof *v), *o = calloc((size_t)(H * rows * D), sizeof *o);
    for (int64_t i = 0; i < rows; i++) {
        int64_t token = i < count[0] ? first[0] + i : first[1] + i - count[0];
        if (token == ROW)
            here = i;
        for (int h = 0; h < H; h++)
            v[(h * rows + i) * D] = (float)token; /* all scores are 0, so row i is the mean of 0 .. i */
    }
    heed_attention a = {
        .q = { .data = q, .dtype = HEED_F32, .shape = { 1, H, rows, D } },
        .k = { .data = k, .dtype = HEED_F32, .shape = { 1, H, rows, D } },
        .v = { .data = v, .dtype = HEED_F32, .shape = { 1, H, rows, D } },
        .o = { .data = o, .dtype = HEED_F32, .shape = { 1, H, rows, D } },
        .causal = 1,
    };
    heed_status s = heed_mpi_forward(&a, &m, &(heed_exec){ .backend = HEED_CPU });
    if (s)
        fprintf(stderr, "rank %d: %s: %s\n", rank, heed_status_name(s), heed_mpi_last_error());
    else if (here >= 0)
        printf("row %d of %d, on rank %d: %.2f\n", ROW, TOKENS, rank, o[here * D]);
    free(q), free(k), free(v), free(o);
    MPI_Finalize();
    return s != HEED_OK;
}
