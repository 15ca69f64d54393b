/* heed info: what this machine and this build of the library offer. */
#include "cli.h"

static const struct {
    heed_backend backend;
    const char *name;
} backends[] = {
    { HEED_CPU, "cpu" },
    { HEED_CUDA, "cuda" },
    { HEED_REFERENCE, "reference" },
};

static const char *backend_name(heed_backend backend)
{
    for (int i = 0; i < 3; i++)
        if (backends[i].backend == backend)
            return backends[i].name;
    return "?";
}

static void print_devices(void)
{
    heed_device_info d;
    for (int i = 0; i < 2; i++) {
        heed_backend backend = backends[i].backend;
        for (int n = 0; !heed_device_at(backend, n, &d); n++) {
            printf("%s%-6s%s %s\n", paint(stdout, BOLD), backend_name(backend), paint(stdout, PLAIN), d.name);
            printf("       %s; %d %s", d.features, d.units,
                   backend == HEED_CUDA ? "multiprocessors" : "hardware threads");
            if (backend == HEED_CPU)
                printf(", %d used by default", d.threads);
            if (d.memory_bytes)
                printf("; %.1f GiB", (double)d.memory_bytes / (1 << 30));
            putchar('\n');
        }
        if (backend == HEED_CUDA && heed_device_at(HEED_CUDA, 0, &d))
            printf("%scuda%s   no CUDA device\n", paint(stdout, BOLD), paint(stdout, PLAIN));
    }
}

static void print_text(void)
{
    heed_kernel_info k;
    printf("heed %s\n\n", heed_version_string());
    print_devices();
    printf("\nkernels, in order of preference\n");
    printf("  %-34s %-9s %-5s %6s  %s\n", "name", "pass", "dtype", "D to", "runs here");
    for (int i = 0; !heed_kernel_at(i, &k); i++)
        printf("  %-34s %-9s %-5s %6d  %s\n", k.name, k.backward ? "backward" : "forward", dtype_name(k.dtype),
               k.max_head_dim, k.runs_here ? "yes" : "no");
}

static void print_json(void)
{
    heed_device_info d;
    heed_kernel_info k;
    printf("{\n  \"version\": \"%s\",\n  \"devices\": [", heed_version_string());
    const char *comma = "";
    for (int i = 0; i < 2; i++)
        for (int n = 0; !heed_device_at(backends[i].backend, n, &d); n++, comma = ",") {
            printf("%s\n    { \"backend\": \"%s\", \"name\": ", comma, backends[i].name);
            json_text(stdout, d.name);
            printf(", \"features\": ");
            json_text(stdout, d.features);
            printf(", \"units\": %d, \"threads\": %d, \"memory_bytes\": %zu }", d.units, d.threads, d.memory_bytes);
        }
    printf("\n  ],\n  \"kernels\": [");
    for (int i = 0; !heed_kernel_at(i, &k); i++)
        printf("%s\n    { \"name\": \"%s\", \"backend\": \"%s\", \"pass\": \"%s\", \"dtype\": \"%s\", "
               "\"max_head_dim\": %d, \"runs_here\": %s }",
               i ? "," : "", k.name, backend_name(k.backend), k.backward ? "backward" : "forward", dtype_name(k.dtype),
               k.max_head_dim, k.runs_here ? "true" : "false");
    printf("\n  ]\n}\n");
}

int command_info(int argc, char **argv)
{
    static const manual m = {
        .command = "info",
        .usage = "[--json]",
        .text = "Prints the version of the library, the devices of this machine with their instruction sets, and the\n"
                "kernels that are compiled in, in the order in which the planner prefers them.\n",
        .examples = "  heed info\n"
                    "  heed info --json | jq '.kernels[] | select(.runs_here) | .name'\n",
    };
    struct answers {
        int json;
    } given = { 0 };
    static const option_row rows[] = {
        { "json", 0, NULL, read_flag, offsetof(struct answers, json), "the same as JSON" },
        { NULL, 0, NULL, NULL, 0, NULL },
    };
    const option_group groups[] = { { "Options", rows, &given }, { 0 } };
    int code = options_parse(&m, groups, argc, argv);
    if (code >= 0)
        return code;
    if (given.json)
        print_json();
    else
        print_text();
    return 0;
}
