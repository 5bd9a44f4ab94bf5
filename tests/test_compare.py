"""fidelta.compare finds what is wrong and says where; the care of states."""

import json
import zlib

import numpy as np
import pytest
from conftest import BF16, F32, delta_inputs, states

import fidelta
from fidelta import reference


@pytest.fixture
def inputs(rng):
    return {**delta_inputs(rng, B=2, T=150, H=1, HV=3, K=8, V=12), "return_state": True}


def test_our_kernels_agree(inputs):
    report = fidelta.compare("gated_delta_rule", ["fidelta", "fidelta/scalar", "reference"], inputs, repeat=1)
    assert report.ok and report["fidelta"].outputs["o"].rms < 5e-6 and report["reference"].outputs["o"].rms == 0
    assert set(report["fidelta"].outputs) == {"o", "state"} and report["fidelta"].first is None
    assert report["fidelta"].seconds > 0 and "none" in str(report)


def test_the_first_divergence_is_found(inputs):
    def wrong(**inputs):
        o, state = fidelta.gated_delta_rule(**inputs)
        o[1, 130:, 2] *= 1.5
        o[0, 140, 1, 3] = np.nan
        return o, state

    result = fidelta.compare(fidelta.gated_delta_rule, {"wrong": wrong}, inputs)["wrong"]
    where = {key: result.first[key] for key in ("sequence", "token", "head", "chunk")}
    assert where == {"sequence": 1, "token": 130, "head": 2, "chunk": 2}
    assert result.outputs["o"].nan == 1 and not result.ok and result.outputs["state"].ok
    assert result.map.shape == (150, 3) and result.map[129, 2] < 1e-5 < result.map[130, 2] and np.isinf(result.map[140, 1])


def test_the_first_diverging_index_of_an_op_without_time(rng):
    x = rng.standard_normal((4, 5, 8)).astype(F32)

    def row(x):
        y = fidelta.l2norm(x)
        y[2, 3] = np.nan
        return y

    wrong = {"nan": lambda x: np.full_like(x, np.nan), "inf": lambda x: np.full_like(x, np.inf), "row": row,
             "minus": lambda x: -fidelta.l2norm(x)}
    report = fidelta.compare("l2norm", {**wrong, "fidelta": "fidelta"}, {"x": x}, repeat=1)
    found = {name: report[name].first and report[name].first["index"] for name in report.results}
    assert found == {"nan": [0, 0, 0], "inf": [0, 0, 0], "row": [2, 3, 0], "minus": [0, 0, 0], "fidelta": None}
    assert all(np.isnan(report[name].outputs["y"].cosine) for name in ("nan", "inf", "row"))
    assert report["minus"].outputs["y"].cosine == pytest.approx(-1) and report["fidelta"].ok
    assert not any(report[name].ok for name in wrong)
    assert "index [2, 3, 0]" in str(report) and " nan " in str(report)


def test_packed_sequences_count_their_own_tokens(rng):
    x = {**delta_inputs(rng, T=150, H=1, HV=1, K=8, V=8), "cu_seqlens": np.array([0, 10, 10, 150])}

    def wrong(**inputs):
        o = fidelta.gated_delta_rule(**inputs)
        o[0, 80] += 1
        return o

    first = fidelta.compare("gated_delta_rule", {"wrong": wrong}, x)["wrong"].first
    assert (first["sequence"], first["token"], first["chunk"], first["column"]) == (2, 70, 1, 80)


def test_the_first_diverging_stage_is_found(inputs):
    def staged(**inputs):
        inputs.pop("return_state")
        stages = reference.gated_delta_rule_stages(**inputs, chunk_size=32)
        stages["U"][0, 40, 1] += 0.1
        stages["v_new"] = stages["v_new"] * 1.1
        return stages

    result = fidelta.compare("gated_delta_rule", {"staged": staged}, inputs)["staged"]
    assert result.first_stage == "U" and result.stages["T"].rms == 0 and not result.stages["v_new"].ok
    assert result.outputs["o"].rms < 1e-12 and result.outputs["state"].rms < 1e-12

    inputs.pop("return_state")
    given = {"fidelta": {"gamma": reference.gated_delta_rule_stages(**inputs)["gamma"] + 1}}
    report = fidelta.compare("gated_delta_rule", ["fidelta"], inputs, stages=given)
    assert report["fidelta"].first_stage == "gamma" and "stage gamma" in str(report)


