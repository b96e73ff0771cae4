"""What a context keeps, what it lets go, and how it is cleared."""

from __future__ import annotations

import gc
import tracemalloc
import weakref

import numpy as np
import pytest

import pyggml as gg
from pyggml.tensor import Tensor

MB = 1 << 20
A = np.ones((512, 512), np.float32)  # 1 MB


def test_evaluations_keep_nothing() -> None:
    """A hundred of them kept 203 MB: constants and results of what nobody holds."""
    x = (ctx := gg.Context()).from_numpy(A)
    gg.eval(x + A)
    gc.disable()  # what is freed is freed at once, not when cycles are looked for
    tracemalloc.start()
    try:
        for _ in range(30):
            assert gg.eval((x + A) * A)[0, 0] == 2
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert now < 2 * MB and peak < 15 * MB
    assert ctx.tensors == [x] and repr(ctx) == f"<Context 1 leafs of {MB} bytes, 0 nodes>"


def test_what_is_held_stays() -> None:
    with gg.Context() as ctx:
        y = ctx.from_numpy(A[0], name="x") * A[1] + A[2]
        ctx.from_numpy(A[0], name="alone")
    assert [t.op for t in ctx.tensors] == ["none", "none", "mul", "none", "add", "none"]
    assert [t.serial for t in ctx.tensors] == sorted(t.serial for t in ctx.tensors)
    g = gg.Graph().build_forward_expand(y)
    gone = weakref.ref(y)
    del y
    assert ctx.get_tensor("node_1") is gone() is not None
    gg.compute(g)
    del g
    assert gone() is None and [t.name for t in ctx.tensors] == ["x", "alone"]


def test_the_list_of_nodes_stays_short() -> None:
    x = (ctx := gg.Context()).from_numpy(A[0, :4])
    held = [x * 2 for _ in range(3000)]
    for _ in range(30_000):
        _ = x * 2
    assert len(ctx.tensors) == len(held) + 2
    assert len(ctx._others) < 10_000  # pyright: ignore[reportPrivateUsage]


def test_a_tensor_that_could_not_be_made_is_not_kept() -> None:
    ctx = gg.Context()
    with pytest.raises(gg.DTypeError):
        ctx.from_numpy([0.5], gg.I32)
    with pytest.raises(gg.ShapeError):
        ctx.from_bytes(b"123", gg.F32, 4)
    assert ctx.tensors == []


def cleared() -> tuple[gg.Context, Tensor, Tensor, gg.Graph]:
    ctx = gg.Context()
    x = ctx.from_numpy([1.0, 2.0], name="x")
    y = (x * 2).set_name("y").set_output()
    g = gg.Graph().build_forward_expand(y)
    gg.compute(g)
    ctx.clear()
    return ctx, x, y, g


def test_clear_frees_what_the_program_still_names() -> None:
    x = (ctx := gg.Context()).from_numpy(A)
    assert x.buffer is not None
    memory = weakref.ref(x.buffer.memory.base)
    view = x.numpy()
    ctx.clear()
    assert ctx.tensors == [] and repr(ctx) == "<Context 0 leafs of 0 bytes, 0 nodes>"
    assert memory() is not None and view.sum() == A.size  # an array of it stays whole
    del view
    assert memory() is None and x.shape == A.shape


def test_tensors_of_a_cleared_context() -> None:
    ctx, x, y, g = cleared()
    for t in (x, y, x[:1]):
        for read in (t.numpy, t.tobytes, lambda t=t: np.asarray(t)):
            with pytest.raises(gg.AllocError, match="has no memory"):
                read()
    run = gg.Scheduler().compute
    for compute in (lambda: gg.compute(g), lambda: gg.eval(y), lambda: gg.eval(x + 1), lambda: run(g)):
        with pytest.raises(gg.GraphError, match="no value for the leaf x"):
            compute()
    assert (ctx.get_tensor("x"), repr(x)) == (None, "<Tensor x: F32 ne [2, 1, 1, 1] op none>")
    x.set([3, 4])
    assert gg.eval(y).tolist() == [6, 8]
    gg.compute(g)
    assert y.numpy().tolist() == [6, 8]
    z = ctx.from_numpy([5.0], name="z")
    assert [t.name for t in ctx.tensors if t.op == "none"] == ["z"] and gg.eval(z + x[:1]).tolist() == [8]


def test_clear_within_its_block_and_twice() -> None:
    with gg.Context() as ctx:
        x = ctx.from_numpy([1.0])
        ctx.clear()
        ctx.clear()
        y = ctx.from_numpy([2.0]) * 2
    assert gg.eval(y) == 4 and x not in set(ctx.tensors)


def test_a_graph_that_runs_while_its_context_is_cleared() -> None:
    """It ends with what it began with."""
    ctx = gg.Context()
    x = ctx.from_numpy([1.0, 2.0])

    def clear(dst: np.ndarray, a: np.ndarray) -> None:
        ctx.clear()
        gc.collect()
        dst[:] = a

    y = gg.map_custom(clear, x * 2) + x
    g = gg.Graph().build_forward_expand(y.set_output())
    gg.compute(g)
    with pytest.raises(gg.AllocError, match="has no memory"):
        y.numpy()


def test_stores_of_a_cleared_context_do_not_count() -> None:
    cache = gg.Context().from_numpy([0.0])
    with gg.Context() as ctx:
        store = gg.scale_inplace(cache, 2.0)
    with pytest.raises(gg.GraphError, match="overwritten"):
        _ = cache + 1
    ctx.clear()
    assert gg.eval(cache + 1) == 1 and store.shape == (1,)


def test_gradients_and_the_reference_leave_nothing_behind() -> None:
    ctx = gg.Context()
    w = ctx.from_numpy(np.ones(4), gg.F32)
    for _ in range(600):
        gg.eval(*gg.grad((w * w).sum(), [w]), backend="ref")
    assert len(ctx.tensors) < 20
    assert len(ctx._others) < 2000
