"""Models whose weights are read as they are needed give what they give with all in memory, bit for bit."""

from __future__ import annotations

import gc
import os
import re
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.errors import GGMLError, GGUFError, ModelError
from pyggml.hf.export import export_folder
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model, default_model_path, load_model
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from ..random_model import write_random

IDS = [5, 9, 60, 12, 7, 33, 8, 41]


def least(path: Path, **options: Any) -> int:
    """The least budget, as the error about a smaller one says."""
    with pytest.raises(ModelError, match="too few") as e:
        load_model(path, ram=1, **options)
    found = re.search(r"the least for this model is (\d+) ", str(e.value))
    assert found is not None
    return int(found[1])


def streamed(path: Path, more: int = 0, **options: Any) -> Model:
    model = load_model(path, ram=least(path, **options) + more, **options)
    stream = model.weight_stream
    assert stream is not None
    assert stream.memory.nbytes + stream.staging <= stream.budget
    assert stream.pinned + stream.ring == stream.memory.nbytes
    return model


def logits(model: Model, **options: Any) -> np.ndarray:
    """Of a prompt in two ubatches, then of tokens one by one, over several n_kv."""
    ctx = model.new_context(n_ctx=128, n_ubatch=6, n_threads=1, **options)
    batch = gg.Batch()
    for pos, token in enumerate(IDS):
        batch.add(token, pos, [0], True)
    ctx.decode(batch)
    rows = [ctx.logits.copy()]
    for i in range(40):
        ctx.decode([IDS[i % len(IDS)]])
        rows.append(ctx.logits.copy())
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def path() -> Path:
    return default_model_path()


ARCHS = {
    "llama": {},
    "qwen3moe": {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    "gpt2": {"attention.layer_norm_epsilon": 1e-5},
}


@pytest.mark.parametrize("arch", ARCHS)
def test_weights_as_stored(tmp_path: Path, arch: str) -> None:
    path = write_random(tmp_path / "m.gguf", arch, ARCHS[arch])
    want, model = logits(load_model(path)), streamed(path)
    assert model.weight_stream is not None and model.weight_stream.streamed > 0
    assert np.array_equal(logits(model), want)


@pytest.mark.parametrize("more", [0, 300_000, 1 << 30])
def test_repacked_weights(path: Path, more: int) -> None:
    model = streamed(path, more)
    assert model.weight_stream is not None and (model.weight_stream.streamed > 0) == (more < 1 << 30)
    assert np.array_equal(logits(model), logits(load_model(path)))


def test_options_of_contexts_and_of_loading(path: Path) -> None:
    for options in ({"flash_attn": True}, {"type_k": gg.Q8_0, "flash_attn": True}):
        assert np.array_equal(logits(streamed(path), **options), logits(load_model(path), **options))
    assert np.array_equal(logits(streamed(path, repack=False)), logits(load_model(path, repack=False)))


def test_each_run_reads_what_is_not_kept_once(path: Path) -> None:
    model = streamed(path)
    stream = model.weight_stream
    assert stream is not None
    ctx = model.new_context(n_ctx=64, n_threads=1)
    ctx.decode(IDS)
    before = stream.bytes_read
    for token in IDS:
        ctx.decode([token])
    per_run = (stream.bytes_read - before) / len(IDS)
    assert per_run <= stream.streamed * (1 + 1 / len(IDS))  # what is read ahead of the next run


def test_generation_speculation_states_and_loras_work(path: Path, tmp_path: Path) -> None:
    whole, model = load_model(path), streamed(path)
    options: dict[str, Any] = {"temp": 0.0, "n_threads": 1}
    want = "".join(whole.generate("Once upon a time", 24, **options))
    assert "".join(model.generate("Once upon a time", 24, **options)) == want
    assert model.generate_batch(["Once upon a time"] * 2, 8, **options) == whole.generate_batch(
        ["Once upon a time"] * 2, 8, **options
    )
    ctx = model.new_context(n_ctx=64)
    ctx.decode(IDS)
    ctx.save_state(tmp_path / "s.bin")
    other = whole.new_context(n_ctx=64)
    other.load_state(tmp_path / "s.bin")
    ctx.decode([3])
    other.decode([3])
    assert np.array_equal(ctx.logits, other.logits)


def test_taps_and_edits_see_the_same(path: Path) -> None:
    found: list[Any] = []
    for model in (load_model(path), streamed(path)):
        ctx, other = model.new_context(n_ctx=64, n_threads=1), model.new_context(n_ctx=64, n_threads=1)
        seen: list[np.ndarray] = []

        def look(name: str, array: np.ndarray, other: LlamaContext = other, seen: list[np.ndarray] = seen) -> None:
            seen.append(array.copy())
            if len(seen) % 2:  # else it is the other's
                other.decode([3])  # which needs all weights, in the middle of a run

        with model.tap("ffn_out-2", callback=look), model.edit("l_out-1", lambda x: x * 1.5):
            ctx.decode(IDS)
        found.append([*seen, ctx.logits.copy()])
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a, b)


