/* Names of statuses and types, the version, and the message that a failing call leaves behind. */
#include "internal.h"

#include <stdarg.h>
#include <stdio.h>

/* One for each thread, so that a message is never that of someone else's call. */
static _Thread_local char message[512];

heed_status heed_fail(heed_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return status;
}

const char *heed_last_error(void) { return message; }

const char *heed_status_name(heed_status status)
{
    switch (status) {
    case HEED_OK: return "ok";
    case HEED_BAD_ARGUMENT: return "bad argument";
    case HEED_UNSUPPORTED: return "unsupported";
    case HEED_NO_WORKSPACE: return "no workspace";
    case HEED_NO_DEVICE: return "no device";
    case HEED_DEVICE_ERROR: return "device error";
    }
    return "unknown status";
}

int heed_version(void) { return HEED_VERSION; }

#define TEXT(x) #x
#define VERSION_TEXT(major, minor, patch) TEXT(major) "." TEXT(minor) "." TEXT(patch)

const char *heed_version_string(void)
{
    return VERSION_TEXT(HEED_VERSION_MAJOR, HEED_VERSION_MINOR, HEED_VERSION_PATCH);
}

size_t heed_dtype_size(heed_dtype dtype)
{
    switch (dtype) {
    case HEED_F32: return 4;
    case HEED_F16: return 2;
    case HEED_BF16: return 2;
    case HEED_F64: return 8;
    case HEED_BOOL: return 1;
    }
    return 0;
}

const char *heed_dtype_name(heed_dtype dtype)
{
    switch (dtype) {
    case HEED_F32: return "fp32";
    case HEED_F16: return "fp16";
    case HEED_BF16: return "bf16";
    case HEED_F64: return "fp64";
    case HEED_BOOL: return "bool";
    }
    return "unknown";
}
