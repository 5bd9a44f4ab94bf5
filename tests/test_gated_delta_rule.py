"""Every runnable kernel of gated_delta_rule against the float64 reference."""

import functools

import numpy as np
import pytest
from conftest import BF16, F16, F32, REAL, Guarded, contract, delta_inputs, each_variant, error, same_bits, states

import fidelta
from fidelta import reference

each_variant = each_variant("gated_delta_rule")


def check(x, variant, state_dtype=None, **more):
    """Runs the op between guard zones, on outputs full of NaN, and holds it against the reference. Returns (o, state)."""
    memory = Guarded()
    arguments = memory({**x, **more})
    (B, T, HV, V), K = x["v"].shape, x["k"].shape[3]
    N = B if "cu_seqlens" not in arguments else len(arguments["cu_seqlens"]) - 1
    shape = (N, HV, V, K) if arguments.get("state_layout") == "vk" else (N, HV, K, V)
    out = memory.empty(x["v"].shape, arguments.pop("out_dtype", x["v"].dtype))
    final = arguments.pop("final_state", None)
    final = memory.empty(shape, state_dtype or F32) if final is None else final
    want_o, want_state = reference.gated_delta_rule(**{**arguments, "final_state": final.copy()})[:2]
    before = {name: a.copy() for name, a in arguments.items() if isinstance(a, np.ndarray)}
    o, state = fidelta.gated_delta_rule(**arguments, out=out, final_state=final, variant=variant)
    assert o is out and state is final
    memory.check()
    for name, a in before.items():
        if name != "initial_state" or arguments["initial_state"] is not final:
            assert arguments[name].tobytes() == a.tobytes(), f"{name} was written"
    contract(o, want_o)
    kept = np.isfinite(want_state).all(axis=(1, 2, 3))
    contract(state[kept], want_state[kept])
    return o, state


@each_variant
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_lengths(rng, variant, dtype):
    for T in (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200):
        x = delta_inputs(rng, B=2, T=T, H=1, HV=2, K=20, V=12, dtype=dtype)
        check(x, variant, initial_state=states(rng, 2, 2, 20, 12))


@each_variant
def test_no_batch_and_no_sequences(rng, variant):
    check(delta_inputs(rng, B=0, T=9, H=1, HV=2, K=20, V=12), variant)
    x = delta_inputs(rng, B=1, T=0, H=1, HV=2, K=20, V=12)
    check(x, variant, cu_seqlens=np.array([0], np.int32))
    check(x, variant, cu_seqlens=np.array([0, 0, 0], np.int64), initial_state=states(rng, 2, 2, 20, 12))


@each_variant
@pytest.mark.parametrize("K, V", [(1, 1), (1, 17), (2, 3), (4, 4), (7, 9), (8, 8), (9, 7), (15, 17), (16, 16), (17, 15),
                                  (31, 33), (33, 31), (60, 60), (64, 128), (128, 64), (100, 100), (128, 128), (256, 8),
                                  (8, 256), (255, 257 - 4), (256, 256)])
def test_widths(rng, variant, K, V):
    for dtype in (F32, BF16):
        check(delta_inputs(rng, T=70, H=1, HV=1, K=K, V=V, dtype=dtype), variant, initial_state=states(rng, 1, 1, K, V))


@each_variant
@pytest.mark.parametrize("H, HV", [(1, 1), (3, 3), (2, 4), (2, 6), (2, 8), (1, 5)])
@pytest.mark.parametrize("head_map", ["grouped", "tiled"])
def test_heads(rng, variant, H, HV, head_map):
    check(delta_inputs(rng, B=2, T=67, H=H, HV=HV, K=16, V=16), variant, head_map=head_map)


@each_variant
@pytest.mark.parametrize("gate", ["log", "factor", "raw"])
@pytest.mark.parametrize("beta_kind", ["value", "logit"])
def test_gates(rng, variant, gate, beta_kind):
    for dtype in (F32, BF16, F16):
        for gate_dtype in {F32, dtype}:
            for more in ({}, {"qk_l2norm": True}, {"qk_l2norm": True, "l2norm_eps": 0.1, "scale": -0.7}, {"scale": 0.0}):
                x = delta_inputs(rng, T=70, H=1, HV=2, K=24, V=16, dtype=dtype, gate=gate, beta_kind=beta_kind,
                                 gate_dtype=gate_dtype)
                check(x, variant, **more)


