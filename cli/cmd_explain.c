/* heed explain: which kernel a problem gets and why those before it in the table do not fit. Only shapes are described,
 * no memory is taken, so a problem may be as large as one likes and the chip need not be here. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

typedef struct answers {
    int backward, json;
    int dtype;
    unsigned with;
    const char *chip;
    size_list shapes;
    rules r;
    how h;
} answers;

static heed_tensor shape(heed_dtype dtype, int64_t B, int64_t H, int64_t S, int64_t D)
{
    return (heed_tensor){ .dtype = dtype, .shape = { B, H, S, D } };
}

/* What is more than 63 bits count stays more than heed takes. */
static int64_t times(int64_t a, int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

/* Rows of D elements with three more between them: what kernels that load whole vectors call unaligned. */
static void make_view(heed_tensor *t)
{
    int64_t row = t->shape[3] < INT64_MAX - 3 ? t->shape[3] + 3 : INT64_MAX, head = times(t->shape[2], row);
    memcpy(t->stride, (int64_t[4]){ times(t->shape[1], head), head, row, 1 }, sizeof t->stride);
}

static void describe(const answers *given, heed_attention *a, heed_gradient *g)
{
    static const int32_t somewhere[1]; /* lengths that planning does not read */
    enum { PAGE = 64 };
    sizes n = size_at(&given->shapes, 0);
    heed_dtype type = (heed_dtype)given->dtype;
    int ragged = (given->with & WITH_RAGGED) != 0, paged = (given->with & WITH_PAGES) != 0;
    int64_t columns = n.Sk / PAGE + (n.Sk % PAGE != 0);
    int64_t Bq = ragged ? 1 : n.B, Sq = ragged ? times(n.B, n.Sq) : n.Sq;
    int64_t Bk = paged ? times(n.B, columns) : Bq, Sk = paged ? PAGE : ragged ? times(n.B, n.Sk) : n.Sk;
    int64_t seen = paged ? times(columns, PAGE) : n.Sk; /* columns of mask and bias */

    *a = (heed_attention){ .q = shape(type, Bq, n.Hq, Sq, n.D),
                           .k = shape(type, Bk, n.Hk, Sk, n.D),
                           .v = shape(type, Bk, n.Hk, Sk, n.Dv),
                           .o = shape(type, Bq, n.Hq, Sq, n.Dv),
                           .lse = shape(HEED_F32, Bq, n.Hq, Sq, 1) };
    rules_apply(&given->r, a);
    if (given->with & WITH_MASK)
        a->mask = shape(HEED_BOOL, n.B, 1, n.Sq, seen);
    if (given->with & WITH_BIAS)
        a->bias = shape(HEED_F32, 1, n.Hq, n.Sq, seen);
    if (given->with & WITH_ALIBI)
        a->alibi = shape(HEED_F32, 1, n.Hq, 1, 1);
    if (given->with & WITH_SINK)
        a->sink = shape(HEED_F32, 1, n.Hq, 1, 1);
    if (ragged) {
        a->offsets_q = a->offsets_k = somewhere;
        a->sequences = n.B;
        a->max_rows = n.Sq;
        a->max_keys = n.Sk;
    }
    if (given->with & WITH_PADDING)
        a->lengths_q = a->lengths_k = somewhere;
    if (paged) {
        a->lengths_k = a->block_table = somewhere;
        a->block_table_stride = a->block_table_columns = columns;
        a->offsets_k = NULL;
        a->max_keys = 0;
    }
    *g = (heed_gradient){ .d_o = a->o, .d_q = a->q, .d_k = a->k, .d_v = a->v, .d_bias = a->bias, .d_sink = a->sink };
    heed_tensor *rows[] = { &a->q, &a->k, &a->v, &a->o };
    for (int i = 0; i < 4 && (given->with & WITH_VIEWS); i++)
        make_view(rows[i]);
}

/* The planner ends its text with the row it took: "NAME: taken, ...". */
static void print_json(char *text, heed_status status)
{
    char *taken = strstr(text, ": taken"), *name = taken;
    while (name && name > text && name[-1] != '\n')
        name--;
    printf("{\n  \"kernel\": ");
    if (taken)
        printf("\"%.*s\"", (int)(taken - name), name);
    else
        printf("null");
    printf(",\n  \"status\": \"%s\",\n  \"lines\": [", heed_status_name(status));
    const char *comma = "";
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"), comma = ",") {
        printf("%s\n    ", comma);
        json_text(stdout, line);
    }
    printf("\n  ]\n}\n");
}

static int list_chips(void)
{
    for (int i = 0; heed_chip_name(i); i++)
        puts(heed_chip_name(i));
    return 0;
}

static int explain(const answers *given)
{
    enum { ROOM = 1 << 16 };
    heed_attention a;
    heed_gradient g;
    heed_exec x = how_exec(&given->h, given->backward, (heed_dtype)given->dtype);
    describe(given, &a, &g);
    char *text = calloc(1, ROOM);
    if (!text)
        return complain(EXIT_FAILED, "no memory");
    heed_status status = heed_explain(&a, given->backward ? &g : NULL, &x, given->chip, text, ROOM);
    if (given->json && (!status || *text))
        print_json(text, status);
    else
        fputs(text, stdout);
    free(text);
    return status ? complain_status(status) : 0;
}

int command_explain(int argc, char **argv)
{
    static const manual m = {
        .command = "explain",
        .usage = "--shape B,H,S,D [options]",
        .text = "Prints which kernel a problem would get, and for each one before it in the table why it was passed\n"
                "over. The same planner decides what runs, so the answer is what would happen. No memory is taken.\n",
        .examples = "  heed explain --shape 4,16,1024,128 --dtype bf16 --causal\n"
                    "  heed explain --shape 1,32,4096,128 --heads-k 8 --sq 1 --device h200 --dtype fp16\n"
                    "  heed explain --shape 2,8,512,64 --backward --with mask,bias --device avx2\n"
                    "  heed explain --device list\n",
    };
    static const option_row rows[] = {
        { "dtype", 0, "TYPE", read_dtype, offsetof(answers, dtype), "fp32 (default), fp16, bf16 or fp64" },
        { "with", 0, "LIST", read_with, offsetof(answers, with),
          "tensors and layouts the problem has: mask, bias, alibi,\nsink, padding, ragged, pages, views" },
        { "backward", 0, NULL, read_flag, offsetof(answers, backward), "the backward; default: the forward" },
        { "device", 0, "CHIP", read_text, offsetof(answers, chip), "t4, h200, avx2 ...; 'list' prints their names" },
        { "json", 0, NULL, read_flag, offsetof(answers, json), "as JSON" },
        { NULL, 0, NULL, NULL, 0, NULL },
    };
    answers given = { .h = how_default() };
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
    if (given.chip && !strcmp(given.chip, "list"))
        return list_chips();
    if (given.shapes.count != 1)
        return complain(EXIT_USAGE, "one --shape B,H,S,D is needed; see heed explain --help");
    return explain(&given);
}
