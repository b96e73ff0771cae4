"""Nodes that read memory which others write over: refused, or what NumPy computes line by line."""

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
from pyggml.tensor import Tensor

Line = Callable[[list[Any]], Any]  # one line of a program on NumPy's arrays, given the results of those before it


class Program:
    """A program on tensors and, line by line, on NumPy's arrays."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw, self.graph, self.ctx = data.draw, gg.Graph(), gg.Context()
        self.start = [np.arange(1.0, 9.0, dtype=np.float32) * (i + 1) for i in range(2)]
        self.tensors: list[Tensor] = [self.ctx.from_numpy(x) for x in self.start]
        self.lines: list[Line] = [lambda env, x=x: x.copy() for x in self.start]

    def add(self, t: Tensor, line: Line) -> None:
        self.tensors.append(t)
        self.lines.append(line)

    def any(self, least: int = 1, most: int = 8) -> int:
        """A tensor of so many elements."""
        return self.draw(st.sampled_from([i for i, t in enumerate(self.tensors) if least <= t.n_elements <= most]))

    def step(self) -> None:
        """Record a line, or refuse to."""
        kind = self.draw(st.sampled_from(("new", "new", "view", "over", "over", "cpy", "set", "rows", "build")))
        i = self.any()
        a = self.tensors[i]
        n = a.n_elements
        j = self.any(n, n)
        b = self.tensors[j]
        if kind == "build":
            self.graph.build_forward_expand(a)
        elif kind == "new":
            two = self.draw(st.booleans())
            t = gg.add(a, b) if two else gg.scale(a, 2.0)
            self.add(t, lambda env: env[i] + env[j] if two else env[i] * 2)
        elif kind == "view":
            first, step = self.draw(st.integers(0, n - 1)), self.draw(st.integers(1, 2))
            end = self.draw(st.integers(first + 1, n))
            self.add(a[first:end:step], lambda env: env[i][first:end:step])
        elif kind == "over":
            two = self.draw(st.booleans())
            t = gg.add_inplace(a, b) if two else gg.neg_inplace(a)
            self.add(t, lambda env: np.add(env[i], env[j], out=env[i]) if two else np.negative(env[i], out=env[i]))
        elif kind == "cpy":
            self.add(gg.cpy(a, b), lambda env: put(env[j], slice(None), env[i]))
        elif kind == "set":
            more, k = self.draw(st.booleans()), self.any(1, n)
            c = self.tensors[k]
            at = self.draw(st.integers(0, n - c.n_elements))
            t = gg.acc_inplace(a, c, *a.nb[1:], 4 * at) if more else gg.set_1d_inplace(a, c, 4 * at)
            to = slice(at, at + c.n_elements)
            self.add(t, lambda env: put(env[i], to, env[i][to] + env[k] if more else env[k]))
        else:
            ids = self.draw(st.permutations(range(n)))
            where = self.ctx.from_numpy(np.array(ids[: b.n_elements], np.int32))
            t = gg.set_rows(gg.reshape_2d(a, 1, n), gg.reshape_2d(b, 1, n), where)
            self.add(gg.reshape_1d(t, n), lambda env: put(env[i], ids, env[j]))


def put(to: Any, where: Any, x: Any) -> Any:
    to[where] = np.array(x)
    return to


def run(program: Program, only: Callable[[Tensor], bool]) -> tuple[list[Any], list[Any]]:
    """The lines that count: their arrays in the end, and as they were when the line was done."""
    env: list[Any] = []
    then: list[Any] = []
    for t, line in zip(program.tensors, program.lines, strict=True):
        env.append(line(env) if only(t) else None)
        then.append(None if env[-1] is None else env[-1].copy())
    return env, then


REFUSED = r"hazard: |was overwritten by the "


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_programs_mean_what_they_say_in_any_order(data: st.DataObject) -> None:
    """With the outputs in any order, and any of them missing."""
    p = Program(data)
    for _ in range(data.draw(st.integers(2, 10))):
        try:
            p.step()
        except gg.ShapeError:  # the result would lie over what is read
            continue
        except gg.GraphError as e:
            assert "was overwritten by the" in str(e) and __file__ in str(e)
            continue
    outputs = data.draw(st.permutations(range(2, len(p.tensors))))
    outputs = [i for i in outputs[: data.draw(st.integers(1, 5))] if p.tensors[i].op != "none"]
    for i in outputs:
        p.graph.build_forward_expand(p.tensors[i].set_output())
    if not p.graph.nodes:
        return
    try:
        gg.Scheduler(("cpu",)).plan(p.graph)
    except gg.GraphError as e:
        assert str(e).startswith("hazard: ") and str(e).count(__file__) == 2
        return
    leafs = {*p.tensors[:2]}
    want, then = run(p, lambda t: t in p.graph or t in leafs)
    _, everything = run(p, lambda t: True)
    for backend in ("cpu", "ref"):
        for t, x in zip(p.tensors, p.start, strict=False):
            t.set(x)
        gg.compute(p.graph, backend=backend)
        for i in outputs:
            np.testing.assert_array_equal(p.tensors[i].numpy(), want[i])
    for i, t in enumerate(p.tensors):
        if t in p.graph and (t.view_src is None or i in outputs):
            np.testing.assert_array_equal(then[i], everything[i])  # what is not in the graph changes nothing


# -- single cases ------------------------------------------------------------------------------------------------------


def leaf(*values: float, name: str = "x") -> Tensor:
    return CTX.from_numpy(np.array(values, np.float32), name=name)


CTX = gg.Context()


def test_what_an_op_has_overwritten_is_not_read_by_its_old_name() -> None:
    """Whatever the order of outputs would be: it gave 400 or 4."""
    h = leaf(4) * 1
    after = gg.scale_inplace(h, 100)
    with pytest.raises(gg.GraphError) as e:
        _ = h * 1
    assert "a was overwritten by the scale in place at " in str(e.value) and str(e.value).count(__file__) == 2
    assert "read the result of that, or make a copy before it (gg.dup(a))" in str(e.value)
    for read in (lambda: h[:1] + 1, lambda: after + h, lambda: gg.neg_inplace(h), lambda: gg.cpy(h, leaf(0))):
        with pytest.raises(gg.GraphError, match="was overwritten by the scale"):
            read()
    assert gg.eval(after * 1, after[:1] + gg.neg(after)) == (400, 0)


def test_what_reads_before_and_writes_after_run_in_that_order() -> None:
    h = (leaf(4) * 1).set_name("h")
    before = (h * 1).set_name("before")
    copy = gg.dup(h)
    after = gg.scale_inplace(h, 100).set_name("after")
    assert gg.eval(before, after) == (4, 400)
    with pytest.raises(gg.GraphError) as e:
        gg.eval(after, before)
    text = str(e.value)
    assert text.startswith("hazard: scale after writes over what scale before reads, and runs before it in this graph")
    assert "name scale before first" in text and "(gg.dup)" in text and "the memory = h: F32" in text
    assert text.count(f"recorded at {__file__}") == 2
    assert gg.eval(copy * 1, after) == (4, 400)
    with pytest.raises(gg.GraphError, match="hazard"):
        gg.Scheduler().plan(gg.Graph().build_forward_expand(after).build_forward_expand(copy))


def test_two_that_write_the_same_bytes_run_in_order() -> None:
    x = leaf(1, 2)
    one, two = gg.cpy(leaf(3, 4), x), gg.cpy(leaf(5, 6), x)
    assert gg.eval(one, two)[1].tolist() == [5, 6]
    with pytest.raises(gg.GraphError, match=r"cpy .* writes over what cpy .* writes over"):
        gg.eval(two, one)


def cache_and_reader() -> tuple[Tensor, Tensor, Tensor]:
    """As in models: a store into a cache, and a product that reads what is in the cache."""
    cache = leaf(*[0] * 8, name="cache")
    store = gg.cpy(leaf(1, 2, name="k"), cache[2:4]).set_name("store")
    return cache, store, (cache[:4] * 10).set_name("reader")


def test_a_cache_is_stored_to_and_read() -> None:
    _, store, y = cache_and_reader()
    assert gg.eval(store, y)[1].tolist() == [0, 0, 10, 20]
    cache, store, y = cache_and_reader()
    g = gg.Graph().build_forward_expand(store).build_forward_expand(y)
    gg.compute(g)
    assert y.numpy().tolist() == [0, 0, 10, 20]
    assert gg.eval(cache[3:] + 0).tolist() == [2, 0, 0, 0, 0]  # another graph: the cache is as it is


def test_a_reader_whose_store_comes_late_or_never() -> None:
    cache, store, y = cache_and_reader()
    g = gg.Graph().build_forward_expand(cache[4:] * 2).build_forward_expand(y)
    with pytest.raises(
        gg.GraphError, match="reader reads what cpy store has overwritten before, but cpy store is in n"
    ):
        gg.Scheduler().reserve(g)
    g.build_forward_expand(store)
    late = "reader reads what cpy store writes over, and runs before it in this graph, but was recorded after it: name"
    with pytest.raises(gg.GraphError, match=f"{late} cpy store first"):
        gg.Scheduler().reserve(g)


@pytest.mark.parametrize("read", [lambda c: c[:4] * 10, lambda c: c[:4]])
def test_a_store_that_is_in_no_graph(read: Callable[[Tensor], Tensor]) -> None:
    cache, store, _ = cache_and_reader()
    with pytest.raises(gg.GraphError, match=r"name it first .*read its result, or a copy that was made before it"):
        gg.eval(read(cache))
    assert gg.eval(cache[4:] * 2).tolist() == [0] * 4  # other bytes
    assert gg.eval(store, read(cache))[0].tolist() == [1, 2]


def test_a_store_into_a_node_of_another_graph() -> None:
    h = leaf(1, 2) * 2
    store = gg.cpy(leaf(5), h[:1])
    first = gg.Graph().build_forward_expand(store)
    y = h * 10
    with pytest.raises(gg.GraphError, match="not in this graph"):
        gg.eval(y)
    gg.compute(first.build_forward_expand(y))
    assert y.numpy().tolist() == [50, 40]
    del store, first
    assert gg.eval(h * 10).tolist() == [20, 40]  # nobody holds the store: it never runs


def test_a_state_that_lives_on() -> None:
    state = leaf(0)
    for i in range(5):
        now = gg.add_inplace(state, leaf(1))
        assert gg.eval(now) == i + 1
        assert gg.eval(state * 2) == 2 * i + 2
    y = state * 1
    now = gg.add_inplace(state, leaf(1))
    assert gg.eval(y, now)[0] == 5 and gg.eval(state) == 6


def test_other_bytes_are_no_hazard() -> None:
    x = leaf(*range(8))
    left, right = gg.scale_inplace(x[:4], 10), gg.neg_inplace(x[4:])
    assert gg.eval(right, left)[1].tolist() == [0, 10, 20, 30]
    buffer = gg.fill(leaf(*[0] * 6), 1.0)
    one = gg.set_1d_inplace(buffer, leaf(7, 8), 0)
    two = gg.acc_inplace(one, leaf(7, 8), *buffer.nb[1:], 16)
    side = buffer[2:4] * 3  # between the two regions
    with pytest.raises(gg.GraphError, match="overwritten by the set"):
        _ = buffer[:3] * 1
    assert gg.eval(two, side)[0].tolist() == [7, 8, 1, 1, 8, 9]


def test_a_place_that_follows_a_var() -> None:
    head = gg.Var("head", 6)
    cache = leaf(*[0] * 8)
    at = gg.view_1d(cache, 2, 4 * head)
    old = cache * 1
    store = gg.cpy(leaf(1, 2), at)
    g = gg.Graph().build_forward_expand(store).build_forward_expand(cache * 10)
    y = g.nodes[-1]
    for i in range(3):
        head.bind(2 * i)
        gg.compute(g)
    assert y.numpy().tolist() == [10, 20] * 3 + [0, 0]
    with pytest.raises(gg.GraphError, match="hazard"):
        gg.compute(g.build_forward_expand(old))


def test_a_store_that_is_named_again_in_another_graph() -> None:
    x = leaf(1)
    store = gg.scale_inplace(x, 2)
    gg.eval(store)
    y = x * 1
    with pytest.raises(gg.GraphError, match="hazard"):
        gg.eval(y, store)
    assert gg.eval(store, y)[1] == 4


def test_layers_that_are_repeated() -> None:
    """Copies of stores and readers are in order; what was recorded before them is not."""
    caches = [leaf(0, 0, name=f"c{i}") for i in range(2)]
    early = caches[1] * 1
    g = gg.Graph().build_forward_expand(gg.cpy(leaf(1, 2), caches[0]))
    g.build_forward_expand(caches[0] * 3)
    g.repeat(range(g.n_nodes), {caches[0]: caches[1]}, [""] * g.n_nodes)
    gg.compute(g)
    assert g.nodes[-1].numpy().tolist() == [3, 6]
    with pytest.raises(gg.GraphError, match="hazard"):
        gg.compute(g.build_forward_expand(early))


def test_a_copy_onto_itself_reads() -> None:
    x = leaf(1)
    store = gg.scale_inplace(x, 2)
    with pytest.raises(gg.GraphError, match="overwritten"):
        gg.cpy(x, x)
    assert gg.eval(gg.cpy(store, x)) == 2


def test_asking_for_what_was_overwritten() -> None:
    """By its old name, as readers do: `eval` refuses it, whether the op in place runs with it or not."""
    x = leaf(1, 2, 3)
    h = (x * 2).set_name("h")
    assert gg.eval(h).tolist() == [2, 4, 6]
    half = gg.scale_inplace(h, 0.5)
    for asked in ((h,), (h, half), (half, h), (h[1:],)):
        with pytest.raises(gg.GraphError, match=r"was overwritten by the scale in place at .*test_hazards.py"):
            gg.eval(*asked)
    assert gg.eval(half).tolist() == [1, 2, 3]
    again = gg.neg_inplace(half)
    with pytest.raises(gg.GraphError, match="overwritten by the neg in place"):
        gg.eval(half)
    assert gg.eval(again).tolist() == [-1, -2, -3]
    del half, again  # nobody can run them
    assert gg.eval(h).tolist() == [2, 4, 6]


def test_asking_for_parts_of_what_was_overwritten() -> None:
    h = leaf(1, 2, 3, 4) * 1
    front, back = h[:2], h[2:]
    minus = gg.neg_inplace(front)
    assert gg.eval(back).tolist() == [3, 4] and gg.eval(minus).tolist() == [-1, -2]
    with pytest.raises(gg.GraphError, match="overwritten"):
        gg.eval(h)


def test_asking_for_what_a_store_has_overwritten() -> None:
    x = leaf(1, 2)
    h = x * 2
    store = gg.cpy(x, h)
    with pytest.raises(gg.GraphError, match=r"cpy .* is not in this graph"):
        gg.eval(h)
    assert [a.tolist() for a in gg.eval(store, h)] == [[1, 2], [1, 2]]


def test_asking_for_a_leaf_that_is_overwritten() -> None:
    """Its values are there until the op in place has run, and the new ones then."""
    x = leaf(1, 2)
    minus = gg.neg_inplace(x)
    with pytest.raises(gg.GraphError, match="overwritten"):
        gg.eval(x)
    assert gg.eval(minus).tolist() == [-1, -2] == gg.eval(x).tolist()


def test_memory_that_two_backends_share() -> None:
    """What was copied to a backend before it was written is copied again."""
    for backend in ("cpu", "ref"):
        x = leaf(1, 2)
        double, minus = x * 2, gg.neg_inplace(x)
        again = gg.cpy(minus, x)
        assert [a.tolist() for a in gg.eval(double, minus, again, backend=backend)] == [[2, 4], [-1, -2], [-1, -2]]


def test_threads_that_write_one_leaf() -> None:
    x, errors = leaf(*[0] * 4), list[BaseException]()

    def work(i: int) -> None:
        try:
            for _ in range(50):
                store = gg.cpy(leaf(i), x[i : i + 1])
                gg.Graph().build_forward_expand(store).build_forward_expand(x[i : i + 1] * 2)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == [] and gg.eval(x + 1).tolist() == [1] * 4


def test_a_store_that_another_thread_has_recorded() -> None:
    """It stands in no line of this program, and has not run: what this program reads is what it has stored itself."""
    x, late = leaf(0), list[Tensor]()
    stored = gg.cpy(leaf(1), x)
    thread = threading.Thread(target=lambda: late.append(gg.cpy(leaf(2), x)))
    thread.start()
    thread.join()
    assert gg.eval(stored).tolist() == [1] and gg.eval(x * 3).tolist() == [3]
    assert gg.eval(*late).tolist() == [2] and gg.eval(x * 3).tolist() == [6]


def test_a_model_goes_on_when_building_its_graph_was_interrupted(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store into the cache was recorded, and never built; the traceback keeps it."""
    ctx = gg.load_model(tiny).new_context(64)
    build = gg.Graph.build_forward_expand

    def interrupted(self: gg.Graph, t: Tensor) -> gg.Graph:
        if t.op == "cpy":
            raise KeyboardInterrupt
        return build(self, t)

    monkeypatch.setattr(gg.Graph, "build_forward_expand", interrupted)
    with pytest.raises(KeyboardInterrupt) as held:
        ctx.decode([5, 6, 7])
    monkeypatch.undo()
    ctx.decode([5, 6, 7])
    assert held.value is not None and np.isfinite(ctx.logits).all()
