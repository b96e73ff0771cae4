"""Taps show what is computed and change nothing; edits are seen by all that reads what they changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.errors import DTypeError, GraphError, ShapeError
from pyggml.inspect.taps import Edit, Tap
from pyggml.llm.model import Model, load_model

IDS = [5, 6, 7, 250, 9, 11, 30]


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


def logits(model: Model, ids: list[int] = IDS, **options: Any) -> Any:
    ctx = model.new_context(n_ctx=64, type_k=gg.F32, type_v=gg.F32, **options)
    ctx.decode(ids)
    return ctx.logits.copy()


def names_of(model: Model) -> list[str]:
    """Of the nodes that compute something, or view it."""
    return sorted({t.name for t in model.new_context(n_ctx=64).build_graph(len(IDS)).nodes})


def test_every_node_is_as_the_reference_has_it(model: Model) -> None:
    with model.tap("*") as cpu:
        logits(model)
    with model.tap("*") as ref:
        logits(model, backend="ref")
    assert list(cpu) == list(ref) and sorted(cpu) == names_of(model)
    for name, (want,) in ref.items():
        (got,) = cpu[name]
        if "cache" not in name:  # the other cells hold whatever they held
            scale = float(np.abs(want[np.isfinite(want)]).max(initial=0))
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * scale, err_msg=name)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_looking_changes_nothing(model: Model, data: st.DataObject) -> None:
    """But for attention's rounding where its scores are looked at."""
    options: Any = {"n_threads": data.draw(st.sampled_from((1, 2))), "flash_attn": data.draw(st.booleans())}
    options["n_ubatch"] = data.draw(st.sampled_from((64, 3)))
    chosen = data.draw(st.lists(st.sampled_from(names_of(model)), min_size=1, max_size=5, unique=True))
    want = logits(model, **options)
    with model.tap(*chosen) as t:
        got = logits(model, **options)
    assert {*t} <= {*chosen} and (options["flash_attn"] or {*t} == {*chosen})
    assert all(len(arrays) == (3 if options["n_ubatch"] == 3 else 1) for arrays in t.values())
    if any("k" in (what := name.split("-")[0]) or what == "v" for name in chosen):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    else:
        assert np.array_equal(got, want)
    assert np.array_equal(logits(model, **options), want)  # and no one looks any more


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_edits_are_seen(model: Model, data: st.DataObject) -> None:
    """A change of any node has the same effect on the cpu, with all its fusions, as on the reference."""
    name = data.draw(st.sampled_from([n for n in names_of(model) if "cache" not in n]))

    def change(x: Any) -> Any:
        x[...] = np.where(np.isfinite(x), x * 0.5, x)

    with model.edit(name, change) as e:
        got = logits(model)
    with model.edit(name, change):
        want = logits(model, backend="ref")
    assert e.n == 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * float(np.abs(want).max()))


def test_scores_with_flash_attention(model: Model) -> None:
    with model.tap("kq_soft_max_ext-1") as t:
        got = logits(model, flash_attn=True)
    (weights,) = t["kq_soft_max_ext-1"]
    assert weights.shape == (4, len(IDS), 256)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)
    np.testing.assert_allclose(got, logits(model), rtol=0, atol=1e-5)


def test_what_is_returned_replaces(model: Model) -> None:
    plain = logits(model)
    with model.edit("l_out-0", lambda x: np.zeros_like(x)), model.tap("l_out-0") as t:
        assert not np.array_equal(logits(model), plain)
    assert not t["l_out-0"][0].any()  # later watchers see what earlier ones made of it
    with (
        pytest.raises(ShapeError, match=r"edit of l_out-0.*\(1, 32\), not \(7, 32\)"),
        model.edit("l_out-0", lambda x: x[:1]),
    ):
        logits(model)
    assert np.array_equal(logits(model), plain)