@each_variant
def test_rounding_hf(rng, variant):
    x = delta_inputs(rng, T=70, H=1, HV=2, K=24, V=16, dtype=BF16, gate="raw", beta_kind="logit", gate_dtype=BF16)
    hf, state = check(x, variant, rounding="hf", out_dtype=F32)
    plain, _ = check(x, variant, out_dtype=F32)
    assert 1e-5 < error(hf, plain) < 1e-2


@each_variant
@pytest.mark.parametrize("state_layout", ["kv", "vk"])
@pytest.mark.parametrize("state_dtype", REAL, ids=str)
def test_state_dtypes_and_layouts(rng, variant, state_layout, state_dtype):
    for dtype in (F32, BF16):
        x = delta_inputs(rng, B=2, T=66, H=1, HV=2, K=20, V=12, dtype=dtype)
        check(x, variant, state_dtype=state_dtype, state_layout=state_layout,
              initial_state=states(rng, 2, 2, 20, 12, state_dtype, state_layout))


@each_variant
def test_float32_output_of_narrow_inputs(rng, variant):
    for dtype in (BF16, F16):
        check(delta_inputs(rng, T=80, H=1, HV=2, K=20, V=12, dtype=dtype), variant, out_dtype=F32)


@each_variant
@pytest.mark.parametrize("whole", [np.int32, np.int64])
def test_packed_slots_and_pads(rng, variant, whole):
    cu = np.array([0, 0, 1, 66, 66, 130, 200, 203], whole)
    x = delta_inputs(rng, T=203, H=2, HV=4, K=16, V=20)
    pool = states(rng, 12, 4, 16, 20)
    pool[[1, 11]] = np.nan                       # slots that nobody may read
    more = {
        "cu_seqlens": cu, "initial_state": pool,
        "read_slots": np.array([3, 0, 7, 2, -1, 1, 5], whole),
        "has_initial_state": np.array([True, True, False, True, True, False, True]),
        "write_slots": np.array([4, 10, 7, 2, 8, 1, -1], whole),
    }
    final = states(rng, 12, 4, 16, 20)
    before = final.copy()
    o, state = check(x, variant, **more, final_state=final)
    assert not o[0, 66:130].any() and np.isfinite(o).all()
    untouched = [0, 3, 5, 6, 8, 9, 11]
    same_bits(state[untouched], before[untouched])
    same_bits(state[4], pool[3])                 # the empty sequence moves its state

    moved = {**more, "pad_slot": 99, "read_slots": np.where(more["read_slots"] < 0, 99, more["read_slots"]),
             "write_slots": np.where(more["write_slots"] < 0, 99, more["write_slots"])}
    again = fidelta.gated_delta_rule(**x, **moved, final_state=before, variant=variant)
    same_bits(again[0], o)
    same_bits(again[1], state)


@each_variant
def test_states_updated_in_their_pool(rng, variant):
    x = delta_inputs(rng, B=3, T=70, H=1, HV=2, K=16, V=20)
    pool = states(rng, 6, 2, 16, 20)
    slots = np.array([4, 0, 3])
    want_o, want_pool = reference.gated_delta_rule(**x, initial_state=pool, read_slots=slots, write_slots=slots,
                                                   final_state=pool.copy())
    before = pool.copy()
    o, state = fidelta.gated_delta_rule(**x, initial_state=pool, read_slots=slots, write_slots=slots, final_state=pool,
                                        variant=variant)
    assert state is pool
    contract(o, want_o)
    contract(pool, want_pool)
    same_bits(pool[[1, 2, 5]], before[[1, 2, 5]])


@each_variant
@pytest.mark.parametrize("whole", [np.int32, np.int64])
def test_token_range(rng, variant, whole):
    x = delta_inputs(rng, B=4, T=75, H=1, HV=2, K=16, V=20)
    spans = np.array([[0, 75], [5, 75], [3, 3], [1, 70]], whole)
    for b, (first, end) in enumerate(spans):     # what is skipped may hold anything
        for name in ("q", "k", "v", "g", "beta"):
            x[name][b, :first] = x[name][b, end:] = np.nan
    clean = {name: np.nan_to_num(a) if isinstance(a, np.ndarray) else a for name, a in x.items()}
    start = states(rng, 4, 2, 16, 20)
    want_o, want_state = reference.gated_delta_rule(**clean, token_range=spans, initial_state=start, return_state=True)
    o, state = fidelta.gated_delta_rule(**x, token_range=spans, initial_state=start, return_state=True, variant=variant)
    contract(o, want_o)
    contract(state, want_state)
    for b, (first, end) in enumerate(spans):
        assert not o[b, :first].any() and not o[b, end:].any()


