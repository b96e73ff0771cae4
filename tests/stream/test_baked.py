"""Files that hold weights as the CPU reads them: the same results as of those they were made of, and the way back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu import isa_levels
from pyggml.buffers.buffer import LazyBuffer
from pyggml.errors import DTypeError, GGUFError, ModelError
from pyggml.gguf_io.baked import KEYS, can_bake, layout_records
from pyggml.gguf_io.read import open_gguf
from pyggml.gguf_io.split import merge_model, open_model, split_model
from pyggml.gguf_io.write import GGUFOut, kv_record
from pyggml.hf.export import export_folder
from pyggml.llm.model import Model, default_model_path, load_model
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from ..random_model import random_weights, write_random
from .test_streamed import MIXTURE, logits, streamed

WIDE = {"embedding_length": 256, "feed_forward_length": 272, "block_count": 2, "vocab_size": 71}


def bake(source: Path, out: Path, name: str | None = None, **options: Any) -> Path:
    plan = plan_quantization(source, name, layout="r16", allow_requantize=True, **options)
    write_quantized(plan, out)
    return out


def made(model: Model) -> list[str]:
    """Weights the stored form of which was needed."""
    return [name for name, t in model.tensors.items() if isinstance(t.buffer, LazyBuffer) and t.buffer.size]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bake(default_model_path(), tmp_path_factory.mktemp("baked") / "m.gguf")


def test_the_model_that_ships(path: Path) -> None:
    want, model = load_model(), load_model(path)
    assert np.array_equal(logits(model), logits(want))
    assert made(model) == []
    read = load_model(path, use_mmap=False)
    assert np.array_equal(logits(read), logits(want))


@pytest.mark.parametrize("isa", isa_levels())
def test_every_level(path: Path, monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv("PYGGML_ISA", isa)
    want = logits(load_model())
    assert np.array_equal(logits(load_model(path)), want)
    assert np.array_equal(logits(streamed(path)), want)


def test_without_repacking(path: Path) -> None:
    want = logits(load_model(repack=False))
    model = load_model(path, repack=False)
    assert np.array_equal(logits(model), want)
    assert len(made(model)) > 10
    assert np.array_equal(logits(streamed(path, repack=False)), want)


def test_the_stored_form_is_made_once_for_all_threads(path: Path) -> None:
    want = logits(load_model(repack=False))
    for _ in range(3):
        model = load_model(path, repack=False)
        start = Barrier(4)

        def run(model: Model = model, start: Barrier = start) -> Any:
            start.wait()
            return logits(model)

        with ThreadPoolExecutor(4) as pool:
            found = [pool.submit(run) for _ in range(4)]
        assert all(np.array_equal(f.result(), want) for f in found)


@pytest.mark.parametrize("more", [0, 300_000, 1 << 30])
def test_streamed(path: Path, more: int) -> None:
    model = streamed(path, more)
    stream = model.weight_stream
    assert stream is not None and stream.staging == 0
    assert np.array_equal(logits(model), logits(load_model()))
    for name, t in load_model().tensors.items():
        assert np.array_equal(model.tensors[name].numpy(), t.numpy()), name


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_S", "Q6_K", "IQ4_XS", "MXFP4_MOE"])
def test_types_and_the_way_back(tmp_path: Path, name: str) -> None:
    """Rows that are no whole group, tied embeddings too; quantised again as they are, weights are what they were."""
    optional = () if name.startswith("Q4") else ("output.weight",)
    source = write_random(tmp_path / "f.gguf", "llama", WIDE, random_weights("llama", WIDE, optional))
    write_quantized(plan_quantization(source, name), tmp_path / "q.gguf")
    bake(tmp_path / "q.gguf", tmp_path / "baked.gguf")
    bake(source, tmp_path / "once.gguf", name)
    assert (tmp_path / "baked.gguf").read_bytes() == (tmp_path / "once.gguf").read_bytes()
    write_quantized(plan_quantization(tmp_path / "baked.gguf", None), tmp_path / "back.gguf")
    want, back = open_gguf(tmp_path / "q.gguf"), open_gguf(tmp_path / "back.gguf")
    assert list(want.tensors) == list(back.tensors)
    for t in want.tensors:
        assert np.array_equal(want.tensor_bytes(t), back.tensor_bytes(t)), t
    model = load_model(tmp_path / "baked.gguf")
    want_logits = logits(load_model(tmp_path / "q.gguf"))
    assert np.array_equal(logits(model), want_logits)
    assert made(model) == []
    assert np.array_equal(logits(streamed(tmp_path / "baked.gguf")), want_logits)
    for key, t in load_model(tmp_path / "q.gguf").tensors.items():
        assert np.array_equal(model.tensors[key].numpy(), t.numpy()), key


def test_types_that_would_grow_stay(tmp_path: Path) -> None:
    source = write_random(tmp_path / "f.gguf", "llama", WIDE)
    bake(source, tmp_path / "m.gguf", "TQ1_0", output_tensor_type=gg.Q6_K)
    file = open_model(tmp_path / "m.gguf")
    assert [t.name for t in file.tensors.values() if t.packed] == ["output.weight"]
    with pytest.raises(DTypeError, match="no weight is of a type"):
        bake(source, tmp_path / "n.gguf", "F16")
    with pytest.raises(DTypeError, match="unknown layout 'r17'"):
        plan_quantization(source, "Q4_0", layout="r17")
    assert not can_bake("x" * 62, gg.Q4_0, (32, 16, 1, 1))


def test_experts(tmp_path: Path) -> None:
    """A mixture: experts are read one by one from the baked file."""
    source = write_random(tmp_path / "f.gguf", "qwen3moe", MIXTURE)
    write_quantized(plan_quantization(source, "Q8_0"), tmp_path / "q.gguf")
    want = logits(load_model(tmp_path / "q.gguf"))
    path = bake(tmp_path / "q.gguf", tmp_path / "m.gguf")
    model = streamed(path)
    stream = model.weight_stream
    assert stream is not None and stream.experts and not stream.staging
    assert np.array_equal(logits(model), want)
    ctx = model.new_context(n_ctx=32, n_threads=1)
    ctx.decode([3])
    before = stream.bytes_read
    ctx.decode([3])
    assert stream.bytes_read - before < stream.streamed / 2
    assert np.array_equal(logits(load_model(path)), want)


def test_other_programs(path: Path, tmp_path: Path) -> None:
    """Parts, a folder, and what the inspector sees."""
    want = load_model()
    parts = split_model(path, str(tmp_path / "p"), max_tensors=7)
    assert np.array_equal(logits(load_model(parts[0])), logits(want))
    assert np.array_equal(logits(streamed(Path(parts[0]))), logits(want))
    merge_model(parts[0], tmp_path / "one.gguf")
    one, raw = open_gguf(tmp_path / "one.gguf"), open_gguf(path)
    assert all(np.array_equal(one.tensor_bytes(t), raw.tensor_bytes(t)) for t in raw.tensors)
    export_folder(path, tmp_path / "hf")
    export_folder(default_model_path(), tmp_path / "whole")
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()
    ctx, other = load_model(path).new_context(n_ctx=32, backend="ref"), want.new_context(n_ctx=32, backend="ref")
    for c in (ctx, other):
        c.decode([5, 9])
    assert np.array_equal(ctx.logits, other.logits)


def test_a_file_that_ends_early(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "m.gguf"
    copy.write_bytes(path.read_bytes())
    model = load_model(copy)
    ctx = model.new_context(n_ctx=32)
    ctx.decode([5])
    with open(copy, "r+b") as f:
        f.truncate(5000)
    with pytest.raises(GGUFError, match="load it again"):
        ctx.decode([5])


NAME = "blk.0.ffn_up.weight"
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"pyggml.layout.version": np.uint32(2)}, "version 2; this pyggml"),
    "layout": ({"pyggml.layout": "r32"}, "layout 'r32'"),
    "number": ({"pyggml.layout": 5}, "layout 5"),
    "short": ({"pyggml.layout.types": np.zeros(0, np.int32)}, "do not say"),
    "text": ({"pyggml.layout.ne": ["a", "b", "c", "d"]}, "do not say"),
    "floats": ({"pyggml.layout.types": np.array([2.0], np.float32)}, "do not say"),
    "name": ({"pyggml.layout.names": ["nobody"]}, "there is no nobody"),
    "type": ({"pyggml.layout.types": np.array([99], np.int32)}, "99"),
    "float type": ({"pyggml.layout.types": np.array([0], np.int32)}, "F32.*cannot be"),
    "shape": ({"pyggml.layout.ne": np.array([64, 16, 1, 1], np.int64)}, "does not hold"),
    "zero": ({"pyggml.layout.ne": np.array([64, 0, 1, 1], np.int64)}, "cannot be"),
    "negative": ({"pyggml.layout.ne": np.array([-64, -32, 1, 1], np.int64)}, "cannot be"),
    "huge": ({"pyggml.layout.ne": np.array([1 << 62, 1 << 62, 1, 1], np.int64)}, "cannot be"),
    "blocks": ({"pyggml.layout.ne": np.array([33, 32, 1, 1], np.int64)}, "cannot be"),
}


@pytest.mark.parametrize("lie", LIES)
def test_files_that_lie(tmp_path: Path, lie: str) -> None:
    changes, message = LIES[lie]
    records = dict(zip(KEYS, layout_records([(NAME, gg.Q4_0, (64, 32, 1, 1))]), strict=True))
    records |= {key: kv_record(key, value) for key, value in changes.items()}
    kv = [kv_record("general.architecture", "llama"), *records.values()]
    with GGUFOut(tmp_path / "m.gguf", kv, [(f"{NAME}.r16", gg.DType.I8, (576, 2))], 64) as out:
        out.write_tensor([np.zeros(1152, np.uint8)])
    with pytest.raises(GGUFError, match=message):
        open_model(tmp_path / "m.gguf")


def test_a_weight_twice(tmp_path: Path) -> None:
    kv = [kv_record("general.architecture", "llama"), *layout_records([(NAME, gg.Q4_0, (64, 32, 1, 1))])]
    infos = [(NAME, gg.Q4_0, (32, 32)), (f"{NAME}.r16", gg.DType.I8, (576, 2))]
    with GGUFOut(tmp_path / "m.gguf", kv, infos, 64) as out:
        out.write_tensor([np.zeros(576, np.uint8)])
        out.write_tensor([np.zeros(1152, np.uint8)])
    with pytest.raises(GGUFError, match="repacked another"):
        open_model(tmp_path / "m.gguf")


def test_what_cannot_run_has_no_layout(tmp_path: Path) -> None:
    with GGUFOut(
        tmp_path / "m.gguf", [kv_record("general.architecture", "llama")], [("x", gg.Q4_0, (32, 2))], 32
    ) as out:
        out.write_tensor([np.zeros(36, np.uint8)])
    with pytest.raises(ModelError):
        bake(tmp_path / "m.gguf", tmp_path / "n.gguf")
