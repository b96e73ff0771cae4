"""`python -m pyggml.tools.measure.training MODEL`: what a training step costs, in time and memory, and in which ops.

The texts are random tokens, all as long as asked for. The first step is not measured: it plans the graph. Besides time,
processor time is told: on a machine with other work it says more.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence

import numpy as np

from pyggml.inspect.profile import Profile
from pyggml.learn.lora import LoRA
from pyggml.learn.optimisers import AdamW
from pyggml.llm.model import load_model


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each step, and the ops of one more step, the longest first."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--texts", type=int, default=4, help="of a batch")
    p.add_argument("--tokens", type=int, default=512, help="of a text")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--threads", type=int)
    p.add_argument("--lora", type=int, metavar="RANK", help="train an adapter of this rank, not all weights")
    p.add_argument("--checkpoint", action="store_true", help="compute layers again")
    a = p.parse_args(argv)
    model = load_model(a.model)
    train = "all" if a.lora is None else LoRA(r=a.lora)
    t = model.trainer(AdamW(lr=1e-4), train, a.tokens + 1, a.threads, checkpoint=a.checkpoint)
    rng = np.random.default_rng(0)
    texts: list[list[int]] = [rng.integers(0, model.hparams.n_vocab, a.tokens + 1).tolist() for _ in range(a.texts)]
    n = a.texts * a.tokens
    t.step(texts)
    for _ in range(a.steps):
        start, cpu = time.perf_counter(), time.process_time()
        loss = t.step(texts)
        took, cpu = time.perf_counter() - start, time.process_time() - cpu
        print(f"{n / took:7.0f} tokens/s, {n / cpu:7.0f} per second of a processor, loss {loss:.6f}")
    with Profile(t.scheduler) as profile:
        t.step(texts)
    for row in profile.table():
        rates = f"{row.gflops:7.1f} GFLOPS {row.gb_per_s:6.1f} GB/s"
        print(f"{row.key:24} {row.n:5} {row.ns / 1e6:9.1f} ms {row.ns / profile.wall_ns:6.1%} {rates}")
    print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")


if __name__ == "__main__":
    main()
