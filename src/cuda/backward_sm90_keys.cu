/* dK and dV on Hopper for each head size. See backward_sm90_keys.cuh. */
#include "backward_sm90_keys.cuh"

template <int D> struct dkv_shape;
template <> struct dkv_shape<64> : backward_shape<true, 64, 128, 2, 4, 4> {
};
template <> struct dkv_shape<96> : backward_shape<true, 96, 128, 2, 2, 2> {
};
template <> struct dkv_shape<128> : backward_shape<true, 128, 128, 2, 2, 2> {
};
template <> struct dkv_shape<192> : backward_shape<true, 192, 64, 2, 2, 2, 2> {
};
template <> struct dkv_shape<256> : backward_shape<true, 256, 64, 1, 2, 2, 2> {
};

#define EACH_SIZE(what, ...)                                                                                           \
    (head_dim <= 64    ? what<64> __VA_ARGS__                                                                          \
     : head_dim <= 96  ? what<96> __VA_ARGS__                                                                          \
     : head_dim <= 128 ? what<128> __VA_ARGS__                                                                         \
     : head_dim <= 192 ? what<192> __VA_ARGS__                                                                         \
                       : what<256>                                                                                     \
                             __VA_ARGS__)

int heed_sm90_rows_dkv(int head_dim) { return EACH_SIZE(dkv_shape, ::ROWS); }

template <int D> static heed_status run(const backward_job &p, int blocks, const heed_exec *x)
{
    return run_shape<dkv_shape<D>>(p, blocks, x);
}

heed_status heed_sm90_dkv(const backward_job &p, int head_dim, int blocks, const heed_exec *x)
{
    return EACH_SIZE(run, (p, blocks, x));
}
