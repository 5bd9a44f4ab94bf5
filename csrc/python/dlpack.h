/* The parts of the DLPack ABI (major version 1, and the structs before it) that this module reads. Field order and
   sizes are the standard's; see https://dmlc.github.io/dlpack/latest/c_api.html. */
#ifndef DLPACK_H
#define DLPACK_H

#include <stdint.h>

typedef struct {
    uint32_t major, minor;
} DLVersion;

typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} DLType;

typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    DLType dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: C-contiguous */
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManaged {
    DLTensor tensor;
    void *context;
    void (*deleter)(struct DLManaged *self);
} DLManaged;

enum { DL_MAJOR = 1, DL_READ_ONLY = 1 };

typedef struct DLManagedVersioned {
    DLVersion version;
    void *context;
    void (*deleter)(struct DLManagedVersioned *self);
    uint64_t flags;
    DLTensor tensor;
} DLManagedVersioned;

/* The table behind type.__dlpack_c_exchange_api__, a capsule named "dlpack_exchange_api". Functions return 0, or -1
   with a Python exception set. */
typedef struct DLExchange {
    DLVersion version;
    struct DLExchange *previous; /* an older table, or NULL */
    int (*allocate)(DLTensor *prototype, DLManagedVersioned **out, void *context,
                    void (*set_error)(void *context, const char *kind, const char *message));
    int (*managed_from_object)(void *object, DLManagedVersioned **out);
    int (*object_from_managed)(DLManagedVersioned *tensor, void **out);
    int (*tensor_from_object)(void *object, DLTensor *out); /* borrows; may be NULL */
    int (*current_stream)(int32_t device_type, int32_t device_id, void **out);
} DLExchange;

#endif