def test_an_edit_that_fails_leaves_the_cache_as_it_was(model: Model) -> None:
    ctx = model.new_context(n_ctx=64)
    ctx.decode(IDS)

    def fail(x: Any) -> None:
        raise ZeroDivisionError("mine")

    with (
        pytest.raises(
            GraphError, match=r"the edit of l_out-1: F32 ne \[32, 1, 1, 1\], op add: ZeroDivisionError: mine"
        ) as raised,
        model.edit("l_out-1", fail),
    ):
        ctx.decode([5])
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert ctx.memory.seq_pos_max(0) == len(IDS) - 1
    ctx.decode([5])
    assert np.isfinite(ctx.logits).all() and ctx.memory.seq_pos_max(0) == len(IDS)


def test_callback_sees_the_memory(model: Model) -> None:
    seen: list[tuple[str, Any]] = []
    with model.tap("l_out-*", callback=lambda name, x: seen.append((name, x))):
        logits(model)
    assert [name for name, _ in seen] == ["l_out-0", "l_out-1"]
    assert not any(x.flags.writeable for _, x in seen)


@pytest.mark.parametrize("flash_attn", [False, True])
def test_arrays_are_contiguous_and_of_one_shape(model: Model, flash_attn: bool) -> None:
    """Whatever computes attention, and however a node lies in memory."""
    seen: dict[str, tuple[Any, bool]] = {}

    def see(name: str, x: Any) -> None:
        seen[name] = x.shape, x.flags.c_contiguous

    for name in names_of(model):  # one after the other: "*" would have no layer attend with flash attention
        with model.tap(name, callback=see):
            logits(model, flash_attn=flash_attn)
    assert all(contiguous for _, contiguous in seen.values())
    n = len(IDS)
    assert seen["kqv_merged-0"][0] == (n, 4, 8) and seen["kqv_merged_cont-0"][0] == (n, 32)
    assert seen["kqv-0"][0] == (4, n, 8) and seen["v-0"][0][:2] == (2, 8)


@pytest.mark.filterwarnings("ignore:.*no node is called so")
@pytest.mark.parametrize("flash_attn", [False, True])
def test_what_is_written_through_a_view_is_kept(model: Model, flash_attn: bool) -> None:
    """Of every node; flash attention has V as it is."""
    plain = logits(model, flash_attn=flash_attn)

    def zero(x: Any) -> None:
        x.reshape(-1)[:] = 0

    for name in names_of(model):
        if "cache" not in name:
            with model.edit(name, zero) as e:
                got = logits(model, flash_attn=flash_attn)
            assert np.array_equal(got, plain) == (e.n == 0) and (e.n or "transposed" in name or name[:5] == "node_"), (
                name
            )


def test_an_edit_that_changes_nothing_warns_once(model: Model) -> None:
    ctx = model.new_context(n_ctx=64)
    warned = pytest.warns(RuntimeWarning, match=r"the edit of kqv_merged-0: .* changed nothing and returned None")
    with warned as found, model.edit("kqv_merged-0", lambda x: None):
        ctx.decode(IDS)
        ctx.decode([5])
    assert [w.filename for w in found] == [__file__]
    with model.edit("kqv_merged-0", lambda x: x):
        ctx.decode([5])


def test_an_edit_of_a_name_that_no_node_has_warns(model: Model) -> None:
    ctx = model.new_context(n_ctx=64)
    warned = pytest.warns(
        RuntimeWarning, match=r"the edit of l_outt-0 changed nothing: no node is called so; near: l_out"
    )
    with warned as found, model.edit("l_outt-0", np.zeros_like):
        ctx.decode(IDS)
    assert [w.filename for w in found] == [__file__]
    with model.edit("l_outt-0", np.zeros_like):  # nothing runs
        pass


def test_an_error_in_a_callback_names_the_node(model: Model) -> None:
    error = pytest.raises(GraphError, match=r"the tap of l_out-1: F32.*KeyError: 'x'")
    with error, model.tap("l_out-1", callback=lambda name, x: {}["x"]):
        logits(model)


def test_an_error_of_pyggml_keeps_its_class_and_names_the_node(model: Model) -> None:
    def fail(x: Any) -> None:
        raise gg.KVCacheFull("no room", needed=3, free=2)

    where = r"the edit of l_out-1: F32 ne \[32, n_outputs, 1, 1\], op add: no room"
    with pytest.raises(gg.KVCacheFull, match=where) as raised, model.edit("l_out-1", fail):
        logits(model)
    assert (raised.value.needed, raised.value.free) == (3, 2) and isinstance(raised.value.__cause__, gg.KVCacheFull)


