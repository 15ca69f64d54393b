/* A command line described by tables: each command lists groups of rows, and parsing, --help and the messages for what
 * is wrong all follow from them. The groups that several commands take are at the end. */
#include "cli.h"

#include <errno.h>
#include <float.h>
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ROWS = 64, FIRST_CODE = 256 }; /* codes above all letters, so that both can come back from getopt */

typedef struct flat_row {
    const option_row *row;
    void *base;
} flat_row;

static int flatten(const option_group *groups, flat_row flat[MOST_ROWS], struct option *longs, char *shorts)
{
    int n = 0;
    *shorts++ = ':'; /* tell a missing value from an unknown option */
    for (const option_group *g = groups; g->title; g++)
        for (const option_row *row = g->rows; row->name && n < MOST_ROWS - 1; row++, n++) {
            flat[n] = (flat_row){ row, g->base };
            longs[n] = (struct option){ row->name, row->value ? required_argument : no_argument, NULL, FIRST_CODE + n };
            if (row->letter) {
                *shorts++ = (char)row->letter;
                if (row->value)
                    *shorts++ = ':';
            }
        }
    longs[n] = (struct option){ "help", no_argument, NULL, 'h' };
    longs[n + 1] = (struct option){ NULL, 0, NULL, 0 };
    strcpy(shorts, "h");
    return n;
}

/* Help text stands in one column, its lines broken where the table breaks them. */
static void print_row(const option_row *row)
{
    enum { COLUMN = 26 };
    int at = row->letter ? printf("  -%c, --%s", row->letter, row->name) : printf("  --%s", row->name);
    if (row->value)
        at += printf(" %s", row->value);
    if (at > COLUMN - 2)
        at = printf("\n") - 1;
    printf("%*s", COLUMN - at, "");
    for (const char *c = row->help; *c; c++)
        if (*c == '\n')
            printf("\n%*s", COLUMN, "");
        else
            putchar(*c);
    putchar('\n');
}

static void print_manual(const manual *m, const option_group *groups)
{
    printf("Usage: heed %s %s\n\n%s", m->command, m->usage, m->text);
    for (const option_group *g = groups; g->title; g++) {
        printf("\n%s%s%s\n", paint(stdout, BOLD), g->title, paint(stdout, PLAIN));
        for (const option_row *row = g->rows; row->name; row++)
            print_row(row);
    }
    printf("  -h, --help              this text\n\n%sExamples%s\n%s", paint(stdout, BOLD), paint(stdout, PLAIN),
           m->examples);
}

static const option_row *row_of(const flat_row *flat, int rows, int code)
{
    for (int i = 0; i < rows; i++)
        if (code == FIRST_CODE + i || (flat[i].row->letter && code == flat[i].row->letter))
            return flat[i].row;
    return NULL;
}

/* getopt says little about what it did not like; the word itself is the one before optind. */
static int complain_option(const manual *m, const flat_row *flat, int rows, int answer, const char *word)
{
    const option_row *row = row_of(flat, rows, optopt);
    if (answer == ':' && row)
        return complain(EXIT_USAGE, "--%s: needs a value, %s; see heed %s --help", row->name, row->value, m->command);
    if (row && !row->value)
        return complain(EXIT_USAGE, "--%s: takes no value; see heed %s --help", row->name, m->command);
    if (optopt == 'h') /* --help is in no table */
        return complain(EXIT_USAGE, "--help: takes no value; see heed %s --help", m->command);
    if (optopt && optopt < FIRST_CODE)
        return complain(EXIT_USAGE, "unknown option '-%c'; see heed %s --help", optopt, m->command);
    return complain(EXIT_USAGE, "unknown or ambiguous option '%s'; see heed %s --help", word, m->command);
}

int options_parse(const manual *m, const option_group *groups, int argc, char **argv)
{
    flat_row flat[MOST_ROWS];
    struct option longs[MOST_ROWS + 1];
    char shorts[2 * MOST_ROWS + 4];
    int rows = flatten(groups, flat, longs, shorts), code;
    opterr = 0;
    while ((code = getopt_long(argc, argv, shorts, longs, NULL)) != -1) {
        if (code == 'h') {
            print_manual(m, groups);
            return 0;
        }
        if (code == '?' || code == ':')
            return complain_option(m, flat, rows, code, argv[optind - 1]);
        for (int i = 0; i < rows; i++) {
            const option_row *row = flat[i].row;
            if (code != FIRST_CODE + i && !(row->letter && code == row->letter))
                continue;
            const char *expected = row->read((char *)flat[i].base + row->offset, optarg);
            if (expected)
                return complain(EXIT_USAGE, "--%s: '%s' is not %s; see heed %s --help", row->name, optarg, expected,
                                m->command);
        }
    }
    if (optind < argc)
        return complain(EXIT_USAGE, "unexpected '%s'; see heed %s --help", argv[optind], m->command);
    return -1;
}

