"""Threads that evaluate graphs with tensors, inputs or Vars in common take turns; others do not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from sys import getswitchinterval, setswitchinterval
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.turn import Turn

from ..child import in_child

W = np.random.default_rng(3).integers(-4, 5, (64, 64)).astype(np.float32)


@pytest.fixture(autouse=True)
def switching() -> Iterator[None]:
    """Threads change often."""
    before = getswitchinterval()
    setswitchinterval(1e-5)
    yield
    setswitchinterval(before)


def in_threads(work: Callable[[int], Any], n: int = 100) -> list[Any]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(work, range(n)))


@pytest.mark.parametrize("varies", [False, True])
def test_threads_that_evaluate_the_same_tensors(varies: bool) -> None:
    """Each gets the values of its inputs, whatever size they have; inputs that are asked for, too."""
    ctx = gg.Context()
    w = ctx.from_numpy(W)
    x = ctx.new_tensor(gg.F32, (64, gg.Var("n", hi=8) if varies else 4))
    y = gg.mul_mat(w, x) + 1

    def work(i: int) -> None:
        rows = np.full((i % 8 + 1 if varies else 4, 64), i % 16, np.float32)
        out, given = gg.eval(y, x, inputs={x: rows})
        assert out.tolist() == (rows @ W.T + 1).tolist() and given.tolist() == rows.tolist()

    in_threads(work)


def test_threads_whose_graphs_share_a_var() -> None:
    ctx, n = gg.Context(), gg.Var("n", hi=8)

    def work(i: int) -> None:
        x = ctx.new_tensor(gg.F32, (64, n))
        rows = np.full((i % 8 + 1, 64), i, np.float32)
        graph = gg.Graph().build_forward_expand(x + 1)
        gg.compute(graph, {x: rows})
        assert gg.eval(x * 2, inputs={x: rows}).tolist() == (rows * 2).tolist()

    in_threads(work)


def test_threads_that_store_into_one_leaf() -> None:
    """What is asked for is what this evaluation has stored."""
    cache = gg.Context().from_numpy(np.zeros((2, 64), np.float32))

    def work(i: int) -> None:
        x = gg.Context().from_numpy(np.full(64, i, np.float32))
        assert gg.eval(gg.cpy(x, cache[i % 2])).tolist() == [i] * 64

    in_threads(work)


def test_other_graphs_do_not_wait() -> None:
    """Both read one weight, and each waits within an op until the other one is there."""
    w = gg.Context().from_numpy(np.ones(4, np.float32))
    meeting = threading.Barrier(2, timeout=20)

    def meet(out: Any, a: Any) -> None:
        meeting.wait()
        out[...] = a

    ys = [gg.map_custom(meet, w * i) for i in range(2)]
    assert [a.tolist() for a in in_threads(lambda i: gg.eval(ys[i]), 2)] == [[0] * 4, [1] * 4]


def test_an_evaluation_inside_of_an_op_does_not_wait_for_the_one_around_it() -> None:
    """Threads of the pool call the function, and it evaluates a tensor of the graph that runs."""
    a = gg.Context().from_numpy(np.ones(4, np.float32)) * 2

    def add_one(out: Any, x: Any, ith: int, nth: int) -> None:
        if ith == nth - 1:
            out[...] = gg.eval(a) + 1

    assert gg.eval(gg.map_custom(add_one, a, n_tasks=2), n_threads=2).tolist() == [3] * 4


def test_turns_in_a_forked_child() -> None:
    x = gg.Context().from_numpy(np.ones(4, np.float32))
    y, turn = x + 1, Turn(gg.Graph().build_forward_expand(x * 2), {x: None})
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        with turn:
            turn.begin()
            begun.set()
            over.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait(20)

    def work() -> None:
        assert gg.eval(y, inputs={x: np.full(4, 5)}).tolist() == [6] * 4

    in_child(work)
    over.set()
    thread.join()


def test_a_turn_that_was_interrupted_is_over() -> None:
    """Ctrl-C after it has begun: who waits goes on, though the traceback keeps it."""
    x = gg.Context().from_numpy(np.ones(4, np.float32))
    turn = Turn(gg.Graph().build_forward_expand(x + 1), {x: None})
    with pytest.raises(KeyboardInterrupt), turn:
        turn.begin()
        raise KeyboardInterrupt
    assert in_threads(lambda i: gg.eval(x * 2, inputs={x: np.full(4, i)})[0], 8) == [2 * i for i in range(8)]


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_a_function_does_not_write_into_the_run_that_calls_it(backend: str) -> None:
    ctx = gg.Context()
    x, own = ctx.new_tensor(gg.F32, 4), ctx.new_tensor(gg.F32, 4)

    def result(given: gg.Tensor) -> np.ndarray[Any, Any]:
        def f(dst: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
            dst[...] = values + gg.eval(given * 2, inputs={given: np.full(4, 100.0)})

        return gg.eval(gg.map_custom(f, x) + x, inputs={x: np.ones(4)}, backend=backend)

    assert result(own).tolist() == [202.0] * 4
    with pytest.raises(gg.BackendError, match="of its own"):
        result(x)
    assert result(own).tolist() == [202.0] * 4
