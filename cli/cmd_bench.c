/* heed bench: one table of times. A result is verified on a sample of rows and keys before it is timed.
 *
 * FLOP: 2 (D + Dv) for each pair of a row and a key, that is 4 B H Sq Sk D, forward; 2.5 times as many backward. Pairs:
 * half of them under a causal band (of a square), 1/N of them with a key stride N, those inside a window. GB/s, for one
 * query alone: k and v once each. */
#include "cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { FORWARD = 1, BACKWARD = 2 };
typedef enum format { TABLE, CSV, JSON } format;

typedef struct answers {
    size_list shapes;
    rules r;
    how h;
    unsigned dtypes; /* bits 1 << heed_dtype */
    int passes;
    int csv, json;
    double min_time;
} answers;

typedef struct line {
    sizes n;
    heed_dtype dtype;
    int backward;
    char kernel[64];
    double us, gflops, gbytes; /* gbytes: a second, 0 where it says nothing */
} line;

/* Without --shape; a GPU needs more work to be filled. Widths of 2048 there, as models of some billion weights have. */
static const sizes usual_cpu[] = {
    { 1, 1, 1, 128, 128, 32, 32 },     { 2, 8, 8, 64, 64, 64, 64 },     { 2, 8, 8, 77, 77, 64, 64 },
    { 4, 12, 12, 128, 128, 64, 64 },   { 2, 16, 16, 256, 256, 64, 64 }, { 1, 8, 8, 1024, 1024, 64, 64 },
    { 1, 8, 8, 1024, 1024, 128, 128 }, { 1, 4, 4, 4096, 4096, 64, 64 }, { 1, 4, 4, 4096, 4096, 128, 128 },
    { 1, 2, 2, 2048, 2048, 256, 256 }, { 1, 32, 8, 1, 4096, 128, 128 }, { 1, 32, 8, 1, 32768, 128, 128 },
};
static const sizes usual_gpu[] = {
    { 1, 1, 1, 128, 128, 32, 32 },       { 16, 32, 32, 512, 512, 64, 64 },   { 4, 32, 32, 2048, 2048, 64, 64 },
    { 1, 32, 32, 8192, 8192, 64, 64 },   { 16, 16, 16, 512, 512, 128, 128 }, { 4, 16, 16, 2048, 2048, 128, 128 },
    { 1, 16, 16, 8192, 8192, 128, 128 }, { 1, 8, 8, 8192, 8192, 256, 256 },  { 8, 32, 8, 1, 8192, 128, 128 },
};

static int on_gpu(const answers *given) { return how_exec(&given->h, 0, HEED_F32).backend == HEED_CUDA; }

static int usual_count(const answers *given)
{
    return (int)(on_gpu(given) ? sizeof usual_gpu / sizeof *usual_gpu : sizeof usual_cpu / sizeof *usual_cpu);
}

static sizes usual(const answers *given, int index) { return on_gpu(given) ? usual_gpu[index] : usual_cpu[index]; }

/* ---- Verified on a sample --------------------------------------------------------------------------------------- */

static int64_t first_position(const heed_attention *a)
{
    return a->align == HEED_ALIGN_TOP_LEFT ? 0 : a->k.shape[2] - a->q.shape[2];
}

static heed_tensor slice(heed_tensor t, int64_t row)
{
    if (t.data)
        t.data = (char *)t.data + row * t.stride[2] * (int64_t)element_size(t.dtype);
    t.shape[2] = 1;
    return t;
}

/* Room for one row or key of every head, like t but fp32. */
static heed_tensor small_like(const heed_tensor *t)
{
    heed_tensor s = { .dtype = HEED_F32,
                      .shape = { t->shape[0], t->shape[1], 1, t->shape[3] },
                      .stride = { t->shape[1] * t->shape[3], t->shape[3], t->shape[3], 1 } };
    s.data = calloc((size_t)(t->shape[0] * t->shape[1] * t->shape[3]), sizeof(float));
    return s;
}

/* One row of a result. Fair: some roundings of the largest value of all of it, more of them where thousands of terms
 * are summed in that type. Garbage, a wrong band or a wrong stride is far beyond; heed check is the fine judge. fp64 is
 * no finer here than fp32, which want is, and lse. */