/* ---- Readers ---------------------------------------------------------------------------------------------------- */

static int parse_integer(const char *text, char **end, int64_t *x)
{
    errno = 0;
    long long value = strtoll(text, end, 10);
    *x = value;
    return *end != text && !errno;
}

const char *read_flag(void *to, const char *text)
{
    (void)text;
    *(int *)to = 1;
    return NULL;
}

const char *read_int(void *to, const char *text)
{
    char *end;
    int64_t x;
    if (!parse_integer(text, &end, &x) || *end || x < 0 || x > INT32_MAX)
        return "a whole number from 0 up";
    *(int *)to = (int)x;
    return NULL;
}

const char *read_size(void *to, const char *text)
{
    char *end;
    int64_t x;
    if (!parse_integer(text, &end, &x) || *end || x < 1)
        return "a whole number from 1 up";
    *(int64_t *)to = x;
    return NULL;
}

const char *read_double(void *to, const char *text)
{
    char *end;
    double x = strtod(text, &end);
    if (end == text || *end || !isfinite(x))
        return "a number";
    *(double *)to = x;
    return NULL;
}

const char *read_seed(void *to, const char *text)
{
    char *end;
    errno = 0;
    unsigned long long x = strtoull(text, &end, 0);
    if (end == text || *end || errno || strchr(text, '-'))
        return "a whole number from 0 to 2^64 - 1";
    *(uint64_t *)to = x;
    return NULL;
}

const char *read_text(void *to, const char *text)
{
    *(const char **)to = text;
    return NULL;
}

const char *read_dtype(void *to, const char *text)
{
    for (heed_dtype d = HEED_F32; d <= HEED_F64; d++)
        if (!strcmp(text, dtype_name(d))) {
            *(int *)to = (int)d;
            return NULL;
        }
    return "fp32, fp16, bf16 or fp64";
}

const char *read_backend(void *to, const char *text)
{
    how *h = to;
    h->backend_given = 1;
    if (!strcmp(text, "cpu"))
        h->backend = HEED_CPU;
    else if (!strcmp(text, "reference"))
        h->backend = HEED_REFERENCE;
    else if (!strcmp(text, "cuda"))
        h->backend = HEED_CUDA;
    else
        return "cpu, cuda or reference";
    return NULL;
}

const char *read_with(void *to, const char *text)
{
    static const struct {
        const char *name;
        unsigned flag;
    } parts[] = {
        { "mask", WITH_MASK },       { "bias", WITH_BIAS },     { "alibi", WITH_ALIBI }, { "sink", WITH_SINK },
        { "padding", WITH_PADDING }, { "ragged", WITH_RAGGED }, { "pages", WITH_PAGES }, { "views", WITH_VIEWS },
    };
    while (*text) {
        size_t length = strcspn(text, ","), i = 0, n = sizeof parts / sizeof *parts;
        while (i < n && (strlen(parts[i].name) != length || strncmp(parts[i].name, text, length)))
            i++;
        if (i == n)
            return "a list of mask, bias, alibi, sink, padding, ragged, pages, views";
        *(unsigned *)to |= parts[i].flag;
        text += length + (text[length] == ',');
    }
    return NULL;
}

/* ---- The rules of a problem ------------------------------------------------------------------------------------- */

static const char *read_window(void *to, const char *text)
{
    rules *r = to;
    char *end;
    if (!parse_integer(text, &end, &r->left) || *end != ',' || !parse_integer(end + 1, &end, &r->right) || *end ||
        r->left < -1 || r->right < -1)
        return "LEFT,RIGHT, each from 0 up, or -1 for no limit";
    r->windowed = 1;
    return NULL;
}

static const char *read_align(void *to, const char *text)
{
    if (!strcmp(text, "bottom-right"))
        *(heed_align *)to = HEED_ALIGN_BOTTOM_RIGHT;
    else if (!strcmp(text, "top-left"))
        *(heed_align *)to = HEED_ALIGN_TOP_LEFT;
    else
        return "top-left or bottom-right";
    return NULL;
}

static const char *read_scale(void *to, const char *text)
{
    rules *r = to;
    r->scaled = 1;
    return read_double(&r->scale, text);
}

