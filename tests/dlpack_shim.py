"""Objects that offer nothing but `__dlpack__`, as libraries of different ages do, made with ctypes over NumPy memory."""

import ctypes as c

import numpy as np

CODES = {"i": 0, "u": 1, "f": 2, "b": 6}


class DLTensor(c.Structure):
    _fields_ = [
        ("data", c.c_void_p), ("device_type", c.c_int32), ("device_id", c.c_int32), ("ndim", c.c_int32),
        ("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16), ("shape", c.POINTER(c.c_int64)),
        ("strides", c.POINTER(c.c_int64)), ("byte_offset", c.c_uint64),
    ]


class Managed(c.Structure):
    pass


class Versioned(c.Structure):
    pass


PLAIN_DELETER = c.CFUNCTYPE(None, c.POINTER(Managed))
VERSIONED_DELETER = c.CFUNCTYPE(None, c.POINTER(Versioned))
Managed._fields_ = [("tensor", DLTensor), ("context", c.c_void_p), ("deleter", PLAIN_DELETER)]
Versioned._fields_ = [
    ("major", c.c_uint32), ("minor", c.c_uint32), ("context", c.c_void_p), ("deleter", VERSIONED_DELETER),
    ("flags", c.c_uint64), ("tensor", DLTensor),
]

new_capsule = c.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = c.py_object, [c.c_void_p, c.c_char_p, c.c_void_p]


class Shim:
    """A tensor over an array. `versioned` is what its `__dlpack__` speaks; `released` counts calls of its deleter."""

    def __init__(self, array, versioned=True, readonly=False, device=(1, 0), strides=True, offset=0, major=1, name=None,
                 lanes=1):
        self.array, self.versioned, self.released = array, versioned, 0
        ndim = array.ndim
        self.shape = (c.c_int64 * max(ndim, 1))(*array.shape)
        self.strides = (c.c_int64 * max(ndim, 1))(*(s // array.itemsize for s in array.strides))
        kind = "bf" if array.dtype.name == "bfloat16" else array.dtype.kind
        tensor = DLTensor(
            array.ctypes.data - offset, *device, ndim, 4 if kind == "bf" else CODES[kind], array.itemsize * 8, lanes,
            self.shape, self.strides if strides else None, offset,
        )
        if versioned:
            self.deleter = VERSIONED_DELETER(self.release)
            self.managed = Versioned(major, 1, None, self.deleter, int(readonly), tensor)
        else:
            self.deleter = PLAIN_DELETER(self.release)
            self.managed = Managed(tensor, None, self.deleter)
        self.name = name or (b"dltensor_versioned" if versioned else b"dltensor")

    def release(self, _):
        self.released += 1

    def __dlpack__(self, **options):
        if options and not self.versioned:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return new_capsule(c.addressof(self.managed), self.name, None)

    def __dlpack_device__(self):
        return self.managed.tensor.device_type, self.managed.tensor.device_id


def on_cuda(array):
    return Shim(np.ascontiguousarray(array), device=(2, 0))
