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
                                     "softcap, as bits",
                                     "dropout, as bits",
                                     "dropout_seed",
                                     "alibi (0: none)" };
enum { SHARED = sizeof names / sizeof *names };

static void describe(const heed_attention *a, const heed_mpi *m, int pass, heed_status own, call_words *w)
{
    memset(w, 0, sizeof *w);
    w->pass = pass;
    w->batch = a->q.shape[0], w->query_heads = a->q.shape[1], w->key_heads = a->k.shape[1];
    w->head_dim = a->q.shape[3], w->value_dim = a->v.shape[3], w->dtype = a->q.dtype;
    w->causal = a->causal != 0, w->windowed = a->windowed != 0, w->shards = m->shards;
    w->window_left = a->windowed ? a->window_left : 0, w->window_right = a->windowed ? a->window_right : 0;
    w->key_stride = a->key_stride ? a->key_stride : 1;
    w->scale = bits_of(a->scale), w->softcap = bits_of(a->softcap), w->dropout = bits_of(a->dropout);
    w->seed = a->dropout != 0 ? (int64_t)a->dropout_seed : 0;
    w->alibi = a->alibi.data != NULL;
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