def test_failures_are_reported(inputs):
    def broken(**inputs):
        raise RuntimeError("no such device")

    report = fidelta.compare("gated_delta_rule", {"broken": broken, "short": lambda **inputs: inputs["v"][:, 1:]}, inputs)
    assert not report.ok and report["broken"].failure == "RuntimeError: no such device"
    assert "expected (2, 150, 3, 12)" in report["short"].failure and "no such device" in str(report)
    with pytest.raises(ValueError, match="compare: implementation 'cuda' is unknown"):
        fidelta.compare("gated_delta_rule", ["cuda"], inputs)
    with pytest.raises(ValueError, match="compare: op is 'delta'"):
        fidelta.compare("delta", ["fidelta"], inputs)


def test_steps_are_compared_with_their_states(rng):
    x = {**delta_inputs(rng, B=2, T=3, H=1, HV=2, K=8, V=8, dtype=BF16), "state": states(rng, 2, 2, 8, 8)}
    before = x["state"].copy()
    report = fidelta.compare("gated_delta_rule_step", ["fidelta"], x)
    assert report.ok and report["fidelta"].outputs["state"].rms < 1e-6 and np.array_equal(x["state"], before)
    assert report["fidelta"].outputs["o"].tolerance > report["fidelta"].outputs["state"].tolerance


@pytest.mark.parametrize("op", ["l2norm", "rms_norm", "rms_norm_gated", "linear", "gdn_gate", "causal_conv1d"])
def test_every_op_against_torch(rng, op):
    pytest.importorskip("torch", reason="torch is an oracle here; install the test extra")
    x, w = rng.standard_normal((3, 20, 6)).astype(F32), rng.standard_normal(6).astype(F32)
    given = {"l2norm": {"x": x}, "rms_norm": {"x": x, "weight": w, "weight_kind": "1+w"},
             "rms_norm_gated": {"x": x, "z": x, "weight": w}, "linear": {"x": x, "weight": x[0], "bias": np.tile(w, 4)[:20]},
             "gdn_gate": {"a": x, "b": x, "A_log": w, "dt_bias": w},
             "causal_conv1d": {"x": x, "weight": x[0, :6, :4], "bias": w, "activation": "silu", "return_state": True}}[op]
    report = fidelta.compare(op, ["fidelta", "torch"], given)
    assert report.ok, report


@pytest.mark.parametrize("which", ["torch", "torch/recurrent"])
@pytest.mark.parametrize("more", [{}, {"head_map": "tiled", "scale": 0.5, "state_layout": "vk"}, {"packed": True}])
def test_delta_rule_against_torch(rng, which, more):
    pytest.importorskip("transformers", reason="transformers is an oracle here; install the test extra")
    x = {**delta_inputs(rng, T=100, H=2, HV=4, K=8, V=12, gate="raw", beta_kind="logit"), **more, "return_state": True,
         "qk_l2norm": True}
    if x.pop("packed", False):
        x["cu_seqlens"] = np.array([0, 30, 100])
        x["initial_state"] = states(rng, 2, 4, 8, 12)
    report = fidelta.compare("gated_delta_rule", ["fidelta", which], x, repeat=1)
    assert report.ok, report
    refused = fidelta.compare("gated_delta_rule", ["torch"], {**x, "pad_slot": -2}, repeat=1)
    assert "does not take pad_slot" in refused["torch"].failure


