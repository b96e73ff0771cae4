"""Decoding: splits, outputs, graph reuse, failures that leave the cache as it was, several sequences, shifts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pyggml.models.architecture import Architecture
from pyggml.models.blocks import Build

from pyggml.backends.cpu import CpuProgram
from pyggml.backends.cpu import backend as cpu_backend
from pyggml.backends.ref import RefProgram
from pyggml.dtypes import DType
from pyggml.errors import BackendError, BatchError, KVCacheFull, ModelError
from pyggml.graph import Graph
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model, load_model
from pyggml.sched import Schedule, Scheduler
from pyggml.tensor import Tensor
from pyggml.var import largest

# Two ways through the same model in f32: some 20 products of 64 terms, each off by about 2.5 roundings of 2^-24, twice,
# make 1e-12 on average; this is twice that in amplitude.
ROUNDING = 4e-12
IDS = [1, 70, 68, 80, 111, 35, 114, 100, 103, 35, 120, 115]


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


def new(model: Model, **kwargs: object) -> LlamaContext:
    return model.new_context(**{"n_ctx": 64, "type_k": DType.F32, "type_v": DType.F32, "n_threads": 1, **kwargs})


def all_logits(ctx: LlamaContext, ids: list[int], seq: int = 0, start: int = 0) -> np.ndarray:
    batch = Batch()
    for i, t in enumerate(ids):
        batch.add(t, start + i, seq, True)
    ctx.decode(batch)
    return ctx.logits


def nmse(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a.astype(np.float64) - b) ** 2).sum() / (b.astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("backend", ["cpu", "ref"])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_any_split_gives_the_same_logits(model: Model, backend: str, flash_attn: bool) -> None:
    expected = all_logits(new(model, backend="ref"), IDS)
    assert expected.shape == (len(IDS), 259)
    for n_ubatch in (1, 5, 32):
        got = all_logits(new(model, backend=backend, n_ubatch=n_ubatch, flash_attn=flash_attn), IDS)
        assert nmse(got, expected) < ROUNDING
    ctx = new(model, backend=backend, flash_attn=flash_attn)
    ctx.decode(IDS[:5])
    rows = [ctx.logits]
    for t in IDS[5:]:
        ctx.decode([t])
        rows.append(ctx.logits)
    assert nmse(np.concatenate(rows), expected[4:]) < ROUNDING


def test_logits_of_any_tokens_in_batch_order(model: Model) -> None:
    expected = all_logits(new(model), IDS)
    ctx = new(model, n_ubatch=4)
    batch = Batch()
    for i, t in enumerate(IDS):
        batch.add(t, i, 0, i in (1, 2, 9))  # none of the second ubatch
    ctx.decode(batch)
    assert ctx.logits.shape == (3, 259) and ctx.logits.dtype == np.float32
    for row, i in enumerate((1, 2, 9)):
        assert nmse(ctx.logits_ith(i), expected[i]) < ROUNDING
        assert ctx.logits_ith(row - 3) is not None and (ctx.logits_ith(row - 3) == ctx.logits[row]).all()
    for i in (0, 3, 12, -4):
        with pytest.raises(BatchError, match=rf"no logits of token {i}: .*\[1, 2, 9\]"):
            ctx.logits_ith(i)


def test_logits_are_not_overwritten_by_the_next_decode(model: Model) -> None:
    ctx = new(model)
    ctx.decode(IDS)
    before = ctx.logits
    copy = before.copy()
    ctx.decode([5])
    assert (before == copy).all() and ctx.logits is not before


def test_batch_without_outputs(model: Model) -> None:
    ctx = new(model)
    batch = Batch()
    batch.add(1, 0)
    ctx.decode(batch)
    assert ctx.logits.shape == (0, 259)
    with pytest.raises(BatchError, match="asked for those of none"):
        ctx.logits_ith(0)


def test_sequences_do_not_see_each_other_and_share_a_prefix(model: Model) -> None:
    a, b = [*IDS, 40, 41], [*IDS, 90, 91, 92]
    expected = [all_logits(new(model), ids) for ids in (a, b)]
    ctx = new(model, n_seq_max=3)
    batch = Batch()
    for i, t in enumerate(IDS):
        batch.add(t, i, (0, 2), True)
    ctx.decode(batch)
    ctx.memory.seq_cp(0, 1)
    assert ctx.memory.used == len(IDS)
    batch.clear()
    for i in range(3):
        if i < 2:
            batch.add(a[12 + i], 12 + i, 0, True)
        batch.add(b[12 + i], 12 + i, [1], True)
    ctx.decode(batch)
    assert nmse(ctx.logits[[0, 2]], expected[0][12:]) < ROUNDING
    assert nmse(ctx.logits[[1, 3, 4]], expected[1][12:]) < ROUNDING
    assert [ctx.memory.seq_pos_max(s) for s in range(3)] == [13, 14, 11]


def test_removed_tokens_can_be_decoded_again(model: Model) -> None:
    ctx = new(model)
    ctx.decode(IDS)
    expected = ctx.logits
    ctx.decode([3, 4, 5])
    ctx.memory.seq_rm(0, len(IDS) - 1)
    ctx.decode(IDS[-1:])
    assert nmse(ctx.logits, expected) < ROUNDING
    ctx.memory.clear()
    assert ctx.memory.used == 0


@pytest.mark.parametrize("scaling", ["linear", "yarn"])
@pytest.mark.parametrize("type_k", [DType.F32, DType.F16])
def test_shifted_positions_give_the_same_logits(tiny: Path, scaling: str, type_k: DType) -> None:
    """RoPE sees relative positions only: the whole sequence moved by some places is the same to attention."""
    overrides = {"llama.rope.scaling.type": scaling, "llama.rope.scaling.factor": 4.0}
    model = load_model(tiny, kv_overrides={**overrides, "llama.rope.scaling.original_context_length": 16})
    ctx, moved = (new(model, type_k=type_k) for _ in range(2))
    for c in (ctx, moved):
        c.decode(IDS)
    moved.memory.seq_add(0, 0, -1, 7)
    assert moved.memory.caches[0].has_shift
    for c in (ctx, moved):
        c.decode([50, 51])
    assert not moved.memory.caches[0].has_shift and moved.memory.seq_pos_max(0) == len(IDS) + 8
    assert nmse(moved.logits, ctx.logits) < (1e-11 if type_k is DType.F32 else 1e-6)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, tuple[int, ...]]]:
    """(n_tokens, n_outputs, n_kv) of the graphs that contexts build."""
    sizes: list[tuple[int, int, tuple[int, ...]]] = []
    original = Architecture.build_stage

    def build_stage(self: Architecture, b: Build) -> None:
        sizes.append((b.n_tokens, b.n_outputs, tuple(map(largest, b.n_kv))))
        original(self, b)

    monkeypatch.setattr(Architecture, "build_stage", build_stage)
    return sizes


def test_a_graph_that_could_not_be_built_leaves_the_others_right(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it fails it has bound n_kv to its largest, and the numbers of tokens and outputs."""
    ctx, expected = new(model, n_ctx=96), new(model, n_ctx=96)
    for c in (ctx, expected):
        for ids in (IDS[:3], [3 + i for i in range(30)], [5]):
            c.decode(ids)

    def build_stage(self: Architecture, b: Build) -> None:
        raise MemoryError

    with monkeypatch.context() as m, pytest.raises(MemoryError):
        m.setattr(Architecture, "build_stage", build_stage)
        ctx.decode(IDS[:2])  # a number of tokens that did not come before
    for c in (ctx, expected):
        c.decode([8])
    assert np.array_equal(ctx.logits, expected.logits)


