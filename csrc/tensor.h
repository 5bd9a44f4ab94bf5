/* A Tensor is a DLTensor with its loose ends tied: byte offset added, strides never absent and in elements, the
   element type an index into dtypes.def. It borrows its memory. */
#ifndef TENSOR_H
#define TENSOR_H

#include <stdint.h>

enum { MAX_NDIM = 8 };

typedef enum {
#define DTYPE(id, name, code, bits) id,
#include "dtypes.def"
#undef DTYPE
    DTYPE_COUNT
} DType;

/* The numbers are DLPack's DLDeviceType. */
typedef enum {
    DEVICE_CPU = 1,
    DEVICE_CUDA = 2,
    DEVICE_CUDA_HOST = 3,
    DEVICE_ROCM = 10,
    DEVICE_ROCM_HOST = 11
} DeviceType;

typedef struct {
    int32_t type; /* DeviceType, or another of DLPack's that no backend here serves */
    int32_t id;
} Device;

typedef struct {
    void *data;   /* first element; may be NULL when there are no elements */
    int given;    /* 0: the optional argument was left out, nothing else here means anything */
    int readonly; /* the producer forbids writing */
    int ndim;
    DType dtype;
    Device device;
    int64_t shape[MAX_NDIM];
    int64_t stride[MAX_NDIM]; /* in elements */
} Tensor;

/* What every call carries beside its own arguments. */
typedef struct {
    int num_threads;          /* resolved, >= 1 */
    int (*interrupted)(void); /* may be NULL; asked now and then, nonzero: stop with INTERRUPTED */
    void *stream;             /* GPU backends: the caller's current stream */
} Call;

#endif