def test_drawing_and_saving(inputs, tmp_path):
    report = fidelta.compare("gated_delta_rule", {"<mine>": "fidelta"}, inputs)
    drawn = report._repr_html_()
    assert "<svg" in drawn and "&lt;mine&gt;" in drawn and "<mine>" not in drawn
    report.save_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    json.dumps(report.as_dict(), allow_nan=True)


def test_pictures_are_images():
    from fidelta.compare import _coarse, _colours, _png

    error = np.array([[1e-9, 1.0], [np.inf, 1e-4]])
    data = _png(_colours(error))
    start = data.index(b"IDAT") + 4
    size = int.from_bytes(data[start - 8:start - 4], "big")
    rows = zlib.decompress(data[start:start + size])
    assert data.startswith(b"\x89PNG") and len(rows) == 2 * (1 + 2 * 3)
    assert tuple(rows[8:11]) == (255, 0, 255)             # not finite
    assert _coarse(np.arange(40.0).reshape(20, 2), 7, 1).ravel().tolist() == [5, 11, 17, 23, 29, 35, 39]


# States ------------------------------------------------------------------------------------------------------------------


def test_check_state_names_the_bad_slots(rng):
    pool = states(rng, 5, 2, 4, 4)
    assert fidelta.check_state(pool) == {}
    pool[1, 0, 2, 3] = np.nan
    pool[4, 1] = -np.inf
    pool[2, 0, 0, 0] = 1000
    assert fidelta.check_state(pool).keys() == {1, 4}
    assert fidelta.check_state(pool)[4] == {"nan": 0, "inf": 16, "absmax": pytest.approx(np.abs(pool[4, 0]).max())}
    assert fidelta.check_state(pool, limit=100).keys() == {1, 2, 4}
    assert fidelta.check_state(pool.astype(BF16), every=True).keys() == set(range(5))
    assert fidelta.check_state(pool.astype(BF16)).keys() == {1, 4}
    assert fidelta.check_state(np.zeros((2, 0, 4, 4), F32)) == {}
    torch = pytest.importorskip("torch")
    assert fidelta.check_state(torch.from_numpy(pool).bfloat16()).keys() == {1, 4}


def test_detect_state_layout(rng):
    k, v = np.eye(4)[0], np.arange(1.0, 5)
    kv = np.outer(k, v)
    assert fidelta.detect_state_layout(kv, k, v) == "kv" and fidelta.detect_state_layout(kv.T, k, v) == "vk"
    x = delta_inputs(rng, T=1, H=2, HV=4, K=16, V=16, dtype=BF16)
    for layout in ("kv", "vk"):
        state = fidelta.gated_delta_rule(**x, return_state=True, state_layout=layout, state_dtype="bfloat16")[1]
        assert fidelta.detect_state_layout(state[0], x["k"][0, 0], x["v"][0, 0]) == layout
    with pytest.raises(ValueError, match="both orders fit"):
        fidelta.detect_state_layout(np.outer(v, v), v, v)
    with pytest.raises(ValueError, match="no order fits"):
        fidelta.detect_state_layout(rng.standard_normal((4, 4)), k, v)
    with pytest.raises(ValueError, match="state is zero"):
        fidelta.detect_state_layout(np.zeros((4, 4)), k, v)
    with pytest.raises(ValueError, match="expected"):
        fidelta.detect_state_layout(np.zeros((3, 4)), k, v)


