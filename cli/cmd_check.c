/* heed check: every kernel this machine can run, against the reference in fp64.
 *
 * What error is fair? Rounding the inputs to their type already moves the exact result: a kernel cannot be blamed for
 * an error of that size. So the reference runs twice, on the inputs and on inputs nudged at random by one rounding
 * error, and a kernel may be off by a few times that distance, see allowed(), plus four roundings of the result itself;
 * both the largest and the RMS error count. This is a comparison with the problem's own sensitivity, so it needs no
 * constants for masks, bands or large scores. A result of one or two numbers may by chance be nudged hardly at all: who
 * fails is judged once more, by the largest distance of several nudges. */
#include "cli.h"

#include <math.h>
#include <string.h>

enum { MOST_KERNELS = 128, RESULTS = 7 };

typedef struct answers {
    int quick, json, threads;
    const char *kernel, *problem;
    uint64_t seed;
    double seconds;
} answers;

/* One row of the table. */
typedef struct score {
    heed_kernel_info kernel;
    int cases, failures, skipped;
    double max, rms;  /* worst errors, relative to the largest and the RMS value of the tensor */
    double part;      /* worst error as a part of what is allowed */
    char failed[200]; /* the first problem that failed, and how */
} score;

typedef struct checker {
    const answers *given;
    score scores[MOST_KERNELS];
    int kernels;
} checker;

/* ---- The problems ----------------------------------------------------------------------------------------------- */

typedef struct listed {
    const char *name;
    sizes n;
    rules r;
    unsigned with;
} listed;

static const listed list[] = {
    { "plain", { 2, 2, 2, 64, 64, 64, 64 }, { 0 }, 0 },
    { "one row, one key", { 1, 1, 1, 1, 1, 8, 8 }, { 0 }, 0 },
    { "odd sizes", { 1, 3, 3, 77, 101, 37, 53 }, { 0 }, WITH_D_LSE },
    { "causal", { 1, 2, 2, 130, 130, 32, 32 }, { .causal = 1 }, 0 },
    { "causal, more keys than rows", { 1, 2, 1, 33, 150, 64, 64 }, { .causal = 1 }, 0 },
    { "causal, more rows than keys", { 1, 2, 1, 90, 40, 16, 16 }, { .causal = 1 }, 0 },
    { "causal, top left", { 1, 2, 2, 40, 90, 16, 16 }, { .causal = 1, .align = HEED_ALIGN_TOP_LEFT }, 0 },
    { "window", { 1, 2, 2, 140, 140, 32, 32 }, { .windowed = 1, .left = 17, .right = 5 }, 0 },
    { "window of the past", { 2, 1, 1, 70, 95, 24, 24 }, { .causal = 1, .windowed = 1, .left = 9, .right = -1 }, 0 },
    { "key stride", { 1, 2, 2, 65, 130, 64, 64 }, { .stride = 3 }, 0 },
    { "key stride, causal", { 1, 2, 2, 96, 96, 32, 32 }, { .stride = 2, .causal = 1 }, 0 },
    { "mask", { 2, 3, 3, 50, 70, 32, 32 }, { 0 }, WITH_MASK },
    { "bias", { 2, 3, 3, 50, 70, 32, 32 }, { 0 }, WITH_BIAS },
    { "mask, aligned", { 1, 2, 2, 140, 208, 64, 64 }, { 0 }, WITH_MASK },
    { "bias, aligned", { 1, 2, 1, 140, 208, 128, 128 }, { .causal = 1 }, WITH_BIAS },
    { "mask and bias, aligned", { 2, 2, 1, 70, 144, 64, 64 }, { 0 }, WITH_MASK | WITH_BIAS | WITH_PADDING },
    { "softcap", { 1, 2, 2, 48, 80, 64, 64 }, { .softcap = 2, .scale = 0.5 }, 0 },
    { "alibi", { 2, 4, 4, 60, 60, 32, 32 }, { .causal = 1 }, WITH_ALIBI },
    { "sink", { 2, 4, 2, 60, 75, 32, 32 }, { 0 }, WITH_SINK | WITH_D_LSE },
    { "dropout", { 2, 2, 2, 70, 90, 32, 32 }, { .dropout = 0.25, .seed = 42 }, 0 },
    { "padded", { 4, 2, 2, 60, 80, 32, 32 }, { 0 }, WITH_PADDING },
    { "padded, causal", { 4, 2, 1, 60, 80, 32, 32 }, { .causal = 1 }, WITH_PADDING },
    { "ragged", { 5, 2, 2, 60, 60, 32, 32 }, { 0 }, WITH_RAGGED },
    { "ragged, causal, stride", { 5, 4, 2, 50, 70, 48, 48 }, { .causal = 1, .stride = 2 }, WITH_RAGGED },
    { "paged", { 3, 4, 2, 5, 100, 64, 64 }, { .causal = 1 }, WITH_PAGES },
    { "eight query heads for a key head", { 2, 8, 1, 40, 55, 64, 64 }, { .causal = 1 }, 0 },
    { "one query", { 2, 8, 2, 1, 300, 128, 128 }, { 0 }, 0 },
    { "one query of many heads", { 4, 140, 70, 1, 520, 32, 32 }, { 0 }, WITH_PADDING },
    { "strided views", { 2, 3, 3, 45, 66, 40, 40 }, { .causal = 1 }, WITH_VIEWS | WITH_MASK },
    { "large heads", { 1, 1, 1, 40, 50, 256, 192 }, { 0 }, 0 },
    { "wide heads, causal", { 1, 2, 1, 130, 150, 256, 256 }, { .causal = 1 }, 0 },
    { "wide heads, ragged", { 3, 2, 1, 130, 150, 160, 160 }, { .causal = 1 }, WITH_RAGGED },
    { "negative scale", { 1, 2, 2, 40, 50, 32, 32 }, { .scaled = 1, .scale = -0.3 }, 0 },
    { "zero scale", { 1, 2, 2, 40, 50, 32, 32 }, { .scaled = 1 }, 0 },
    { "large scores", { 1, 2, 2, 40, 50, 32, 32 }, { .scaled = 1, .scale = 8 }, 0 },
    { "everything",
      { 3, 4, 2, 66, 83, 40, 24 },
      { .causal = 1, .windowed = 1, .left = 50, .right = 3, .stride = 2, .softcap = 5, .dropout = 0.1, .seed = 7 },
      WITH_MASK | WITH_BIAS | WITH_ALIBI | WITH_SINK | WITH_PADDING | WITH_VIEWS | WITH_D_LSE },
};
enum { LISTED = sizeof list / sizeof *list };

