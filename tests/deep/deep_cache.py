"""Random operations on caches, interrupted at random bytecodes, beside one that is not and a model of its cells."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from pyggml.dtypes import DType
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import load_model
from tests.llm.interrupts import N_SEQ, Lockstep, alarm, ctrl_c
from tests.models.memory.test_iswa import windowed
from tests.tiny_model import write_gguf

from . import SECONDS, SEED

STEPS = 200  # operations on one pair of contexts


def kinds(path: Path) -> dict[str, Callable[[], LlamaContext]]:
    """Ways to make a context."""
    model, window = load_model(path), windowed(path, 8, 2)
    base = {"n_ctx": 96, "n_ubatch": 7, "n_batch": 64, "n_seq_max": N_SEQ, "n_threads": 1}
    return {
        "plain": lambda: model.new_context(**base),
        "f32": lambda: model.new_context(**base, type_k=DType.F32, type_v=DType.F32),
        "flash": lambda: model.new_context(**base, flash_attn=True),
        "two threads": lambda: model.new_context(**{**base, "n_threads": 2}),
        "window": lambda: window.new_context(**{**base, "n_ctx": 160}),
        "ref": lambda: model.new_context(**base, backend="ref"),
    }


def test_caches(tmp_path: Path) -> None:
    end, rng, totals = time.monotonic() + SECONDS, random.Random(SEED), dict[str, list[int]]()
    makers = kinds(write_gguf(tmp_path / "m.gguf"))
    while time.monotonic() < end:
        kind, come = rng.choice(list(makers)), rng.choice((ctrl_c, ctrl_c, alarm))
        steps = Lockstep(makers[kind], rng, plain=kind != "window")
        for _ in range(STEPS):
            if time.monotonic() > end:
                break
            steps.step(come)
        total = totals.setdefault(f"{kind}, {come.__name__}", [0, 0, 0])
        for i, n in enumerate((steps.n_ops, steps.n_interrupted, steps.n_complete)):
            total[i] += n
    for name, (ops, broken, complete) in sorted(totals.items()):
        print(f"{name:24} {ops:7} operations, {broken:7} interrupted, of these {complete} complete")
    print(
        f"{'in all':24} {sum(t[0] for t in totals.values()):7} operations, "
        f"{sum(t[1] for t in totals.values())} interrupted"
    )
