"""The shapes, input distributions and tolerances of other projects' own tests, run through the public API and held
against oracles in torch. Each test names whose shapes it uses; where theirs run for minutes, the sizes are cut."""

import math

import pytest

torch = pytest.importorskip("torch", reason="needs the test extra: torch is the oracle here")
import torch.nn.functional as F  # noqa: E402

import fidelta  # noqa: E402

torch.set_num_threads(1)  # the oracles are many small steps, and pytest's workers share the cores

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(42)


# ------------------------------------------------------------------------------------------------------- oracles


def recurrence(q, k, v, g, beta, scale=None, state=None, dtype=F32):
    """The gated delta rule token by token, on torch tensors. Returns o [B,T,HV,V] and the state [B,HV,K,V]."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    rows = [x.to(dtype).repeat_interleave(HV // x.shape[2], 2).transpose(1, 2).reshape(B * HV, T, -1) for x in (q, k)]
    q, k = rows[0] * scale, rows[1]
    v = v.to(dtype).transpose(1, 2).reshape(B * HV, T, V)
    decay = g.to(dtype).exp().transpose(1, 2).reshape(B * HV, T, 1, 1)
    beta = beta.to(dtype).transpose(1, 2).reshape(B * HV, T, 1, 1)
    S = torch.zeros(B * HV, K, V, dtype=dtype) if state is None else state.to(dtype).reshape(B * HV, K, V).clone()
    o = torch.empty(B * HV, T, V, dtype=dtype)
    for t in range(T):
        S *= decay[:, t]
        delta = beta[:, t] * (v[:, t, None] - torch.bmm(k[:, t, None], S))
        S.baddbmm_(k[:, t, :, None], delta)
        o[:, t] = torch.bmm(q[:, t, None], S)[:, 0]
    return o.reshape(B, HV, T, V).transpose(1, 2), S.reshape(B, HV, K, V)


def packed(cu, q, k, v, g, beta, scale=None, state=None, dtype=F32):
    """recurrence() for each sequence of a packed row."""
    outputs, states = [], []
    for n, (first, end) in enumerate(zip(cu, cu[1:])):
        part = [x[:, first:end] for x in (q, k, v, g, beta)]
        o, S = recurrence(*part, scale, None if state is None else state[n : n + 1], dtype)
        outputs.append(o)
        states.append(S)
    return torch.cat(outputs, 1), torch.cat(states)


def conv(x, weight, bias=None, silu=False, history=None):
    """Causal conv of x [B,D,T] in float32, by torch's conv1d; history [B,D,>=W-1] or None. Not rounded."""
    D, W = weight.shape
    if x.shape[2] == 0:
        return x.float()
    before = torch.zeros(x.shape[0], D, W - 1) if history is None else history[..., history.shape[2] - (W - 1) :].float()
    y = F.conv1d(torch.cat([before, x.float()], 2), weight.float()[:, None], None if bias is None else bias.float(), groups=D)
    return F.silu(y) if silu else y


def gates(a, A_log, dt_bias=None):
    a = a.float() if dt_bias is None else a.float() + dt_bias.float()
    return -A_log.float().exp() * F.softplus(a)


# ------------------------------------------------------------------------------------------------------- metrics


def assert_ratio(name, expected, got, tol):
    """fla's metric: RMS of the difference over RMS of the reference; 1e-6 absolute always passes; NaN never does."""
    expected, got = expected.double(), got.double()
    assert got.shape == expected.shape
    assert torch.isfinite(got).all(), f"{name} is not finite"
    difference = expected - got
    if difference.numel() == 0 or difference.abs().max() <= 1e-6:
        return
    ratio = difference.square().mean().sqrt() / (expected.square().mean().sqrt() + 1e-8)
    assert ratio < tol, f"{name}: RMS ratio {ratio:.3g}, allowed {tol}"


def assert_close(expected, got, atol, rtol):
    torch.testing.assert_close(got.float(), expected.float(), atol=atol, rtol=rtol)


CONV_TOLERANCE = {F32: dict(rtol=3e-4, atol=1e-3), F16: dict(rtol=3e-3, atol=5e-3), BF16: dict(rtol=1e-2, atol=5e-2)}


# -------------------------------------------------------------------------------------------------------- inputs


def fla_inputs(B, T, H, HV, D, dtype, norm=1.0, mask_p=0.0, normalise=True):
    q, k = torch.rand(B, T, H, D, dtype=dtype), torch.rand(B, T, H, D, dtype=dtype)
    if normalise:
        q, k = (F.normalize(x.float(), dim=-1).to(dtype) for x in (q, k))
    v = torch.rand(B, T, HV, D, dtype=dtype)
    beta = torch.rand(B, T, HV, dtype=dtype).sigmoid()
    g = F.logsigmoid(torch.rand(B, T, HV)) / norm * (torch.rand(B, T, HV) > mask_p)
    return q, k, v, g, beta


def step_through(q, k, v, g, beta, state, width=16, **options):
    """A whole sequence by calls of the decode op, `width` tokens each."""
    parts = []
    for first in range(0, q.shape[1], width):
        part = [x[:, first : first + width] for x in (q, k, v, g, beta)]
        parts.append(fidelta.gated_delta_rule_step(*part, state, **options))
    return torch.cat(parts, 1)


# --------------------------------------------------------------------------------------------------- 5.1 fla, GDN


@pytest.mark.parametrize(
    "B, T, H, HV, D, scale, norm, dtype",
    [
        (1, 63, 1, 1, 64, 1, 1, F32),
        (2, 500, 4, 4, 60, 1, 1, F32),
        (2, 1000, 2, 8, 128, 1, 0.1, F32),
        (3, 1024, 2, 2, 128, 0.1, 1, F32),
        (4, 1024, 3, 3, 128, 1, 10, F32),
        (4, 2048, 4, 4, 64, 0.1, 1, F32),
        (2, 1024, 4, 4, 128, 1, 0.1, F16),
        (2, 1024, 4, 8, 128, 1, 10, F16),
    ],
)
def test_fla_fused_recurrent(B, T, H, HV, D, scale, norm, dtype):
    inputs = fla_inputs(B, T, H, HV, D, dtype, norm)
    h0 = torch.randn(B, HV, D, D)
    expected, final = recurrence(*inputs, scale, h0)
    state = h0.clone()
    assert_ratio("o", expected, step_through(*inputs, state, scale=scale), 0.002)
    assert_ratio("ht", final, state, 0.002)


@pytest.mark.parametrize(
    "B, T, H, HV, D, scale, norm, mask_p, l2norm",
    [
        (4, 1024, 4, 4, 128, 0.1, 1, 1.0, False),
        (2, 75, 4, 4, 64, 1, 0.01, 0, False),
        (2, 500, 3, 3, 60, 1, 1, 0, False),
        (2, 1000, 3, 3, 64, 0.1, 1, 0.5, False),
        (3, 1024, 4, 4, 100, 1, 0.1, 0, False),
        (4, 1024, 4, 4, 128, 0.1, 1, 0, True),
        (2, 1500, 4, 4, 128, 0.1, 10, 0, False),
        (4, 2048, 8, 8, 64, 0.1, 1, 0, False),
        (2, 256, 2, 4, 64, 1, 1, 0, False),
        (2, 512, 2, 8, 64, 1, 0.1, 0, True),
        (2, 1024, 4, 8, 128, 0.1, 1, 0, False),
    ],
)
def test_fla_chunk(B, T, H, HV, D, scale, norm, mask_p, l2norm):
    q, k, v, g, beta = fla_inputs(B, T, H, HV, D, F16, norm, mask_p, normalise=not l2norm)
    h0 = torch.randn(B, HV, D, D)
    o, state = fidelta.gated_delta_rule(
        q, k, v, g, beta, scale=scale, initial_state=h0, return_state=True, qk_l2norm=l2norm
    )
    if l2norm:
        q, k = F.normalize(q.float(), dim=-1), F.normalize(k.float(), dim=-1)
    expected, final = recurrence(q, k, v, g, beta, scale, h0)
    assert_ratio("o", expected, o, 0.005)
    assert_ratio("ht", final, state, 0.005)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_fla_chunk_size_against_transformers(chunk_size):
    module = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5", reason="needs transformers >= 5.15")
    q, k, v, g, beta = fla_inputs(1, 64, 2, 4, 32, F32)
    h0 = torch.randn(1, 4, 32, 32)
    expected, final = module.torch_chunk_gated_delta_rule(
        q, k, v, g, beta, chunk_size=chunk_size, initial_state=h0, output_final_state=True
    )
    o, state = fidelta.gated_delta_rule(q, k, v, g, beta, initial_state=h0, return_state=True)
    assert_ratio("o", expected, o, 0.005)
    assert_ratio("ht", final, state, 0.005)


