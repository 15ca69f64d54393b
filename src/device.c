/* What the chip offers: the one under us, found once and kept, and a list of others to plan for. */
#include "internal.h"
#ifdef HEED_HAS_CUDA
#include "cuda/backend.h"
#endif

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef HEED_X86
#include <cpuid.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#endif

/* ---- This machine ----------------------------------------------------------------------------------------------- */

static const char *const isa_names[] = { "plain", "avx2", "avx512", "avx512bf16", "amx" };

const char *heed_isa_name(heed_isa isa) { return isa_names[isa]; }

#ifdef HEED_X86
/* Linux hands out AMX's registers, 8 KB for each thread, to processes that ask. A program whose stacks for signals are too
 * small to hold them is refused, and goes without. */
static int may_use_amx(void)
{
#ifdef __linux__
    enum { AMX_BF16_AND_TILES = 1 << 22 | 1 << 24, ASK_FOR_STATE = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16_AND_TILES) == AMX_BF16_AND_TILES &&
           syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
#else
    return 0;
#endif
}

/* The compiler's tests include the operating system's: whether it saves the wide registers. None of them knows f16c in
 * every compiler; AVX2 usable, its cpuid bit is all that is left to ask. */
static heed_isa find_isa(void)
{
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    __get_cpuid(1, &a, &b, &c, &d);
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !(c & bit_F16C))
        return HEED_ISA_PLAIN;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return HEED_ISA_AVX2;
    if (__builtin_cpu_supports("avx512bf16") && may_use_amx())
        return HEED_ISA_AMX;
    /* The bf16 dot product pays where it is faster than the fp32 multiply-add: twice as fast on AMD's Zen 4, but half as
     * fast on Intel's Sapphire Rapids (86 against 175 GFLOP/s of one core, by bench_heed's "peak"). */
    return __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel") ? HEED_ISA_AVX512BF16 : HEED_ISA_AVX512;
}

static void find_name(char name[128])
{
    unsigned brand[13] = { 0 };
    for (unsigned i = 0; i < 3; i++)
        if (!__get_cpuid(0x80000002u + i, brand + 4 * i, brand + 4 * i + 1, brand + 4 * i + 2, brand + 4 * i + 3))
            return;
    const char *text = (const char *)brand;
    while (*text == ' ')
        text++;
    if (*text)
        snprintf(name, 128, "%s", text);
    for (size_t n = strlen(name); n > 0 && name[n - 1] == ' '; n--)
        name[n - 1] = 0;
}
#else
static heed_isa find_isa(void) { return HEED_ISA_PLAIN; }

static void find_name(char name[128]) { (void)name; }
#endif

typedef struct machine {
    heed_device cpu;
    char kernel[128]; /* HEED_KERNEL */
} machine;

static void find(machine *m)
{
    heed_device *d = &m->cpu;
    *d = (heed_device){ .backend = HEED_CPU, .name = "CPU", .units = 1, .isa = find_isa() };
    find_name(d->name);
#ifdef _SC_NPROCESSORS_ONLN
    long units = sysconf(_SC_NPROCESSORS_ONLN);
    d->units = units > 0 ? (int)units : 1;
#endif
#ifdef _SC_PHYS_PAGES
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    d->memory_bytes = pages > 0 && page > 0 ? (size_t)pages * (size_t)page : 0;
#endif
    const char *kernel = getenv("HEED_KERNEL");
    snprintf(m->kernel, sizeof m->kernel, "%s", kernel ? kernel : "");
}

/* Found at the first call and kept, for in a virtual machine a cpuid instruction takes longer than a small problem.
 * Threads that come while the first one looks wait the microseconds it takes. */
static const machine *this_machine(void)
{
    enum { UNKNOWN, LOOKING, KNOWN };
    static machine found;
    static atomic_int state;
    int was = atomic_load_explicit(&state, memory_order_acquire);
    if (was == UNKNOWN && atomic_compare_exchange_strong(&state, &was, LOOKING)) {
        find(&found);
        atomic_store_explicit(&state, KNOWN, memory_order_release);
    }
    while (atomic_load_explicit(&state, memory_order_acquire) != KNOWN) {}
    return &found;
}

