/* Timing: the median is what a user meets; the minimum flatters and the mean belongs to the scheduler. */
#include "cli.h"

#include <stdlib.h>
#include <time.h>

double now_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, ascending);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

double median_seconds(int (*call)(void *), void *argument, double min_time)
{
    enum { MOST = 4096, LEAST = 5 };
    static double taken[MOST];
    double start = now_seconds();
    do /* warm up: pages, caches, threads and clocks */
        if (call(argument))
            return -1;
    while (now_seconds() - start < min_time / 10);

    int runs = 0;
    start = now_seconds();
    while (runs < MOST && (runs < LEAST || now_seconds() - start < min_time)) {
        double before = now_seconds();
        if (call(argument))
            return -1;
        taken[runs++] = now_seconds() - before;
    }
    return median(taken, runs);
}
