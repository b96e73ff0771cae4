"""Adafactor: the mean squares of a matrix of gradients, kept as those of its rows and of its columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyggml import ops
from pyggml.dtypes import DType
from pyggml.tensor import Tensor
from pyggml.types import Floats

from .optimisers import Rate, State, above_0, check_number, like, rate_of


@dataclass(frozen=True)
class Adafactor:
    """Adafactor (Shazeer and Stern, 2018, arXiv 1804.04235) with a learning rate that is given.

    A gradient is divided by the root of its mean square, as with Adam, but without momentum. Of a matrix, ne [k, m],
    only m + k numbers are remembered: the means over its rows and over its columns, whose product stands for the mean
    square of an element. Each matrix of experts has its own. A step whose root mean square, over all elements of the
    parameter, is above `clip` is made smaller to it.

    lr            the learning rate: a number, or a function of the number of the step, which counts from 0
    decay_rate    step t, from 1 on, keeps 1 - t^-decay_rate of the means
    clip          largest root mean square of a step, before it is multiplied by lr
    eps           added to squares
    weight_decay  each step takes lr * weight_decay of a parameter away

    It follows the class of the same name in the transformers library, with relative_step=False,
    scale_parameter=False. Raises GraphError for numbers that make no sense, here or when a step begins.
    """

    lr: Rate = 1e-3
    decay_rate: float = 0.8
    clip: float = 1.0
    eps: float = 1e-30
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.lr):
            check_number("Adafactor: lr", self.lr)
        for name in ("decay_rate", "eps", "weight_decay"):
            check_number(f"Adafactor: {name}", getattr(self, name))
        above_0("Adafactor: clip", self.clip)

    def states(self, w: Tensor) -> tuple[State, ...]:
        """The mean squares over rows and over columns; of a vector, those of its elements."""
        if not _is_matrix(w):
            return like(w, "v")
        k, _, *n = w.ne[: w.rank]
        return State("rows", DType.F32, (1, *w.ne[1 : w.rank])), State("columns", DType.F32, (k, 1, *n))

    @property
    def n_numbers(self) -> int:
        """The learning rate, the weight decay, and how much of the means is kept and not kept."""
        return 4

    def numbers(self, step: int) -> Floats:
        """See `Optimiser`."""
        new = float(step + 1) ** -self.decay_rate
        return np.array([rate_of("Adafactor", self.lr, step), self.weight_decay, 1 - new, new], np.float32)

    def step(self, w: Tensor, g: Tensor, states: Sequence[Tensor], numbers: Tensor) -> Tensor:
        """See `Optimiser`."""
        size = numbers.nb[0]
        kept, new = (ops.view_1d(numbers, 1, i * size) for i in (2, 3))
        squares = ops.scale_bias(ops.sqr(g), 1.0, self.eps)
        if _is_matrix(w):
            of_rows, of_columns = states
            columns = ops.scale(ops.repeat_back(squares, of_columns), 1 / w.ne[1])
            rows = _follow(of_rows, ops.mean(squares), kept, new)
            columns = _follow(of_columns, columns, kept, new)
            mean = ops.mean(ops.reshape_4d(rows, w.ne[1], 1, w.ne[2], w.ne[3]))
            step = ops.div(ops.div(g, ops.sqrt(ops.div(rows, mean))), ops.sqrt(columns))
        else:
            step = ops.div(g, ops.sqrt(_follow(states[0], squares, kept, new)))
        size_of_step = ops.sqrt(ops.scale(ops.sum(ops.sqr(step)), 1 / w.n_elements))
        step = ops.div(step, ops.clamp(ops.scale(size_of_step, 1 / self.clip), 1.0, math.inf))
        return ops.opt_step_sgd(w, step, ops.view_1d(numbers, 2, 0))


def _is_matrix(w: Tensor) -> bool:
    return w.ne[0] > 1 and w.ne[1] > 1


def _follow(mean: Tensor, x: Tensor, kept: Tensor, new: Tensor) -> Tensor:
    return ops.cpy(ops.add(ops.mul(mean, kept), ops.mul(x, new)), mean)
