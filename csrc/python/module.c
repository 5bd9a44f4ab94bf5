/* fidelta._core: one function an op, made from formats.h. */
#include <stdio.h>
#include <string.h>

#include "call.h"
#include "registry.h"

/* clang-format off */
#define OP(op, doc) \
    static PyObject *call_##op(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) \
    { (void)self; return call(OP_##op, args, nargs, names); }
/* clang-format on */
#include "formats.h"

static PyObject *which_path(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *names)
{
    (void)self;
    if (nargs < 1 || !PyUnicode_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "which_path: expected the name of an op first");
        return NULL;
    }
    for (int i = 0; i < OP_COUNT; i++)
        if (PyUnicode_CompareWithASCIIString(args[0], call_spec((OpId)i)->name) == 0)
            return call_path((OpId)i, args + 1, nargs - 1, names);
    return PyErr_Format(PyExc_ValueError, "which_path: op is \"%U\"; expected the name of an op",
                        args[0]);
}

static PyObject *set_num_threads(PyObject *self, PyObject *number)
{
    (void)self;
    Error err;
    int n;
    Status status = threads_from(number, "set_num_threads", "n", 0, &n, &err);
    if (status != OK) {
        if (!PyErr_Occurred())
            PyErr_SetString(status == BAD_TYPE ? PyExc_TypeError : PyExc_ValueError, err.text);
        return NULL;
    }
    threads_set(n);
    Py_RETURN_NONE;
}

static PyObject *get_num_threads(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    return PyLong_FromLong(threads_get());
}

static const char *const KIND[ROW_KINDS] = {
    "DIM",      "ARG",     "ALT",       "ABSENT",  "HINT",      "NUM",     "INT",
    "FLAG",     "CHOICE",  "RULE",      "RULE_IF", "GIVEN_IF",  "NEEDS",   "EXCLUDES",
    "SPANS",    "OFFSETS", "SLOTS",     "INDEX",   "POSITIONS", "LONGEST", "LONGEST_IF",
    "RANGE_IF", "SHARE",   "NUM_RANGE", "ALIAS",
};
static const char *const ROLE[] = {"IN", "OPT", "OUT", "OUT_OPT", "INOUT"};
static const char *const LAYOUT[] = {"ROWS", "DENSE", "ANY"};
static const char *const USE[] = {"READ", "WRITE", "BOTH"};

/* One row as a dict whose keys are the parameters of its kind in formats.h. */
static PyObject *row_dict(const Row *r)
{
    const char *kind = KIND[r->kind];
    switch (r->kind) {
    case ROW_DIM:
        return Py_BuildValue("{ssssss}", "kind", kind, "name", r->name, "doc", r->doc);
    case ROW_ARG:
        return Py_BuildValue("{ssssssssssssss}", "kind", kind, "name", r->name, "role",
                             ROLE[r->role], "shape", r->second, "dtypes", r->third, "layout",
                             LAYOUT[r->layout], "doc", r->doc);
    case ROW_ALT:
        return Py_BuildValue("{ssssssss}", "kind", kind, "arg", r->name, "when", r->second, "shape",
                             r->third);
    case ROW_ABSENT:
        return Py_BuildValue("{ssssssss}", "kind", kind, "arg", r->name, "dim", r->second, "extent",
                             r->third);
    case ROW_HINT:
        return Py_BuildValue("{ssssssss}", "kind", kind, "arg", r->name, "shape", r->second, "text",
                             r->doc);
    case ROW_NUM:
    case ROW_INT:
    case ROW_FLAG:
        return Py_BuildValue("{ssssssss}", "kind", kind, "name", r->name, "default", r->second,
                             "doc", r->doc);
    case ROW_CHOICE:
        return Py_BuildValue("{ssssssss}", "kind", kind, "name", r->name, "values", r->second,
                             "doc", r->doc);
    case ROW_RULE:
        return Py_BuildValue("{ssss}", "kind", kind, "rule", r->second);
    case ROW_RULE_IF:
        return Py_BuildValue("{ssssss}", "kind", kind, "arg", r->name, "rule", r->second);
    case ROW_GIVEN_IF:
        return Py_BuildValue("{ssssss}", "kind", kind, "arg", r->name, "when", r->second);
    case ROW_NEEDS:
    case ROW_EXCLUDES:
        return Py_BuildValue("{ssssss}", "kind", kind, "arg", r->name, "other", r->second);
    case ROW_SHARE:
        return Py_BuildValue("{ssssss}", "kind", kind, "out", r->name, "arg", r->second);
    case ROW_SPANS:
    case ROW_OFFSETS:
    case ROW_POSITIONS:
    case ROW_LONGEST_IF:
        return Py_BuildValue("{ssssss}", "kind", kind, "arg", r->name, "dim", r->second);
    case ROW_LONGEST:
        return Py_BuildValue("{ssss}", "kind", kind, "extent", r->second);
    case ROW_SLOTS:
        return Py_BuildValue("{ssssssssss}", "kind", kind, "arg", r->name, "dim", r->second, "use",
                             USE[r->use], "pad", r->third);
    case ROW_ALIAS:
        return Py_BuildValue("{ssssss}", "kind", kind, "arg", r->name, "name", r->second);
    case ROW_NUM_RANGE:
        return Py_BuildValue("{sssssdsd}", "kind", kind, "name", r->name, "low", r->low, "high",
                             r->high);
    case ROW_INDEX:
        return Py_BuildValue("{sssssdss}", "kind", kind, "arg", r->name, "low", r->low, "extent",
                             r->second);
    case ROW_RANGE_IF:
        return Py_BuildValue("{sssssssdsdss}", "kind", kind, "arg", r->name, "when", r->second,
                             "low", r->low, "high", r->high, "text", r->doc);
    default:
        Py_RETURN_NONE;
    }
}

static PyObject *rows_list(const Spec *spec)
{
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < spec->row_count; i++) {
        PyObject *row = row_dict(&spec->rows[i]);
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *formats(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    PyObject *all = PyDict_New();
    for (int i = 0; all && i < OP_COUNT; i++) {
        const Spec *spec = call_spec((OpId)i);
        PyObject *rows = rows_list(spec);
        PyObject *op = rows ? Py_BuildValue("{sssN}", "doc", spec->doc, "rows", rows) : NULL;
        if (!op || PyDict_SetItemString(all, spec->name, op) < 0)
            Py_CLEAR(all);
        Py_XDECREF(op);
    }
    return all;
}

static PyObject *kernels_list(const KernelTable *table, uint64_t features)
{
    PyObject *list = PyList_New(table->count);
    for (int i = 0; list && i < table->count; i++) {
        const Kernel *kernel = &table->rows[i];
        PyObject *row =
            Py_BuildValue("(sO)", kernel->variant, kernel->needs & ~features ? Py_False : Py_True);
        if (row)
            PyList_SET_ITEM(list, i, row);
        else
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *kernels(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    const Backend *backend = cpu_backend();
    PyObject *all = PyDict_New();
    for (int i = 0; all && i < OP_COUNT; i++) {
        PyObject *list = kernels_list(&backend->tables[i], backend->features(0));
        if (!list || PyDict_SetItemString(all, call_spec((OpId)i)->name, list) < 0)
            Py_CLEAR(all);
        Py_XDECREF(list);
    }
    return all;
}

/* Through void *: a PyCFunction by another name, as METH_FASTCALL wants it. */
#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef methods[] = {
#define OP(op, doc) {#op, FAST(call_##op), METH_FASTCALL | METH_KEYWORDS, doc},
#include "formats.h"
    {"which_path", FAST(which_path), METH_FASTCALL | METH_KEYWORDS,
     "which_path(op, ...): the backend and variant that op would run with these arguments, as "
     "\"cpu/avx2\""},
    {"set_num_threads", set_num_threads, METH_O,
     "Threads that a call uses when it does not say; 0: the default"},
    {"get_num_threads", get_num_threads, METH_NOARGS,
     "Threads that a call uses when it does not say"},
    {"formats", formats, METH_NOARGS, "The rows of formats.h: {op: {doc, rows: [{kind, ...}]}}"},
    {"kernels", kernels, METH_NOARGS,
     "The CPU's kernels, best first: {op: [(variant, runs on this machine)]}"},
    {NULL, NULL, 0, NULL},
};

static PyObject *raises[INTERRUPTED + 1];

/* A subclass of ValueError, made once a process. */
static int exception_add(PyObject *module, Status status, const char *name, const char *doc)
{
    char full[64];
    snprintf(full, sizeof full, "fidelta.%s", name);
    if (!raises[status])
        raises[status] = PyErr_NewExceptionWithDoc(full, doc, PyExc_ValueError, NULL);
    return raises[status] ? PyModule_AddObjectRef(module, name, raises[status]) : -1;
}

/* An environment variable that means nothing stops the import rather than being ignored. */
static int backend_check(const Backend *backend)
{
    Error err;
    if (backend->check(&err) == OK)
        return 0;
    PyErr_SetString(PyExc_ValueError, err.text);
    return -1;
}

static int module_exec(PyObject *module)
{
    if (backend_check(cpu_backend()) < 0)
        return -1;
    raises[BAD_TYPE] = PyExc_TypeError;
    raises[BAD_VALUE] = PyExc_ValueError;
    raises[NO_MEMORY] = PyExc_MemoryError;
    raises[INTERRUPTED] = PyExc_KeyboardInterrupt;
    if (exception_add(module, BAD_SHAPE, "ShapeError", "A tensor's shape contradicts the format.") <
            0 ||
        exception_add(module, BAD_LAYOUT, "LayoutError",
                      "A tensor's strides, memory or overlap are not accepted.") < 0 ||
        exception_add(module, BAD_DTYPE, "DTypeError", "A tensor's element type is not accepted.") <
            0 ||
        exception_add(module, BAD_DEVICE, "DeviceError",
                      "Tensors lie on different or unsupported devices.") < 0)
        return -1;
    return convert_init() < 0 ? -1 : call_init(raises);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)module_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "fidelta._core",
    .m_doc = "The ops of fidelta. Shapes: docs/formats.md.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}
