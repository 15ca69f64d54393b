/* dK and dV on Hopper for each head size. See backward_sm90_keys.cuh. */
#include "backward_sm90_keys.cuh"

/* At D = 192 there is room for a second own tile or for Q of two more tiles, which is worth more: it is needed until dK of
 * its tile is done, while the next tile is under way. */
backward_kernel heed_sm90_dkv(int head_dim)
{
    return head_dim <= 64    ? keys_kernel<backward_shape<true, 64, 128, 2, 4, 4, EARLY | EXACT | AHEAD>>()
           : head_dim <= 96  ? keys_kernel<backward_shape<true, 96, 128, 2, 2, 2, EARLY | AHEAD>>()
           : head_dim <= 128 ? keys_kernel<backward_shape<true, 128, 128, 2, 2, 2>>()
           : head_dim <= 192 ? keys_kernel<backward_shape<true, 192, 64, 1, 4, 2, 0, 0, 2>>()
                             : keys_kernel<backward_shape<true, 256, 64, 1, 2, 2, 0, 0, 2>>();
}
