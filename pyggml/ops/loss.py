"""Losses: the cross-entropy of rows of logits and probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import ops
from ..codec import Array
from ..opdef import Gradient, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, src
from ._gradients import dense_rows

__all__ = [
    "cross_entropy_loss",
    "cross_entropy_loss_back",
]


def _check(logits: Tensor, labels: Tensor) -> None:
    rule(logits.ne == labels.ne, f"logits and labels must have the same ne: {list(logits.ne)} and {list(labels.ne)}")
    for role, t in (("logits", logits), ("labels", labels)):
        rule(t.ne[0] == 1 or t.nb[0] == 4, f"rows of {role} must be dense (nb[0] = {t.nb[0]}, not 4)")


def _shape(srcs: Srcs, params: Params) -> Ne:
    _check(src(srcs, 0), src(srcs, 1))
    return (1, 1, 1, 1)


def _back_shape(srcs: Srcs, params: Params) -> Ne:
    rule(src(srcs, 0).n_elements == 1, "a, the gradient of the loss, must have one element")
    _check(src(srcs, 1), src(srcs, 2))
    return src(srcs, 1).ne


def _n_rows(a: Array) -> int:
    return a.shape[0] * a.shape[1] * a.shape[2]


def _ref(a: Array, b: Array) -> Array:
    x = a - a.max(axis=3, keepdims=True)
    logs = x - np.log(np.exp(x).sum(axis=3, keepdims=True))
    return -np.where(b == 0, 0.0, b * logs).sum(keepdims=True) / _n_rows(a)


def _ref_back(a: Array, b: Array, c: Array) -> Array:
    e = np.exp(b - b.max(axis=3, keepdims=True))
    p = e / e.sum(axis=3, keepdims=True)
    return (p * c.sum(axis=3, keepdims=True) - c) * (a.item() / _n_rows(b))


def _grad(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a, b = src(node.src, 0), src(node.src, 1)
    return lambda: cross_entropy_loss_back(gy, a, b), None


def _grad_back(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a, b, c = src(node.src, 0), src(node.src, 1), src(node.src, 2)

    def of_a() -> Tensor:
        one = ops.fill(a, 1.0)
        return ops.reshape(ops.sum(gy * cross_entropy_loss_back(one, b, c)), a)

    def of_b() -> Tensor:
        p = ops.soft_max(b if b.is_contiguous else ops.cont(b))
        g = ops.soft_max_ext_back(dense_rows(gy), p, 1 / b.n_rows, 0.0)
        return g * ops.sum_rows(c) * ops.reshape_1d(a, 1)

    return of_a, of_b, None


CROSS_ENTROPY_LOSS = OpDef(
    name="cross_entropy_loss",
    srcs=("a", "b"),
    params=(),
    shape=_shape,
    dtypes={(F32, F32): F32},
    ref=_ref,
    kernel="cross_entropy_loss",
    cost=elementwise_cost(20),
    inplace=(),
    label="cross-entropy",
    ranks=(),
    grad=_grad,
)
CROSS_ENTROPY_LOSS_BACK = OpDef(
    name="cross_entropy_loss_back",
    srcs=("a", "b", "c"),
    params=(),
    shape=_back_shape,
    dtypes={(F32, F32, F32): F32},
    ref=_ref_back,
    kernel="cross_entropy_loss_back",
    cost=elementwise_cost(20),
    inplace=(1, 2),
    label="gradient of cross-entropy",
    ranks=(1,),
    grad=_grad_back,
)


def cross_entropy_loss(a: Tensor, b: Tensor) -> Tensor:
    """Minus the mean over rows of sum(b * log(softmax(a))) (ggml_cross_entropy_loss).

    a: logits, b: labels, the probabilities of each row (their sum is 1); F32, one ne [n_classes, ...], dense rows. A
    label of 0 does not count, whatever its logit is. Result: F32, ne [1], accumulated in double. `b` has no gradient.
    Raises ShapeError, DTypeError.
    """
    return record(CROSS_ENTROPY_LOSS, (a, b), {})


def cross_entropy_loss_back(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The gradient of `cross_entropy_loss` by its logits (ggml_cross_entropy_loss_back): (softmax(b) - c) a / n_rows.

    a: the gradient of the loss, F32, one element; b: logits, c: labels, as there. Result: F32, as `b`. Labels that are
    not 1 in all have the gradient of the loss, too (softmax(b) times their sum; ggml takes it as 1).
    Raises ShapeError, DTypeError.
    """
    return record(CROSS_ENTROPY_LOSS_BACK, (a, b, c), {})
