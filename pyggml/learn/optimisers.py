"""Optimisers: how parameters follow their gradients. A step is made of nodes of the graph that computes the gradients.

An optimiser has no state of its own: what it remembers of a parameter lies in tensors beside it, and what changes from
step to step (the learning rate) in an input of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NamedTuple, Protocol, cast

import numpy as np

from pyggml import ops
from pyggml.dtypes import DType
from pyggml.errors import GGMLError, GraphError, whole
from pyggml.ops.opt_step import BLOCK8
from pyggml.tensor import Context, Tensor
from pyggml.types import Floats

Rate = float | Callable[[int], float]
_FEW = 4096  # elements: what is remembered of smaller parameters is not worth 8 bits


class State(NamedTuple):
    """One tensor of what an optimiser remembers of a parameter. It begins as zeros."""

    name: str
    dtype: DType
    ne: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.row_size(self.ne[0]) * math.prod(self.ne[1:])


class Optimiser(Protocol):
    """How parameters follow their gradients.

    n_numbers  how many numbers the steps of all parameters read beside them
    """

    @property
    def n_numbers(self) -> int: ...

    def states(self, w: Tensor) -> tuple[State, ...]:
        """What is remembered of a parameter."""
        ...

    def numbers(self, step: int) -> Floats:
        """float32 [n_numbers]: the numbers that step number `step`, from 0 on, reads."""
        ...

    def step(self, w: Tensor, g: Tensor, states: Sequence[Tensor], numbers: Tensor) -> Tensor:
        """Record the step of a parameter `w` with the gradient `g`, F32, dense, of its ne. The result is a view of `w`
        after the step; `states` are written over, too. `numbers`: F32, ne [n_numbers]."""
        ...


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv 1711.05101).

    lr            the learning rate: a number, or a function of the number of the step, which counts from 0
    betas         how slowly the means of gradients and of their squares follow
    eps           added to the root of the mean of squares
    weight_decay  each step takes lr * weight_decay of a parameter away

    Raises GraphError for numbers that make no sense, here or when a step begins.
    """

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.lr):
            check_number("AdamW: lr", self.lr)
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"AdamW: betas must be two numbers, not {self.betas!r:.40}")
        for beta in self.betas:
            below_1("AdamW: a beta", beta)
        check_number("AdamW: eps", self.eps)
        check_number("AdamW: weight_decay", self.weight_decay)

    def states(self, w: Tensor) -> tuple[State, ...]:
        """The means of gradients and of their squares."""
        return like(w, "m", "v")

    @property
    def n_numbers(self) -> int:
        """Those of `opt_step_adamw`."""
        return 7

    def numbers(self, step: int) -> Floats:
        """See `Optimiser`."""
        first, second = (float(np.float32(beta)) for beta in self.betas)  # 1 - beta is that of the F32 number, too
        grown = [1 / (1 - beta ** (step + 1)) for beta in (first, second)]
        return np.array(
            [rate_of("AdamW", self.lr, step), first, second, self.eps, self.weight_decay, *grown], np.float32
        )

    def step(self, w: Tensor, g: Tensor, states: Sequence[Tensor], numbers: Tensor) -> Tensor:
        """See `Optimiser`."""
        m, v = states
        return ops.opt_step_adamw(w, g, m, v, numbers)


