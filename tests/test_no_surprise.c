/* heed.h: "heed allocates nothing, prints nothing, never aborts". That the library cannot even call what prints, aborts or
 * exits is in test_install.sh; many threads at once are in test_threads.c; streams and graphs in test_gpu_calls.c. */
#include "harness.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- Memory ----------------------------------------------------------------------------------------------------- */

/* glibc lets a program define its own allocators; the sanitizers need theirs. */
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(__clang__)
#define COUNTS_ALLOCATIONS 1
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *block, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

static _Atomic int allocations;

void *malloc(size_t bytes)
{
    allocations++;
    return __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes)
{
    allocations++;
    return __libc_calloc(count, bytes);
}

void *realloc(void *block, size_t bytes)
{
    allocations++;
    return __libc_realloc(block, bytes);
}

void *memalign(size_t alignment, size_t bytes);
void *memalign(size_t alignment, size_t bytes)
{
    allocations++;
    return __libc_memalign(alignment, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void **block, size_t alignment, size_t bytes)
{
    *block = memalign(alignment, bytes);
    return *block ? 0 : ENOMEM;
}

void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset)
{
    allocations++;
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
}

TEST(every_allocator_is_counted)
{
    void *blocks[5], *pages;
    void *(*const volatile resize)(void *, size_t) = realloc; /* or the compiler would see through it */
    int before = allocations;
    blocks[0] = malloc(1), blocks[1] = calloc(1, 1), blocks[2] = aligned_alloc(64, 64), blocks[3] = resize(NULL, 1);
    assert_int_equal(posix_memalign(&blocks[4], 64, 64), 0);
    pages = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int after = allocations;
    assert_true(pages != MAP_FAILED);
    munmap(pages, 4096);
    for (int n = 0; n < COUNT(blocks); n++)
        assert_non_null(blocks[n]), free(blocks[n]);
    assert_int_equal(after - before, 6);
}
#endif

/* ---- Calls ------------------------------------------------------------------------------------------------------ */

/* A problem with much in it, and how to run each pass of it. */
typedef struct busy {
    test_case c;
    heed_exec x[2];
} busy;

static busy *busy_new(const heed_kernel_info *kernel)
{
    busy *b = malloc(sizeof *b);
    assert_non_null(b);
    b->c = case_new(kernel, (case_shape){ .B = 2, .Hq = 2, .Sq = 100, .D = 32 });
    case_bias(&b->c, kernel->dtype, 1, 2, 100, 100);
    case_sink(&b->c);
    case_d_lse(&b->c);
    b->c.g.delta = case_tensor(&b->c, HEED_F32, b->c.a.lse.shape, NULL);
    b->c.a.causal = 1;
    b->c.a.dropout = 0.25f;
    b->c.x.threads = 1; /* OpenMP allocates for its threads */
    for (int pass = HEED_FORWARD; pass <= HEED_BACKWARD; pass++) {
        assert_int_equal(case_exec(&b->c, (heed_pass)pass, &b->x[pass]), HEED_OK);
        b->x[pass].workspace = case_memory(&b->c, b->x[pass].workspace_bytes, 0);
    }
    return b;
}

static void busy_free(busy *b)
{
    assert_null(gpu_finish());
    case_free(&b->c);
    free(b);
}

/* Every call there is, also those that fail. Returns how many did not as they should: an assertion would allocate. */
static int call_all(busy *b)
{
    test_case *c = &b->c;
    const heed_exec *x = b->x;
    heed_attention broken = c->a;
    heed_device_info device;
    heed_kernel_info kernel;
    size_t bytes;
    char text[256];
    int wrong = 0;
    broken.k.shape[3]++;
    wrong += heed_workspace_size(&c->a, NULL, &x[0], &bytes) != HEED_OK;
    wrong += heed_forward(&c->a, &x[0]) != HEED_OK;
    wrong += heed_delta(&c->a.o, &c->g.d_o, &c->g.d_lse, &c->g.delta, &x[0]) != HEED_OK;
    wrong += heed_backward(&c->a, &c->g, &x[1]) != HEED_OK;
    wrong += heed_merge(&c->a.o, &c->a.lse, &c->g.d_o, &c->g.d_lse, &x[0]) != HEED_OK;
    wrong += heed_forward(&broken, &x[0]) != HEED_BAD_ARGUMENT;
    wrong += heed_backward(&c->a, NULL, &x[1]) != HEED_BAD_ARGUMENT;
    wrong += heed_merge(&c->a.o, NULL, NULL, NULL, &x[0]) != HEED_BAD_ARGUMENT;
    wrong += heed_explain(&c->a, NULL, &x[0], NULL, text, sizeof text) != HEED_OK;
    wrong += heed_explain(&c->a, NULL, &x[0], "abacus", text, sizeof text) != HEED_BAD_ARGUMENT;
    wrong += heed_device_at(x->backend, 0, &device) != HEED_OK || heed_device_at(HEED_CPU, 7, &device) == HEED_OK;
    wrong += heed_kernel_at(0, &kernel) != HEED_OK || heed_kernel_at(-1, &kernel) == HEED_OK;
    wrong += !heed_last_error()[0] || !heed_status_name(HEED_OK) || !heed_version_string() || !heed_chip_name(0);
    return wrong;
}

#ifdef COUNTS_ALLOCATIONS
TEST(heed_allocates_nothing)
{
    for_each_kernel(EITHER_PASS, kernel) {
        busy *b = busy_new(&kernel);
        int rounds = kernel.backend == HEED_CUDA ? 10 : 1, allocated = 1;
        call_all(
            b); /* a GPU's runtime loads a kernel when first used, and allocates now and then: not in every round */
        for (int n = 0; n < rounds && allocated; n++) {
            const int before = allocations, wrong = call_all(b);
            allocated = allocations - before;
            assert_int_equal(wrong, 0);
        }
        assert_int_equal(allocated, 0);
        busy_free(b);
    }
}
#endif

/* Nothing comes out of standard output and standard error, whatever a call has to say. */
TEST(heed_prints_nothing)
{
    for_each_kernel(EITHER_PASS, kernel) {
        busy *b = busy_new(&kernel);
        FILE *said = tmpfile();
        assert_non_null(said);
        fflush(stdout), fflush(stderr);
        const int streams[2] = { dup(STDOUT_FILENO), dup(STDERR_FILENO) };
        dup2(fileno(said), STDOUT_FILENO), dup2(fileno(said), STDERR_FILENO);
        const int wrong = call_all(b);
        fflush(stdout), fflush(stderr);
        for (int n = 0; n < 2; n++)
            dup2(streams[n], STDOUT_FILENO + n), close(streams[n]);
        assert_int_equal(wrong, 0);
        assert_int_equal(lseek(fileno(said), 0, SEEK_END), 0);
        fclose(said);
        busy_free(b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#ifdef COUNTS_ALLOCATIONS
        cmocka_unit_test(every_allocator_is_counted),
        cmocka_unit_test(heed_allocates_nothing),
#endif
        cmocka_unit_test(heed_prints_nothing),
    };
    return RUN_TESTS(tests);
}
