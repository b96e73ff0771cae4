"""Steps -> the flat array of pg_op records that the C executor walks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from struct import Struct
from typing import NamedTuple

import numpy as np

from pyggml.native import ffi, lib

from ...buffers.alloc import Operand, Step
from ...buffers.buffer import Buffer, MappedFile
from ...errors import BackendError
from ...opdef import OPS, cost_of
from ...tensor import Ne, Size, Tensor, contiguous_nb
from ...var import bounds, largest
from ..protocol import Resolve, node_error
from .isa import Kernel
from .record import Half, Record, record_of

_TENSOR = Struct("=Q9q")  # pg_tensor: data, ne[4], nb[4], type
_WORD = Struct("=q")
_HEAD = Struct("=Qq")  # pg_op: fn, n_threads
_NUMBER = Struct("=d")
_TAIL = Struct("=Qqq")  # pg_task: work .. (plan is filled after)
_MAX_SRC, _MAX_PARAM = 12, 16
_DST = _HEAD.size
_SRC = _DST + _TENSOR.size
_PARAM = _SRC + _MAX_SRC * _TENSOR.size
_WORK = _PARAM + 8 * _MAX_PARAM
_OP_SIZE = _WORK + 32
_OP_WORDS, _WORK_WORD = _OP_SIZE // 8, _WORK // 8  # a record in int64 words
_LAYOUT = (ffi.sizeof("pg_op"), ffi.sizeof("pg_tensor"), ffi.offsetof("pg_op", "task", "param"))
if (_OP_SIZE, _TENSOR.size, _PARAM) != _LAYOUT:
    raise BackendError(f"the extension was built from another pg.h: {_LAYOUT}")

_SHARE = 4000.0  # nanoseconds of work from which a second thread pays (1000 to 16000 decode alike on a Cascade Lake)
_MAX_WORK = 2**62  # bytes; beyond that kernels do not count
_FAR = 2**48  # bytes: no two elements in memory are that far from each other
_WAKE = 8  # times that: what ops must share before it pays to wake threads for a plan


@dataclass(eq=False, repr=False)
class Lowered:
    """The records and everything that must stay alive beside them."""

    nodes: list[Tensor]
    ops: np.ndarray[tuple[int], np.dtype[np.uint8]]
    binds: list[tuple[int, int, int, Size]]  # (address, base, stride, what it is multiplied with)
    work_size: int
    needs: list[tuple[Kernel, int]]  # kernels whose scratch memory follows from a Var, and the numbers of their ops
    cost_ns: float = 0.0  # a rough guess
    n_threads: int = 1
    files: set[MappedFile] = field(default_factory=set[MappedFile])  # the files that the records read

    def words(self) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """The records as int64 [n_ops, words], over the same memory."""
        return self.ops.view(np.int64).reshape(-1, _OP_WORDS)

    def set_work(self, address: int | np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Point every op at the shared scratch memory, or each at its own."""
        self.words()[:, _WORK_WORD] = address

    def work_sizes(self) -> list[int]:
        """Bytes of scratch memory that each op asked for: of those whose sizes follow from a Var when it ran last."""
        return self.words()[:, _WORK_WORD + 1].tolist()

    def set_plan(self, address: int) -> None:
        """Tell every op its plan."""
        words = self.words()
        words[:, _WORK_WORD + 2] = address
        words[:, _WORK_WORD + 3] = np.arange(len(self.nodes))


# -- all steps --------------------------------------------------------------------------------------------------------


def cost_ns(t: Tensor) -> float:
    """Roughly the nanoseconds that one thread takes for this node, at its largest."""
    cost = cost_of(t, largest)
    return (cost.flops + cost.read + cost.written) / 32


