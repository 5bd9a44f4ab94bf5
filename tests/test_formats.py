"""Every row of every op, broken once: the exact exception and text. All of it is made from the rows, so an op added
to csrc/formats.h is tested from its first day."""

import re

import numpy as np
import pytest

import fidelta.formats
from dlpack_shim import on_cuda
from fidelta import _core

FORMATS = _core.formats()
OPS = list(FORMATS)
SIZES = {"B": 2, "T": 3, "H": 2, "HV": 4, "K": 6, "V": 5, "D": 7, "L": 5, "P": 2, "R": 2, "W": 4, "N": 2, "S": 20, "SW": 20}
STARS = (3, 2)


def rows(op, *kinds):
    return [row for row in FORMATS[op]["rows"] if row["kind"] in kinds]


def each(*kinds, where=lambda op, row: True):
    """Parametrises over every row of these kinds."""
    found = [(op, row) for op in OPS for row in rows(op, *kinds) if where(op, row)]

    def name(value):
        return value if isinstance(value, str) else "-".join(str(v) for k, v in value.items() if k in (
            "name", "arg", "out", "other", "dim", "rule", "shape", "when", "extent", "use"))

    return pytest.mark.parametrize("op, row", found, ids=name)


def arg_row(op, name):
    return next(row for row in rows(op, "ARG") if row["name"] == name)


def said(op, name):
    """What messages call an argument: the public function's name."""
    return next((row["name"] for row in rows(op, "ALIAS") if row["arg"] == name), name)


def names_of(extent):
    return re.findall(r"[A-Za-z_]+", extent)


def closure(op, give):
    """give, and whatever must be given with it; and the choices that allow it."""
    give, choices = set(give), {}
    for row in rows(op, "ARG"):
        if row["role"] not in ("OPT", "OUT_OPT"):
            give.add(row["name"])
    while True:
        size = len(give), len(choices)
        for row in rows(op, "NEEDS"):
            if row["arg"] in give:
                give.add(row["other"])
        for row in rows(op, "GIVEN_IF"):
            name, value = row["when"].split("=")
            if row["arg"] in give:
                choices[name] = value
            elif choices.get(name) == value:
                give.add(row["arg"])
        if (len(give), len(choices)) == size:
            return give, choices


class Example:
    """A valid call of an op, with the optional arguments in `give`; sizes changes dims."""

    def __init__(self, op, give=(), sizes=None, **choices):
        self.op = op
        self.given, needed = closure(op, give)
        self.choices = {**needed, **choices}
        self.dims = {row["name"]: SIZES[row["name"]] for row in rows(op, "DIM")}
        if "cu_seqlens" in self.given:
            self.dims["B"] = 1
        if op == "gated_delta_rule_step" and "write_slots" not in self.given:
            self.dims["W"] = 1
        self.dims.update(sizes or {})
        for row in rows(op, "ABSENT"):
            if row["arg"] not in self.given and row["dim"] not in (sizes or {}):
                self.dims[row["dim"]] = eval(row["extent"], {}, self.dims)
        self.args = {}
        for row in rows(op, "ARG"):
            if row["name"] in self.given:
                self.args[row["name"]] = self.tensor(row)

    def extents(self, row):
        """The extents as they are written for this call, and their text."""
        text = row["shape"]
        for alt in rows(self.op, "ALT"):
            choice, value = alt["when"].split("=")
            if alt["arg"] == row["name"] and self.choices.get(choice) == value:
                text = alt["shape"]
        return text, [extent.rstrip("?") for extent in text.split() if extent != "*"]

    def shape(self, row):
        text, extents = self.extents(row)
        return (STARS if text.startswith("*") else ()) + tuple(eval(extent, {}, self.dims) for extent in extents)

    def tensor(self, row):
        shape, name, d = self.shape(row), row["name"], self.dims
        dtype = np.dtype({"bool": "bool", "int32": "int64"}.get(row["dtypes"].split()[0], "float32"))
        t = np.zeros(shape, dtype)
        if name == "cu_seqlens":
            t[1:] = d["T"]
            t[1:-1] = min(1, d["T"])
        elif name == "token_range":
            t[:, 1] = d["T"]
        elif name == "read_slots":
            t.flat = np.arange(t.size)
        elif name == "write_slots":
            t.flat = np.arange(t.size) + (self.args["read_slots"].size if "read_slots" in self.args else 0)
        elif name == "snapshot_at":
            t[:, 1] = np.arange(len(t)) % 2
        elif dtype == bool:
            t[...] = True
        return t

    def fixed(self, before=None):
        """dim -> the words about it and what fixed it, as known before the argument `before` is looked at."""
        words, source = {}, {}
        for row in rows(self.op, "ARG"):
            if row["name"] == before:
                break
            if row["name"] not in self.given:
                continue
            for extent in self.extents(row)[1]:
                match = re.fullmatch(r"([A-Za-z_]+)([+*-]\d+)?", extent)
                if match and match[1] not in words:
                    source[match[1]] = f" from {said(self.op, row['name'])}"
                    words[match[1]] = f"{match[1]} = {self.dims[match[1]]}{source[match[1]]}"
            for absent in rows(self.op, "ABSENT"):
                known = all(name in words for name in names_of(absent["extent"]))
                if absent["arg"] not in self.given and absent["dim"] not in words and known:
                    dim, root = absent["dim"], names_of(absent["extent"])
                    source[dim] = source[root[0]] if root else ""
                    words[dim] = f"{dim} = {self.dims[dim]}{source[dim]} without {absent['arg']}"
        return words

    def with_words(self, extent, before=None):
        fixed = self.fixed(before)
        return " with " + ", ".join(fixed[name] for name in names_of(extent) if name in fixed)

    def run(self, **changes):
        return getattr(_core, self.op)(**{**self.args, **self.choices, **changes})

    def refused(self, exception, text, **changes):
        with pytest.raises(exception) as info:
            self.run(**changes)
        assert type(info.value) is exception
        assert str(info.value) == f"{self.op}: {text}"