@pytest.mark.parametrize(
    "B, T, H, HV, D, scale, l2norm, twice, dtype, prefill",
    [
        (2, 500, 4, 4, 64, 1, False, False, F16, True),
        (3, 1024, 4, 4, 128, 0.1, True, True, F16, True),
        (2, 1024, 4, 8, 128, 0.1, False, True, F16, True),
        (4, 2048, 8, 8, 64, 0.1, True, False, F16, True),
        (1, 64, 1, 1, 64, 1, False, False, F32, False),
        (2, 512, 2, 4, 64, 0.1, False, True, F16, False),
        (3, 1000, 2, 8, 128, 1, False, True, F16, False),
        (4, 1024, 4, 4, 128, 0.1, False, False, F16, False),
    ],
)
def test_fla_beta_sigmoid(B, T, H, HV, D, scale, l2norm, twice, dtype, prefill):
    """Their allow_neg_eigval doubles beta: here that is a value, since beta_kind="logit" is the sigmoid alone."""
    q, k, v, g, _ = fla_inputs(B, T, H, HV, D, dtype, normalise=not l2norm)
    logit = torch.randn(B, T, HV, dtype=dtype)
    beta = logit.float().sigmoid() * (2 if twice else 1)
    options = dict(scale=scale, qk_l2norm=l2norm, beta_kind="value" if twice else "logit")
    given = beta if twice else logit
    if prefill:
        o = fidelta.gated_delta_rule(q, k, v, g, given, **options)
    else:
        o = step_through(q, k, v, g, given, torch.zeros(B, HV, D, D), **options)
    if l2norm:
        q, k = F.normalize(q.float(), dim=-1), F.normalize(k.float(), dim=-1)
    assert_ratio("o", recurrence(q, k, v, g, beta, scale)[0], o, 0.005)


