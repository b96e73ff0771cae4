"""Graphs that are built once and run again: what a context keeps of them, and the memory of their inputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pyggml.dtypes import DType
from pyggml.graph import Graph
from pyggml.models.blocks import MASK_PADDING, Build, KVMemory, mask_name
from pyggml.models.hparams import HParams
from pyggml.models.kv_cells import Floats, Ints
from pyggml.models.kv_mask import KVMask
from pyggml.sched import Schedule, Scheduler
from pyggml.tensor import Context, Var, allocate_tensors

_MAX_STEPS = 64  # graphs kept for reuse
_SPAN = 4  # one graph serves n_kv of its largest down to a quarter of it: threads are chosen for the largest


class StepSize(NamedTuple):
    """What the graphs of a context differ in."""

    n_tokens: int
    n_outputs: int
    embd: bool
    n_kv: tuple[int, ...]  # of each cache

    def with_n_kv(self, n_kv: int) -> StepSize:
        """The same with another n_kv of the first cache."""
        return self._replace(n_kv=(n_kv, *self.n_kv[1:]))


@dataclass(slots=True)
class Step:
    """A graph ready to run, with views of its inputs and its result. `n_kv`: the first cache's, where it varies."""

    schedule: Schedule
    heads: tuple[Var, ...]
    n_kv: Var | None
    token: Ints | None
    embd: Floats | None
    pos: Ints
    out_ids: Ints
    logits: Floats


class Steps:
    """The graphs of a context, by size; the least recently used ones are dropped.

    A size that comes for the first time gets a graph of its own. Where the same comes with another n_kv of the first
    cache (generation), one graph is made that runs for all n_kv of a range. `masks` are the memory's, one per cache.
    """

    def __init__(
        self, hp: HParams, memory: KVMemory, n_ubatch: int, scheduler: Scheduler, build: Callable[[StepSize], Build]
    ) -> None:
        self._scheduler, self._build, self._cells = scheduler, build, memory.caches[0]
        self._steps: OrderedDict[tuple[StepSize, bool], Step] = OrderedDict()  # True: for a range of n_kv
        self._seen: set[StepSize] = set()  # with n_kv[0] = 0
        self._can_vary = True
        rows = -(-n_ubatch // MASK_PADDING) * MASK_PADDING
        ctx = Context()
        self._inputs = {
            "inp_tokens": ctx.new_tensor(DType.I32, (n_ubatch,)),
            "inp_embd": ctx.new_tensor(DType.F32, (hp.n_embd * n_ubatch,)),
            "inp_pos": ctx.new_tensor(DType.I32, (n_ubatch,)),
            "inp_out_ids": ctx.new_tensor(DType.I32, (n_ubatch,)),
        }
        masks = [ctx.new_tensor(DType.F32, (c.size, rows)) for c in memory.caches]
        self._inputs |= {mask_name(c): t for c, t in zip(memory.caches, masks, strict=True)}
        allocate_tensors(self._inputs.values(), next(iter(scheduler.backends.values())).buft)
        self.masks = tuple(
            KVMask(c, t.numpy(), hp.causal_attn, c.n_swa, hp.f_max_alibi_bias > 0)
            for c, t in zip(memory.caches, masks, strict=True)
        )

    def get(self, size: StepSize) -> Step:
        """The step for a ubatch of that size."""
        key = (size, False)
        if key not in self._steps:
            key = (size.with_n_kv(self._top(size.n_kv[0])), True)
            if key not in self._steps:
                key = self._make(size)
        self._steps.move_to_end(key)
        step = self._steps[key]
        if step.n_kv is not None:
            step.n_kv.bind(size.n_kv[0])
        return step

    def _top(self, n_kv: int) -> int:
        """The largest n_kv that shares a graph with this one."""
        top = self._cells.padding
        while top < n_kv:
            top *= _SPAN
        return min(top, self._cells.size)

    def _make(self, size: StepSize) -> tuple[StepSize, bool]:
        """Build a step, and return its key."""
        step = None
        whole = size.with_n_kv(self._top(size.n_kv[0]))
        if size.with_n_kv(0) in self._seen and self._can_vary and whole.n_kv[0] > self._cells.padding:
            step = self._varying(whole)
            self._can_vary = step is not None
        key = (size, False) if step is None else (whole, True)
        self._steps[key] = self._fixed(size) if step is None else step
        self._seen.add(size.with_n_kv(0))
        if len(self._steps) > _MAX_STEPS:
            self._steps.popitem(last=False)
        return key

    def _fixed(self, size: StepSize) -> Step:
        b = self._attached(size)
        return _step(b, self._scheduler.alloc(b.graph), None)

    def _varying(self, whole: StepSize) -> Step | None:
        """A step for every n_kv up to that of `whole`, or None where the backends cannot."""
        builds: list[Build] = []

        def build(n_kv: int) -> Graph:
            builds.append(self._attached(whole.with_n_kv(n_kv)))
            return builds[-1].graph

        n_kv = Var("n_kv", whole.n_kv[0])
        schedule = self._scheduler.alloc_varying(build, n_kv, self._cells.padding)
        return None if schedule is None else _step(builds[0], schedule, n_kv)

    def _attached(self, size: StepSize) -> Build:
        """The graph, its inputs in the memory that all graphs share."""
        b = self._build(size)
        for name, t in b.inputs.items():
            t.buffer, t.offset = self._inputs[name].buffer, self._inputs[name].offset
        return b


def _step(b: Build, schedule: Schedule, n_kv: Var | None) -> Step:
    values = {name: t.numpy() for name, t in b.inputs.items() if name.startswith("inp_")}
    return Step(
        schedule=schedule,
        heads=tuple(u.head for u in b.uses),
        n_kv=n_kv,
        token=values.get("inp_tokens"),
        embd=values["inp_embd"].reshape(b.n_tokens, -1) if b.embd else None,
        pos=values["inp_pos"],
        out_ids=values["inp_out_ids"],
        logits=b.graph.nodes[-1].numpy().reshape(b.n_outputs, b.hparams.n_vocab),
    )
