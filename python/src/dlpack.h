/* DLPack 1.x as this extension uses it: how tensors of other libraries describe their memory. The layout is that of the
 * published ABI; only what heed reads is declared. */
#ifndef HEED_DLPACK_H
#define HEED_DLPACK_H

#include <stdint.h>

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_CUDA_MANAGED = 13 };                   /* device types */
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5, DL_BOOL = 6 }; /* dtype codes */
enum { DL_READ_ONLY = 1 };                                                                  /* flags */

typedef struct dl_device {
    int32_t type;
    int32_t id;
} dl_device;

typedef struct dl_dtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} dl_dtype;

typedef struct dl_tensor {
    void *data;
    dl_device device;
    int32_t ndim;
    dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: packed */
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed { /* in a capsule "dltensor" */
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *);
} dl_managed;

typedef struct dl_version {
    uint32_t major, minor;
} dl_version;

typedef struct dl_managed_versioned { /* in a capsule "dltensor_versioned" */
    dl_version version;
    void *context;
    void (*deleter)(struct dl_managed_versioned *);
    uint64_t flags;
    dl_tensor tensor;
} dl_managed_versioned;

/* The table of C functions that a tensor type publishes as __dlpack_c_exchange_api__, in a capsule
 * "dlpack_exchange_api" (DLPack 1.2 and later). */
typedef struct dl_exchange {
    dl_version version;
    struct dl_exchange *previous;
    int (*allocate)(dl_tensor *, dl_managed_versioned **, void *, void (*)(void *, const char *, const char *));
    int (*take)(void *object, dl_managed_versioned **);
    int (*give)(dl_managed_versioned *, void **object);
    int (*borrow)(void *object, dl_tensor *); /* valid while the object lives and keeps its shape; may be NULL */
    int (*current_stream)(int32_t device_type, int32_t device, void **stream);
} dl_exchange;

#endif
