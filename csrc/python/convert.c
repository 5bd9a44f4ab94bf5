#include "convert.h"

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <stdatomic.h>
#include <string.h>

static PyObject *name_exchange, *name_dlpack, *name_max_version, *name_requires_grad, *name_is_neg,
    *name_masked;
static PyObject *max_version, *only_max_version; /* (1, 1) and ("max_version",) */

/* The scalar types by which ml_dtypes' element types are known, in the order of EXTRA. */
static PyObject *extra_type[3];
static const DType EXTRA[3] = {BF16, F8E4M3, F8E5M2};

static int names_make(void)
{
    name_exchange = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    name_dlpack = PyUnicode_InternFromString("__dlpack__");
    name_max_version = PyUnicode_InternFromString("max_version");
    name_requires_grad = PyUnicode_InternFromString("requires_grad");
    name_is_neg = PyUnicode_InternFromString("is_neg");
    name_masked = PyUnicode_InternFromString("numpy.ma");
    max_version = Py_BuildValue("(ii)", 1, 1);
    only_max_version = name_max_version ? PyTuple_Pack(1, name_max_version) : NULL;
    return name_exchange && name_dlpack && name_requires_grad && name_is_neg && name_masked &&
           max_version && only_max_version;
}

int convert_init(void)
{
    if (PyArray_ImportNumPyAPI() < 0 || !names_make())
        return -1;
    PyObject *module = PyImport_ImportModule("ml_dtypes");
    if (!module)
        return -1;
    for (int i = 0; i < 3; i++) {
        extra_type[i] = PyObject_GetAttrString(module, DTYPE_NAME[EXTRA[i]]);
        if (!extra_type[i]) {
            Py_DECREF(module);
            return -1;
        }
    }
    Py_DECREF(module);
    return 0;
}

static int numpy_dtype(PyArray_Descr *descr)
{
    switch (descr->type_num) {
    case NPY_FLOAT:
        return F32;
    case NPY_HALF:
        return F16;
    case NPY_DOUBLE:
        return F64;
    case NPY_BOOL:
        return BOOL;
    case NPY_UBYTE:
        return U8;
    case NPY_BYTE:
        return I8;
    case NPY_INT:
    case NPY_LONG:
    case NPY_LONGLONG:
        return PyDataType_ELSIZE(descr) == 4 ? I32 : I64;
    default:
        break;
    }
    for (int i = 0; i < 3; i++)
        if ((PyObject *)descr->typeobj == extra_type[i])
            return (int)EXTRA[i];
    return -1;
}

static Status dtype_fail(const Spec *spec, int arg, const char *came, Error *err)
{
    char expected[256] = "";
    dtypes_text(spec, arg, -1, expected, sizeof expected);
    return fail(err, BAD_DTYPE, "%s: %s has dtype %.100s; expected %s", spec->name,
                spec->arg[arg].name, came, expected);
}

static Status numpy_dtype_fail(PyArray_Descr *descr, const Spec *spec, int arg, Error *err)
{
    PyObject *text = PyObject_Str((PyObject *)descr);
    const char *came = text ? PyUnicode_AsUTF8(text) : NULL;
    Status status = came ? dtype_fail(spec, arg, came, err) : BAD_DTYPE;
    Py_XDECREF(text);
    return status;
}

static Status rank_fail(const Spec *spec, int arg, int ndim, Error *err)
{
    return fail(err, BAD_SHAPE, "%s: %s has %d axes; expected (%s)", spec->name,
                spec->arg[arg].name, ndim, spec->arg[arg].shape.text);
}

