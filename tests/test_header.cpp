// heed.h: usable from C++. Compiled as C++ with every warning an error, and linked against the shared library.
#include "heed.h"

#include <cstddef>
#include <cstdio>
#include <vector>

int main()
{
    std::vector<float> q(6, 1.0f), k(6, 1.0f), v = { 1, 2, 3, 4, 5, 6 }, o(6, -1.0f);
    heed_attention a = {};
    a.q.data = q.data(), a.k.data = k.data(), a.v.data = v.data(), a.o.data = o.data();
    for (heed_tensor *t : { &a.q, &a.k, &a.v, &a.o })
        t->shape[0] = t->shape[1] = 1, t->shape[2] = 3, t->shape[3] = 2;

    heed_exec x = {};
    heed_status s = heed_workspace_size(&a, nullptr, &x, &x.workspace_bytes);
    std::vector<std::max_align_t> workspace(x.workspace_bytes / sizeof(std::max_align_t) + 1);
    x.workspace = workspace.data();
    if (s == HEED_OK)
        s = heed_forward(&a, &x);
    if (s != HEED_OK) {
        std::fprintf(stderr, "%s: %s\n", heed_status_name(s), heed_last_error());
        return 1;
    }
    // Equal scores: every row is the mean of v's rows.
    for (int i = 0; i < 3; i++)
        if (o[2 * i] < 2.999f || o[2 * i] > 3.001f || o[2 * i + 1] < 3.999f || o[2 * i + 1] > 4.001f)
            return std::fprintf(stderr, "row %d is %g %g, not 3 4\n", i, o[2 * i], o[2 * i + 1]), 1;
    return heed_version() == HEED_VERSION ? 0 : 1;
}
