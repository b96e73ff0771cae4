"""Tensors and their contexts: metadata only; memory comes from buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, Protocol

import numpy as np

from . import codec
from .buffer import ALIGNMENT, Buffer
from .codec import Array
from .dtypes import DType, dtype_of
from .errors import AllocError, DTypeError, GraphError, ShapeError, Site, user_site

Ne = tuple[int, int, int, int]

FLAG_INPUT, FLAG_OUTPUT, FLAG_PARAM = 1, 2, 4
FLAG_PLANNED = 8  # its memory is a scheduler's, not its own
FLAG_RECYCLED = 16  # ... and is used again later in the same graph


class Var:
    """An integer that is bound when a graph runs, not when it is built (the cache head of a decode step).

    `stride * var` is an `Offset` that a view accepts; `hi` is the largest value it may take.
    """

    __slots__ = ("hi", "name", "value")

    def __init__(self, name: str, hi: int, value: int = 0) -> None:
        self.name, self.hi, self.value = name, hi, value

    def bind(self, value: int) -> None:
        """Set the value of the next run. Raises GraphError outside 0..hi."""
        if not 0 <= value <= self.hi:
            raise GraphError(f"{self.name} = {value} is outside 0..{self.hi}")
        self.value = value

    def __mul__(self, stride: int) -> Offset:
        return Offset(0, stride, self)

    __rmul__ = __mul__


class Offset:
    """`const + stride * var` bytes."""

    __slots__ = ("const", "stride", "var")

    def __init__(self, const: int, stride: int, var: Var) -> None:
        self.const, self.stride, self.var = const, stride, var

    def __int__(self) -> int:
        return self.const + self.stride * self.var.value

    def __add__(self, other: int) -> Offset:
        return Offset(self.const + other, self.stride, self.var)

    __radd__ = __add__

    def __mul__(self, factor: int) -> Offset:
        return Offset(self.const * factor, self.stride * factor, self.var)

    __rmul__ = __mul__

    @property
    def hi(self) -> int:
        """The largest value it can take."""
        return self.const + self.stride * self.var.hi

    def __repr__(self) -> str:
        return f"{self.const}+{self.stride}*{self.var.name}"


def contiguous_nb(dtype: DType, ne: Ne) -> Ne:
    """Byte strides of a dense tensor. Raises ShapeError where ne[0] is not a whole number of blocks."""
    nb1 = codec.check_rows(dtype, ne[0])
    nb2 = nb1 * ne[1]
    return (dtype.type_size, nb1, nb2, nb2 * ne[2])


def full_ne(ne: Sequence[int]) -> Ne:
    """`ne` padded with ones to four dimensions. Raises ShapeError for none, more than four, or a dimension below 1."""
    t = tuple(int(n) for n in ne)
    if not 1 <= len(t) <= 4 or min(t) < 1:
        raise ShapeError(f"ne must be one to four positive numbers, not {list(t)}")
    return (*t, *(1,) * (4 - len(t)))  # pyright: ignore[reportReturnType]


def rank_of(ne: Ne) -> int:
    """Dimensions without the trailing ones of `ne` (at least one), as ggml_n_dims."""
    return 4 if ne[3] > 1 else 3 if ne[2] > 1 else 2 if ne[1] > 1 else 1


class Operators(Protocol):
    """What `+ - * / @` on tensors call; the ops package installs itself here."""

    def binary(self, symbol: str, a: Tensor, b: Tensor | float, swapped: bool) -> Tensor: ...


class Tensor:
    """A node or leaf of a graph: what it is (`dtype`, `ne`, `nb`), where it comes from (`op`, `op_params`, `src`),
    and where its bytes are (`buffer` + `offset`, or `view_src` + `view_offs`).

    `ne` counts elements and `nb` byte strides, ne[0] fastest; `shape` and `strides` are the same in NumPy order.
    """

    __slots__ = (
        "__weakref__",
        "buffer",
        "ctx",
        "dtype",
        "flags",
        "name",
        "nb",
        "ne",
        "offset",
        "op",
        "op_params",
        "rank",
        "site",
        "src",
        "view_offs",
        "view_src",
    )

    operators: Operators | None = None

    def __init__(self, ctx: Context, dtype: DType, ne: Ne, nb: Ne, rank: int, site: Site | None = None) -> None:
        self.ctx = ctx
        self.dtype = dtype
        self.ne = ne
        self.nb = nb
        self.rank = rank
        self.op = "none"
        self.op_params: Mapping[str, Any] = {}
        self.src: tuple[Tensor | None, ...] = ()
        self.view_src: Tensor | None = None
        self.view_offs: int | Offset = 0
        self.flags = 0
        self.name = ""
        self.buffer: Buffer | None = None
        self.offset = 0
        self.site = site

    # -- shape ----------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dimension in NumPy order (ne reversed, without the ones beyond its rank)."""
        return self.ne[self.rank - 1 :: -1] if self.rank < 4 else self.ne[::-1]

    @property
    def strides(self) -> tuple[int, ...]:
        """Byte strides in NumPy order."""
        return self.nb[self.rank - 1 :: -1] if self.rank < 4 else self.nb[::-1]

    @property
    def n_elements(self) -> int:
        ne = self.ne
        return ne[0] * ne[1] * ne[2] * ne[3]

    @property
    def n_rows(self) -> int:
        return self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the end of the last element."""
        ne, nb, dt = self.ne, self.nb, self.dtype
        last = (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]
        if dt.block_size == 1:
            return last + (ne[0] - 1) * nb[0] + dt.type_size
        return last + ne[0] // dt.block_size * nb[0]

    @property
    def is_contiguous(self) -> bool:
        """True where the elements lie densely in ne order (strides of dimensions of one element do not count)."""
        ne, nb, dt = self.ne, self.nb, self.dtype
        expected = dt.type_size
        if ne[0] != dt.block_size and nb[0] != expected:
            return False
        expected = expected * ne[0] // dt.block_size
        for i in (1, 2, 3):
            if ne[i] != 1:
                if nb[i] != expected:
                    return False
                expected *= ne[i]
        return True

    # -- where the bytes are --------------------------------------------------------------------------------------

    @property
    def root(self) -> Tensor:
        """The tensor that owns the memory: itself, or what it is a view of."""
        return self if self.view_src is None else self.view_src

    @property
    def data(self) -> int:
        """The address of the first element. Raises AllocError where the tensor has no memory."""
        root = self.root
        if root.buffer is None:
            raise AllocError(f"{self.describe()} has no memory: compute its graph, or set() it, first")
        return root.buffer.base + root.offset + int(self.view_offs)

    def raw(self) -> Array:
        """Bytes from the first to the last element (uint8, zero-copy). Raises AllocError without memory."""
        root = self.root
        if root.buffer is None:
            raise AllocError(f"{self.describe()} has no memory: compute its graph, or set() it, first")
        start = root.offset + int(self.view_offs)
        return root.buffer.memory[start : start + self.nbytes]

    def elements(self) -> Array:
        """All four dimensions in NumPy order, with strides: zero-copy where NumPy has the type, else float32.

        BF16 and block types are decoded into a new array (block types need dense rows).
        """
        ne, nb, dt = self.ne, self.nb, self.dtype
        memory = self.raw()
        shape, strides = ne[::-1], nb[::-1]
        if dt.np_dtype is not None:
            return np.ndarray(shape, dt.np_dtype, memory, 0, strides)
        if dt.block_size == 1:
            return codec.bf16_to_f32(np.ndarray(shape, np.uint16, memory, 0, strides))
        return codec.decode(self.rows_of_blocks(memory).reshape(-1), dt, shape)

    def rows_of_blocks(self, memory: Array) -> Array:
        """The stored bytes as uint8 [ne3, ne2, ne1, bytes per row] over `memory` (zero-copy)."""
        ne, nb, dt = self.ne, self.nb, self.dtype
        if nb[0] != dt.type_size:
            raise ShapeError(f"rows of {self.describe()} are not dense (nb[0] = {nb[0]}, not {dt.type_size})")
        shape = (ne[3], ne[2], ne[1], codec.check_rows(dt, ne[0]))
        return np.ndarray(shape, np.uint8, memory, 0, (nb[3], nb[2], nb[1], 1))

    def store(self, values: Array) -> None:
        """Write `values` [ne3, ne2, ne1, ne0] into the tensor's memory, converting to its type."""
        dt = self.dtype
        memory = self.raw()
        if not memory.flags.writeable:
            raise AllocError(f"{self.describe()} lies in read-only memory")
        if dt.np_dtype is not None:
            np.ndarray(self.ne[::-1], dt.np_dtype, memory, 0, self.nb[::-1])[...] = values
        elif dt.block_size == 1:
            bits = codec.f32_to_bf16(np.asarray(values, np.float32))
            np.ndarray(self.ne[::-1], np.uint16, memory, 0, self.nb[::-1])[...] = bits
        else:
            rows = self.rows_of_blocks(memory)
            rows[...] = codec.encode(values, dt).reshape(rows.shape)

    # -- user's end -----------------------------------------------------------------------------------------------

    def numpy(self) -> Array:
        """The values in NumPy order, shape `self.shape`: a zero-copy view where NumPy has the type, else float32.

        Raises AllocError where the tensor has no memory (not computed), or its memory was used again by later nodes.
        """
        if self.root.flags & FLAG_RECYCLED:
            raise AllocError(f"the memory of {self.describe()} was recycled; call set_output() before computing")
        return self.elements()[(0,) * (4 - self.rank)]

    def tobytes(self) -> bytes:
        """The stored bytes, densely, of any type."""
        if self.dtype.block_size > 1 or self.dtype.np_dtype is None:
            if self.is_contiguous:
                return self.raw().tobytes()
            if self.dtype.block_size == 1:
                return np.ndarray(self.ne[::-1], np.uint16, self.raw(), 0, self.nb[::-1]).tobytes()
            return self.rows_of_blocks(self.raw()).tobytes()
        return self.elements().tobytes()

    def set(self, array: Any) -> Tensor:
        """Copy values (NumPy order, shape `self.shape`) in, converting to the tensor's type; gives a leaf its memory.

        Raises ShapeError for another shape, GraphError for a node (its op computes it).
        """
        values = np.asarray(array)
        if values.shape != self.shape and full_ne(values.shape[::-1] or (1,)) != self.ne:
            raise ShapeError(f"set: shape {values.shape} is not {self.shape}, the shape of {self.describe()}")
        if not np.issubdtype(values.dtype, np.number) and values.dtype != np.bool_:
            raise DTypeError(f"set: {values.dtype} values cannot be stored in {self.describe()}")
        if self.op != "none" and self.view_src is None:
            raise GraphError(f"set: {self.describe()} is computed by {self.op}")
        if self.root.buffer is None:
            self.root.allocate()
        self.store(values.reshape(self.ne[::-1]))
        return self

    def allocate(self) -> None:
        """Give this leaf memory of its own."""
        self.buffer, self.offset = Buffer.allocate(self.nbytes), 0

    def set_name(self, name: str) -> Tensor:
        self.name = name
        return self

    def set_input(self) -> Tensor:
        """Mark as an input: it has memory of its own for the whole graph, and must be given a value."""
        self.flags |= FLAG_INPUT
        return self

    def set_output(self) -> Tensor:
        """Mark as an output: its memory is not recycled, so it can be read after the graph has run."""
        self.flags |= FLAG_OUTPUT
        return self

    def describe(self) -> str:
        """`name: TYPE ne [..]`, with strides where they are not dense, for messages."""
        name = self.name or ("(leaf)" if self.op == "none" else f"({self.op})")
        text = f"{name}: {self.dtype.name} ne {list(self.ne)}"
        return text if self.is_contiguous else f"{text} nb {list(self.nb)}"

    def __repr__(self) -> str:
        return f"<Tensor {self.describe()} op {self.op}>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        a = self.numpy()
        if copy:
            return np.array(a, dtype)
        return a if dtype is None else a.astype(dtype, copy=False)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.numpy().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU

    def _binary(self, symbol: str, other: Any, swapped: bool = False) -> Tensor:
        if Tensor.operators is None or not isinstance(other, (Tensor, int, float)):
            return NotImplemented
        return Tensor.operators.binary(symbol, self, other, swapped)

    def __add__(self, other: Any) -> Tensor:
        return self._binary("+", other)

    def __radd__(self, other: Any) -> Tensor:
        return self._binary("+", other, True)

    def __sub__(self, other: Any) -> Tensor:
        return self._binary("-", other)

    def __rsub__(self, other: Any) -> Tensor:
        return self._binary("-", other, True)

    def __mul__(self, other: Any) -> Tensor:
        return self._binary("*", other)

    def __rmul__(self, other: Any) -> Tensor:
        return self._binary("*", other, True)

    def __truediv__(self, other: Any) -> Tensor:
        return self._binary("/", other)

    def __matmul__(self, other: Any) -> Tensor:
        """NumPy's matmul, NumPy shapes [.., m, k] @ [.., k, n] -> [.., m, n]: mul_mat(cont(transpose(other)), self)."""
        return self._binary("@", other)


