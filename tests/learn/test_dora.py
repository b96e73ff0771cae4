"""DoRA and rsLoRA: steps as the PEFT library makes them, what a context computes, folders and merged models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pyggml as gg
from pyggml.errors import ModelError
from pyggml.gguf_io.split import open_model
from pyggml.llm.adapters.dora import norms, row_squares
from pyggml.llm.adapters.merge import merge_lora
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from ..golden.train_score import GOLDEN
from .test_trainer import IDS, logits

golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden data in {GOLDEN}")
DORA = gg.LoRA(r=3, alpha=6, targets=("attn_q", "ffn_down"), seed=1, dora=True)


@golden
@pytest.mark.parametrize(
    ("options", "want"),  # losses of PEFT 0.21.2 with torch 2.13 in F32, for the same A
    [
        ({"rslora": True}, [7.17245, 5.01588, 3.92574, 3.905, 2.9782, 2.4822]),
        ({"dora": True}, [7.17245, 5.69824, 4.78709, 4.10321, 3.52717, 3.16377]),
    ],
    ids=["rslora", "dora"],
)
def test_steps_are_those_of_peft(options: dict[str, bool], want: list[float]) -> None:
    def init(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng(0).standard_normal(shape).astype(np.float32) * np.float32(0.3)

    lora = gg.LoRA(r=3, alpha=6, targets=("attn_q", "ffn_down"), init=init, **options)
    t = gg.load_model(GOLDEN / "hf" / "llama").trainer(gg.SGD(lr=0.1), lora)
    assert np.allclose([t.step([IDS]) for _ in want], want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [gg.F32, gg.Q8_0], ids=str)
@pytest.mark.parametrize("experts", [(), (2,)], ids=["plain", "experts"])
def test_norms_are_those_of_numpy(dtype: gg.DType, experts: tuple[int, ...]) -> None:
    rng, ctx = np.random.default_rng(0), gg.Context()

    def leaf(*shape: int, dtype: gg.DType = gg.F32) -> gg.Tensor:
        return ctx.from_numpy(rng.standard_normal((*experts, *shape)).astype(np.float32), dtype)

    w, a, b = leaf(5, 64, dtype=dtype), leaf(3, 64), leaf(5, 3)
    with ctx:
        scale = ctx.from_numpy(np.array([0.7], np.float32))
        got = gg.eval(norms(w, ctx.from_numpy(row_squares(w)), a, b, scale))
    changed = w.numpy().astype(np.float64) + 0.7 * (b.numpy().astype(np.float64) @ a.numpy())
    assert np.allclose(got, np.linalg.norm(changed, axis=-1), rtol=1e-6 if dtype is gg.F32 else 5e-3)


@pytest.mark.parametrize("quantised", [False, True])
def test_the_adapter_is_what_was_trained(tiny: Path, tmp_path: Path, quantised: bool) -> None:
    """In a context, in parts of batches, and merged into the model."""
    path = tiny
    if quantised:
        path = tmp_path / "q.gguf"
        write_quantized(plan_quantization(tiny, "Q8_0"), path)
    model = gg.load_model(path)
    t = model.trainer(gg.AdamW(lr=0.05), DORA)
    before = {n: w.numpy().copy() for n, w in t.params.items()}
    losses = [t.step([IDS]) for _ in range(10)]
    assert losses[-1] < 0.7 * losses[0]
    assert all((w.numpy() != before[n]).any() for n, w in t.params.items())
    live = logits(model, IDS, [(t.lora, 1.0)])
    merge_lora(open_model(path), t.lora, 1.0, tmp_path / "merged.gguf")
    merged = logits(gg.load_model(tmp_path / "merged.gguf"), IDS, [])
    scale = np.abs(live).max()
    assert np.abs(live - merged).max() < 0.02 * scale  # merged weights are F16
    half = logits(model, IDS, [(t.lora, 0.5)])
    assert not np.allclose(half, live, atol=0.02 * scale)
    plain = model.trainer(gg.AdamW(lr=0.05), gg.LoRA(r=2, seed=2))
    plain.step([IDS])
    both = logits(model, IDS, [(t.lora, 1.0), (plain.lora, 1.0)])
    turned = logits(model, IDS, [(plain.lora, 1.0), (t.lora, 1.0)])
    assert np.allclose(both, turned, rtol=1e-3, atol=1e-3 * scale)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.weight: GGUF adapters have no magnitudes \(DoRA\)"):
        t.save(tmp_path / "a.gguf")


@golden
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3-moe"])
def test_dora_as_peft_folders(name: str, tmp_path: Path) -> None:
    model = gg.load_model(GOLDEN / "hf" / name)
    roles = ("attn_output", "ffn_down*") if name == "gpt2" else ("attn_q", "ffn_down*")
    t = model.trainer(gg.AdamW(lr=0.05), gg.LoRA(r=2, targets=roles, dora=True))
    for _ in range(3):
        loss = t.step([IDS])
    t.save(tmp_path / "adapter")
    read = model.load_lora(tmp_path / "adapter")
    for w, pair in t.lora.pairs.items():
        assert pair.magnitude is not None and read.pairs[w].magnitude is not None
        assert np.array_equal(read.pairs[w].magnitude.numpy(), pair.magnitude.numpy())
    got, want = (logits(model, IDS, [(lora, 1.0)]) for lora in (read, t.lora))
    assert np.allclose(got, want, rtol=1e-5, atol=1e-5)
    assert t.loss([IDS]) < loss


@golden
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("granite-hybrid", ("ffn_gate_shexp",)),
        ("granite-hybrid", ("ffn_*_shexp",)),
        ("qwen3-next", ("attn_qkv", "attn_gate")),
    ],
)
def test_weights_that_are_one_in_the_checkpoint(name: str, roles: tuple[str, ...], dora: bool, tmp_path: Path) -> None:
    model = gg.load_model(GOLDEN / "hf" / name)
    t = model.trainer(gg.AdamW(lr=0.05), gg.LoRA(r=2, targets=roles, dora=dora))
    for _ in range(3):
        t.step([IDS])
    t.save(tmp_path / "adapter")
    got, want = (logits(model, IDS, [(lora, 1.0)]) for lora in (model.load_lora(tmp_path / "adapter"), t.lora))
    assert np.allclose(got, want, rtol=1e-4, atol=1e-4)
    assert not np.allclose(want, logits(model, IDS, []), rtol=1e-2)


def test_a_killed_run_goes_on(tiny: Path, tmp_path: Path) -> None:
    model = gg.load_model(tiny)
    whole, first, second = (model.trainer(gg.AdamW(lr=0.01), DORA) for _ in range(3))
    want = [whole.step([IDS]) for _ in range(4)]
    got = [first.step([IDS]) for _ in range(2)]
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    assert got + [second.step([IDS]) for _ in range(2)] == want
