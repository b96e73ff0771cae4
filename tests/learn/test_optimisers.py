"""Steps of optimisers, against the formulas in NumPy's float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.errors import GraphError
from pyggml.learn.optimisers import Optimiser, new_states

Array = np.ndarray[Any, np.dtype[Any]]
Step = Callable[[Array, Array, int], Array]  # (weights, gradients, number of the step from 0 on) -> new weights

SHAPES = [(24, 8), (8, 24), (16, 16), (3, 12, 20), (40,), (1, 7), (2, 300)]


def steps(opt: Optimiser, w0: Array, gradients: Array, name: str = "w", n_threads: int = 2) -> Array:
    """The weights after the steps of all gradients."""
    ctx = gg.Context()
    with ctx:
        w = ctx.from_numpy(w0.astype(np.float32), name=name)
        g = ctx.new_tensor(gg.F32, w0.shape[::-1], "g").set_input()
        numbers = ctx.new_tensor(gg.F32, opt.n_numbers, "numbers").set_input()
        graph = gg.Graph().build_forward_expand(opt.step(w, g, new_states(ctx, opt, w), numbers))
    for i, x in enumerate(gradients):
        gg.compute(graph, {g: x.astype(np.float32), numbers: opt.numbers(i)}, n_threads=n_threads)
    return w.numpy().copy()


def follow(step: Step, w: Array, gradients: Array) -> Array:
    """The weights after the steps of all gradients, by a formula."""
    for i, g in enumerate(gradients):
        w = step(w, g.astype(np.float64), i)
    return w


def drawn(shape: tuple[int, ...], n: int = 4) -> tuple[Array, Array]:
    """Weights and the gradients of `n` steps, float64 numbers that F32 has."""
    rng = np.random.default_rng(len(shape) + sum(shape))
    sizes = np.geomspace(0.1, 3, n).reshape(-1, *[1] * len(shape))
    w, g = rng.standard_normal(shape), rng.standard_normal((n, *shape)) * sizes
    return w.astype(np.float32).astype(np.float64), g.astype(np.float32).astype(np.float64)


def adamw(lr: float, betas: tuple[float, float], eps: float, decay: float) -> Step:
    m = v = 0.0

    def step(w: Array, g: Array, i: int) -> Array:
        nonlocal m, v
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
        mean, square = m / (1 - betas[0] ** (i + 1)), v / (1 - betas[1] ** (i + 1))
        return w - lr * decay * w - lr * mean / (np.sqrt(square) + eps)

    return step


def orthogonal(g: Array) -> Array:
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        xx = x @ x.T
        x = 3.4445 * x + (-4.7750 * xx + 2.0315 * xx @ xx) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def muon(lr: float, momentum: float, decay: float) -> Step:
    mean = 0.0

    def step(w: Array, g: Array, i: int) -> Array:
        nonlocal mean
        mean = momentum * mean + (1 - momentum) * g
        ahead = (1 - momentum) * g + momentum * mean
        each = ahead.reshape(-1, *ahead.shape[-2:])
        found = np.stack([orthogonal(x) for x in each]).reshape(g.shape)
        return w * (1 - lr * decay) - lr * 0.2 * max(g.shape[-2:]) ** 0.5 * found

    return step


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adamw(shape: tuple[int, ...]) -> None:
    w, g = drawn(shape)
    got = steps(gg.AdamW(lr=0.01, betas=(0.8, 0.95), weight_decay=0.1), w, g)
    assert np.allclose(got, follow(adamw(0.01, (0.8, 0.95), 1e-8, 0.1), w, g), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_muon(shape: tuple[int, ...]) -> None:
    w, g = drawn(shape)
    opt = gg.Muon(lr=0.01, momentum=0.9, weight_decay=0.1)
    by = muon(0.01, 0.9, 0.1) if min(shape[-2:]) > 1 and len(shape) > 1 else adamw(0.01, (0.9, 0.95), 1e-8, 0.0)
    assert np.allclose(steps(opt, w, g), follow(by, w, g), rtol=1e-4, atol=2e-6)


def adafactor(lr: float, decay_rate: float, clip: float, decay: float) -> Step:
    rows = columns = v = 0.0

    def step(w: Array, g: Array, i: int) -> Array:
        nonlocal rows, columns, v
        kept, squares = 1 - (i + 1.0) ** -decay_rate, g**2 + 1e-30
        if g.ndim > 1 and min(g.shape[-2:]) > 1:
            rows = kept * rows + (1 - kept) * squares.mean(-1, keepdims=True)
            columns = kept * columns + (1 - kept) * squares.mean(-2, keepdims=True)
            u = g / np.sqrt(rows / rows.mean(-2, keepdims=True) * columns)
        else:
            v = kept * v + (1 - kept) * squares
            u = g / np.sqrt(v)
        u = u / max(1.0, np.sqrt((u**2).mean()) / clip)
        return w - decay * lr * w - lr * u

    return step


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_adafactor(shape: tuple[int, ...], clip: float) -> None:
    w, g = drawn(shape)
    got = steps(gg.Adafactor(lr=0.01, clip=clip, weight_decay=0.1), w, g)
    assert np.allclose(got, follow(adafactor(0.01, 0.8, clip, 0.1), w, g), rtol=1e-5, atol=1e-6)


def test_adafactor_remembers_rows_and_columns() -> None:
    w = gg.Context().from_numpy(np.zeros((3, 12, 20), np.float32))
    assert [s.ne for s in gg.Adafactor().states(w)] == [(1, 12, 3), (20, 1, 3)]


@pytest.mark.parametrize("shape", [(64, 80), (3, 50, 41), (5003,)], ids=str)
def test_adamw8(shape: tuple[int, ...]) -> None:
    """Its steps are those of AdamW but for what the codes of the moments lose: a few percent of a step."""
    w, g = drawn(shape, 12)
    got = steps(gg.AdamW8(lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), w, g)
    want = follow(adamw(0.01, (0.9, 0.99), 1e-8, 0.1), w, g)
    assert np.abs(got - want).max() < 0.03 * np.abs(want - w).max()
    assert np.sqrt(((got - want) ** 2).mean()) < 0.01 * np.sqrt(((want - w) ** 2).mean())
    first, exact = (steps(opt, w, g[:1]) for opt in (gg.AdamW8(lr=0.01), gg.AdamW(lr=0.01)))
    assert np.allclose(first, exact, rtol=1e-6)  # there was nothing to lose yet


def test_adamw8_in_few_bytes() -> None:
    ctx, opt = gg.Context(), gg.AdamW8()
    w = ctx.from_numpy(np.zeros((100, 512), np.float32))
    assert sum(t.nbytes for t in new_states(ctx, opt, w)) == 2 * w.n_elements + 8 * w.n_elements // 256
    few = ctx.from_numpy(np.zeros(512, np.float32))
    assert sum(t.nbytes for t in new_states(ctx, opt, few)) == 8 * few.n_elements
    w, g = drawn((40, 30))
    assert np.array_equal(steps(opt, w, g), steps(gg.AdamW(), w, g))


def test_means_of_8_bits_follow_slow_changes() -> None:
    """Each step moves v by a thousandth of it, much less than the distance of two codes."""
    n, n_steps, rng = 1 << 16, 400, np.random.default_rng(3)
    size = np.geomspace(1, 1e3, n)
    ctx, opt = gg.Context(), gg.AdamW8(lr=0.0)
    with ctx:
        w = ctx.from_numpy(np.zeros(n, np.float32), name="w")
        g, numbers = (ctx.new_tensor(gg.F32, k, "x").set_input() for k in (n, opt.n_numbers))
        states = new_states(ctx, opt, w)
        graph = gg.Graph().build_forward_expand(opt.step(w, g, states, numbers))
    mean = np.zeros(n)
    x = np.append(np.ones(255), 30.0)[rng.permuted(np.tile(np.arange(256), (n // 256, 1)), axis=1).reshape(-1)]
    for i in range(n_steps):
        gg.compute(graph, {g: (x * size).astype(np.float32), numbers: opt.numbers(i)})
        mean = 0.999 * mean + 0.001 * (x * size) ** 2
    codes, scales = states[1].numpy().astype(np.float64) + 128, np.repeat(states[2].numpy()[:, 1], 256)
    v = (codes**2 * scales) ** 2
    small = x == 1
    assert abs((v[small] / mean[small]).mean() - 1) < 0.02
    assert np.allclose(v[~small], mean[~small], rtol=1e-3)


@pytest.mark.parametrize("name", ["token_embd.weight", "output.weight", "blk.1.ssm_conv1d.weight"])
def test_muon_leaves_some_matrices_to_adamw(name: str) -> None:
    w, g = drawn((8, 12))
    opt = gg.Muon(lr=0.01, weight_decay=0.1)
    want = follow(adamw(0.01, (0.9, 0.95), 1e-8, 0.1), w, g)
    assert np.allclose(steps(opt, w, g, name), want, rtol=1e-5, atol=1e-6)
    assert not np.allclose(steps(opt, w, g, "blk.1.attn_output.weight"), want, rtol=1e-2)


OPTIMISERS: list[Optimiser] = [
    gg.AdamW(weight_decay=0.1),
    gg.SGD(momentum=0.9, weight_decay=0.1),
    gg.Muon(weight_decay=0.1),
    gg.Adafactor(weight_decay=0.1),
    gg.AdamW8(weight_decay=0.1),
]


@pytest.mark.parametrize("opt", OPTIMISERS, ids=lambda opt: type(opt).__name__)
@pytest.mark.parametrize("shape", [(200, 96), (2, 65, 70), (5000,)], ids=str)
def test_threads_do_not_change_a_bit(opt: Optimiser, shape: tuple[int, ...]) -> None:
    w, g = drawn(shape, 2)
    assert steps(opt, w, g, n_threads=1).tobytes() == steps(opt, w, g, n_threads=2).tobytes()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: gg.Muon(lr=-1), "Muon: lr must be a finite number from 0 on"),
        (lambda: gg.Muon(momentum=1.0), "Muon: momentum must be below 1"),
        (lambda: gg.Muon(weight_decay=float("nan")), "weight_decay must be a finite number"),
        (lambda: gg.Muon(betas=(0.9, 2.0)), "beta must be below 1"),
        (lambda: gg.Muon(lr=lambda step: "x").numbers(3), "Muon: lr of step 3 must be a number"),
        (lambda: gg.Adafactor(lr=True), "Adafactor: lr must be a number"),
        (lambda: gg.Adafactor(clip=0), "Adafactor: clip must be a positive number"),
        (lambda: gg.Adafactor(decay_rate=-0.8), "decay_rate must be a finite number from 0 on"),
        (lambda: gg.AdamW8(betas=(0.9,)), "betas must be two numbers"),
        (lambda: gg.AdamW(weight_decay=-1), "weight_decay must be"),
        (lambda: gg.schedule(-1, 10), "schedule: lr must be a finite number from 0 on"),
        (lambda: gg.schedule(1, 0), "schedule: n_steps must be a whole number from 1"),
        (lambda: gg.schedule(1, 10, warmup=1.5), "schedule: warmup must be a whole number from 0"),
        (lambda: gg.schedule(1, 10, "triangle"), "schedule: kind must be .* not 'triangle'"),
    ],
)
def test_bad_numbers(make: Callable[[], object], text: str) -> None:
    with pytest.raises(GraphError, match=text):
        make()
