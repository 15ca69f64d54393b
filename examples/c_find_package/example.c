/* Two queries over three keys, causal. Prints the two output rows: the first sees keys 0 and 1, the second all. */
#include <heed.h>
#include <stdio.h>
#include <stdlib.h>

int main(void)
{
    float q[2][2] = { { 1, 0 }, { 0, 1 } }, k[3][2] = { { 1, 0 }, { 0, 1 }, { 1, 1 } }, o[2][1];
    float v[3][1] = { { 1 }, { 2 }, { 3 } };
    heed_attention a = {
        .q = { .data = q, .shape = { 1, 1, 2, 2 } },
        .k = { .data = k, .shape = { 1, 1, 3, 2 } },
        .v = { .data = v, .shape = { 1, 1, 3, 1 } },
        .o = { .data = o, .shape = { 1, 1, 2, 1 } },
        .causal = 1,
    };
    heed_exec x = { .backend = HEED_CPU };
    if (heed_workspace_size(&a, NULL, &x, &x.workspace_bytes) || !(x.workspace = malloc(x.workspace_bytes + 1)) ||
        heed_forward(&a, &x))
        return fprintf(stderr, "heed: %s\n", heed_last_error()), 1;
    printf("heed %s: %.6f %.6f\n", heed_version_string(), o[0][0], o[1][0]);
    free(x.workspace);
    return 0;
}
