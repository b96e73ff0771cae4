"""The loss in parts of the tokens, and values that are computed again in place of being kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.learn import head, recompute
from pyggml.learn.head import head_of
from pyggml.learn.texts import Shape
from pyggml.learn.trainer import Trainer, _StepGraph

from ..tiny_model import write_gguf

TEXTS = [[1, *range(70, 150)], [1, 200, 201, 202, 90], [5, *range(30, 80)]]
MASKS = [[i % 3 != 0 for i in range(len(ids))] for ids in TEXTS]
CAPPED = {"llama.final_logit_softcapping": 3.0}
OUTPUT = gg.LoRA(r=2, targets=("output", "ffn_down"), seed=1)


def steps(model: gg.Model, train: Any, **options: Any) -> tuple[Trainer, list[float]]:
    t = model.trainer(gg.SGD(lr=0.5), train, **options)
    for name, w in t.params.items():
        if name.endswith("lora_b"):
            w.set(np.random.default_rng(len(name)).standard_normal(w.shape) / 8)
    return t, [t.loss(TEXTS, MASKS), t.step(TEXTS, MASKS), t.step(TEXTS)]


@pytest.mark.parametrize("options", [{}, {"n_ubatch": 2}, {"clip": 0.5, "checkpoint": True}], ids=str)
@pytest.mark.parametrize("kind", ["untied", "tied", "adapter"])
def test_the_loss_in_parts_is_the_same_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", optional=() if kind == "tied" else ("output.weight",))
    model, train = gg.load_model(path), OUTPUT if kind == "adapter" else "all"
    whole, want = steps(model, train, **options)
    for most in (96 * 259, 32 * 259, 1):  # 288 rows in parts of 96, 32
        monkeypatch.setattr(head, "_MOST", most)
        t, got = steps(model, train, **options)
        assert got == pytest.approx(want, rel=1e-5)
        for name, w in t.params.items():
            assert np.abs(w.numpy() - whole.params[name].numpy()).max() <= 1e-5 * np.abs(w.numpy()).max()


def test_parts_do_not_depend_on_threads(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_MOST", 1)
    model = gg.load_model(tiny)
    (one, a), (two, b) = (steps(model, "all", n_threads=n) for n in (1, 2))
    assert a == b
    assert all(w.tobytes() == two.params[name].tobytes() for name, w in one.params.items())


def test_logits_of_a_part_are_in_memory_at_a_time(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t = gg.load_model(tiny).trainer(gg.SGD())
    n_vocab = t.model.hparams.n_vocab

    def rows(kind: Any) -> set[int]:
        return {n.ne[1] for n in _StepGraph(t, Shape(4, 64), kind, 0).graph.nodes if n.ne[0] == n_vocab}

    assert 256 in rows("step") | rows("loss")
    monkeypatch.setattr(head, "_MOST", 64 * n_vocab)
    for kind in ("step", "sum", "loss"):
        assert not {n for n in rows(kind) if 64 < n <= 256}


def test_a_step_without_a_loss_changes_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_MOST", 1)
    t = gg.load_model(tiny).trainer(gg.SGD(lr=1))
    t.params["blk.1.ffn_up.weight"].numpy()[0, 0] = np.nan
    before = {name: w.tobytes() for name, w in t.params.items()}
    with pytest.raises(gg.GraphError, match=r"the loss is nan in step 0: .* blk\.1\.ffn_up\.weight"):
        t.step(TEXTS)
    assert {name: w.tobytes() for name, w in t.params.items()} == before


def test_heads_that_mix_tokens_stay_whole() -> None:
    with gg.Context() as ctx:
        w, x = (ctx.from_numpy(np.ones(s, np.float32)) for s in ((7, 4), (5, 4)))
        h = gg.sqr(x)
        y = gg.mul_mat(w, h)
        assert head_of(gg.Graph().build_forward_expand(gg.tanh(y * 2.0))).rows is h
        for logits in (gg.soft_max(y), y + gg.cumsum(y), y + gg.repeat(gg.sum_rows(h), y), h):
            found = head_of(gg.Graph().build_forward_expand(logits))
            assert found.rows is logits and not found.nodes


@pytest.mark.parametrize("options", [{}, {"n_ubatch": 1, "clip": 0.1}, {"checkpoint": True}, {"dropout": 0.1}], ids=str)
@pytest.mark.parametrize("train", ["all", gg.LoRA(r=3, targets=("attn_q", "ffn_down"))], ids=["all", "lora"])
def test_cheap_values_are_computed_again_to_the_same_bits(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, train: Any, options: dict[str, Any]
) -> None:
    model = gg.load_model(tiny)
    kept, want = steps(model, train, **options)
    monkeypatch.setattr(recompute, "_LEAST", 0)
    again, got = steps(model, train, **options)
    assert got == want
    assert all(w.tobytes() == again.params[name].tobytes() for name, w in kept.params.items())


def test_what_norms_and_activations_give_is_not_kept(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t = gg.load_model(tiny).trainer(gg.SGD())
    whole = t._bytes(_StepGraph(t, Shape(4, 64), "step", 0))
    monkeypatch.setattr(recompute, "_LEAST", 0)
    graph = _StepGraph(t, Shape(4, 64), "step", 0)
    again = {n.name for n in graph.graph.nodes if n.name.endswith("(again)")}
    assert {"ffn_silu-0 (again)", "ffn_gate_par-0 (again)", "attn_norm-1 (again)"} <= again
    assert not {n for n in again if n.startswith(("ffn_gate-", "Qcur", "l_out", "ffn_inp", "kqv"))}
    assert t._bytes(graph) < 0.85 * whole


def test_what_is_written_over_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "_LEAST", 0)
    rng = np.random.default_rng(0)
    start, data = rng.standard_normal((8, 8)), rng.standard_normal((64, 8))
    found: list[bytes] = []
    for opt in (gg.SGD(lr=1e-4), gg.SGD(lr=1e-4)):
        w = gg.Context().from_numpy(start, gg.F32, name="w").set_param()
        memory = gg.Context().from_numpy(np.zeros((4, 8)), gg.F32)

        def loss_of(x: gg.Tensor, w: gg.Tensor = w, memory: gg.Tensor = memory) -> gg.Tensor:
            y = gg.silu(gg.mul_mat(w, x))
            held = gg.cpy(y, memory)
            return (gg.sqr(held) * y).sum()

        gg.fit(loss_of, gg.Dataset(data.astype(np.float32)), opt, n_batch=4)
        found.append(w.tobytes())
        monkeypatch.setattr(recompute, "_LEAST", 1 << 20)
    assert found[0] == found[1]
