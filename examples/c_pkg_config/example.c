/* Which devices and kernels the installed library offers on this machine. */
#include <heed.h>
#include <stdio.h>

int main(void)
{
    heed_device_info device;
    if (heed_device_at(HEED_CPU, 0, &device))
        return fprintf(stderr, "heed: %s\n", heed_last_error()), 1;
    printf("heed %s on %s (%s), %d threads\n", heed_version_string(), device.name, device.features, device.threads);

    heed_kernel_info kernel;
    for (int i = 0; heed_kernel_at(i, &kernel) == HEED_OK; i++)
        if (kernel.runs_here)
            printf("  %s, head sizes up to %d\n", kernel.name, kernel.max_head_dim);
    return 0;
}
