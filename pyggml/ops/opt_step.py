"""Steps of optimisers: they write new weights over the old ones, and new moments over the old moments."""

from __future__ import annotations

import numpy as np

from ..codec import Array
from ..opdef import OpDef, Params, Srcs, elementwise_cost, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, src

__all__ = [
    "opt_step_adamw",
    "opt_step_sgd",
]


def _check(srcs: Srcs, n_params: int) -> Ne:
    a, n_states = src(srcs, 0), len(srcs) - 1
    for i, role in enumerate(("a", "grad", "m", "v")[:n_states]):
        t = src(srcs, i)
        rule(t.ne == a.ne, f"{role} must have a's ne {list(a.ne)}, not {list(t.ne)}")
        rule(t.is_contiguous, f"{role} must be contiguous (cont({role}) is)")
    params = src(srcs, n_states)
    rule(params.ne == (n_params, 1, 1, 1), f"params must hold {n_params} numbers, not ne {list(params.ne)}")
    rule(params.is_contiguous, "params must be contiguous")
    return a.ne


def _adamw_shape(srcs: Srcs, params: Params) -> Ne:
    return _check(srcs, 7)


def _sgd_shape(srcs: Srcs, params: Params) -> Ne:
    return _check(srcs, 2)


def _adamw_ref(a: Array, grad: Array, m: Array, v: Array, params: Array) -> tuple[Array, Array, Array]:
    alpha, beta1, beta2, eps, wd, beta1h, beta2h = params.reshape(-1)
    m = m * beta1 + grad * (1 - beta1)
    v = v * beta2 + grad * grad * (1 - beta2)
    step = m * beta1h / (np.sqrt(v * beta2h) + eps)
    return a * (1 - alpha * wd) - alpha * step, m, v


def _sgd_ref(a: Array, grad: Array, params: Array) -> Array:
    alpha, wd = params.reshape(-1)
    return a * (1 - alpha * wd) - alpha * grad


OPT_STEP_ADAMW = OpDef(
    name="opt_step_adamw",
    srcs=("a", "grad", "m", "v", "params"),
    params=(),
    shape=_adamw_shape,
    dtypes={(F32,) * 5: F32},
    ref=_adamw_ref,
    kernel="opt_step_adamw",
    cost=elementwise_cost(15),
    inplace=(0,),
    label="a - AdamW's step",
    writes=0,
    changes=(2, 3),
)
OPT_STEP_SGD = OpDef(
    name="opt_step_sgd",
    srcs=("a", "grad", "params"),
    params=(),
    shape=_sgd_shape,
    dtypes={(F32,) * 3: F32},
    ref=_sgd_ref,
    kernel="opt_step_sgd",
    cost=elementwise_cost(4),
    inplace=(0,),
    label="a - step of SGD",
    writes=0,
)


def opt_step_adamw(a: Tensor, grad: Tensor, m: Tensor, v: Tensor, params: Tensor) -> Tensor:
    """One step of AdamW (ggml_opt_step_adamw; arXiv 1711.05101), written over the weights `a` and the moments `m`, `v`:
    m = beta1 m + (1 - beta1) grad, v = beta2 v + (1 - beta2) grad^2, a = (1 - alpha wd) a - alpha beta1h m /
    (sqrt(beta2h v) + eps).

    a, grad, m, v: F32, the same ne, contiguous. params: F32 ne [7]: alpha (the learning rate), beta1, beta2, eps, wd
    (weight decay), beta1h, beta2h; in step t, from 1 on, these two are 1 / (1 - beta1^t) and 1 / (1 - beta2^t).
    Result: a view of `a`, after the step. Raises ShapeError, DTypeError.
    """
    return record(OPT_STEP_ADAMW, (a, grad, m, v, params), {})


def opt_step_sgd(a: Tensor, grad: Tensor, params: Tensor) -> Tensor:
    """One step of gradient descent (ggml_opt_step_sgd), written over the weights: a = (1 - alpha wd) a - alpha grad.

    a, grad: F32, the same ne, contiguous. params: F32 ne [2]: alpha (the learning rate), wd (weight decay). Result: a
    view of `a`, after the step. Raises ShapeError, DTypeError.
    """
    return record(OPT_STEP_SGD, (a, grad, params), {})
