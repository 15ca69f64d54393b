/* Output that depends on who reads it: colours and a progress bar for a person at a terminal, neither in a pipe; and
 * JSON's two awkward kinds of value for programs. */
#include "cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static int is_terminal(FILE *to) { return isatty(fileno(to)); }

const char *paint(FILE *to, colour c)
{
    static const char *const code[] = { "\033[0m", "\033[1m", "\033[31m", "\033[32m", "\033[2m" };
    const char *no_color = getenv("NO_COLOR"), *term = getenv("TERM");
    if (!is_terminal(to) || (no_color && *no_color) || (term && !strcmp(term, "dumb")))
        return "";
    return code[c];
}

enum { BAR = 30 };
static int bar_shown;

static int columns_of(FILE *to)
{
    struct winsize size;
    return ioctl(fileno(to), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

/* Stays within one line, as it could not be drawn over otherwise. */
void progress(double done, const char *what)
{
    if (!is_terminal(stderr))
        return;
    char line[128];
    int columns = columns_of(stderr), bar = columns / 3 < BAR ? columns / 3 : BAR;
    int filled = (int)(fmin(fmax(done, 0), 1) * bar);
    snprintf(line, sizeof line, "[%.*s%.*s] %3d%%  %.40s", filled, "##############################", bar - filled,
             "..............................", (int)(100 * done), what);
    fprintf(stderr, "\r%.*s\033[K", columns - 1, line);
    fflush(stderr);
    bar_shown = 1;
}

void progress_end(void)
{
    if (bar_shown)
        fputs("\r\033[K", stderr);
    bar_shown = 0;
}

void json_text(FILE *to, const char *text)
{
    fputc('"', to);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++)
        if (*c == '"' || *c == '\\')
            fprintf(to, "\\%c", *c);
        else if (*c == '\n')
            fputs("\\n", to);
        else if (*c < 32)
            fprintf(to, "\\u%04x", *c);
        else
            fputc(*c, to);
    fputc('"', to);
}

void json_number(FILE *to, double x)
{
    if (isfinite(x))
        fprintf(to, "%.9g", x);
    else
        fputs("null", to);
}
