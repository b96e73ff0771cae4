"""Muon: momentum of matrices, made orthogonal."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyggml import ops
from pyggml.tensor import Tensor
from pyggml.types import Floats

from .optimisers import AdamW, Rate, State, below_1, check_number, like, rate_of

_N_ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # of the polynomial a x + b x^3 + c x^5, as its authors tuned it
_TINY = 1e-7  # added to a norm
_SCALE = 0.2  # a step of AdamW has about this root mean square, in units of the learning rate
_BY_ADAMW = re.compile(r"embd|embed|^output\b|^cls\b|head_head|conv|ssm_[ad]$|time_mix_(first|lerp)|rel_b\b")


@dataclass(frozen=True)
class Muon:
    """Muon for the matrices of layers (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon), AdamW for all
    else.

    The gradients of a matrix, with momentum, are replaced by about the nearest orthogonal matrix, so that a step has
    the same size in all directions. Each matrix of experts counts for itself. Steps are scaled so that they are as
    large as AdamW's: one learning rate fits both (arXiv 2502.16982).

    By AdamW follow: vectors, embeddings, the output, convolutions. Vectors do not decay.

    lr            the learning rate: a number, or a function of the number of the step, which counts from 0
    momentum      how slowly the mean of gradients follows; the step looks one gradient ahead (Nesterov)
    weight_decay  each step takes lr * weight_decay of a matrix away
    betas, eps    of AdamW

    Raises GraphError for numbers that make no sense, here or when a step begins.
    """

    lr: Rate = 1e-3
    momentum: float = 0.95
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if not callable(self.lr):
            check_number("Muon: lr", self.lr)
        below_1("Muon: momentum", self.momentum)
        _ = self._adamw

    @property
    def _adamw(self) -> AdamW:
        return AdamW(self.lr, self.betas, self.eps, self.weight_decay)

    def states(self, w: Tensor) -> tuple[State, ...]:
        """The mean of gradients of a matrix; what AdamW remembers of all else."""
        return like(w, "mean") if is_matrix(w) else self._adamw.states(w)

    @property
    def n_numbers(self) -> int:
        """Those of AdamW with and without decay, and of `opt_step_sgd`."""
        return 2 * self._adamw.n_numbers + 2

    def numbers(self, step: int) -> Floats:
        """See `Optimiser`."""
        lr = rate_of("Muon", self.lr, step)
        both = [AdamW(lr, self.betas, self.eps, decay).numbers(step) for decay in (self.weight_decay, 0.0)]
        return np.concatenate([*both, np.array([lr, self.weight_decay], np.float32)])

    def step(self, w: Tensor, g: Tensor, states: Sequence[Tensor], numbers: Tensor) -> Tensor:
        """See `Optimiser`."""
        n, size = self._adamw.n_numbers, numbers.nb[0]
        if not is_matrix(w):
            decays = w.ne[0] > 1 and w.ne[1] > 1
            return self._adamw.step(w, g, states, ops.view_1d(numbers, n, 0 if decays else n * size))
        (mean,) = states
        mean = ops.cpy(_between(mean, g, 1 - self.momentum), mean)
        step = orthogonal(_between(g, mean, self.momentum))
        scale = _SCALE * math.sqrt(max(w.ne[:2]))
        return ops.opt_step_sgd(w, ops.scale(step, scale), ops.view_1d(numbers, 2, 2 * n * size))


def is_matrix(w: Tensor) -> bool:
    """Whether a parameter is a matrix of a layer, ne [k, m], or one for each expert, ne [k, m, n_expert]. Names tell
    embeddings, outputs and convolutions apart."""
    return w.ne[0] > 1 and w.ne[1] > 1 and w.ne[3] == 1 and _BY_ADAMW.search(w.name) is None


def orthogonal(g: Tensor) -> Tensor:
    """About the nearest matrix to `g`, F32 ne [k, m, n], whose singular values are 1: they become numbers from 0.7 to
    1.2, by five steps of an iteration of Newton and Schulz of fifth order."""
    tall = g.ne[1] > g.ne[0]
    x = ops.cont(ops.transpose(g)) if tall else g
    squares = ops.reshape_3d(ops.sum_rows(ops.sqr(x)), x.ne[1], 1, x.ne[2])
    x = ops.div(x, ops.scale_bias(ops.sqrt(ops.sum_rows(squares)), 1.0, _TINY))
    for _ in range(_N_ITERATIONS):
        xx = ops.mul_mat(x, x)  # ne [m, m, n], m <= k; symmetric
        factor = ops.add(ops.scale(xx, _B), ops.scale(ops.mul_mat(xx, xx), _C))
        x = ops.add(ops.scale(x, _A), ops.out_prod(x, factor))
    return ops.cont(ops.transpose(x)) if tall else x


def _between(a: Tensor, b: Tensor, share: float) -> Tensor:
    return ops.add(ops.scale(a, 1 - share), ops.scale(b, share))