static Status from_numpy(PyArrayObject *array, const Spec *spec, int arg, Tensor *t, Error *err)
{
    PyArray_Descr *descr = PyArray_DESCR(array);
    int dtype = numpy_dtype(descr);
    if (dtype < 0 || !PyArray_ISNOTSWAPPED(array))
        return numpy_dtype_fail(descr, spec, arg, err);
    t->ndim = PyArray_NDIM(array);
    if (t->ndim > MAX_NDIM)
        return rank_fail(spec, arg, t->ndim, err);
    t->given = 1;
    t->readonly = !PyArray_ISWRITEABLE(array);
    t->data = PyArray_DATA(array);
    t->dtype = (DType)dtype;
    t->device = (Device){DEVICE_CPU, 0};
    for (int i = 0; i < t->ndim; i++) {
        npy_intp stride = PyArray_STRIDE(array, i), size = DTYPE_SIZE[dtype];
        t->shape[i] = PyArray_DIM(array, i);
        t->stride[i] = size == 1   ? stride
                       : size == 2 ? stride >> 1
                       : size == 4 ? stride >> 2
                                   : stride >> 3;
        if ((stride & (size - 1)) && t->shape[i] > 1)
            return fail(
                err, BAD_LAYOUT,
                "%s: %s has a stride of %lld bytes; expected a multiple of its element size %d",
                spec->name, spec->arg[arg].name, (long long)stride, (int)size);
    }
    return OK;
}

static int dlpack_dtype(DLType type)
{
    if (type.lanes != 1)
        return -1;
#define DTYPE(id, name, c, b)             \
    if (type.code == c && type.bits == b) \
        return id;
#include "dtypes.def"
#undef DTYPE
    return -1;
}

static Status from_dlpack(const DLTensor *d, int readonly, const Spec *spec, int arg, Tensor *t,
                          Error *err)
{
    int dtype = dlpack_dtype(d->dtype);
    if (dtype < 0) {
        static const char *const CODE[] = {"int",    "uint",    "float", "opaque",
                                           "bfloat", "complex", "bool"};
        char came[64];
        if (d->dtype.code < sizeof CODE / sizeof *CODE && d->dtype.lanes == 1)
            snprintf(came, sizeof came, "%s%d", CODE[d->dtype.code], d->dtype.bits);
        else
            snprintf(came, sizeof came, "DLPack code %d, %d bits, %d lanes", d->dtype.code,
                     d->dtype.bits, d->dtype.lanes);
        return dtype_fail(spec, arg, came, err);
    }
    if (d->ndim < 0 || d->ndim > MAX_NDIM)
        return rank_fail(spec, arg, d->ndim, err);
    t->given = 1;
    t->readonly = readonly;
    t->data = d->data ? (char *)d->data + d->byte_offset : NULL;
    t->dtype = (DType)dtype;
    t->device = (Device){d->device.type, d->device.id};
    t->ndim = d->ndim;
    int64_t dense = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        t->shape[i] = d->shape[i];
        t->stride[i] = d->strides ? d->strides[i] : dense;
        if (__builtin_mul_overflow(dense, d->shape[i], &dense))
            dense = 0;
    }
    return OK;
}

/* DLPack's exchange table hands out a tensor that autograd follows like any other. torch alone has the attribute. */
static Status grad_check(PyObject *object, const Spec *spec, int arg, int *is_torch, Error *err)
{
    PyObject *grad = PyObject_GetAttr(object, name_requires_grad);
    *is_torch = grad != NULL;
    if (!grad) {
        PyErr_Clear();
        return OK;
    }
    int wanted = grad == Py_True;
    Py_DECREF(grad);
    if (!wanted)
        return OK;
    const char *name = spec->arg[arg].name;
    return fail(
        err, BAD_VALUE,
        "%s: %s requires grad; expected a tensor that autograd does not follow: pass %s.detach()",
        spec->name, name, name);
}

/* The table also drops a lazy minus sign. Only the imaginary part of a conjugate has one, so every stride is even;
   what has an odd stride is spared the call. */
static Status sign_check(PyObject *object, const Tensor *t, const Spec *spec, int arg, Error *err)
{
    for (int i = 0; i < t->ndim; i++)
        if (t->shape[i] > 1 && t->stride[i] & 1)
            return OK;
    PyObject *negative = PyObject_CallMethodNoArgs(object, name_is_neg);
    if (!negative)
        PyErr_Clear();
    int wanted = negative == Py_True;
    Py_XDECREF(negative);
    if (!wanted)
        return OK;
    const char *name = spec->arg[arg].name;
    return fail(
        err, BAD_VALUE,
        "%s: %s has its negative bit set; expected the values in memory: pass %s.resolve_neg()",
        spec->name, name, name);
}