@dataclass(frozen=True)
class AdamW8(AdamW):
    """AdamW that remembers 2 bytes of a parameter's element, and 8 of each 256 of them, instead of 8 bytes an element
    (see `opt_step_adamw8`). Parameters of less than 4096 elements are as with `AdamW`.

    Fields, and what is raised: as of `AdamW`.
    """

    def states(self, w: Tensor) -> tuple[State, ...]:
        """The codes of AdamW's means, and their scales."""
        if w.n_elements < _FEW:
            return super().states(w)
        scales = State("scales", DType.F32, (2, -(-w.n_elements // BLOCK8)))
        return State("m", DType.I8, w.ne[: w.rank]), State("v", DType.I8, w.ne[: w.rank]), scales

    @property
    def n_numbers(self) -> int:
        """Those of `opt_step_adamw8`."""
        return 8

    def numbers(self, step: int) -> Floats:
        """See `Optimiser`."""
        return np.append(super().numbers(step), np.float32(step))

    def step(self, w: Tensor, g: Tensor, states: Sequence[Tensor], numbers: Tensor) -> Tensor:
        """See `Optimiser`."""
        if w.n_elements < _FEW:
            return super().step(w, g, states, ops.view_1d(numbers, super().n_numbers, 0))
        m, v, scales = states
        return ops.opt_step_adamw8(w, g, m, v, scales, numbers)


@dataclass(frozen=True)
class SGD:
    """Gradient descent, with momentum: a parameter follows m = momentum * m + gradient.

    lr            the learning rate: a number, or a function of the number of the step, which counts from 0
    momentum      how much of the last step stays; 0: none
    weight_decay  this much of a parameter is added to its gradient

    Raises GraphError for numbers that make no sense, here or when a step begins.
    """

    lr: Rate = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.lr):
            check_number("SGD: lr", self.lr)
        below_1("SGD: momentum", self.momentum)
        check_number("SGD: weight_decay", self.weight_decay)

    def states(self, w: Tensor) -> tuple[State, ...]:
        """What the last steps left, when there is momentum."""
        return like(w, "m") if self.momentum else ()

    @property
    def n_numbers(self) -> int:
        """Those of `opt_step_sgd`."""
        return 2

    def numbers(self, step: int) -> Floats:
        """See `Optimiser`."""
        return np.array([rate_of("SGD", self.lr, step), 0.0 if self.momentum else self.weight_decay], np.float32)

    def step(self, w: Tensor, g: Tensor, states: Sequence[Tensor], numbers: Tensor) -> Tensor:
        """See `Optimiser`."""
        for m in states:  # the op has no momentum; the decay is part of what it carries on
            if self.weight_decay:
                g = ops.add(g, ops.scale(w, self.weight_decay))
            g = ops.cpy(ops.add(ops.scale(m, self.momentum), g), m)
        return ops.opt_step_sgd(w, g, numbers)


def schedule(
    lr: float, n_steps: int, kind: Literal["constant", "linear", "cosine"] = "constant", warmup: int = 0
) -> Callable[[int], float]:
    """Learning rates, for the `lr` of an optimiser: a function of the number of the step, which counts from 0.

        gg.AdamW(gg.schedule(1e-3, n_steps=1000, kind="cosine", warmup=50))

    In the first `warmup` steps the rate grows in equal parts to `lr`, which the last of them has. In the steps after
    them it stays, or falls along a straight line or half a cosine, to 0 after `n_steps` steps.

    Raises GraphError for numbers that make no sense, and for another kind.
    """
    check_number("schedule: lr", lr)
    whole("schedule: n_steps", n_steps, 1, error=GraphError)
    whole("schedule: warmup", warmup, 0, error=GraphError)
    if kind not in ("constant", "linear", "cosine"):
        raise GraphError(f'schedule: kind must be "constant", "linear" or "cosine", not {kind!r:.40}')

    def rate(step: int) -> float:
        if step < warmup:
            return lr * max(step + 1, 0) / warmup
        done = min((step - warmup) / max(n_steps - warmup, 1), 1.0)
        if kind == "linear":
            return lr * (1 - done)
        return lr * (1 + math.cos(math.pi * done)) / 2 if kind == "cosine" else lr

    return rate


def check_optimiser(opt: object, error: type[GGMLError]) -> None:
    """Raise `error` for what is no optimiser: a name, a class, or an object that lacks a member of `Optimiser`."""
    if isinstance(opt, type) or not all(hasattr(opt, name) for name in ("n_numbers", "states", "numbers", "step")):
        raise error(f"opt must be an optimiser, as pyggml.AdamW(), not {opt!r:.60}")


def new_states(ctx: Context, opt: Optimiser, w: Tensor) -> tuple[Tensor, ...]:
    """What `opt` remembers of a parameter before the first step: leafs, zeros."""
    made: list[Tensor] = []
    for state in opt.states(w):
        zeros = np.zeros(state.nbytes, np.uint8)
        made.append(ctx.from_bytes(zeros, state.dtype, state.ne, f"{w.name} ({state.name})"))
    return tuple(made)


def new_step(opt: Optimiser, w: Tensor, g: Tensor, states: Sequence[Tensor], numbers: Tensor) -> Tensor:
    """The step of `w` that `opt` records. Raises GraphError when it does not write over `w`: nothing would be
    learned."""
    stepped = opt.step(w, g, states, numbers)
    if not isinstance(stepped, Tensor) or stepped is w or stepped.root is not w.root:  # pyright: ignore[reportUnnecessaryIsInstance]
        given = stepped.describe() if isinstance(stepped, Tensor) else type(stepped).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
        rule = f"step must give a view of {w.name or 'the parameter'} that was written over, as gg.cpy(new, w)"
        raise GraphError(f"{type(opt).__name__}: {rule}, not {given}")
    return stepped


def like(w: Tensor, *names: str) -> tuple[State, ...]:
    """States in F32, of the ne of a parameter."""
    return tuple(State(name, DType.F32, w.ne[: w.rank]) for name in names)


def below_1(what: str, value: object) -> None:
    """Raises GraphError for what is no number from 0 on and below 1."""
    if not np.float32(check_number(what, value)) < 1:  # as the op has it
        raise GraphError(f"{what} must be below 1, not {value}")


def above_0(what: str, value: object) -> float:
    """`value`, when it is a finite number above 0."""
    number = check_number(what, value)
    if number == 0:
        raise GraphError(f"{what} must be a positive number, not 0")
    return number


def check_number(what: str, value: object) -> float:
    """`value`, when it is a finite number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise GraphError(f"{what} must be a number, not {value!r:.40}")
    number = float(cast("float", value))
    if not (math.isfinite(number) and number >= 0):
        raise GraphError(f"{what} must be a finite number from 0 on, not {number}")
    return number


def rate_of(what: str, lr: Rate, step: int) -> float:
    """The learning rate of a step. Raises GraphError when it is no finite number from 0 on."""
    return check_number(f"{what}: lr of step {step}", lr(step)) if callable(lr) else lr
