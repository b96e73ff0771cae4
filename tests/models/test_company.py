"""The logits of a token have the same bits whatever is computed beside it: every architecture, types of weights, kinds
of caches. docs/company.md has what is promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import pyggml as gg
from pyggml.llm.model import Model, load_model
from pyggml.types import Floats

from ..conftest import shared_dir
from .archs import SPECS, VARIANTS, golden_file, golden_tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pyggml.llm.options import ContextOptions

LLAMAS = shared_dir() / "golden" / "llama"
TYPES = sorted(path.stem for path in LLAMAS.glob("llama2-*.gguf"))
CACHES: dict[str, ContextOptions] = {
    "F16": {},
    "F32": {"type_k": gg.F32, "type_v": gg.F32},
    "Q8_0 of K": {"type_k": gg.Q8_0},
    "flash": {"flash_attn": True},
    "flash, Q8_0 and Q4_0": {"flash_attn": True, "type_k": gg.Q8_0, "type_v": gg.Q4_0},
}


def alone(model: Model, ids: list[int], **options: Unpack[ContextOptions]) -> Floats:
    """Logits of all tokens of a text that is evaluated at once, by one thread."""
    with model.new_context(512, n_batch=512, n_ubatch=512, n_threads=1, **options) as ctx:
        batch = gg.Batch()
        for pos, token in enumerate(ids):
            batch.add(token, pos, [0], logits=True)
        ctx.decode(batch)
        return ctx.logits.copy()


def in_company(model: Model, ids: list[int], seed: int, **options: Unpack[ContextOptions]) -> Floats:
    """The same for a text that is evaluated in pieces, among pieces of two other texts, in small ubatches."""
    rng = np.random.default_rng(seed)
    texts = [list(rng.permutation(ids)), ids, list(rng.permutation(ids))[: len(ids) // 2]]
    rows, at = list[Floats](), [0, 0, 0]
    ubatch, threads = int(rng.choice([5, 32, 128])), int(rng.choice([1, 2]))
    with model.new_context(1024, n_batch=256, n_ubatch=ubatch, n_threads=threads, n_seq_max=3, **options) as ctx:
        while at[1] < len(ids):
            batch, own = gg.Batch(), list[int]()
            for seq in rng.permutation(3).tolist():
                end = min(at[seq] + int(rng.choice([0, 1, 2, 3, 17, 40])), len(texts[seq]))
                for pos in range(at[seq], end):
                    if seq == 1:
                        own.append(len(batch))
                    batch.add(int(texts[seq][pos]), pos, [seq], logits=True)
                at[seq] = end
            if len(batch):
                ctx.decode(batch)
                rows.append(ctx.logits[own])
    return np.concatenate(rows)


@pytest.mark.skipif(not SPECS, reason="no golden data")
@pytest.mark.parametrize("name", VARIANTS)
def test_architectures(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    ids = golden_tokens(name)
    with load_model(golden_file(name, tmp_path_factory)) as model:
        if not model.hparams.causal_attn:
            pytest.skip("tokens see those behind them")
        for options in (CACHES["F16"], CACHES["flash"]):
            assert in_company(model, ids, len(name), **options).tobytes() == alone(model, ids, **options).tobytes()


@pytest.mark.skipif(not TYPES, reason="no golden data")
@pytest.mark.parametrize("repack", [True, False], ids=["repacked", "in passing"])
@pytest.mark.parametrize("name", TYPES)
def test_types_of_weights(name: str, repack: bool) -> None:
    """Each type with two kinds of caches, in turn: products and caches have only rows of floats in common."""
    ids = np.random.default_rng(len(name)).integers(3, 250, 140).tolist()
    first = TYPES.index(name) + repack
    with load_model(LLAMAS / f"{name}.gguf", repack=repack) as model:
        for i in (first % len(CACHES), (first + 2) % len(CACHES)):
            kind, options = [*CACHES.items()][i]
            assert in_company(model, ids, i, **options).tobytes() == alone(model, ids, **options).tobytes(), kind


@pytest.mark.skipif(not TYPES, reason="no golden data")
@pytest.mark.parametrize("repack", [True, False])
def test_experts_in_halves(repack: bool) -> None:
    ids = np.random.default_rng(1).integers(3, 250, 140).tolist()
    with load_model(LLAMAS / "mixtral-F16.gguf", repack=repack) as model:
        assert in_company(model, ids, 1).tobytes() == alone(model, ids).tobytes()