/* "op: x cannot be read through DLPack: why", with the producer's exception as the cause. Of a long reason, which may
   end in a backtrace, the first line. */
static Status producer_fail(const Spec *spec, int arg, PyObject *object)
{
    PyObject *type, *value, *trace, *new_type, *new_value, *new_trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (!value || !PyErr_GivenExceptionMatches(type, PyExc_Exception)) {
        PyErr_Restore(type, value, trace); /* KeyboardInterrupt and its like pass */
        return BAD_TYPE;
    }
    if (trace)
        PyException_SetTraceback(value, trace);
    PyObject *words = PyObject_Str(value);
    const char *why = words ? PyUnicode_AsUTF8(words) : NULL;
    char line[200] = "";
    if (why)
        snprintf(line, sizeof line, "%.*s", (int)strcspn(why, "\n"), why);
    PyErr_Format(PyExc_TypeError, "%s: %s is a %s that cannot be read through DLPack: %s",
                 spec->name, spec->arg[arg].name, Py_TYPE(object)->tp_name, line);
    PyErr_Fetch(&new_type, &new_value, &new_trace);
    PyErr_NormalizeException(&new_type, &new_value, &new_trace);
    if (new_value)
        PyException_SetCause(new_value, Py_NewRef(value));
    PyErr_Restore(new_type, new_value, new_trace);
    Py_XDECREF(words);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return BAD_TYPE;
}

/* The exchange table of a type, or NULL without an exception. */
static const DLExchange *exchange_ask(PyTypeObject *type)
{
    PyObject *capsule = PyObject_GetAttr((PyObject *)type, name_exchange);
    if (!capsule) {
        PyErr_Clear();
        return NULL;
    }
    const DLExchange *table = NULL;
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
        table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule); /* the type keeps it, and the table lives as long as the process */
    while (table && table->version.major != DL_MAJOR)
        table = table->version.major > DL_MAJOR ? table->previous : NULL;
    return table;
}

/* The first few types that have a table, kept alive: asking costs as much as the rest of a conversion. A slot is taken
   once and for all; one whose table is still NULL is being filled by another thread. */
enum { KNOWN_TYPES = 4 };
static _Atomic(PyTypeObject *) known_type[KNOWN_TYPES];
static _Atomic(const DLExchange *) known_table[KNOWN_TYPES];

static const DLExchange *exchange_find(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    int slot = 0;
    for (; slot < KNOWN_TYPES && known_type[slot]; slot++)
        if (known_type[slot] == type && known_table[slot])
            return known_table[slot];
    const DLExchange *table = exchange_ask(type);
    PyTypeObject *nobody = NULL;
    if (table && slot < KNOWN_TYPES &&
        atomic_compare_exchange_strong(&known_type[slot], &nobody, type)) {
        Py_INCREF(type);
        known_table[slot] = table;
    }
    return table;
}

/* Inputs are borrowed; outputs go through the slower managed form, since it alone carries the read-only flag, which
   torch's tensors never have. */
static Status from_exchange(const DLExchange *table, PyObject *object, const Spec *spec, int arg,
                            Tensor *t, Lease *lease, Error *err)
{
    int is_torch, is_input = spec->arg[arg].role < OUT;
    Status status = grad_check(object, spec, arg, &is_torch, err);
    if (status != OK)
        return status;
    if ((is_input || is_torch) && table->tensor_from_object) {
        DLTensor tensor = {0};
        if (table->tensor_from_object(object, &tensor) != 0)
            return producer_fail(spec, arg, object);
        status = from_dlpack(&tensor, is_input, spec, arg, t, err);
    } else {
        if (table->managed_from_object(object, &lease->versioned) != 0)
            return producer_fail(spec, arg, object);
        status = from_dlpack(&lease->versioned->tensor, lease->versioned->flags & DL_READ_ONLY,
                             spec, arg, t, err);
    }
    return status == OK ? sign_check(object, t, spec, arg, err) : status;
}

