"""Nodes -> the flat array of pg_op records that the C executor walks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

import numpy as np

from ...backend import Resolve, node_error
from ...buffer import Buffer
from ...errors import BackendError
from ...opdef import OPS
from ...tensor import Offset, Tensor, Var
from .._pggml import ffi, lib
from .isa import NONE, Kernel, find_kernel
from .repack import in_fixed_point, repacked

_TENSOR = Struct("=Q9q")  # pg_tensor: data, ne[4], nb[4], type
_HEAD = Struct("=Qq")  # pg_op: fn, n_threads
_TAIL = Struct("=Qqq")  # pg_task: work .. (plan is filled after)
_MAX_SRC, _MAX_PARAM = 6, 16
_DST = _HEAD.size
_SRC = _DST + _TENSOR.size
_PARAM = _SRC + _MAX_SRC * _TENSOR.size
_WORK = _PARAM + 8 * _MAX_PARAM
_OP_SIZE = _WORK + 32
OP_WORDS, N_THREADS_WORD, WORK_WORD = _OP_SIZE // 8, 1, _WORK // 8  # a record in int64 words: what vary.py looks at
_LAYOUT = (ffi.sizeof("pg_op"), ffi.sizeof("pg_tensor"), ffi.offsetof("pg_op", "task", "param"))
if (_OP_SIZE, _TENSOR.size, _PARAM) != _LAYOUT:
    raise BackendError(f"the extension was built from another pg.h: {_LAYOUT}")

_SHARE = 4000.0  # nanoseconds of work from which a second thread pays


@dataclass
class Lowered:
    """The records and everything that must stay alive beside them."""

    nodes: list[Tensor]
    ops: np.ndarray[tuple[int], np.dtype[np.uint8]]
    binds: list[tuple[int, int, int, Var]]  # (address, base, stride, var)
    work_size: int
    cost_ns: float = 0.0  # a rough guess

    def set_work(self, address: int) -> None:
        """Point every op at the shared scratch memory."""
        for i in range(len(self.nodes)):
            self.ops[i * _OP_SIZE + _WORK : i * _OP_SIZE + _WORK + 8].view(np.uint64)[0] = address

    def set_plan(self, address: int) -> None:
        """Tell every op its plan."""
        for i in range(len(self.nodes)):
            at = i * _OP_SIZE + _WORK + 16
            self.ops[at : at + 16].view(np.int64)[:] = (address, i)


def kernel_of(isa: str, t: Tensor, suffix: str = "") -> Kernel | None:
    """The kernel that computes node `t` on this instruction set, or None. `suffix`: a variant of the op's kernels."""
    stem = OPS[t.op].kernel
    if stem is None:
        return None
    ids = [NONE if s is None else s.dtype.gguf_id for s in t.src[:2]]
    return find_kernel(isa, stem + suffix, t.dtype.gguf_id, *ids, *(NONE,) * (2 - len(ids)))


def _kernel_and_weights(isa: str, t: Tensor) -> tuple[Kernel | None, Buffer | None]:
    """The kernel of `t`, and the repacked copy of its first source that it reads instead (or None)."""
    copy = repacked(t)
    if copy is None and in_fixed_point(t) and (kernel := kernel_of(isa, t, "_fixed")) is not None:
        return kernel, None
    kernel = kernel_of(isa, t, "_r16") if copy is not None else None
    return (kernel, copy) if kernel is not None else (kernel_of(isa, t), None)


def cost_ns(t: Tensor) -> float:
    """Roughly the nanoseconds that one thread takes for this node."""
    cost = OPS[t.op].cost(t)
    return cost.flops / 32 + (cost.read + cost.written) / 32


def lower(nodes: Sequence[Tensor], resolve: Resolve, isa: str, n_threads: int) -> Lowered:
    """Lower the nodes that compute something; views vanish. Raises BackendError for a node without a kernel."""
    todo = [t for t in nodes if OPS[t.op].kernel is not None]
    ops = np.zeros(len(todo) * _OP_SIZE, np.uint8)
    base = ops.__array_interface__["data"][0]
    out = Lowered(todo, ops, [], 0)
    memory = ops.data

    def put(t: Tensor, at: int, data: int | None = None) -> None:
        offs = t.view_offs
        _TENSOR.pack_into(memory, at, t.data if data is None else data, *t.ne, *t.nb, t.dtype.gguf_id)
        if isinstance(offs, Offset):
            out.binds.append((base + at, t.data - int(offs) + offs.const, offs.stride, offs.var))

    for i, t in enumerate(todo):
        kernel, copy = _kernel_and_weights(isa, t)
        if kernel is None:
            raise node_error(t, f"the cpu backend ({isa}) has no kernel for these types")
        at = i * _OP_SIZE
        ns = cost_ns(t)
        out.cost_ns += ns
        _HEAD.pack_into(memory, at, kernel.address, n_threads if ns > _SHARE else 1)
        put(t, at + _DST)
        for j, s in enumerate(t.src):
            if s is not None:
                put(resolve(s), at + _SRC + j * _TENSOR.size, copy.base if copy is not None and j == 0 else None)
        params = t.op_params
        if params:
            Struct(f"={len(params)}d").pack_into(memory, at + _PARAM, *params.values())
        if kernel.row.work != ffi.NULL:
            task = ffi.cast("pg_task *", base + at + _DST)
            need = lib.pg_work_size(kernel.row, task, n_threads)
            _TAIL.pack_into(memory, at + _WORK, 0, need, 0)
            out.work_size = max(out.work_size, need)
    return out