static int agrees(const workload *w, const heed_tensor *result, int64_t row, const heed_tensor *want, double terms)
{
    heed_tensor got = slice(*result, row);
    double largest = tensor_difference(result, result).want_max;
    double scores = tensor_difference(&w->a.lse, &w->a.lse).want_max; /* whose roundings are relative errors of P */
    double fine = 128 * dtype_roundoff(HEED_F32) * fmax(1, scores / 16);
    double fair = got.dtype == HEED_F16 || got.dtype == HEED_BF16 ? 16 * dtype_roundoff(got.dtype) : 0;
    return tensor_difference(&got, want).max <= (fair + fine) * largest + fine * terms;
}

/* How large dP and delta make the gradients of q and k, sums of so many rows, in which they are subtracted. Where a row
 * sees one key they cancel, and nothing is left but their roundings, in fp32. */
static double terms_of(const workload *w, const heed_tensor *factor, int64_t rows)
{
    const heed_attention *a = &w->a;
    const heed_tensor *factors[] = { &w->g.d_o, &a->o, factor };
    double scale = a->scale != 0 || a->zero_scale ? fabs((double)a->scale) : 1 / sqrt((double)a->q.shape[3]);
    double terms = scale * sqrt((double)rows * (double)a->v.shape[3]);
    for (int i = 0; i < 3; i++)
        terms *= tensor_difference(factors[i], factors[i]).want_rms;
    return terms;
}

/* Rows are slices of the problem, which positions describe exactly: see "Parts of a sequence" in heed.h. */
static heed_status verify_row(const workload *w, int backward, int64_t row, int *good)
{
    workload part = { .a = w->a, .g = w->g, .x = { .backend = HEED_REFERENCE } };
    heed_attention *a = &part.a;
    a->align = HEED_ALIGN_POSITION;
    a->query_position = first_position(&w->a) + row;
    a->q = slice(w->a.q, row);
    a->lse = backward ? slice(w->a.lse, row) : (heed_tensor){ 0 };
    a->o = slice(w->a.o, row);
    const heed_tensor *result = backward ? &w->g.d_q : &w->a.o;
    heed_tensor want = small_like(result);
    heed_status status;
    if (backward) {
        part.g = (heed_gradient){ .d_o = slice(w->g.d_o, row), .d_q = want };
        status = workload_backward(&part);
    } else {
        a->o = want;
        status = workload_forward(&part);
    }
    *good = *good && !status && agrees(w, result, row, &want, backward ? terms_of(w, &w->a.k, 1) : 0);
    free(want.data);
    free(part.x.workspace);
    return status;
}

static heed_status verify_key(const workload *w, const heed_tensor *delta, int64_t key, int *good)
{
    workload part = { .a = w->a, .x = { .backend = HEED_REFERENCE } };
    heed_attention *a = &part.a;
    a->align = HEED_ALIGN_POSITION;
    a->query_position = first_position(&w->a);
    a->key_position = key;
    a->k = slice(w->a.k, key);
    a->v = slice(w->a.v, key);
    heed_tensor want_k = small_like(&w->a.k), want_v = small_like(&w->a.v);
    part.g = (heed_gradient){ .d_o = w->g.d_o, .delta = *delta, .d_k = want_k, .d_v = want_v };
    heed_status status = workload_backward(&part);
    int64_t rows = w->a.q.shape[2] * w->a.q.shape[1] / w->a.k.shape[1];
    *good = *good && !status && agrees(w, &w->g.d_k, key, &want_k, terms_of(w, &w->a.q, rows)) &&
            agrees(w, &w->g.d_v, key, &want_v, 0);
    free(want_k.data);
    free(want_v.data);
    free(part.x.workspace);
    return status;
}

static heed_status verify(const workload *w, int backward, int *good)
{
    int64_t Sq = w->a.q.shape[2], Sk = w->a.k.shape[2], stride = w->a.key_stride ? w->a.key_stride : 1;
    const int64_t rows[3] = { 0, Sq / 2, Sq - 1 };
    const int64_t keys[3] = { 0, Sk / 2 / stride * stride, (Sk - 1) / stride * stride };
    heed_status status = HEED_OK;
    *good = 1;
    for (int i = 0; i < 3 && !status; i++)
        status = verify_row(w, backward, rows[i], good);
    if (status || !backward)
        return status;

    heed_tensor delta = w->a.lse;
    if (!(delta.data = calloc((size_t)(w->a.q.shape[0] * w->a.q.shape[1] * Sq), sizeof(float))))
        return HEED_NO_WORKSPACE;
    status = heed_delta(&w->a.o, &w->g.d_o, NULL, &delta, &(heed_exec){ .backend = HEED_REFERENCE });
    for (int i = 0; i < 3 && !status; i++)
        status = verify_key(w, &delta, keys[i], good);
    free(delta.data);
    return status;
}