const option_row rule_rows[] = {
    { "causal", 0, NULL, read_flag, offsetof(rules, causal), "a row sees no key after its own position" },
    { "window", 0, "L,R", read_window, 0, "a row sees L keys before and R after its position;\n-1: no limit" },
    { "stride", 0, "N", read_size, offsetof(rules, stride), "only keys 0, N, 2N, ... are seen" },
    { "align", 0, "CORNER", read_align, offsetof(rules, align),
      "bottom-right (default): the last row stands at the last\nkey; top-left: the first row at the first key" },
    { "scale", 0, "X", read_scale, 0, "factor of q.k; default 1/sqrt(D)" },
    { "softcap", 0, "X", read_double, offsetof(rules, softcap), "scores become X tanh(score / X)" },
    { "dropout", 0, "P", read_double, offsetof(rules, dropout), "drop this part of the probabilities" },
    { "seed", 0, "N", read_seed, offsetof(rules, seed), "of the dropout" },
    { NULL, 0, NULL, NULL, 0, NULL },
};

void rules_apply(const rules *r, heed_attention *a)
{
    a->causal = r->causal;
    a->windowed = r->windowed;
    a->window_left = r->left;
    a->window_right = r->right;
    a->key_stride = r->stride;
    a->align = r->align;
    a->scale = (float)r->scale;
    a->zero_scale = r->scaled && a->scale == 0;
    a->softcap = r->softcap > 0 ? fmaxf((float)r->softcap, FLT_MIN) : (float)r->softcap; /* 0 would be none */
    a->dropout = (float)r->dropout;
    a->dropout_seed = r->seed;
}

/* ---- How to run it ---------------------------------------------------------------------------------------------- */

const option_row how_rows[] = {
    { "backend", 0, "NAME", read_backend, 0, "cpu (default), cuda, or reference: plain loops in double" },
    { "kernel", 0, "NAME", read_text, offsetof(how, kernel), "force this kernel for its pass; heed info lists them" },
    { "threads", 0, "N", read_int, offsetof(how, threads), "at most N threads; default: OMP_NUM_THREADS, or all" },
    { NULL, 0, NULL, NULL, 0, NULL },
};

static char environment_kernel[128];

void how_environment(void)
{
    const char *kernel = getenv("HEED_KERNEL");
    if (kernel)
        snprintf(environment_kernel, sizeof environment_kernel, "%s", kernel);
    unsetenv("HEED_KERNEL");
}

how how_default(void) { return (how){ .kernel = *environment_kernel ? environment_kernel : NULL }; }

/* A kernel's name says its pass and backend; a name that is not in the table is left for heed to complain about. fp64
 * is the reference's alone. */
heed_exec how_exec(const how *h, int backward, heed_dtype dtype)
{
    heed_exec x = { .backend = h->backend, .kernel = h->kernel, .threads = h->threads };
    if (dtype == HEED_F64 && !h->backend_given)
        x.backend = HEED_REFERENCE;
    heed_kernel_info k;
    for (int i = 0; h->kernel && !heed_kernel_at(i, &k); i++)
        if (!strcmp(k.name, h->kernel)) {
            x.kernel = k.backward == backward ? h->kernel : NULL;
            x.backend = h->backend_given ? h->backend : k.backend;
        }
    return x;
}

/* ---- Sizes ------------------------------------------------------------------------------------------------------ */

static const char *read_shape(void *to, const char *text)
{
    size_list *l = to;
    const char *expected = "B,H,S,D: four whole numbers from 1 up (and at most 64 shapes)";
    int64_t n[4];
    for (int i = 0; i < 4; i++) {
        char *end;
        if (!parse_integer(text, &end, &n[i]) || n[i] < 1 || *end != (i < 3 ? ',' : 0))
            return expected;
        text = end + 1;
    }
    if (l->count == 64)
        return expected;
    l->item[l->count++] = (sizes){ n[0], n[1], n[1], n[2], n[2], n[3], n[3] };
    return NULL;
}

const option_row size_rows[] = {
    { "shape", 0, "B,H,S,D", read_shape, 0, "batch, heads, sequence, head size" },
    { "heads-k", 0, "N", read_size, offsetof(size_list, heads_k), "key heads, where fewer than H" },
    { "sq", 0, "N", read_size, offsetof(size_list, rows), "query rows, where not S" },
    { "sk", 0, "N", read_size, offsetof(size_list, keys), "keys, where not S" },
    { "dv", 0, "N", read_size, offsetof(size_list, head_dim_v), "head size of v, where not D" },
    { NULL, 0, NULL, NULL, 0, NULL },
};

sizes size_at(const size_list *l, int index)
{
    sizes n = l->item[index];
    n.Hk = l->heads_k ? l->heads_k : n.Hk;
    n.Sq = l->rows ? l->rows : n.Sq;
    n.Sk = l->keys ? l->keys : n.Sk;
    n.Dv = l->head_dim_v ? l->head_dim_v : n.Dv;
    return n;
}