@pytest.mark.parametrize(
    "B, T, H, HV, D, scale, norm, dtype, prefill",
    [
        (1, 63, 1, 1, 64, 1, 1, F16, True),
        (2, 500, 3, 3, 60, 1, 1, F16, True),
        (3, 1024, 4, 4, 128, 0.1, 1, F16, True),
        (4, 2048, 8, 8, 64, 0.1, 1, F16, True),
        (1, 63, 1, 1, 64, 1, 1, F32, False),
        (2, 500, 4, 4, 60, 1, 1, F32, False),
        (2, 1000, 2, 8, 128, 1, 0.1, F32, False),
        (3, 1024, 2, 2, 128, 0.1, 1, F32, False),
        (1, 1024, 4, 4, 128, 1, 1, BF16, True),
        (2, 2048, 8, 8, 128, 1, 1, BF16, True),
    ],
)
def test_fla_state_v_first(B, T, H, HV, D, scale, norm, dtype, prefill):
    """Theirs allow 1e-4 (and nothing on one path); here the two layouts agree in every bit."""
    inputs = fla_inputs(B, T, H, HV, D, dtype, norm)
    h0 = torch.randn(B, HV, D, D)
    results = []
    for layout in ("kv", "vk"):
        state = h0.clone() if layout == "kv" else h0.transpose(2, 3).contiguous()
        if prefill:
            o, state = fidelta.gated_delta_rule(
                *inputs, scale=scale, initial_state=state, return_state=True, state_layout=layout
            )
        else:
            o = step_through(*inputs, state, scale=scale, state_layout=layout)
        results.append((o, state if layout == "kv" else state.transpose(2, 3)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    "B, T, H, HV, D, scale, bias, l2norm, dtype, prefill",
    [
        (1, 64, 1, 1, 64, 1, False, False, F32, False),
        (2, 256, 2, 2, 64, 1, True, False, F32, False),
        (2, 512, 2, 4, 64, 0.1, True, False, F16, False),
        (3, 1000, 2, 8, 128, 1, False, False, F16, False),
        (4, 1024, 4, 4, 128, 0.1, True, False, F16, False),
        (2, 75, 4, 4, 64, 1, True, True, F16, True),
        (2, 500, 3, 3, 60, 1, False, True, F16, True),
        (2, 1000, 3, 3, 64, 0.1, True, False, F16, True),
        (3, 1024, 4, 4, 100, 1, True, True, F16, True),
        (4, 1024, 4, 4, 128, 0.1, False, True, F16, True),
        (2, 256, 2, 4, 64, 1, True, True, F16, True),
        (2, 512, 1, 4, 64, 0.1, False, True, F16, True),
        (2, 512, 2, 8, 64, 1, True, True, F16, True),
        (2, 1024, 4, 8, 128, 0.1, True, True, F16, True),
    ],
)
def test_fla_gate_in_kernel(B, T, H, HV, D, scale, bias, l2norm, dtype, prefill):
    q, k, v, _, beta = fla_inputs(B, T, H, HV, D, dtype, normalise=not l2norm)
    a = torch.randn(B, T, HV, dtype=dtype)
    A_log = torch.empty(HV).uniform_(1, 16).log()
    dt_bias = torch.randn(HV) if bias else torch.zeros(HV)
    h0 = torch.randn(B, HV, D, D)
    options = dict(scale=scale, qk_l2norm=l2norm, gate="raw", A_log=A_log, dt_bias=dt_bias)
    state = h0.clone()
    if prefill:
        o, state = fidelta.gated_delta_rule(q, k, v, a, beta, initial_state=h0, return_state=True, **options)
    else:
        o = step_through(q, k, v, a, beta, state, **options)
    if l2norm:
        q, k = F.normalize(q.float(), dim=-1), F.normalize(k.float(), dim=-1)
    expected, final = recurrence(q, k, v, gates(a, A_log, dt_bias), beta, scale, h0)
    tol = 0.005 if prefill else 0.002
    assert_ratio("o", expected, o, tol)
    assert_ratio("ht", final, state, tol)


VARLEN = [[0, 15], [0, 256, 500, 1000], [0, 15, 100, 300, 1200, 2000]]


@pytest.mark.parametrize(
    "H, HV, D, mask_p, cu, index",
    [
        (4, 4, 60, 0, VARLEN[0], torch.int32),
        (4, 4, 64, 0, VARLEN[1], torch.int64),
        (4, 4, 64, 0.5, VARLEN[1], torch.int32),
        (4, 4, 100, 0, VARLEN[2], torch.int64),
        (2, 4, 64, 0, VARLEN[1], torch.int32),
        (2, 8, 64, 0, VARLEN[1], torch.int64),
        (4, 4, 60, 0, [0, 4096], torch.int64),
    ],
)
def test_fla_chunk_varlen(H, HV, D, mask_p, cu, index):
    q, k, v, g, beta = fla_inputs(1, cu[-1], H, HV, D, F16, 1, mask_p)
    h0 = torch.randn(len(cu) - 1, HV, D, D)
    o, state = fidelta.gated_delta_rule(
        q, k, v, g, beta, cu_seqlens=torch.tensor(cu, dtype=index), initial_state=h0, return_state=True
    )
    expected, final = packed(cu, q, k, v, g, beta, None, h0)
    assert_ratio("o", expected, o, 0.005)
    assert_ratio("ht", final, state, 0.005)


@pytest.mark.parametrize(
    "H, HV, D, bias, cu",
    [
        (2, 2, 64, True, [0, 15, 100, 300]),
        (2, 4, 64, False, VARLEN[1]),
        (4, 4, 128, True, VARLEN[2]),
        (4, 4, 60, True, VARLEN[0]),
        (4, 4, 100, True, VARLEN[2]),
    ],
)
def test_fla_gate_in_kernel_varlen(H, HV, D, bias, cu):
    q, k, v, _, beta = fla_inputs(1, cu[-1], H, HV, D, F16)
    a = torch.randn(1, cu[-1], HV, dtype=F16)
    A_log, dt_bias = torch.empty(HV).uniform_(1, 16).log(), torch.randn(HV) if bias else torch.zeros(HV)
    h0 = torch.randn(len(cu) - 1, HV, D, D)
    o, state = fidelta.gated_delta_rule(
        q, k, v, a, beta, gate="raw", A_log=A_log, dt_bias=dt_bias,
        cu_seqlens=torch.tensor(cu), initial_state=h0, return_state=True,
    )  # fmt: skip
    expected, final = packed(cu, q, k, v, gates(a, A_log, dt_bias), beta, None, h0)
    assert_ratio("o", expected, o, 0.002)
    assert_ratio("ht", final, state, 0.002)


@pytest.mark.parametrize("B, T, HV, bias", [(1, 32, 2, False), (2, 64, 4, True), (4, 128, 8, True), (4, 128, 16, False)])
def test_fla_gate_alone(B, T, HV, bias):
    a, b = torch.randn(B, T, HV), torch.randn(B, T, HV)
    A_log, dt_bias = torch.empty(HV).uniform_(1, 16).log(), torch.randn(HV) if bias else torch.zeros(HV)
    g, beta = fidelta.gdn_gate(a, b, A_log, dt_bias)
    assert_ratio("g", gates(a, A_log, dt_bias), g, 1e-4)
    assert_ratio("beta", b.sigmoid(), beta, 1e-4)


@pytest.mark.parametrize(
    "B, T, H, HV, dtype, cu",
    [
        (1, 1024, 4, 4, BF16, None),
        (2, 2048, 8, 8, F16, None),
        (1, 1024, 2, 8, BF16, None),
        (1, 1000, 4, 4, BF16, [0, 256, 500, 1000]),
        (1, 2000, 8, 8, BF16, [0, 100, 300, 1200, 2000]),
    ],
)
def test_fla_flash_qla_backend(B, T, H, HV, dtype, cu):
    inputs = fla_inputs(B, T, H, HV, 128, dtype)
    if cu is None:
        o, expected = fidelta.gated_delta_rule(*inputs), recurrence(*inputs)[0]
    else:
        o, expected = fidelta.gated_delta_rule(*inputs, cu_seqlens=torch.tensor(cu)), packed(cu, *inputs)[0]
    assert_ratio("o", expected, o, 0.008)


# -------------------------------------------------------------------------------------------------- 5.1 fla, conv


FLA_CONV = [
    (2, 64, 128, 3, "silu", True, F32),
    (2, 128, 128, 4, "silu", False, F32),
    (2, 500, 1024, 3, "none", True, F32),
    (2, 1024, 1024, 4, "none", False, F32),
    (2, 64, 128, 3, "none", True, F16),
    (2, 128, 128, 4, "none", False, F16),
    (2, 2, 128, 4, "silu", True, F32),  # shorter than the filter
    (2, 3, 128, 4, "silu", True, F32),
    (2, 4, 128, 4, "silu", True, F32),
    (2, 2, 128, 3, "silu", True, F32),
]


def fla_conv_inputs(B, T, D, W, bias, dtype):
    x = torch.randn(B, T, D, dtype=dtype)
    return x, torch.randn(D, W, dtype=dtype), torch.randn(D, dtype=dtype) if bias else None


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("B, T, D, W, activation, bias, dtype", FLA_CONV)
def test_fla_conv(B, T, D, W, activation, bias, dtype, cached):
    """The cache has W columns, of which the oldest is never read."""
    x, weight, b = fla_conv_inputs(B, T, D, W, bias, dtype)
    cache = torch.randn(B, D, W, dtype=dtype) if cached else None
    expected = conv(x.transpose(1, 2), weight, b, activation == "silu", cache).transpose(1, 2).to(dtype)
    y, final = fidelta.causal_conv1d(
        x, weight, bias=b, activation=activation, initial_state=cache, return_state=True
    )
    assert_ratio("y", expected, y, 1e-3)
    before = torch.zeros(B, D, W, dtype=dtype) if cache is None else cache
    history = torch.cat([before, x.transpose(1, 2)], 2)
    assert torch.equal(final, history[..., history.shape[2] - final.shape[2] :])


@pytest.mark.parametrize("B, T, D, W, activation, bias, dtype", FLA_CONV[:6])
def test_fla_conv_decoding_token_by_token(B, T, D, W, activation, bias, dtype):
    T = min(T, 128)
    x, weight, b = fla_conv_inputs(B, T, D, W, bias, dtype)
    cache = torch.zeros(B, D, W, dtype=dtype)
    expected = conv(x.transpose(1, 2), weight, b, activation == "silu").transpose(1, 2).to(dtype)
    y = torch.cat(
        [
            fidelta.causal_conv1d_step(x[:, t : t + 1], weight, cache, bias=b, activation=activation)
            for t in range(T)
        ],
        1,
    )
    assert_ratio("y", expected, y, 1e-3)
    assert torch.equal(y, fidelta.causal_conv1d(x, weight, bias=b, activation=activation))


@pytest.mark.parametrize(
    "N, T, D, W, activation, bias, dtype",
    [
        (4, 500, 128, 3, "silu", True, F32),
        (4, 1024, 200, 4, "silu", False, F32),
        (4, 500, 128, 3, "none", True, F16),
        (4, 1024, 1024, 4, "none", False, F16),
        (3, 128, 64, 4, "silu", True, F32),
        (2, 3, 64, 4, "silu", True, F32),
        (2, 1024, 4096, 4, "silu", True, F16),
    ],
)
def test_fla_conv_varlen_with_cache(N, T, D, W, activation, bias, dtype):
    x, weight, b = fla_conv_inputs(1, T, D, W, bias, dtype)
    cuts = torch.randperm(T - 1)[: N - 1].sort().values + 1
    cu = [0, *cuts.tolist(), T]
    cache = torch.randn(len(cu) - 1, D, W, dtype=dtype)
    y, final = fidelta.causal_conv1d(
        x, weight, bias=b, activation=activation, cu_seqlens=torch.tensor(cu), initial_state=cache, return_state=True
    )
    for n, (first, end) in enumerate(zip(cu, cu[1:])):
        part = x[:, first:end].transpose(1, 2)
        expected = conv(part, weight, b, activation == "silu", cache[n : n + 1]).transpose(1, 2).to(dtype)
        assert_ratio(f"y of sequence {n}", expected, y[:, first:end], 1e-3)
        assert torch.equal(final[n], torch.cat([cache[n], part[0]], 1)[:, -final.shape[2] :])


@pytest.mark.parametrize("W", [3, 4])
def test_fla_conv_strided_and_sliced(W):
    """Every second token; q, k, v as slices of one packed projection."""
    wide = torch.randn(4, 128, 3 * 64)
    weight = torch.randn(64, W)
    for x in (wide[:, ::2, :64], wide[:, :, 64:128], wide[:, ::2, 128:]):
        expected = conv(x.transpose(1, 2), weight, None, True).transpose(1, 2)
        assert_ratio("y", expected, fidelta.causal_conv1d(x, weight, activation="silu"), 1e-3)


# --------------------------------------------------------------------------------------------- 5.2 vLLM, GPU grids


HIP_SEQUENCES = [[512], [32, 33, 64, 1], [1, 300, 64, 65, 200], [137, 1, 941, 512], [1] * 8]


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).tolist()


