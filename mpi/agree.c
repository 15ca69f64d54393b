#include "agree.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char message[512];

const char *heed_mpi_last_error(void) { return message; }

heed_status fail(heed_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return status;
}

heed_status check_mpi(int code, const char *what)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (code == MPI_SUCCESS)
        return HEED_OK;
    MPI_Error_string(code, text, &length);
    return fail(HEED_DEVICE_ERROR, "%s: %s", what, text);
}

static int64_t bits_of(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static const char *const names[] = { "the call (0: forward, 1: backward)",
                                     "batch",
                                     "q: heads",
                                     "k: heads",
                                     "head_dim",
                                     "v: head_dim",
                                     "dtype",
                                     "causal",
                                     "windowed",
                                     "window_left",
                                     "window_right",
                                     "key_stride",
                                     "shards",
                                     "scale, as bits",
                                     "zero_scale",
                                     "softcap, as bits",
                                     "dropout, as bits",
                                     "dropout_seed",
                                     "alibi (0: none, else a number that its slopes make)" };
enum { SHARED = sizeof names / sizeof *names };

/* 0 without slopes; else odd, and as good as never the same for other slopes. */
static int64_t number_of_slopes(const heed_tensor *t)
{
    uint64_t number = 14695981039346656037u; /* FNV-1a */
    int packed = !t->stride[0] && !t->stride[1];
    for (int64_t b = 0; t->data && b < t->shape[0]; b++)
        for (int64_t h = 0; h < t->shape[1]; h++) {
            int64_t at = packed ? b * t->shape[1] + h : b * t->stride[0] + h * t->stride[1];
            number = (number ^ (uint32_t)bits_of(((const float *)t->data)[at])) * 1099511628211u;
        }
    return t->data ? (int64_t)(number >> 1 | 1) : 0;
}

static void describe(const heed_attention *a, const heed_mpi *m, int pass, heed_status own, call_words *w)
{
    static const heed_attention none;
    memset(w, 0, sizeof *w);
    w->pass = pass;
    a = a ? a : &none;
    w->batch = a->q.shape[0], w->query_heads = a->q.shape[1], w->key_heads = a->k.shape[1];
    w->head_dim = a->q.shape[3], w->value_dim = a->v.shape[3], w->dtype = a->q.dtype;
    w->causal = a->causal != 0, w->windowed = a->windowed != 0, w->shards = m->shards;
    w->window_left = a->windowed ? a->window_left : 0, w->window_right = a->windowed ? a->window_right : 0;
    w->key_stride = a->key_stride ? a->key_stride : 1;
    w->scale = bits_of(a->scale), w->zero_scale = a->zero_scale != 0;
    w->softcap = bits_of(a->softcap), w->dropout = bits_of(a->dropout);
    w->seed = a->dropout != 0 ? (int64_t)a->dropout_seed : 0;
    w->alibi = own ? 0 : number_of_slopes(&a->alibi); /* they are good to read where nothing is wrong */
    w->status = own, w->rows = a->q.shape[2], w->keys = a->k.shape[2];
    if (own)
        snprintf(w->message, sizeof w->message, "%.*s", MESSAGE - 1, message);
}

heed_status agree(const heed_attention *a, const heed_mpi *m, int pass, heed_status own, call_words *words, int ranks)
{
    _Static_assert(sizeof(call_words) == 320 && offsetof(call_words, status) == SHARED * sizeof(int64_t),
                   "every shared word has a name");
    call_words mine;
    describe(a, m, pass, own, &mine);
    heed_status s = check_mpi(MPI_Allgather(&mine, sizeof mine, MPI_BYTE, words, sizeof mine, MPI_BYTE, m->comm),
                              "MPI_Allgather");
    for (int r = 0; !s && r < ranks; r++)
        if (words[r].status)
            s = fail((heed_status)words[r].status, "rank %d: %s", r, words[r].message);
    for (int n = 0; !s && n < SHARED; n++)
        for (int r = 1; !s && r < ranks; r++) {
            int64_t first, other;
            memcpy(&first, (const char *)&words[0] + n * sizeof first, sizeof first);
            memcpy(&other, (const char *)&words[r] + n * sizeof other, sizeof other);
            if (first != other)
                s = fail(HEED_BAD_ARGUMENT, "%s: is %lld on rank 0 and %lld on rank %d", names[n], (long long)first,
                         (long long)other, r);
        }
    return s;
}
