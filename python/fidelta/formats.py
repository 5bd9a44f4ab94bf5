"""Prints docs/formats.md and _core.pyi from the rows of csrc/formats.h, as _core.formats() gives them.

``python -m fidelta.formats`` prints the page, ``--stubs`` the stubs, ``--write`` puts both in their places in a
checkout, ``--check`` exits with 1 when what stands there is stale.
"""

import sys
from pathlib import Path

from fidelta import _core

ROLES = {
    "IN": "in",
    "OPT": "in, optional",
    "OUT": "out",
    "OUT_OPT": "out, optional",
    "INOUT": "in and out",
}
LAYOUTS = {"ROWS": "last axis has stride 1", "DENSE": "C-contiguous", "ANY": "any strides"}
TYPES = {"NUM": "float", "INT": "int", "FLAG": "bool"}

INTRO = """# Formats

What each op of `fidelta._core` takes. This page is made from the rows of `csrc/formats.h` by
`python -m fidelta.formats --write`; change the rows, not the page. The public functions of `fidelta` add
defaults and allocate outputs; everything below holds for them too.

A shape lists extents, outermost first. A letter is a dim, fixed by the first argument that has it; `N+1` is one
more than N; `*` stands for any leading axes, the same in every argument that has it; an extent with `?` may be left
out and is then 1. Negative strides are refused everywhere, and outputs may overlap nothing unless a line says so.
The rows about values are read only while `check_values` is on, and only from host memory.
"""


def rows_of(op, *kinds):
    """The rows of an op that are of these kinds, in file order."""
    return [row for row in _core.formats()[op]["rows"] if row["kind"] in kinds]


def parameters(op):
    """Names of an op's parameters, in the order of a positional call."""
    args = [row["name"] for row in rows_of(op, "ARG")]
    return args + [row["name"] for row in rows_of(op, "NUM", "INT", "FLAG", "CHOICE")] + ["num_threads", "variant"]


def choice(when):
    """`state_layout=vk` as Python writes it."""
    name, value = when.split("=")
    return f'`{name}="{value}"`'


def number(value):
    return "-inf" if value == float("-inf") else f"{value:g}"


def dtype_words(dtypes):
    words = [f"that of `{word[1:]}`" if word[0] == "=" else word for word in dtypes.split()]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


SLOT_USES = {
    "READ": "",
    "WRITE": "; no slot written twice, and none that another sequence reads from the same memory",
    "BOTH": "; read, and the first column written to when no slots to write are given",
}


def rule_words(row):
    """One row that is neither DIM, ARG nor scalar, as a sentence."""
    kind, arg = row["kind"], f"`{row.get('arg')}`"
    if kind in ("RULE", "RULE_IF"):
        left, op, right = row["rule"].split()
        words = f"{left} is a multiple of {right}" if op == "%" else f"{left} {op} {right}"
        return words if kind == "RULE" else f"with {arg}: {words}"
    return {
        "ALIAS": lambda: f"{arg} is `{row['name']}` in the public function and in messages",
        "ALT": lambda: f"{arg} is ({row['shape']}) with {choice(row['when'])}; nothing is copied",
        "ABSENT": lambda: f"without {arg}: {row['dim']} = {row['extent']}",
        "GIVEN_IF": lambda: f"{arg} is given with {choice(row['when'])}, and only then",
        "NEEDS": lambda: f"{arg} is given only together with `{row['other']}`",
        "EXCLUDES": lambda: f"{arg} is not given together with `{row['other']}`",
        "SHARE": lambda: f"`{row['out']}` may be the very same memory as {arg}",
        "SPANS": lambda: f"{arg}: pairs with 0 <= first <= end <= {row['dim']}",
        "OFFSETS": lambda: f"{arg}: starts at 0, never falls, ends at {row['dim']}",
        "POSITIONS": lambda: f"{arg}: pairs of a sequence, 0 .. {row['dim']}-1, and 0 .. as many tokens as it has",
        "LONGEST": lambda: f"no sequence has more than {row['extent']} tokens",
        "LONGEST_IF": lambda: f"with {arg} of {row['dim']} > 1: no sequence has more than {row['dim']} tokens",
        "NUM_RANGE": lambda: f"`{row['name']}`: {number(row['low'])} .. {number(row['high'])}",
        "SLOTS": lambda: f"{arg}: 0 .. {row['dim']}-1, or `{row['pad']}`{SLOT_USES[row['use']]}",
        "INDEX": lambda: f"{arg}: at least {number(row['low'])}" + (f", below {row['extent']}" if row["extent"] else ""),
        "RANGE_IF": lambda: f"{arg}: {number(row['low'])} .. {number(row['high'])} with {choice(row['when'])}",
    }[kind]()