def test_generation_is_steered(model: Model) -> None:
    """Contexts that are made later, and graphs that serve a range of n_kv, are watched, too."""
    plain = "".join(model.generate("abc", 60, temp=0.0))
    with model.tap("result_norm") as t:
        assert "".join(model.generate("abc", 60, temp=0.0)) == plain
    assert len(t["result_norm"]) >= 60
    with model.edit("result_norm", np.negative):
        assert "".join(model.generate("abc", 60, temp=0.0)) != plain
    assert "".join(model.generate("abc", 60, temp=0.0)) == plain


def test_nodes_with_a_size_that_varies_are_edited(model: Model) -> None:
    """A graph that serves a range of n_kv stores what an edit gives for the n_kv of this run."""
    ctx = model.new_context(n_ctx=96, n_threads=1)
    for n in (2, 1, 1, 40, 1):
        with model.tap("kq-1", "kqv-1") as t, model.edit("kq_soft_max_ext-1", lambda a: a * 0):
            ctx.decode([5] * n)
        assert t["kq-1"][0].shape[-1] == (32 if ctx.memory.used <= 32 else 64)
        assert not t["kqv-1"][0][..., :n, :].any()
    error = pytest.raises(ShapeError, match=r"gave shape \(1, 1, 64\), not \(\d+, 1, 64\)")
    with error, model.edit("kq_soft_max_ext-1", lambda a: a[:1]):
        ctx.decode([5])


def test_of_several_nodes_of_one_name_the_last() -> None:
    """Product and sum of a linear layer with bias are called the same."""
    with gg.Context() as c:
        x = c.from_numpy(np.ones((2, 4), np.float32))
        y = gg.scale(x, 2.0).set_name("y")
        z = gg.add(y, x).set_name("y")
        graph = gg.Graph().build_forward_expand(gg.scale(z, 10.0))
    scheduler = gg.Scheduler(("cpu",))
    with Tap(scheduler.watches, ("y",)) as t, Edit(scheduler.watches, ("y",), lambda a: a + 1):
        scheduler.compute(graph)
    assert t["y"][0].tolist() == [[3.0] * 4] * 2
    assert graph.nodes[-1].numpy().tolist() == [[40.0] * 4] * 2


def test_block_types_are_stored_back() -> None:
    """A node of a type that NumPy does not have."""
    with gg.Context() as c:
        x = c.from_numpy(np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32))
        half = gg.cast(x, gg.BF16).set_name("half")
        graph = gg.Graph().build_forward_expand(gg.cast(half, gg.F32))
    scheduler = gg.Scheduler(("cpu",))

    def double(a: Any) -> None:
        a *= 2

    with Edit(scheduler.watches, ("half",), double):
        scheduler.compute(graph)
    np.testing.assert_allclose(graph.nodes[-1].numpy(), 2 * x.numpy(), atol=1e-2)


@pytest.mark.parametrize("bad", [(), ("",), (3,), (None,)])
def test_what_is_no_name(model: Model, bad: tuple[Any, ...]) -> None:
    with pytest.raises(GraphError, match=r"a tuple of names: \('text',\), not 'text'"):
        Tap(model.watches, "text")  # pyright: ignore[reportArgumentType]
    with pytest.raises(GraphError, match="names of nodes"):
        model.tap(*bad)


def test_what_is_no_function(model: Model) -> None:
    with pytest.raises(GraphError, match="function"):
        model.edit("l_out-0", 3)  # pyright: ignore[reportArgumentType]


def test_names_that_did_not_come(model: Model) -> None:
    with model.tap("l_out-*") as t:
        logits(model)
    with pytest.raises(KeyError, match=r"l_outt-0.*near: l_out-"):
        t["l_outt-0"]
    t.clear()
    assert len(t) == 0


def test_threads_that_come_and_go_leave_nothing(model: Model) -> None:
    def come_and_go() -> None:
        for _ in range(3000):
            with model.edit("l_out-0", np.zeros_like):
                pass

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not model.watches.now


