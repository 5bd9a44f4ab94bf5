#define _GNU_SOURCE
#include "call.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "registry.h"

enum { EXTRAS = 2, MAX_PARAMS = MAX_ARGS + MAX_SCALARS + EXTRAS };

/* An op's parameters in order: its args, its scalars, num_threads, variant. */
typedef struct {
    Spec spec;
    int params;
    PyObject *name[MAX_PARAMS];
    PyObject *value[MAX_SCALARS][MAX_VALUES]; /* of each CHOICE */
} Op;

typedef union {
#define OP(op, doc) op##_args op;
#include "formats.h"
    Call call;
} AnyArgs;

/* Everything of one call that must be given back. */
typedef struct {
    const Op *op;
    AnyArgs args;
    Error err;
    int leases;
    Lease lease[MAX_ARGS];
    const char *variant;
} Frame;

static Op ops[OP_COUNT];
static PyObject *raises[INTERRUPTED + 1];
static atomic_int threads_wanted, threads_default;
static int threads_environment; /* 0: not said there */

const Spec *call_spec(OpId op)
{
    return &ops[op].spec;
}

/* FIDELTA_NUM_THREADS, where nonsense is refused, or the first number of OMP_NUM_THREADS, which is others' to check. */
static int environment_read(void)
{
    const char *ours = getenv("FIDELTA_NUM_THREADS"), *theirs = getenv("OMP_NUM_THREADS");
    char *end;
    long n;
    if (ours && *ours) {
        n = strtol(ours, &end, 10);
        if (*end || *ours < '0' || *ours > '9' || n < 1 || n > MAX_THREADS) {
            PyErr_Format(PyExc_ValueError,
                         "environment variable FIDELTA_NUM_THREADS is \"%s\"; expected a whole "
                         "number 1 .. %d",
                         ours, MAX_THREADS);
            return -1;
        }
    } else
        n = theirs ? strtol(theirs, NULL, 10) : 0;
    threads_environment = n < 0 ? 0 : n > MAX_THREADS ? MAX_THREADS : (int)n;
    return 0;
}

int threads_get(void)
{
    int n = atomic_load_explicit(&threads_wanted, memory_order_relaxed);
    return n > 0 ? n : atomic_load_explicit(&threads_default, memory_order_relaxed);
}

void threads_set(int n)
{
    int standard = threads_environment;
#if defined(__linux__)
    cpu_set_t cores;
    if (!standard && sched_getaffinity(0, sizeof cores, &cores) == 0)
        standard = CPU_COUNT(&cores) < MAX_THREADS ? CPU_COUNT(&cores) : MAX_THREADS;
#endif
    atomic_store(&threads_default, standard > 0 ? standard : 1);
    atomic_store(&threads_wanted, n);
}

static int op_init(OpId id)
{
    Op *op = &ops[id];
    Error err;
    if (spec_compile(id, &op->spec, &err) != OK) {
        PyErr_SetString(PyExc_ImportError, err.text);
        return -1;
    }
    for (int i = 0; i < op->spec.args; i++)
        op->name[op->params++] = PyUnicode_InternFromString(op->spec.arg[i].row->name);
    for (int i = 0; i < op->spec.scalars; i++) {
        const Scalar *s = &op->spec.scalar[i];
        op->name[op->params++] = PyUnicode_InternFromString(s->row->name);
        for (int j = 0; j < s->values; j++)
            if (!(op->value[i][j] = PyUnicode_InternFromString(s->value[j])))
                return -1;
    }
    op->name[op->params++] = PyUnicode_InternFromString("num_threads");
    op->name[op->params++] = PyUnicode_InternFromString("variant");
    for (int i = 0; i < op->params; i++)
        if (!op->name[i])
            return -1;
    return 0;
}

int call_init(PyObject *const *exceptions)
{
    memcpy(raises, exceptions, sizeof raises);
    if (environment_read() < 0)
        return -1;
    threads_set(0);
    for (int i = 0; i < OP_COUNT; i++)
        if (ops[i].params == 0 && op_init((OpId)i) < 0)
            return -1;
    return 0;
}

