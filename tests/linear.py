"""Whether work grows with its input, and not with its square."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time


def assert_linear(work: Callable[[int], object], n: int) -> None:
    """Fails when `work(10 * n)` takes 40 times as long as `work(n)`: what is quadratic takes 100 times.

    Other programs make single times longer, so the shortest of a few tries counts: CPU time, and at least 10 ms."""

    def seconds(n: int) -> float:
        begin = process_time()
        work(n)
        return process_time() - begin

    few = many = float("inf")
    for _ in range(5):
        few, many = min(few, max(seconds(n), 0.01)), min(many, seconds(10 * n))
        if many < 40 * few:
            return
    raise AssertionError(f"{n}: {few:.3f} s, {10 * n}: {many:.3f} s")