def table(head, lines):
    cells = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in cells)


def scalar_line(row):
    if row["kind"] == "CHOICE":
        values = row["values"].split("|")
        return f"`{row['name']}`", " or ".join(f'"{v}"' for v in values), f'"{values[0]}"', row["doc"]
    return f"`{row['name']}`", TYPES[row["kind"]], row["default"], row["doc"]


def op_section(op, doc):
    args = [
        (f"`{r['name']}`", ROLES[r["role"]], f"({r['shape']})", dtype_words(r["dtypes"]), LAYOUTS[r["layout"]], r["doc"])
        for r in rows_of(op, "ARG")
    ]
    scalars = [scalar_line(row) for row in rows_of(op, "NUM", "INT", "FLAG", "CHOICE")]
    plain = ("DIM", "ARG", "HINT", "NUM", "INT", "FLAG", "CHOICE")
    rules = [rule_words(row) for row in _core.formats()[op]["rows"] if row["kind"] not in plain]
    dims = ", ".join(f"{row['name']} {row['doc']}" for row in rows_of(op, "DIM"))
    text = f"\n## {op}\n\n{doc}\n\nDims: {dims}.\n\n"
    text += table(("argument", "role", "shape", "dtype", "layout", "what"), args)
    if scalars:
        text += "\n" + table(("argument", "type", "default", "what"), scalars)
    if rules:
        text += "\n" + "".join(f"- {words}\n" for words in rules)
    return text


def page():
    """docs/formats.md."""
    formats = _core.formats()
    return INTRO + "".join(op_section(op, formats[op]["doc"]) for op in formats)


def stub_parameters(op):
    for row in rows_of(op, "ARG"):
        kind = "Tensor | None = None" if row["role"] in ("OPT", "OUT_OPT") else "Tensor"
        # Required, though optional arguments may come before it; `= ...` is how a stub can say so.
        yield f"{row['name']}: {kind}" + (" = ..." if row["role"] in ("OUT", "INOUT") else "")
    for row in rows_of(op, "NUM", "INT", "FLAG", "CHOICE"):
        words = row["values"].split("|") if row["kind"] == "CHOICE" else []
        kind = f"Literal[{', '.join(repr(w) for w in words)}]" if words else TYPES[row["kind"]]
        yield f"{row['name']}: {kind} | None = None".replace("'", '"')
    yield "num_threads: int | None = None"
    yield "variant: str | None = None"


STUBS = '''"""Made from csrc/formats.h by `python -m fidelta.formats --write`. Arguments: docs/formats.md."""

from typing import Any, Literal

Tensor = Any

class ShapeError(ValueError): ...
class LayoutError(ValueError): ...
class DTypeError(ValueError): ...
class DeviceError(ValueError): ...

def which_path(op: str, /, *args: Any, **kwargs: Any) -> str: ...
def set_num_threads(n: int, /) -> None: ...
def get_num_threads() -> int: ...
def formats() -> dict[str, dict[str, Any]]: ...
def kernels() -> dict[str, list[tuple[str, bool]]]: ...
'''


def stubs():
    """_core.pyi."""
    text = STUBS
    for op in _core.formats():
        text += f"def {op}(\n" + "".join(f"    {p},\n" for p in stub_parameters(op)) + ") -> None: ...\n"
    return text


def files():
    """What --write writes: path -> text."""
    root = Path(__file__).resolve().parents[2]
    return {root / "docs" / "formats.md": page(), root / "python" / "fidelta" / "_core.pyi": stubs()}


def main(argv):
    if argv == ["--write"]:
        for path, text in files().items():
            path.write_text(text)
    elif argv == ["--check"]:
        stale = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
        for path in stale:
            print(f"{path.name} is stale: run python -m fidelta.formats --write", file=sys.stderr)
        return 1 if stale else 0
    elif argv in ([], ["--stubs"]):
        print(stubs() if argv else page(), end="")
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