def test_who_looks_at_a_tensor_sees_the_file(path: Path, tmp_path: Path) -> None:
    random = write_random(tmp_path / "m.gguf", "llama", {})
    for file in (path, random):
        whole, model = load_model(file), streamed(file)
        for name, t in whole.tensors.items():
            assert np.array_equal(model.tensors[name].numpy(), t.numpy()), name
        w = model.tensors["blk.2.ffn_down.weight"]
        x = np.ones((2, w.ne[0]), np.float32)
        ctx = gg.Context()
        y = gg.mul_mat(w, ctx.from_numpy(x))
        want = gg.eval(gg.mul_mat(whole.tensors["blk.2.ffn_down.weight"], ctx.from_numpy(x)), n_threads=1)
        assert np.array_equal(gg.eval(y, n_threads=1), want)
        with pytest.raises(GGMLError):
            w.set(w.numpy())


def test_the_reference_backend_reads_the_file(tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", "llama", {"block_count": 2})
    ctx, want = (m.new_context(n_ctx=32, backend="ref") for m in (streamed(path), load_model(path)))
    ctx.decode(IDS[:3])
    want.decode(IDS[:3])
    assert np.array_equal(ctx.logits, want.logits)


def test_threads_with_contexts_of_their_own(path: Path) -> None:
    model = streamed(path)
    want, found = logits(load_model(path)), []
    threads = [threading.Thread(target=lambda: found.append(logits(model))) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 3
    assert all(np.array_equal(x, want) for x in found)


def test_a_file_that_ends_early(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "m.gguf"
    shutil.copy(path, copy)
    model = streamed(copy)
    ctx = model.new_context(n_ctx=64)
    ctx.decode(IDS)
    os.truncate(copy, 1000)
    for _ in range(2):
        with pytest.raises(GGUFError, match=r"m\.gguf"):
            for _ in range(3):
                ctx.decode([3])


def test_closed(path: Path) -> None:
    model = streamed(path)
    w = model.tensors["blk.1.ffn_down.weight"]
    ctx = gg.Context()
    y = gg.mul_mat(w, ctx.from_numpy(np.ones(w.ne[0], np.float32)))
    n = w.numpy().sum()
    model.close()
    model.close()
    assert w.numpy().sum() == n
    with pytest.raises(ModelError, match="closed"):
        for _ in range(2):
            gg.eval(y)


def test_the_last_reference_frees(path: Path) -> None:
    model = streamed(path)
    ctx = model.new_context(n_ctx=64)
    ctx.decode(IDS)
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(model.tensors["blk.1.ffn_down.weight"])
        del model, ctx
        assert alive() is None
    finally:
        gc.enable()


def test_budgets_that_cannot_be(path: Path) -> None:
    with pytest.raises(ModelError, match="ram must be"):
        load_model(path, ram="much")
    with pytest.raises(ModelError, match="use_mmap"):
        load_model(path, ram="1GiB", use_mmap=False)
    calls: list[float] = []
    with pytest.raises(ModelError, match="cancelled"):
        load_model(path, ram="1GiB", progress=lambda done: bool(calls.append(done)))
    assert calls


MIXTURE = {
    "embedding_length": 256,
    "block_count": 3,
    "attention.head_count": 2,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 288,
}


@pytest.mark.parametrize("quantized", [False, True])
def test_only_picked_experts_are_read(tmp_path: Path, quantized: bool) -> None:
    path = write_random(tmp_path / "m.gguf", "qwen3moe", MIXTURE)
    if quantized:
        write_quantized(plan_quantization(path, "Q8_0"), tmp_path / "q.gguf")
        path = tmp_path / "q.gguf"
    whole = load_model(path)
    want = logits(whole)
    one = sum(whole.tensors[f"blk.0.ffn_{n}_exps.weight"].nbytes for n in ("gate", "up", "down"))
    for more in (0, one):
        model = streamed(path, more)
        stream = model.weight_stream
        assert stream is not None
        assert one <= stream.experts < 3 * one
        assert stream.experts + stream.memory.nbytes + stream.staging <= stream.budget
        assert np.array_equal(logits(model), want)
        ctx = model.new_context(n_ctx=32, n_threads=1)
        ctx.decode([3])
        before = stream.bytes_read
        ctx.decode([4])
        assert stream.bytes_read - before <= stream.streamed - 3 * one + 3 * one * 2 // 8
        ctx.decode([4])
        assert stream._cache.used <= stream.experts  # pyright: ignore[reportPrivateUsage]


def test_threads_share_experts(tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", "qwen3moe", MIXTURE)
    want, found = logits(load_model(path)), []
    model = streamed(path)
    threads = [threading.Thread(target=lambda: found.append(logits(model))) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 3
    assert all(np.array_equal(x, want) for x in found)


def test_experts_of_a_file_that_ends_early(tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", "qwen3moe", MIXTURE)
    model = streamed(path)
    ctx = model.new_context(n_ctx=64)
    ctx.decode(IDS)
    os.truncate(path, 5000)
    with pytest.raises(GGUFError, match=r"m\.gguf"):
        for token in range(10):
            ctx.decode([token])


def test_from_a_folder(tmp_path: Path, path: Path) -> None:
    export_folder(path, tmp_path / "hf")
    model, want = streamed(tmp_path / "hf"), load_model(tmp_path / "hf")
    assert model.weight_stream is not None and model.weight_stream.streamed > 0
    assert np.array_equal(logits(model), logits(want))
    for name, t in want.tensors.items():
        assert np.array_equal(model.tensors[name].numpy(), t.numpy()), name