/* Levenshtein's distance, for the name that was probably meant. */
static int distance(const char *a, const char *b)
{
    int row[64], n = (int)strlen(b);
    if (n >= 64)
        return 64;
    for (int j = 0; j <= n; j++)
        row[j] = j;
    for (int i = 0; a[i]; i++) {
        int corner = row[0];
        row[0] = i + 1;
        for (int j = 0; j < n; j++) {
            int swap = corner + (a[i] != b[j]),
                low = row[j] < row[j + 1] ? row[j] + 1 : row[j + 1] + 1;
            corner = row[j + 1];
            row[j + 1] = swap < low ? swap : low;
        }
    }
    return row[n];
}

static Status unknown_fail(Frame *f, PyObject *name)
{
    const char *came = PyUnicode_AsUTF8(name), *best = "";
    int near = 1000;
    if (!came)
        return BAD_TYPE;
    for (int i = 0; i < f->op->params; i++) {
        const char *known = PyUnicode_AsUTF8(f->op->name[i]);
        int d = known ? distance(came, known) : 1000;
        if (d < near) {
            near = d;
            best = known;
        }
    }
    return fail(&f->err, BAD_TYPE, "%s: unknown argument %.100s; did you mean %s?",
                f->op->spec.name, came, best);
}

/* The parameter of that name, -1 when there is none. Names of a call's keywords are interned, and usually come in
   order, so the search by pointer from the place after the last one rarely takes a second step. */
static int param_find(const Op *op, PyObject *name, int from)
{
    for (int i = 0; i < op->params; i++) {
        int at = from + i < op->params ? from + i : from + i - op->params;
        if (op->name[at] == name)
            return at;
    }
    for (int i = 0; i < op->params; i++)
        if (PyUnicode_Compare(op->name[i], name) == 0)
            return i;
    return -1;
}

/* Arguments into their places; a place left NULL was left out. */
static Status params_place(Frame *f, PyObject *const *args, Py_ssize_t nargs, PyObject *names,
                           PyObject **place)
{
    const Op *op = f->op;
    if (nargs > op->params)
        return fail(&f->err, BAD_TYPE, "%s: %zd arguments came; expected at most %d", op->spec.name,
                    nargs, op->params);
    memcpy(place, args, (size_t)nargs * sizeof *place);
    memset(place + nargs, 0, (size_t)(op->params - nargs) * sizeof *place);
    Py_ssize_t count = names ? PyTuple_GET_SIZE(names) : 0;
    int next = (int)nargs < op->params ? (int)nargs : 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        int at = param_find(op, name, next);
        if (at < 0)
            return unknown_fail(f, name);
        if (place[at])
            return fail(&f->err, BAD_TYPE, "%s: %s is given twice", op->spec.name,
                        PyUnicode_AsUTF8(op->name[at]));
        place[at] = args[nargs + i];
        next = at + 1 < op->params ? at + 1 : 0;
    }
    return OK;
}

static Status scalar_fail(Frame *f, int param, PyObject *object, const char *expected)
{
    return fail(&f->err, BAD_TYPE, "%s: %s is a %.100s; expected %s", f->op->spec.name,
                PyUnicode_AsUTF8(f->op->name[param]), Py_TYPE(object)->tp_name, expected);
}

/* A NumPy scalar whose type's name begins so; NumPy's own check would tie this file to its API. */
static int is_numpy(PyObject *object, const char *type)
{
    return !strncmp(Py_TYPE(object)->tp_name, type, strlen(type));
}

static Status num_from(Frame *f, int param, PyObject *object, double *out)
{
    if (PyBool_Check(object) || !(PyFloat_Check(object) || PyLong_Check(object) ||
                                  is_numpy(object, "numpy.float") || is_numpy(object, "numpy.int")))
        return scalar_fail(f, param, object, "a float");
    *out = PyFloat_AsDouble(object);
    if (*out == -1.0 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return BAD_TYPE;
        PyErr_Clear();
        return fail(&f->err, BAD_VALUE, "%s: %s does not fit a float; expected a smaller number",
                    f->op->spec.name, PyUnicode_AsUTF8(f->op->name[param]));
    }
    if (!isfinite(*out))
        return fail(&f->err, BAD_VALUE, "%s: %s is %s; expected a finite number", f->op->spec.name,
                    PyUnicode_AsUTF8(f->op->name[param]),
                    isnan(*out) ? "nan"
                    : *out > 0  ? "inf"
                                : "-inf");
    return OK;
}

