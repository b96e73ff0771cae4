"""Graphs that are built once and run again: what a context keeps of them, and the memory of their inputs."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import BatchError
from pyggml.graph import Graph
from pyggml.inspect.watch import Patterns
from pyggml.models.blocks import (
    MASK_PADDING,
    NO_ADAPTERS,
    Adapters,
    Build,
    KVMemory,
    attn_temp_scale,
    block_input_sizes,
    block_inputs,
    chosen_block_inputs,
    chosen_block_sizes,
    mask_name,
    ngram_rows,
    relative_buckets,
)
from pyggml.models.hparams import ChosenBlocks, HParams, TokenBlocks
from pyggml.models.memory.cross import EncoderMemory
from pyggml.models.memory.kv_cache import KVCache
from pyggml.models.memory.kv_cells import Floats, Ints, Slot
from pyggml.models.memory.kv_mask import KVMask
from pyggml.models.memory.recurrent import NOTHING, StateSlot
from pyggml.sched import Schedule, Scheduler
from pyggml.tensor import Context, Var, allocate_tensors

from .ubatch import UBatch

_MAX_STEPS = 64  # graphs kept for reuse


class StepSize(NamedTuple):
    """What the graphs of a context differ in."""

    n_tokens: int
    n_outputs: int
    embd: bool
    n_kv: tuple[int, ...]  # of each cache
    adapters: Adapters = NO_ADAPTERS
    n_seqs: int = 1  # of a memory with states, see `Build`
    hidden: bool = False  # the hidden states of all tokens come out, too

    def with_n_kv(self, n_kv: Sequence[int]) -> StepSize:
        """The same with another n_kv of the first caches."""
        return self._replace(n_kv=(*n_kv, *self.n_kv[len(n_kv) :]))


_Key = tuple[StepSize, bool, Patterns]  # True: for all n_kv; what is watched


@dataclass(slots=True)
class Step:
    """A graph ready to run, with views of its inputs and its result. `n_kv`: of the caches where it varies. `pos`
    has a row for each position of a token, `result` (logits or embeddings) one for each token that is wanted, `hidden`
    one for each token. `s_read`, `s_write`: the cells of states. `ngrams` has a row for each token; `recent` the last
    tokens of every cell. `blocks`, `chosen`: see `block_inputs`, `chosen_block_inputs`."""

    schedule: Schedule
    heads: tuple[Var, ...]
    n_kv: tuple[Var, ...]
    token: Ints | None
    embd: Floats | None
    pos: Ints | None
    s_read: Ints | None
    s_write: Ints | None
    attn_scale: Floats | None
    pos_bucket: Ints | None
    ngrams: Ints | None
    recent: Floats | None
    blocks: list[tuple[TokenBlocks, tuple[Ints | Floats, ...]]]
    chosen: list[tuple[ChosenBlocks, tuple[Ints, ...]]]
    out_ids: Ints
    logit_ids: Ints | None
    result: Floats
    hidden: Floats | None

    def fill(self, u: UBatch, states: StateSlot | None, hp: HParams, cells: KVCache | None) -> None:
        """Set the inputs that say what the tokens of a ubatch are, where they stand, and which are wanted; and how far
        they are from the `cells` of the first cache."""
        if self.token is not None and u.token is not None:
            self.token[:] = u.token
        if self.embd is not None and u.embd is not None:
            self.embd[:] = u.embd
        if self.pos is not None:
            self.pos[:3] = u.pos
            if len(self.pos) > 3:
                self.pos[3] = 0
        if states is not None and self.s_read is not None and self.s_write is not None:
            self.s_read[:], self.s_write[:] = states.read, states.write
        if self.attn_scale is not None:
            self.attn_scale[:] = attn_temp_scale(hp, u.pos)
        if self.pos_bucket is not None and cells is not None:
            seen = u.pos if cells.transient else cells.pos[: cells.n_kv()]
            self.pos_bucket[: u.n_tokens * len(seen)] = relative_buckets(hp, seen, u.pos, cells.causal).reshape(-1)
        if self.ngrams is not None and hp.ngrams is not None and self.recent is not None and states is not None:
            token = np.full(u.n_tokens, hp.ngrams.stand_in, np.int32) if u.token is None else u.token
            tokens, before = token.reshape(u.n_seqs, -1), self.recent[states.read].astype(np.int32) - 1
            self.ngrams[:] = ngram_rows(hp.ngrams, before, tokens).reshape(self.ngrams.shape)
            n = before.shape[1]
            self.recent[states.write] = np.concatenate((before, tokens), axis=1)[:, -n:] + 1
        if self.blocks or self.chosen:
            self._fill_blocks(u, states, u.pos if cells is None else cells.pos[: cells.n_kv()])
        wanted = u.outputs if len(u.outputs) else 0
        if self.logit_ids is None:
            self.out_ids[:] = wanted
        else:
            self.out_ids[:], self.logit_ids[:] = np.arange(u.n_tokens), wanted

    def _fill_blocks(self, u: UBatch, states: StateSlot | None, known: Ints) -> None:
        pos = u.pos.reshape(u.n_seqs, -1)
        if self.blocks and states is not None and pos[states.read == NOTHING, 0].any():
            raise BatchError("a sequence must begin at position 0: this model counts blocks of tokens from there")
        for t, inputs in self.blocks:
            for to, value in zip(inputs, block_inputs(t, pos, known), strict=True):
                to[: value.size] = value.ravel()  # of cells the graph may have more
        for t, inputs in self.chosen:
            for to, value in zip(inputs, chosen_block_inputs(t, u.pos, known), strict=True):
                to[: value.size] = value.ravel()


@contextmanager
def _uncollected() -> Generator[None]:
    """Without garbage collection: thousands of objects are made at once, all to stay, and looking through them for
    garbage takes half as long again as making them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Steps:
    """The graphs of a context, by size; the least recently used ones are dropped.

    A size that comes for the first time gets a graph of its own. One token, and what comes again with another n_kv
    (generation), get one graph that runs for all n_kv. `caches` are the memory's, `masks` those of each; an encoder's
    graphs store to a cross cache and look at no cell of it, all others only look.
    """

    def __init__(
        self,
        hp: HParams,
        memory: KVMemory | EncoderMemory,
        n_ubatch: int,
        scheduler: Scheduler,
        build: Callable[[StepSize], Build],
    ) -> None:
        self.caches, self._encodes = memory.caches, isinstance(memory, EncoderMemory)
        self._scheduler, self._build, self.cells = scheduler, build, next(iter(memory.caches), None)
        self._steps: OrderedDict[_Key, Step] = OrderedDict()
        self._seen: set[StepSize] = set()  # with n_kv = 0
        self._last: tuple[StepSize, Patterns, Step] | None = None  # what `get` gave
        transient = any(c.transient for c in self.caches)  # which look at the cells of the batch
        self._n_vary = 0 if transient else len(self.caches)  # the first so many caches vary
        rows = -(-n_ubatch // MASK_PADDING) * MASK_PADDING
        ctx = Context()
        self._inputs = {
            "inp_tokens": ctx.new_tensor(DType.I32, (n_ubatch,)),
            "inp_embd": ctx.new_tensor(DType.F32, (hp.n_embd * n_ubatch,)),
            "inp_pos": ctx.new_tensor(DType.I32, (n_ubatch * hp.n_pos_per_embd,)),
            "inp_out_ids": ctx.new_tensor(DType.I32, (n_ubatch,)),
            "inp_logit_ids": ctx.new_tensor(DType.I32, (n_ubatch,)),
        }
        if memory.states is not None:
            for name in ("inp_s_read", "inp_s_write"):
                self._inputs[name] = ctx.new_tensor(DType.I32, (memory.n_seq_max,))
        if hp.f_attn_temp_scale:
            self._inputs["inp_attn_scale"] = ctx.new_tensor(DType.F32, (n_ubatch,))
        if hp.n_rel_attn_bkts:
            self._inputs["inp_pos_bucket"] = ctx.new_tensor(DType.I32, (memory.size * n_ubatch,))
        if hp.ngrams is not None:
            self._inputs["inp_ngram_rows"] = ctx.new_tensor(DType.I32, (len(hp.ngrams.rows) * n_ubatch,))
        for t in hp.token_blocks:
            more = memory.n_seq_max * t.n_read  # each sequence may end one block more
            for name, (dtype, n) in block_input_sizes(t, n_ubatch, 1, memory.size).items():
                self._inputs[name] = ctx.new_tensor(dtype, (n + more,))
        for t in hp.chosen_blocks:
            for name, (dtype, n) in chosen_block_sizes(t, n_ubatch, memory.size).items():
                self._inputs[name] = ctx.new_tensor(dtype, (n,))
        masks = {c: ctx.new_tensor(DType.F32, (c.size, rows)) for c in self.caches if not (c.cross and self._encodes)}
        self._inputs |= {mask_name(c): t for c, t in masks.items()}
        allocate_tensors(self._inputs.values(), next(iter(scheduler.backends.values())).buft)
        alibi = hp.f_max_alibi_bias > 0
        made = {c: KVMask(c, t.numpy(), c.causal, c.n_swa, alibi, c.swa_type) for c, t in masks.items()}
        self.masks = tuple(made.get(c) for c in self.caches)

    def fills(self, c: KVCache) -> bool:
        """Whether its graphs store to a cache, rather than only look at it."""
        return self._encodes or not c.cross

    def get(self, size: StepSize) -> Step:
        """The step for a ubatch of that size."""
        watched, last = self._scheduler.watches.patterns, self._last
        if last is not None and last[0] == size and last[1] == watched:
            return last[2]
        key = (size, False, watched)
        if key not in self._steps:
            key = (self._whole(size), True, watched)
            if key not in self._steps:
                key = self._make(size)
        self._steps.move_to_end(key)
        step = self._steps[key]
        for var, n_kv in zip(step.n_kv, size.n_kv, strict=False):
            var.bind(n_kv)
        self._last = size, watched, step
        return step

    def _whole(self, size: StepSize) -> StepSize:
        """The same with the largest n_kv."""
        return size.with_n_kv([c.size for c in self.caches[: self._n_vary]])

    def _make(self, size: StepSize) -> _Key:
        """Build a step, and return its key."""
        step, watched = None, self._scheduler.watches.patterns
        seen = size.with_n_kv([0] * len(size.n_kv))
        with _uncollected():
            if (size.n_tokens == 1 or seen in self._seen) and not watched:
                step = self._varying(size)
            key = (size, False, watched) if step is None else (self._whole(size), True, watched)
            self._steps[key] = self._fixed(size) if step is None else step
        self._seen.add(seen)
        if len(self._steps) > _MAX_STEPS:
            self._steps.popitem(last=False)
        return key

    def _fixed(self, size: StepSize) -> Step:
        b = self._attached(size)
        return _step(b, self._scheduler.alloc(b.graph), ())

    def _varying(self, size: StepSize) -> Step | None:
        """A step for every n_kv, or None where the backends cannot: where not for all caches, then from now on for the
        first alone, where not even that, for none."""
        while self._n_vary:
            caches, builds = self.caches[: self._n_vary], list[Build]()
            if all(c.size <= c.padding for c in caches):
                return None

            def build(*n_kv: int, builds: list[Build] = builds) -> Graph:
                builds.append(self._attached(size.with_n_kv(n_kv)))
                return builds[-1].graph

            n_kv = tuple(Var(f"n_kv-{i}", c.size) for i, c in enumerate(caches))
            schedule = self._scheduler.alloc_varying(build, n_kv, [min(c.padding, c.size // 2) for c in caches])
            if schedule is not None:
                return _step(builds[0], schedule, n_kv)
            self._n_vary = 1 if self._n_vary > 1 else 0
        return None

    def _attached(self, size: StepSize) -> Build:
        """The graph, its inputs in the memory that all graphs share."""
        b = self._build(size)
        for name, t in b.inputs.items():
            t.buffer, t.offset = self._inputs[name].buffer, self._inputs[name].offset
        return b


class Slots(NamedTuple):
    """Where a ubatch is put: in each cache of its steps (None: they only look at it), and of the states where the
    memory has them."""

    steps: Steps
    caches: list[Slot | None]
    states: StateSlot | None = None


def _step(b: Build, schedule: Schedule, n_kv: tuple[Var, ...]) -> Step:
    values = {name: t.numpy() for name, t in b.inputs.items() if name.startswith("inp_")}
    recent = None if b.kv.states is None else b.kv.states.recent
    return Step(
        schedule=schedule,
        heads=tuple(u.head for u in b.uses),
        n_kv=n_kv,
        token=values.get("inp_tokens"),
        embd=values["inp_embd"].reshape(b.n_tokens, -1) if "inp_embd" in values else None,
        pos=values["inp_pos"].reshape(-1, b.n_tokens) if "inp_pos" in values else None,
        s_read=values.get("inp_s_read"),
        s_write=values.get("inp_s_write"),
        attn_scale=values["inp_attn_scale"].reshape(-1) if "inp_attn_scale" in values else None,
        pos_bucket=values.get("inp_pos_bucket"),
        ngrams=values.get("inp_ngram_rows"),
        recent=None if recent is None else recent.numpy(),
        blocks=[
            (t, tuple(values[name].ravel() for name in block_input_sizes(t, 1, 1, 1)))
            for t in b.hparams.token_blocks
            if f"inp_block_end_{t.size}" in values
        ],
        chosen=[
            (t, tuple(values[name].ravel() for name in chosen_block_sizes(t, 1, 1)))
            for t in b.hparams.chosen_blocks
            if f"inp_cell_blocks_{t.size}" in values
        ],
        out_ids=values["inp_out_ids"],
        logit_ids=values.get("inp_logit_ids"),
        result=b.graph.nodes[-1].numpy().reshape(b.n_logits or b.n_outputs, -1),
        hidden=None if b.hidden is None else b.hidden.numpy().reshape(b.n_tokens, -1),
    )
