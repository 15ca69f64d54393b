/* A call on a GPU: its tensors are copied to the GPU's memory, heed runs there, results are copied back. Times are
 * between CUDA events, with everything in the GPU's memory already: around each call, or around replays of a graph of calls. */
#include "cli.h"

#ifdef HEED_HAS_CUDA

#include <cuda_runtime_api.h>
#include <math.h>
#include <string.h>

enum { ALIGNMENT = 256, MOST_PARTS = 24 };

/* A stretch of the host's memory that a pointer of the call points into, and its copy on the GPU. Each has an allocation
 * of its own, so that compute-sanitizer sees where a kernel leaves it. */
typedef struct part {
    void *pointer; /* where in the call that pointer is */
    char *host, *there;
    size_t bytes;
    size_t inside; /* from its beginning to what the pointer points to */
    int is_result;
} part;

typedef struct gpu_call {
    heed_attention a;
    heed_gradient g;
    heed_exec x[2]; /* of the forward and of the backward */
    part parts[MOST_PARTS];
    int count;
    void *workspace;
} gpu_call;

static char trouble[256];

const char *gpu_error(void) { return *trouble ? trouble : NULL; }

static heed_status failed(cudaError_t error, const char *doing)
{
    if (!error)
        return HEED_OK;
    snprintf(trouble, sizeof trouble, "%s: %s", doing, cudaGetErrorString(error));
    return HEED_DEVICE_ERROR;
}

/* ---- Where everything goes --------------------------------------------------------------------------------------- */

static void place(gpu_call *c, void *pointer, char *host, size_t bytes, size_t inside, int is_result)
{
    c->parts[c->count++] = (part){ pointer, host, NULL, bytes, inside, is_result };
}

static void place_tensor(gpu_call *c, heed_tensor *t, int is_result)
{
    int64_t low = 0, high = 0, count = 1;
    for (int d = 0; d < 4; d++) {
        int64_t reach = (t->shape[d] - 1) * t->stride[d];
        *(reach < 0 ? &low : &high) += reach;
        count *= t->shape[d];
    }
    if (!t->data)
        return;
    size_t size = element_size(t->dtype), before = (size_t)-low * size;
    size_t bytes = count ? (size_t)(high - low + 1) * size : 0;
    place(c, &t->data, (char *)t->data - before, bytes, before, is_result);
}

static void place_numbers(gpu_call *c, const int32_t **numbers, int64_t count)
{
    if (*numbers)
        place(c, (void *)numbers, (char *)*numbers, (size_t)count * sizeof **numbers, 0, 0);
}

static void place_all(gpu_call *c)
{
    heed_attention *a = &c->a;
    heed_gradient *g = &c->g;
    heed_tensor *inputs[] = { &a->q,     &a->k,    &a->v,   &a->mask,  &a->bias,
                              &a->alibi, &a->sink, &g->d_o, &g->d_lse, &g->delta };
    heed_tensor *results[] = { &a->o, &a->lse, &g->d_q, &g->d_k, &g->d_v, &g->d_bias, &g->d_sink };
    int64_t B = a->sequences ? a->sequences : a->q.shape[0];
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        place_tensor(c, inputs[i], 0);
    for (size_t i = 0; i < sizeof results / sizeof *results; i++)
        place_tensor(c, results[i], 1);
    place_numbers(c, &a->lengths_q, B);
    place_numbers(c, &a->lengths_k, B);
    place_numbers(c, &a->offsets_q, B + 1);
    place_numbers(c, &a->offsets_k, B + 1);
    place_numbers(c, &a->block_table, B * a->block_table_stride);
}

/* ---- There and back ---------------------------------------------------------------------------------------------- */

/* Addresses keep their remainder by ALIGNMENT, so that a tensor is as well aligned there as here. */
static heed_status copy_there(part *p)
{
    size_t shift = (uintptr_t)p->host % ALIGNMENT;
    heed_status status = failed(cudaMalloc((void **)&p->there, shift + p->bytes + !p->bytes),
                                "asking for the GPU's memory");
    char *start = p->there + shift, *target = start + p->inside;
    memcpy(p->pointer, &target, sizeof target);
    return status ? status : failed(cudaMemcpy(start, p->host, p->bytes, cudaMemcpyHostToDevice), "copying to the GPU");
}

static heed_status copy_back(const gpu_call *c)
{
    heed_status status = failed(cudaDeviceSynchronize(), "running on the GPU");
    for (int i = 0; i < c->count && !status; i++) {
        const part *p = &c->parts[i];
        if (p->is_result)
            status = failed(cudaMemcpy(p->host, p->there + (uintptr_t)p->host % ALIGNMENT, p->bytes,
                                       cudaMemcpyDeviceToHost),
                            "copying from the GPU");
    }
    return status;
}

static void end(gpu_call *c)
{
    for (int i = 0; i < c->count; i++)
        cudaFree(c->parts[i].there);
    cudaFree(c->workspace);
}

/* A call whose tensors are in the GPU's memory. Either pass may be absent. */
static heed_status start(gpu_call *c, const heed_attention *a, const heed_gradient *g, const heed_exec *forward,
                         const heed_exec *backward)
{
    const heed_exec *passes[2] = { forward, backward };
    size_t bytes = 0, most = 0;
    heed_status status = HEED_OK;
    *trouble = 0;
    *c = (gpu_call){ .a = *a };
    if (backward)
        c->g = *g;
    for (int i = 0; i < 2 && !status; i++)
        if (passes[i]) {
            c->x[i] = *passes[i];
            status = heed_workspace_size(a, i ? g : NULL, passes[i], &bytes);
            most = bytes > most ? bytes : most;
        }
    if (status)
        return status;
    place_all(c);
    for (int i = 0; i < c->count && !status; i++)
        status = copy_there(&c->parts[i]);
    if (!status && most)
        status = failed(cudaMalloc(&c->workspace, most), "asking for a workspace");
    for (int i = 0; i < 2; i++)
        c->x[i].workspace = c->workspace, c->x[i].workspace_bytes = most;
    return status;
}