@each_variant
@pytest.mark.parametrize("state_layout", ["kv", "vk"])
def test_snapshots(rng, variant, state_layout):
    cu = np.array([0, 150, 150, 214, 220])
    x = delta_inputs(rng, T=220, H=1, HV=2, K=16, V=20)
    wanted = np.array([[0, 1], [0, 64], [0, 150], [1, 0], [2, 63], [2, 64], [3, 0], [3, 6], [0, 0], [0, 65], [0, 64]])
    more = {"cu_seqlens": cu, "initial_state": states(rng, 4, 2, 16, 20, state_layout=state_layout),
            "state_layout": state_layout}
    want = reference.gated_delta_rule(**x, **more, snapshot_positions=wanted)[1]
    plain, state = fidelta.gated_delta_rule(**x, **more, return_state=True, variant=variant)
    o, taken = fidelta.gated_delta_rule(**x, **more, snapshot_positions=wanted, variant=variant)
    same_bits(o, plain)
    contract(taken, want)
    same_bits(taken[2], state[0])
    same_bits(taken[5], state[2])
    for p in (0, 4, 9):                          # what final_state would be had the sequence ended there
        n, tokens = wanted[p]
        part = {name: a[:, cu[n]:cu[n] + tokens] if isinstance(a, np.ndarray) else a for name, a in x.items()}
        short = fidelta.gated_delta_rule(**part, initial_state=more["initial_state"][n:n + 1], state_layout=state_layout,
                                         return_state=True, variant=variant)[1]
        same_bits(short[0], taken[p])
    o, state, every = fidelta.gated_delta_rule(**x, **more, snapshot_every=1, return_state=True, variant=variant)
    assert every.shape[0] == 3
    contract(every, reference.gated_delta_rule(**x, **more, snapshot_every=1)[1])
    same_bits(every[0], taken[1])


@each_variant
def test_views_of_one_packed_projection(rng, variant):
    B, T, H, HV, K, V = 2, 70, 2, 4, 16, 24
    plain = delta_inputs(rng, B=B, T=T, H=H, HV=HV, K=K, V=V, dtype=BF16, gate_dtype=BF16)
    wide = np.full((B, T, 2 * H * K + HV * V + 2 * HV + 3), np.nan, BF16)
    sizes = np.cumsum([1, H * K, H * K, HV * V, HV, HV])
    views = [wide[:, :, a:b].reshape(B, T, *shape) for a, b, shape in
             zip(sizes, sizes[1:], [(H, K), (H, K), (HV, V), (HV,), (HV,)])]
    for name, view in zip(("q", "k", "v", "g", "beta"), views):
        assert view.base is not None and np.shares_memory(view, wide)
        view[...] = plain[name]
    views = {**plain, **dict(zip(("q", "k", "v", "g", "beta"), views))}
    memory = np.full((B, HV, T, V + 3), np.nan, BF16)
    out = memory.transpose(0, 2, 1, 3)[..., 1:1 + V]
    same_bits(fidelta.gated_delta_rule(**views, out=out, variant=variant),
              fidelta.gated_delta_rule(**plain, variant=variant))
    assert np.isnan(memory[..., 0].astype(F32)).all() and np.isnan(memory[..., 1 + V:].astype(F32)).all()