/* int and NumPy's integers, which have __index__; not bool, and not a tensor that would be copied to be read. */
static Status int_from(Frame *f, int param, PyObject *object, int64_t *out)
{
    int overflow = 0;
    PyObject *number = NULL;
    if (!PyBool_Check(object) && (PyLong_Check(object) || is_numpy(object, "numpy.int")))
        number = PyNumber_Index(object);
    if (!number) {
        PyErr_Clear();
        return scalar_fail(f, param, object, "an int");
    }
    *out = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (overflow)
        return fail(&f->err, BAD_VALUE, "%s: %s does not fit 64 bits; expected a smaller number",
                    f->op->spec.name, PyUnicode_AsUTF8(f->op->name[param]));
    return OK;
}

static Status flag_from(Frame *f, int param, PyObject *object, int *out)
{
    if (!PyBool_Check(object) && !is_numpy(object, "numpy.bool"))
        return scalar_fail(f, param, object, "a bool");
    *out = PyObject_IsTrue(object);
    return OK;
}

static Status choice_from(Frame *f, int param, PyObject *object, int *out)
{
    const Scalar *s = &f->op->spec.scalar[param - f->op->spec.args];
    PyObject *const *value = f->op->value[param - f->op->spec.args];
    char expected[128] = "";
    for (int i = 0; i < s->values; i++)
        if (value[i] == object) {
            *out = i;
            return OK;
        }
    for (int i = 0; i < s->values; i++) {
        if (PyUnicode_Check(object) && PyUnicode_Compare(value[i], object) == 0) {
            *out = i;
            return OK;
        }
        snprintf(expected + strlen(expected), sizeof expected - strlen(expected), "%s\"%s\"",
                 i ? " or " : "", s->value[i]);
    }
    if (!PyUnicode_Check(object))
        return scalar_fail(f, param, object, expected);
    const char *came = PyUnicode_AsUTF8(object);
    if (!came)
        return BAD_VALUE;
    return fail(&f->err, BAD_VALUE, "%s: %s is \"%.100s\"; expected %s", f->op->spec.name,
                s->row->name, came, expected);
}

static Status scalar_from(Frame *f, int param, PyObject *object)
{
    const Scalar *s = &f->op->spec.scalar[param - f->op->spec.args];
    void *at = (char *)&f->args + s->at;
    switch (s->row->kind) {
    case ROW_NUM:
        return num_from(f, param, object, at);
    case ROW_INT:
        return int_from(f, param, object, at);
    case ROW_FLAG:
        return flag_from(f, param, object, at);
    default:
        return choice_from(f, param, object, at);
    }
}

/* Asked by a kernel without the GIL. An exception that a signal handler raised stays set until the call returns. */
static int interrupted(void)
{
    PyGILState_STATE state = PyGILState_Ensure();
    int stop = PyErr_Occurred() != NULL || PyErr_CheckSignals() < 0;
    PyGILState_Release(state);
    return stop;
}

Status threads_from(PyObject *object, const char *op, const char *name, int least, int *out,
                    Error *err)
{
    int overflow;
    PyObject *number = PyBool_Check(object) ? NULL : PyNumber_Index(object);
    if (!number) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError))
            return BAD_TYPE;
        PyErr_Clear();
        return fail(err, BAD_TYPE, "%s: %s is a %.100s; expected an int", op, name,
                    Py_TYPE(object)->tp_name);
    }
    long n = PyLong_AsLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (overflow)
        return fail(err, BAD_VALUE, "%s: %s does not fit 64 bits; expected %d .. %d", op, name,
                    least, MAX_THREADS);
    if (n < least || n > MAX_THREADS)
        return fail(err, BAD_VALUE, "%s: %s is %ld; expected %d .. %d", op, name, n, least,
                    MAX_THREADS);
    *out = (int)n;
    return OK;
}

