/* heed demo: the first thing to run. One head of 128 tokens in 32 dimensions, forward and backward, with inputs that
 * are the same on every machine, so that the numbers can be compared with those of the documentation. */
#include "cli.h"

#include <math.h>

enum { TOKENS = 128, WIDTH = 32 };

/* The rand() of glibc in its default state: r_i = r_(i-3) + r_(i-31) over a ring of 31 words, which a linear congruence
 * fills from the seed 1 and 310 draws stir. Brought along because other C libraries have another rand(). */
typedef struct generator {
    uint32_t ring[31];
    int at;
} generator;

static int32_t draw(generator *g)
{
    uint32_t sum = g->ring[g->at] += g->ring[(g->at + 28) % 31];
    g->at = (g->at + 1) % 31;
    return (int32_t)(sum >> 1);
}

static generator generator_new(void)
{
    generator g = { .ring = { 1 }, .at = 3 };
    for (int i = 1; i < 31; i++)
        g.ring[i] = (uint32_t)((uint64_t)g.ring[i - 1] * 16807 % 2147483647);
    for (int i = 0; i < 310; i++)
        draw(&g);
    return g;
}

/* The problem, and how each pass is run. */
typedef struct job {
    workload w;
    heed_exec pass[2];
} job;

static void fill(workload *w)
{
    generator g = generator_new();
    float *tensors[] = { w->a.q.data, w->a.k.data, w->a.v.data, w->g.d_o.data };
    for (int i = 0; i < TOKENS * WIDTH; i++)
        for (int t = 0; t < 4; t++)
            tensors[t][i] = (float)(2.0 * draw(&g) / 2147483647 - 1);
}

static void print_corner(const char *name, const heed_tensor *t)
{
    for (int i = 0; i < 3; i++) {
        printf("%s%-4s%s", paint(stdout, BOLD), i ? "" : name, paint(stdout, PLAIN));
        for (int c = 0; c < 3; c++)
            printf(" %12g", tensor_at(t, 0, 0, i, c));
        putchar('\n');
    }
}

static int forward(void *argument)
{
    job *j = argument;
    workload_use(&j->w, &j->pass[0]);
    return workload_forward(&j->w);
}

static int backward(void *argument)
{
    job *j = argument;
    workload_use(&j->w, &j->pass[1]);
    return workload_backward(&j->w);
}

static int both(void *argument)
{
    int status = forward(argument);
    return status ? status : backward(argument);
}

/* The largest distance of any result from the reference in fp64; -1: it could not be computed. */
static double distance(const workload *w)
{
    workload twin;
    if (!workload_twin(&twin, w))
        return -1;
    int failed = workload_forward(&twin) || workload_backward(&twin);
    const heed_tensor *got[] = { &w->a.o, &w->g.d_q, &w->g.d_k, &w->g.d_v };
    const heed_tensor *want[] = { &twin.a.o, &twin.g.d_q, &twin.g.d_k, &twin.g.d_v };
    double worst = 0;
    for (int i = 0; i < 4; i++)
        worst = fmax(worst, tensor_difference(got[i], want[i]).max);
    workload_free(&twin);
    return failed ? -1 : worst;
}

static int judge(const workload *w)
{
    double worst = distance(w);
    printf("largest difference from the fp64 reference: %.2g\n", worst);
    if (!(worst >= 0 && worst < 1e-6))
        return complain(EXIT_FAILED, "the results are wrong: %g from the reference, less than 1e-6 is fair", worst);
    return 0;
}

static int show(job *j)
{
    const workload *w = &j->w;
    heed_status status = (heed_status)both(j);
    if (status)
        return complain_status(status);
    printf("%d tokens, %d dimensions, one head, fp32; the top left 3x3 of each matrix\n\n", TOKENS, WIDTH);
    print_corner("Q", &w->a.q);
    print_corner("K", &w->a.k);
    print_corner("V", &w->a.v);
    print_corner("O", &w->a.o);
    print_corner("dQ", &w->g.d_q);
    print_corner("dK", &w->g.d_k);
    print_corner("dV", &w->g.d_v);
    putchar('\n');
    return judge(w);
}

