/* heed's side of ./run bench: reads one case from each line of standard input, answers with one line of JSON.
 *
 *     time    pass=forward dtype=fp32 B=1 Hq=8 Hk=8 Sq=1024 Sk=1024 D=64 causal=0 stride=1 threads=1 min_time=0.2
 *             seconds of one call: the median of samples of at least half a millisecond each, taken for min_time
 *             seconds after a warm-up; with clock=cpu, seconds of processor time. backward: the gradients of q, k and v,
 *             given forward's o and lse. with=mask, padding, bias or dropout: [1,1,Sq,Sk], [B,1,1,Sk], [1,Hq,Sq,Sk], a tenth
 *     verify  the same words: the results themselves, of inputs that torch_side.py makes alike
 *     peak    kind=fma threads=1 clock=wall: flop/s of this machine: multiply-adds that depend on nothing but registers.
 *             kinds: fma (the widest there is), avx2, bf16 (pair dot products)
 *     read    bytes=268435456 threads=1 clock=wall: byte/s at which that many bytes, just read, are read again
 *     info    versions and the CPU's name
 */
#include "heed.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static clockid_t clock_used = CLOCK_MONOTONIC;

static double now(void)
{
    struct timespec t;
    clock_gettime(clock_used, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *allocate(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!p) {
        fprintf(stderr, "bench_heed: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return p;
}

static int fail(void) { return printf("{\"error\": \"%s\"}\n", heed_last_error()); }

/* ---- A line's words ------------------------------------------------------------------------------------------------- */

static const char *text_of(const char *line, const char *key, char value[64])
{
    char pattern[32];
    snprintf(pattern, sizeof pattern, " %s=", key);
    const char *at = strstr(line, pattern);
    value[0] = 0;
    if (at)
        sscanf(at + strlen(pattern), "%63[^ \n]", value);
    return value;
}

static double number_of(const char *line, const char *key, double otherwise)
{
    char value[64];
    return *text_of(line, key, value) ? atof(value) : otherwise;
}

static void use_clock_of(const char *line)
{
    char clock[64];
    clock_used = strcmp(text_of(line, "clock", clock), "cpu") ? CLOCK_MONOTONIC : CLOCK_PROCESS_CPUTIME_ID;
}

/* ---- Problems ------------------------------------------------------------------------------------------------------- */

typedef struct problem {
    heed_attention a;
    heed_gradient g;
    heed_exec x;
    int backward;
    char kernel[64];
} problem;

static size_t elements(const heed_tensor *t) { return (size_t)(t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3]); }

static size_t size_of(heed_dtype dtype) { return dtype == HEED_F32 ? 4 : 2; }

/* Element i of input number `seed`: from -1 to 1, exclusive, in steps of 2^-23, or with 16 bits of 2^-7: the type holds them
 * exactly. torch_side.py has the same formula. */
static float random_element(uint32_t seed, size_t i, heed_dtype dtype)
{
    const int bits = dtype == HEED_F32 ? 24 : 8;
    uint32_t h = ((uint32_t)i + seed * 0x9E3779B9u) * 2654435761u;
    h = (h ^ h >> 15) * 2246822519u;
    return (float)((h ^ h >> 13) >> (32 - bits)) / (float)(1 << (bits - 1)) - 1;
}

static void store(const heed_tensor *t, size_t i, float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (t->dtype == HEED_F32)
        ((float *)t->data)[i] = f;
    else if (t->dtype == HEED_BF16)
        ((uint16_t *)t->data)[i] = (uint16_t)(bits >> 16);
    else
        ((uint16_t *)t->data)[i] = f == 0 ? 0
                                          : (uint16_t)((bits >> 16 & 0x8000u) |
                                                       ((bits & 0x7FFFFFFFu) - (112u << 23)) >> 13);
}

static double load(const heed_tensor *t, size_t i)
{
    if (t->dtype == HEED_F32)
        return ((const float *)t->data)[i];
    uint32_t half = ((const uint16_t *)t->data)[i], bits = half << 16;
    if (t->dtype == HEED_F16) {
        int exponent = (int)(half >> 10 & 31), fraction = (int)(half & 1023);
        double magnitude = exponent ? ldexp(fraction + 1024, exponent - 25) : ldexp(fraction, -24);
        return half & 0x8000u ? -magnitude : magnitude;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static void create(heed_tensor *t, heed_dtype dtype, int64_t b, int64_t h, int64_t s, int64_t d, uint32_t seed)
{
    *t = (heed_tensor){ .dtype = dtype, .shape = { b, h, s, d } };
    size_t n = elements(t);
    t->data = allocate(n * size_of(dtype));
    for (size_t i = 0; i < n; i++)
        store(t, i, random_element(seed, i, dtype));
}

static void create_mask(heed_tensor *t, int64_t b, int64_t s, int64_t keys)
{
    *t = (heed_tensor){ .dtype = HEED_BOOL, .shape = { b, 1, s, keys } };
    size_t n = elements(t);
    uint8_t *seen = t->data = allocate(n);
    for (size_t i = 0; i < n; i++)
        seen[i] = random_element(5, i, HEED_F32) > -0.4;
}

static void destroy(problem *p)
{
    heed_tensor *all[] = { &p->a.q,   &p->a.k,   &p->a.v,   &p->a.o,    &p->a.lse, &p->g.d_o,
                           &p->g.d_q, &p->g.d_k, &p->g.d_v, &p->a.mask, &p->a.bias };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]->data);
    free(p->x.workspace);
}

static heed_status call(const problem *p)
{
    return p->backward ? heed_backward(&p->a, &p->g, &p->x) : heed_forward(&p->a, &p->x);
}

static heed_status prepare(const char *line, problem *p)
{
    char text[64];
    int64_t B = (int64_t)number_of(line, "B", 1), Hq = (int64_t)number_of(line, "Hq", 1);
    int64_t Hk = (int64_t)number_of(line, "Hk", (double)Hq), Sq = (int64_t)number_of(line, "Sq", 1);
    int64_t Sk = (int64_t)number_of(line, "Sk", (double)Sq), D = (int64_t)number_of(line, "D", 64);
    text_of(line, "dtype", text);
    heed_dtype type = !strcmp(text, "bf16") ? HEED_BF16 : !strcmp(text, "fp16") ? HEED_F16 : HEED_F32;
    *p = (problem){ .backward = !strcmp(text_of(line, "pass", text), "backward") };
    create(&p->a.q, type, B, Hq, Sq, D, 1);
    create(&p->a.k, type, B, Hk, Sk, D, 2);
    create(&p->a.v, type, B, Hk, Sk, D, 3);
    create(&p->a.o, type, B, Hq, Sq, D, 0);
    p->a.causal = (int)number_of(line, "causal", 0);
    p->a.key_stride = (int64_t)number_of(line, "stride", 1);
    p->x.threads = (int)number_of(line, "threads", 1);
    text_of(line, "with", text);
    if (!strcmp(text, "mask"))
        create_mask(&p->a.mask, 1, Sq, Sk);
    else if (!strcmp(text, "padding"))
        create_mask(&p->a.mask, B, 1, Sk);
    else if (!strcmp(text, "bias"))
        create(&p->a.bias, type, 1, Hq, Sq, Sk, 6);
    else if (!strcmp(text, "dropout"))
        p->a.dropout = 0.1f;
    heed_gradient *g = NULL;
    if (p->backward) {
        create(&p->a.lse, HEED_F32, B, Hq, Sq, 1, 0);
        create(&p->g.d_o, type, B, Hq, Sq, D, 4);
        create(&p->g.d_q, type, B, Hq, Sq, D, 0);
        create(&p->g.d_k, type, B, Hk, Sk, D, 0);
        create(&p->g.d_v, type, B, Hk, Sk, D, 0);
        g = &p->g;
        heed_exec x = p->x; /* the forward that backward starts from, with whatever kernel is best */
        heed_status s = heed_workspace_size(&p->a, NULL, &x, &x.workspace_bytes);
        x.workspace = allocate(x.workspace_bytes);
        s = s ? s : heed_forward(&p->a, &x);
        free(x.workspace);
        if (s)
            return s;
    }
    if (*text_of(line, "kernel", p->kernel))
        p->x.kernel = p->kernel;
    heed_status s = heed_workspace_size(&p->a, g, &p->x, &p->x.workspace_bytes);
    p->x.workspace = allocate(p->x.workspace_bytes);
    return s ? s : call(p);
}

/* ---- time, verify --------------------------------------------------------------------------------------------------- */

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double time_of(const problem *p, double min_time)
{
    enum { MOST = 4096 };
    static double samples[MOST];
    double start = now(), each;
    int calls = 0, n = 0;
    do
        call(p), calls++;
    while ((each = now() - start) < min_time / 10);
    each
        /= calls;
    int batch = each < 5e-4 ? (int)ceil(5e-4 / each) : 1;
    for (double end = now() + min_time; n < MOST && (n < 3 || now() < end); n++) {
        start = now();
        for (int i = 0; i < batch; i++)
            call(p);
        samples[n] = (now() - start) / batch;
    }
    qsort(samples, (size_t)n, sizeof *samples, ascending);
    return samples[n / 2];
}

static void print_tensor(const char *name, const heed_tensor *t, const char *end)
{
    printf("\"%s\": [", name);
    for (size_t i = 0, n = elements(t); i < n; i++)
        printf("%s%.9g", i ? ", " : "", load(t, i));
    printf("]%s", end);
}

static void run_case(const char *line, int verify)
{
    problem p;
    if (prepare(line, &p))
        fail();
    else if (!verify)
        printf("{\"seconds\": %.9g, \"workspace\": %zu}\n", time_of(&p, number_of(line, "min_time", 0.2)),
               p.x.workspace_bytes);
    else if (!p.backward) {
        printf("{");
        print_tensor("o", &p.a.o, "}\n");
    } else {
        printf("{");
        print_tensor("dq", &p.g.d_q, ", ");
        print_tensor("dk", &p.g.d_k, ", ");
        print_tensor("dv", &p.g.d_v, "}\n");
    }
    destroy(&p);
}

/* ---- peak, read: the machine ---------------------------------------------------------------------------------------- */

enum { PEAK_TERMS = 240000 };
static volatile float sink_value;

/* Enough chains to hide the latency, few enough for the registers. */
#define DEFINE_PEAK(name, chains, attribute, vector, set, step)                                                        \
    attribute static void name(void)                                                                                   \
    {                                                                                                                  \
        vector x[chains], y = set(1e-9f);                                                                              \
        for (int c = 0; c < chains; c++)                                                                               \
            x[c] = set((float)c);                                                                                      \
        for (int i = 0; i < PEAK_TERMS / chains; i++)                                                                  \
            _Pragma("GCC unroll 24") for (int c = 0; c < chains; c++) x[c] = step(x[c], y);                            \
        for (int c = 1; c < chains; c++)                                                                               \
            x[0] = x[0] + x[c];                                                                                        \
        float first;                                                                                                   \
        memcpy(&first, &x[0], sizeof first);                                                                           \
        sink_value = first;                                                                                            \
    }

typedef float float4 __attribute__((vector_size(16)));
#define SET_PLAIN(f) ((float4){ f, f, f, f })
#define STEP_PLAIN(x, y) ((x) * (y) + (y))
DEFINE_PEAK(peak_plain, 12, , float4, SET_PLAIN, STEP_PLAIN)
#if defined(__x86_64__)
#define STEP_AVX2(x, y) _mm256_fmadd_ps(x, y, x)
#define STEP_AVX512(x, y) _mm512_fmadd_ps(x, y, x)
#define STEP_BF16(x, y) _mm512_dpbf16_ps(x, (__m512bh)(y), (__m512bh)(y))
DEFINE_PEAK(peak_avx2, 12, __attribute__((target("avx2,fma"))), __m256, _mm256_set1_ps, STEP_AVX2)
DEFINE_PEAK(peak_avx512, 24, __attribute__((target("avx512f"))), __m512, _mm512_set1_ps, STEP_AVX512)
DEFINE_PEAK(peak_bf16, 24, __attribute__((target("avx512f,avx512bf16"))), __m512, _mm512_set1_ps, STEP_BF16)
#endif

/* The fastest loop of that kind here, and the flops of one of its steps; NULL: this machine has none. */
static void (*peak_loop(const char *kind, int *flops))(void)
{
    int best = !strcmp(kind, "fma");
#if defined(__x86_64__)
    if (!strcmp(kind, "bf16"))
        return *flops = 64, __builtin_cpu_supports("avx512bf16") ? peak_bf16 : NULL;
    if (best && __builtin_cpu_supports("avx512f"))
        return *flops = 32, peak_avx512;
    if ((best || !strcmp(kind, "avx2")) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return *flops = 16, peak_avx2;
#endif
    return *flops = 8, best ? peak_plain : NULL;
}

static void peak(const char *line)
{
    char kind[64];
    int flops, threads = (int)number_of(line, "threads", 1);
    void (*loop)(void) = peak_loop(text_of(line, "kind", kind), &flops);
    double best = 0;
    for (double end = now() + 0.5; loop && now() < end;) {
        double start = now();
#pragma omp parallel num_threads(threads)
        for (int i = 0; i < 20; i++)
            loop();
        double rate = (double)threads * 20 * PEAK_TERMS * flops / (now() - start);
        best = rate > best ? rate : best;
    }
    printf("{\"flops\": %.6g}\n", best);
}

#if defined(__x86_64__) && defined(__GNUC__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif
WIDEST static float sum(const float *x, size_t n)
{
    float total[64] = { 0 };
    for (size_t i = 0; i + 64 <= n; i += 64)
        for (int c = 0; c < 64; c++)
            total[c] += x[i + (size_t)c];
    return total[0] + total[63];
}

static void read_memory(const char *line)
{
    int threads = (int)number_of(line, "threads", 1);
    size_t bytes = (size_t)number_of(line, "bytes", 1 << 28), part = bytes / 4 / (size_t)threads;
    float *data = allocate(bytes);
    for (size_t i = 0; i < bytes / 4; i++)
        data[i] = 1;
    double best = 0;
    for (double end = now() + 0.5; now() < end;) {
        double start = now();
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int t = 0; t < threads; t++)
            sink_value = sum(data + part * (size_t)t, part);
        double rate = (double)bytes / (now() - start);
        best = rate > best ? rate : best;
    }
    free(data);
    printf("{\"rate\": %.6g}\n", best);
}

static void info(void)
{
    heed_device_info device;
    if (heed_device_at(HEED_CPU, 0, &device))
        fail();
    else
        printf("{\"heed\": \"%s\", \"cpu\": \"%s\", \"features\": \"%s\"}\n", heed_version_string(), device.name,
               device.features);
}

int main(void)
{
    char line[1024];
    while (fgets(line, sizeof line, stdin)) {
        char command[16] = "";
        sscanf(line, "%15s", command);
        use_clock_of(line);
        if (!strcmp(command, "time") || !strcmp(command, "verify"))
            run_case(line, command[0] == 'v');
        else if (!strcmp(command, "peak"))
            peak(line);
        else if (!strcmp(command, "read"))
            read_memory(line);
        else if (!strcmp(command, "info"))
            info();
        else
            printf("{\"error\": \"unknown command: %s\"}\n", command);
        fflush(stdout);
    }
    return 0;
}