@each_variant
def test_repeated_and_strided_arguments(rng, variant):
    x = delta_inputs(rng, B=2, T=66, H=1, HV=2, K=16, V=16)
    first = {name: np.ascontiguousarray(np.broadcast_to(a[:1], a.shape)) if isinstance(a, np.ndarray) else a
             for name, a in x.items()}
    repeated = {name: np.broadcast_to(a[:1], a.shape) if isinstance(a, np.ndarray) else a for name, a in x.items()}
    repeated["g"] = np.broadcast_to(x["g"][:1, :1, :1], (2, 66, 2))
    first["g"] = repeated["g"].copy()
    same_bits(fidelta.gated_delta_rule(**repeated, variant=variant), fidelta.gated_delta_rule(**first, variant=variant))
    pool = states(rng, 4, 2, 16, 16)
    every_other = fidelta.gated_delta_rule(**x, initial_state=pool[::2], variant=variant)
    same_bits(every_other, fidelta.gated_delta_rule(**x, initial_state=pool[::2].copy(), variant=variant))
    cu = np.array([[0, 9], [30, 9], [66, 9]], np.int64)[:, 0]
    one = {name: a[:1] if isinstance(a, np.ndarray) else a for name, a in x.items()}
    same_bits(fidelta.gated_delta_rule(**one, cu_seqlens=cu, variant=variant),
              fidelta.gated_delta_rule(**one, cu_seqlens=cu.copy(), variant=variant))


# The numerical contract ------------------------------------------------------------------------------------------------


@functools.cache
def long_case(dtype, kind):
    """T = 4096, and the reference's answer."""
    rng = np.random.default_rng(7)
    x = delta_inputs(rng, T=4096, H=1, HV=2, K=128, V=128, dtype=dtype)
    x["qk_l2norm"] = True
    if kind == "no forgetting":
        x["g"][:] = 0
    return x, reference.gated_delta_rule(**x, return_state=True)


@each_variant
@pytest.mark.parametrize("kind", ["trained gates", "no forgetting"])
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_contract_at_4096_tokens(variant, dtype, kind):
    x, (want_o, want_state) = long_case(dtype, kind)
    o, state = fidelta.gated_delta_rule(**x, return_state=True, variant=variant)
    contract(o, want_o)
    contract(state, want_state)


@each_variant
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_real_model_shape(variant, dtype):
    rng = np.random.default_rng(3)
    x = delta_inputs(rng, T=129, H=16, HV=32, K=128, V=128, dtype=dtype, gate="raw", beta_kind="logit", gate_dtype=dtype)
    check(x, variant, qk_l2norm=True, initial_state=states(rng, 1, 32, 128, 128))


def near_parallel_keys(rng, x):
    base = rng.standard_normal(x["k"].shape[-1])
    k = base + 0.02 * rng.standard_normal(x["k"].shape)
    x["k"] = (k / np.linalg.norm(k, axis=-1, keepdims=True) * 0.999).astype(x["k"].dtype)


def closed_gates(rng, x):
    x["g"][:, ::7] = -np.inf
    x["g"][:, 64:66] = -np.inf


def all_closed(rng, x):
    x["g"][:] = -np.inf


def one_strong_token(rng, x):
    x["g"][:] = 0
    x["g"][:, 20] = -90


def strong_gates(rng, x):
    x["g"][:] = -27.6


def wide_range_of_gates(rng, x):
    """Strong and weak gates within one chunk: differences of cumulative sums would cancel."""
    x["g"][:] = np.where(rng.random(x["g"].shape) < 0.5, -60, -1e-3)


def overwrite(rng, x):
    x["beta"][:] = 1


def never_write(rng, x):
    x["beta"][:] = 0


def no_decay(rng, x):
    x["g"][:] = 0


def one_key(rng, x):
    x["k"][:] = x["k"][:, :1]


def zero_keys(rng, x):
    x["k"][:, ::3] = 0
    x["q"][:, 1::3] = 0


def parallel_overwrite(rng, x):
    near_parallel_keys(rng, x)
    overwrite(rng, x)
    no_decay(rng, x)


def parallel_slow(rng, x):
    near_parallel_keys(rng, x)
    x["g"][:] = -0.0003
    x["beta"][:] = 0.9997


def parallel_strong(rng, x):
    near_parallel_keys(rng, x)
    x["g"][:] = -4
    x["beta"][:] = 0


def long_keys(rng, x):
    """Not normalised, but beta |k|^2 stays below 2: the bound of docs/algorithms/gated_delta_rule.md."""
    x["k"] = (x["k"] / np.linalg.norm(x["k"].astype(float), axis=-1, keepdims=True) * 1.38).astype(x["k"].dtype)
    x["beta"][:] = 1


HARD = [near_parallel_keys, closed_gates, all_closed, one_strong_token, strong_gates, wide_range_of_gates, overwrite,
        never_write, no_decay, one_key, zero_keys, parallel_overwrite, parallel_slow, parallel_strong, long_keys]


