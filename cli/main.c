/* heed, the command: finds the subcommand and hands over to it. Exit codes are in cli.h. */
#include "cli.h"

#include <stdarg.h>
#include <string.h>

static const char *command_name = "";

static const struct {
    const char *name;
    int (*run)(int, char **);
    const char *summary;
} commands[] = {
    { "demo", command_demo, "a small attention, forward and backward: its numbers and its time" },
    { "run", command_run, "attention over .npy files: q, k, v in, o and gradients out" },
    { "check", command_check, "every kernel this machine can run, against the fp64 reference" },
    { "bench", command_bench, "how fast: one table, also as CSV or JSON" },
    { "explain", command_explain, "which kernel a problem gets, here or on another chip, and why" },
    { "info", command_info, "version, devices, instruction sets, compiled kernels" },
};
enum { COMMANDS = sizeof commands / sizeof *commands };

static void print_help(FILE *to)
{
    fprintf(to, "heed %s: attention, forward and backward\n\nUsage: heed COMMAND [options]\n\nCommands:\n",
            heed_version_string());
    for (int i = 0; i < COMMANDS; i++)
        fprintf(to, "  %s%-8s%s  %s\n", paint(to, BOLD), commands[i].name, paint(to, PLAIN), commands[i].summary);
    fputs("\n"
          "  heed COMMAND --help   options and examples of one command\n"
          "  heed --version        the version of the library that is loaded\n"
          "\n"
          "Exit codes: 0 all is well; 1 a check failed, or heed could not do it; 2 wrong usage or a bad input file.\n",
          to);
}

int complain(int code, const char *format, ...)
{
    progress_end();
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "heed%s%s: ", *command_name ? " " : "", command_name);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    return code;
}

int complain_status(heed_status status)
{
    return complain(status == HEED_BAD_ARGUMENT ? EXIT_USAGE : EXIT_FAILED, "%s: %s", heed_status_name(status),
                    gpu_error() ? gpu_error() : heed_last_error());
}

/* A full disk or a closed pipe shows up only here; results that were lost are not a success. */
static int finish(int code)
{
    if ((fflush(stdout) || ferror(stdout)) && !code)
        return complain(EXIT_FAILED, "cannot write to standard output");
    return code;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        print_help(stderr);
        return EXIT_USAGE;
    }
    how_environment();
    const char *first = argv[1];
    if (!strcmp(first, "--help") || !strcmp(first, "-h") || !strcmp(first, "help")) {
        print_help(stdout);
        return finish(0);
    }
    if (!strcmp(first, "--version") || !strcmp(first, "-V")) {
        printf("heed %s\n", heed_version_string());
        return finish(0);
    }
    for (int i = 0; i < COMMANDS; i++)
        if (!strcmp(first, commands[i].name)) {
            command_name = commands[i].name;
            return finish(commands[i].run(argc - 1, argv + 1));
        }
    return complain(EXIT_USAGE, "no %s '%s'; see heed --help", *first == '-' ? "option" : "command", first);
}
