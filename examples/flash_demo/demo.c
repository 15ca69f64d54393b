/* Attention over 128 tokens of 32 dimensions, one head, and its gradients, through the C interface.
 *
 * The inputs come from rand() in its default state; with glibc, whose sequence is fixed, the numbers printed are those
 * of demo.py and of `heed demo`. */
#include <heed.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { TOKENS = 128, WIDTH = 32, REPEATS = 200 };

typedef float matrix[TOKENS][WIDTH];
static matrix Q, K, V, O, dO, dQ, dK, dV;
static float lse[TOKENS]; /* log of the sum of exp(scores) of each row: all that the backward needs of P */

static heed_tensor view(matrix m) { return (heed_tensor){ .data = m, .shape = { 1, 1, TOKENS, WIDTH } }; }

static float draw(void) { return (float)(2.0 * rand() / RAND_MAX - 1); }

static void print_corner(const char *name, matrix m)
{
    for (int i = 0; i < 3; i++)
        printf("%-3s %12g %12g %12g\n", i ? "" : name, m[i][0], m[i][1], m[i][2]);
}

static void check(heed_status status)
{
    if (status) {
        fprintf(stderr, "%s: %s\n", heed_status_name(status), heed_last_error());
        exit(1);
    }
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

int main(void)
{
    for (int i = 0; i < TOKENS; i++)
        for (int c = 0; c < WIDTH; c++) {
            Q[i][c] = draw(), K[i][c] = draw();
            V[i][c] = draw(), dO[i][c] = draw();
        }
    heed_attention a = { .q = view(Q), .k = view(K), .v = view(V), .o = view(O) };
    a.lse = (heed_tensor){ .data = lse, .shape = { 1, 1, TOKENS, 1 } };
    heed_gradient g = { .d_o = view(dO), .d_q = view(dQ), .d_k = view(dK), .d_v = view(dV) };

    heed_exec x = { .backend = HEED_CPU, .threads = 1 };
    size_t forward_bytes, backward_bytes;
    check(heed_workspace_size(&a, NULL, &x, &forward_bytes));
    check(heed_workspace_size(&a, &g, &x, &backward_bytes));
    x.workspace_bytes = forward_bytes > backward_bytes ? forward_bytes : backward_bytes;
    x.workspace = malloc(x.workspace_bytes);

    double forward_us = 1e30, backward_us = 1e30;
    for (int n = 0; n < REPEATS; n++) {
        double start = now_us();
        check(heed_forward(&a, &x));
        double middle = now_us();
        check(heed_backward(&a, &g, &x));
        double end = now_us();
        forward_us = middle - start < forward_us ? middle - start : forward_us;
        backward_us = end - middle < backward_us ? end - middle : backward_us;
    }
    print_corner("Q", Q), print_corner("K", K), print_corner("V", V), print_corner("O", O);
    print_corner("dQ", dQ), print_corner("dK", dK), print_corner("dV", dV);
    printf("forward %.1f us, backward %.1f us: the best of %d on one thread\n", forward_us, backward_us, REPEATS);
    free(x.workspace);
    return 0;
}
