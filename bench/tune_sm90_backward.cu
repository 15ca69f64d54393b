/* The compile-time variants of the Hopper backward that are worth comparing: one kernel for all gradients, or one for dK
 * and dV and one for dQ; who computes dQ and how it leaves; tiles, buffers, registers, and the order of the work.
 * bench/tune_sm90.py --backward checks and times them all in one process; the shapes that the library takes are the
 * first of their head size and kind here, and should be the best. */
#include "cuda/backward_sm90_keys.cuh"
#include "cuda/backward_sm90_queries.cuh"

/* ---- Ways that are switches of the kernels ----------------------------------------------------------------------- */

/* Registers of producers, of dQ's owner and of the others. */
template <class B, int FEW_, int SOME_, int MANY_> struct registers : B {
    static constexpr int FEW = FEW_, SOME = SOME_, MANY = MANY_;
};

/* ---- Launch: bf16, no softcap ------------------------------------------------------------------------------------ */

/* TOGETHER: heads that are worked on at a time; 0: as the library does. */
template <class C, int TOGETHER> static heed_status run_bf16(const backward_job &p, int blocks, const heed_exec *x)
{
    static_assert(sizeof(backward_shared<C>) <= 227 * 1024, "what a block may have on sm_90");
    backward_job job = p;
    const int heads = p.a.B * (C::KEYS ? p.a.Hk : p.a.Hq);
    if (TOGETHER)
        job.together = HEED_MIN(TOGETHER, heads);
    if constexpr (C::KEYS)
        return launch_next(dkv_sm90<__nv_bfloat16, C>, blocks, C::THREADS, sizeof(backward_shared<C>), x, job);
    else
        return launch_next(dq_sm90<__nv_bfloat16, C>, blocks, C::THREADS, sizeof(backward_shared<C>), x, job);
}

template <class C, int TOGETHER = 0> static backward_kernel kernel()
{
    return { C::D, C::ROWS, C::OWNERS != 0, run_bf16<C, TOGETHER> };
}

/* ---- The list ---------------------------------------------------------------------------------------------------- */

struct variant {
    const char *name;
    int head_dim;
    backward_form form;
};

/* Keys, own tiles, stages of Q and of dO, ways; tiles of dS. */
template <int D, int... REST> using sums = backward_shape<true, D, 128, REST...>;
/* Keys, own tiles, stages of Q and of dO, ways; 0; tiles of P that pass between roles. */
template <int D, int... REST> using dkv = backward_shape<true, D, REST...>;
/* Queries, own tiles, stages of K and of V. */
template <int D, int... REST> using dq = backward_shape<false, D, REST...>;

using sums64 = sums<64, 2, 4, 4, EXACT | AHEAD | OWNER, 3>;
using sums96 = sums<96, 1, 2, 2, AHEAD | EXACT | OWNER, 2>;
using sums128 = sums<128, 1, 2, 2, AHEAD | OWNER, 2>;

#define ALL(NAME, D, ...)                                                                                              \
    {                                                                                                                  \
        "one: " NAME, D,                                                                                               \
        {                                                                                                              \
            heed_sm90_dkv(D), heed_sm90_dq(D), kernel<__VA_ARGS__>(), {}                                               \
        }                                                                                                              \
    }
#define KEYS(NAME, D, ...)                                                                                             \
    {                                                                                                                  \
        "two: " NAME, D,                                                                                               \
        {                                                                                                              \
            kernel<dkv<D, __VA_ARGS__>>(), heed_sm90_dq(D), {}, {}                                                     \
        }                                                                                                              \
    }
#define QUERIES(NAME, D, ...)                                                                                          \
    {                                                                                                                  \
        "two: " NAME, D,                                                                                               \
        {                                                                                                              \
            heed_sm90_dkv(D), kernel<dq<D, __VA_ARGS__>>(), {}, {}                                                     \
        }                                                                                                              \
    }