def _near(t: Tensor, ne: Ne, nb: Ne) -> list[int]:
    """`nb`, in which dimensions of one element have the stride of a dense tensor in the place of one that goes beyond
    any memory. Nothing is read there, but kernels may count with it."""
    out, dense = list[int](), t.dtype.type_size
    for i, (n, stride) in enumerate(zip(ne, nb, strict=True)):
        out.append(dense if n == 1 and stride > _FAR else stride)
        dense = out[-1] * (n if i else n // t.dtype.block_size)
    return out


class _Address(NamedTuple):
    """Of a tensor in a record: where that is there, in bytes; the tensor; and how many bytes it is behind where that
    tensor, or its repacked copy, begins."""

    at: int
    of: Operand
    copied: bool
    skip: int


_SizeAt = tuple[int, Size, tuple[int, int]]  # of elements or a stride: place in a row in bytes, and (least, most)


class _Row(NamedTuple):
    """What a step that repeats another takes over from it."""

    i: int
    addresses: list[_Address]
    sizes: list[_SizeAt]
    kernel: Kernel
    ns: float
    shared_ns: float  # of it, what threads share; inf asks for them


def lower(steps: Sequence[Step], resolve: Resolve, isa: str, n_threads: int) -> Lowered:
    """Lower the steps that compute something; views vanish. Raises BackendError for a node without a kernel."""
    todo = [s for s in steps if s.fusion or OPS[s.nodes[0].op].kernel is not None]
    ops = np.zeros(len(todo) * _OP_SIZE, np.uint8)
    base = ops.__array_interface__["data"][0]
    out = Lowered([s.nodes[-1] for s in todo], ops, [], 0, [])
    memory = ops.data

    def address(t: Tensor, at: int, copy: Buffer | None) -> int:
        root, offs = t if t.view_src is None else t.view_src, t.view_offs
        buffer = root.buffer
        if buffer is None:
            return t.data  # which raises
        if buffer.file is not None:
            out.files.add(buffer.file)
        if copy is not None:
            return copy.base
        start = buffer.base + root.offset
        if not isinstance(offs, Size):
            return start + offs
        bind(at, offs, start)
        return start + int(offs)

    def bind(at: int, size: Size, start: int = 0) -> None:
        """Have a word be `size` from `start` on, when the program runs."""
        stride, unit = size.unit()
        out.binds.append((base + at, start + size.const, stride, unit))

    def bind_sizes(i: int, row: _Row) -> None:
        for at, n, _ in row.sizes:
            bind(i * _OP_SIZE + at, n)
        if row.sizes and row.kernel.row.work != ffi.NULL:
            out.needs.append((row.kernel, i))

    def put(
        t: Tensor, i: int, at: int, copy: Buffer | None, layout: Ne | None, half: Half | None
    ) -> tuple[int, list[_SizeAt]]:
        """Write a tensor `at` so many bytes of row i. Returns its `_Address.skip`, and what of it is a Size."""
        ne, nb, skip = t.ne, t.nb, 0
        if layout is not None:
            ne, nb = layout, contiguous_nb(t.dtype, layout)
        matrix = nb[1] * ne[1]
        if copy is not None:
            matrix = lib.pg_r16_bytes(t.dtype.gguf_id, ne[0], ne[1])
            nb = (*nb[:2], matrix, nb[3])
        if half is not None:
            skip = half.which * (matrix if half.dim else nb[0] * ne[0]) // 2
            ne = (ne[0] // 2, *ne[1:]) if half.dim == 0 else (ne[0], ne[1] // 2, *ne[2:])
        place = i * _OP_SIZE + at
        words = (*ne, *nb)
        if Size not in map(type, words):
            if max(nb) > _FAR:
                words = (*ne, *_near(t, ne, nb))
            _TENSOR.pack_into(memory, place, address(t, place, copy) + skip, *words, t.dtype.gguf_id)
            return skip, []
        full, sizes = list(words), list[_SizeAt]()
        for word, n in enumerate(words):
            if isinstance(n, Size):
                least, full[word] = bounds(n)
                sizes.append((at + 8 * (word + 1), n, (least, full[word])))
        _TENSOR.pack_into(memory, place, address(t, place, copy) + skip, *full, t.dtype.gguf_id)
        return skip, sizes

    def lowered(i: int, step: Step) -> _Row:
        r = step.match if isinstance(step.match, Record) else record_of(step.nodes[0], isa)
        if r.kernel is None:
            raise node_error(step.nodes[-1], f"the cpu backend ({isa}) has no kernel for these types")
        at = i * _OP_SIZE
        ns = sum(map(cost_ns, step.nodes))
        is_shared = ns > _SHARE if r.shared is None else r.shared
        _HEAD.pack_into(memory, at, r.kernel.address, n_threads if is_shared else 1)
        layout = None if r.shape is None else step.tensor(r.shape).ne
        skip, sizes = put(step.tensor(r.dst), i, _DST, None, layout, None)
        addresses = [_Address(_DST, r.dst, False, skip)]
        for j, o in r.srcs.items():
            t, place = step.tensor(o), _SRC + j * _TENSOR.size
            copy = t.form.copy if j in r.packed else None
            skip, more = put(resolve(t), i, place, copy, None, r.halves.get(j))
            sizes += more
            addresses.append(_Address(place, o, copy is not None, skip))
        for j, value in r.params.items():
            _NUMBER.pack_into(memory, at + _PARAM + j * _NUMBER.size, float(value))
        if r.kernel.row.work != ffi.NULL:
            task = ffi.cast("pg_task *", base + at + _DST)
            need, ends = 0, [(at + place, values) for place, _, values in sizes]
            for end in (0, 1) if sizes else (1,):  # a guess: a kernel may need most for sizes in between
                for place, values in ends:
                    _WORD.pack_into(memory, place, values[end])
                need = max(need, lib.pg_work_size(r.kernel.row, task, n_threads))
            if need > _MAX_WORK:
                raise node_error(step.nodes[-1], "it needs more scratch memory than there can be")
            _TAIL.pack_into(memory, at + _WORK, 0, need, 0)
            out.work_size = max(out.work_size, need)
        row = _Row(i, addresses, sizes, r.kernel, ns, inf if r.shared else ns * is_shared)
        bind_sizes(i, row)
        return row

    repeats: list[tuple[int, int]] = []  # row, that which it repeats
    moved: list[tuple[int, int]] = []  # word, what is there in a repeated row

    def repeated(i: int, step: Step, row: _Row) -> None:
        repeats.append((i, row.i))
        bind_sizes(i, row)
        for at, operand, copied, skip in row.addresses:
            place, t = i * _OP_SIZE + at, step.tensor(operand)
            if copied:
                moved.append((place // 8, address(t, place, t.form.copy) + skip))
            else:
                moved.append((place // 8, address(t if at == _DST else resolve(t), place, None) + skip))

    shared_ns = 0.0
    rows: dict[Tensor, _Row] = {}  # by the last nodes of steps
    for i, step in enumerate(todo):
        row = None if step.like is None else rows.get(step.like.nodes[-1])
        if row is None:
            row = rows[step.nodes[-1]] = lowered(i, step)
        else:
            repeated(i, step, row)
        out.cost_ns += row.ns
        shared_ns += row.shared_ns
    if repeats:
        words, rows_to_row = out.words(), np.array(repeats, np.int64)
        words[rows_to_row[:, 0]] = words[rows_to_row[:, 1]]
        to_words = np.array(moved, np.int64)
        words.reshape(-1)[to_words[:, 0]] = to_words[:, 1]
    out.n_threads = n_threads if shared_ns > _WAKE * _SHARE else 1
    return out
