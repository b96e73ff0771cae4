"""Losses: the cross-entropy of rows of logits and probabilities, or the classes that they should have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import ops
from ..codec import Array
from ..opdef import Gradient, OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, I32, src
from ._gradients import dense_rows

__all__ = [
    "cross_entropy_ids",
    "cross_entropy_ids_back",
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


def _others(a: Array) -> tuple[Array, Array, Array]:
    """Where each row has its largest logit, the logits less that one, and the sum of exp of the other ones. These are
    all of the loss when the model is sure; added to the 1 of the largest they would lose their digits."""
    top: Array = np.equal(a.argmax(axis=3, keepdims=True), list(range(a.shape[3])))
    x: Array = a - a.max(axis=3, keepdims=True)
    others: Array = np.where(top, x, np.exp(x))  # x at the top: 0, or NaN of infinite logits
    return top, x, others.sum(axis=3, keepdims=True)


def _ref(a: Array, b: Array) -> Array:
    _, x, others = _others(a)
    logs = x - np.log1p(others)
    return -np.where(b == 0, 0.0, b * logs).sum(keepdims=True) / _n_rows(a)


def _ref_back(a: Array, b: Array, c: Array) -> Array:
    top, x, others = _others(b)
    of_others: Array = np.where(top, 0.0, c).sum(axis=3, keepdims=True)  # labels
    above: Array = np.where(top, of_others - c * others, np.exp(x) * c.sum(axis=3, keepdims=True) - c * (1 + others))
    return above / (1 + others) * (a.item() / _n_rows(b))


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


# -- classes by number -------------------------------------------------------------------------------------------------


def _check_ids(logits: Tensor, ids: Tensor) -> None:
    want = [*logits.ne[1:], 1]
    rule(list(ids.ne) == want, f"ids must have a number for each row of the logits: ne {want}, not {list(ids.ne)}")
    rule(logits.ne[0] == 1 or logits.nb[0] == 4, f"rows of the logits must be dense (nb[0] = {logits.nb[0]}, not 4)")


def _ids_shape(srcs: Srcs, params: Params) -> Ne:
    _check_ids(src(srcs, 0), src(srcs, 1))
    return (1, 1, 1, 1)


def _ids_back_shape(srcs: Srcs, params: Params) -> Ne:
    rule(src(srcs, 0).n_elements == 1, "a, the gradient of the loss, must have one element")
    _check_ids(src(srcs, 1), src(srcs, 2))
    return src(srcs, 1).ne


def _one_hot(logits: Array, ids: Array) -> tuple[Array, int]:
    """The probabilities that classes stand for, and how many rows have one."""
    classes: Array = ids[0].astype(np.int64)  # [n3, n2, rows]
    if (classes >= logits.shape[3]).any():
        raise IndexError(f"row index {classes.max()} is out of range")
    hot: Array = np.equal(classes[..., None], list(range(logits.shape[3]))).astype(np.float64)
    return hot, int((classes >= 0).sum())


def _ids_ref(a: Array, b: Array) -> Array:
    hot, counted = _one_hot(a, b)
    return _ref(a, hot) * (_n_rows(a) / max(counted, 1))


def _ids_back_ref(a: Array, b: Array, c: Array) -> Array:
    hot, counted = _one_hot(b, c)
    back = _ref_back(a, b, hot) * (_n_rows(b) / max(counted, 1))
    return np.where(c[0][..., None] >= 0, back, 0.0)  # what a row has that is left out does not matter, NaN neither


def _ids_grad(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    a, b = src(node.src, 0), src(node.src, 1)
    return lambda: cross_entropy_ids_back(gy, a, b), None


CROSS_ENTROPY_IDS = OpDef(
    name="cross_entropy_ids",
    srcs=("a", "b"),
    params=(),
    shape=_ids_shape,
    dtypes={(F32, I32): F32},
    ref=_ids_ref,
    kernel="cross_entropy_ids",
    cost=elementwise_cost(20),
    inplace=(),
    label="cross-entropy",
    ranks=(),
    grad=_ids_grad,
)
CROSS_ENTROPY_IDS_BACK = OpDef(
    name="cross_entropy_ids_back",
    srcs=("a", "b", "c"),
    params=(),
    shape=_ids_back_shape,
    dtypes={(F32, F32, I32): F32},
    ref=_ids_back_ref,
    kernel="cross_entropy_ids_back",
    cost=elementwise_cost(20),
    inplace=(1,),
    label="gradient of cross-entropy",
    ranks=(1,),
)


def cross_entropy_ids(a: Tensor, b: Tensor) -> Tensor:
    """Minus the mean of log(softmax(a)) of the class that each row should have: `cross_entropy_loss` with labels that
    need no probabilities.

    a: logits, F32, ne [n_classes, ...], dense rows. b: I32, ne of a without the first dimension: the class of each row;
    a negative one leaves the row out, also of the mean. Result: F32, ne [1], accumulated in double; 0 when no row
    counts. Raises ShapeError, DTypeError, and when it runs BackendError for a class that there is not.
    """
    return record(CROSS_ENTROPY_IDS, (a, b), {})


def cross_entropy_ids_back(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The gradient of `cross_entropy_ids` by its logits: (softmax(b) - 1 for the class) a / rows that count, and 0 in
    the other rows.

    a: the gradient of the loss, F32, one element; b: logits, c: classes, as there. Result: F32, as `b`. Raises as
    `cross_entropy_ids`.
    """
    return record(CROSS_ENTROPY_IDS_BACK, (a, b, c), {})