@each_variant
@pytest.mark.parametrize("make", HARD, ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_hard_inputs(rng, variant, dtype, make):
    x = delta_inputs(rng, T=200, H=1, HV=2, K=32, V=24, dtype=dtype, unit_keys=True)
    make(rng, x)
    check(x, variant, initial_state=states(rng, 1, 2, 32, 24))


@each_variant
@pytest.mark.parametrize("A", [1e-6, 1.0, 16.0])
def test_decay_rates(rng, variant, A):
    x = delta_inputs(rng, T=300, H=1, HV=2, K=32, V=24, gate="raw", unit_keys=True)
    x["A_log"][:] = np.log(A)
    check(x, variant)


@each_variant
def test_an_unwanted_state_never_shows(rng, variant):
    """A start from zero overwrites: NaN in the slot, or in a state that decays to nothing, is not multiplied by zero."""
    x = delta_inputs(rng, B=2, T=70, H=1, HV=2, K=16, V=16)
    pool = np.full((2, 2, 16, 16), np.nan, F32)
    o, state = fidelta.gated_delta_rule(**x, initial_state=pool, has_initial_state=np.zeros(2, bool), return_state=True,
                                        variant=variant)
    plain, plain_state = fidelta.gated_delta_rule(**x, return_state=True, variant=variant)
    same_bits(o, plain)
    same_bits(state, plain_state)


@each_variant
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_nan_stays_with_its_head_and_sequence(rng, variant, name):
    x = delta_inputs(rng, B=2, T=70, H=2, HV=4, K=16, V=16)
    clean = fidelta.gated_delta_rule(**x, variant=variant)
    x[name][(0, 40, 1, 3)[:x[name].ndim]] = np.nan
    o = fidelta.gated_delta_rule(**x, variant=variant)
    hit = [2, 3] if name in "qk" else [1]            # the value heads of key head 1, or head 1
    spared = [h for h in range(4) if h not in hit]
    same_bits(o[1], clean[1])
    same_bits(o[0][:, spared], clean[0][:, spared])
    same_bits(o[0, :40], clean[0, :40])
    assert np.isnan(o[0, 40, hit]).any()
    assert np.isnan(o[0, 41:, hit]).any() == (name != "q")


@each_variant
def test_many_short_sequences(rng, variant):
    for N in (1023, 1024, 1025):
        x = delta_inputs(rng, T=N + 3, H=1, HV=1, K=8, V=8)
        check(x, variant, cu_seqlens=np.array([*range(N), N + 3]), initial_state=states(rng, N, 1, 8, 8))


@each_variant
def test_states_of_any_strides(rng, variant):
    x = delta_inputs(rng, B=2, T=70, H=1, HV=2, K=16, V=20)
    start = states(rng, 2, 2, 16, 20)
    o, state = fidelta.gated_delta_rule(**x, initial_state=start, return_state=True, variant=variant)
    turned = np.ascontiguousarray(start.swapaxes(2, 3)).swapaxes(2, 3)
    memory = np.full((2, 20, 2, 33), np.nan, F32)
    final = memory[..., :32:2].transpose(0, 2, 3, 1)
    assert turned.strides[3] != 4 and final.shape == (2, 2, 16, 20)
    strided, _ = fidelta.gated_delta_rule(**x, initial_state=turned, final_state=final, variant=variant)
    same_bits(strided, o)
    same_bits(final, state)
    assert np.isnan(memory[..., 1::2]).all() and np.isnan(memory[..., 32]).all()


@each_variant
def test_head_first_memory(rng, variant):
    """Tensors stored [B, H, T, ...] and passed with their axes swapped: nothing is copied, nothing changes."""
    x = delta_inputs(rng, B=2, T=70, H=2, HV=4, K=16, V=20, dtype=BF16)
    turned = {name: np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2) if isinstance(a, np.ndarray) else a
              for name, a in x.items()}
    same_bits(fidelta.gated_delta_rule(**turned, variant=variant), fidelta.gated_delta_rule(**x, variant=variant))


