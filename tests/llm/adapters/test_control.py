"""Control vectors: llama.cpp's logits, layers, files, and how they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import pytest
from pyggml.tools.cvector import Method, directions

from pyggml.errors import ModelError
from pyggml.llm.adapters.control import ControlVector, control_vector, load_control_vector
from pyggml.llm.model import load_model

from ...gguf_files import write_all
from ...tiny_model import write_gguf
from .make import distance, fresh, logits


def test_llamacpp_logits(shared: Path) -> None:
    path = shared / "golden" / "adapters" / "control.gguf"
    ctx = fresh(load_model(shared / "golden" / "llama" / "llama2-F32.gguf"))
    array = np.stack(list(load_control_vector(path).directions.values()))
    with np.load(path.parent / "results.npz") as golden:
        ids = golden["tokens"].tolist()
        for vector in (path, array, None, load_control_vector(path)):
            ctx.set_control_vector(vector, 0.8)
            want = golden["base" if vector is None else "control x0.8"]
            assert distance(logits(ctx, ids), want) <= 1e-11


def test_layers(tmp_path: Path) -> None:
    """Each direction is added to what its layer gives; other numbers run the same graphs."""
    model = load_model(write_gguf(tmp_path / "m.gguf", {"llama.block_count": 4}))
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, 32)).astype(np.float32)
    for flash_attn in (False, True):
        ctx = fresh(model, flash_attn=flash_attn)
        for start, end in ((1, None), (2, 2), (3, 9), (0, 1)):
            ctx.set_control_vector(rows, 0.5, start, end)
            got = logits(ctx)
            ctx.set_control_vector(None)
            layers = range(max(start, 1), min(3 if end is None else end, 3) + 1)
            edits = [model.edit(f"l_out-{il}", lambda x, il=il: x + 0.5 * rows[il - 1]) for il in layers]
            for edit in edits:
                edit.__enter__()
            assert distance(logits(ctx), got) <= 1e-12
            for edit in edits:
                edit.__exit__(None, None, None)
        ctx.set_control_vector({2: rows[0]})
        n = ctx.n_graphs
        before = logits(ctx)
        ctx.set_control_vector({2: rows[1]}, -3.0)
        assert distance(logits(ctx), before) > 1e-3
        assert ctx.n_graphs <= n + 1


def test_files(tmp_path: Path) -> None:
    """Written and read again; the gguf package reads what llama.cpp asks for."""
    vector = ControlVector(np.arange(96, dtype=np.float64).reshape(3, 32)) + ControlVector({2: np.ones(32)})
    vector.save(tmp_path / "v.gguf", "llama")
    reader = gguf.GGUFReader(tmp_path / "v.gguf")
    kv = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    assert kv == {
        "general.architecture": "controlvector",
        "controlvector.model_hint": "llama",
        "controlvector.layer_count": 3,
    }
    assert [(t.name, t.tensor_type, t.shape.tolist()) for t in reader.tensors] == [
        (f"direction.{il}", gguf.GGMLQuantizationType.F32, [32]) for il in (1, 2, 3)
    ]
    again = load_control_vector(tmp_path / "v.gguf")
    assert all(np.array_equal(again.directions[il], d) for il, d in vector.directions.items())
    assert again.directions[2][0] == 33


@pytest.mark.parametrize(
    ("vector", "text"),
    [
        (np.zeros((1, 31)), "31 numbers, but n_embd is 32"),
        (np.zeros((2, 32)), "a direction.2; the last layer of the model is 1"),
        (np.zeros(32), "must be numbers of shape"),
        (np.full((1, 32), np.nan), "direction.1 holds numbers that are not finite"),
        ({0: np.zeros(32)}, "direction.0"),
        ({1: "x"}, "direction.1"),
        (object(), "must be numbers"),
        ([[1, 2], [3]], "must be numbers"),
    ],
)
def test_what_does_not_fit(tiny: Path, vector: Any, text: str) -> None:
    ctx = fresh(load_model(tiny))
    ctx.set_control_vector(np.ones((1, 32)))
    want = logits(ctx)
    with pytest.raises(ModelError, match=text):
        ctx.set_control_vector(vector)
    for scale, start in ((float("nan"), 1), ("1", 1), (1.0, 1.5), (1.0, "a")):
        with pytest.raises(ModelError):
            control_vector(np.ones((1, 32)), scale, start)  # type: ignore[arg-type]
    assert np.array_equal(logits(ctx), want)


@pytest.mark.parametrize(
    ("name", "array", "text"),
    [
        ("direction.0", np.zeros(4, np.float32), "direction.0 is no direction.N"),
        ("direction.x", np.zeros(4, np.float32), "direction.x is no direction.N"),
        ("w", np.zeros(4, np.float32), "w is no direction.N"),
        ("direction.1", np.zeros(4, np.float16), "direction.1 is F16"),
        ("direction.1", np.zeros((2, 4), np.float32), "not F32 of one dimension"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, array: Any, text: str) -> None:
    w = gguf.GGUFWriter(tmp_path / "v.gguf", "controlvector")
    w.add_tensor(name, array)
    write_all(w)
    with pytest.raises(ModelError, match=text):
        load_control_vector(tmp_path / "v.gguf")


def test_a_layer_with_two_directions(tmp_path: Path) -> None:
    w = gguf.GGUFWriter(tmp_path / "v.gguf", "controlvector")
    for name in ("direction.1", "direction.01"):
        w.add_tensor(name, np.zeros(4, np.float32))
    write_all(w)
    with pytest.raises(ModelError, match="there are two directions of layer 1"):
        load_control_vector(tmp_path / "v.gguf")


@pytest.mark.parametrize("method", get_args(Method))
def test_made_vectors(tmp_path: Path, method: Method) -> None:
    """The mean, or the first principal component, of what a layer gives for equal places of two prompts."""
    model = load_model(write_gguf(tmp_path / "m.gguf", {"llama.block_count": 3}))
    positive, negative = ["abcgood", "qq"], ["abdevil", "zy"]
    vector = directions(model, positive, negative, method)
    assert list(vector.directions) == [1, 2]
    with model.tap("l_out-*") as tap:
        for text in ("abcgood", "abdevil", "qq", "zy"):
            logits(fresh(model), model.tokenize(text))
    for il, d in vector.directions.items():
        a, b, c, e = (x.astype(np.float64) for x in tap[f"l_out-{il}"])
        differences = np.concatenate((a - b, c - e))
        mean = differences.mean(axis=0)
        want = mean if method == "mean" else np.linalg.svd(differences)[2][0]
        assert abs(abs(want @ d) / np.linalg.norm(want) - 1) < 1e-5
        assert mean @ d > 0 and abs(np.linalg.norm(d) - 1) < 1e-6
    with pytest.raises(ModelError, match="gives the same"):
        directions(model, ["same"], ["same"], method)
