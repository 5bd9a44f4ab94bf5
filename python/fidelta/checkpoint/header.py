"""One safetensors file: 8 bytes of header length, the JSON header, the data. Read by hand, nothing in it is trusted.

A header entry is "name": {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]}, offsets counted from the first
byte after the header; the tensors cover the data without gap or overlap.
"""

import json
import math
import os
import struct
from typing import NamedTuple

import ml_dtypes
import numpy as np

LFS = b"version https://git-lfs.github.com/spec/"  # what a pointer begins with
HEADER_LIMIT = 100_000_000  # bytes; the limit of the safetensors library

# name -> (bits of an element, NumPy dtype); types that do not fill bytes are read as their bytes
DTYPES = {
    "BOOL": (8, np.bool_), "U8": (8, np.uint8), "I8": (8, np.int8), "U16": (16, np.uint16), "I16": (16, np.int16),
    "U32": (32, np.uint32), "I32": (32, np.int32), "U64": (64, np.uint64), "I64": (64, np.int64),
    "F16": (16, np.float16), "BF16": (16, ml_dtypes.bfloat16), "F32": (32, np.float32), "F64": (64, np.float64),
    "C64": (64, np.complex64),
    "F8_E4M3": (8, ml_dtypes.float8_e4m3fn), "F8_E5M2": (8, ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": (8, ml_dtypes.float8_e4m3fnuz), "F8_E5M2FNUZ": (8, ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": (8, ml_dtypes.float8_e8m0fnu),
    "F6_E2M3": (6, None), "F6_E3M2": (6, None), "F4": (4, None),
}


class Problem(NamedTuple):
    """Something broken: `code` is one of file-truncated, file-header, file-pointer, file-offsets, shard-missing, index-mismatch,
    tensor-duplicate, dtype-unknown; `where` a file or a tensor; `text` one line for people."""

    code: str
    where: str
    text: str


class TensorInfo(NamedTuple):
    """Where a tensor lies: its bytes are begin .. end of the file, counted from the start of the file."""

    name: str
    file: str
    dtype: str
    shape: tuple
    begin: int
    end: int


class Header(NamedTuple):
    """What a file holds: the tensors that can be read, those that cannot, and why. `known` is False when there is no
    telling what it holds."""

    tensors: list
    unreadable: list
    problems: list
    known: bool = True


def read_header(path):
    """Read and check the header of one safetensors file. Raises nothing for what the file holds."""
    found = Header([], [], [])
    file = os.path.basename(path)
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as stream:
            text, start = _header_text(stream, size)
        entries = _parse(text, file, found.problems)
    except _Broken as broken:
        found.problems.append(Problem(broken.code, file, str(broken)))
        return found._replace(known=False)
    except OSError as error:
        found.problems.append(Problem("file-header", file, f"cannot be read: {error.strerror}"))
        return found._replace(known=False)
    tensors = [info for name, entry in entries if (info := _entry(name, entry, file, start, found.problems))]
    _check_layout(tensors, file, start, size, found)
    return found


class _Broken(Exception):
    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


def _header_text(stream, size):
    """The bytes of the header, and where the data starts."""
    if size < 8:
        raise _Broken("file-truncated", f"has {size} bytes; a header needs at least 8")
    first = stream.read(8)
    if first == LFS[:8] and stream.read(len(LFS) - 8) == LFS[8:]:
        raise _Broken("file-pointer", f"is a git-lfs pointer of {size} bytes; the file itself was not fetched")
    (length,) = struct.unpack("<Q", first)
    if length > HEADER_LIMIT:
        raise _Broken("file-header", f"header length is {length}; at most {HEADER_LIMIT} is allowed")
    if length > size - 8:
        raise _Broken("file-truncated", f"has {size} bytes; its header alone needs {length + 8}")
    return stream.read(length), 8 + length


def _parse(text, file, problems):
    """[(name, entry)] of the header; a name that comes twice is reported and its first entry kept."""
    def pairs(items):
        made = {}
        for key, value in items:
            if key in made and isinstance(value, dict):
                problems.append(Problem("tensor-duplicate", key, f"twice in the header of {file}"))
            made.setdefault(key, value)
        return made

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        raise _Broken("file-header", "header is not JSON") from None
    if not isinstance(header, dict):
        raise _Broken("file-header", "header is not a JSON object")
    return [(name, entry) for name, entry in header.items() if name != "__metadata__"]


def _count(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(name, entry, file, start, problems):
    """The TensorInfo of a header entry; None, with a problem, when the entry makes no sense."""
    def bad(text):
        problems.append(Problem("file-header", name, f"{text} (in {file})"))

    if not isinstance(entry, dict):
        return bad("header entry is not an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str):
        return bad("header entry has no dtype")
    if not isinstance(shape, list) or not all(map(_count, shape)):
        return bad("header entry has no shape of whole numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_count, offsets)):
        return bad("header entry has no pair of data_offsets")
    return TensorInfo(name, file, dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _check_layout(tensors, file, start, size, found):
    """Sort the tensors into readable and not, and report gaps, overlaps, wrong sizes and a short file."""
    position, beyond = start, []
    for info in sorted(tensors, key=lambda info: (info.begin, info.end)):
        readable = _check_size(info, found.problems)
        if info.begin != position:
            what = "overlaps the tensor before it by" if info.begin < position else "comes after a gap of"
            text = f"{what} {abs(info.begin - position)} bytes (in {file})"
            found.problems.append(Problem("file-offsets", info.name, text))
        position = max(position, info.end)
        if info.end > size:
            beyond.append(info.name)
            readable = False
        (found.tensors if readable else found.unreadable).append(info)
    if beyond:
        text = f"has {size} bytes; its tensors need {position}, so {len(beyond)} are cut off: {beyond[0]}"
        found.problems.append(Problem("file-truncated", file, text + (", ..." if len(beyond) > 1 else "")))
    elif position < size:
        found.problems.append(Problem("file-offsets", file, f"has {size - position} bytes that belong to no tensor"))


def _check_size(info, problems):
    """Whether the bytes of a tensor are what its dtype and shape need."""
    if info.dtype not in DTYPES:
        problems.append(Problem("dtype-unknown", info.name, f"dtype is {info.dtype!r} (in {info.file})"))
        return False
    need = math.prod(info.shape) * DTYPES[info.dtype][0]
    if need != 8 * (info.end - info.begin):
        text = f"has {info.end - info.begin} bytes; {info.dtype} {list(info.shape)} needs {-(-need // 8)} (in {info.file})"
        problems.append(Problem("file-offsets", info.name, text))
        return False
    return True