def tuple_text(values):
    return str(tuple(int(v) for v in values))


@pytest.mark.parametrize("op", OPS)
def test_examples_are_valid(op):
    Example(op).run()
    for row in rows(op, "ARG"):
        Example(op, [row["name"]]).run()
    for row in rows(op, "ALT"):
        choice, value = row["when"].split("=")
        Example(op, [row["arg"]], **{choice: value}).run()


# What the rows of an argument say -------------------------------------------------------------------------------------


@each("ARG")
def test_dtype(op, row):
    e = Example(op, [row["name"]])
    came = {"float32": "float64", "int32": "uint8", "bool": "int8"}.get(row["dtypes"].split()[0], "float64")
    words = [word for word in row["dtypes"].split() if word[0] != "="]
    for word in row["dtypes"].split():
        if word[0] == "=":
            words = [w for w in words if w != "float32"] + [f"float32 from {word[1:]}"]
    expected = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    e.refused(_core.DTypeError, f"{said(op, row['name'])} has dtype {came}; expected {expected}",
              **{row["name"]: np.zeros(e.shape(row), came)})


@each("ARG")
def test_dtype_that_no_row_knows(op, row):
    e = Example(op, [row["name"]])
    with pytest.raises(_core.DTypeError, match=f"{op}: {said(op, row['name'])} has dtype complex64; expected "):
        e.run(**{row["name"]: np.zeros(e.shape(row), "complex64")})


@each("ARG")
def test_rank(op, row):
    e = Example(op, [row["name"]])
    text = row["shape"]
    shape = () if text[0] == "*" else (1, *e.shape(row))
    e.refused(_core.ShapeError, f"{said(op, row['name'])} has shape {tuple_text(shape)}; expected ({text})",
              **{row["name"]: np.zeros(shape, e.args[row["name"]].dtype)})


def extent_cases():
    for op in OPS:
        for row in rows(op, "ARG"):
            alts = [alt["when"] for alt in rows(op, "ALT") if alt["arg"] == row["name"]]
            for when in ["", *alts]:
                for i, extent in enumerate(row["shape"].replace("* ", "").split()):
                    yield pytest.param(op, row, when, i, id=f"{op}-{row['name']}-{when}-{extent}")


@pytest.mark.parametrize("op, row, when, axis", list(extent_cases()))
def test_extent(op, row, when, axis):
    """One more than it should be, wherever an earlier argument has fixed what it should be."""
    e = Example(op, [row["name"]], **(dict([when.split("=")]) if when else {}))
    name = row["name"]
    text, extents = e.extents(row)
    if not names_of(extents[axis]):
        words = ""
    elif all(n in e.fixed(name) for n in names_of(extents[axis])):
        words = e.with_words(extents[axis], name)
    else:
        return  # this argument is the one that fixes it
    shape = list(e.args[name].shape)
    shape[axis - len(extents)] += 1
    hints = [h["text"] for h in rows(op, "HINT") if h["arg"] == name]
    with pytest.raises(_core.ShapeError) as info:
        e.run(**{name: np.zeros(shape, e.args[name].dtype)})
    message = f"{op}: {said(op, name)} has shape {tuple_text(shape)}; expected ({text}){words}"
    assert str(info.value) in [message] + [f"{message}; {hint}" for hint in hints]


@each("ARG", where=lambda op, row: row["shape"][0] == "*")
def test_leading_axes(op, row):
    e = Example(op)
    first = next(r["name"] for r in rows(op, "ARG") if r["shape"][0] == "*")
    if row["name"] == first:
        return
    shape = (STARS[0] + 1, *e.args[row["name"]].shape[1:])
    e.refused(_core.ShapeError, f"{said(op, row['name'])} has shape {tuple_text(shape)}; expected ({row['shape']}) with * = "
              f"{tuple_text(STARS)} from {first}", **{row["name"]: np.zeros(shape, "float32")})