static int maybe(uint64_t *state, double chance) { return random_unit(state) < chance; }

/* Any combination of sizes and features. The name is all that is needed to meet it again. */
static void invent(uint64_t seed, workload_spec *s, char *name, size_t size)
{
    uint64_t state = seed;
    int64_t group = 1 + random_below(&state, 4), Hk = 1 + random_below(&state, 3), D = 1 + random_below(&state, 128);
    sizes n = { .B = 1 + random_below(&state, 3),
                .Hq = Hk * group,
                .Hk = Hk,
                .Sq = 1 + random_below(&state, 90),
                .Sk = 1 + random_below(&state, 140),
                .D = D,
                .Dv = maybe(&state, 0.7) ? D : 1 + random_below(&state, 128) };
    rules r = { .causal = maybe(&state, 0.4),
                .windowed = maybe(&state, 0.2),
                .left = random_below(&state, 60) - 1,
                .right = random_below(&state, 60) - 1,
                .stride = maybe(&state, 0.2) ? 1 + random_below(&state, 5) : 1,
                .align = maybe(&state, 0.3) ? HEED_ALIGN_TOP_LEFT : HEED_ALIGN_BOTTOM_RIGHT,
                .softcap = maybe(&state, 0.15) ? 3 : 0,
                .dropout = maybe(&state, 0.15) ? 0.2 : 0,
                .seed = seed };
    if (!r.windowed)
        r.left = r.right = 0;
    unsigned with = 0;
    const unsigned parts[] = { WITH_MASK, WITH_BIAS, WITH_ALIBI, WITH_SINK, WITH_VIEWS, WITH_D_LSE };
    for (int i = 0; i < 6; i++)
        with |= maybe(&state, 0.2) ? parts[i] : 0;
    with |= maybe(&state, 0.2) ? WITH_PADDING : maybe(&state, 0.2) ? WITH_RAGGED : 0;
    *s = (workload_spec){ .n = n, .r = r, .with = with, .seed = seed };
    snprintf(name, size, "random --seed %llu", (unsigned long long)seed);
}

/* ---- One problem, one type, all kernels ------------------------------------------------------------------------- */

enum { NUDGES = 12 }; /* of the second judgement */

typedef struct yardstick {
    workload exact;
    difference fair[2][RESULTS]; /* how far nudges have moved the results of each pass */
    int nudges, forward_only;
    double rounding; /* of the inputs */
    uint64_t state;  /* of the random numbers */
} yardstick;

