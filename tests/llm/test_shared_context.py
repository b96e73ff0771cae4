"""Threads that share a context take turns; Ctrl-C and forks leave nobody waiting."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pyggml.errors import BackendError
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model, load_model
from pyggml.llm.state import save_load as state

from ..child import in_child


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


def new(model: Model, n_threads: int = 1) -> LlamaContext:
    return model.new_context(256, n_seq_max=2, n_threads=n_threads)


@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_thread_that_holds_the_lock_reads_its_own_logits(model: Model, n_threads: int) -> None:
    ctx, wanted = new(model, n_threads), []
    for i in range(8):
        alone = new(model)
        alone.decode([1, 70 + i, 80])
        wanted.append(alone.logits_ith(-1))

    def work(i: int) -> None:
        for _ in range(10):
            with ctx.lock:
                ctx.memory.clear()
                ctx.decode([1, 70 + i, 80])
                got = ctx.logits_ith(-1)
            assert np.array_equal(got, wanted[i]), i

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.parametrize("n_threads", [1, 2])
def test_every_decode_is_whole(model: Model, n_threads: int) -> None:
    """Decodes, copies, states and warm-ups from 8 threads, none with a lock of its own: as in sequence."""
    ctx, one_by_one = new(model, n_threads), new(model)

    def work(i: int) -> None:
        for _ in range(10):
            ctx.decode([75])
            ctx.memory.seq_cp(0, 1)
            if i % 4 == 0:
                state.load_seq_bytes(ctx, state.seq_bytes(ctx, 0), 1)
            elif i % 4 == 1:
                assert len(state.state_bytes(ctx))
            elif i % 4 == 2:
                ctx.warmup()
            ctx.memory.seq_rm(1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    for _ in range(80):
        one_by_one.decode([75])
    ctx.decode([80])
    one_by_one.decode([80])
    assert ctx.memory.used == 81 and ctx.memory.seq_pos_max(0) == 80
    np.testing.assert_allclose(ctx.logits, one_by_one.logits, atol=2e-3)  # cells of F16, in another order


def test_ctrl_c_releases_the_lock(model: Model) -> None:
    def work() -> None:
        ctx, rng = new(model), np.random.default_rng(0)
        for _ in range(40):
            timer = threading.Timer(rng.uniform(0, 0.004), os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                for _ in range(100_000):
                    ctx.decode([75])
                    ctx.memory.clear()
            other = threading.Thread(target=ctx.memory.clear)
            other.start()
            other.join(5)
            assert not other.is_alive(), "the lock was not released"

    in_child(work)


def test_a_child_refuses_a_context_that_was_decoding(model: Model) -> None:
    busy, free, stop, at_work = new(model), new(model), threading.Event(), threading.Event()

    def work() -> None:
        with busy.lock:
            while not stop.is_set():
                busy.memory.clear()
                busy.decode([75])
                at_work.set()

    def child() -> None:
        free.decode([75])
        new(model).decode([75])
        for use in (lambda: busy.decode([75]), busy.memory.clear, lambda: state.state_bytes(busy)):
            with pytest.raises(BackendError, match="was forked"):
                use()

    thread = threading.Thread(target=work)
    thread.start()
    at_work.wait()
    try:
        in_child(child)
    finally:
        stop.set()
        thread.join()
    busy.decode([75])