def hip_inputs(T, H, r, D, dtype):
    """Gates from a layer's initialisation: A in 0 .. 16, dt_bias the inverse softplus of a small step."""
    q, k = torch.randn(1, T, H, D, dtype=dtype), torch.randn(1, T, H, D, dtype=dtype)
    v = torch.randn(1, T, H * r, D, dtype=dtype)
    dt = torch.exp(torch.rand(H * r) * (math.log(0.1) - math.log(0.001)) + math.log(0.001)).clamp(min=1e-4)
    g = gates(torch.randn(1, T, H * r), torch.empty(H * r).uniform_(1e-4, 16).log(), dt + torch.log(-torch.expm1(-dt)))
    return q, k, v, g, torch.rand(1, T, H * r).sigmoid()


def normalised(x):
    return x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("lengths", HIP_SEQUENCES, ids=str)
@pytest.mark.parametrize("r, dtype", [(1, BF16), (2, BF16), (3, BF16), (4, BF16), (1, F16), (3, F16)])
def test_vllm_hip_grid(r, dtype, lengths):
    """Theirs has 8 key heads and 2e-2 against another kernel; 2 heads against the recurrence here."""
    cu = offsets(lengths)
    q, k, v, g, beta = hip_inputs(cu[-1], 2, r, 128, dtype)
    h0 = torch.randn(len(lengths), 2 * r, 128, 128)
    o, state = fidelta.gated_delta_rule(
        q, k, v, g, beta, qk_l2norm=True, cu_seqlens=torch.tensor(cu, dtype=torch.int32),
        initial_state=h0, return_state=True, state_layout="vk",
    )  # fmt: skip
    expected, final = packed(cu, normalised(q), normalised(k), v, g, beta, None, h0.transpose(2, 3))
    assert_ratio("o", expected, o, 2e-2)
    assert_ratio("state", final.transpose(2, 3), state, 2e-2)


@pytest.mark.parametrize("cut", [32, 33])
def test_vllm_hip_split(cut):
    """97 tokens in one call or two: 1e-3. Neither call may change the state that it was given."""
    q, k, v, g, beta = hip_inputs(97, 8, 2, 128, BF16)
    h0 = torch.randn(1, 16, 128, 128)
    kept = h0.clone()
    whole, final = fidelta.gated_delta_rule(
        q, k, v, g, beta, qk_l2norm=True, initial_state=h0, return_state=True
    )
    parts, state = [], h0
    for span in (slice(0, cut), slice(cut, 97)):
        part = [x[:, span] for x in (q, k, v, g, beta)]
        o, state = fidelta.gated_delta_rule(*part, qk_l2norm=True, initial_state=state, return_state=True)
        parts.append(o)
    assert torch.equal(h0, kept)
    assert_ratio("state", final, state, 1e-3)
    assert_ratio("o", whole, torch.cat(parts, 1), 1e-3)


@pytest.mark.parametrize("g, beta", [(0.0, 1.0), (-0.0003, 0.9997), (-4.0, 0.0)])
def test_vllm_hip_adversarial(g, beta):
    """65 tokens of nearly parallel keys: the worst case for the inverse."""
    T, H, D = 65, 8, 128
    k = F.normalize(torch.randn(1, 1, H, D) + 0.02 * torch.randn(1, T, H, D), dim=-1).to(BF16)
    q, v = torch.randn(1, T, H, D).to(BF16), torch.randn(1, T, H, D).to(BF16)
    g, beta = torch.full((1, T, H), g), torch.full((1, T, H), beta)
    h0 = torch.randn(1, H, D, D)
    o, state = fidelta.gated_delta_rule(
        q, k, v, g, beta, initial_state=h0, return_state=True, out_dtype=F32
    )
    expected, final = recurrence(q, k, v, g, beta, None, h0, F64)
    assert_close(expected, o, rtol=1e-2, atol=1e-5 * max(1, expected.abs().max()))
    assert_close(final, state, rtol=1e-3, atol=1e-5 * max(1, final.abs().max()))


def test_vllm_hip_no_state_is_zero_state_and_final_state_changes_nothing():
    q, k, v, g, beta = hip_inputs(100, 4, 2, 64, BF16)
    plain = fidelta.gated_delta_rule(q, k, v, g, beta, qk_l2norm=True)
    zero, _ = fidelta.gated_delta_rule(
        q, k, v, g, beta, qk_l2norm=True, initial_state=torch.zeros(1, 8, 64, 64), return_state=True
    )
    assert torch.equal(plain, zero)


def test_vllm_hip_canary_behind_the_output():
    q, k, v, g, beta = hip_inputs(100, 4, 2, 64, BF16)
    buffer = torch.full((102, 8, 64), float("nan"), dtype=BF16)
    fidelta.gated_delta_rule(q, k, v, g, beta, qk_l2norm=True, out=buffer[None, 1:101])
    assert torch.isfinite(buffer[1:101].float()).all()
    assert buffer[0].isnan().all() and buffer[101].isnan().all()


