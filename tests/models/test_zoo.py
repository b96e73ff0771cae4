"""The matrix of the zoo: every architecture that there is a page for, in all ways of running it, against llama.cpp's
logits of a tiny random model of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from pyggml.models import PAGES, get_architecture

from pyggml.backends.cpu.isa import isa_name
from pyggml.backends.cpu.repack import can_repack
from pyggml.dtypes import DType
from pyggml.errors import BatchError
from pyggml.learn.texts import Shape, TextGraph
from pyggml.llm.model import load_model
from pyggml.opdef import OPS
from pyggml.sched import Scheduler

from .archs import FOLDER, SPECS, VARIANTS, Tiny, at_once, batch_of, equal, one_by_one

MAX_NMSE_FIXED = 1e-5  # of repacked weights in 16-bit fixed point, through all layers
ELSEWHERE = {  # compared in tests/hf, test_rwkv.py, test_t5.py, test_hearing.py, and encoders in test_encoders.py
    "whisper",
    *("apertus", "gemma3n", "gemma4", "gptj", "arwkv7", "rwkv6qwen2", "rwkv7"),
    *("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3"),
    *("modern-bert", "neo-bert", "eurobert", "gemma-embedding", "t5", "t5encoder"),
}
UNUSED = {"rope_freqs.weight"}  # of ropes without factors


@pytest.mark.skipif(not SPECS, reason=f"no golden data in {FOLDER}")
def test_every_page_is_compared() -> None:
    assert set(PAGES) - ELSEWHERE == {SPECS[name]["arch"] for name in VARIANTS}


# -- the cells of the matrix -------------------------------------------------------------------------------------------


def logits(t: Tiny, tmp_path: Path) -> None:
    assert set(t.model.weights.unused) <= UNUSED
    ctx = t.context()
    equal(at_once(ctx, t.ids[:24]), t.prefill)
    equal(one_by_one(ctx, t.ids[24:]), t.decode)


def small_ubatches(t: Tiny, tmp_path: Path) -> None:
    ctx = t.context(n_ubatch=5)
    if t.model.hparams.causal_attn:
        equal(at_once(ctx, t.ids[:24]), t.prefill)
    else:
        with pytest.raises(BatchError, match="only n_ubatch = 5 run together"):
            at_once(ctx, t.ids[:24])


def two_sequences(t: Tiny, tmp_path: Path) -> None:
    """Their tokens in turns, in one batch, and each alone. The first one is the beginning of llama.cpp's."""
    texts = t.ids[:9], t.ids[9:21]
    ctx = t.context(n_seq_max=2)
    both = sorted(((pos, seq, token) for seq, ids in enumerate(texts) for pos, token in enumerate(ids)))
    ctx.decode(batch_of((token, pos, seq) for pos, seq, token in both))
    first = t.prefill[:9] if t.model.hparams.causal_attn else at_once(t.context(), texts[0])
    for seq, want in enumerate((first, at_once(t.context(), texts[1]))):
        equal(ctx.logits[[s == seq for _, s, _ in both]], want)


def saved_state(t: Tiny, tmp_path: Path) -> None:
    first, second = t.context(), t.fresh()
    at_once(first, t.ids[:24])
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    equal(one_by_one(second, t.ids[24:]), t.decode)


def flash_attention(t: Tiny, tmp_path: Path) -> None:
    ctx = t.context(flash_attn=True)
    equal(at_once(ctx, t.ids[:24]), t.prefill)
    equal(one_by_one(ctx, t.ids[24:26]), t.decode[:2])


def repacked(t: Tiny, tmp_path: Path) -> None:
    """Weights of 8 bits in the CPU's own layout, and as they are stored. Where there are experts, a tie may send a
    token to another one: it is left out."""
    got, want = (at_once(t.fresh(model), t.ids[:24]) for model in (t.repacked, load_model(t.q8_path, repack=False)))
    order = np.argsort(((got - want) ** 2).sum(axis=1))
    rows = order[:-1] if t.model.hparams.n_expert else order
    equal(got[rows], want[rows], MAX_NMSE_FIXED)


