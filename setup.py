"""Builds fidelta._core. Everything else stands in pyproject.toml.

FIDELTA_WERROR=1 makes warnings errors; FIDELTA_SANITIZE=1 builds with AddressSanitizer and UBSan.
"""

import os
from glob import glob

import numpy
from setuptools import Extension, setup

flags = ["-O3", "-std=c11", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"]
# Quoted includes only: a plain -I would put kernels/cpu/threads.h before the C library's.
flags += ["-iquote", "csrc", "-iquote", "kernels/cpu"]
link = []
if os.environ.get("FIDELTA_WERROR") == "1":
    flags += ["-Werror"]
if os.environ.get("FIDELTA_SANITIZE") == "1":
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-O1", "-g"]
    link += ["-fsanitize=address,undefined"]

sources = [path for room in ("csrc", "csrc/python", "kernels/cpu") for path in sorted(glob(room + "/*.c"))]
depends = [path for room in ("csrc", "csrc/python", "kernels/cpu") for end in ("h", "inc", "def")
           for path in sorted(glob(f"{room}/*.{end}"))]

core = Extension(
    "fidelta._core",
    sources=sources,
    depends=depends,
    include_dirs=[numpy.get_include()],
    libraries=["m", "pthread"],
    extra_compile_args=flags,
    extra_link_args=link,
)

setup(ext_modules=[core])
