"""`python -m pyggml.tools.measure.borders [TYPE ...]`: how a matrix product's time per column goes with their number.

For every instruction set of this CPU: us a column, one thread, and the numbers of columns at which throughput falls by
more than 5 %. The borders between the kernels of a product are chosen by these numbers (csrc/products/borders.h, and
ROUND_BEYOND in pyggml/backends/cpu/products.py); docs/products.md keeps results. The thread's CPU time is counted, so
that other processes disturb little.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, isa_levels
from pyggml.backends.cpu.repack import repack
from pyggml.buffers.alloc import steps_of
from pyggml.buffers.buffer import Buffer
from pyggml.dtypes import DType
from pyggml.tensor import Context

from .op_cases import leaf

TYPES = (DType.Q4_0, DType.Q8_0, DType.Q4_K, DType.Q6_K, DType.IQ4_XS, DType.F16, DType.BF16, DType.F32)
COLUMNS = (*range(1, 41), 48, 64, 96, 97, 128, 129, 256)
SHAPE = (2048, 5632)  # k, m
MATRICES = 3  # multiplied in turn, so that few columns wait for memory, as in a model
ROUNDS = 5
FALL = 0.05


def us_by_columns(isa: str, dtype: DType, columns: Sequence[int], shape: tuple[int, int] = SHAPE) -> dict[int, float]:
    """Microseconds per column: the least of all rounds."""
    backend = CpuBackend(1, isa)
    with Context() as ctx:
        weights = [leaf(ctx, dtype, *shape) for _ in range(MATRICES)]
        repack(weights, isa=isa)
        runs: dict[int, Callable[[], object]] = {}
        for n in columns:
            nodes = [gg.mul_mat(w, leaf(ctx, DType.F32, shape[0], n)) for w in weights]
            for t in nodes:
                t.buffer, t.offset = Buffer.allocate(t.nbytes), 0
            runs[n] = backend.compile(steps_of(nodes), lambda t: t).run
        best = dict.fromkeys(columns, float("inf"))
        for _ in range(ROUNDS):
            for n, run in runs.items():
                start = time.thread_time()
                run()
                best[n] = min(best[n], (time.thread_time() - start) / len(weights) / n * 1e6)
    return best


def falls(us: dict[int, float]) -> dict[int, float]:
    """Columns at which throughput is more than FALL below the best of fewer columns, and by how much."""
    out: dict[int, float] = {}
    least = float("inf")
    for n, t in us.items():
        if least < t * (1 - FALL):
            out[n] = 1 - least / t
        least = min(least, t)
    return out


def main(names: Sequence[str]) -> None:
    """Print two lines per level and type."""
    for isa in isa_levels():
        for dtype in [DType[name] for name in names] or TYPES:
            us = us_by_columns(isa, dtype, COLUMNS)
            print(isa, dtype.name, " ".join(f"{n}:{t:.0f}" for n, t in us.items()))
            print("  falls", " ".join(f"{n}:{part:.0%}" for n, part in falls(us).items()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