_current: ContextVar[Context | None] = ContextVar("pyggml_context", default=None)


class Context:
    """Owns tensors. Ops recorded inside its `with` block belong to it; outside of one, to their first source's context.

    `tensors` lists what it owns, in creation order.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._tokens: list[Token[Context | None]] = []

    def __enter__(self) -> Context:
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *exc: object) -> None:
        _current.reset(self._tokens.pop())

    @staticmethod
    def current() -> Context | None:
        """The innermost context whose `with` block is open, if any."""
        return _current.get()

    def adopt(self, t: Tensor) -> Tensor:
        """Take a new tensor into the list of those it owns."""
        self.tensors.append(t)
        return t

    def new_tensor(self, dtype: DType, ne: Sequence[int], name: str = "") -> Tensor:
        """A leaf of `dtype` with `ne` elements per dimension (ne[0] fastest; NumPy shape is `ne` reversed), no memory.

        Raises ShapeError for a bad shape, DTypeError where `dtype` is no DType.
        """
        if not isinstance(dtype, DType):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DTypeError(f"new_tensor: {dtype!r} is no pyggml.DType")
        full = full_ne(ne)
        t = Tensor(self, dtype, full, contiguous_nb(dtype, full), max(len(ne), rank_of(full)), user_site())
        t.name = name
        return self.adopt(t)

    def from_numpy(self, array: Any, dtype: DType | None = None, name: str = "") -> Tensor:
        """A leaf with a copy of `array` (NumPy shape reversed is its ne), converted to `dtype`.

        Without `dtype` the array's own type is kept; float64 becomes F32. Raises DTypeError for arrays of other kinds.
        """
        a = np.asarray(array)
        if dtype is None:
            dtype = DType.F32 if a.dtype == np.float64 else dtype_of(a)
        if dtype is None:
            raise DTypeError(f"from_numpy: no tensor type stores {a.dtype} (give dtype=)")
        if a.ndim > 4 or 0 in a.shape:
            raise ShapeError(f"from_numpy: shape {a.shape} is not one to four positive numbers")
        return self.new_tensor(dtype, a.shape[::-1] or (1,), name).set(a.reshape(a.shape or (1,)))

    def from_bytes(self, data: bytes | Array, dtype: DType, ne: Sequence[int], name: str = "") -> Tensor:
        """A leaf with a copy of stored bytes of any type. Raises ShapeError where the byte count does not match ne."""
        t = self.new_tensor(dtype, ne, name)
        raw = np.frombuffer(data, np.uint8)
        if raw.nbytes != t.nbytes:
            raise ShapeError(f"from_bytes: {raw.nbytes} bytes given, {t.describe()} takes {t.nbytes}")
        t.allocate()
        t.raw()[...] = raw
        return t

    def get_tensor(self, name: str) -> Tensor | None:
        """The first tensor of that name, or None."""
        return next((t for t in self.tensors if t.name == name), None)


def allocate_tensors(tensors: Iterable[Tensor], buft: str = "CPU") -> Buffer:
    """One buffer for all `tensors` (leafs without memory), each aligned. Raises AllocError where there is no memory."""
    where: list[tuple[Tensor, int]] = []
    size = 0
    for t in tensors:
        where.append((t, size))
        size += -(-t.nbytes // ALIGNMENT) * ALIGNMENT
    buffer = Buffer.allocate(size, buft)
    for t, offset in where:
        t.buffer, t.offset = buffer, offset
    return buffer