static Status extras_from(Frame *f, PyObject *const *place)
{
    const Op *op = f->op;
    PyObject *threads = place[op->params - 2], *variant = place[op->params - 1];
    int n = 0;
    if (threads && threads != Py_None) {
        Status status = threads_from(threads, op->spec.name, "num_threads", 1, &n, &f->err);
        if (status != OK)
            return status;
    }
    f->args.call = (Call){.num_threads = n ? n : threads_get(), .interrupted = interrupted};
    if (!variant || variant == Py_None)
        return OK;
    if (!PyUnicode_Check(variant))
        return scalar_fail(f, op->params - 1, variant, "a str");
    f->variant = PyUnicode_AsUTF8(variant);
    return f->variant ? OK : BAD_TYPE;
}

/* Python arguments into the args struct. */
static Status args_fill(Frame *f, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    const Spec *spec = &f->op->spec;
    PyObject *place[MAX_PARAMS];
    Status status = params_place(f, args, nargs, names, place);
    spec_defaults(spec, &f->args);
    for (int i = 0; i < spec->args && status == OK; i++) {
        Tensor *t = arg_tensor(spec, &f->args, i);
        t->given = 0;
        if (!place[i] && spec->arg[i].role != OPT && spec->arg[i].role != OUT_OPT)
            return fail(&f->err, BAD_TYPE, "%s: missing argument %s", spec->name,
                        spec->arg[i].row->name);
        if (!place[i] || place[i] == Py_None)
            continue;
        Lease *lease = &f->lease[f->leases++];
        *lease = (Lease){NULL, NULL};
        status = tensor_from(place[i], spec, i, t, lease, &f->err);
    }
    for (int i = spec->args; i < spec->args + spec->scalars && status == OK; i++)
        if (place[i] && place[i] != Py_None)
            status = scalar_from(f, i, place[i]);
    return status == OK ? extras_from(f, place) : status;
}

static Device frame_device(const Frame *f)
{
    for (int i = 0; i < f->op->spec.args; i++)
        if (arg_tensor(&f->op->spec, &f->args, i)->given)
            return arg_tensor(&f->op->spec, &f->args, i)->device;
    return (Device){DEVICE_CPU, 0};
}

static void frame_close(Frame *f, Status status)
{
    for (int i = 0; i < f->leases; i++)
        lease_release(&f->lease[i]);
    if (status == OK || PyErr_Occurred())
        return;
    if (status == INTERRUPTED)
        PyErr_SetNone(raises[status]);
    else
        PyErr_SetString(raises[status], f->err.text);
}

PyObject *call(OpId op, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    Frame f;
    const Kernel *kernel = NULL;
    f.op = &ops[op];
    f.leases = 0;
    f.variant = NULL;
    f.err.text[0] = '\0';
    Status status = args_fill(&f, args, nargs, names);
    if (status == OK)
        status = spec_check(&f.op->spec, &f.args, &f.err);
    if (status == OK && (f.variant || spec_has_work(&f.op->spec, &f.args)))
        status = kernel_find(op, frame_device(&f), f.variant, &f.args, &kernel, &f.err);
    if (status == OK && kernel && spec_has_work(&f.op->spec, &f.args)) {
        PyThreadState *thread = PyEval_SaveThread();
        status = kernel->run(&f.args, &f.err);
        PyEval_RestoreThread(thread);
    }
    frame_close(&f, status);
    return status == OK ? Py_NewRef(Py_None) : NULL;
}

PyObject *call_path(OpId op, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    Frame f;
    const Kernel *kernel = NULL;
    f.op = &ops[op];
    f.leases = 0;
    f.variant = NULL;
    f.err.text[0] = '\0';
    Status status = args_fill(&f, args, nargs, names);
    if (status == OK)
        status = spec_check(&f.op->spec, &f.args, &f.err);
    if (status == OK)
        status = kernel_find(op, frame_device(&f), f.variant, &f.args, &kernel, &f.err);
    frame_close(&f, status);
    return status == OK ? PyUnicode_FromFormat("%s/%s", cpu_backend()->name, kernel->variant)
                        : NULL;
}
