/* A library that is preloaded in front of libheed: the CPU's forward comes out wrong in its first element. So the program
 * heed can be seen to notice. */
#define _GNU_SOURCE
#include "heed.h"

#include <dlfcn.h>
#include <string.h>

typedef heed_status forward(const heed_attention *, const heed_exec *);

heed_status heed_forward(const heed_attention *a, const heed_exec *x)
{
    forward *real;
    void *found = dlsym(RTLD_NEXT, "heed_forward");
    memcpy(&real, &found, sizeof real);
    heed_status s = real(a, x);
    if (!s && x->backend == HEED_CPU)
        memset(a->o.data, 0x45, a->o.dtype == HEED_F32 ? 4 : 2); /* thousands, or 5 in fp16 */
    return s;
}