@pytest.mark.parametrize("lengths", [[4 * 64], [3 * 64, 5 * 64]], ids=str)
def test_vllm_chunk_block_states(lengths):
    """The state at each chunk border is the final state of a run that ends there; theirs allow 3e-2, here no bit."""
    cu = offsets(lengths)
    q, k, v, g, beta = fla_inputs(1, cu[-1], 4, 4, 64, BF16)
    at = [(n, c * 64) for n, length in enumerate(lengths) for c in range(length // 64 + 1)]
    *_, snapshots = fidelta.gated_delta_rule(
        q, k, v, g, beta, cu_seqlens=torch.tensor(cu), snapshot_positions=torch.tensor(at)
    )
    for (n, tokens), got in zip(at, snapshots):
        part = [x[:, cu[n] : cu[n] + tokens] for x in (q, k, v, g, beta)]
        _, final = fidelta.gated_delta_rule(*part, return_state=True)
        assert torch.equal(final[0], got), f"sequence {n} after {tokens} tokens"


# ------------------------------------------------------------------------------------------------- 5.2 vLLM on CPU


CPU_HEADS = [(2, 4, 32, 32), (4, 4, 64, 32)]


def cpu_inputs(B, T, H, HV, K, V):
    """Uniform 0 .. 1 in bfloat16, as theirs."""
    q, k = torch.rand(B, T, H, K, dtype=BF16), torch.rand(B, T, H, K, dtype=BF16)
    g = -torch.rand(B, T, HV)
    return q, k, torch.rand(B, T, HV, V, dtype=BF16), g, torch.rand(B, T, HV, dtype=BF16)


@pytest.mark.parametrize("lengths", [[1], [1, 2, 3], [63], [64], [65], [63, 64, 65], [127, 128, 129], [273]], ids=str)
@pytest.mark.parametrize("H, HV, K, V", CPU_HEADS)
def test_vllm_cpu_prefill(H, HV, K, V, lengths):
    cu = offsets(lengths)
    q, k, v, g, beta = cpu_inputs(1, cu[-1], H, HV, K, V)
    h0 = torch.rand(len(lengths), HV, K, V)
    o, state = fidelta.gated_delta_rule(
        q, k, v, g, beta, qk_l2norm=True, cu_seqlens=torch.tensor(cu, dtype=torch.int32), initial_state=h0,
        return_state=True,
    )  # fmt: skip
    expected, final = packed(cu, normalised(q), normalised(k), v, g, beta, None, h0)
    assert_close(expected, o, atol=1e-2, rtol=1e-2)
    assert_close(final, state, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("B", [1, 3, 5])
@pytest.mark.parametrize("H, HV, K, V", CPU_HEADS)
def test_vllm_cpu_decode(H, HV, K, V, B):
    q, k, v, _, _ = cpu_inputs(1, B, H, HV, K, V)
    a, b = torch.rand(1, B, HV, dtype=BF16), torch.rand(1, B, HV, dtype=BF16)
    A_log, dt_bias = torch.rand(HV), torch.rand(HV)
    pool = torch.rand(B + 3, HV, K, V)
    slots = torch.randperm(B + 3)[:B].to(torch.int32)
    before = pool.clone()
    o = fidelta.gated_delta_rule_step(
        q, k, v, a, b, pool, gate="raw", A_log=A_log, dt_bias=dt_bias, beta_kind="logit", qk_l2norm=True,
        cu_seqlens=torch.arange(B + 1, dtype=torch.int32), read_slots=slots,
    )  # fmt: skip
    expected, final = packed(
        range(B + 1), normalised(q), normalised(k), v, gates(a, A_log, dt_bias), b.float().sigmoid(), None, before[slots]
    )
    assert_close(expected, o, atol=1e-2, rtol=1e-2)
    assert_close(final, pool[slots], atol=1e-2, rtol=1e-2)
    untouched = [s for s in range(B + 3) if s not in slots.tolist()]
    assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("T, cut", [(128, 64), (145, 64), (145, 73), (273, 128), (192, 65)])
@pytest.mark.parametrize("H, HV, K, V", CPU_HEADS)
def test_vllm_cpu_two_calls(H, HV, K, V, T, cut):
    q, k, v, g, beta = cpu_inputs(1, T, H, HV, K, V)
    whole, final = fidelta.gated_delta_rule(q, k, v, g, beta, qk_l2norm=True, return_state=True)
    parts, state = [], None
    for span in (slice(0, cut), slice(cut, T)):
        part = [x[:, span] for x in (q, k, v, g, beta)]
        o, state = fidelta.gated_delta_rule(*part, qk_l2norm=True, initial_state=state, return_state=True)
        parts.append(o)
    assert_close(final, state, atol=1e-3, rtol=1e-3)
    assert_close(whole, torch.cat(parts, 1), atol=2e-2, rtol=2e-2)
    if cut % fidelta.CHUNK == 0:
        assert torch.equal(final, state) and torch.equal(whole, torch.cat(parts, 1))


# -------------------------------------------------------------------------------------------------- 5.2 vLLM, conv


@pytest.mark.parametrize("dim", [2048, 2064, 4096])
def test_vllm_conv_update(dim):
    x, weight, bias = torch.randn(2, dim, 1, dtype=BF16), torch.randn(dim, 4, dtype=BF16), torch.randn(dim, dtype=BF16)
    state = torch.randn(2, dim, 3, dtype=BF16)
    before = state.clone()
    y = fidelta.causal_conv1d_step(x, weight, state, bias=bias, activation="silu", layout="bdt")
    assert_close(conv(x, weight, bias, True, before).to(BF16), y, **CONV_TOLERANCE[BF16])
    assert torch.equal(state, torch.cat([before, x], 2)[..., -3:])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("dim, W, T", [(2064, 3, 1), (2064, 4, 3), (4096, 4, 1), (4096, 3, 3)])
def test_vllm_conv_update_gather(dim, W, T, dtype):
    """3 sequences and 5 padding rows over a pool of 30: used slots equal in every bit, unused ones untouched."""
    B, pads = 3, 5
    x = torch.randn(B + pads, dim, T, dtype=dtype)
    weight, bias = torch.randn(dim, W, dtype=dtype), torch.randn(dim, dtype=dtype)
    pool = torch.randn(10 * B, dim, W - 1, dtype=dtype)
    before = pool.clone()
    slots = torch.cat([torch.randperm(10 * B)[:B], torch.full((pads,), -1)]).to(torch.int32)
    y = fidelta.causal_conv1d_step(
        x, weight, pool, bias=bias, activation="silu", layout="bdt", read_slots=slots
    )
    used = slots[:B].long()
    expected = conv(x[:B], weight, bias, True, before[used]).to(dtype)
    assert_close(expected, y[:B], **CONV_TOLERANCE[dtype])
    assert (y[B:] == 0).all()
    assert torch.equal(pool[used], torch.cat([before[used], x[:B]], 2)[..., -(W - 1) :])
    unused = torch.ones(10 * B, dtype=torch.bool)
    unused[used] = False
    assert torch.equal(pool[unused], before[unused])


@pytest.mark.parametrize("pieces", [4, 10])
@pytest.mark.parametrize("dim, T", [(64, 8), (64, 249), (64, 4096), (4096, 249)])
def test_vllm_conv_varlen_prefill(dim, T, pieces):
    """Random cuts, three padding rows, random has_initial_state, x a slice of a wider channel-last tensor."""
    pads, W = 3, 4
    cuts = torch.randint(0, T + 1, (pieces + pads - 1,)).sort().values
    cu = [0, *cuts.tolist(), T]
    N = len(cu) - 1
    slots = torch.randperm(3 * N)[:N]
    slots[torch.randperm(N)[:pads]] = -1
    has = torch.rand(N) > 0.5
    x = torch.randn(1, T, dim + 64, dtype=BF16)[:, :, 32 : 32 + dim].transpose(1, 2)
    weight, bias = torch.randn(dim, W, dtype=BF16), torch.randn(dim, dtype=BF16)
    pool = torch.randn(3 * N, dim, W - 1, dtype=BF16)
    before, pooled = pool.clone(), pool
    y, _ = fidelta.causal_conv1d(
        x, weight, bias=bias, activation="silu", layout="bdt", cu_seqlens=torch.tensor(cu, dtype=torch.int32),
        initial_state=pool, final_state=pooled, read_slots=slots, write_slots=slots, has_initial_state=has,
    )  # fmt: skip
    expected_pool = before.clone()
    for n, (first, end) in enumerate(zip(cu, cu[1:])):
        part = x[:, :, first:end]
        if slots[n] < 0:
            assert (y[:, :, first:end] == 0).all()
            continue
        history = before[slots[n]][None] if has[n] else torch.zeros(1, dim, W - 1, dtype=BF16)
        assert_close(conv(part, weight, bias, True, history).to(BF16), y[:, :, first:end], **CONV_TOLERANCE[BF16])
        expected_pool[slots[n]] = torch.cat([history, part], 2)[0, :, -(W - 1) :]
    assert torch.equal(pool, expected_pool)


@pytest.mark.parametrize(
    "T, W, bias, silu, dtype, channel_last",
    [
        (1024, 4, True, True, BF16, True),
        (127, 4, False, True, BF16, True),
        (127, 4, True, False, BF16, True),
        (127, 2, True, True, BF16, True),
        (127, 3, True, True, BF16, True),
        (127, 5, True, True, BF16, True),
        (127, 4, True, True, F32, True),
        (127, 4, True, True, BF16, False),
        (2, 5, True, True, BF16, True),
    ],
)
@pytest.mark.parametrize("initial", [False, True])
def test_vllm_conv_contract(T, W, bias, silu, dtype, channel_last, initial):
    dim = 256
    x = torch.randn(1, T, dim, dtype=dtype).transpose(1, 2) if channel_last else torch.randn(1, dim, T, dtype=dtype)
    weight, b = torch.randn(dim, W, dtype=dtype), torch.randn(dim, dtype=dtype) if bias else None
    history = torch.randn(1, dim, W - 1, dtype=dtype) if initial else None
    y, final = fidelta.causal_conv1d(
        x, weight, bias=b, activation="silu" if silu else "none", layout="bdt", initial_state=history, return_state=True
    )
    assert_close(conv(x, weight, b, silu, history).to(dtype), y, **CONV_TOLERANCE[dtype])
    before = torch.zeros(1, dim, W - 1, dtype=dtype) if history is None else history
    assert torch.equal(final, torch.cat([before, x], 2)[..., -(W - 1) :])


@pytest.mark.parametrize("lengths, null", [((17, 31, 9), None), ((17, 31, 9, 13), 2)], ids=["plain", "null row"])
def test_vllm_conv_contract_varlen(lengths, null):
    dim, W, cu = 256, 4, offsets(list(lengths))
    x, weight = torch.randn(1, cu[-1], dim, dtype=BF16), torch.randn(dim, W, dtype=BF16)
    pool = torch.randn(8, dim, W - 1, dtype=BF16)
    before = pool.clone()
    slots = torch.tensor([3, 1, 5, 7][: len(lengths)])
    if null is not None:
        slots[null] = -1
    y, _ = fidelta.causal_conv1d(
        x, weight, activation="silu", cu_seqlens=torch.tensor(cu), initial_state=pool, final_state=pool,
        read_slots=slots, write_slots=slots,
    )  # fmt: skip
    for n, (first, end) in enumerate(zip(cu, cu[1:])):
        part = x[:, first:end].transpose(1, 2)
        if n == null:
            assert (y[:, first:end] == 0).all()
            continue
        expected = conv(part, weight, None, True, before[slots[n]][None]).transpose(1, 2).to(BF16)
        assert_close(expected, y[:, first:end], **CONV_TOLERANCE[BF16])
        assert torch.equal(pool[slots[n]], torch.cat([before[slots[n]], part[0]], 1)[:, -(W - 1) :])


@pytest.mark.parametrize("T", [1, 2, 4])
def test_vllm_conv_speculative_update(T):
    """The taps of the first new token start at the column after the accepted drafts."""
    B, dim, W = 4, 256, 4
    L = W - 1 + T - 1
    weight, x = torch.randn(dim, W, dtype=BF16), torch.randn(B, dim, T, dtype=BF16)
    state = torch.randn(B, dim, L, dtype=BF16)
    before = state.clone()
    accepted = torch.randint(1, T + 1, (B,))
    y = fidelta.causal_conv1d_step(
        x, weight, state, activation="silu", layout="bdt", history="draft", offsets=accepted - 1
    )
    for n in range(B):
        first = int(accepted[n]) - 1
        window = before[n : n + 1, :, first : first + W - 1]
        assert_close(conv(x[n : n + 1], weight, None, True, window).to(BF16), y[n : n + 1], **CONV_TOLERANCE[BF16])
        assert torch.equal(state[n], torch.cat([window[0], x[n]], 1)[:, -L:])


# ------------------------------------------------------------------------------------------- 5.3 causal-conv1d (Dao)


DAO_LENGTHS = [1, 2, 8, 16, 32, 64, 128, 129, 130, 151, 256, 372, 512, 784, 1024, 1134, 2048, 4096]


@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("W", [2, 3, 4])
def test_dao_fn(W, dtype, channel_last):
    """Every length at 64 channels; the wide size at a few. Bias, silu, initial state alternate with the length."""
    grid = [(64, T) for T in DAO_LENGTHS] + [(4128, T) for T in (1, 8, 129, 512)]
    for n, (dim, T) in enumerate(grid):
        bias, silu, initial = n % 2 == 0, n % 3 != 0, n % 4 < 2
        if channel_last:
            x = torch.randn(2, T, 4096 // 64 + dim, dtype=dtype)[..., 8 : 8 + dim].transpose(1, 2)
        else:
            x = torch.randn(2, 16 + dim, T, dtype=dtype)[:, 8 : 8 + dim]
        weight, b = torch.randn(dim, W), torch.randn(dim) if bias else None
        history = torch.randn(2, W - 1, dim, dtype=dtype).transpose(1, 2) if initial else None
        y, final = fidelta.causal_conv1d(
            x, weight, bias=b, activation="silu" if silu else "none", layout="bdt",
            initial_state=history, return_state=True,
        )  # fmt: skip
        assert_close(conv(x, weight, b, silu, history).to(dtype), y, **CONV_TOLERANCE[dtype])
        before = torch.zeros(2, dim, W - 1, dtype=dtype) if history is None else history
        assert torch.equal(final, torch.cat([before, x], 2)[..., -(W - 1) :]), f"state at T = {T}"


@pytest.mark.parametrize("circular", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("W", [2, 3, 4])
def test_dao_update(W, dtype, circular):
    """Histories of W-1 to W+9 columns; with positions, a ring. The state is equal in every bit."""
    for n, (dim, T) in enumerate([(2048, 1), (2064, 4), (4096, 5), (2064, 1), (2048, 4)]):
        B, L = 8, W - 1 + int(torch.randint(0, 11, ()))
        if circular:
            L = max(L, T)
        bias, silu = n % 2 == 0, n % 3 != 0
        x = torch.randn(B, T, dim, dtype=dtype).transpose(1, 2)
        weight, b = torch.randn(dim, W), torch.randn(dim) if bias else None
        state = torch.randn(B, L, dim, dtype=dtype).transpose(1, 2)
        before = state.clone()
        positions = torch.randint(0, 1024, (B,), dtype=torch.int32)
        y = fidelta.causal_conv1d_step(
            x, weight, state, bias=b, activation="silu" if silu else "none", layout="bdt",
            history="circular" if circular else "linear", positions=positions if circular else None,
        )  # fmt: skip
        if circular:
            taps = (positions[:, None] + torch.arange(-(W - 1), 0)) % L
            window = before.gather(2, taps[:, None].expand(-1, dim, -1))
            after = before.clone()
            for t in range(T):
                column = (positions + t) % L
                after.scatter_(2, column[:, None, None].expand(-1, dim, 1).long(), x[:, :, t : t + 1])
        else:
            window, after = before, torch.cat([before, x], 2)[..., -L:]
        assert_close(conv(x, weight, b, silu, window).to(dtype), y, **CONV_TOLERANCE[dtype])
        assert torch.equal(state, after), f"state at T = {T}, {L} columns"


@pytest.mark.parametrize("T", [1, 4, 5])
def test_dao_update_gather_with_padding(T):
    B, dim, W = 16, 2048, 4
    x, weight = torch.randn(B, dim, T, dtype=BF16), torch.randn(dim, W)
    pool = torch.randn(10 * B, dim, W + 2, dtype=BF16)
    before = pool.clone()
    slots = torch.randperm(10 * B)[:B].to(torch.int32)
    slots[3::4] = -1
    y = fidelta.causal_conv1d_step(x, weight, pool, activation="silu", layout="bdt", read_slots=slots)
    real = slots >= 0
    used = slots[real].long()
    assert (y[~real] == 0).all()
    assert_close(conv(x[real], weight, None, True, before[used]).to(BF16), y[real], **CONV_TOLERANCE[BF16])
    expected = before.clone()
    expected[used] = torch.cat([before[used], x[real]], 2)[..., -(W + 2) :]
    assert torch.equal(pool, expected)


def test_dao_varlen_states():
    """The last columns of each packed sequence, zeros before its first token."""
    lengths, L, dim = [5, 1, 9, 3], 6, 64
    cu = offsets(lengths)
    x = torch.randn(1, cu[-1], dim, dtype=BF16)
    _, final = fidelta.causal_conv1d(
        x, torch.randn(dim, 4), cu_seqlens=torch.tensor(cu), final_state=torch.empty(4, dim, L, dtype=BF16)
    )
    for n, (first, end) in enumerate(zip(cu, cu[1:])):
        wanted = torch.cat([torch.zeros(dim, L, dtype=BF16), x[0, first:end].T], 1)[:, -L:]
        assert torch.equal(final[n], wanted)


def test_dao_repeats_are_bit_equal():
    x, weight = torch.randn(2, 4096 // 8, 64, dtype=BF16), torch.randn(64, 4)
    first = fidelta.causal_conv1d(x, weight, activation="silu")
    for _ in range(200):
        assert torch.equal(first, fidelta.causal_conv1d(x, weight, activation="silu"))


# --------------------------------------------------------------------------------------------------- 5.4 FlashInfer


INFER_HEADS = [(1, 1, 1), (4, 1, 1), (3, 3, 3), (6, 2, 2), (1, 1, 2), (2, 2, 4), (16, 16, 32), (16, 16, 64)]
INFER_TOLERANCE = {BF16: ((1e-2, 1e-2), (5e-3, 1e-3)), F16: ((2e-3, 1e-3), (1e-3, 1e-4))}


def infer_inputs(T, Hq, Hk, Hv, dtype, alpha=True, beta=True):
    """Uniform within 0.25 of random means, keys normalised, the decay factor and beta uniform. Where there are more
    query than value heads, keys and values are shared by views of stride 0."""
    q = (torch.rand(1, T, Hq, 128) - 0.5) * 0.5 + torch.randn(1, 1, Hq, 1) * 0.1
    k = F.normalize((torch.rand(1, T, Hk, 128) - 0.5) * 0.5 + torch.randn(1, 1, Hk, 1) * 0.1, dim=-1)
    v = (torch.rand(1, T, Hv, 128) - 0.5) * 0.5 + torch.randn(1, 1, Hv, 1) * 0.1
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    HO = max(Hq, Hv)
    if Hq > Hk:
        share = [x[:, :, :, None].expand(-1, -1, -1, Hq // Hk, -1).reshape(1, T, Hq, 128) for x in (k, v)]
        k, v = share if Hk > 1 else [x.expand(-1, -1, Hq, -1) for x in (k, v)]
    g = torch.rand(1, T, HO) if alpha else torch.ones(1, 1, 1).expand(1, T, HO)
    b = torch.rand(1, T, HO) if beta else torch.ones(1, 1, 1).expand(1, T, HO)
    return q, k, v, g, b


def infer_check(lengths, heads, dtype, scale=None, alpha=True, beta=True, initial=True):
    cu = offsets(lengths)
    q, k, v, factor, b = infer_inputs(cu[-1], *heads, dtype, alpha, beta)
    h0 = torch.randn(len(lengths), v.shape[2], 128, 128) * 0.1 if initial else None
    o, state = fidelta.gated_delta_rule(
        q, k, v, factor, b, gate="factor", scale=scale, cu_seqlens=torch.tensor(cu), initial_state=h0,
        return_state=True, state_layout="vk",
    )  # fmt: skip
    first = None if h0 is None else h0.transpose(2, 3)
    expected, final = packed(cu, q, k, v, factor.log(), b, scale, first)
    (atol, rtol), (state_atol, state_rtol) = INFER_TOLERANCE[dtype]
    assert_close(expected.to(dtype), o, atol, rtol)
    assert_close(final.transpose(2, 3), state, state_atol, state_rtol)


@pytest.mark.parametrize("heads", INFER_HEADS, ids=str)
@pytest.mark.parametrize("n, lengths", list(enumerate([[64], [128], [256], [256, 256], [64, 128, 512]])), ids=str)
def test_flashinfer_prefill(n, lengths, heads):
    for dtype in (BF16, F16):
        infer_check(lengths, heads, dtype, scale=[1.0, None][n % 2], alpha=n != 1, beta=n != 2, initial=n != 3)


@pytest.mark.parametrize("heads", [(1, 1, 1), (4, 1, 1), (2, 2, 4), (16, 16, 32)], ids=str)
@pytest.mark.parametrize(
    "lengths", [[31], [61], [91], [121], [251], [511, 501], [31, 63, 93, 123, 150, 500]], ids=str
)
def test_flashinfer_nonfull(lengths, heads):
    infer_check(lengths, heads, BF16)


@pytest.mark.parametrize("heads", [(1, 1, 1), (16, 16, 64)], ids=str)
@pytest.mark.parametrize("cu", [[0, 256, 256, 511], [0, 0, 255], [0, 256, 256], [0, 0]], ids=str)
def test_flashinfer_zero_length_sequence(cu, heads):
    q, k, v, g, b = infer_inputs(cu[-1], *heads, BF16)
    h0 = torch.randn(len(cu) - 1, heads[2], 128, 128)
    o, state = fidelta.gated_delta_rule(
        q, k, v, g, b, gate="factor", cu_seqlens=torch.tensor(cu), initial_state=h0, return_state=True
    )
    assert torch.isfinite(o.float()).all()
    for n, (first, end) in enumerate(zip(cu, cu[1:])):
        assert torch.equal(state[n], h0[n]) == (first == end)


@pytest.mark.parametrize(
    "one, two",
    [
        ([61], [128]),
        ([128], [61]),
        ([511, 501], [256, 256]),
        ([256, 256], [511, 501]),
        ([123, 150, 500], [64, 128, 512]),
        ([64, 128, 512], [123, 150, 500]),
    ],
    ids=str,
)
def test_flashinfer_chunked_prefill(one, two):
    """The state of a first call handed to a second; against the recurrence over the whole."""
    heads, dtype = (2, 2, 4), BF16
    calls = [infer_inputs(sum(lengths), *heads, dtype) for lengths in (one, two)]
    state, outputs = None, []
    for lengths, inputs in zip((one, two), calls):
        o, state = fidelta.gated_delta_rule(
            *inputs, gate="factor", cu_seqlens=torch.tensor(offsets(lengths)), initial_state=state, return_state=True
        )
        outputs.append(o)
    (atol, rtol), (state_atol, state_rtol) = INFER_TOLERANCE[dtype]
    first, second = offsets(one), offsets(two)
    for n in range(len(one)):
        spans = [slice(first[n], first[n + 1]), slice(second[n], second[n + 1])]
        q, k, v, g, b = (torch.cat([x[:, s] for x, s in zip(pair, spans)], 1) for pair in zip(*calls))
        expected, final = recurrence(q, k, v, g.log(), b)
        got = torch.cat([o[:, s] for o, s in zip(outputs, spans)], 1)
        assert_close(expected.to(dtype), got, atol, rtol)
        assert_close(final[0], state[n], state_atol, state_rtol)


@pytest.mark.parametrize("every", [64, 128])
@pytest.mark.parametrize("lengths", [[256], [128, 256, 512]], ids=str)
def test_flashinfer_checkpoints(lengths, every):
    """A state every so many tokens of each sequence, in order: what a run that ends there leaves."""
    cu = offsets(lengths)
    inputs = infer_inputs(cu[-1], 2, 2, 4, BF16)
    *_, snapshots = fidelta.gated_delta_rule(
        *inputs, gate="factor", cu_seqlens=torch.tensor(cu), snapshot_every=every // fidelta.CHUNK
    )
    row = 0
    for n, length in enumerate(lengths):
        for tokens in range(every, length + 1, every):
            part = [x[:, cu[n] : cu[n] + tokens] for x in inputs]
            _, final = fidelta.gated_delta_rule(*part, gate="factor", return_state=True)
            assert torch.equal(snapshots[row], final[0]), f"sequence {n} after {tokens} tokens"
            row += 1
    assert row == len(snapshots)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_flashinfer_state_dtype(dtype):
    q, k, v, g, b = infer_inputs(300, 2, 2, 4, BF16)
    h0 = (torch.randn(1, 4, 128, 128) * 0.1).to(dtype)
    o, state = fidelta.gated_delta_rule(
        q, k, v, g, b, gate="factor", initial_state=h0, return_state=True, state_dtype=dtype
    )
    expected, final = recurrence(q, k, v, g.log(), b, None, h0)
    assert state.dtype == dtype
    assert_close(expected, o, 5e-2, 5e-2)
    assert_close(final, state, 5e-2, 5e-2)


@pytest.mark.parametrize("pad", [0, 96])
@pytest.mark.parametrize("H", [8, 16])
@pytest.mark.parametrize("lengths", [[128], [256], [128, 192, 64], [64, 512]], ids=str)
def test_flashinfer_state_indices(lengths, H, pad):
    """A pool read and written by slot, its rows `pad` elements apart, against one state a sequence: every bit."""
    cu, N = offsets(lengths), len(lengths)
    inputs = infer_inputs(cu[-1], H, H, H, BF16)
    h0 = torch.randn(N, H, 128, 128)
    options = dict(gate="factor", cu_seqlens=torch.tensor(cu))
    o, state = fidelta.gated_delta_rule(*inputs, initial_state=h0, return_state=True, **options)
    rows = torch.full((N + 3, H * 128 * 128 + pad), float("nan"))
    pool = rows[:, : H * 128 * 128].unflatten(1, (H, 128, 128))
    slots = torch.randperm(N + 3)[:N]
    pool[slots] = h0
    before = rows.clone()
    pooled = fidelta.gated_delta_rule(
        *inputs, initial_state=pool, final_state=pool, read_slots=slots, write_slots=slots, **options
    )[0]
    assert torch.equal(o, pooled)
    assert torch.equal(pool[slots], state)
    others = [s for s in range(N + 3) if s not in slots.tolist()]
    assert torch.equal(rows[others].isnan(), before[others].isnan())
    assert rows[:, H * 128 * 128 :].isnan().all()


def infer_decode_inputs(B, T, dtype=BF16):
    q, k = torch.randn(B, T, 16, 128, dtype=dtype), torch.randn(B, T, 16, 128, dtype=dtype)
    v = torch.randn(B, T, 32, 128, dtype=dtype)
    a, b = torch.randn(B, T, 32, dtype=dtype) * 0.1, torch.randn(B, T, 32, dtype=dtype)
    raw = dict(
        gate="raw", A_log=torch.randn(32) * 0.1, dt_bias=torch.randn(32) * 0.1, beta_kind="logit", qk_l2norm=True
    )
    return (q, k, v, a, b), raw


def infer_decode_expected(inputs, raw, state):
    q, k, v, a, b = inputs
    g = gates(a, raw["A_log"], raw["dt_bias"])
    return recurrence(normalised(q), normalised(k), v, g, b.float().sigmoid(), None, state)


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("B", [1, 4, 16, 32])
def test_flashinfer_decode(B, layout):
    inputs, raw = infer_decode_inputs(B, 1)
    state = torch.randn(B, 32, 128, 128) * 0.1
    expected, final = infer_decode_expected(inputs, raw, state if layout == "kv" else state.transpose(2, 3))
    o = fidelta.gated_delta_rule_step(*inputs, state, state_layout=layout, **raw)
    assert_close(expected.to(BF16), o, atol=0.016, rtol=5e-3)
    assert_close(final if layout == "kv" else final.transpose(2, 3), state, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("B, gap", [(1, 2), (4, 3), (16, 1), (4, "padded")])
def test_flashinfer_decode_pool(B, gap, index):
    """Negative slots, pages with gaps between the slots, separate write slots."""
    inputs, raw = infer_decode_inputs(B, 1)
    if gap == "padded":
        pool = torch.randn(3 * B, 32 * 128 * 128 + 16384)[:, : 32 * 128 * 128].unflatten(1, (32, 128, 128))
    else:
        pool = torch.randn(3 * B * gap, 32, 128, 128)[::gap]
    pool *= 0.1
    before = pool.clone()
    slots = torch.randperm(3 * B)
    read, write = slots[:B].to(index), slots[B : 2 * B].to(index)
    if B > 1:
        read[1] = -1
    expected, final = infer_decode_expected(inputs, raw, before[read.clamp(min=0).long()])
    o = fidelta.gated_delta_rule_step(*inputs, pool, read_slots=read, write_slots=write, **raw)
    wanted = before.clone()
    for n in range(B):
        if read[n] < 0:
            assert (o[n] == 0).all()
            continue
        assert_close(expected[n].to(BF16), o[n], atol=0.016, rtol=5e-3)
        assert_close(final[n], pool[write[n]], atol=5e-3, rtol=5e-3)
        wanted[write[n]] = pool[write[n]]
    assert torch.equal(pool, wanted), "a slot changed that no sequence writes"


def test_flashinfer_decode_all_padding():
    inputs, raw = infer_decode_inputs(4, 1)
    pool = torch.full((2, 32, 128, 128), float("nan"))
    o = fidelta.gated_delta_rule_step(*inputs, pool, read_slots=torch.full((4,), -1), **raw)
    assert (o == 0).all() and pool.isnan().all()


def test_flashinfer_decode_bf16_state():
    inputs, raw = infer_decode_inputs(4, 1)
    state = (torch.randn(4, 32, 128, 128) * 0.1).to(BF16)
    expected, final = infer_decode_expected(inputs, raw, state)
    o = fidelta.gated_delta_rule_step(*inputs, state, **raw)
    assert_close(expected.to(BF16), o, atol=0.016, rtol=5e-3)
    assert_close(final, state, atol=0.016, rtol=0.016)


@pytest.mark.parametrize("T", [2, 4, 8])
@pytest.mark.parametrize("B", [1, 4, 8])
def test_flashinfer_mtp(B, T):
    """Several tokens a sequence: their per-token states, and the same scattered into slots of a pool."""
    inputs, raw = infer_decode_inputs(B, T)
    pool = torch.randn(B + B * T, 32, 128, 128) * 0.1
    before = pool.clone()
    slots = torch.randperm(B + B * T)
    read, write = slots[:B], slots[B:].reshape(B, T)
    o = fidelta.gated_delta_rule_step(*inputs, pool, read_slots=read, write_slots=write, **raw)
    state = before[read]
    o_states, states = fidelta.gated_delta_rule_step(*inputs, state, return_token_states=True, **raw)
    assert torch.equal(o, o_states)
    S = before[read]
    for t in range(T):
        expected, S = infer_decode_expected([x[:, t : t + 1] for x in inputs], raw, S)
        assert_close(expected.to(BF16), o[:, t : t + 1], atol=0.016, rtol=5e-3)
        assert_close(S, states[:, t], atol=1e-3, rtol=1e-3)
        assert torch.equal(states[:, t], pool[write[:, t]])
    assert torch.equal(state, states[:, -1])
    assert torch.equal(pool[read], before[read])


def test_flashinfer_decode_saturated_gate():
    """Softplus in its linear part and a decay that leaves nothing."""
    inputs, raw = infer_decode_inputs(2, 1)
    q, k, v, a, b = inputs
    inputs = q, k, v, torch.full_like(a, 30.0), b
    raw["A_log"] = torch.full((32,), math.log(16.0))
    state = torch.randn(2, 32, 128, 128)
    expected, final = infer_decode_expected(inputs, raw, state)
    o = fidelta.gated_delta_rule_step(*inputs, state, **raw)
    assert_close(expected.to(BF16), o, atol=5e-3, rtol=5e-3)
    assert_close(final, state, atol=5e-3, rtol=5e-3)


# ---------------------------------------------------------------------------------------------------- 5.5 FlashQLA


@pytest.mark.parametrize(
    "B, T, H, HV, cu",
    [
        (1, 2048, 4, 4, None),
        (1, 2048, 2, 8, None),
        (3, 1024, 4, 4, None),
        (1, 1024, 4, 16, None),
        (1, 2048, 4, 8, [0, 210, 441, 635, 1126, 1512, 2048]),
        (1, 1000, 4, 16, [0, 211, 985]),
        (1, 128, 4, 8, [0, 47, 128]),
        (1, 1024, 2, 4, [0, 17, 383, 510, 767, 1024]),
        (1, 209, 16, 32, [0, 73, 115, 209]),
        (1, 363, 2, 4, list(range(0, 364, 33))),
    ],
)
def test_flash_qla(B, T, H, HV, cu):
    """The largest and the smallest decay rate side by side; relative L2 against float64."""
    q, k = (normalised(torch.randn(B, T, H, 128)).to(BF16) for _ in range(2))
    v = torch.randn(B, T, HV, 128).to(BF16)
    A = 16 * torch.rand(HV)
    A[0], A[-1] = 0, 16
    g = -A * F.softplus(0.5 * torch.randn(B, T, HV) + 1)
    beta = torch.rand(B, T, HV)
    end = T if cu is None else cu[-1]
    h0 = torch.randn(B if cu is None else len(cu) - 1, HV, 128, 128)
    if cu is None:
        expected, final = recurrence(q, k, v, g, beta, None, h0, F64)
        o, state = fidelta.gated_delta_rule(q, k, v, g, beta, initial_state=h0, return_state=True)
    else:
        # Tokens past the last boundary are no sequence's; the contract wants them cut off, so that none is forgotten.
        q, k, v, g, beta = (x[:, :end] for x in (q, k, v, g, beta))
        expected, final = packed(cu, q, k, v, g, beta, None, h0, F64)
        o, state = fidelta.gated_delta_rule(
            q, k, v, g, beta, cu_seqlens=torch.tensor(cu), initial_state=h0, return_state=True
        )
    for name, wanted, got in (("o", expected, o), ("state", final, state)):
        assert torch.isfinite(got.float()).all()
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error <= 0.02, f"{name}: relative L2 {error:.3g}"
