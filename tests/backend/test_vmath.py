"""The vector mathematics of every instruction set: units in the last place, and what stands at the ends of F32."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, isa_levels
from pyggml.buffers.alloc import steps_of
from pyggml.opdef import OPS
from pyggml.testing.harness import place

ULPS = {"exp": 1, "expm1": 4, "log": 2, "softplus": 2, "sin": 2, "cos": 2, "tanh": 4, "sigmoid": 4}
SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 3.4e38, -3.4e38]


def computed(op: str, isa: str, x: np.ndarray) -> np.ndarray:
    with gg.Context() as ctx:
        a = ctx.from_numpy(x)
        y = getattr(gg, op)(a)
    place(y)
    CpuBackend(1, isa).compile(steps_of([y]), lambda s: s).run()
    return np.array(y.numpy())


def arguments() -> np.ndarray:
    rng = np.random.default_rng(5)
    turns = np.arange(-4000, 4000) * (np.pi / 4)  # where sines and cosines are 0, 1 or equal
    bits = rng.integers(0, 2**32, 30_000, dtype=np.uint64).astype(np.uint32)  # every exponent alike
    near_one = 1 + rng.uniform(-0.5, 1.5, 10_000)
    parts = [SPECIAL, turns, turns * 1e4, near_one, rng.standard_normal(10_000) * 20, bits.view(np.float32)]
    with np.errstate(invalid="ignore"):
        return np.concatenate([np.asarray(p, np.float32) for p in parts])


@pytest.mark.parametrize("isa", isa_levels())
@pytest.mark.parametrize("op", ULPS)
def test_within_ulps(op: str, isa: str) -> None:
    x = arguments()
    with np.errstate(all="ignore"):
        want = np.asarray(OPS[op].ref(x.astype(np.float64)))
        nearest = want.astype(np.float32)
    got = computed(op, isa, x)
    assert np.array_equal(np.isnan(got), np.isnan(nearest))
    assert np.array_equal(np.isinf(got), np.isinf(nearest))
    finite = np.isfinite(nearest)
    error = np.abs(got[finite] - want[finite]) / np.spacing(np.abs(nearest[finite]))
    worst = int(np.argmax(error))
    assert error[worst] <= ULPS[op], f"{op}({x[finite][worst]!r}) is {error[worst]:.2f} units off"


@pytest.mark.parametrize("isa", isa_levels())
@pytest.mark.parametrize("op", ["sin", "tanh", "expm1", "floor", "ceil", "round", "trunc"])
def test_negative_zero_stays(op: str, isa: str) -> None:
    assert np.signbit(computed(op, isa, np.full(5, -0.0, np.float32))).all()
