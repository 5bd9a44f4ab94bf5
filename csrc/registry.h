/* Which kernel runs: each backend has a table of kernels an op, best first. */
#ifndef REGISTRY_H
#define REGISTRY_H

#include "args.h"

typedef Status (*KernelRun)(const void *args, Error *err);

typedef struct {
    const char *variant; /* "avx2"; the last row of a table is "scalar" or the portable one */
    uint64_t needs;      /* feature bits that the machine must have */
    int (*fits)(const void *args); /* NULL: covers the whole format */
    KernelRun run;
} Kernel;

typedef struct {
    const Kernel *rows; /* best first */
    int count;
} KernelTable;

enum { BACKEND_ABI = 1 };

typedef struct {
    int abi;                             /* BACKEND_ABI */
    int32_t device_type;                 /* DeviceType it serves */
    const char *name;                    /* "cpu", "cuda", "hip" */
    uint64_t (*features)(int device_id); /* feature bits of that device, after the user's cap */
    const char *const *feature_names;    /* name of bit i, NULL after the last */
    Status (*check)(Error *err);         /* once, at import: BAD_VALUE for an unknown cap */
    KernelTable tables[OP_COUNT];
} Backend;

/* The CPU backend is linked in; GPU backends are libraries that export a function of this type named `backend`. */
const Backend *cpu_backend(void);

/* First row of the device's table that the machine can run and that fits; with variant not NULL, exactly that row.
   BAD_DEVICE when no backend serves the device, BAD_VALUE for an unknown or unrunnable variant (the message lists
   those that run). */
Status kernel_find(OpId op, Device device, const char *variant, const void *args,
                   const Kernel **found, Error *err);

#endif
