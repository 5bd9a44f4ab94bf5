"""What is generated is fresh, the rooms keep to their include rules, and what the README says runs."""

import re
import subprocess
import sys

import pytest

import fidelta
from fidelta import _core

PYTHON_ONLY = "csrc/python"
KERNELS_MAY_SEE = {"args.h", "formats.h", "tensor.h", "status.h", "registry.h", "spec.h", "dtypes.def", "status.def"}


@pytest.fixture(scope="module")
def root(request):
    root = request.config.rootpath
    if not (root / "csrc").is_dir():
        pytest.skip("needs the source tree")
    return root


def sources(root, folder):
    return [f for f in (root / folder).rglob("*") if f.suffix in (".c", ".h", ".inc", ".def", ".cu")]


def includes(path):
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), re.M)


def test_generated_files_are_fresh(root):
    run = subprocess.run([sys.executable, "-m", "fidelta.formats", "--check"], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr + "\nrun: make docs"


def test_python_stays_in_its_room(root):
    for folder in ("csrc", "kernels"):
        for path in sources(root, folder):
            if PYTHON_ONLY in path.as_posix():
                continue
            for name in includes(path):
                assert not name.startswith(("Python", "numpy/")), f"{path.relative_to(root)} includes {name}"


def test_kernels_see_the_contract_and_nothing_else_of_csrc(root):
    ours = {f.name for f in sources(root, "csrc")}
    for path in sources(root, "kernels"):
        for name in includes(path):
            short = name.rsplit("/", 1)[-1]
            beside = any((path.parent / n).exists() for n in (name, short))
            assert beside or short not in ours or short in KERNELS_MAY_SEE, f"{path.relative_to(root)} includes {name}"


def test_no_symbol_leaves_but_the_module(root):
    try:
        run = subprocess.run(["nm", "-D", "--defined-only", _core.__file__], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs nm (binutils)")
    names = [line.split()[-1] for line in run.stdout.splitlines() if line.strip()]
    names = [name for name in names if not name.startswith(("__asan", "__ubsan", "_init", "_fini"))]
    assert names == ["PyInit__core"]


def code_blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)


def test_the_readme_example_runs(root):
    blocks = code_blocks(root / "README.md")
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_the_readme_names_files_that_exist(root):
    for document in ("README.md", "csrc/README.md"):
        path = root / document
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{document} points at {target}"


def test_every_public_op_has_a_docstring_and_a_reference():
    for op in _core.formats() if isinstance(_core.formats(), dict) else [row["name"] for row in _core.formats()]:
        assert getattr(fidelta, op).__doc__
        assert callable(getattr(fidelta.reference, op))