static heed_status run(gpu_call *c, int forward, int backward)
{
    heed_status status = forward ? heed_forward(&c->a, &c->x[0]) : HEED_OK;
    return status || !backward ? status : heed_backward(&c->a, &c->g, &c->x[1]);
}

heed_status gpu_run(const heed_attention *a, const heed_gradient *g, const heed_exec *x)
{
    gpu_call c;
    heed_status status = start(&c, a, g, g ? NULL : x, g ? x : NULL);
    if (!status)
        status = run(&c, !g, g != NULL);
    if (!status)
        status = copy_back(&c);
    end(&c);
    return status;
}

/* ---- Times ------------------------------------------------------------------------------------------------------- */

enum { BATCH = 64, BATCHES = 64, IN_GRAPH = 20 };

/* What is timed: one pass of the call, or both; where there is a graph, IN_GRAPH of them. */
typedef struct timed {
    gpu_call c;
    int forward, backward;
    cudaStream_t stream;
    cudaGraphExec_t graph;
    cudaEvent_t events[BATCH + 1];
} timed;

/* The seconds of each of count runs. Within a batch the GPU's queue is never empty, unless a run is so short that the
 * host cannot keep up, and then that is what a caller sees. */
static heed_status time_batch(timed *t, int count, double *seconds)
{
    heed_status status = failed(cudaEventRecord(t->events[0], t->stream), "recording an event");
    for (int i = 0; i < count && !status; i++) {
        status = t->graph ? failed(cudaGraphLaunch(t->graph, t->stream), "replaying a graph")
                          : run(&t->c, t->forward, t->backward);
        if (!status)
            status = failed(cudaEventRecord(t->events[i + 1], t->stream), "recording an event");
    }
    if (!status)
        status = failed(cudaDeviceSynchronize(), "running on the GPU");
    for (int i = 0; i < count && !status; i++) {
        float milliseconds = 0;
        status = failed(cudaEventElapsedTime(&milliseconds, t->events[i], t->events[i + 1]), "reading an event");
        seconds[i] = 1e-3 * (double)milliseconds / (t->graph ? IN_GRAPH : 1);
    }
    return status;
}

/* From here on a graph is timed. What runs for the first time runs outside of it before. */
static heed_status capture(timed *t)
{
    cudaGraph_t graph = NULL;
    heed_status status = run(&t->c, t->forward, t->backward);
    if (!status)
        status = failed(cudaStreamBeginCapture(t->stream, cudaStreamCaptureModeThreadLocal), "capturing a graph");
    if (status)
        return status;
    for (int i = 0; i < IN_GRAPH && !status; i++)
        status = run(&t->c, t->forward, t->backward);
    heed_status ended = failed(cudaStreamEndCapture(t->stream, &graph), "capturing a graph");
    if (!status)
        status = ended;
    if (!status)
        status = failed(cudaGraphInstantiate(&t->graph, graph, 0), "making a graph");
    if (graph)
        cudaGraphDestroy(graph);
    return status;
}

static heed_status prepare(timed *t, int replayed)
{
    heed_status status = failed(cudaStreamCreateWithFlags(&t->stream, cudaStreamNonBlocking), "making a stream");
    t->c.x[0].stream = t->c.x[1].stream = t->stream;
    for (int i = 0; i <= BATCH && !status; i++)
        status = failed(cudaEventCreate(&t->events[i]), "making an event");
    return status || !replayed ? status : capture(t);
}

static void discard(timed *t)
{
    for (int i = 0; i <= BATCH; i++)
        if (t->events[i])
            cudaEventDestroy(t->events[i]);
    if (t->graph)
        cudaGraphExecDestroy(t->graph);
    if (t->stream)
        cudaStreamDestroy(t->stream);
    end(&t->c);
}

double gpu_seconds(const heed_attention *a, const heed_gradient *g, const heed_exec *forward, const heed_exec *backward,
                   int replayed, double min_time)
{
    static double taken[BATCH * BATCHES];
    timed t = { .forward = forward != NULL, .backward = backward != NULL };
    heed_status status = start(&t.c, a, g, forward, backward);
    if (!status)
        status = prepare(&t, replayed);
    for (int i = 0; i < 3 && !status; i++) /* warm up: code, caches, clocks */
        status = time_batch(&t, 1, taken);
    int batch = status ? 0 : (int)fmin(BATCH, fmax(5, min_time / (taken[0] + 1e-9))), count = 0;
    double begun = now_seconds();
    while (!status && count + batch <= BATCH * BATCHES && (!count || now_seconds() - begun < min_time)) {
        status = time_batch(&t, batch, taken + count);
        count += batch;
    }
    discard(&t);
    return status ? -1 : median(taken, count);
}

#else

/* heed itself says that this build has no CUDA backend. */
heed_status gpu_run(const heed_attention *a, const heed_gradient *g, const heed_exec *x)
{
    return g ? heed_backward(a, g, x) : heed_forward(a, x);
}

double gpu_seconds(const heed_attention *a, const heed_gradient *g, const heed_exec *forward, const heed_exec *backward,
                   int replayed, double min_time)
{
    (void)replayed, (void)min_time;
    gpu_run(a, backward ? g : NULL, backward ? backward : forward);
    return -1;
}

const char *gpu_error(void) { return NULL; }

#endif