static void results_of(const workload *w, int backward, const heed_tensor *t[RESULTS])
{
    const heed_tensor *forward[RESULTS] = { &w->a.o, &w->a.lse };
    const heed_tensor *gradients[RESULTS] = { &w->g.d_q, &w->g.d_k, &w->g.d_v, &w->g.d_bias, &w->g.d_sink };
    memcpy(t, backward ? gradients : forward, RESULTS * sizeof *t);
}

/* How many times the distance. A sound kernel rounds a few times on the way: q.k, exp, P.v. And fp32 is summed in fp32:
 * n terms in a row, whose partial sums grow like sqrt(n), gather about sqrt(n) times what nudged terms would; half
 * types are summed in fp32 too, where that is nothing. */
static double allowed(const workload *w)
{
    const heed_attention *a = &w->a;
    int64_t heads = a->q.shape[1] / a->k.shape[1], n = a->q.shape[3]; /* the longest sum: over D, keys or rows */
    n = a->k.shape[2] > n ? a->k.shape[2] : n;
    n = a->q.shape[2] * heads > n ? a->q.shape[2] * heads : n;
    return a->q.dtype == HEED_F32 ? 4 + sqrt((double)n) : 4;
}

/* The reference once more, on inputs nudged by a rounding error; o, too, is an input of the backward. */
static heed_status nudge(yardstick *y)
{
    workload nudged;
    if (!workload_twin(&nudged, &y->exact))
        return HEED_NO_WORKSPACE;
    const heed_tensor *inputs[] = { &nudged.a.q, &nudged.a.k, &nudged.a.v, &nudged.g.d_o };
    for (int i = 0; i < 4; i++)
        tensor_nudge(inputs[i], y->rounding, &y->state);
    heed_status status = workload_forward(&nudged);
    for (int pass = 0; pass < (y->forward_only ? 1 : 2) && !status; pass++) {
        const heed_tensor *got[RESULTS], *want[RESULTS];
        if (pass) {
            tensor_nudge(&nudged.a.o, y->rounding, &y->state);
            status = workload_backward(&nudged);
        }
        results_of(&nudged, pass, got);
        results_of(&y->exact, pass, want);
        for (int i = 0; i < RESULTS && got[i] && !status; i++)
            if (got[i]->data) {
                const difference moved = tensor_difference(got[i], want[i]);
                y->fair[pass][i].max = fmax(y->fair[pass][i].max, moved.max);
                y->fair[pass][i].rms = fmax(y->fair[pass][i].rms, moved.rms);
            }
    }
    y->nudges++;
    workload_free(&nudged);
    return status;
}

static void judge(score *s, const workload *w, yardstick *y, const char *problem)
{
    static const char *const names[2][RESULTS] = { { "o", "lse" }, { "dq", "dk", "dv", "dbias", "dsink" } };
    int backward = s->kernel.backward, good = 1;
    const heed_tensor *got[RESULTS], *want[RESULTS];
    results_of(w, backward, got);
    results_of(&y->exact, backward, want);
    for (int i = 0; i < RESULTS && got[i]; i++) {
        if (!got[i]->data)
            continue;
        const difference error = tensor_difference(got[i], want[i]), *fair = &y->fair[backward][i];
        const double rounding = dtype_roundoff(got[i]->dtype), times = allowed(w);
        double max_part, rms_part, part;
        for (;;) {
            max_part = error.max / (times * fair->max + 4 * rounding * error.want_max + 1e-37);
            rms_part = error.rms / (times * fair->rms + 4 * rounding * error.want_rms + 1e-37);
            part = fmax(max_part, rms_part);
            if (part <= 1 || y->nudges >= NUDGES)
                break;
            while (y->nudges < NUDGES)
                if (nudge(y))
                    y->nudges = NUDGES; /* as far as it came */
        }
        s->max = fmax(s->max, error.want_max > 0 ? error.max / error.want_max : error.max);
        s->rms = fmax(s->rms, error.want_rms > 0 ? error.rms / error.want_rms : error.rms);
        s->part = fmax(s->part, part);
        if (!(part <= 1) && good) {
            good = 0;
            if (!s->failures++)
                snprintf(s->failed, sizeof s->failed, "%s: %s is off by %.3g, %.3g allowed", problem,
                         names[backward][i], max_part > rms_part ? error.max : error.rms,
                         max_part > rms_part ? error.max / max_part : error.rms / rms_part);
        }
    }
}