const char *heed_kernel_of_environment(void)
{
    const char *kernel = this_machine()->kernel;
    return kernel[0] ? kernel : NULL;
}

/* ---- Threads ---------------------------------------------------------------------------------------------------- */

static atomic_int threads_set;

void heed_set_threads(int threads) { atomic_store(&threads_set, HEED_MAX(threads, 0)); }

/* Whoever asks for any number of them is not to get it: each has a share of the workspace, and OpenMP ends a program in which
 * it can start no more. */
#define MANY_THREADS 256

int heed_threads_of(const heed_exec *x)
{
#ifdef _OPENMP
    if (omp_in_parallel())
        return 1; /* the caller has filled the machine already */
    const int most = HEED_MIN(HEED_MAX(this_machine()->cpu.units, MANY_THREADS), omp_get_thread_limit());
    int threads = x->threads ? x->threads : atomic_load(&threads_set);
    return HEED_MAX(HEED_MIN(threads ? threads : omp_get_max_threads(), most), 1);
#else
    (void)x;
    return 1;
#endif
}

/* ---- Devices ---------------------------------------------------------------------------------------------------- */

heed_status heed_device_of(const heed_exec *x, heed_device *d)
{
    if (x->backend == HEED_CUDA) {
#ifdef HEED_HAS_CUDA
        return heed_cuda_device(x->device, d);
#else
        return heed_fail(HEED_NO_DEVICE, "backend: is HEED_CUDA, but this build of heed has no CUDA backend");
#endif
    }
    *d = this_machine()->cpu;
    d->backend = x->backend;
    d->threads = heed_threads_of(x);
    return HEED_OK;
}

/* Processors by class; GPUs by what a kernel has to know: compute capability, multiprocessors, shared memory that a
 * block may have, memory in GB. */
static const struct chip {
    const char *chip, *name;
    heed_backend backend;
    int isa_or_arch, units, shared_bytes, gigabytes;
} chips[] = {
    { "plain", "any CPU", HEED_CPU, HEED_ISA_PLAIN, 0, 0, 0 },
    { "avx2", "a CPU with AVX2", HEED_CPU, HEED_ISA_AVX2, 0, 0, 0 },
    { "avx512", "a CPU with AVX-512", HEED_CPU, HEED_ISA_AVX512, 0, 0, 0 },
    { "avx512bf16", "a CPU with AVX-512 BF16", HEED_CPU, HEED_ISA_AVX512BF16, 0, 0, 0 },
    { "amx", "a CPU with AMX", HEED_CPU, HEED_ISA_AMX, 0, 0, 0 },
    { "t4", "NVIDIA T4", HEED_CUDA, 75, 40, 65536, 16 },
    { "rtx2080", "NVIDIA GeForce RTX 2080", HEED_CUDA, 75, 46, 65536, 8 },
    { "a100", "NVIDIA A100", HEED_CUDA, 80, 108, 166912, 80 },
    { "rtx3090", "NVIDIA GeForce RTX 3090", HEED_CUDA, 86, 82, 101376, 24 },
    { "l4", "NVIDIA L4", HEED_CUDA, 89, 58, 101376, 24 },
    { "rtx4090", "NVIDIA GeForce RTX 4090", HEED_CUDA, 89, 128, 101376, 24 },
    { "h100", "NVIDIA H100", HEED_CUDA, 90, 132, 232448, 80 },
    { "h200", "NVIDIA H200", HEED_CUDA, 90, 132, 232448, 141 },
    { "b200", "NVIDIA B200", HEED_CUDA, 100, 148, 232448, 180 },
    { "rtx5090", "NVIDIA GeForce RTX 5090", HEED_CUDA, 120, 170, 101376, 32 },
};
enum { CHIPS = sizeof chips / sizeof *chips };

