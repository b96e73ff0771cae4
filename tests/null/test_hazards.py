"""Nodes that read memory which others write over: refused, or what NumPy computes line by line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
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


@settings(max_examples=300, deadline=None)
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
