/* dQ on Hopper for each head size. See backward_sm90_queries.cuh. */
#include "backward_sm90_queries.cuh"

/* Own tiles twice, so that the next one is there when one is done, where there is room. At D = 256 there is room for
 * one stage of V, which is enough: V is needed for dP alone, K for S and then dQ. Else K of three or four tiles: it is
 * needed until the next one is under way. */
backward_kernel heed_sm90_dq(int head_dim)
{
    return head_dim <= 64    ? queries_kernel<backward_shape<false, 64, 192, 2, 4, 4>>()
           : head_dim <= 96  ? queries_kernel<backward_shape<false, 96, 128, 2, 4, 2>>()
           : head_dim <= 128 ? queries_kernel<backward_shape<false, 128, 128, 2, 4, 2>>()
           : head_dim <= 192 ? queries_kernel<backward_shape<false, 192, 128, 1, 3, 2>>()
                             : queries_kernel<backward_shape<false, 256, 128, 1, 2, 1>>();
}