const char *heed_chip_name(int index) { return index >= 0 && index < CHIPS ? chips[index].chip : NULL; }

static heed_status no_chip(const char *name)
{
    char known[256];
    size_t length = 0;
    for (int i = 0; i < CHIPS && length < sizeof known; i++)
        length += (size_t)snprintf(known + length, sizeof known - length, "%s%s", i ? ", " : "", chips[i].chip);
    return heed_fail(HEED_BAD_ARGUMENT, "chip: there is none called %.64s; known are %s", name, known);
}

/* A class of processors has this machine's threads: it names an instruction set, not a product. */
heed_status heed_device_named(const char *chip, const heed_exec *x, heed_device *d)
{
    const struct chip *c = chips;
    while (c < chips + CHIPS && strcmp(c->chip, chip))
        c++;
    if (c == chips + CHIPS)
        return no_chip(chip);
    *d = (heed_device){ .backend = c->backend, .units = c->units };
    snprintf(d->name, sizeof d->name, "%s", c->name);
    if (c->backend == HEED_CUDA) {
        d->arch = c->isa_or_arch;
        d->shared_bytes = (size_t)c->shared_bytes;
        d->memory_bytes = (size_t)c->gigabytes * 1000000000;
        return HEED_OK;
    }
    if (x->backend == HEED_REFERENCE)
        d->backend = HEED_REFERENCE;
    d->isa = (heed_isa)c->isa_or_arch;
    d->units = this_machine()->cpu.units;
    d->threads = heed_threads_of(x);
    return HEED_OK;
}

/* ---- Looking inside --------------------------------------------------------------------------------------------- */

heed_status heed_device_at(heed_backend backend, int index, heed_device_info *info)
{
    heed_device d = { 0 };
    heed_status s;
    const heed_exec x = { .backend = backend, .device = index };
    if (!info)
        return heed_fail(HEED_BAD_ARGUMENT, "info: is NULL");
    if (index < 0)
        return heed_fail(HEED_BAD_ARGUMENT, "index: is %d, expected 0 or more", index);
    if ((s = heed_check_exec(&x)) || (s = heed_device_of(&x, &d)))
        return s;
    if (index > 0 && backend != HEED_CUDA)
        return heed_fail(HEED_NO_DEVICE, "index: is %d, this machine counts as one CPU", index);
    *info = (heed_device_info){ .units = d.units, .threads = d.threads, .memory_bytes = d.memory_bytes };
    memcpy(info->name, d.name, sizeof info->name);
    if (backend == HEED_CUDA) {
        snprintf(info->features, sizeof info->features, "sm_%d", d.arch);
        return HEED_OK;
    }
    size_t length = 0;
    for (int isa = d.isa ? HEED_ISA_AVX2 : HEED_ISA_PLAIN; isa <= (int)d.isa; isa++)
        length += (size_t)snprintf(info->features + length, sizeof info->features - length, "%s%s", length ? " " : "",
                                   isa_names[isa]);
    return HEED_OK;
}

heed_status heed_kernel_at(int index, heed_kernel_info *info)
{
    if (!info)
        return heed_fail(HEED_BAD_ARGUMENT, "info: is NULL");
    if (index < 0 || index >= heed_kernel_total)
        return heed_fail(HEED_BAD_ARGUMENT, "index: is %d, the table has %d kernels", index, heed_kernel_total);
    const heed_kernel *k = &heed_kernels[index];
    *info = (heed_kernel_info){ .name = k->name,
                                .backend = k->backend,
                                .backward = k->pass == HEED_BACKWARD,
                                .dtype = k->dtype,
                                .max_head_dim = k->max_head_dim };
    heed_device d = this_machine()->cpu;
    char why[128];
#ifdef HEED_HAS_CUDA
    if (k->backend == HEED_CUDA && (heed_cuda_device_count() == 0 || heed_cuda_device(0, &d)))
        return HEED_OK;
#endif
    info->runs_here = heed_runs_on(k, &d, why, sizeof why);
    return HEED_OK;
}
