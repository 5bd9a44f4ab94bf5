/* A Python object as a Tensor: NumPy arrays through NumPy's C API, everything else through DLPack. */
#ifndef CONVERT_H
#define CONVERT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "dlpack.h"
#include "spec.h"

/* What must be given back to the producer after the call; both may be NULL. */
typedef struct {
    DLManaged *plain;
    DLManagedVersioned *versioned;
} Lease;

/* Loads NumPy and ml_dtypes; -1 with a Python exception set. */
int convert_init(void);

/* Fills t from the object given as argument `arg`. On failure err holds the text, or a Python exception is set. */
Status tensor_from(PyObject *object, const Spec *spec, int arg, Tensor *t, Lease *lease,
                   Error *err);

void lease_release(Lease *lease);

#endif
