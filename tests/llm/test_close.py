"""What models and contexts hold is freed with the last reference, and by `close()`; all use after that says so."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.errors import GGMLError, ModelError
from pyggml.llm.context import LlamaContext
from pyggml.llm.evaluate.perplexity import perplexity
from pyggml.llm.model import Model, load_model

from ..tiny_model import write_gguf

CLOSED = "was closed"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("close") / "m.gguf")


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def watched(model: Model, ctx: LlamaContext) -> list[weakref.ref[Any]]:
    """A weight, K and V, a buffer of the scheduler."""
    return [weakref.ref(t) for t in (model.tensors["output.weight"], ctx.memory.caches[0].k_l[0])]


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("backend", ["cpu", "ref", ("cpu", "ref")])
@pytest.mark.parametrize("closes", [False, True])
def test_the_last_reference_frees(path: Path, backend: Any, closes: bool) -> None:
    model = load_model(path)
    ctx = model.new_context(n_ctx=64, n_threads=2, backend=backend, n_seq_max=2)
    for ids in ([5, 6, 7], [8], [9], [10]):
        ctx.decode(ids)
    ctx.memory.seq_rm(0, 1, 2)
    ctx.memory.seq_add(0, 2, -1, -1)
    ctx.memory.defrag()
    ctx.decode([11])
    ctx.build_graph(3)
    list(model.generate("ab", 3))
    list(model.stream_batch(["ab", "b"], 3))
    w = gg.add(model.tensors["output_norm.weight"], model.tensors["output_norm.weight"])
    gg.compute(gg.Graph().build_forward_expand(w))
    weight, k = watched(model, ctx)
    if closes:
        ctx.close()
        assert k() is None
        model.close()
    else:
        del ctx
        assert k() is None
        del model
    assert weight() is None


@pytest.mark.usefixtures("no_gc")
def test_iterators_close_their_contexts(path: Path) -> None:
    model = load_model(path)
    contexts = model.contexts
    iterators = [
        model.generate("ab", -1),
        model.stream("ab", 50),
        model.stream_batch(["a", "b"], 50),
        perplexity(model, [5] * 200, n_ctx=16),
    ]
    assert len(contexts) == 4
    for it in iterators:
        next(it)
    for it in iterators[1:]:
        it.close()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    assert len(contexts) == 1
    list(model.stream("ab", 3))
    assert len(contexts) == 1
    model.close()  # the other one with it
    with pytest.raises(ModelError, match=CLOSED):
        next(iterators[0])


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "decode": ([5],),
    "logits_ith": (0,),
    "seconds_to_build": (1,),
    "save_state": ("x",),
    "load_state": ("x",),
    "save_seq": ("x", 0),
    "load_seq": ("seq",),
    "build_graph": (1,),
    "perf_sampled": (0.0,),
    "perf_guessed": (0,),
    "tokenize": ("a",),
    "detokenize": ([5],),
    "generate": ("a",),
    "trainer": (None,),
    "infill": ("a", "b"),
    "stream": ("a",),
    "agenerate": ("a",),
    "astream": ("a",),
    "generate_batch": (["a"],),
    "stream_batch": (["a"],),
    "load_lora": ("a.gguf",),
    "set_loras": ([],),
    "set_control_vector": (None,),
    "tap": ("l_out-0",),
    "edit": ("l_out-0", abs),
    "embed": (["a"],),
    "embed_image": (["a.png"],),
    "classify_image": (["a.png"],),
    "match": (["a.png"], ["a"]),
    "encode_image": ("a.png",),
    "process_image": ("a.png",),
    "picture_features": ("a.png",),
    "encode_audio": ([0.0],),
    "sound_features": ([0.0],),
    "transcribe": ("a.wav",),
    "rerank": ("a", ["b"]),
    "create_completion": ("a",),
    "create_chat_completion": ([],),
}


def test_use_after_close(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with load_model(path) as model:
        with model.new_context(n_ctx=32, n_threads=1) as ctx:
            ctx.decode([5, 6])
            ctx.save_state("x")
            ctx.save_seq("seq", 0)
            memory, logits = ctx.memory, ctx.logits
        assert np.isfinite(logits).all() and memory.used == 2  # what was taken lives on
        memory.seq_rm(0)
        left = model.new_context(n_ctx=32, n_threads=1)
    for thing in (ctx, left, model):
        assert str(path) in repr(thing) and repr(thing).startswith("<closed ")
        thing.close()
        with pytest.raises(ModelError, match=CLOSED), thing:
            pass
        for name in (n for n in dir(type(thing)) if not n.startswith("_") and n != "close"):
            with pytest.raises(ModelError, match=f"{path.name}.* {CLOSED}"):
                attribute = getattr(thing, name)
                attribute(*ARGUMENTS.get(name, ()))
        for name in ("memory", "logits", "outputs", "scheduler", "model", "tensors", "weights", "kv", "path"):
            with pytest.raises(ModelError, match=CLOSED):
                getattr(thing, name)
    with pytest.raises(AttributeError):
        _ = load_model(path).nothing  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def test_errors_of_tensors_without_their_context(path: Path) -> None:
    """Tensors outlive their context, and ops on them go on."""
    t = gg.Context().from_numpy(np.ones(4, np.float32))
    y = gg.add(t, t) * 2.0
    gg.compute(gg.Graph().build_forward_expand(y))
    assert y.numpy().tolist() == [4.0] * 4
    weight = load_model(path).tensors["output_norm.weight"]
    assert np.isfinite(weight.numpy()).all()
    with pytest.raises(GGMLError):
        weight.set(np.zeros(3))


def test_memory_is_given_back() -> None:
    """Resident bytes, measured where nothing else runs, without the cyclic collector."""
    code = """
import gc, sys
gc.disable()
import pyggml as gg

def resident():
    _, all, shared, *_ = map(int, open("/proc/self/statm").read().split())
    return (all - shared) * 4096 / 2**20  # not the pages of files, which come and go

def use(close):
    model = gg.load_model(use_mmap=False)
    ctx = model.new_context(n_ctx=16384, n_threads=2)
    ctx.memory.caches[0].k_l[0].buffer.memory[:] = 1
    for i in range(4):
        ctx.decode([5, 6])
    high = resident()
    if close == "close":
        ctx.close()
        assert resident() < high - 40, (high, resident())
        model.close()
    return high

for i in range(3):  # until the allocator has settled
    use(sys.argv[1])
low = resident()
for i in range(5):
    high = use(sys.argv[1])
    assert high - resident() > 45, (high, resident())
assert resident() < low + 24, (low, resident())  # one use that is kept: 48; huge pages and arenas come and go
"""
    for how in ("close", "del"):
        subprocess.run([sys.executable, "-c", code, how], check=True)