/* Calls __dlpack__, first as of version 1, then as before it. */
static PyObject *capsule_ask(PyObject *object)
{
    PyObject *args[2] = {object, max_version};
    PyObject *capsule = PyObject_VectorcallMethod(name_dlpack, args, 1, only_max_version);
    if (capsule || !PyErr_ExceptionMatches(PyExc_TypeError))
        return capsule;
    PyErr_Clear();
    return PyObject_CallMethodNoArgs(object, name_dlpack);
}

static Status from_capsule(PyObject *object, const Spec *spec, int arg, Tensor *t, Lease *lease,
                           Error *err)
{
    PyObject *capsule = capsule_ask(object);
    Status status;
    if (!capsule)
        return producer_fail(spec, arg, object);
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        DLManagedVersioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        PyCapsule_SetName(capsule, "used_dltensor_versioned");
        lease->versioned = managed;
        if (managed->version.major != DL_MAJOR)
            status = fail(err, BAD_TYPE, "%s: %s has DLPack version %u; expected 1", spec->name,
                          spec->arg[arg].name, managed->version.major);
        else
            status =
                from_dlpack(&managed->tensor, managed->flags & DL_READ_ONLY, spec, arg, t, err);
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        lease->plain = PyCapsule_GetPointer(capsule, "dltensor");
        PyCapsule_SetName(capsule, "used_dltensor");
        status = from_dlpack(&lease->plain->tensor, 0, spec, arg, t, err);
    } else {
        status =
            fail(err, BAD_TYPE,
                 "%s: %s has a __dlpack__ that returns a %.100s; expected a fresh DLPack capsule",
                 spec->name, spec->arg[arg].name, Py_TYPE(capsule)->tp_name);
    }
    Py_DECREF(capsule);
    return status;
}

/* Of arrays of a class of their own only: one with a mask holds nothing that can be computed with where it is set. */
static Status mask_check(PyObject *object, const Spec *spec, int arg, Error *err)
{
    PyObject *module =
        PyImport_GetModule(name_masked); /* none without an import, so no such array either */
    PyObject *masked = module ? PyObject_GetAttrString(module, "MaskedArray") : NULL;
    if (!masked)
        PyErr_Clear();
    int is_masked = masked ? PyObject_IsInstance(object, masked) : 0;
    Py_XDECREF(masked);
    Py_XDECREF(module);
    if (is_masked <= 0)
        return is_masked < 0 ? BAD_TYPE : OK;
    const char *name = spec->arg[arg].name;
    return fail(err, BAD_TYPE,
                "%s: %s is a masked array, whose mask would be lost; expected a plain array: pass "
                "%s.filled(value) or %s.data",
                spec->name, name, name, name);
}

Status tensor_from(PyObject *object, const Spec *spec, int arg, Tensor *t, Lease *lease, Error *err)
{
    if (PyArray_CheckExact(object))
        return from_numpy((PyArrayObject *)object, spec, arg, t, err);
    if (PyArray_Check(object)) {
        Status status = mask_check(object, spec, arg, err);
        return status != OK ? status : from_numpy((PyArrayObject *)object, spec, arg, t, err);
    }
    const DLExchange *table = exchange_find(object);
    if (table)
        return from_exchange(table, object, spec, arg, t, lease, err);
    PyObject *method = PyObject_GetAttr((PyObject *)Py_TYPE(object), name_dlpack);
    if (method) {
        Py_DECREF(method);
        return from_capsule(object, spec, arg, t, lease, err);
    }
    PyErr_Clear();
    return fail(
        err, BAD_TYPE,
        "%s: %s is a %.100s; expected a tensor: a NumPy array, or an object with __dlpack__",
        spec->name, spec->arg[arg].name, Py_TYPE(object)->tp_name);
}

void lease_release(Lease *lease)
{
    if (lease->plain && lease->plain->deleter)
        lease->plain->deleter(lease->plain);
    if (lease->versioned && lease->versioned->deleter)
        lease->versioned->deleter(lease->versioned);
}
