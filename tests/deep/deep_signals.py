"""Ctrl-C at random moments."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu import backend as cpu_backend
from pyggml.backends.cpu import lower
from pyggml.llm.context import LlamaContext
from pyggml.llm.interrupt import uninterrupted
from pyggml.llm.state import save_load as state
from tests.child import in_child
from tests.tiny_model import write_gguf

from . import SECONDS

IDS = [1, 70, 80]


@pytest.fixture(autouse=True)
def all_ops_shared_all_runs_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "_SHARE", -1.0)
    monkeypatch.setattr(cpu_backend, "_LONG_NS", 0)


@pytest.fixture
def model(tmp_path: Path) -> gg.Model:
    return gg.load_model(write_gguf(tmp_path / "tiny.gguf"))


def interrupted(work: Callable[[], object], after: float) -> bool:
    """Whether SIGINT, sent `after` seconds, ended `work`, which goes on until then, with a KeyboardInterrupt."""
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        end = time.monotonic() + after + 5
        while time.monotonic() < end:
            work()
    except KeyboardInterrupt:
        return True
    return False


@contextmanager
def others_decoding(model: gg.Model, wanted: np.ndarray) -> Iterator[Counter[str]]:
    """Two more threads, each with a context of its own; a SIGINT ends at most one decode of each."""
    stop, counts = threading.Event(), Counter[str]()
    failures: list[BaseException] = []

    def work(n_threads: int) -> None:
        ctx = model.new_context(64, n_threads=n_threads)
        try:
            while not stop.is_set():
                ctx.memory.clear()
                try:
                    ctx.decode(IDS)
                except gg.BackendError as e:
                    assert "aborted" in str(e)
                    counts["aborted"] += 1
                    continue
                assert np.array_equal(ctx.logits_ith(-1), wanted)
                counts["decoded"] += 1
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2)]
    for t in threads:
        t.start()
    try:
        yield counts
    finally:
        stop.set()
        for t in threads:
            t.join()
        if failures:
            raise failures[0]


def test_interrupts_of_everything(model: gg.Model) -> None:
    """Each of them ends what the main thread does, releases its locks, and leaves what others compute alone."""
    rng = np.random.default_rng()
    ctx = model.new_context(128, n_seq_max=2, n_threads=2)
    ctx.decode(IDS)
    wanted, saved = ctx.logits_ith(-1), state.state_bytes(ctx)
    c = gg.Context()
    x = c.new_tensor(gg.F32, (512,)).set_input()
    y = gg.soft_max(gg.silu(x))
    g = gg.Graph().build_forward_expand(y)

    def whole() -> None:
        with uninterrupted():
            ctx.memory.clear()
            ctx.decode(IDS)

    def locked() -> None:
        with ctx.lock:
            ctx.memory.clear()
            ctx.decode(IDS)

    def shift() -> None:
        ctx.memory.clear()
        ctx.decode(IDS)
        ctx.memory.seq_add(0, 1, -1, 3)
        ctx.update()

    def keep(ctx: LlamaContext = ctx) -> None:
        state.load_state_bytes(ctx, saved)
        state.load_seq_bytes(ctx, state.seq_bytes(ctx, 0), 1)

    kinds: dict[str, Callable[[], object]] = {
        "decode": whole,
        "lock": locked,
        "shift": shift,
        "state": keep,
        "warmup": ctx.warmup,
        "compute": lambda: gg.compute(g, {x: np.ones(512)}, n_threads=2),
        "event": threading.Event().wait,
        "read": lambda: os.read(pipe[0], 1),
        "sleep": lambda: time.sleep(1),
    }
    pipe, counts = os.pipe(), Counter[str]()
    end = time.monotonic() + SECONDS
    with others_decoding(model, wanted) as other:
        while time.monotonic() < end:
            kind = str(rng.choice(list(kinds)))
            assert interrupted(kinds[kind], rng.uniform(0, 0.02)), f"{kind} was not interrupted"
            counts[kind] += 1
            for use in (ctx.memory.clear, lambda: gg.compute(g, {x: np.ones(512)}, n_threads=2)):
                thread = threading.Thread(target=use, daemon=True)
                thread.start()
                thread.join(10)
                assert not thread.is_alive(), f"a lock was not released after {kind}"
            ctx.memory.clear()
            ctx.decode(IDS)
            assert np.array_equal(ctx.logits_ith(-1), wanted), kind
        n = counts.total()
        print(f"\n{n} interrupts: {dict(counts)}; the others: {dict(other)}")
        assert other["aborted"] <= 2 * n
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_set_and_forks_while_others_decode(model: gg.Model) -> None:
    """Whatever handler is set, SIGINT reaches it, also in a child; afterwards the system's handler is Python's."""
    rng, counts = np.random.default_rng(), Counter[str]()
    alone = model.new_context(64, n_threads=1)
    alone.decode(IDS)
    wanted = alone.logits_ith(-1)
    came: list[int] = []

    def expect_one() -> None:
        before, end = len(came), time.monotonic() + 5
        os.kill(os.getpid(), signal.SIGINT)
        while len(came) == before and time.monotonic() < end:
            time.sleep(0)
        assert len(came) == before + 1

    def child() -> None:
        expect_one()
        for _ in range(5):
            alone.memory.clear()
            alone.decode(IDS)  # not aborted by the interrupt before
        assert np.array_equal(alone.logits_ith(-1), wanted)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        alone.memory.clear()
        alone.decode(IDS)
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        assert not int(fields["SigCgt"], 16) >> (signal.SIGINT - 1) & 1

    old = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        end = time.monotonic() + SECONDS
        with others_decoding(model, wanted) as other:
            while time.monotonic() < end:
                kind = ("handler", "ignore", "fork")[rng.integers(3)]
                if kind == "handler":
                    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
                    expect_one()
                elif kind == "ignore":
                    now = signal.signal(signal.SIGINT, signal.SIG_IGN)
                    before = len(came)
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(rng.uniform(0, 0.005))
                    assert len(came) == before
                    signal.signal(signal.SIGINT, now)
                else:
                    in_child(child)
                counts[kind] += 1
        print(f"\n{dict(counts)}; {len(came)} handled; the others: {dict(other)}")
    finally:
        signal.signal(signal.SIGINT, old)
