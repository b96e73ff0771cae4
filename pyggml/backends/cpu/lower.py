"""Steps -> the flat array of pg_op records that the C executor walks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

import numpy as np

from ...alloc import Step
from ...backend import Resolve, node_error
from ...buffer import Buffer
from ...dtypes import DType
from ...errors import BackendError
from ...opdef import OPS
from ...tensor import Ne, Offset, Tensor, Var, contiguous_nb
from .._pggml import ffi, lib
from .fuse import gate_of, norm_of, other_source
from .isa import Kernel, find_kernel, kernel_of
from .repack import product_kernel, repacked

_TENSOR = Struct("=Q9q")  # pg_tensor: data, ne[4], nb[4], type
_HEAD = Struct("=Qq")  # pg_op: fn, n_threads
_TAIL = Struct("=Qqq")  # pg_task: work .. (plan is filled after)
_MAX_SRC, _MAX_PARAM = 8, 16
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


class Record(NamedTuple):
    """A kernel (None: the backend has none) and its operands. `layout`: the result's ne, laid out densely in `dst`,
    where it is not dst's own."""

    kernel: Kernel | None
    dst: Tensor
    srcs: Sequence[Tensor | None]
    params: Sequence[float] = ()
    copies: Mapping[int, Buffer] = {}  # sources of which the repacked copy is read
    layout: Ne | None = None


# -- what computes a step, by its fusion ------------------------------------------------------------------------------

_F32 = DType.F32.gguf_id
_ADD, _SWIGLU = 1, 2  # r16_store


def _node(step: Step, isa: str) -> Record:
    t = step.nodes[0]
    kernel, copy = product_kernel(isa, t) or (kernel_of(isa, t), None)
    return Record(kernel, t, t.src, tuple(t.op_params.values()), {} if copy is None else {0: copy})


def _norm(step: Step, isa: str) -> Record:
    norm, t = step.nodes
    kernel = find_kernel(isa, "rms_norm", _F32, _F32, _F32)
    return Record(kernel, t, (norm.src[0], t.src[1]), tuple(norm.op_params.values()))


def _glu(step: Step, isa: str) -> Record:
    silu, t = step.nodes
    kernel = find_kernel(isa, "swiglu", _F32, _F32, _F32)
    return Record(kernel, t, (silu.src[0], other_source(t, silu)), (0.0,))


def _rope_store(step: Step, isa: str) -> Record:
    rope, t = step.nodes
    return Record(kernel_of(isa, rope), t, rope.src, tuple(rope.op_params.values()), layout=rope.ne)


def _attention(step: Step, isa: str) -> Record:
    """Attention with a transposed v, by csrc/kernels/flash_attn.c."""
    kq, weights, kqv = step.nodes[:3]
    (k, q), mask = kq.src, weights.src[1]
    assert k is not None
    kernel = find_kernel(isa, "attn_vt", _F32, k.dtype.gguf_id, _F32)
    merged = step.nodes[-1] is not kqv
    params = (*weights.op_params.values(), float(merged))
    dv, n_tokens, n_head, n_batch = kqv.ne
    layout = (dv, n_head, n_tokens, n_batch) if merged else None
    return Record(kernel, step.nodes[-1], (k, q, kqv.src[0], mask), params, layout=layout)


def _products(step: Step, isa: str) -> Record:
    """Products of the same columns, by csrc/r16/mul_mat.c."""
    last = step.nodes[-1]
    products = [t for t in step.nodes if t.op == "mul_mat"]
    columns, weight, eps = products[0].src[1], None, 0.0
    norm = norm_of(columns) if columns is not None and columns in step.inner else None
    if norm is not None:
        columns, weight, eps = norm[0].src[0], norm[1], norm[0].op_params["eps"]
    store, other, dst = 0, None, products[0]
    if last.op == "add":
        store, other, dst = _ADD, other_source(last, products[0]), last
    elif last.op == "mul":
        gate = gate_of(last)
        assert gate is not None
        products.sort(key=lambda t: t is not gate[0].src[0])  # the gate first
        store, dst = _SWIGLU, last
    srcs = [products[0].src[0], columns, weight, other]
    for t in products[1:]:
        srcs += [t.src[0], None if store else t]
    found = product_kernel(isa, products[0])
    copies = {at: copy for at, t in zip((0, 4, 6), products, strict=False) if (copy := repacked(t)) is not None}
    return Record(None if found is None else found[0], dst, srcs, (float(store), eps), copies)


_RECORD: Mapping[str, Callable[[Step, str], Record]] = {
    "": _node,
    "norm": _norm,
    "glu": _glu,
    "rope_store": _rope_store,
    "attention": _attention,
    "products": _products,
}


# -- all steps --------------------------------------------------------------------------------------------------------


def cost_ns(t: Tensor) -> float:
    """Roughly the nanoseconds that one thread takes for this node."""
    cost = OPS[t.op].cost(t)
    return cost.flops / 32 + (cost.read + cost.written) / 32


def lower(steps: Sequence[Step], resolve: Resolve, isa: str, n_threads: int) -> Lowered:
    """Lower the steps that compute something; views vanish. Raises BackendError for a node without a kernel."""
    todo = [s for s in steps if s.fusion or OPS[s.nodes[0].op].kernel is not None]
    ops = np.zeros(len(todo) * _OP_SIZE, np.uint8)
    base = ops.__array_interface__["data"][0]
    out = Lowered([s.nodes[-1] for s in todo], ops, [], 0)
    memory = ops.data

    def put(t: Tensor, at: int, copy: Buffer | None = None, layout: Ne | None = None) -> None:
        offs = t.view_offs
        ne, nb = (t.ne, t.nb) if layout is None else (layout, contiguous_nb(t.dtype, layout))
        _TENSOR.pack_into(memory, at, t.data if copy is None else copy.base, *ne, *nb, t.dtype.gguf_id)
        if isinstance(offs, Offset):
            out.binds.append((base + at, t.data - int(offs) + offs.const, offs.stride, offs.var))

    for i, step in enumerate(todo):
        r = _RECORD[step.fusion](step, isa)
        if r.kernel is None:
            raise node_error(step.nodes[-1], f"the cpu backend ({isa}) has no kernel for these types")
        at = i * _OP_SIZE
        ns = sum(map(cost_ns, step.nodes))
        out.cost_ns += ns
        _HEAD.pack_into(memory, at, r.kernel.address, n_threads if ns > _SHARE else 1)
        put(r.dst, at + _DST, layout=r.layout)
        for j, s in enumerate(r.srcs):
            if s is not None:
                put(resolve(s), at + _SRC + j * _TENSOR.size, r.copies.get(j))
        if r.params:
            Struct(f"={len(r.params)}d").pack_into(memory, at + _PARAM, *r.params)
        if r.kernel.row.work != ffi.NULL:
            task = ffi.cast("pg_task *", base + at + _DST)
            need = lib.pg_work_size(r.kernel.row, task, n_threads)
            _TAIL.pack_into(memory, at + _WORK, 0, need, 0)
            out.work_size = max(out.work_size, need)
    return out
