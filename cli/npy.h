/* Arrays in NumPy's .npy format, versions 1.0, 2.0 and 3.0, of at most four dimensions. */
#ifndef HEED_NPY_H
#define HEED_NPY_H

#include "heed.h"

#include <stdio.h>

enum { NPY_RANK = 4, NPY_WHY = 256 };

/* fp16, fp32, fp64 and bool, in the machine's byte order. Strides in elements: Fortran order differs by them alone. */
typedef struct npy_array {
    void *data; /* from malloc, also where the array holds no element; npy_free() frees it */
    heed_dtype dtype;
    int rank;
    int64_t shape[NPY_RANK], stride[NPY_RANK];
    int64_t count; /* of elements */
} npy_array;

/* 1, or 0 with the reason in why. file stands at its beginning and holds size bytes: the header's claims are compared
 * with that before anything is allocated, so a small file can never ask for much memory. */
int npy_read(FILE *file, int64_t size, npy_array *array, char why[NPY_WHY]);
int npy_load(const char *path, npy_array *array, char why[NPY_WHY]);
void npy_free(npy_array *array);

/* Files that appear together or not at all: npy_stage() writes a temporary file next to path, npy_commit() renames.
 * data is in C order. bf16, which NumPy does not know, is written as fp32. */
typedef struct npy_output {
    char *path, *temporary; /* temporary is NULL where path is a device or a pipe, which are written directly */
} npy_output;
int npy_stage(npy_output *output, const char *path, const npy_array *array, char why[NPY_WHY]);
int npy_commit(npy_output *output, char why[NPY_WHY]);
int npy_same_file(const char *path, const char *other); /* whether the one would take the place of the other */
void npy_discard(npy_output *output); /* removes what was staged and not committed; safe to call always */

#endif /* HEED_NPY_H */