/* ---- Timed ------------------------------------------------------------------------------------------------------ */

static double pairs_of(const workload *w)
{
    double Sq = (double)w->a.q.shape[2], Sk = (double)w->a.k.shape[2];
    double stride = w->a.key_stride ? (double)w->a.key_stride : 1, pairs = Sq * Sk;
    if (w->a.causal) { /* a triangle, and beside it keys that all rows see, or below it rows that see all keys */
        double side = fmin(Sq, Sk), triangle = side > 1 ? side * side / 2 : side;
        double rest = w->a.align == HEED_ALIGN_TOP_LEFT ? (Sq - side) * Sk : Sq * (Sk - side);
        pairs = triangle + rest;
    }
    if (w->a.windowed && w->a.window_left >= 0 && (w->a.window_right >= 0 || w->a.causal)) {
        double right = w->a.causal ? 0 : (double)w->a.window_right;
        pairs = fmin(pairs, Sq * ((double)w->a.window_left + right + 1));
    }
    return pairs / stride;
}

static int run_forward(void *w) { return workload_forward(w); }
static int run_backward(void *w) { return workload_backward(w); }

static double seconds_of(workload *w, int backward, double min_time)
{
    if (w->x.backend == HEED_CUDA)
        return gpu_seconds(&w->a, &w->g, backward ? NULL : &w->x, backward ? &w->x : NULL, 0, min_time);
    return median_seconds(backward ? run_backward : run_forward, w, min_time);
}

/* The name before ": taken" in what the planner says. */
static void name_kernel(const workload *w, int backward, char name[64])
{
    char text[8192];
    snprintf(name, 64, "?");
    if (heed_explain(&w->a, backward ? &w->g : NULL, &w->x, NULL, text, sizeof text))
        return;
    char *end = strstr(text, ": taken"), *start = end;
    while (start && start > text && start[-1] != '\n')
        start--;
    if (end)
        snprintf(name, 64, "%.*s", (int)(end - start), start);
}

static int measure(const answers *given, workload *w, line *l)
{
    int good;
    heed_status status = l->backward ? workload_backward(w) : workload_forward(w);
    if (status)
        return complain_status(status);
    name_kernel(w, l->backward, l->kernel);
    if ((status = verify(w, l->backward, &good)))
        return complain_status(status);
    if (!good)
        return complain(EXIT_FAILED, "%s: wrong result, not timed; see heed check", l->kernel);

    double seconds = seconds_of(w, l->backward, given->min_time);
    if (seconds < 0)
        return complain(EXIT_FAILED, "%s: %s", l->kernel, gpu_error() ? gpu_error() : heed_last_error());
    const sizes *n = &l->n;
    double work = 2 * (double)(n->B * n->Hq) * pairs_of(w) * (double)(n->D + n->Dv) * (l->backward ? 2.5 : 1);
    double bytes = (double)(n->B * n->Hk * (n->D + n->Dv)) * pairs_of(w) * (double)element_size(l->dtype);
    l->us = 1e6 * seconds;
    l->gflops = 1e-9 * work / seconds;
    l->gbytes = n->Sq == 1 && !l->backward ? 1e-9 * bytes / seconds : 0;
    return 0;
}

/* ---- Printed ---------------------------------------------------------------------------------------------------- */

static heed_device_info device_of(const answers *given)
{
    heed_device_info d;
    if (heed_device_at(on_gpu(given) ? HEED_CUDA : HEED_CPU, 0, &d))
        d = (heed_device_info){ .name = "unknown" };
    d.threads = on_gpu(given) ? 0 : given->h.threads ? given->h.threads : d.threads;
    return d;
}

