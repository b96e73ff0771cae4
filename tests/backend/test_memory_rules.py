"""What may be written over what is read; and when a graph is planned again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.backends.cpu import CpuBackend
from pyggml.buffers.overlap import may_overlap, overlaps_itself
from pyggml.tensor import Tensor

PERM = np.array([1, 2, 3, 4, 5, 6, 7, 0], np.int32)


def matrix() -> Tensor:
    return gg.Context().from_numpy(np.arange(64, dtype=np.float32).reshape(8, 8))


def indices() -> Tensor:
    return gg.Context().from_numpy(PERM)


def shifted(x: Tensor, by: int) -> Tensor:
    return gg.view_1d(x, 32, 4 * by)


HEAD = gg.Var("head", 4)
OVERLAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "set_rows": lambda x: gg.set_rows(x, x, indices()),
    "add": lambda x: gg.add_inplace(shifted(x, 0), shifted(x, 1)),
    "mul": lambda x: gg.mul_inplace(x, gg.view_1d(x, 8, 32)),
    "cpy": lambda x: gg.cpy(shifted(x, 0), shifted(x, 1)),
    "cpy transposed": lambda x: gg.cpy(x, gg.transpose(x)),
    "soft_max mask": lambda x: gg.soft_max_ext_inplace(x, x, 1.0, 0.0),
    "repeated rows": lambda x: gg.scale_inplace(gg.view_2d(x, 8, 3, 0, 0), 2.0),
    "rows within rows": lambda x: gg.cpy(indices_as_f32(), gg.view_2d(x, 4, 2, 8, 0)),
    "Var": lambda x: gg.cpy(gg.view_1d(x, 8, 128), gg.view_1d(x, 8, 32 * HEAD)),
}
SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "the same elements": lambda x: gg.add_inplace(x, x),
    "a copy onto itself": lambda x: gg.cpy(x, x),
    "left and right half": lambda x: gg.mul_inplace(gg.view_2d(x, 4, 8, 32, 0), gg.view_2d(x, 4, 8, 32, 16)),
    "every other row": lambda x: gg.cpy(gg.view_2d(x, 8, 4, 64, 0), gg.view_2d(x, 8, 4, 64, 32)),
    "beyond the Var": lambda x: gg.cpy(gg.view_1d(x, 8, 160), gg.view_1d(x, 8, 32 * HEAD)),
    "beside the Var": lambda x: gg.cpy(gg.view_1d(x, 8, 32 * HEAD + 32), gg.view_1d(x, 8, 32 * HEAD)),
}


def indices_as_f32() -> Tensor:
    return gg.Context().from_numpy(PERM.astype(np.float32).reshape(2, 4))


@pytest.mark.parametrize("name", OVERLAPS)
def test_a_result_over_what_is_read_is_refused(name: str) -> None:
    with pytest.raises(gg.ShapeError, match=r"the result is written over (?s:.*)test_memory_rules.py"):
        OVERLAPS[name](matrix())


@pytest.mark.parametrize("name", SHARED)
def test_what_shares_memory_without_harm(name: str) -> None:
    got: list[bytes] = []
    for backend in ("cpu", "ref"):
        x = matrix()
        gg.compute(gg.Graph().build_forward_expand(SHARED[name](x)), backend=backend)
        got.append(x.tobytes())
    assert got[0] == got[1]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_overlap_is_exact(data: st.DataObject) -> None:
    """Against the set of bytes of each view."""
    x = gg.Context().new_tensor(gg.I8, 40)
    views: list[tuple[Tensor, list[int]]] = []
    for _ in range(2):
        n = data.draw(st.lists(st.integers(1, 3), min_size=3, max_size=3))
        nb = data.draw(st.lists(st.integers(0, 7), min_size=2, max_size=2))
        offset = data.draw(st.integers(0, 8))
        t = gg.view_3d(x, n[0], n[1], n[2], nb[0], nb[1], offset)
        places = [offset + i + j * nb[0] + k * nb[1] for i in range(n[0]) for j in range(n[1]) for k in range(n[2])]
        views.append((t, places))
    (a, in_a), (b, in_b) = views
    assert may_overlap(a, b) == bool(set(in_a) & set(in_b))
    if not overlaps_itself(a):
        assert len(set(in_a)) == len(in_a)


@pytest.mark.parametrize("n", [2, 3])
def test_rope_stored_over_its_source(n: int) -> None:
    """Fused, the store would overwrite what rope still has to read."""
    results: list[np.ndarray] = []
    for fusions in ((), ("rope",)):
        with gg.Context() as ctx:
            x = ctx.from_numpy(np.random.default_rng(0).standard_normal((4, 1, 32)).astype(np.float32))
            a = gg.view_3d(x, 32, 1, n, 128, 128, 0)
            rope = gg.rope(a, ctx.from_numpy(np.arange(1, n + 1, dtype=np.int32)), 32, 0)
            stored = gg.cpy(rope, gg.view_1d(x, 32 * n, 128))
        gg.Scheduler([CpuBackend(1, None, fusions)]).compute(gg.Graph().build_forward_expand(stored))
        results.append(x.numpy().copy())
    assert np.array_equal(*results)


# -- planned again ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_a_graph_that_changed_is_planned_again(backend: str) -> None:
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, 4, "x").set_input()
        middle = gg.sqr(x)
        y = gg.scale(gg.sqr(gg.sqr(middle)), 0.5)
        g = gg.Graph().build_forward_expand(y)
        gg.compute(g, {x: np.full(4, 2.0)}, backend=backend)
        assert y.numpy().tolist() == [128.0] * 4
        z = gg.scale(y, 10.0)
        g.build_forward_expand(z)
        gg.compute(g, backend=backend)  # x has the value of the last run
        assert z.numpy().tolist() == [1280.0] * 4
        middle.set_output()
        gg.compute(g, {"x": np.full(4, 3.0)}, backend=backend)
        assert middle.numpy().tolist() == [9.0] * 4


def test_values_that_were_set_stay() -> None:
    """Through other graphs on the same buffers, other backends, and memory that the user gives a leaf later."""
    with gg.Context() as ctx:
        x, other = (ctx.new_tensor(gg.F32, 64, name).set_input() for name in ("x", "other"))
        y, z = gg.sqr(x), gg.neg(gg.sqr(gg.neg(other)))
    g, h = (gg.Graph().build_forward_expand(t) for t in (y, z))
    gg.compute(g, {x: np.ones(64)})
    x.set(np.full(64, 2.0))
    for backend in ("cpu", "ref", "cpu"):
        gg.compute(g, backend=backend)
        assert y.numpy().tolist() == [4.0] * 64
    sched = gg.Scheduler(("cpu",))
    sched.compute(g)
    sched.alloc(h)
    other.set(np.full(64, 9.0))
    sched.compute(h)
    sched.compute(g)
    assert y.numpy().tolist() == [4.0] * 64
    x.allocate()
    x.set(np.full(64, 5.0))
    sched.compute(g)
    assert y.numpy().tolist() == [25.0] * 64


def test_an_input_without_value_is_refused() -> None:
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, 4, "x").set_input()
        g = gg.Graph().build_forward_expand(gg.sqr(x))
    sched = gg.Scheduler(("cpu",))
    for _ in range(2):
        with pytest.raises(gg.GraphError, match="no value for the input x"):
            sched.compute(g)
        sched.alloc(g)
    x.set(np.ones(4))
    sched.compute(g)


def test_inputs_by_name() -> None:
    with gg.Context() as ctx:
        x, a, b = (ctx.new_tensor(gg.F32, 2, name).set_input() for name in ("x", "twin", "twin"))
        y = gg.add(gg.add(x, a), b)
    g = gg.Graph().build_forward_expand(y)
    gg.compute(g, {"x": [1, 2], a: [3, 4], b: [5, 6]})
    assert y.numpy().tolist() == [9.0, 12.0]
    for name, n in (("twin", 2), ("nobody", 0)):
        with pytest.raises(gg.GraphError, match=f"{n} leafs of this graph are called '{name}'"):
            gg.compute(g, {name: [1, 2]})