static int wanted(const score *s, heed_dtype dtype, int forward_only)
{
    return s->kernel.dtype == dtype && !(forward_only && s->kernel.backward);
}

/* The backward of every kernel starts from the o and lse that the reference has in that type. */
static void check_kernel(const checker *c, score *s, workload *w, yardstick *y, const char *problem)
{
    heed_exec own = {
        .backend = s->kernel.backend, .kernel = s->kernel.name, .threads = c->given->threads, .nondeterministic = 1
    };
    heed_exec reference = { .backend = HEED_REFERENCE };
    heed_status status = HEED_OK;
    workload_spoil(w, 0);
    workload_spoil(w, 1);
    for (int pass = 0; pass <= s->kernel.backward && !status; pass++) {
        workload_use(w, pass == s->kernel.backward ? &own : &reference);
        status = pass ? workload_backward(w) : workload_forward(w);
    }
    if (status == HEED_UNSUPPORTED) {
        s->skipped++;
        return;
    }
    if (!status)
        judge(s, w, y, problem);
    else if (!s->failures++)
        snprintf(s->failed, sizeof s->failed, "%s: %s: %s", problem, heed_status_name(status),
                 gpu_error() ? gpu_error() : heed_last_error());
    s->cases++;
}

/* The results on the inputs, and how far a nudge moves them. */
static heed_status make_yardstick(yardstick *y, const workload *w, int forward_only)
{
    *y = (yardstick){ .forward_only = forward_only, .rounding = dtype_roundoff(w->a.q.dtype), .state = 1 };
    if (!workload_twin(&y->exact, w))
        return HEED_NO_WORKSPACE;
    heed_status status = workload_forward(&y->exact);
    if (!status && !forward_only)
        status = workload_backward(&y->exact);
    return status ? status : nudge(y);
}

static int check_problem(checker *c, workload_spec spec, const char *problem)
{
    static const heed_dtype dtypes[] = { HEED_F32, HEED_F16, HEED_BF16 };
    int forward_only = (spec.with & WITH_PAGES) != 0, code = 0;
    for (int d = 0; d < 3 && !code; d++) {
        int any = 0;
        for (int k = 0; k < c->kernels; k++)
            any |= wanted(&c->scores[k], dtypes[d], forward_only);
        if (!any)
            continue;
        workload w;
        yardstick y;
        spec.dtype = dtypes[d];
        if (!workload_new(&w, &spec))
            return complain(EXIT_FAILED, "no memory");
        heed_status status = make_yardstick(&y, &w, forward_only);
        if (status)
            code = complain(EXIT_FAILED, "%s: the reference itself: %s: %s", problem, heed_status_name(status),
                            heed_last_error());
        for (int k = 0; k < c->kernels && !code; k++)
            if (wanted(&c->scores[k], dtypes[d], forward_only))
                check_kernel(c, &c->scores[k], &w, &y, problem);
        workload_free(&y.exact);
        workload_free(&w);
    }
    return code;
}

/* ---- The command ------------------------------------------------------------------------------------------------ */

static void choose_kernels(checker *c)
{
    heed_kernel_info k;
    for (int i = 0; !heed_kernel_at(i, &k) && c->kernels < MOST_KERNELS; i++)
        if (k.runs_here && k.dtype != HEED_F64 && (!c->given->kernel || strstr(k.name, c->given->kernel)))
            c->scores[c->kernels++].kernel = k;
}

/* The list, then random problems: a fixed number, or as many as fit the time. A seed that is given comes first among
 * the random ones, so that a reported failure is met at once. */
static int check_all(checker *c)
{
    const answers *given = c->given;
    double start = now_seconds(), limit = given->seconds;
    int random = given->quick ? 4 : limit > 0 ? 1 << 30 : 60, code = 0;
    for (int i = 0; i < LISTED + random && !code; i++) {
        char name[64];
        workload_spec spec;
        if (i < LISTED) {
            spec = (workload_spec){ .n = list[i].n, .r = list[i].r, .with = list[i].with };
            spec.seed = given->seed + (uint64_t)i;
            snprintf(name, sizeof name, "%s", list[i].name);
        } else
            invent(given->seed + (uint64_t)(i - LISTED), &spec, name, sizeof name);
        if (given->problem && !strstr(name, given->problem))
            continue;
        double spent = now_seconds() - start;
        if (limit > 0 && i >= LISTED && spent >= limit)
            break;
        progress(limit > 0 ? fmin(spent / limit, 1) : (double)i / (LISTED + random), name);
        code = check_problem(c, spec, name);
    }
    progress_end();
    return code;
}

