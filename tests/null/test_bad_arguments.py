"""Every op, function and method with arguments of any kind: what it does not take is a named error."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import pyggml as gg

CTX = gg.Context()
RNG = np.random.default_rng(0)
TENSORS = [
    CTX.from_numpy(RNG.standard_normal(shape).astype(np.float32), dtype=dtype)
    for shape, dtype in (
        ((4,), gg.F32),
        ((3, 4), gg.F32),
        ((4, 4), gg.F16),
        ((2, 3, 4), gg.F32),
        ((2, 2, 3, 4), gg.BF16),
        ((2, 32), gg.Q8_0),
        ((1, 256), gg.Q4_K),
        ((1,), gg.F32),
    )
]
TENSORS += [CTX.from_numpy(np.zeros(shape, np.int32)) for shape in ((3,), (2, 3))]
TENSORS.append(gg.transpose(TENSORS[1]))
JUNK: list[Any] = [None, "x", b"x", 1.5, -1, 0, 1 << 31, 1 << 62, 1 << 63, -(1 << 70), 10**400, Fraction(1, 3), 1j]
JUNK += [
    float("nan"),
    float("inf"),
    1e300,
    5e-324,
    [1, 2],
    [[1], [2, 3]],
    (),
    {},
    object(),
    int,
    np.ones(3),
    np.ones(()),
]
JUNK += [np.float32(2), np.int64(3), np.uint8(1), True, np.True_, gg.F16, gg.Q4_0, CTX, gg.Graph(), TENSORS[0]]
JUNK += [gg.Var("v", 2), 4 * gg.Var("v", 2)]
GOOD: dict[str, list[Any]] = {
    "Tensor": TENSORS,
    "Tensor | None": [None, *TENSORS],
    "int": [0, 1, 2, 3, 4, 8, 12, 16],
    "float": [0.0, 1.0, 0.5, -2.0, 1e-5, 1],
    "DType": [gg.F16, gg.Q8_0],
}


def arguments(name: str, good: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
    """Up to 60 different lists of arguments, two of three from the `good` ones of their place, the others from JUNK."""
    rng, seen = Random(name if os.environ.get("CI") else None), set[tuple[int, ...]]()
    for _ in range(240):
        places = tuple(rng.randrange(len(g)) if rng.random() < 2 / 3 else -1 - rng.randrange(len(JUNK)) for g in good)
        if places not in seen:
            seen.add(places)
            yield [g[i] if i >= 0 else JUNK[-1 - i] for g, i in zip(good, places, strict=True)]
        if len(seen) == 60:
            break


def run(t: object) -> None:
    """Compute what was recorded, where it is small."""
    if isinstance(t, gg.Tensor) and max(t.nbytes, t.n_elements) < 1 << 20:
        for backend in ("cpu", "ref"):
            gg.compute(gg.Graph().build_forward_expand(t), backend=backend)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numbers that overflow a smaller type
@pytest.mark.parametrize("name", gg.ops.__all__)
def test_ops(name: str) -> None:
    op = getattr(gg, name)
    if isinstance(op, int) or inspect.isclass(op):
        return
    kinds = [str(p.annotation) for p in inspect.signature(op).parameters.values() if p.kind is not p.VAR_KEYWORD]
    originals = [t for t in TENSORS if t.view_src is None]
    before = [t.raw().copy() for t in originals]
    for args in arguments(name, [GOOD.get(kind, [0, 16]) for kind in kinds]):
        try:
            with gg.Context():
                run(op(*args))
        except gg.GGMLError:
            pass
        except Exception as e:
            raise AssertionError(f"{name} of {args!r:.500}") from e
        for t, bytes_ in zip(originals, before, strict=True):
            t.raw()[...] = bytes_


def graph() -> gg.Graph:
    return gg.Graph().build_forward_expand(gg.sqr(TENSORS[0]))


def scheduler() -> gg.Scheduler:
    return gg.Scheduler(("cpu",))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "new_tensor": lambda a, b, c: gg.Context().new_tensor(a, b, c),
    "new_tensor F32": lambda a: gg.Context().new_tensor(gg.F32, a),
    "name": lambda a: gg.Context().new_tensor(gg.F32, 4, a),
    "from_numpy": lambda a, b, c: gg.Context().from_numpy(a, b, c),
    "from_numpy F16": lambda a: gg.Context().from_numpy(a, gg.F16),
    "from_numpy I8": lambda a: gg.Context().from_numpy(a, gg.I8),
    "from_bytes": lambda a, b, c: gg.Context().from_bytes(a, b, c),
    "from_bytes F32": lambda a: gg.Context().from_bytes(a, gg.F32, 1),
    "get_tensor": lambda a: (gg.Context().get_tensor(a), gg.Graph().get_tensor(a)),
    "set": lambda a: gg.Context().new_tensor(gg.F32, 3).set(a),
    "set_name": lambda a: gg.dump_dot(gg.Graph().build_forward_expand(gg.sqr(TENSORS[0]).set_name(a))),
    "Graph": lambda a: gg.Graph(a),
    "build_forward_expand": lambda a: gg.Graph().build_forward_expand(a),
    "compute": lambda a: gg.compute(a),
    "compute inputs": lambda a: gg.compute(graph(), inputs=a),
    "compute key": lambda a: gg.compute(graph(), inputs={a: 0}) if a.__hash__ else None,
    "compute value": lambda a: gg.compute(graph(), inputs={TENSORS[0]: a}),
    "compute n_threads": lambda a: gg.compute(graph(), n_threads=a),
    "compute backend": lambda a: gg.compute(graph(), backend=a) if a.__hash__ else None,
    "Scheduler": lambda a: gg.Scheduler(a),
    "Scheduler of": lambda a: gg.Scheduler([a]),
    "n_threads": lambda a: gg.Scheduler(("cpu",), a),
    "alloc": lambda a: scheduler().alloc(a),
    "reserve": lambda a: scheduler().reserve(a),
    "Scheduler.compute": lambda a: scheduler().compute(a),
    "assignment": lambda a: scheduler().assignment(a),
    "buffer_size": lambda a: scheduler().buffer_size(a) if a.__hash__ else None,
    "set_tensor_backend": lambda a: scheduler().set_tensor_backend(a, "cpu"),
    "set_tensor_backend to": lambda a: scheduler().set_tensor_backend(gg.sqr(TENSORS[0]), a) if a.__hash__ else None,
    "dump_dot": lambda a: gg.dump_dot(a),
    "dump_dot to": lambda a: gg.dump_dot(graph(), a),
    "dump_dot layers": lambda a: gg.dump_dot(graph(), layers=a),
    "dump_dot nodes": lambda a: gg.dump_dot(graph(), nodes=a),
    "dump_dot around": lambda a: gg.dump_dot(graph(), around=a),
    "dump_dot against": lambda a: gg.dump_dot(graph(), against=a),
    "dump_dot scheduler": lambda a: gg.dump_dot(graph(), scheduler=a),
    "dump_dot run": lambda a: gg.dump_dot(graph(), run=a),
    "render": lambda a: gg.render(a, "x.svg"),
    "render to": lambda a: gg.render(graph(), a),
    "quantize": lambda a, b: gg.quantize(a, b),
    "quantize as": lambda a: gg.quantize(np.ones(32, np.float32), a),
    "quantize Q8_0": lambda a, b: gg.quantize(a, gg.Q8_0, b),
    "quantize n_threads": lambda a: gg.quantize(np.ones(32, np.float32), gg.Q8_0, None, a),
    "dequantize": lambda a, b, c: gg.dequantize(a, b, c),
    "dequantize bytes": lambda a: gg.dequantize(a, gg.F32),
    "dequantize as": lambda a: gg.dequantize(b"1234", a),
    "dequantize to": lambda a: gg.dequantize(b"1234", gg.F32, a),
    "Var": lambda a, b: gg.Var("v", a, b),
    "bind": lambda a: gg.Var("v", 5).bind(a),
    "stride": lambda a: gg.view_1d(TENSORS[0], 1, a * gg.Var("v", 2)),
    "offset": lambda b: gg.view_1d(TENSORS[0], 1, 4 * gg.Var("v", 2) + b),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    f = FUNCTIONS[name]
    for args in arguments(name, [JUNK] * len(inspect.signature(f).parameters)):
        try:
            with CTX:
                f(*args)
        except gg.GGMLError:
            pass
        except Exception as e:
            raise AssertionError(f"{name} of {args!r:.500}") from e


@pytest.mark.parametrize("symbol", [getattr(operator, n) for n in ("add", "sub", "mul", "truediv", "matmul", "pow")])
def test_operators(symbol: Callable[[Any, Any], Any]) -> None:
    for junk in JUNK:
        for a, b in ((TENSORS[0], junk), (junk, TENSORS[0])):
            with suppress(gg.GGMLError, TypeError):  # TypeError: neither side has the operator
                run(symbol(a, b))