static void print_head(const answers *given, format f)
{
    heed_device_info d = device_of(given);
    int threads = d.threads;
    if (f == CSV)
        printf("B,Hq,Hk,Sq,Sk,D,Dv,dtype,pass,causal,stride,threads,kernel,us,gflops,gbytes\n");
    if (f == JSON) {
        printf("{\n  \"version\": \"%s\",\n  \"device\": ", heed_version_string());
        json_text(stdout, d.name);
        printf(",\n  \"threads\": %d,\n  \"causal\": %s,\n  \"stride\": %lld,\n  \"rows\": [", threads,
               given->r.causal ? "true" : "false", (long long)(given->r.stride ? given->r.stride : 1));
    }
    if (f == TABLE) {
        printf("%s, ", d.name);
        if (threads)
            printf("%d thread%s, ", threads, threads == 1 ? "" : "s");
        printf("heed %s%s", heed_version_string(), given->r.causal ? ", causal" : "");
        if (given->r.stride > 1)
            printf(", stride %lld", (long long)given->r.stride);
        printf("\nFLOP = 4 B H Sq Sk D forward, 2.5 times that backward; half for causal, 1/N for stride N\n\n");
        printf("%s%4s %4s %4s %6s %6s %4s %5s %-8s %-28s %11s %8s %6s%s\n", paint(stdout, BOLD), "B", "H", "Hk", "Sq",
               "Sk", "D", "dtype", "pass", "kernel", "us", "GFLOP/s", "GB/s", paint(stdout, PLAIN));
    }
}

static void print_line(const answers *given, const line *l, format f, int index)
{
    const sizes *n = &l->n;
    const char *pass = l->backward ? "backward" : "forward";
#define SIZES (long long)n->B, (long long)n->Hq, (long long)n->Hk, (long long)n->Sq, (long long)n->Sk, (long long)n->D
    if (f == CSV)
        printf("%lld,%lld,%lld,%lld,%lld,%lld,%lld,%s,%s,%d,%lld,%d,%s,%.3f,%.3f,%.3f\n", SIZES, (long long)n->Dv,
               dtype_name(l->dtype), pass, given->r.causal, (long long)(given->r.stride ? given->r.stride : 1),
               device_of(given).threads, l->kernel, l->us, l->gflops, l->gbytes);
    if (f == JSON)
        printf("%s\n    { \"B\": %lld, \"Hq\": %lld, \"Hk\": %lld, \"Sq\": %lld, \"Sk\": %lld, \"D\": %lld, "
               "\"Dv\": %lld, \"dtype\": \"%s\", \"pass\": \"%s\", \"kernel\": \"%s\", \"us\": %.3f, \"gflops\": %.3f, "
               "\"gbytes\": %.3f }",
               index ? "," : "", SIZES, (long long)n->Dv, dtype_name(l->dtype), pass, l->kernel, l->us, l->gflops,
               l->gbytes);
    if (f == TABLE) {
        printf("%4lld %4lld %4lld %6lld %6lld %4lld %5s %-8s %-28s %11.2f %8.1f", SIZES, dtype_name(l->dtype), pass,
               l->kernel, l->us, l->gflops);
        if (l->gbytes > 0)
            printf(" %6.1f", l->gbytes);
        putchar('\n');
    }
#undef SIZES
    fflush(stdout);
}

/* ---- The command ------------------------------------------------------------------------------------------------ */

/* All lines of one shape and type. */
static int bench_shape(const answers *given, sizes n, heed_dtype dtype, format f, int *lines)
{
    workload w;
    if (!workload_new(&w, &(workload_spec){ .n = n, .r = given->r, .dtype = dtype, .seed = 1 }))
        return complain(EXIT_FAILED, "no memory for B %lld, H %lld, Sq %lld, Sk %lld, D %lld", (long long)n.B,
                        (long long)n.Hq, (long long)n.Sq, (long long)n.Sk, (long long)n.D);
    int code = 0;
    for (int backward = 0; backward < 2 && !code; backward++) {
        heed_exec x = how_exec(&given->h, backward, dtype);
        workload_use(&w, &x);
        if (given->passes & (backward ? BACKWARD : FORWARD)) {
            line l = { .n = n, .dtype = dtype, .backward = backward };
            if (!(code = measure(given, &w, &l)))
                print_line(given, &l, f, (*lines)++);
        } else if (!backward) { /* not timed, but the backward starts from its o and lse */
            heed_status status = workload_forward(&w);
            code = status ? complain_status(status) : 0;
        }
    }
    workload_free(&w);
    return code;
}

