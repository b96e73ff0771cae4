"""An op of one's own for pyggml: hypot(a, b), with a kernel in C and a gradient."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import pyggml as gg


def _shape(srcs, params):
    gg.rule(srcs[0].ne == srcs[1].ne, "a and b must be of one shape")
    return srcs[0].ne


def _grad(node, gy):
    """The slope of hypot(a, b) along a is a / hypot(a, b). Each entry is recorded when it is wanted."""
    a, b = node.src
    g = gy * node.op_params["s"] / hypot(a, b)
    return lambda: g * a, lambda: g * b


OP = gg.OpDef(
    name="hypot",
    srcs=("a", "b"),
    params=("s",),
    shape=_shape,
    dtypes={(gg.F32, gg.F32): gg.F32},
    ref=lambda a, b, s: s * np.hypot(a, b),
    kernel="hypot",
    cost=gg.elementwise_cost(4),
    inplace=(0, 1),
    label="s hypot(a, b)",
    ranks=(0, 1),
    grad=_grad,
)

with TemporaryDirectory() as _folder:
    _command = ["cc", "-O2", "-shared", "-fPIC", f"-I{gg.get_include()}", "-o", f"{_folder}/hypot.so"]
    subprocess.run([*_command, str(Path(__file__).with_name("hypot.c")), "-lm"], check=True)
    LIB = ctypes.CDLL(f"{_folder}/hypot.so")
gg.register_kernel(OP, LIB.own_hypot_f32, gg.F32, gg.F32, gg.F32)


def hypot(a: gg.Tensor, b: gg.Tensor, s: float = 1.0) -> gg.Tensor:
    """s sqrt(a^2 + b^2), element by element. a, b: F32, one shape; result: as a. Raises ShapeError, DTypeError."""
    return gg.record(OP, (a, b), {"s": s})
