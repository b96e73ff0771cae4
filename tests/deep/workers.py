"""Runs cases in a process of their own, whose memory is limited: crashes and hangs are seen, and named by seed."""

from __future__ import annotations

import faulthandler
import multiprocessing
import resource
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from . import COUNT, SEED

Case = Callable[..., str]  # (rng, folder of the worker, arguments...) -> what came of it; a fault is an exception
MEMORY = 1 << 30  # bytes that a worker may take on top of what it has
PATIENCE = 60.0  # seconds without a result


def _work(pipe: Connection, case: Case, seeds: range, folder: Path, args: tuple[Any, ...]) -> None:
    faulthandler.enable()
    warnings.simplefilter("error")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for seed in seeds:
        try:
            result = case(np.random.default_rng(seed), folder, *args), None
        except BaseException:
            result = "FAULT", traceback.format_exc()
        pipe.send(result)


def _results(case: Case, seeds: range, folder: Path, args: tuple[Any, ...]) -> Iterator[tuple[str, str | None]]:
    """What came of each seed, and what is wrong with that; after a crash or a hang another worker goes on."""
    spawn = multiprocessing.get_context("spawn")
    while seeds:
        here, there = spawn.Pipe(duplex=False)
        worker = spawn.Process(target=_work, args=(there, case, seeds, folder, args), daemon=True)
        worker.start()
        there.close()
        try:
            while seeds and here.poll(PATIENCE):
                yield here.recv()
                seeds = seeds[1:]
            if seeds:
                worker.kill()
                yield "HANG", f"no result within {PATIENCE} s"
        except EOFError:
            worker.join()
            yield "CRASH", f"the process died, exit code {worker.exitcode}"
        worker.join()
        seeds = seeds[1:]


def attack(case: Case, folder: Path, *args: Any) -> None:
    """`COUNT` cases; prints how often each outcome came, and fails with all faults."""
    seeds = range(SEED, SEED + COUNT)
    results = list(zip(seeds, _results(case, seeds, folder, args), strict=True))
    counts = Counter(outcome for _, (outcome, _) in results).most_common()
    print(f"\n{case.__name__}: {len(results)} cases: {', '.join(f'{n} {what}' for what, n in counts)}")
    faults = [f"seed {seed}: {what}" for seed, (_, what) in results if what is not None]
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:20])
