/* What the commands of heed share, file by file. The commands see heed.h and this, and nothing else of the library. */
#ifndef HEED_CLI_H
#define HEED_CLI_H

#include "heed.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* ---- main.c: the commands and how they end ---------------------------------------------------------------------- */

enum { EXIT_FAILED = 1, EXIT_USAGE = 2 }; /* a check or heed failed; wrong usage or a bad input file */

int command_demo(int argc, char **argv);
int command_run(int argc, char **argv);
int command_check(int argc, char **argv);
int command_bench(int argc, char **argv);
int command_explain(int argc, char **argv);
int command_info(int argc, char **argv);

/* Prints "heed run: ..." on stderr and returns code, so that an error reads: return complain(EXIT_USAGE, "..."). */
int complain(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same for a call that failed: heed's own message, and EXIT_USAGE where the caller's input was to blame. */
int complain_status(heed_status status);

/* ---- options.c: a command line described by tables -------------------------------------------------------------- */

/* Reads text into *to. NULL, or what was expected in its place. text is NULL for an option without a value. */
typedef const char *option_reader(void *to, const char *text);

typedef struct option_row {
    const char *name;  /* "stride"; NULL ends the table */
    int letter;        /* 'q', or 0 */
    const char *value; /* "N", or NULL: takes none */
    option_reader *read;
    size_t offset; /* where in the group's struct the answer goes */
    const char *help;
} option_row;

typedef struct option_group {
    const char *title;
    const option_row *rows;
    void *base;
} option_group;

typedef struct manual {
    const char *command, *usage, *text, *examples;
} manual;

/* -1: go on. Else the code to exit with: 0 after --help, EXIT_USAGE after a complaint. groups end with a NULL title. */
int options_parse(const manual *m, const option_group *groups, int argc, char **argv);

option_reader read_flag, read_int, read_size, read_double, read_seed, read_text, read_dtype, read_backend;

/* What a problem asks for besides its sizes: --causal, --window, --stride ... */
typedef struct rules {
    int causal, windowed;
    int64_t left, right, stride;
    heed_align align;
    int scaled; /* scale was given, perhaps as 0 */
    double scale, softcap, dropout;
    uint64_t seed;
} rules;
extern const option_row rule_rows[];
void rules_apply(const rules *r, heed_attention *a);

/* How to run it: --backend, --kernel, --threads. */
typedef struct how {
    heed_backend backend;
    int backend_given;
    const char *kernel; /* of one pass; the other one is free to choose */
    int threads;
} how;
extern const option_row how_rows[];
how how_default(void);
heed_exec how_exec(const how *h, int backward, heed_dtype dtype);

/* Takes HEED_KERNEL out of the environment, where it would also bind the reference, and makes it how_default()'s. */
void how_environment(void);

/* --shape, as often as wanted, and what differs from it. */
typedef struct sizes {
    int64_t B, Hq, Hk, Sq, Sk, D, Dv;
} sizes;
typedef struct size_list {
    int count;
    sizes item[64];
    int64_t heads_k, rows, keys, head_dim_v; /* --heads-k, --sq, --sk, --dv; 0: as the shape says */
} size_list;
extern const option_row size_rows[];
sizes size_at(const size_list *l, int index);

/* --with mask,bias,...: tensors and layouts that a generated problem brings along. */
enum {
    WITH_MASK = 1 << 0,
    WITH_BIAS = 1 << 1,
    WITH_ALIBI = 1 << 2,
    WITH_SINK = 1 << 3,
    WITH_PADDING = 1 << 4, /* lengths_q, lengths_k */
    WITH_RAGGED = 1 << 5,  /* offsets_q, offsets_k */
    WITH_PAGES = 1 << 6,   /* a block table; forward only */
    WITH_VIEWS = 1 << 7,   /* bshd order, rows with gaps, data not aligned to 16 bytes */
    WITH_D_LSE = 1 << 8,   /* a gradient of lse */
};
option_reader read_with;

/* ---- elements.c: one number of any dtype ------------------------------------------------------------------------ */

size_t element_size(heed_dtype dtype);
const char *dtype_name(heed_dtype dtype); /* "bf16" */
double dtype_roundoff(heed_dtype dtype);  /* the largest relative error of rounding to it: 2^-8 for bf16 */
double element_load(const void *data, heed_dtype dtype, int64_t index);
void element_store(void *data, heed_dtype dtype, int64_t index, double x);          /* to nearest even */
double tensor_at(const heed_tensor *t, int64_t b, int64_t h, int64_t i, int64_t c); /* strides filled in */

/* ---- workload.c: a problem in memory ---------------------------------------------------------------------------- */

typedef struct workload_spec {
    sizes n;
    rules r;
    heed_dtype dtype;
    unsigned with; /* WITH_ flags */
    uint64_t seed; /* of the numbers in it */
} workload_spec;

/* All tensors of one forward and backward call. Strides are filled in. Keys and rows that no result may depend on
 * (padding, off the stride, gaps between rows) hold NaN, and so do the outputs before they are written. */
typedef struct workload {
    heed_attention a;
    heed_gradient g;
    heed_exec x;
    void *memory[40]; /* what workload_free() frees */
    int memories;
    size_t room; /* bytes that x.workspace really has */
} workload;

int workload_new(workload *w, const workload_spec *s); /* 0: no memory */

/* The same problem in fp64, for the reference. Borrows mask, slopes, sinks and lengths from w, which must outlive it.
 * 0: no memory. */
int workload_twin(workload *twin, const workload *w);

/* Moves every element by this part of itself, up or down at random. */
void tensor_nudge(const heed_tensor *t, double part, uint64_t *state);

void workload_use(workload *w, const heed_exec *x); /* from now on; the workspace stays w's */
heed_status workload_forward(workload *w);
heed_status workload_backward(workload *w);     /* after workload_forward() */
void workload_spoil(workload *w, int backward); /* NaN into the outputs of that pass */
void workload_free(workload *w);

/* How far got is from want, over all elements. Equal infinities agree; a NaN, or one infinity, is an infinite error. */
typedef struct difference {
    double max, rms;           /* of got - want */
    double want_max, want_rms; /* of want */
} difference;
difference tensor_difference(const heed_tensor *got, const heed_tensor *want);

/* A splitmix64 stream, and numbers drawn from it. */
uint64_t random_next(uint64_t *state);
double random_unit(uint64_t *state);              /* [0, 1) */
int64_t random_below(uint64_t *state, int64_t n); /* 0 .. n-1 */

/* ---- clock.c: how long a call takes ----------------------------------------------------------------------------- */

double now_seconds(void);

/* Median seconds of call(), repeated for at least min_time seconds and 5 times after a warm-up; -1 when it failed. */
double median_seconds(int (*call)(void *), void *argument, double min_time);
double median(double *values, int count); /* sorts them */

/* ---- gpu.c: calls on a GPU -------------------------------------------------------------------------------------- */

/* One pass, g == NULL: the forward, of tensors in the host's memory: there, run, and back. */
heed_status gpu_run(const heed_attention *a, const heed_gradient *g, const heed_exec *x);

/* Median seconds of the forward, of the backward or, where neither is NULL, of both in a row, by CUDA events around each;
 * replayed: around a graph of many, divided by how many, which leaves out what starting one by itself takes. -1 when it
 * failed. The backward starts from the o and lse in a. */
double gpu_seconds(const heed_attention *a, const heed_gradient *g, const heed_exec *forward, const heed_exec *backward,
                   int replayed, double min_time);
const char *gpu_error(void); /* what the CUDA runtime said, where that and not heed made the last call fail; or NULL */

/* ---- term.c: what only a terminal gets -------------------------------------------------------------------------- */

typedef enum colour { PLAIN, BOLD, RED, GREEN, DIM } colour;
const char *paint(FILE *to, colour c);        /* an escape sequence, or "" in a pipe and where NO_COLOR is set */
void progress(double done, const char *what); /* a bar on stderr; done from 0 to 1 */
void progress_end(void);

/* A JSON string, quotes included. JSON has no infinity or NaN: they are null. */
void json_text(FILE *to, const char *text);
void json_number(FILE *to, double x);

#endif /* HEED_CLI_H */