static const variant variants[] = {
    ALL("owner of dQ, 3 dS", 64, sums64),
    ALL("2 dS", 64, sums<64, 2, 4, 4, EXACT | AHEAD | OWNER, 2>),
    ALL("2 stages", 64, sums<64, 2, 2, 2, EXACT | AHEAD | OWNER, 3>),
    ALL("1 own tile", 64, sums<64, 1, 4, 4, EXACT | AHEAD | OWNER, 3>),
    ALL("dQ alternately", 64, sums<64, 2, 4, 4, EXACT | AHEAD, 3>),
    ALL("rounded P", 64, sums<64, 2, 4, 4, AHEAD | OWNER, 3>),
    ALL("next S early", 64, sums<64, 2, 4, 4, EARLY | EXACT | AHEAD | OWNER, 3>),
    ALL("dK late", 64, sums<64, 2, 4, 4, LATE | EXACT | AHEAD | OWNER, 3>),
    ALL("not ahead", 64, sums<64, 2, 4, 4, EXACT | OWNER, 3>),
    ALL("24 72 208 registers", 64, registers<sums64, 24, 72, 208>),
    ALL("32 80 200 registers", 64, registers<sums64, 32, 80, 200>),
    ALL("one head at a time", 64, sums64, 1),
    ALL("all heads", 64, sums64, 1 << 30),
    KEYS("4 stages", 64, 128, 2, 4, 4, EARLY | EXACT | AHEAD),
    KEYS("2 stages", 64, 128, 2, 2, 2, EARLY | EXACT | AHEAD),
    KEYS("dK late", 64, 128, 2, 4, 4, EARLY | LATE | EXACT | AHEAD),
    KEYS("rounded P", 64, 128, 2, 4, 4, EARLY | AHEAD),
    KEYS("roles", 64, 64, 2, 4, 4, 0, 0, 2),
    QUERIES("128 queries", 64, 128, 2, 4, 4),
    QUERIES("K twice", 64, 192, 2, 2, 2),
    ALL("owner of dQ, 2 dS", 96, sums96),
    ALL("rounded P", 96, sums<96, 1, 2, 2, AHEAD | OWNER, 2>),
    ALL("dQ alternately", 96, sums<96, 1, 2, 2, AHEAD | EXACT, 2>),
    ALL("one head at a time", 96, sums96, 1),
    KEYS("2 stages", 96, 128, 2, 2, 2, EARLY | AHEAD),
    KEYS("4 stages", 96, 128, 1, 4, 4, EARLY | AHEAD),
    ALL("owner of dQ, 2 dS", 128, sums128),
    ALL("not ahead", 128, sums<128, 1, 2, 2, OWNER, 2>),
    ALL("one head at a time", 128, sums128, 1),
    ALL("all heads", 128, sums128, 1 << 30),
    KEYS("2 own tiles, 2 stages", 128, 128, 2, 2, 2),
    KEYS("1 own tile, 4 stages", 128, 128, 1, 4, 4),
    KEYS("next S early", 128, 128, 2, 2, 2, EARLY),
    KEYS("roles", 128, 64, 2, 2, 2, 0, 0, 2),
    QUERIES("2 own tiles, K twice", 128, 128, 2, 2, 2),
    QUERIES("1 own tile, 4 stages", 128, 128, 1, 4, 4),
    KEYS("roles, Q 4 times", 192, 64, 1, 4, 2, 0, 0, 2),
    KEYS("Q twice", 192, 64, 1, 2, 2, 0, 0, 2),
    KEYS("2 own tiles, Q twice", 192, 64, 2, 2, 2, 0, 0, 2),
    QUERIES("K twice", 192, 128, 1, 2, 2),
    QUERIES("K 4 times, V once", 192, 128, 1, 4, 1),
    KEYS("roles, Q and dO twice", 256, 64, 1, 2, 2, 0, 0, 2),
    KEYS("dO once", 256, 64, 1, 2, 1, 0, 0, 2),
    QUERIES("K once", 256, 128, 1, 1, 1),
};

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int tune_backward_count(void) { return sizeof variants / sizeof *variants; }
EXPORT const char *tune_backward_name(int n) { return variants[n].name; }
EXPORT int tune_backward_head_dim(int n) { return variants[n].head_dim; }
EXPORT int tune_backward_has_sums(int n) { return variants[n].form.all.launch != NULL; }

/* With no workspace, says how large it must be. */
EXPORT int tune_backward(int n, const heed_attention *a, const heed_gradient *g, const heed_exec *x, size_t *bytes)
{
    heed_problem p;
    heed_status status = heed_check(a, g, x, 0, &p);
    if (status)
        return status;
    *bytes = heed_sm90_backward_bytes(&p, variants[n].form);
    return x->workspace ? heed_sm90_backward(&p, variants[n].form, x) : HEED_OK;
}
