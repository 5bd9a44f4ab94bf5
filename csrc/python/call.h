/* One call from Python to a kernel, the same for every op. */
#ifndef CALL_H
#define CALL_H

#include "convert.h"

/* Compiles every op's rows and interns its names; exceptions[s] is what Status s raises. -1 with an exception set. */
int call_init(PyObject *const *exceptions);

/* The rows of an op, compiled. */
const Spec *call_spec(OpId op);

/* Checks the arguments, runs the kernel, returns None. */
PyObject *call(OpId op, PyObject *const *args, Py_ssize_t nargs, PyObject *names);

/* The same up to the kernel, whose name it returns: "cpu/avx2". */
PyObject *call_path(OpId op, PyObject *const *args, Py_ssize_t nargs, PyObject *names);

enum { MAX_THREADS = 256 };

/* The number of threads in an int or anything else that stands for one, but a bool; least .. MAX_THREADS. */
Status threads_from(PyObject *object, const char *op, const char *name, int least, int *out,
                    Error *err);

/* Threads a call uses when it does not say; 0 sets the default back. */
int threads_get(void);
void threads_set(int n);

#endif
