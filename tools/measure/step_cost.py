"""`python -m pyggml.tools.measure.step_cost [MODEL]`: what Python costs per decode step, with the C run left out.

It measures everything except the kernels: checking and splitting the batch, finding a slot, writing the mask, finding
the graph, gathering rows. It prints the median CPU time of this thread over one pass through the cache, with 1, 8 and
64 sequences at n_ctx 4096. Building the graphs does not count.
"""

from __future__ import annotations

import sys
import time
from unittest import mock

import numpy as np

from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import load_model
from pyggml.sched import Schedule

N_CTX = 4096


def skip(schedule: Schedule, n_threads: int | None = None) -> None:
    """In place of `Schedule.run`."""


def step_us(ctx: LlamaContext, n_seq: int) -> tuple[float, float]:
    """Median and 90th percentile of one pass, in microseconds."""
    batches: list[Batch | list[int]] = []
    for i in range(N_CTX // n_seq):
        batch = Batch()
        for s in range(n_seq):
            batch.add(3 + (i + s) % 200, i, s, True)
        batches.append([3 + i % 200] if n_seq == 1 else batch)
    times: list[int] = []
    for batch in batches:
        start = time.thread_time_ns()
        ctx.decode(batch)
        times.append(time.thread_time_ns() - start)
    return float(np.median(times)) / 1e3, float(np.percentile(times, 90)) / 1e3


def main(path: str | None) -> None:
    """Print a line per number of sequences."""
    model = load_model(path)
    for n_seq in (1, 8, 64):
        ctx = model.new_context(n_ctx=N_CTX, n_seq_max=n_seq, n_threads=1)
        with mock.patch.object(Schedule, "run", skip):
            step_us(ctx, n_seq)  # makes the graphs
            ctx.memory.clear()
            median, p90 = step_us(ctx, n_seq)
        print(f"{n_seq:3d} sequences: median {median:6.1f} us, p90 {p90:6.1f} us per step")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
