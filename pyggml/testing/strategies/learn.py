"""Cases of losses and of steps of optimisers."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

import pyggml as gg

from ..harness import Case, Src, gaussian
from .softmax import ROWS, mild, of_signs

SEEDS = st.integers(0, 99)


def labels(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Probabilities: of one class, or of some; half of the others are 0."""
    p = rng.random(shape) * rng.integers(0, 2, shape)
    p[..., 0] = 1
    return p / p.sum(axis=3, keepdims=True)


def sure(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Logits of which one is far above the others: beside its probability, the others are less than a rounding."""
    x = mild(rng, shape)
    np.put_along_axis(x, rng.integers(0, shape[3], (*shape[:3], 1)), rng.choice([20.0, 30.0, 60.0]), 3)
    return x


@st.composite
def logits_and_labels(draw: st.DrawFn) -> tuple[Src, Src]:
    ne = (draw(ROWS), *(draw(st.integers(1, 5 if i == 0 else 2)) for i in range(3)))
    layouts = st.sampled_from([(None, 0), (None, 3), ((0, 2, 1, 3), 0)])
    logits = draw(st.sampled_from([mild, gaussian, sure]))
    return Src(gg.F32, ne, *draw(layouts), logits), Src(gg.F32, ne, *draw(layouts), labels)


@st.composite
def loss_cases(draw: st.DrawFn) -> Case:
    return Case(draw(logits_and_labels()), gg.cross_entropy_loss, 1e-11, draw(SEEDS))


@st.composite
def loss_back_cases(draw: st.DrawFn) -> Case:
    b, c = draw(logits_and_labels())
    nmse = 1e-11 if b.ne[0] > 1 else 1.0  # one class has all of the probability: its gradient is 0
    return Case((Src(gg.F32, (1,), None, 0, mild), b, c), gg.cross_entropy_loss_back, nmse, draw(SEEDS))


@st.composite
def logits_and_ids(draw: st.DrawFn) -> tuple[Src, Src]:
    """Some rows have no class."""
    logits, _ = draw(logits_and_labels())
    n = logits.ne[0]
    ids = Src(gg.I32, logits.ne[1:], None, 0, lambda rng, shape: rng.integers(-1, n, shape))
    return logits, ids


@st.composite
def ids_cases(draw: st.DrawFn) -> Case:
    return Case(draw(logits_and_ids()), gg.cross_entropy_ids, 1e-11, draw(SEEDS))


@st.composite
def ids_back_cases(draw: st.DrawFn) -> Case:
    b, c = draw(logits_and_ids())
    nmse = 1e-11 if b.ne[0] > 1 else 1.0
    return Case((Src(gg.F32, (1,), None, 0, mild), b, c), gg.cross_entropy_ids_back, nmse, draw(SEEDS))


def squares(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.square(rng.standard_normal(shape))


def hyperparameters(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Of AdamW at some step: alpha, beta1, beta2, eps, wd, 1 / (1 - beta1^t), 1 / (1 - beta2^t)."""
    beta1, beta2, step = rng.choice([0.0, 0.9]), rng.choice([0.99, 0.999]), rng.integers(1, 99)
    alpha, wd = rng.uniform(1e-4, 0.1), rng.choice([0.0, 0.1])
    return np.array([alpha, beta1, beta2, 1e-8, wd, 1 / (1 - beta1**step), 1 / (1 - beta2**step)]).reshape(shape)


@st.composite
def adamw_cases(draw: st.DrawFn) -> Case:
    ne = (draw(ROWS), *(draw(st.integers(1, 3)) for _ in range(3)))
    a, grad, m = (Src(gg.F32, ne, None, 0, of_signs(mild, first)) for first in (-1, 1, 1))
    params = Src(gg.F32, (7,), None, 0, hyperparameters)
    return Case((a, grad, m, Src(gg.F32, ne, None, 0, squares), params), gg.opt_step_adamw, 1e-13, draw(SEEDS))


def more_hyperparameters(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Of AdamW, and the number of the step."""
    return np.append(hyperparameters(rng, (7,)), rng.integers(0, 1 << 20)).reshape(shape)


@st.composite
def adamw8_cases(draw: st.DrawFn) -> Case:
    """Some blocks have had no step yet."""
    ne = (draw(ROWS), *(draw(st.integers(1, 3)) for _ in range(3)))
    a, grad = (Src(gg.F32, ne, None, 0, draw(st.sampled_from([mild, gaussian]))) for _ in range(2))
    m, v = (Src(gg.I8, ne, None, 0, lambda rng, shape: rng.integers(-127, 128, shape)) for _ in range(2))
    scales = Src(gg.F32, (2, -(-math.prod(ne) // 256)), None, 0, lambda rng, shape: rng.choice([0, 1e-7, 3e-5], shape))
    params = Src(gg.F32, (8,), None, 0, more_hyperparameters)
    return Case((a, grad, m, v, scales, params), gg.opt_step_adamw8, 1e-13, draw(SEEDS))


@st.composite
def sgd_cases(draw: st.DrawFn) -> Case:
    ne = (draw(ROWS), *(draw(st.integers(1, 3)) for _ in range(3)))
    params = Src(gg.F32, (2,), None, 0, lambda rng, shape: rng.uniform(0, 0.1, shape))
    a, grad = (Src(gg.F32, ne, None, 0, of_signs(gaussian, first)) for first in (-1, 1))
    return Case((a, grad, params), gg.opt_step_sgd, 1e-13, draw(SEEDS))


STRATEGIES = {
    "cross_entropy_ids": ids_cases(),
    "cross_entropy_ids_back": ids_back_cases(),
    "cross_entropy_loss": loss_cases(),
    "cross_entropy_loss_back": loss_back_cases(),
    "opt_step_adamw": adamw_cases(),
    "opt_step_adamw8": adamw8_cases(),
    "opt_step_sgd": sgd_cases(),
}
