/* What a thread needs next is asked for while it computes. The rows of the next block lie in the third cache or in memory,
 * and what the processor prefetches by itself comes too late: a tile of Q that is not there yet takes 12% longer. Requests
 * are spread over many steps, the rows between two products and the register tiles of some, as more than a few at a time
 * would make the processor wait. */

#define AHEAD_BYTES (1 << 21)   /* tensors that are smaller together stay in the caches from call to call */
#define CACHED_FLOATS (1 << 18) /* keys and values of a head that take no more stay in the second cache */
#define LINE 64

typedef struct ahead {
    int count;
    struct {
        const char *at, *end;
        int64_t step, bytes; /* from one run of bytes to the next; of a run: a row, or a line if rows are neighbours */
        int64_t share;       /* of one step */
    } list[8];
} ahead;

/* Whether a call over these tensors gains by it. */
static int worth_asking(const heed_tensor *const tensors[], int count)
{
    int64_t bytes = 0;
    for (int i = 0; i < count; i++)
        if (tensors[i]->data)
            bytes += tensors[i]->shape[0] * tensors[i]->shape[1] * tensors[i]->shape[2] * tensors[i]->shape[3] *
                     (tensors[i]->dtype == HEED_F32 ? 4 : 2);
    return bytes > AHEAD_BYTES;
}

/* Rows of so many bytes each are to be asked for. */
static void ask_for_rows(ahead *a, const void *first, int64_t rows, int64_t step, int64_t bytes)
{
    int i = a->count++;
    a->list[i].at = first, a->list[i].end = (const char *)first + rows * step;
    a->list[i].step = step == bytes ? LINE : step, a->list[i].bytes = step == bytes ? LINE : bytes;
}

/* In so many steps. */
static void ask_in(ahead *a, int64_t steps)
{
    for (int i = 0; i < a->count; i++)
        a->list[i].share = ((a->list[i].end - a->list[i].at) / a->list[i].step / steps + 1) * a->list[i].step;
}

/* One step. */
static void ask(ahead *a)
{
    for (int i = 0; i < a->count; i++) {
        const char *at = a->list[i].at, *end = HEED_MIN(at + a->list[i].share, a->list[i].end);
        for (; at < end; at += a->list[i].step)
            for (int64_t c = 0; c < a->list[i].bytes; c += LINE)
                __builtin_prefetch(at + c, 0, 2);
        a->list[i].at = at;
    }
}