static int bench(const answers *given)
{
    format f = given->json ? JSON : given->csv ? CSV : TABLE;
    int shapes = given->shapes.count ? given->shapes.count : usual_count(given), lines = 0, code = 0;
    heed_device_info device;
    heed_status status = on_gpu(given) ? heed_device_at(HEED_CUDA, 0, &device) : HEED_OK;
    if (status)
        return complain_status(status);
    print_head(given, f);
    for (int d = 0; d <= (int)HEED_F64 && !code; d++)
        for (int i = 0; i < shapes && !code && (given->dtypes >> d & 1); i++) {
            answers one = *given;
            sizes n = given->shapes.count ? size_at(&given->shapes, i) : usual(given, i);
            if (!given->shapes.count && n.Sq == 1)
                one.passes &= FORWARD; /* decoding has no backward */
            if (one.passes)
                code = bench_shape(&one, n, (heed_dtype)d, f, &lines);
        }
    if (f == JSON)
        printf("\n  ]\n}\n");
    return code;
}

static const char *read_dtypes(void *to, const char *text)
{
    char word[8];
    *(unsigned *)to = 0;
    do {
        size_t length = strcspn(text, ",");
        int dtype;
        snprintf(word, sizeof word, "%.*s", (int)length, text);
        const char *expected = read_dtype(&dtype, word);
        if (expected)
            return "fp32, fp16, bf16 or fp64, or several with commas";
        *(unsigned *)to |= 1u << dtype;
        text += length + (text[length] == ',');
    } while (*text);
    return NULL;
}

static const char *read_pass(void *to, const char *text)
{
    int passes = !strcmp(text, "forward")    ? FORWARD
                 : !strcmp(text, "backward") ? BACKWARD
                 : !strcmp(text, "both")     ? FORWARD | BACKWARD
                                             : 0;
    *(int *)to = passes;
    return passes ? NULL : "forward, backward or both";
}

static const char *read_time(void *to, const char *text)
{
    const char *expected = read_double(to, text);
    return !expected && *(double *)to > 0 ? NULL : "a number of seconds above 0";
}

int command_bench(int argc, char **argv)
{
    static const manual m = {
        .command = "bench",
        .usage = "[options]",
        .text = "Times attention on random inputs and prints one table: the median of repeated runs after a warm-up,\n"
                "each result verified on a sample of rows and keys first. FLOP = 4 B H Sq Sk D forward, 2.5 times\n"
                "that backward, half of it for causal. Without --shape, a list from 64 to 32768 keys. On a GPU times\n"
                "are between CUDA events, and copies are not counted.\n",
        .examples = "  heed bench --threads 1\n"
                    "  heed bench --shape 1,8,1024,64 --shape 1,8,1024,128 --dtype fp32,bf16 --causal\n"
                    "  heed bench --shape 1,32,4096,128 --heads-k 8 --sq 1 --pass forward   one query, with GB/s\n"
                    "  heed bench --shape 4,8,512,64 --stride 2 --csv >bench.csv\n"
                    "  heed bench --backend cuda --causal\n",
    };
    static const option_row rows[] = {
        { "dtype", 0, "TYPES", read_dtypes, offsetof(answers, dtypes),
          "fp32 (default), fp16, bf16, fp64; several with commas;\non a GPU bf16 is the default" },
        { "pass", 0, "PASS", read_pass, offsetof(answers, passes),
          "forward, backward or both (default: a line for each)" },
        { "min-time", 0, "S", read_time, offsetof(answers, min_time), "seconds to repeat each for; default 0.3" },
        { "csv", 0, NULL, read_flag, offsetof(answers, csv), "the rows as CSV" },
        { "json", 0, NULL, read_flag, offsetof(answers, json), "the rows as JSON" },
        { NULL, 0, NULL, NULL, 0, NULL },
    };
    answers given = { .passes = FORWARD | BACKWARD, .min_time = 0.3, .h = how_default() };
    const option_group groups[] = {
        { "Options", rows, &given },
        { "Sizes", size_rows, &given.shapes },
        { "Problem", rule_rows, &given.r },
        { "Execution", how_rows, &given.h },
        { 0 },
    };
    int code = options_parse(&m, groups, argc, argv);
    if (code >= 0)
        return code;
    size_list *l = &given.shapes;
    if (!l->count && (l->heads_k || l->rows || l->keys || l->head_dim_v))
        return complain(EXIT_USAGE, "--heads-k, --sq, --sk and --dv need a --shape");
    if (given.csv && given.json)
        return complain(EXIT_USAGE, "--csv and --json contradict each other");
    if (!given.dtypes)
        given.dtypes = 1u << (on_gpu(&given) ? HEED_BF16 : HEED_F32);
    return bench(&given);
}
