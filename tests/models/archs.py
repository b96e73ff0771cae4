"""The golden data of all architectures: tiny random models, and llama.cpp's logits of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pyggml.models import PAGES

from pyggml.dtypes import DType
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model, load_model
from pyggml.llm.options import ContextOptions
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized
from pyggml.types import Floats

from ..conftest import shared_dir

if TYPE_CHECKING:
    from typing_extensions import Unpack

FOLDER = shared_dir() / "golden" / "archs"
MAX_NMSE = 1e-9


def _arch_file() -> ModuleType | None:
    """The golden data's own module, which writes the models."""
    spec = importlib.util.spec_from_file_location("arch_file", FOLDER / "arch_file.py")
    if spec is None or spec.loader is None or not FOLDER.is_dir():
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ARCH_FILE = _arch_file()
SPECS: dict[str, Any] = ARCH_FILE.specs() if ARCH_FILE else {}
VARIANTS = [name for name, spec in SPECS.items() if spec["arch"] in PAGES]


def golden_file(name: str, temp: pytest.TempPathFactory) -> Path:
    """The file of a variant: written once in a run of the tests, by the worker that needs it first."""
    assert ARCH_FILE is not None
    base = temp.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "archs"
    path = folder / f"{name}.gguf"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        ARCH_FILE.write(name, unfinished, spec=SPECS[name])
        unfinished.replace(path)
    return path


def golden_tokens(name: str) -> list[int]:
    """The 32 tokens of a variant that there are logits of."""
    assert ARCH_FILE is not None
    tokens: list[int] = ARCH_FILE.tokens(name, spec=SPECS[name]).tolist()
    return tokens


class Tiny:
    """The tiny model of a variant, its tokens, and llama.cpp's logits of 24, and of 8 more one by one."""

    def __init__(self, name: str, temp: pytest.TempPathFactory) -> None:
        self._temp = temp
        self.path = golden_file(name, temp)
        self.model = load_model(self.path, repack=False)
        self.ids = golden_tokens(name)
        self._contexts: dict[object, LlamaContext] = {}
        with np.load(FOLDER / "logits.npz") as golden:
            self.prefill, self.decode = golden[f"{name}/prefill"], golden[f"{name}/decode"]

    @cached_property
    def q8_path(self) -> Path:
        """The model in Q8_0."""
        path = self._temp.mktemp("q8") / "m.gguf"
        write_quantized(plan_quantization(self.path, "Q8_0"), path)
        return path

    @cached_property
    def repacked(self) -> Model:
        """The model in Q8_0 in the CPU's own layout."""
        return load_model(self.q8_path, repack=True)

    def fresh(self, model: Model | None = None, **options: Unpack[ContextOptions]) -> LlamaContext:
        """A new context of `model`, or of the model in F32; what it remembers is F32."""
        given: ContextOptions = {"n_batch": 64, "n_ubatch": 64, "type_k": DType.F32, "type_v": DType.F32, **options}
        return (model or self.model).new_context(256, **given)

    def context(self, **options: Unpack[ContextOptions]) -> LlamaContext:
        """A context with these options that has forgotten what others did with it."""
        key = tuple(options.items())
        if key not in self._contexts:
            self._contexts[key] = self.fresh(**options)
        self._contexts[key].memory.clear()
        return self._contexts[key]


def batch_of(tokens: Iterable[tuple[int, int, int]]) -> Batch:
    """Of (token, position, sequence), with all logits."""
    batch = Batch()
    for token, pos, seq in tokens:
        batch.add(token, pos, [seq], logits=True)
    return batch


def at_once(ctx: LlamaContext, ids: Sequence[int]) -> Floats:
    """The logits of all, in one batch."""
    ctx.decode(batch_of((token, pos, 0) for pos, token in enumerate(ids)))
    return ctx.logits.copy()


def one_by_one(ctx: LlamaContext, ids: Sequence[int]) -> Floats:
    rows: list[Floats] = []
    for token in ids:
        ctx.decode([token])
        rows.append(ctx.logits.copy())
    return np.concatenate(rows)


def equal(got: Floats, want: Floats, limit: float = MAX_NMSE) -> None:
    x, y = got.astype(np.float64), want.astype(np.float64)
    assert ((x - y) ** 2).sum() <= limit * (y**2).sum()