@each("ARG", where=lambda op, row: row["layout"] == "ROWS")
def test_last_axis_strided(op, row):
    e = Example(op, [row["name"]])
    shape = e.shape(row)
    t = np.zeros((*shape[:-1], 2 * shape[-1]), "float32")[..., ::2]
    strides = tuple_text(s // 4 for s in t.strides)
    e.refused(_core.LayoutError, f"{said(op, row['name'])} has strides {strides} for shape {tuple_text(shape)}; "
              "expected stride 1 in the last axis", **{row["name"]: t})


@each("ARG")
def test_negative_stride(op, row):
    e = Example(op, [row["name"]])
    t = np.ascontiguousarray(e.args[row["name"]][::-1])[::-1]
    strides = tuple_text(s // t.itemsize for s in t.strides)
    e.refused(_core.LayoutError, f"{said(op, row['name'])} has strides {strides} for shape {tuple_text(t.shape)}; "
              "expected no negative stride", **{row["name"]: t})


@each("ARG")
def test_stride_zero(op, row):
    """Legal in an input, never in an output."""
    e = Example(op, [row["name"]])
    t = e.args[row["name"]]
    flat = np.lib.stride_tricks.as_strided(t, t.shape, (0, *t.strides[1:]))
    if row["role"] in ("IN", "OPT"):
        if t.dtype.kind == "f":
            e.run(**{row["name"]: flat})
        return
    strides = tuple_text(s // t.itemsize for s in flat.strides)
    e.refused(_core.LayoutError, f"{said(op, row['name'])} has strides {strides} for shape {tuple_text(t.shape)}; "
              "expected no stride 0 in an output", **{row["name"]: flat})


@each("ARG", where=lambda op, row: "OUT" in row["role"])
def test_output_that_overlaps_itself(op, row):
    e = Example(op, [row["name"]])
    t = np.zeros(1000, "float32")
    shape = e.shape(row)
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    strides[0] -= 1
    if len(shape) < 2:
        return
    view = np.lib.stride_tricks.as_strided(t, shape, [4 * s for s in strides])
    e.refused(_core.LayoutError, f"{said(op, row['name'])} has elements that share memory; expected an output without overlap",
              **{row["name"]: view})


@each("ARG", where=lambda op, row: "OUT" in row["role"])
def test_read_only(op, row):
    e = Example(op, [row["name"]])
    t = e.args[row["name"]]
    t.flags.writeable = False
    e.refused(_core.LayoutError, f"{said(op, row['name'])} is read-only; expected writable memory")


@each("ARG", where=lambda op, row: row["role"] in ("IN", "OPT"))
def test_read_only_input(op, row):
    e = Example(op, [row["name"]])
    e.args[row["name"]].flags.writeable = False
    e.run()


@each("ARG")
def test_not_aligned(op, row):
    e = Example(op, [row["name"]])
    t = e.args[row["name"]]
    if t.itemsize == 1:
        return
    view = np.zeros(t.nbytes + 8, "uint8")[1 : t.nbytes + 1].view(t.dtype).reshape(t.shape)
    e.refused(_core.LayoutError, f"{said(op, row['name'])} is not aligned; expected a multiple of its element size {t.itemsize}",
              **{row["name"]: view})


@each("ARG")
def test_device(op, row):
    e = Example(op, [row["name"]])
    first = rows(op, "ARG")[0]["name"]
    if row["name"] == first:
        return
    e.refused(_core.DeviceError, f"{said(op, row['name'])} is on cuda:0; expected cpu from {first}",
              **{row["name"]: on_cuda(e.args[row["name"]])})


@pytest.mark.parametrize("op", OPS)
def test_device_without_a_backend(op):
    e = Example(op)
    e.args = {name: on_cuda(t) for name, t in e.args.items()}
    e.refused(_core.DeviceError, "the tensors are on DLPack device 2:0; expected cpu, the one backend built")


@each("ARG")
def test_missing(op, row):
    e = Example(op, [row["name"]])
    if row["role"] in ("OPT", "OUT_OPT"):
        return
    e.refused(TypeError, f"{said(op, row['name'])} is None; expected a tensor", **{row["name"]: None})
    del e.args[row["name"]]
    e.refused(TypeError, f"missing argument {row['name']}")


@each("ARG")
def test_not_a_tensor(op, row):
    e = Example(op, [row["name"]])
    e.refused(TypeError, f"{said(op, row['name'])} is a list; expected a tensor: a NumPy array, or an object with __dlpack__",
              **{row["name"]: e.args[row["name"]].tolist()})


@each("ALIAS")
def test_alias(op, row):
    """Messages speak of the public function's argument, whose name the row gives."""
    import inspect

    function = inspect.signature(getattr(fidelta, op)).parameters
    assert row["name"] in function
    assert row["name"] not in {r["name"] for r in rows(op, "ARG")}
    arg_row(op, row["arg"])
    hidden = {r["name"] for r in rows(op, "ARG")} - set(function)
    aliases = {r["arg"] for r in rows(op, "ALIAS")}
    assert hidden <= aliases


def test_public_calls_speak_of_their_own_arguments():
    x, w = np.zeros((1, 3, 2, 4), "f"), np.zeros((2, 4), "f")
    g = x[..., 0]
    wrong, many = np.zeros((5, 5), "f"), np.array([[0, 9]])
    for name, call in (("out", lambda: fidelta.l2norm(x, out=wrong)), ("out", lambda: fidelta.linear(x, w, out=wrong)),
                       ("g_out", lambda: fidelta.gdn_gate(w, w, w[0], w[0], g_out=wrong)),
                       ("beta_out", lambda: fidelta.gdn_gate(w, w, w[0], w[0], beta_out=wrong)),
                       ("out", lambda: fidelta.gated_delta_rule(x, x, x, g, g, out=wrong)),
                       ("snapshot_positions", lambda: fidelta.gated_delta_rule(x, x, x, g, g, snapshot_positions=many)),
                       ("snapshot_positions", lambda: fidelta.gated_delta_rule(x, x, x, g, g, snapshot_positions=many,
                                                                               check_values=False))):
        with pytest.raises(ValueError, match=rf"^\w+: {name}(\[0\]|\[0, 1\])? (has|is) "):
            call()


# Rows about shapes together -------------------------------------------------------------------------------------------


@each("HINT")
def test_hint(op, row):
    e = Example(op, [row["arg"]])
    shape = tuple(eval(extent, {}, e.dims) for extent in row["shape"].split())
    expected = arg_row(op, row["arg"])
    if all(name not in e.fixed(row["arg"]) for name in names_of(row["shape"])):
        return  # the first argument fixes its own dims, so only a wrong rank could bring the hint up
    with pytest.raises(_core.ShapeError) as info:
        e.run(**{row["arg"]: np.zeros(shape, "float32")})
    text = str(info.value)
    assert text.startswith(f"{op}: {row['arg']} has shape {tuple_text(shape)}; expected ({expected['shape']})")
    assert text.endswith(f"; {row['text']}")


@each("RULE", "RULE_IF")
def test_rule(op, row):
    left, sign, right = row["rule"].split()
    give = [row["arg"]] if "arg" in row else []
    holds = {"<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b, "==": lambda a, b: a == b,
             "%": lambda a, b: b > 0 and a % b == 0}[sign]
    e = Example(op, give)
    near = range(299, -1, -1) if sign == ">=" else range(300)
    bad = next(n for n in near if not holds(n, eval(right, {}, e.dims)) and (n > 0 or right == "1"))
    e = Example(op, give, sizes={left: bad})
    source = e.fixed()[left].split(" from ")[1]
    words = f"a multiple of {right}" if sign == "%" else f"{left} {sign} {right}"
    text = f"{source} has {left} = {bad}; expected {words}" + (e.with_words(right) if names_of(right) else "")
    if "arg" in row and source != row["arg"]:
        text += f", since {said(op, row['arg'])} is given"
    e.refused(_core.ShapeError, text)


@each("ABSENT")
def test_absent(op, row):
    """Every dim that an argument left out decides is what the row says."""
    if row["dim"] not in {name for r in rows(op, "ARG") for name in names_of(r["shape"])}:
        return
    users = [r["name"] for r in rows(op, "ARG") if row["dim"] in names_of(r["shape"]) and r["name"] != row["arg"]]
    for user in users:
        e = Example(op, [user])
        if row["arg"] in e.given:
            continue
        axis = [names_of(x) for x in e.extents(arg_row(op, user))[1]].index([row["dim"]])
        shape = list(e.args[user].shape)
        shape[axis] += 1
        with pytest.raises(_core.ShapeError, match=f"{row['dim']} = .* without {row['arg']}"):
            e.run(**{user: np.zeros(shape, e.args[user].dtype)})


# Rows about what goes with what ---------------------------------------------------------------------------------------


@each("GIVEN_IF")
def test_given_if(op, row):
    choice, value = row["when"].split("=")
    e = Example(op, [row["arg"]])
    other = next(r for r in rows(op, "CHOICE") if r["name"] == choice)["values"].split("|")[0]
    e.refused(ValueError, f"{row['arg']} is None; expected a tensor with {choice}=\"{value}\"", **{row["arg"]: None})
    for name in [r["arg"] for r in rows(op, "GIVEN_IF") if r["arg"] != row["arg"]]:
        e.args[name] = None
    e.refused(ValueError, f"{row['arg']} is given with {choice}=\"{other}\"; expected None unless {choice}=\"{value}\"",
              **{choice: other})


@each("NEEDS")
def test_needs(op, row):
    e = Example(op, [row["arg"]])
    others = [r["arg"] for r in rows(op, "NEEDS") if r["other"] == row["other"] and r["arg"] != row["arg"]]
    changes = {name: None for name in others if name != row["other"]}
    if arg_row(op, row["other"])["role"] not in ("OPT", "OUT_OPT"):
        return
    e.refused(ValueError, f"{said(op, row['other'])} is None; expected a tensor, since {said(op, row['arg'])} is given",
              **changes, **{row["other"]: None})


@each("EXCLUDES")
def test_excludes(op, row):
    e = Example(op, [row["arg"], row["other"]])
    e.refused(ValueError, f"{row['arg']} is given; expected None, since {said(op, row['other'])} is given")


# Rows about values ----------------------------------------------------------------------------------------------------


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


def checked(e, text, **changes):
    """Refused with the text, and let through with check_values=False (nothing runs: T is 0 in no test of these)."""
    e.refused(ValueError, text, **changes)


@each("OFFSETS")
def test_offsets(op, row):
    e, a = Example(op, [row["arg"]]), row["arg"]
    cu, last = e.args[a], e.dims[row["dim"]]
    checked(e, f"{a}[0] is 1; expected 0", **{a: changed(cu, 0, 1)})
    checked(e, f"{a}[1] is -1; expected at least 0, the value before it", **{a: changed(cu, 1, -1)})
    checked(e, f"{a}[2] is 0; expected at least 1, the value before it", **{a: changed(cu, 2, 0)})
    for wrong in (last + 1, last - 1, 2**40):
        checked(e, f"{a}[2] is {wrong}; expected {row['dim']}{e.with_words(row['dim'])}", **{a: changed(cu, 2, wrong)})


@each("SPANS")
def test_spans(op, row):
    e, a = Example(op, [row["arg"]]), row["arg"]
    for pair in ((-1, 2), (2, 1), (0, e.dims["T"] + 1)):
        checked(e, f"{a}[1] is {pair}; expected 0 <= first <= end <= {row['dim']}{e.with_words(row['dim'])}",
                **{a: changed(e.args[a], 1, pair)})


@each("SLOTS")
def test_slots(op, row):
    e, a = Example(op, [row["arg"]]), row["arg"]
    index = (1,) + (0,) * (e.args[a].ndim - 1)
    place = ", ".join(str(i) for i in (index if e.args[a].shape[-1] > 1 else index[:1]))
    for wrong in (-2, e.dims[row["dim"]]):
        checked(e, f"{a}[{place}] is {wrong}; expected 0 .. {row['dim']}-1{e.with_words(row['dim'])}, "
                f"or {row['pad']} = -1", **{a: changed(e.args[a], index, wrong)})
    e.run(**{a: changed(e.args[a], index, -1)})
    with pytest.raises(ValueError, match=f"or {row['pad']} = -7"):
        e.run(**{a: changed(e.args[a], index, -1), row["pad"]: -7})


@each("SLOTS", where=lambda op, row: row["use"] == "WRITE")
def test_slots_written(op, row):
    e, a = Example(op, [row["arg"], "read_slots"]), row["arg"]
    index = (1,) + (0,) * (e.args[a].ndim - 1)
    place = ", ".join(str(i) for i in index)
    slot = int(e.args[a].flat[0])
    checked(e, f"{a}[{place}] is {slot}; expected a slot written once, but sequence 0 writes it too",
            **{a: changed(e.args[a], index, slot)})
    slot = int(e.args["read_slots"].flat[0])
    pools = {"final_state": e.args["initial_state"]} if "initial_state" in e.args else {}
    checked(e, f"{a}[{place}] is {slot}; expected a slot that no other sequence reads, but sequence 0 reads it",
            **pools, **{a: changed(e.args[a], index, slot)})
    own = int(e.args["read_slots"][1].flat[0])
    e.run(**pools, **{a: changed(e.args[a], index, own)})
    e.run(**pools, **{a: changed(e.args[a], index, -1)})


@each("SLOTS", where=lambda op, row: row["use"] == "BOTH")
def test_slots_read_are_written(op, row):
    e, a = Example(op, [row["arg"]]), row["arg"]
    index = (1,) + (0,) * (e.args[a].ndim - 1)
    place = ", ".join(str(i) for i in (index if e.args[a].shape[-1] > 1 else index[:1]))
    checked(e, f"{a}[{place}] is 0; expected a slot written once, but sequence 0 writes it too",
            **{a: changed(e.args[a], index, 0)})


@pytest.mark.parametrize("op", ["gated_delta_rule", "causal_conv1d"])
def test_slots_of_one_pool_without_write_slots(op):
    """Sequence n then ends in slot n, which in a shared pool no other may start from."""
    e = Example(op, ["read_slots", "final_state"], sizes={"S": 2})
    shared = {"final_state": e.args["initial_state"]}
    e.run(**shared, read_slots=np.array([0, 1]))
    e.run(read_slots=np.array([1, 0]))
    e.refused(ValueError, "read_slots[0] is 1; expected a slot that no other sequence writes, but sequence 1 writes it",
              **shared, read_slots=np.array([1, 0]))
    e.run(**shared, read_slots=np.array([0, -1]))
    e.run(**shared, read_slots=np.array([-1, 0]), pad_slot=-1)


@pytest.mark.parametrize("count", [100, 1000, 5000])
def test_slots_of_many_sequences(count):
    """A duplicate is found wherever it stands, and found in a time that grows with the number of slots only."""
    give = {"sizes": {"B": count, "D": 1, "T": 1, "L": 3, "S": count}}
    e = Example("causal_conv1d_step", ["read_slots"], **give)
    slots = np.random.default_rng(1).permutation(count)
    e.run(read_slots=slots)
    slots[count // 2] = slots[count - 1]
    e.refused(ValueError, f"read_slots[{count - 1}] is {slots[count - 1]}; expected a slot written once, but sequence "
              f"{count // 2} writes it too", read_slots=slots)


@each("INDEX")
def test_index(op, row):
    e, a = Example(op, [row["arg"]]), row["arg"]
    end = eval(row["extent"], {}, e.dims) if row["extent"] else None
    words = "at least 0" if end is None else f"0 .. {end - 1}, below {row['extent']}{e.with_words(row['extent'])}"
    for wrong in (-1, end):
        if wrong is not None:
            checked(e, f"{a}[1] is {wrong}; expected {words}", **{a: changed(e.args[a], 1, wrong)})
    e.run(**{a: changed(e.args[a], 1, 2**63 - 1 if end is None else end - 1)})


@each("POSITIONS")
def test_positions(op, row):
    e, a = Example(op, [row["arg"]]), row["arg"]
    n, tokens = e.dims[row["dim"]], e.dims["T"]
    for wrong in (-1, n):
        checked(e, f"{said(op, a)}[1] is ({wrong}, 1); expected a sequence 0 .. {n - 1} first",
                **{a: changed(e.args[a], 1, (wrong, 1))})
    for wrong in (-1, tokens + 1):
        checked(e, f"{said(op, a)}[1] is (1, {wrong}); expected 0 .. {tokens} tokens of that sequence",
                **{a: changed(e.args[a], 1, (1, wrong))})


@each("LONGEST")
def test_longest(op, row):
    limit = int(row["extent"])
    e = Example(op, sizes={"T": limit + 1})
    checked(e, f"sequence 0 has {limit + 1} tokens; expected at most {limit}")
    e = Example(op, ["cu_seqlens"], sizes={"T": limit + 2})
    checked(e, f"sequence 1 has {limit + 1} tokens; expected at most {limit}")
    e.run(cu_seqlens=np.array([0, 2, limit + 2]))
    e = Example(op, ["token_range"], sizes={"T": limit + 2})
    checked(e, f"sequence 1 has {limit + 1} tokens; expected at most {limit}",
            token_range=np.array([[1, 3], [1, limit + 2]]))


@each("LONGEST_IF")
def test_longest_if(op, row):
    e = Example(op, [row["arg"]], sizes={row["dim"]: 2, "T": 3})
    checked(e, f"sequence 0 has 3 tokens; expected at most {row['dim']}, or {row['dim']} = 1,"
            f"{e.with_words(row['dim'])}")
    Example(op, [row["arg"]], sizes={row["dim"]: 1, "T": 3}).run()


@each("RANGE_IF")
def test_range_if(op, row):
    choice, value = row["when"].split("=")
    e, a = Example(op, [row["arg"]], **{choice: value}), row["arg"]
    low = f"at most {row['high']:g}" if row["low"] == -np.inf else f"{row['low']:g} .. {row['high']:g}"
    for wrong in [row["high"] + 0.5] + ([] if row["low"] == -np.inf else [row["low"] - 0.5]):
        checked(e, f"{a}[1, 2, 3] is {wrong:g}; expected {low} with {choice}=\"{value}\"; {row['text']}",
                **{a: changed(e.args[a], (1, 2, 3), wrong)})
    e.run(**{a: changed(e.args[a], (1, 2, 3), np.nan)})
    e = Example(op, [row["arg"], "token_range"], **{choice: value})
    wrong = changed(e.args[a], (1, 2, 3), row["high"] + 0.5)
    with pytest.raises(ValueError):
        e.run(**{a: wrong})
    e.run(**{a: wrong, "token_range": np.array([[0, 3], [0, 2]])})  # a skipped token's value means nothing


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_range_of_narrow_gates(dtype):
    import ml_dtypes

    e = Example("gated_delta_rule")
    narrow = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    e.args = {name: t.astype(narrow) for name, t in e.args.items()}
    for value in (2.0**-24, 2.0**-14, 0.5, 65504.0, np.inf):
        got = np.array(value, "float32").astype(narrow)
        if got == 0:
            continue
        with pytest.raises(ValueError) as info:
            e.run(g=changed(e.args["g"], (0, 1, 2), got))
        assert f"g[0, 1, 2] is {float(got):g}; expected at most 0" in str(info.value)
    for value in (-np.inf, -65504.0, -(2.0**-24), 0.0, np.nan):
        e.run(g=changed(e.args["g"], (0, 1, 2), value))


@pytest.mark.parametrize("op", [op for op in OPS if any(r["name"] == "check_values" for r in rows(op, "FLAG"))])
def test_check_values_off(op):
    """With empty sequences nothing reads the values, so a wrong one is harmless and shows that it was not looked at."""
    e = Example(op, ["cu_seqlens"], sizes={"T": 0, "N": 0})
    wrong = np.array([5])
    with pytest.raises(ValueError, match=r"cu_seqlens\[0\] is 5"):
        e.run(cu_seqlens=wrong)
    e.run(cu_seqlens=wrong, check_values=False)


# Memory ---------------------------------------------------------------------------------------------------------------


def pair_cases():
    for op in OPS:
        for out in rows(op, "ARG"):
            for arg in rows(op, "ARG"):
                if "OUT" in out["role"] and arg is not out:
                    yield pytest.param(op, out["name"], arg["name"], id=f"{op}-{out['name']}-{arg['name']}")


def over(buffer, like, offset=0):
    """An array like that one over the buffer's bytes."""
    return np.ndarray(like.shape, like.dtype, buffer, offset)


@pytest.mark.parametrize("op, out, arg", list(pair_cases()))
def test_overlap(op, out, arg):
    order = [r["name"] for r in rows(op, "ARG")]
    outputs = [r["name"] for r in rows(op, "ARG") if "OUT" in r["role"]]
    if arg in outputs and order.index(arg) < order.index(out):
        return  # tested the other way round
    e = Example(op, [out, arg])
    if any(r["arg"] == out and r["other"] == arg or r["arg"] == arg and r["other"] == out for r in rows(op, "EXCLUDES")):
        return
    buffer = np.zeros(100000, "uint8")
    share = any(r["out"] == out and r["arg"] == arg for r in rows(op, "SHARE"))
    words = ", or the very same tensor" if share else ""
    offset = 8 if share else 0
    e.refused(_core.LayoutError, f"{said(op, out)} overlaps {said(op, arg)}; expected memory of its own{words}",
              **{out: over(buffer, e.args[out], offset), arg: over(buffer, e.args[arg])})
    if share:
        e.run(**{out: e.args[arg]})


def test_interleaved_views_are_apart():
    """Slices of one buffer that never touch: beside each other in a row, in turn, and in pages."""
    buffer = np.zeros((4, 6, 32), "float32")
    _core.l2norm(buffer[..., :16], buffer[..., 16:])
    _core.l2norm(buffer[:, ::2], buffer[:, 1::2])
    _core.l2norm(buffer[::2], buffer[1::2])
    _core.l2norm(buffer[:2], buffer[2:])
    _core.l2norm(buffer[:, :3, 4:20], buffer[:, 3:, 4:20])
    _core.gdn_gate(*(buffer[..., i::8] for i in range(2)), np.zeros(4, "f"), np.zeros(4, "f"), buffer[..., 2::8],
                   buffer[..., 3::8])
    for a, b in ((np.s_[..., :16], np.s_[..., 15:31]), (np.s_[:, :3], np.s_[:, 2:5]), (np.s_[:2], np.s_[1:3])):
        with pytest.raises(_core.LayoutError, match="out overlaps x"):
            _core.l2norm(buffer[a], buffer[b])
    pages = np.zeros((5, 100), "float32")  # conv history and state side by side in one page, as serving pools have it
    x, y = np.zeros((2, 1, 4), "float32"), np.zeros((2, 1, 4), "float32")
    conv = pages[:, :12].reshape(5, 4, 3)
    assert np.shares_memory(conv, pages)
    _core.causal_conv1d_step(x, np.zeros((4, 4), "f"), None, None, None, conv, np.array([3, 1]), y=y)


# Names and scalars ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_unknown_keyword(op):
    e = Example(op)
    e.refused(TypeError, "unknown argument varient; did you mean variant?", varient="scalar")
    name = rows(op, "ARG")[-1]["name"] + "_"
    e.refused(TypeError, f"unknown argument {name}; did you mean {name[:-1]}?", **{name: 1})


@pytest.mark.parametrize("op", OPS)
def test_too_many_and_twice(op):
    e = Example(op)
    first = rows(op, "ARG")[0]["name"]
    with pytest.raises(TypeError, match=f"{op}: {first} is given twice"):
        getattr(_core, op)(e.args[first], **e.args)
    count = len(fidelta.formats.parameters(op))
    with pytest.raises(TypeError, match=f"{op}: {count + 1} arguments came; expected at most {count}"):
        getattr(_core, op)(*[None] * (count + 1))
    with pytest.raises(TypeError, match=f"{op}: missing argument {first}"):
        getattr(_core, op)()


@pytest.mark.parametrize("op", OPS)
def test_positional_order(op):
    e = Example(op)
    values = {**e.args, **e.choices}
    getattr(_core, op)(*[values.get(name) for name in fidelta.formats.parameters(op)])


SCALARS = {"NUM": ("a float", ["1", True, [1.0], np.zeros(1)]), "INT": ("an int", [1.0, "1", True, np.zeros(1, int)]),
           "FLAG": ("a bool", [1, 0, "true", 1.0])}


@each("NUM", "INT", "FLAG")
def test_scalar_type(op, row):
    e = Example(op)
    expected, wrong = SCALARS[row["kind"]]
    for value in wrong:
        name = type(value).__name__ if not isinstance(value, np.ndarray) else "numpy.ndarray"
        e.refused(TypeError, f"{row['name']} is a {name}; expected {expected}", **{row["name"]: value})
    e.run(**{row["name"]: None})


@each("NUM")
def test_number(op, row):
    e = Example(op)
    for value in (1, 0.5, np.float64(1), np.float32(1), np.int64(1)):
        e.run(**{row["name"]: value})
    for value in ("nan", "inf", "-inf"):
        e.refused(ValueError, f"{row['name']} is {value}; expected a finite number", **{row["name"]: float(value)})


@each("NUM")
def test_number_too_large(op, row):
    e = Example(op)
    for value in (10**400, -(10**400)):
        e.refused(ValueError, f"{row['name']} does not fit a float; expected a smaller number", **{row["name"]: value})


@each("NUM_RANGE")
def test_num_range(op, row):
    e, name = Example(op), row["name"]
    for value in (row["low"], row["high"], (row["low"] + row["high"]) / 2, None):
        e.run(**{name: value})
    for wrong in (row["high"] * 1.001, 1e300, -1e300, row["low"] * 1.001 or -1e-6):
        e.refused(ValueError, f"{name} is {wrong:.12g}; expected {row['low']:g} .. {row['high']:g}", **{name: wrong})


@pytest.mark.parametrize("op", OPS)
def test_every_number_has_a_range_in_float32(op):
    ranges = {row["name"]: row for row in rows(op, "NUM_RANGE")}
    assert set(ranges) == {row["name"] for row in rows(op, "NUM")}
    for row in ranges.values():
        assert np.isfinite(np.float32([row["low"], row["high"]])).all()


@each("INT")
def test_integer(op, row):
    e = Example(op)
    for value in (-1, np.int32(-1), np.int64(-1), -(2**63)):
        e.run(**{row["name"]: value})
    e.refused(ValueError, f"{row['name']} does not fit 64 bits; expected a smaller number", **{row["name"]: 2**63})


@each("FLAG")
def test_flag(op, row):
    for value in (True, False, np.True_, np.False_):
        Example(op).run(**{row["name"]: value})


@each("CHOICE")
def test_choice(op, row):
    e = Example(op)
    expected = " or ".join(f'"{value}"' for value in row["values"].split("|"))
    e.refused(ValueError, f"{row['name']} is \"other\"; expected {expected}", **{row["name"]: "other"})
    for value in (1, True, b"none"):
        e.refused(TypeError, f"{row['name']} is a {type(value).__name__}; expected {expected}", **{row["name"]: value})
    default = row["values"].split("|")[0]
    e.run(**{row["name"]: "".join(list(default))})  # an equal string that is another object
    e.run(**{row["name"]: None})


class Two:
    def __index__(self):
        return 2


@pytest.mark.parametrize("op", OPS)
def test_threads_and_variant(op):
    e = Example(op)
    for value in (0, -1, 257):
        e.refused(ValueError, f"num_threads is {value}; expected 1 .. 256", num_threads=value)
    e.refused(TypeError, "num_threads is a bool; expected an int", num_threads=True)
    e.run(num_threads=Two())
    e.refused(TypeError, "num_threads is a float; expected an int", num_threads=1.0)
    e.refused(TypeError, "variant is a int; expected a str", variant=1)
    runnable = ", ".join(f'"{name}"' for name, runs in _core.kernels()[op] if runs)
    e.refused(ValueError, f"variant is \"fast\"; expected one that runs here: {runnable}", variant="fast")
    for name, runs in _core.kernels()[op]:
        if runs:
            e.run(variant=name, num_threads=1)


def test_which_path():
    e = Example("l2norm")
    best = next(name for name, runs in _core.kernels()["l2norm"] if runs)
    assert _core.which_path("l2norm", **e.args) == f"cpu/{best}"
    assert _core.which_path("l2norm", e.args["x"], e.args["y"], variant="scalar") == "cpu/scalar"
    with pytest.raises(ValueError, match='which_path: op is "nothing"; expected the name of an op'):
        _core.which_path("nothing")
    with pytest.raises(TypeError):
        _core.which_path()


def test_num_threads():
    before = _core.get_num_threads()
    assert before >= 1
    _core.set_num_threads(3)
    assert _core.get_num_threads() == 3
    _core.set_num_threads(Two())
    assert _core.get_num_threads() == 2
    _core.set_num_threads(0)
    assert _core.get_num_threads() == before
    for wrong, exception in ((-1, ValueError), (257, ValueError), (2**70, ValueError), (1.0, TypeError), (True, TypeError)):
        with pytest.raises(exception):
            _core.set_num_threads(wrong)


# The printed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_page_names_every_row(op):
    section = fidelta.formats.op_section(op, FORMATS[op]["doc"])
    for row in FORMATS[op]["rows"]:
        assert row.get("name", row.get("arg", "")) in section
