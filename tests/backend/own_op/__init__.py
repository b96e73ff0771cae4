"""An op of another package: hypot(a, b) with its own shape rule, reference and C kernel."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np

import pyggml as gg


def _shape(srcs, params):
    gg.rule(srcs[0].ne == srcs[1].ne, "a and b must be of one shape")
    return srcs[0].ne


def _define() -> gg.OpDef:
    return gg.OpDef(
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
    )


class Package:
    """What such a package exports."""

    def __init__(self, folder: Path) -> None:
        lib = folder / "own_op.so"
        source = Path(__file__).parent / "hypot.c"
        command = ["cc", "-O2", "-shared", "-fPIC", f"-I{gg.get_include()}", str(source), "-o", str(lib), "-lm"]
        subprocess.run(command, check=True)
        self.lib = ctypes.CDLL(str(lib))
        self.op = _define()
        address = ctypes.cast(self.lib.own_hypot_f32, ctypes.c_void_p).value
        gg.register_kernel(self.op, address or 0, gg.F32, gg.F32, gg.F32)

    def hypot(self, a: gg.Tensor, b: gg.Tensor, s: float = 1.0) -> gg.Tensor:
        """s sqrt(a^2 + b^2), element by element. a, b: F32, one shape; result: as a. Raises ShapeError, DTypeError."""
        return gg.record(self.op, (a, b), {"s": s})