@pytest.mark.parametrize("flash_attn", [False, True])
def test_graphs_are_reused(model: Model, flash_attn: bool, built: list[tuple[int, int, tuple[int, ...]]]) -> None:
    """One token has one graph for all n_kv, which is built once."""
    pad = 256 if flash_attn else 32
    ctx = new(model, n_ctx=6 * pad, flash_attn=flash_attn)
    ctx.decode(IDS)
    built.clear()
    ids = [3 + i % 200 for i in range(3 * pad)]
    for t in ids:
        ctx.decode([t])
    assert built == [(1, 1, (6 * pad,))]
    expected = new(model, n_ctx=6 * pad, n_ubatch=1000, flash_attn=flash_attn)
    expected.decode([*IDS, *ids])
    assert nmse(ctx.logits, expected.logits) < 1e-11
    built.clear()
    ctx.memory.clear()
    ctx.decode(IDS)
    ctx.decode([3])
    assert not built


def test_a_varying_graph_gives_the_same_logits_at_every_n_kv(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """n_kv grows, shrinks and jumps; a context with a graph for each n_kv is the measure."""
    ctx = new(model, n_ctx=512)
    with monkeypatch.context() as m:
        m.setattr(Scheduler, "varies", False)
        plain = new(model, n_ctx=512)
    for step in range(60):
        for c in (ctx, plain):
            if step % 7 == 6:
                c.memory.seq_rm(0, 2 + step * 3 % 40)
            pos = c.memory.seq_pos_max(0) + 1
            batch = Batch.prompt([5 + (step + i) % 90 for i in range((1, 40, 8)[step % 3])], pos)
            c.decode(batch)
        assert (ctx.logits == plain.logits).all()
    assert ctx.n_graphs < plain.n_graphs


def test_build_graph_is_the_one_that_would_run(model: Model) -> None:
    ctx = new(model, n_ubatch=16)
    ctx.decode(IDS)
    g = ctx.build_graph(1)
    assert g.n_nodes == 32 * 2 + 6
    kq, out, mask = (g.get_tensor(n) for n in ("kq-0", "result_output", "KQ_mask"))
    assert kq is not None and out is not None and mask is not None
    assert (kq.ne, out.ne, mask.ne) == ((32, 1, 4, 1), (259, 1, 1, 1), (32, 32, 1, 1))
    kq = ctx.build_graph(16, worst_case=True).get_tensor("kq-0")
    assert kq is not None and kq.ne == (64, 16, 4, 1)
    out = ctx.build_graph(30, 4).get_tensor("result_output")
    assert out is not None and out.ne == (259, 4, 1, 1)
    kq = ctx.build_graph(30).get_tensor("kq-0")
    assert kq is not None and kq.ne[0] == 64
    assert ctx.memory.used == len(IDS)


def state(ctx: LlamaContext) -> tuple[object, ...]:
    m = ctx.memory.caches[0]
    return m.pos.tolist(), m.seq.tolist(), m.head, m.used, m.end, m.seq_pos_max(0)


def test_full_cache_is_left_as_it_was(model: Model) -> None:
    ctx = new(model, n_ctx=32, n_ubatch=8)
    ctx.decode(IDS)
    before = state(ctx)
    with pytest.raises(KVCacheFull, match="21 cells are needed; 20 of the 32 cells") as e:
        ctx.decode([7] * 21)
    assert (e.value.needed, e.value.free) == (21, 20)
    assert state(ctx) == before
    ctx.decode([7] * 20)
    with pytest.raises(KVCacheFull, match="1 cells are needed; 0 of the 32 cells"):
        ctx.decode([7])


def test_fragmented_cache_is_defragmented_where_the_room_is_needed(model: Model) -> None:
    ctx, expected = (new(model, n_ctx=32, n_ubatch=8, n_seq_max=2) for _ in range(2))
    batch = Batch()
    for i in range(32):
        batch.add(5, i // 2, i % 2)
    ctx.decode(batch)
    ctx.memory.seq_rm(1)
    ctx.memory.seq_rm(0, 14)
    with pytest.raises(KVCacheFull, match=r"12 cells are needed; 18 .* but not side by side"):
        ctx.memory.caches[0].find_slot(12)
    ctx.decode([7] * 12)
    assert ctx.memory.used == ctx.memory.caches[0].end == 26
    expected.decode([5] * 14 + [7] * 12)
    assert nmse(ctx.logits, expected.logits) < ROUNDING


def test_failed_computation_leaves_the_cache_as_it_was(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = new(model)
    ctx.decode(IDS)
    ctx.decode([4])
    before = state(ctx)

    def broken(self: Schedule, interruptible: bool = True, n_threads: int | None = None) -> None:
        raise BackendError("broken")

    monkeypatch.setattr(Schedule, "run", broken)
    with pytest.raises(BackendError, match="broken"):
        ctx.decode([5])
    assert state(ctx) == before


@pytest.mark.parametrize("parts", [("cpu",), ("ref", "cpu")])
def test_ctrl_c_waits_until_the_cache_is_whole(
    model: Model, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT before and after every program of the graphs that shift K and close holes."""
    monkeypatch.setattr(cpu_backend, "_LONG_NS", 0)  # every run may be stopped by SIGINT
    graphs: list[int] = []

    def assign(scheduler: Scheduler, graph: Graph) -> dict[Tensor, str]:
        return {t: parts[i * len(parts) // len(graph.nodes)] for i, t in enumerate(graph.nodes)}

    def cache(interrupt: bool) -> list[np.ndarray]:
        ctx = new(model, backend=("cpu", "ref"), flash_attn=True)
        ctx.decode(IDS)
        ctx.memory.seq_rm(0, 2, 5)
        ctx.memory.seq_add(0, 5, -1, -3)
        ctx.memory.defrag()
        with monkeypatch.context() as m:
            m.setattr(Scheduler, "assign", assign)
            if not interrupt:
                ctx.update()
            for program in (CpuProgram, RefProgram) if interrupt else ():
                m.setattr(program, "run", interrupting(program.run))
            for _ in range(3 if interrupt else 0):  # once for each of the two graphs
                try:
                    ctx.update()
                except KeyboardInterrupt:
                    graphs.append(1)
        kv = ctx.memory.caches[0]
        assert not kv.has_shift and not kv.wants_defrag
        return [kv.pos, kv.seq, *(np.array(t.raw()) for t in (*kv.k_l, *kv.v_l))]

    def interrupting(run: Callable[..., None]) -> Callable[..., None]:
        def wrapper(self: object, interruptible: bool = True, n_threads: int | None = None) -> None:
            signal.raise_signal(signal.SIGINT)
            run(self, interruptible, n_threads)
            signal.raise_signal(signal.SIGINT)

        return wrapper

    for got, expected in zip(cache(True), cache(False), strict=True):
        assert np.array_equal(got, expected)
    assert len(graphs) == 2


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], "the batch is empty"),
        ([1, 259], "token 259 is outside the vocabulary of 259"),
        ([-1], "token -1 is outside"),
        ([1 << 40], "token 1099511627776 is outside"),
        ([1 << 70], "whole numbers"),
        ([1.5], "whole numbers"),
        ("text", "whole numbers"),
        ([[1, 2], [3]], "whole numbers"),
        ([5] * 17, "17 tokens in one batch, where n_batch is 16"),
    ],
)
def test_bad_tokens(model: Model, ids: object, text: str) -> None:
    ctx = new(model, n_batch=16)
    with pytest.raises(BatchError, match=text):
        ctx.decode(ids)  # pyright: ignore
    assert ctx.memory.used == 0


def test_bad_batches(model: Model) -> None:
    ctx = new(model, n_seq_max=2)
    ctx.decode([1, 2, 3])
    batch = Batch()
    with pytest.raises(BatchError, match="empty"):
        ctx.decode(batch)
    for call, text in (
        (lambda: batch.add(-1, 0), "token must be a whole number from 0, not -1"),
        (lambda: batch.add(1, -1), "pos must be"),
        (lambda: batch.add(1, 0, -2), "seq_ids must be"),
        (lambda: batch.add(1, 0, []), "no sequence"),
    ):
        with pytest.raises(BatchError, match=text):
            call()
    assert len(batch) == 0
    for tokens, text in (
        ([(4, 0)], "sequence 0 continues at position 3, but the batch has position 4"),
        ([(2, 0)], "sequence 0 continues at position 3, but the batch has position 2"),
        ([(3, 0), (3, 0)], "position 3 of sequence 0 is in the batch twice"),
        ([(0, 1), (2, 1)], "sequence 1 continues at position 1, but the batch has position 2"),
        ([(0, 2)], r"sequence 2 is outside 0\.\.1"),
    ):
        batch.clear()
        for pos, seq in tokens:
            batch.add(1, pos, seq)
        with pytest.raises(BatchError, match=text):
            ctx.decode(batch)
    assert ctx.memory.used == 3


def test_bad_contexts(model: Model) -> None:
    for kwargs, error, text in (
        ({"n_batch": 0}, ModelError, "n_batch must be at least 1"),
        ({"n_ctx": -5}, ModelError, "n_ctx must be at least 1"),
        ({"type_v": DType.Q8_0}, ModelError, "V is transposed"),
        ({"backend": "gpu"}, BackendError, "no backend is called 'gpu'"),
    ):
        with pytest.raises(error, match=text):
            new(model, **kwargs)


def test_sizes(model: Model) -> None:
    assert new(model, n_ctx=33).n_ctx == 64
    assert new(model, n_ctx=33, flash_attn=True).n_ctx == 256
    assert new(model, n_ctx=0).n_ctx == model.hparams.n_ctx_train == 128


def pin_to_ref(monkeypatch: pytest.MonkeyPatch, ctx: LlamaContext, *names: str) -> None:
    """Compute the nodes of these names, in the graphs that are built from now on, with the backend "ref"."""
    original = Architecture.build_stage

    def build_stage(self: Architecture, b: Build) -> None:
        original(self, b)
        for name in names:
            node = b.graph.get_tensor(name)
            assert node is not None
            ctx.scheduler.set_tensor_backend(node, "ref")

    monkeypatch.setattr(Architecture, "build_stage", build_stage)


def test_nodes_pinned_to_ref_give_the_same_logits(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, ctx = new(model), new(model, backend=("cpu", "ref"))
    expected.decode(IDS)
    pin_to_ref(monkeypatch, ctx, "kq-0", "ffn_out-1", "Vcur-1")
    ctx.decode(IDS)
    assert len(ctx.scheduler.splits) > 3
    assert nmse(ctx.logits, expected.logits) < ROUNDING


@pytest.mark.parametrize("backend", ["ref", ("cpu", "ref")])
def test_varying_graphs_on_several_backends(model: Model, backend: object, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, ctx = new(model), new(model, backend=backend)

    def decode(c: LlamaContext) -> None:
        c.decode(IDS)
        for t in range(3, 45):
            c.decode([t])

    decode(expected)
    pin_to_ref(monkeypatch, ctx, "kq-0")
    decode(ctx)
    assert nmse(ctx.logits, expected.logits) < ROUNDING
    assert ctx.n_graphs == 2


# -- embeddings ------------------------------------------------------------------------------------------------------