def test_a_callback_cannot_run_what_it_looks_into(model: Model) -> None:
    ctx = model.new_context(n_ctx=64)
    with (
        model.tap("l_out-1", callback=lambda name, x: ctx.decode([5])),
        pytest.raises(GraphError, match="another context"),
    ):
        ctx.decode(IDS)
    assert ctx.memory.used == 0
    seen: list[Any] = []

    def other(name: str, x: Any) -> None:
        if not seen:
            seen.append(None)
            seen[0] = logits(model)

    with model.tap("l_out-1", callback=other):
        got = logits(model)
    assert np.array_equal(seen[0], got) and np.array_equal(got, logits(model))


CHANGES: dict[str, Callable[[Any, Path], object]] = {
    "clear": lambda ctx, path: ctx.memory.clear(),
    "seq_rm": lambda ctx, path: ctx.memory.seq_rm(0),
    "seq_cp": lambda ctx, path: ctx.memory.seq_cp(0, 1),
    "seq_keep": lambda ctx, path: ctx.memory.seq_keep(1),
    "seq_add": lambda ctx, path: ctx.memory.seq_add(0, 0, -1, 3),
    "seq_div": lambda ctx, path: ctx.memory.seq_div(0, 0, -1, 2),
    "decode": lambda ctx, path: ctx.decode([5]),
    "encode": lambda ctx, path: ctx.encode([5]),
    "warmup": lambda ctx, path: ctx.warmup(),
    "update": lambda ctx, path: ctx.update(),
    "keep_hidden": lambda ctx, path: ctx.keep_hidden(),
    "set_loras": lambda ctx, path: ctx.set_loras([]),
    "set_control_vector": lambda ctx, path: ctx.set_control_vector(None),
    "save_state": lambda ctx, path: ctx.save_state(path / "new"),
    "load_state": lambda ctx, path: ctx.load_state(path / "state"),
    "load_seq": lambda ctx, path: ctx.load_seq(path / "seq"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_callback_cannot_change_what_it_looks_into(model: Model, tmp_path: Path, what: str) -> None:
    ctx = model.new_context(n_ctx=64, n_seq_max=2)
    ctx.decode([5, 6])
    ctx.save_state(tmp_path / "state")
    ctx.save_seq(tmp_path / "seq", 0)
    with (
        model.tap("l_out-1", callback=lambda name, x: CHANGES[what](ctx, tmp_path)),
        pytest.raises(GraphError, match=r"tap or an edit of l_out-1 looks into is not finished.*another context"),
    ):
        ctx.decode([7])
    ctx.decode([7])
    other = model.new_context(n_ctx=64, n_seq_max=2)
    other.decode([5, 6])
    other.decode([7])
    assert np.array_equal(ctx.logits, other.logits)


def test_a_callback_can_read_what_it_looks_into(model: Model) -> None:
    ctx = model.new_context(n_ctx=64)
    ctx.decode(IDS)
    seen: list[Any] = []

    def read(name: str, x: Any) -> None:
        seen.append((ctx.memory.seq_pos_max(0), ctx.logits_ith(-1).shape, ctx.n_ctx, ctx.build_graph(1).n_nodes > 0))

    with model.tap("l_out-1", callback=read):
        ctx.decode([5])
    assert seen == [(len(IDS), (model.hparams.n_vocab,), 64, True)]


def test_taps_of_the_same_names_share_their_graphs(model: Model) -> None:
    ctx = model.new_context(n_ctx=64)
    ctx.decode(IDS)
    kept: list[int] = []
    for _ in range(3):
        with model.tap("l_out-1") as t:
            ctx.decode([5])
        assert len(t["l_out-1"]) == 1
        kept.append(ctx.n_graphs)
    assert kept[0] == kept[2]


@pytest.mark.parametrize("bad", [1j, None, "x"])
def test_an_edit_gives_real_numbers(model: Model, bad: Any) -> None:
    with pytest.raises(DTypeError, match="edit"), model.edit("l_out-0", lambda x: np.full(x.shape, bad)):
        logits(model)