static void print_table(const checker *c)
{
    printf("%-34s %6s %8s %11s %11s %8s\n", "kernel", "cases", "skipped", "max error", "RMS error", "allowed");
    for (int i = 0; i < c->kernels; i++) {
        const score *s = &c->scores[i];
        printf("%-34s %6d %8d %11.2e %11.2e %7.0f%%  %s%s%s\n", s->kernel.name, s->cases, s->skipped, s->max, s->rms,
               100 * s->part, paint(stdout, s->failures ? RED : GREEN), s->failures ? "FAILED" : "ok",
               paint(stdout, PLAIN));
        if (s->failures)
            printf("    %d of %d; first: %s\n", s->failures, s->cases, s->failed);
    }
}

static void print_json(const checker *c)
{
    printf("{\n  \"version\": \"%s\",\n  \"seed\": %llu,\n  \"kernels\": [", heed_version_string(),
           (unsigned long long)c->given->seed);
    for (int i = 0; i < c->kernels; i++) {
        const score *s = &c->scores[i];
        printf("%s\n    { \"name\": \"%s\", \"cases\": %d, \"skipped\": %d, \"failures\": %d, \"max_error\": ",
               i ? "," : "", s->kernel.name, s->cases, s->skipped, s->failures);
        json_number(stdout, s->max);
        printf(", \"rms_error\": ");
        json_number(stdout, s->rms);
        printf(", \"part_of_allowed\": ");
        json_number(stdout, s->part);
        printf(", \"first_failure\": ");
        if (s->failures)
            json_text(stdout, s->failed);
        else
            printf("null");
        printf(" }");
    }
    printf("\n  ]\n}\n");
}

int command_check(int argc, char **argv)
{
    static const manual m = {
        .command = "check",
        .usage = "[options]",
        .text = "Runs every kernel that this machine can run, forward and backward, on problems with every feature,\n"
                "and compares with the reference in fp64, whose own rows are left out, being the judge. Rounding\n"
                "errors of the inputs move the exact result by some distance; a kernel may be off by a small\n"
                "multiple of it: 4, plus sqrt(n) for fp32 sums of n terms.\n"
                "Columns: cases; problems the kernel does not take; the worst error, relative to the largest value\n"
                "and as RMS; how much of what is allowed it used. Exit code 1 when a kernel fails.\n",
        .examples = "  heed check --quick\n"
                    "  heed check --kernel avx2 --seconds 60\n"
                    "  heed check --kernel forward_cpu_plain_f32 --seed 1234   the random problem of a report, first\n",
    };
    static const option_row rows[] = {
        { "quick", 0, NULL, read_flag, offsetof(answers, quick), "the listed problems and a few random ones" },
        { "seconds", 0, "S", read_double, offsetof(answers, seconds), "random problems for so long" },
        { "seed", 0, "N", read_seed, offsetof(answers, seed), "of the random problems; default 1" },
        { "kernel", 0, "TEXT", read_text, offsetof(answers, kernel), "only kernels with this in their name" },
        { "problem", 0, "TEXT", read_text, offsetof(answers, problem), "only problems with this in their name" },
        { "threads", 0, "N", read_int, offsetof(answers, threads), "at most N threads" },
        { "json", 0, NULL, read_flag, offsetof(answers, json), "the table as JSON" },
        { NULL, 0, NULL, NULL, 0, NULL },
    };
    answers given = { .seed = 1 };
    const option_group groups[] = { { "Options", rows, &given }, { 0 } };
    int code = options_parse(&m, groups, argc, argv);
    if (code >= 0)
        return code;

    static checker c;
    c.given = &given;
    choose_kernels(&c);
    if (!c.kernels)
        return complain(EXIT_USAGE, "no kernel that runs here has '%s' in its name; see heed info",
                        given.kernel ? given.kernel : "");
    if ((code = check_all(&c)))
        return code;
    int met = 0, failed = 0;
    for (int i = 0; i < c.kernels; i++)
        met += c.scores[i].cases + c.scores[i].skipped;
    if (!met)
        return complain(EXIT_USAGE, "no problem for these kernels has '%s' in its name", given.problem);
    if (given.json)
        print_json(&c);
    else
        print_table(&c);
    for (int i = 0; i < c.kernels; i++) /* one that takes nothing is no good, unless it was asked for one thing */
        failed += c.scores[i].failures > 0 || !(c.scores[i].cases || given.problem);
    return failed ? complain(EXIT_FAILED, "%d of %d kernels failed", failed, c.kernels) : 0;
}
