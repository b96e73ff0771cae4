"""Random histories of a cache against a plain model of it: a list of tokens with positions and sequences, from which
each sequence is computed anew, in NumPy, whenever its logits are compared.

With one layer, K and V of a token depend on the token and its position alone, so anything may be done to the cache.
With two they depend on all tokens before it: there, only those operations are drawn that leave the past of each token
as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pyggml.dtypes import DType
from pyggml.errors import KVCacheFull
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model, load_model
from pyggml.llm.state.save_load import load_seq_bytes, load_state_bytes, seq_bytes, state_bytes

from ...plain_llama import Array, Plain, nmse
from ...tiny_model import write_gguf

N_SEQ, N_VOCAB, FAR = 3, 259, 150

Cell = tuple[int, int, frozenset[int]]  # token, position, sequences

seqs = st.integers(0, N_SEQ - 1)
starts = st.integers(-1, 9)
ends = st.sampled_from((-1, -1, 2, 4, 6, 9, 14))
token_lists = st.lists(st.integers(3, N_VOCAB - 1), min_size=1, max_size=5)


def within(p: int, p0: int, p1: int) -> bool:
    return p >= p0 and (p1 < 0 or p < p1)


class Histories(RuleBasedStateMachine):
    """Contexts of `model`; subclasses say which."""

    model: Model
    plain: Plain
    any_past = True  # whether operations may change what came before a token

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[Cell] = []
        self.ctx = self.new()
        self.other = self.new(flash_attn=True)

    def new(self, **kwargs: Any) -> LlamaContext:
        types = {"type_k": DType.F32, "type_v": DType.F32}
        return self.model.new_context(n_ctx=64, n_ubatch=7, n_seq_max=N_SEQ, n_threads=1, **types, **kwargs)

    def positions(self, seq: int) -> list[int]:
        return [p for _, p, s in self.cells if seq in s]

    def change(self, where: Any, new: Any) -> None:
        """Give the cells in `where` what `new` makes of position and sequences; those without either are gone."""
        changed = [(t, *new(p, s)) if where(p, s) else (t, p, s) for t, p, s in self.cells]
        self.cells = [(t, p, s) for t, p, s in changed if s and p >= 0]

    @initialize(tokens=st.lists(token_lists, min_size=N_SEQ, max_size=N_SEQ))
    def begin(self, tokens: list[list[int]]) -> None:
        self.decode(dict(enumerate(tokens)), 0, True)

    def teardown(self) -> None:
        """Whatever the history ended with: the next token of each sequence is right."""
        self.run([(9, max(self.positions(s), default=-1) + 1, (s,)) for s in range(N_SEQ)], 7)

    # -- decoding -------------------------------------------------------------------------------------------------

    @rule(parts=st.dictionaries(seqs, token_lists, min_size=1), outputs=st.integers(0, 2**15 - 1), turns=st.booleans())
    def decode(self, parts: dict[int, list[int]], outputs: int, turns: bool) -> None:
        """Tokens for some sequences, one sequence behind the other or in turns."""
        first = {s: max(self.positions(s), default=-1) + 1 for s in parts}
        tokens = [(t, first[s] + i, s) for s, ts in parts.items() for i, t in enumerate(ts)]
        if turns:
            tokens.sort(key=lambda token: token[1])
        self.run([(t, p, (s,)) for t, p, s in tokens if p < FAR], outputs)

    @rule(tokens=token_lists, outputs=st.integers(0, 31))
    def decode_shared(self, tokens: list[int], outputs: int) -> None:
        """Tokens that belong to all sequences which are alike so far."""
        like = [s for s in range(N_SEQ) if all((s in c[2]) == (0 in c[2]) for c in self.cells)]
        start = max(self.positions(0), default=-1) + 1
        if start < FAR:
            self.run([(t, start + i, tuple(like)) for i, t in enumerate(tokens)], outputs)

    def run(self, tokens: list[tuple[int, int, tuple[int, ...]]], outputs: int) -> None:
        batch = Batch()
        for i, (t, p, s) in enumerate(tokens):
            batch.add(t, p, s, bool(outputs >> i & 1))
        if not tokens:
            return
        before = self.ctx.memory.cells
        try:
            self.ctx.decode(batch)
        except KVCacheFull:
            assert self.ctx.memory.cells == before
            assert len(self.cells) + len(tokens) > self.ctx.n_ctx  # holes would have been closed
            return
        self.cells += [(t, p, frozenset(s)) for t, p, s in tokens]
        asked = [i for i in range(len(tokens)) if outputs >> i & 1]
        assert self.ctx.logits.shape == (len(asked), N_VOCAB)
        expected = {s: self.recomputed(s) for s in {s[0] for _, _, s in tokens}}
        for row, i in zip(self.ctx.logits, asked, strict=True):
            _, p, s = tokens[i]
            want = expected[s[0]][p]
            assert nmse(row, want) < 1e-11

    def recomputed(self, seq: int) -> dict[int, Array]:
        """Logits by position, for the last token at each."""
        cells = [(t, p) for t, p, s in self.cells if seq in s]
        tokens, pos = (np.array(a) for a in zip(*cells, strict=True))
        return dict(zip(pos.tolist(), self.plain.logits(tokens, pos), strict=True))

    # -- operations -----------------------------------------------------------------------------------------------

    @rule(seq=st.integers(-1, N_SEQ - 1), p0=starts, p1=ends)
    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        if not self.any_past:
            p1 = -1
        assert self.ctx.memory.seq_rm(seq, p0, p1)
        gone = frozenset(range(N_SEQ)) if seq < 0 else frozenset({seq})
        self.change(lambda p, _: within(p, p0, p1), lambda p, s: (p, s - gone))

    @rule(src=seqs, dst=seqs, p0=starts, p1=ends)
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        if not self.any_past:
            if src == dst:
                return
            self.seq_rm(dst, 0, -1)
            p0 = -1
        self.ctx.memory.seq_cp(src, dst, p0, p1)
        self.change(lambda p, s: src in s and within(p, p0, p1), lambda p, s: (p, s | {dst}))

    @rule(seq=seqs)
    def seq_keep(self, seq: int) -> None:
        self.ctx.memory.seq_keep(seq)
        self.change(lambda _, s: True, lambda p, s: (p, s & {seq}))

    @rule(seq=seqs, p0=starts, p1=ends, delta=st.integers(-6, 6))
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        if not self.any_past:  # all tokens of a sequence that shares none, none of them to below 0
            shared = any(seq in s and len(s) > 1 for _, _, s in self.cells)
            if shared or min(self.positions(seq), default=0) + delta < 0:
                return
            p0 = p1 = -1
        self.ctx.memory.seq_add(seq, p0, p1, delta)
        self.change(lambda p, s: seq in s and within(p, p0, p1), lambda p, s: (p + delta, s))

    @precondition(lambda self: self.any_past)
    @rule(seq=seqs, p0=starts, p1=ends, d=st.integers(1, 4))
    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        self.ctx.memory.seq_div(seq, p0, p1, d)
        self.change(lambda p, s: seq in s and within(p, p0, p1), lambda p, s: (p // d, s))

    @rule()
    def defrag(self) -> None:
        self.ctx.memory.defrag()

    # -- states ---------------------------------------------------------------------------------------------------

    @rule()
    def save_and_load(self) -> None:
        """Go on in the other context, of another size, whose V lies otherwise."""
        data = state_bytes(self.ctx, [7, 8])
        if len(self.cells) > self.other.n_ctx:
            before = state_bytes(self.other)
            with pytest.raises(KVCacheFull):
                load_state_bytes(self.other, data)
            assert state_bytes(self.other) == before
            return
        assert load_state_bytes(self.other, data) == [7, 8]
        assert np.array_equal(self.ctx.logits, self.other.logits)
        self.ctx, self.other = self.other, self.ctx

    @rule(seq=seqs, dst=st.none() | seqs)
    def save_and_load_seq(self, seq: int, dst: int | None) -> None:
        free = [s for s in range(N_SEQ) if not self.positions(s)]
        saved = [(t, p) for t, p, s in self.cells if seq in s]
        rest = self.cells if dst is None else [(t, p, s - {dst}) for t, p, s in self.cells if s - {dst}]
        if dst is None and not free:
            return
        data, fits = seq_bytes(self.ctx, seq), len(rest) + len(saved) <= self.ctx.n_ctx
        if not fits:
            with pytest.raises(KVCacheFull):
                load_seq_bytes(self.ctx, data, dst)
            return
        got = load_seq_bytes(self.ctx, data, dst)
        assert got == (free[0] if dst is None else dst)
        self.cells = [*rest, *((t, p, frozenset({got})) for t, p in saved)]

    # -- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def cells_are_the_same(self) -> None:
        memory = self.ctx.memory
        cells = sorted((c.pos, sorted(c.seq_id)) for c in memory.cells if c.pos >= 0)
        assert cells == sorted((p, sorted(s)) for _, p, s in self.cells)
        assert memory.used == len(self.cells)
        for s in range(N_SEQ):
            assert memory.seq_pos_max(s) == max(self.positions(s), default=-1)
            assert memory.seq_pos_min(s) == min(self.positions(s), default=-1)


@pytest.mark.parametrize("n_layer", [1, 2])
def test_random_histories(tmp_path: Path, n_layer: int) -> None:
    class Machine(Histories):
        model = load_model(write_gguf(tmp_path / "m.gguf", kv={"llama.block_count": n_layer}))
        plain = Plain(model)
        any_past = n_layer == 1

    steps = settings(
        max_examples=60,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=(Phase.generate,),  # shrinking a history takes minutes
    )
    run_state_machine_as_test(Machine, settings=steps)


def test_plain_model(tmp_path: Path) -> None:
    """The yardstick itself: it gives the logits of a context that did nothing but decode."""
    model = load_model(write_gguf(tmp_path / "m.gguf"))
    ctx = model.new_context(type_k=DType.F32, type_v=DType.F32, n_threads=1)
    ids = np.arange(3, 40)
    ctx.decode(ids.tolist())
    want = Plain(model).logits(ids, np.arange(len(ids)))[-1]
    assert np.abs(ctx.logits[0] - want).max() < 1e-5 * np.abs(want).max()
