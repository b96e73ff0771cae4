"""Kinds of models that the golden checkpoints lack: the transformers library's logits, in every way of running them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml.dtypes import DType
from pyggml.hf.export import export_folder
from pyggml.hf.safetensors import open_folder
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model, load_model
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from . import variants

VARIANTS = variants.read()
MAX_NMSE = 1e-10


class Tiny:
    """A variant: its folder, the model, the library's logits of its tokens."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        variants.write(VARIANTS[name], folder)
        self.model = load_model(folder, repack=False)
        self.want = np.asarray(VARIANTS[name]["logits"])


@pytest.fixture(scope="module", params=VARIANTS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(request.param, tmp_path_factory.mktemp("variant"))


def _context(model: Model, **options: Any) -> LlamaContext:
    return model.new_context(**{"n_ctx": 64, "n_batch": 40, "type_k": DType.F32, "type_v": DType.F32, **options})


def _batch(first: int, end: int, *seqs: int) -> Batch:
    batch = Batch()
    for pos in range(first, end):
        for seq in seqs or (0,):
            batch.add(variants.TOKENS[pos], pos, [seq], logits=True)
    return batch


def _at_once(ctx: LlamaContext) -> np.ndarray:
    ctx.decode(_batch(0, 40))
    return ctx.logits.copy()


def _equal(got: np.ndarray, want: np.ndarray) -> None:
    assert ((got - want) ** 2).sum() <= MAX_NMSE * (want**2).sum()


def test_at_once(tiny: Tiny) -> None:
    assert not tiny.model.weights.unused
    _equal(_at_once(_context(tiny.model)), tiny.want)
    _equal(_at_once(_context(tiny.model, flash_attn=True)), tiny.want)


def test_in_small_steps(tiny: Tiny) -> None:
    ctx = _context(tiny.model, n_ubatch=7)
    ctx.decode(_batch(0, 25))
    _equal(ctx.logits, tiny.want[:25])
    for pos in range(25, 40):
        ctx.decode([variants.TOKENS[pos]])
        _equal(ctx.logits, tiny.want[pos : pos + 1])


def test_only_the_last(tiny: Tiny) -> None:
    ctx = _context(tiny.model)
    ctx.decode(variants.TOKENS)
    _equal(ctx.logits, tiny.want[-1:])


def test_sequences(tiny: Tiny) -> None:
    """Two side by side, and one that goes on from what another has."""
    ctx = _context(tiny.model, n_ctx=256, n_seq_max=3)
    ctx.decode(_batch(0, 20, 0, 2))
    for seq in (0, 1):
        _equal(ctx.logits[seq::2], tiny.want[:20])
    ctx.memory.seq_cp(2, 1)
    ctx.decode(_batch(20, 40, 1))
    _equal(ctx.logits, tiny.want[20:])


def test_states(tiny: Tiny, tmp_path: Path) -> None:
    first, second = _context(tiny.model), _context(tiny.model)
    first.decode(_batch(0, 20))
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    second.decode(_batch(20, 40))
    _equal(second.logits, tiny.want[20:])


@pytest.mark.parametrize("move", [lambda m: m.seq_add(0, 0, -1, 9), lambda m: m.seq_add(0, 0, -1, 3) or m.defrag()])
def test_shifted(tiny: Tiny, move: Callable[[Any], object]) -> None:
    """Where all positions move alike nothing changes."""
    ctx = _context(tiny.model)
    ctx.decode(_batch(0, 20))
    move(ctx.memory)
    by = ctx.memory.seq_pos_max(0) - 19
    batch = Batch()
    for pos in range(20, 40):
        batch.add(variants.TOKENS[pos], pos + by, [0], logits=True)
    ctx.decode(batch)
    assert ((ctx.logits - tiny.want[20:]) ** 2).sum() <= 1e-9 * (tiny.want[20:] ** 2).sum()


def test_on_ref(tiny: Tiny) -> None:
    ctx = _context(tiny.model, backend="ref")
    ctx.decode(_batch(0, 2))
    _equal(ctx.logits, tiny.want[:2])


def test_converted_and_back(tiny: Tiny, tmp_path: Path) -> None:
    """A GGUF of it is the same model, and so is the folder that is made of that."""
    write_quantized(plan_quantization(tiny.folder, None), tmp_path / "m.gguf")
    model = load_model(tmp_path / "m.gguf", repack=False)
    assert not model.weights.unused
    _equal(_at_once(_context(model)), tiny.want)
    export_folder(tmp_path / "m.gguf", tmp_path / "back")
    want, got = open_folder(tiny.folder), open_folder(tmp_path / "back")
    assert set(want) <= set(got) <= {*want, "lm_head.weight"}  # where its embeddings were scaled otherwise
    _equal(_at_once(_context(load_model(tmp_path / "back", repack=False))), tiny.want)