/* Of one pass, or of both. On a GPU also what it computes for, without what starting it takes. */
static void print_time(job *j, const char *name, int (*passes)(void *), double min_time)
{
    printf("  %-9s", name);
    if (j->pass[0].backend != HEED_CUDA) {
        printf(" %8.2f us\n", 1e6 * median_seconds(passes, j, min_time));
        return;
    }
    for (int replayed = 0; replayed < 2; replayed++)
        printf(" %8.2f us", 1e6 * gpu_seconds(&j->w.a, &j->w.g, passes == backward ? NULL : &j->pass[0],
                                              passes == forward ? NULL : &j->pass[1], replayed, min_time));
    putchar('\n');
}

static int print_times(job *j, double min_time)
{
    heed_device_info device;
    const heed_exec *x = &j->pass[0];
    int on_gpu = x->backend == HEED_CUDA, threads;
    heed_status status = heed_device_at(on_gpu ? HEED_CUDA : HEED_CPU, 0, &device);
    if (status)
        return complain_status(status);
    threads = x->threads ? x->threads : device.threads;
    if (on_gpu)
        printf("\n%s, by CUDA events: around each call; of one call among many that a graph replays\n", device.name);
    else
        printf("\n%s, %d thread%s\n", device.name, threads, threads == 1 ? "" : "s");
    print_time(j, "forward", forward, min_time);
    print_time(j, "backward", backward, min_time);
    print_time(j, "both", both, min_time);
    return 0;
}

/* The same problem on the GPU, after it was shown on the CPU. */
static int compare_gpu(job *j)
{
    heed_device_info device;
    if (heed_device_at(HEED_CUDA, 0, &device)) {
        printf("no CUDA device\n");
        return 0;
    }
    for (int pass = 0; pass < 2; pass++)
        j->pass[pass] = (heed_exec){ .backend = HEED_CUDA };
    workload_spoil(&j->w, 0);
    workload_spoil(&j->w, 1);
    heed_status status = (heed_status)both(j);
    if (status)
        return complain_status(status);
    int code = print_times(j, 0.2);
    return code ? code : judge(&j->w);
}

int command_demo(int argc, char **argv)
{
    static const manual m = {
        .command = "demo",
        .usage = "[options]",
        .text = "Computes attention over 128 tokens of 32 dimensions, one head, fp32, no mask, scale 1/sqrt(32), and\n"
                "its gradients. Inputs are those of the C library's rand() in its default state, the same on every\n"
                "machine. Prints the top left 3x3 of Q, K, V, O, dQ, dK and dV, compares all of O, dQ, dK and dV with\n"
                "the fp64 reference, and prints the median time of forward, backward and both: on the CPU and, where\n"
                "there is one, on the GPU (by CUDA events, around each call and around a graph that replays many of\n"
                "them, which is what the GPU itself takes); with --backend or --kernel, only there.\n",
        .examples = "  heed demo\n"
                    "  heed demo --threads 1\n"
                    "  heed demo --backend cuda\n",
    };
    how h = how_default();
    const option_group groups[] = { { "Options", how_rows, &h }, { 0 } };
    int code = options_parse(&m, groups, argc, argv);
    if (code >= 0)
        return code;

    job j = { .pass = { how_exec(&h, 0, HEED_F32), how_exec(&h, 1, HEED_F32) } };
    if (!workload_new(&j.w, &(workload_spec){ .n = { 1, 1, 1, TOKENS, TOKENS, WIDTH, WIDTH } }))
        return complain(EXIT_FAILED, "no memory");
    fill(&j.w);
    code = show(&j);
    if (!code)
        code = print_times(&j, 0.2);
    if (!code && !h.backend_given && !h.kernel)
        code = compare_gpu(&j);
    workload_free(&j.w);
    return code;
}
