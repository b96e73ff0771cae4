"""What belongs to this process is not pickled: the error says what to do instead."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import pyggml as gg


def _graph() -> gg.Graph:
    ctx = gg.Context()
    return gg.Graph().build_forward_expand(ctx.from_numpy([1.0, 2.0]) + 1)


def _context(path: Path) -> gg.LlamaContext:
    return gg.load_model(path, repack=False).new_context(32, n_threads=1)


OBJECTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "Tensor": (
        lambda _: gg.Context().from_numpy([1.0]),
        r"t\.numpy\(\) or t\.tobytes\(\), or write it with pyggml\.save",
    ),
    "Context": (lambda _: gg.Context(), r"pyggml\.save writes them, pyggml\.load reads them"),
    "Graph": (lambda _: _graph(), r"build it there from a function"),
    "Scheduler": (lambda _: gg.Scheduler(["cpu"]), r"Make one there"),
    "Model": (lambda path: gg.load_model(path, repack=False), r"call load_model\('.*tiny\.gguf'\) there"),
    "LlamaContext": (_context, r"save_state writes what it holds"),
}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_the_error_says_what_to_do(name: str, way: Callable[[Any], Any], tiny: Path) -> None:
    make, says = OBJECTS[name]
    x = make(tiny)
    with pytest.raises(gg.GGMLError, match=rf"^a {name} cannot be pickled or copied: .*{says}"):
        way(x)


def test_the_error_comes_from_pools_too() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool, pytest.raises(gg.GraphError, match="cannot be pickled"):
        pool.submit(abs, gg.Context().from_numpy([1.0])).result()


def test_what_is_sent() -> None:
    for x in (gg.F32, gg.SamplingParams(temp=0.5), gg.Batch.prompt([1, 2]), gg.Var("n", 5), gg.Var("n", 5) + 1):
        pickle.loads(pickle.dumps(x))
    assert pickle.loads(pickle.dumps(gg.Q4_0)) is gg.Q4_0
    e = pickle.loads(pickle.dumps(gg.KVCacheFull("full", 3, 1)))
    assert type(e) is gg.KVCacheFull and str(e) == "full"