def test_shards_follow_the_blocks(rng):
    state = np.arange(16.0).reshape(1, 16, 1) + np.zeros((2, 1, 3))
    parts = [fidelta.shard_conv_state(state, 4, 8, 2, rank) for rank in (0, 1)]
    assert parts[0][0, :, 0].tolist() == [0, 1, 4, 5, 8, 9, 10, 11]          # q 0-1, k 0-1, v 0-3
    assert parts[1][0, :, 0].tolist() == [2, 3, 6, 7, 12, 13, 14, 15]
    weight = rng.standard_normal((16, 1, 4))
    assert np.array_equal(fidelta.shard_conv_weight(weight, 4, 8, 2, 1), weight[[2, 3, 6, 7, 12, 13, 14, 15]])
    rows = rng.standard_normal((24, 5))
    assert np.array_equal(fidelta.shard_in_proj(rows[:16], 4, 8, 4, 0), rows[[0, 4, 8, 9]])
    assert np.array_equal(fidelta.shard_in_proj(rows, 4, 8, 2, 1, kind="qkvz", heads=2), rows[12:])
    assert np.array_equal(fidelta.shard_in_proj(rows[:8], 4, 8, 2, 1, kind="z"), rows[4:8])
    with pytest.raises(ValueError, match="q has 4 entries, which is not a multiple of tp = 3"):
        fidelta.shard_conv_state(state, 4, 8, 3, 0)
    with pytest.raises(ValueError, match="axis 1 has 16 entries; expected 20 = q 4 . k 4 . v 12"):
        fidelta.shard_conv_state(state, 4, 12, 2, 0)
    with pytest.raises(ValueError, match="rank is 2; expected 0 .. 1"):
        fidelta.shard_conv_state(state, 4, 8, 2, 2)
    with pytest.raises(ValueError, match="2 key heads"):
        fidelta.shard_in_proj(rows, 4, 8, 4, 0, kind="qkvz", heads=2)


def test_a_sharded_convolution_is_the_whole(rng):
    x, weight = rng.standard_normal((1, 9, 16)).astype(F32), rng.standard_normal((16, 4)).astype(F32)
    y, state = reference.causal_conv1d(x, weight, return_state=True)
    rows = np.concatenate([fidelta.shard_conv_weight(np.arange(16), 4, 8, 2, rank) for rank in (0, 1)])
    for rank in (0, 1):
        mine = rows[8 * rank:8 * rank + 8]
        part, part_state = reference.causal_conv1d(x[:, :, mine], fidelta.shard_conv_weight(weight, 4, 8, 2, rank),
                                                   return_state=True)
        assert np.array_equal(part, y[:, :, mine])
        assert np.array_equal(part_state, fidelta.shard_conv_state(state, 4, 8, 2, rank))


@pytest.mark.parametrize("function, formula, eps, zero, rounding", [
    (lambda x: fidelta.l2norm(x), "x / sqrt(sum x^2 + eps)", 1e-6, "zero", "float32"),
    (lambda x: fidelta.l2norm(x, eps=1e-5), "x / sqrt(sum x^2 + eps)", 1e-5, "zero", "float32"),
    (lambda x: fidelta.l2norm(x).astype(BF16), "x / sqrt(sum x^2 + eps)", 1e-6, "zero", "bfloat16"),
    (lambda x: x / (np.linalg.norm(x, axis=-1, keepdims=True) + 1e-6), "x / (sqrt(sum x^2) + eps)", 1e-6, "zero", "float32"),
    (lambda x: x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-6), "x / max(sqrt(sum x^2), eps)", 1e-6, "zero", "float32"),
    (lambda x: x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-30), "x / sqrt(sum x^2)", 0, "zero", "float32"),
    (lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6), "x / sqrt(mean x^2 + eps)", 1e-6, "zero", "float32"),
    (lambda x: x, "x (no norm)", 0, "zero", "float32"),
])
def test_diagnose_l2norm(function, formula, eps, zero, rounding):
    found = fidelta.diagnose_l2norm(function)
    if formula == "x / sqrt(sum x^2)":                   # the same as a maximum with an eps that no row reaches
        assert found["formula"] in (formula, "x / max(sqrt(sum x^2), eps)") and found["eps"] < 1e-7
    else:
        assert (found["formula"], found["eps"]) == (formula, eps)
    assert found["zero_row"] == zero and found["rounding"] == rounding and found["error"] < 1e-2


def test_diagnose_l2norm_without_eps():
    with np.errstate(invalid="ignore"):
        found = fidelta.diagnose_l2norm(lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True))
    assert found["zero_row"] == "nan" and found["formula"] == "x / sqrt(sum x^2)"