def on_ref(t: Tiny, tmp_path: Path) -> None:
    if t.model.hparams.causal_attn:
        equal(at_once(t.context(backend="ref"), t.ids[:1]), t.prefill[:1])


def fused_share(t: Tiny, tmp_path: Path) -> None:
    """As of llama: attention is one step in every layer that has it, and quantised weights are read repacked."""
    ctx = t.fresh(t.repacked, type_k=DType.F16, type_v=DType.F16)
    for n_tokens in (1, 24):
        schedule = ctx.scheduler.alloc(ctx.build_graph(n_tokens))
        steps = [step for split in schedule.splits for step in split.steps]
        alone = [node.name for s in steps for node in s.nodes if node.op == "soft_max" and s.fusion != "attention"]
        assert not [name for name in alone if name.startswith("kq")]
        nodes = [node for s in steps for node in s.nodes if node.op in ("mul_mat", "mul_mat_id")]
        stored = {node.src[0] for node in nodes if node.src[0] is not None and node.src[0].form.copy is None}
        assert not {w.name for w in stored if w is not None and can_repack(isa_name(), w)}


def tapped(t: Tiny, tmp_path: Path) -> None:
    """All that is computed is looked at, with flash attention, too; and what the layers give is changed."""
    with t.model.tap("*") as tap:
        equal(at_once(t.context(), t.ids[:24]), t.prefill)
        equal(at_once(t.context(flash_attn=True), t.ids[:24]), t.prefill)
    assert len(tap["l_out-0"]) == 2
    with t.model.edit("l_out-0", np.zeros_like):
        zeros = at_once(t.context(), t.ids[:24])
    assert not np.array_equal(zeros, t.prefill)


def whole_texts(t: Tiny, tmp_path: Path) -> None:
    """Two texts at once that nothing is remembered of, in a graph as training has it: it writes into no leaf."""
    want = np.concatenate((t.prefill, t.decode)) if t.model.hparams.causal_attn else at_once(t.context(), t.ids)
    if t.model.hparams.causal_attn:
        short, of_short = np.array(t.ids[:20]), want[:20]
    else:
        short, of_short = np.array(t.ids), want
    scheduler = Scheduler(("cpu",))
    for flash_attn in (False, True):
        graph = TextGraph(t.model.architecture, t.model.hparams, t.model.weights, Shape(2, 35), flash_attn=flash_attn)
        leafs = set(graph.build.graph.leafs)
        assert not [n for n in graph.build.graph.nodes if OPS[n.op].kernel and n.view_src in leafs]
        schedule = scheduler.alloc(graph.build.graph)
        graph.fill([np.array(t.ids), short])
        schedule.run()
        got = graph.logits.numpy().reshape(2, 35, -1)
        equal(got[0, : len(want)], want)
        equal(got[1, : len(of_short)], of_short)


CELLS = (
    *(logits, small_ubatches, two_sequences, saved_state, flash_attention, repacked, fused_share, on_ref, tapped),
    whole_texts,
)


@pytest.fixture(scope="module")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    return lru_cache(1)(lambda name: Tiny(name, tmp_path_factory))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str, cell: Callable[[Tiny, Path], None], tiny_of: Callable[[str], Tiny], tmp_path: Path) -> None:
    cell(tiny_of(name), tmp_path)


@pytest.mark.parametrize("name", sorted(PAGES))
def test_registry(name: str) -> None:
    """The line of the registry leads to a page that serves the architecture."""
    assert name in get_architecture(name).names


def test_pages_are_lazy() -> None:
    """Importing pyggml imports nothing that runs models, no page, and not the gguf package."""
    code = "import sys, pyggml; print(*sys.modules); pyggml.load_model; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    graphs, models = (set(line.split()) for line in loaded.splitlines())
    assert not {"gguf", *(f"pyggml.models.{page}" for page in PAGES.values())} & models
    assert "pyggml.llm" in models - graphs