@each_variant
def test_torch_tensors(rng, variant):
    torch = pytest.importorskip("torch", reason="torch tensors are passed here; install the test extra")
    x = delta_inputs(rng, B=1, T=70, H=1, HV=2, K=16, V=20)
    o, state, snapshots = fidelta.gated_delta_rule(**x, return_state=True, snapshot_every=1, variant=variant)
    t = {name: torch.from_numpy(a) if isinstance(a, np.ndarray) else a for name, a in x.items()}
    mine = fidelta.gated_delta_rule(**t, return_state=True, snapshot_every=1, variant=variant)
    assert all(isinstance(tensor, torch.Tensor) for tensor in mine)
    for tensor, array in zip(mine, (o, state, snapshots)):
        same_bits(tensor.numpy(), array)
    narrow = {name: a.bfloat16() if torch.is_tensor(a) and name != "g" else a for name, a in t.items()}
    o, state = fidelta.gated_delta_rule(**narrow, return_state=True, state_dtype=torch.float16, variant=variant)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float16
    assert fidelta.gated_delta_rule(**narrow, out_dtype="float32", variant=variant).dtype == torch.float32


def test_outputs_that_cannot_be_made(rng):
    x = delta_inputs(rng, T=3)

    class Foreign:
        """A tensor of some library without a way to make another."""

        def __init__(self, array):
            self.array = array
            self.shape, self.dtype = array.shape, array.dtype

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    foreign = {**x, "v": Foreign(x["v"])}
    with pytest.raises(TypeError, match="gated_delta_rule: no writable tensor can be made in the library of v"):
        fidelta.gated_delta_rule(**foreign)
    out = np.empty_like(x["v"])
    same_bits(fidelta.gated_delta_rule(**foreign, out=out), fidelta.gated_delta_rule(**x))
    with pytest.raises(TypeError, match="v is list; expected"):
        fidelta.gated_delta_rule(**{**x, "v": [1.0]})
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunk'"):
        fidelta.gated_delta_rule(**x, chunk=32)
    with pytest.raises(ValueError, match="exclude each other"):
        fidelta.gated_delta_rule(**x, snapshot_every=1, snapshot_positions=np.zeros((0, 2), int))
    with pytest.raises(ValueError, match="snapshot_every is 0"):
        fidelta.gated_delta_rule(**x, snapshot_every=0)
    with pytest.raises(ValueError, match="write_slots"):
        fidelta.gated_delta_rule(**x, write_slots=np.array([0]), return_state=True)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_wrong_shapes_are_named_not_tripped_over(rng, name):
    """Whatever the shape is, the error is the contract's, also when outputs are to be made from it."""
    x = delta_inputs(rng, T=3)
    for bad in (np.zeros((), F32), np.zeros(3, F32), np.zeros((1, 3), F32), np.zeros((1, 3, 1, 16, 1), F32)):
        with pytest.raises(fidelta.ShapeError, match="gated_delta_rule: "):
            fidelta.gated_delta_rule(**{**x, name: bad}, return_state=True, snapshot_every=1)
        with pytest.raises(fidelta.ShapeError, match="gated_delta_rule_step: "):
            fidelta.gated_delta_rule_step(**{**x, name: bad}, state=np.zeros((1, 1, 16, 16), F32), return_token_states=True)


def test_which_path_names_each_variant(rng):
    x = delta_inputs(rng, T=3)
    from conftest import variants

    names = variants("gated_delta_rule")
    assert fidelta.which_path("gated_delta_rule", **x) == f"cpu/{names[0]}"
    for name in names:
        assert fidelta.which_path(fidelta.gated_delta_rule, **x, variant=name) == f"cpu/{name}"
    with pytest.raises(ValueError, match="which_path: op is 'gated'"):
        fidelta.which_path("gated", **x)


@pytest.mark.parametrize("name, bad, error", [
    ("cu_seqlens", np.array([0, 2**40]), ValueError), ("cu_seqlens", [0, 70], TypeError),
    ("cu_seqlens", np.array([0, 70.0]), ValueError),
    ("cu_seqlens", np.array(70), ValueError), ("token_range", np.array([0, 70]), ValueError),
    ("token_range", np.array([[0, 2**40]]), ValueError), ("snapshot_every", 1.0, TypeError),
    ("snapshot_every", "1", TypeError), ("snapshot_every", True, TypeError)])
def test_bad_snapshot_tables_are_refused_at_once(rng, name, bad, error):
    x = {**delta_inputs(rng, T=70, H=1, HV=1, K=8, V=8), "snapshot_every": 1, name: bad}
    with pytest.raises(error, match=f"gated_delta_rule: {name} "):
        fidelta.gated_delta_rule(**x)
