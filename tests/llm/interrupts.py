"""Signals at any place: operations on a context that is interrupted at random, beside one that never is."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from pyggml.errors import GGMLError
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.state.save_load import load_seq_bytes, load_state_bytes, seq_bytes, state_bytes

N_SEQ = 3
KINDS = ("decode",) * 8 + ("rm", "rm", "cp", "keep", "add", "div", "clear", "update", "update", "load", "load_seq")
WAITS = ("update", "load", "load_seq")  # operations for which Ctrl-C waits, but not what other signals may raise
Op = tuple[Any, ...]


class Alarm(BaseException):
    """What the handler of another signal than SIGINT may raise."""


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def alarm() -> None:
    raise Alarm


def interrupted(call: Callable[[], object], at: int, come: Callable[[], None]) -> tuple[bool, int]:
    """Call, and let `come` come before bytecode number `at` of it. Whether it was broken off, how many were seen."""
    n = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal n
        frame.f_trace_opcodes = True
        if event == "opcode":
            n += 1
            if n == at:
                come()
        return trace

    before, handler = sys.gettrace(), signal.getsignal(signal.SIGINT)
    sys.settrace(trace)
    try:
        call()
    except (KeyboardInterrupt, Alarm):
        return True, n
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, handler)
    return False, n


class PlainCells:
    """What a cache holds: a position and the sequences of each cell, in no order."""

    def __init__(self) -> None:
        self.cells: list[tuple[int, frozenset[int]]] = []

    def last(self, seq: int) -> int:
        return max((p for p, s in self.cells if seq in s), default=-1)

    def change(self, where: Callable[[int, frozenset[int]], bool], new: Callable[[int, frozenset[int]], Any]) -> None:
        changed = [new(p, s) if where(p, s) else (p, s) for p, s in self.cells]
        self.cells = [(p, s) for p, s in changed if s and p >= 0]

    def apply(self, op: Op) -> None:
        match op:
            case ("decode", tokens):
                self.cells += [(p, frozenset({s})) for _, p, s in tokens]
            case ("rm", seq, p0, p1):
                gone = frozenset(range(N_SEQ)) if seq < 0 else frozenset({seq})
                self.change(lambda p, _: p0 <= p and (p1 < 0 or p < p1), lambda p, s: (p, s - gone))
            case ("cp", src, dst, p0, p1):
                inside = lambda p: p0 <= p and (p1 < 0 or p < p1)  # noqa: E731
                self.change(lambda p, s: src in s and inside(p), lambda p, s: (p, s | {dst}))
            case ("keep", seq):
                self.change(lambda *_: True, lambda p, s: (p, s & {seq}))
            case ("add", seq, delta):
                self.change(lambda _, s: seq in s, lambda p, s: (p + delta, s))
            case ("div", seq, d):
                self.change(lambda _, s: seq in s, lambda p, s: (p // d, s))
            case ("clear",):
                self.cells = []
            case _:
                pass


def apply(ctx: LlamaContext, op: Op) -> None:
    """Do `op`. A decode says which tokens (id, position, sequence) there are."""
    m = ctx.memory
    match op:
        case ("decode", tokens):
            batch = Batch()
            for i, (token, pos, seq) in enumerate(tokens):
                batch.add(token, pos, seq, i % 2 == 0)
            ctx.decode(batch)
        case ("rm", seq, p0, p1):
            m.seq_rm(seq, p0, p1)
        case ("cp", src, dst, p0, p1):
            m.seq_cp(src, dst, p0, p1)
        case ("keep", seq):
            m.seq_keep(seq)
        case ("add", seq, delta):
            m.seq_add(seq, -1, -1, delta)
        case ("div", seq, d):
            m.seq_div(seq, -1, -1, d)
        case ("clear",):
            m.clear()
        case ("update", defrag):
            if defrag:
                m.defrag()
            ctx.update()
        case ("load", data):
            load_state_bytes(ctx, data)
        case ("load_seq", data, _, seq):
            load_seq_bytes(ctx, data, seq)
        case _:
            raise AssertionError(op)


def holds(ctx: LlamaContext) -> tuple[Any, ...]:
    """The cells of each cache, in no order, and the logits."""
    cells = [sorted((c.pos, sorted(c.seq_id)) for c in kv.cells if c.pos >= 0) for kv in ctx.memory.caches]
    return cells, ctx.outputs.tobytes(), ctx.logits.tobytes()


class Lockstep:
    """`a` is interrupted, `b` never; after each operation both hold the same bytes."""

    def __init__(self, new: Callable[[], LlamaContext], rng: random.Random, plain: bool) -> None:
        self.a, self.b, self.rng = new(), new(), rng
        self.cells = PlainCells() if plain else None
        self.saved: list[tuple[bytes, list[tuple[int, frozenset[int]]]]] = []
        self.n_ops = self.n_interrupted = self.n_complete = 0
        self.costs: dict[str, int] = {}  # bytecodes of each kind of operation

    def draw(self) -> Op:
        """The next operation."""
        rng, memory = self.rng, self.b.memory
        seq, p0, p1 = rng.randrange(N_SEQ), rng.randrange(-1, 9), rng.choice((-1, -1, 3, 6, 12))
        kind = rng.choice(
            ("decode",) * 8 + ("rm", "rm", "cp", "keep", "add", "div", "update", "update", "clear", "load", "load_seq")
        )
        if kind == "decode" or (kind == "clear" and rng.random() < 0.7):
            seqs = rng.sample(range(N_SEQ), rng.randint(1, N_SEQ))
            first = {s: memory.seq_pos_max(s) + 1 for s in seqs}
            n = rng.choice((1, 1, 2, 5, 11))
            tokens = [(rng.randrange(3, 250), first[s] + i, s) for i in range(n) for s in seqs]
            return ("decode", [t for t in tokens if t[1] < 150])
        match kind:
            case "rm":
                return ("rm", rng.choice((seq, -1)), p0, p1)
            case "cp":
                return ("cp", seq, rng.randrange(N_SEQ), p0, p1)
            case "keep":
                return ("keep", seq)
            case "add":
                return ("add", seq, rng.randint(-3, 4))
            case "div":
                return ("div", seq, rng.randint(1, 3))
            case "load" if self.saved:
                return ("load", rng.choice(self.saved)[0])
            case "load_seq":
                return ("load_seq", seq_bytes(self.b, seq), seq, rng.randrange(N_SEQ))
            case _:
                return ("update", rng.random() < 0.5)

    def step(self, come: Callable[[], None], chance: float = 0.7) -> None:
        """One operation, perhaps interrupted, and done again where it was not done."""
        op, rng = self.draw(), self.rng
        if op == ("decode", []):
            return
        for ctx in (self.a, self.b):
            ctx.update()  # a decode would first do that, as a change of its own
        before = state_bytes(self.b)
        try:
            apply(self.b, op)
        except GGMLError:
            assert op[0] in ("decode", "load_seq"), op  # full; holes may have been closed
            load_state_bytes(self.b, before)
            return
        self.b.memory.settle()  # which a signal may leave for the next decode
        held = [holds(self.a), holds(self.b)]
        after, at = state_bytes(self.b), rng.randrange(1, self.costs.get(op[0], 2000) + 1)
        broken, seen = False, 0
        if rng.random() < chance and not (come is alarm and op[0] in WAITS):
            broken, seen = interrupted(lambda: apply(self.a, op), at, come)
            if not broken:
                self.costs[op[0]] = max(seen, 1)
        else:
            apply(self.a, op)
        self.a.memory.settle()
        self.n_ops += 1
        self.n_interrupted += broken
        now = state_bytes(self.a)
        if broken and now != after:
            assert holds(self.a) in held, (op, at)
            apply(self.a, op)
            self.a.memory.settle()
            now = state_bytes(self.a)
        else:
            self.n_complete += broken
        assert now == after, (op, at)
        if self.cells is not None:
            self.check(op)
        if rng.random() < 0.1:
            self.saved = [*self.saved[-3:], (after, list(self.cells.cells) if self.cells else [])]

    def check(self, op: Op) -> None:
        """The cells are the plain ones."""
        assert self.cells is not None
        if op[0] == "load":
            self.cells.cells = list(next(cells for data, cells in self.saved if data == op[1]))
        elif op[0] == "load_seq":  # replaces a sequence
            _, _, src, dst = op
            own = [p for p, s in self.cells.cells if src in s]
            self.cells.apply(("rm", dst, 0, -1))
            self.cells.cells += [(p, frozenset({dst})) for p in own]
        else:
            self.cells.apply(op)
        for ctx in (self.a, self.b):
            found = sorted((c.pos, sorted(c.seq_id)) for c in ctx.memory.cells if c.pos >= 0)
            assert found == sorted((p, sorted(s)) for p, s in self.cells.cells), op
