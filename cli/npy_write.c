/* Writes .npy files, version 1.0, so that a reader sees the old file or the whole new one: the bytes go to a temporary
 * file in the same folder, which takes the place of the old one in a single rename. */
#include "cli.h"
#include "npy.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int refuse_errno(char *why)
{
    snprintf(why, NPY_WHY, "%s", strerror(errno));
    return 0;
}

static heed_dtype stored_dtype(heed_dtype dtype) { return dtype == HEED_BF16 ? HEED_F32 : dtype; }

static int write_header(FILE *file, const npy_array *a)
{
    heed_dtype dtype = stored_dtype(a->dtype);
    char order = dtype == HEED_BOOL ? '|' : *(const char *)&(const int){ 1 } ? '<' : '>';
    char text[256];
    int n = snprintf(text, sizeof text, "{'descr': '%c%c%zu', 'fortran_order': False, 'shape': (", order,
                     dtype == HEED_BOOL ? 'b' : 'f', element_size(dtype));
    for (int i = 0; i < a->rank; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%lld,%s", (long long)a->shape[i], i + 1 < a->rank ? " " : "");
    n += snprintf(text + n, sizeof text - (size_t)n, "), }");
    enum { PREFIX = 10, ALIGNMENT = 64 };
    int total = (PREFIX + n + 1 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, length = total - PREFIX;
    unsigned char prefix[PREFIX] = {
        0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, (unsigned char)(length & 255), (unsigned char)(length >> 8)
    };
    fwrite(prefix, 1, PREFIX, file);
    fprintf(file, "%-*s\n", length - 1, text);
    return !ferror(file);
}

static int write_array(FILE *file, const npy_array *a, char *why)
{
    errno = 0;
    int good = write_header(file, a);
    if (a->dtype == HEED_BF16)
        for (int64_t i = 0; good && i < a->count; i++) {
            float x = (float)element_load(a->data, HEED_BF16, i);
            good = fwrite(&x, sizeof x, 1, file) == 1;
        }
    else if (good)
        good = fwrite(a->data, element_size(a->dtype), (size_t)a->count, file) == (size_t)a->count;
    good = !fflush(file) && good;
    return good ? 1 : refuse_errno(why);
}

static int write_directly(const char *path, const npy_array *a, char *why)
{
    FILE *file = fopen(path, "wb");
    if (!file)
        return refuse_errno(why);
    int good = write_array(file, a, why);
    if (fclose(file) && good)
        return refuse_errno(why);
    return good;
}

/* A file made by mkstemp is private; the result should be as readable as one made by open. */
static int give_usual_mode(int file, const struct stat *old)
{
    mode_t mask = umask(0);
    umask(mask);
    return !fchmod(file, old ? old->st_mode & 07777 : 0666 & ~mask);
}

static int write_temporary(npy_output *o, const npy_array *a, const struct stat *old, char *why)
{
    size_t size = strlen(o->path) + sizeof ".XXXXXX";
    if (!(o->temporary = malloc(size)))
        return refuse_errno(why);
    snprintf(o->temporary, size, "%s.XXXXXX", o->path);
    int descriptor = mkstemp(o->temporary);
    if (descriptor < 0) {
        refuse_errno(why);
        free(o->temporary); /* nothing was made, so nothing is to be removed */
        o->temporary = NULL;
        return 0;
    }
    FILE *file = fdopen(descriptor, "wb");
    if (!file) {
        refuse_errno(why);
        close(descriptor);
        return 0;
    }
    int good = write_array(file, a, why);
    if (good && (!give_usual_mode(descriptor, old) || fsync(descriptor)))
        good = refuse_errno(why);
    if (fclose(file) && good)
        good = refuse_errno(why);
    return good;
}

/* Where a rename ends up, from malloc: through symbolic links to what they name; a file that is not there yet is in a
 * folder that is. NULL: nowhere. */
static char *place_of(const char *path)
{
    char *place = realpath(path, NULL);
    if (place)
        return place;
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char *folder = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup("."), *real = NULL;
    if (folder && (real = realpath(folder, NULL))) {
        size_t size = strlen(real) + strlen(name) + 2;
        if ((place = malloc(size)))
            snprintf(place, size, "%s/%s", real, name);
    }
    free(folder);
    free(real);
    return place;
}

int npy_same_file(const char *path, const char *other)
{
    char *a = place_of(path), *b = place_of(other);
    int same = !strcmp(path, other) || (a && b && !strcmp(a, b));
    free(a);
    free(b);
    return same;
}

int npy_stage(npy_output *o, const char *path, const npy_array *array, char why[NPY_WHY])
{
    struct stat old;
    int exists = !stat(path, &old);
    *o = (npy_output){ 0 };
    if (exists && !S_ISREG(old.st_mode) && !S_ISDIR(old.st_mode))
        return write_directly(path, array, why); /* a rename would replace the device by a file */
    if (exists && S_ISDIR(old.st_mode)) {
        errno = EISDIR;
        return refuse_errno(why);
    }
    o->path = exists ? realpath(path, NULL) : strdup(path); /* through a symbolic link, to what it names */
    if (!o->path)
        return refuse_errno(why);
    if (write_temporary(o, array, exists ? &old : NULL, why))
        return 1;
    npy_discard(o);
    return 0;
}

int npy_commit(npy_output *o, char why[NPY_WHY])
{
    if (o->temporary && rename(o->temporary, o->path))
        return refuse_errno(why);
    free(o->temporary);
    o->temporary = NULL;
    return 1;
}

void npy_discard(npy_output *o)
{
    if (o->temporary)
        unlink(o->temporary);
    free(o->temporary);
    free(o->path);
    *o = (npy_output){ 0 };
}
