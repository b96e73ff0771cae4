"""Encoder-decoders learn from pairs of texts: losses of the transformers library, batches, files, the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from pyggml.tools.cli import app

import pyggml as gg
from pyggml.errors import BatchError, ModelError
from pyggml.learn.lora import targets_of
from pyggml.learn.texts_file import columns, read_examples

from ..conftest import shared_dir
from ..random_model import write_random

FOLDER = shared_dir() / "golden" / "hf"
golden = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no golden data in {FOLDER}")
KV = {"decoder_start_token_id": 1, "attention.relative_buckets_count": 8, "attention.layer_norm_epsilon": 1e-6}
PAIRS = [([5, 6, 7, 8], [1, 9, 10, 11, 2]), ([5, 6], [1, 12, 2]), (list(range(3, 40)), [1, *range(20, 60)])]
ENCODED, TEXTS = [[*x] for x, _ in PAIRS], [[*y] for _, y in PAIRS]

# Mean losses before each step of SGD (learning rate 0.002), of the transformers library (5.24) in float64, eager
# attention, without dropout. The batch: the golden text and answer, and the first 7 tokens with the first 4 of these.
# (Losses of the first model are so large that F32 follows two of them only.)
CURVES = {
    "t5": [24.963150938954385, 21.80061686521471],
    "t5-relu-tied": [
        6.792035916211314,
        6.496609983837124,
        6.295897105925601,
        6.1196455608704605,
        5.95879428698507,
        5.8278984926204265,
    ],
}


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    letters = ["<unk>", "<s>", "</s>", "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    tokens = letters + [f"[{i}]" for i in range(64 - len(letters))]
    return write_random(tmp_path_factory.mktemp("t5") / "t5.gguf", "t5", KV, tokens=tokens)


@golden
@pytest.mark.parametrize("name", CURVES)
def test_losses_of_the_transformers_library(name: str) -> None:
    with np.load(FOLDER / "logits.npz") as z:
        text, ids = z[f"{name}/tokens"].tolist(), z[f"{name}/decoder_tokens"].tolist()
    t = gg.load_model(FOLDER / name, repack=False).trainer(gg.SGD(lr=0.002))
    losses = [t.step([ids, ids[:4]], encoded=[text, text[:7]]) for _ in CURVES[name]]
    assert losses == pytest.approx(CURVES[name], rel=1e-5)  # losses near 25, whose sums are rounded to F32


def test_texts_of_a_batch_see_what_was_encoded_for_them(t5: Path) -> None:
    t = gg.load_model(t5).trainer(gg.SGD())
    each = [t.loss([y], encoded=[x]) for x, y in zip(ENCODED, TEXTS, strict=True)]
    n = [len(y) - 1 for y in TEXTS]
    assert t.loss(TEXTS, encoded=ENCODED) == pytest.approx(np.average(each, weights=n), rel=1e-6)
    assert t.loss([TEXTS[0]], encoded=[ENCODED[2]]) != pytest.approx(each[0], rel=1e-4)
    masked = t.loss(TEXTS, [[0] * len(TEXTS[0]), [1] * len(TEXTS[1]), [0] * len(TEXTS[2])], ENCODED)
    assert masked == pytest.approx(each[1], rel=1e-6)


def test_gradients_are_slopes_of_the_loss(t5: Path) -> None:
    """Along the gradient of each parameter, of both sides."""
    model = gg.load_model(t5)
    t = model.trainer(gg.SGD(lr=1))
    before = {name: w.numpy().copy() for name, w in t.params.items()}
    t.step(TEXTS, encoded=ENCODED)
    gradients = {name: before[name].astype(np.float64) - w.numpy() for name, w in t.params.items()}
    for name, g in gradients.items():
        t.params[name].set(before[name])
        assert np.abs(g).max() > 0, name
    checked = [n for n in gradients if n.startswith(("enc.blk.0", "dec.blk.3", "token", "output", "enc.o"))]
    assert len(checked) > 20
    for name in checked:
        g, losses = gradients[name], list[float]()
        step = 4e-3 / np.linalg.norm(g)
        for sign in (1, -1):
            t.params[name].set((before[name] + sign * step * g).astype(np.float32))
            losses.append(t.loss(TEXTS, encoded=ENCODED))
        t.params[name].set(before[name])
        slope = (losses[0] - losses[1]) / (2 * step)
        assert slope == pytest.approx((g**2).sum(), rel=0.02, abs=1e-6 / step), name


@pytest.mark.parametrize(
    "make",
    [
        lambda m, **o: m.trainer(gg.AdamW(lr=0.01), **o),
        lambda m, **o: m.trainer(gg.AdamW(lr=0.01), gg.LoRA(r=2, targets=("all-linear",)), **o),
    ],
    ids=["all", "lora"],
)
def test_ways_to_compute_a_step(t5: Path, make: Callable[..., Any]) -> None:
    model = gg.load_model(t5)
    plain = make(model)
    want = [plain.step(TEXTS, encoded=ENCODED) for _ in range(3)]
    assert want[2] < want[0]
    for options in ({"n_threads": 1}, {"checkpoint": True}):
        assert [make(model, **options).step(TEXTS, encoded=ENCODED)] == want[:1]
        t = make(model, **options)
        assert [t.step(TEXTS, encoded=ENCODED) for _ in range(3)] == want
    t = make(model, n_ubatch=1)
    assert [t.step(TEXTS, encoded=ENCODED) for _ in range(3)] == pytest.approx(want, rel=1e-3)


def test_adapters_of_both_sides(t5: Path, tmp_path: Path) -> None:
    model = gg.load_model(t5)
    names = targets_of(model, gg.LoRA(targets=("all-linear",)))
    assert targets_of(model, gg.LoRA(targets=("attn_q",))) == [
        f"{x}.blk.{i}.attn_q.weight" for x in ("enc", "dec") for i in range(4)
    ]
    assert {"enc.blk.0.attn_q.weight", "dec.blk.0.attn_q.weight", "dec.blk.3.cross_attn_k.weight"} <= {*names}
    t = model.trainer(gg.AdamW(lr=0.05), gg.LoRA(r=2, targets=("enc.blk.*.attn_q.weight", "dec.blk.*.ffn_down*")))
    for _ in range(3):
        t.step(TEXTS, encoded=ENCODED)
    t.save(tmp_path / "a.gguf")
    ctx = model.new_context(64, type_k=gg.F32, type_v=gg.F32)
    found: list[np.ndarray] = []
    for lora in (t.lora, model.load_lora(tmp_path / "a.gguf")):
        ctx.set_loras([(lora, 1.0)])
        ctx.encode(ENCODED[2])
        ctx.decode(TEXTS[2][:-1])
        found.append(ctx.logits[-1].copy())
        ctx.memory.clear()
    assert np.array_equal(found[0], found[1])


def test_the_loop_and_saved_models(t5: Path, tmp_path: Path) -> None:
    model = gg.load_model(t5)
    results: list[Any] = []
    for _ in range(2):
        t = model.trainer(gg.AdamW(lr=0.01))
        results.append(t.fit(TEXTS, epochs=4, n_batch=2, encoded=ENCODED, state=tmp_path / "s", val_split=0.3))
    assert results[0] == results[1]
    assert results[0][-1].train["loss"].mean < results[0][0].train["loss"].mean
    t.save(tmp_path / "m.gguf")
    loss = t.loss(TEXTS, encoded=ENCODED)
    assert gg.load_model(tmp_path / "m.gguf").trainer(gg.SGD()).loss(TEXTS, encoded=ENCODED) == loss
    other = model.trainer(gg.AdamW(lr=0.01))
    with pytest.raises(gg.StateError, match="texts"):
        other.fit(TEXTS, epochs=5, n_batch=2, encoded=ENCODED[::-1], resume=tmp_path / "s", val_split=0.3)


def write(path: Path, *entries: object) -> Path:
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def test_files(t5: Path, tmp_path: Path) -> None:
    model = gg.load_model(t5)
    pair = {"prompt": "abc", "completion": "xyz"}
    (e,) = read_examples(write(tmp_path / "a.jsonl", pair), model, 64)
    assert np.asarray(e.ids).tolist() == [1, *model.tokenize("xyz", add_special=False), model.vocab.eos]
    assert e.encoded is not None and e.encoded.tolist() == model.tokenize("abc")
    (cut,) = read_examples(write(tmp_path / "a.jsonl", {**pair, "prompt": "abc" * 9}), model, 4)
    assert len(cut.ids) == 4 and cut.encoded is not None and len(cut.encoded) == 4
    model.trainer(gg.SGD()).step(*columns([e]))
    for entry in ({"text": "abc"}, {"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}):
        with pytest.raises(ModelError, match="line 2: t5 is an encoder-decoder: a line must have `prompt`"):
            read_examples(write(tmp_path / "b.jsonl", pair, entry), model, 64)
    (tmp_path / "a.txt").write_text("abc")
    for path, pack in ((tmp_path / "a.txt", False), (tmp_path / "a.jsonl", True)):
        with pytest.raises(ModelError, match="t5 is an encoder-decoder: it learns from lines"):
            read_examples(path, model, 64, pack=pack)


@pytest.mark.parametrize("verb", ["finetune", "train"])
def test_command_line(t5: Path, tmp_path: Path, verb: str) -> None:
    data = write(tmp_path / "a.jsonl", *({"prompt": "abc"[i:], "completion": "xyz"[i:]} for i in range(3)))
    args = [verb, data, "-m", t5, "-o", tmp_path / "out.gguf", "--steps", 2, "--test", data, "-b", 2]
    done = CliRunner().invoke(app, [str(a) for a in args])
    assert done.exit_code == 0, done.output
    assert "2 steps" in done.output and done.output.count("test: loss") == 2


def test_what_cannot_be(t5: Path, tiny: Path) -> None:
    t = gg.load_model(t5).trainer(gg.SGD(), n_ctx=64)
    cases: list[tuple[Any, str]] = [
        (None, "t5 is an encoder-decoder: `encoded` must have tokens for each of 1 texts, not none"),
        ([[1], [2]], "for each of 1 texts"),
        (7, "for each of 1 texts"),
        ([[]], "sequence 0 is empty"),
        ([[64]], "token 64, outside"),
        ([[1] * 65], "65 tokens, more than"),
    ]
    for encoded, text in cases:
        with pytest.raises(BatchError, match=text):
            t.step([[1, 2]], encoded=encoded)
    with pytest.raises(BatchError, match="llama has no encoder"):
        gg.load_model(tiny).trainer(gg.SGD()).step([[1, 2]], encoded=[[1]])
