"""Tensors and their contexts: metadata only; memory comes from buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from itertools import count
from operator import attrgetter
from threading import Lock
from typing import Any, ClassVar, NoReturn, SupportsIndex, TypeAlias
from weakref import ref

import numpy as np

from . import codec
from .buffers.buffer import ALIGNMENT, Buffer
from .codec import Array
from .dtypes import DType, dtype_of
from .errors import AllocError, DTypeError, GraphError, ShapeError, Site, explain, not_sent, user_site
from .form import STORED, Form
from .operators import Operand
from .scope import named, prefix
from .var import Size as Size
from .var import Var as Var
from .var import Varies, as_size, below_zero, is_count, largest, vars_of

Ne = tuple[int, int, int, int]

FLAG_INPUT, FLAG_OUTPUT, FLAG_PARAM = 1, 2, 4
FLAG_PLANNED = 8  # a node whose memory is a scheduler's, not its own
FLAG_RECYCLED = 16  # ... and is used again later in the same graph
FLAG_UNSET = 32  # a leaf that a scheduler gave memory of its own; no value was set() yet
FLAG_STORE = 64  # a node that writes over memory of another tensor: cpy, set_rows, the _inplace variants
FLAG_INTO = 128  # ... whose purpose that is (cpy, set_rows)
FLAG_BUILT = 256  # ... that is in a graph, or was
FLAG_AFTER = 512  # a node that was recorded after stores into what it reads

_serials = count()
_NO_PARAMS: Mapping[str, Any] = {}
_MAX_BYTES = 2**63 - 1


def contiguous_nb(dtype: DType, ne: Ne) -> Ne:
    """Byte strides of a dense tensor. Raises ShapeError where ne[0] is not a whole number of blocks, or the bytes are
    too many to count in 63 bits."""
    nb1 = codec.check_rows(dtype, ne[0])
    nb2 = nb1 * ne[1]
    nb3 = nb2 * ne[2]
    if (n := largest(nb3 * ne[3])) > _MAX_BYTES:
        raise ShapeError(f"{dtype.name} ne {list(ne)} takes {n} bytes, more than {_MAX_BYTES}")
    return (dtype.type_size, nb1, nb2, nb3)


def last_byte(dt: DType, ne: Ne, nb: Ne) -> int:
    """Bytes from the first to the end of the last element."""
    last = (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]
    if dt.block_size == 1:
        return last + (ne[0] - 1) * nb[0] + dt.type_size
    return last + ne[0] // dt.block_size * nb[0]


def dims_of(op: str, ne: Any) -> tuple[int, ...]:
    """`ne` as a tuple of one to four positive numbers or Sizes (a number is one dimension). Raises ShapeError for all
    else."""
    t: tuple[int, ...] = ()
    with suppress(TypeError):
        t = tuple(map(as_size, ne if hasattr(ne, "__iter__") else (ne,)))
    if not 1 <= len(t) <= 4 or not all(map(is_count, t)):
        rule = f"ne must be one to four positive numbers, not {ne!r}{not_counts(t)}"
        raise ShapeError(explain(op, rule, [], user_site()))
    return t


def not_counts(ne: Iterable[int]) -> str:
    """For messages: which Sizes among these are less than 1, for which values of their Vars, and what to do when 0
    alone is in the way; "" when none is."""
    text = ""
    for n in ne:
        if isinstance(n, Size) and not is_count(n):
            text += f" ({n} is not positive for {below_zero(n - 1)})"
            zero = [var for var in n.vars if var.lo == 0 < var.hi] if not n.const else []
            text += "".join(
                f". {v.name} may be 0, by lo=0 or {v.name}.bind(0): Var({v.name!r}, hi={v.hi}, lo=1) is not"
                for v in zero
            )
    return text


def full_ne(dims: tuple[int, ...]) -> Ne:
    """One to four dimensions, padded with ones to four."""
    return (*dims, *(1,) * (4 - len(dims)))  # pyright: ignore[reportReturnType]


def shown(name: str) -> str:
    """A name on one line, whatever it has in it."""
    return name if name.isprintable() else repr(name)[1:-1]


def check_name(name: str) -> str:
    """`name`, where it is a string. Raises GraphError."""
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"a tensor's name must be a string, not {name!r}")
    return name


def rank_of(ne: Ne) -> int:
    """Dimensions without the trailing ones of `ne` (at least one), as ggml_n_dims."""
    return 4 if ne[3] != 1 else 3 if ne[2] != 1 else 2 if ne[1] != 1 else 1


Stores: TypeAlias = "tuple[ref[Tensor], Stores | None, int]"  # a store, older ones, the thread that recorded it


class Tensor(Operand):
    """A node or leaf of a graph: what it is (`dtype`, `ne`, `nb`), where it comes from (`op`, `op_params`, `src`),
    and where its bytes are (`buffer` + `offset`, or `view_src` + `view_offs`).

    `ne` counts elements and `nb` byte strides, ne[0] fastest; `shape` and `strides` are the same in NumPy order. A
    number of them that follows from a Var is a `Size`; `layout`, `numpy` and `tobytes` are of the values that Vars have
    now. `form` is what products read it as (`pyggml.form`). `like` is the node that it repeats (`Graph.repeat`).
    `serial` grows from each tensor that is made to the next. `stores`: the nodes that write over its memory and still
    count, the latest first (`pyggml.hazards`). `held` are the values of the Vars for which its memory was written.
    """

    html: ClassVar[Callable[[Tensor], str] | None] = None  # how notebooks show one; pyggml installs it

    __slots__ = (
        "__weakref__",
        "_ctx",
        "buffer",
        "dtype",
        "flags",
        "form",
        "held",
        "like",
        "name",
        "nb",
        "ne",
        "offset",
        "op",
        "op_params",
        "rank",
        "serial",
        "site",
        "src",
        "stores",
        "view_offs",
        "view_src",
    )

    def __init__(self, ctx: Context, dtype: DType, ne: Ne, nb: Ne, rank: int, site: Site | None = None) -> None:
        self._ctx = ref(ctx)  # no cycle: tensors, and weights behind them, are freed with the last reference
        self.dtype = dtype
        self.ne = ne
        self.nb = nb
        self.rank = rank
        self.op = "none"
        self.op_params: Mapping[str, Any] = _NO_PARAMS
        self.src: tuple[Tensor | None, ...] = ()
        self.view_src: Tensor | None = None
        self.view_offs = 0
        self.flags = 0
        self.name = prefix()
        self.serial = next(_serials)
        self.stores: Stores | None = None
        self.buffer: Buffer | None = None
        self.offset = 0
        self.form: Form = STORED
        self.site = site
        self.like: Tensor | None = None
        self.held: Mapping[Var, int] | None = None

    @property
    def ctx(self) -> Context:
        """The context that owns it; a new one where that is gone (tensors do not keep it alive)."""
        return self._ctx() or Context()

    # -- shape ----------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dimension in NumPy order (ne reversed, without the ones beyond its rank)."""
        return self.ne[::-1][4 - self.rank :]

    @property
    def strides(self) -> tuple[int, ...]:
        """Byte strides in NumPy order."""
        return self.nb[::-1][4 - self.rank :]

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
        return last_byte(self.dtype, self.ne, self.nb)

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
            raise self._no_memory()
        return root.buffer.base + root.offset + int(self.view_offs)

    @property
    def layout(self) -> tuple[Ne, Ne]:
        """`ne` and `nb` in numbers: those that their Vars give them now."""
        n0, n1, n2, n3 = map(int, self.ne)
        b0, b1, b2, b3 = map(int, self.nb)
        return (n0, n1, n2, n3), (b0, b1, b2, b3)

    def raw(self) -> Array:
        """Bytes from the first to the last element (uint8, zero-copy but for a device's). Raises AllocError without
        memory, GGUFError where a mapped file has become shorter."""
        root = self.root
        if root.buffer is None:
            raise self._no_memory()
        if root.buffer.file is not None:
            root.buffer.file.check()
        start = root.offset + int(self.view_offs)
        return root.buffer.read(start, last_byte(self.dtype, *self.layout))

    def _no_memory(self) -> AllocError:
        how = "set() it" if self.root.op == "none" else "pyggml.eval(t), or pyggml.compute of its graph, computes it"
        return AllocError(f"{self.describe()} has no memory: {how} first")

    def elements(self) -> Array:
        """All four dimensions in NumPy order, with strides: zero-copy where NumPy has the type, else float32.

        BF16 and block types are decoded into a new array (block types need dense rows).
        """
        (ne, nb), dt = self.layout, self.dtype
        memory = self.raw()
        shape, strides = ne[::-1], nb[::-1]
        if dt.np_dtype is not None:
            return np.ndarray(shape, dt.np_dtype, memory, 0, strides)
        if dt.block_size == 1:
            return codec.bf16_to_f32(np.ndarray(shape, np.uint16, memory, 0, strides))
        return codec.decode(self.rows_of_blocks(memory).reshape(-1), dt, shape)

    def rows_of_blocks(self, memory: Array) -> Array:
        """The stored bytes as uint8 [ne3, ne2, ne1, bytes per row] over `memory` (zero-copy)."""
        (ne, nb), dt = self.layout, self.dtype
        if nb[0] != dt.type_size:
            raise ShapeError(f"rows of {self.describe()} are not dense (nb[0] = {nb[0]}, not {dt.type_size})")
        shape = (ne[3], ne[2], ne[1], codec.check_rows(dt, ne[0]))
        return np.ndarray(shape, np.uint8, memory, 0, (nb[3], nb[2], nb[1], 1))

    def store(self, values: Array) -> None:
        """Write `values` [ne3, ne2, ne1, ne0] into the tensor's memory, converting to its type."""
        (ne, nb), dt = self.layout, self.dtype
        memory = self.raw()
        buffer = self.root.buffer
        assert buffer is not None
        if not buffer.writable:
            raise AllocError(f"{self.describe()} lies in read-only memory")
        if not buffer.is_host:
            memory = np.array(memory)
        if dt.np_dtype is not None:
            with np.errstate(over="ignore"):  # beyond the largest F16 lies infinity, as in a cast
                np.ndarray(ne[::-1], dt.np_dtype, memory, 0, nb[::-1])[...] = values
        elif dt.block_size == 1:
            bits = codec.f32_to_bf16(np.asarray(values, np.float32))
            np.ndarray(ne[::-1], np.uint16, memory, 0, nb[::-1])[...] = bits
        else:
            rows = self.rows_of_blocks(memory)
            rows[...] = codec.encode(values, dt).reshape(rows.shape)
        if not buffer.is_host:
            buffer.write(self.root.offset + int(self.view_offs), memory)

    # -- user's end -----------------------------------------------------------------------------------------------

    def numpy(self) -> Array:
        """The values in NumPy order, shape `self.shape`: a zero-copy view where NumPy has the type, else float32.

        Raises AllocError where the tensor has no memory (not computed: `pyggml.eval` computes and returns an array), or
        its memory was used again by later nodes.
        """
        self.check_readable()
        return self.elements()[(*(0,) * (4 - self.rank), ...)]

    def item(self) -> int | float:
        """The value of a tensor of one element as Python's number. Raises as `numpy`, and ShapeError for more than one
        element."""
        if (n := int(self.n_elements)) != 1:
            raise ShapeError(f"item: {self.describe_now()} has {n} elements, not one")
        return self.numpy().item()

    def check_readable(self) -> None:
        """Raises AllocError where the values cannot be read: see `numpy`."""
        root = self.root
        if root.flags & FLAG_RECYCLED:  # what was fused away never had memory
            raise AllocError(f"the memory of {self.describe()} was recycled; call set_output() before computing")
        if root.buffer is None:
            raise self._no_memory()
        if (other := root.outdated()) is not None:
            how = "set() it" if root.op == "none" else "compute it"
            raise AllocError(f"{root.describe()} holds values for {other}, and now {root.bound()}: {how} again")

    def outdated(self) -> str | None:
        """The values of its Vars for which its memory was written, such as "n = 3", where they are others now."""
        held, own = self.held, () if self.held is None else vars_of(*self.ne)
        if held is None or all(var.value == held[var] for var in own):
            return None
        return ", ".join(f"{var.name} = {held[var]}" for var in own)

    def bound(self) -> str:
        """The values that the Vars of its ne have now, for messages: "n = 3"; "" without Vars."""
        return ", ".join(f"{var.name} = {var.value}" for var in vars_of(*self.ne))

    def tobytes(self) -> bytes:
        """The stored bytes, densely, of any type. Raises AllocError as `numpy`."""
        self.check_readable()
        if self.dtype.block_size > 1 or self.dtype.np_dtype is None:
            if self.is_contiguous:
                return self.raw().tobytes()
            if self.dtype.block_size == 1:
                ne, nb = self.layout
                return np.ndarray(ne[::-1], np.uint16, self.raw(), 0, nb[::-1]).tobytes()
            return self.rows_of_blocks(self.raw()).tobytes()
        return self.elements().tobytes()

    def set(self, array: Any) -> Tensor:
        """Copy values (NumPy order, shape `self.shape`) in, converting to the tensor's type; gives a leaf its memory.
        Vars in its shape are taken as they are bound now.

        Raises ShapeError for another shape, GraphError for a node (its op computes it), DTypeError for values that are
        no real numbers, and those that the type does not have: of an integer type fractions, NaN, what is out of its
        range, of a block type NaN and infinities.
        """
        values = codec.as_array("set", array)
        if (why := codec.unfit(values, self.dtype)) is not None:  # None, or text, has a shape for NumPy
            raise DTypeError(f"set: {why} cannot be stored in {self.describe()}")
        ne = self.layout[0]
        if values.shape != (shape := ne[::-1][4 - self.rank :]) and full_ne(values.shape[::-1] or (1,)) != ne:
            raise ShapeError(f"set: shape {values.shape} is not {shape}, the shape of {self.describe_now()}")
        if self.op != "none" and self.view_src is None:
            raise GraphError(f"set: {self.describe()} is computed by {self.op}")
        if self.root.buffer is None:
            self.root.allocate()
        self.store(values.reshape(ne[::-1]))
        self.root.flags &= ~FLAG_UNSET
        if ne != self.ne:
            self.hold()
        return self

    def hold(self) -> None:
        """Note for which values of its Vars its memory was written."""
        self.held = {var: var.value for var in vars_of(*self.ne)} or None

    def allocate(self, buft: str = "CPU") -> None:
        """Give this leaf memory of its own."""
        self.buffer, self.offset = Buffer.allocate(largest(self.nbytes), buft), 0

    def set_name(self, name: str) -> Tensor:
        """Name it, for messages and drawings; within `gg.scope("s")` it is called `s/name`. Raises GraphError where
        `name` is no string."""
        name, before = check_name(name), prefix()
        self.name = name if name.startswith(before) else before + name
        return self

    def set_input(self) -> Tensor:
        """Mark as an input: it has memory of its own for the whole graph, and must be given a value."""
        self.flags |= FLAG_INPUT
        return self

    def set_output(self) -> Tensor:
        """Mark as an output: its memory is not recycled, so it can be read after the graph has run."""
        self.flags |= FLAG_OUTPUT
        return self

    def set_param(self) -> Tensor:
        """Mark as a parameter, whose gradient `Graph.build_backward_expand` records (ggml_set_param). Raises GraphError
        for a node, DTypeError for a type that has no gradient."""
        if self.op != "none":
            raise GraphError(f"set_param: {self.describe()} is computed by {self.op}; parameters are leafs")
        if not self.dtype.is_float:
            raise DTypeError(f"set_param: {self.describe()} has no gradient; parameters are F32, F16, BF16 or F64")
        self.flags |= FLAG_PARAM
        return self

    def describe(self) -> str:
        """`name: TYPE ne [..]`, with strides where they are not dense, for messages."""
        name = shown(named(self.name, "(leaf)" if self.op == "none" else f"({self.op})"))
        text = f"{name}: {self.dtype.name} ne {list(self.ne)}"
        return text if self.is_contiguous else f"{text} nb {list(self.nb)}"

    def describe_now(self) -> str:
        """`describe`, and the values that its Vars have now."""
        return f"{self.describe()} with {bound}" if (bound := self.bound()) else self.describe()

    def __repr__(self) -> str:
        return f"<Tensor {self.describe()} op {self.op}>"

    def _repr_html_(self) -> str | None:
        return Tensor.html(self) if Tensor.html is not None else None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        a = self.numpy()
        if copy:
            return np.array(a, dtype)
        if copy is False and (self.dtype.np_dtype is None or np.dtype(dtype or a.dtype) != a.dtype):
            raise ValueError(
                f"{self.describe()} cannot be an array of {dtype or a.dtype} without a copy"
            )  # NumPy's own
        return a if dtype is None else a.astype(dtype, copy=False)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        instead = "it belongs to graphs of this process. Send t.numpy() or t.tobytes(), or write it with pyggml.save"
        raise not_sent(self, instead)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.numpy().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU


# The context whose `with` block is open, and the blocks around it; threads and tasks have each their own.
_Open: TypeAlias = "tuple[Context, _Open | None]"
_open: ContextVar[_Open | None] = ContextVar("pyggml_context", default=None)
opened = _open.get

_ROOM = 1000
_forgetting = Lock()


class Context:
    """Owns tensors. Ops recorded inside its `with` block belong to it; outside of one, to their first source's context.

    Leafs stay as long as the context, or until `clear()`. A node goes when nothing refers to it any more: neither the
    program, nor another node, nor a graph; the constants of an expression go with it.
    """

    def __init__(self) -> None:
        self._leafs: list[Tensor] = []
        self._others: list[ref[Tensor]] = []  # nodes and constants; some are gone
        self._room = _ROOM  # entries of `_others` before it is looked through

    def __enter__(self) -> Context:
        _open.set((self, _open.get()))
        return self

    def __exit__(self, *exc: object) -> None:
        innermost = _open.get()
        _open.set(innermost and innermost[1])

    @staticmethod
    def current() -> Context | None:
        """The innermost context whose `with` block is open, if any."""
        innermost = _open.get()
        return innermost and innermost[0]

    def __repr__(self) -> str:
        tensors = self.tensors
        leafs = [t for t in tensors if t.op == "none"]
        n_bytes = sum(t.nbytes for t in leafs)
        return f"<Context {len(leafs)} leafs of {n_bytes} bytes, {len(tensors) - len(leafs)} nodes>"

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that it owns, in the order in which they were made."""
        others = [t for r in self._others if (t := r()) is not None]
        return sorted([*self._leafs, *others], key=attrgetter("serial"))

    def clear(self) -> None:
        """Let go of all tensors and their values. The memory is free when no array is a view of it any more.

        Tensors that the program still holds are without value from then on: reading one raises AllocError, computing
        with a leaf raises GraphError until it is `set()` again, and a node can be computed again. Nodes that write over
        leafs of other contexts and are in no graph do not count as hazards any more. The context can be used for new
        tensors.
        """
        for t in self.tensors:
            t.buffer, t.form, t.stores = None, STORED, None
            t.flags &= ~(FLAG_PLANNED | FLAG_RECYCLED)
            t.flags |= FLAG_BUILT if t.flags & FLAG_STORE else 0
        self._leafs, self._others = [], []

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        instead = "its tensors lie in memory of this process. pyggml.save writes them, pyggml.load reads them there"
        raise not_sent(self, instead)

    def adopt(self, t: Tensor) -> Tensor:
        """Take a new leaf into the list of those it owns."""
        self._leafs.append(t)
        return t

    def note(self, t: Tensor) -> Tensor:
        """Take a new node, or the constant of an expression, into the list of those it owns, without keeping it."""
        self._others.append(ref(t))
        if len(self._others) > self._room:
            self._forget()
        return t

    def note_all(self, tensors: Iterable[Tensor]) -> None:
        """As `note`, for several."""
        self._others += map(ref, tensors)
        if len(self._others) > self._room:
            self._forget()

    def _forget(self) -> None:
        """Strike out the tensors that are gone."""
        with _forgetting:
            n = len(self._others)  # other threads append meanwhile
            self._others[:n] = [r for r in self._others[:n] if r() is not None]
            self._room = 2 * len(self._others) + _ROOM

    def new_tensor(self, dtype: DType, ne: int | Sequence[int], name: str = "") -> Tensor:
        """A leaf of `dtype` with `ne` elements per dimension (ne[0] fastest; NumPy shape is `ne` reversed; a number is
        one dimension), no memory. Elements may follow from a Var; memory is then for the most of them.

        Raises ShapeError for a bad shape, DTypeError where `dtype` is no DType, Varies where rows are not whole blocks
        for every value of a Var.
        """
        return self.adopt(self._new_leaf(dtype, ne, name))

    def _new_leaf(self, dtype: DType, ne: int | Sequence[int], name: str) -> Tensor:
        if isinstance(ne, DType):
            text = f"the type comes before the shape: new_tensor({ne.name}, {dtype!r:.40})"
            raise DTypeError(explain("new_tensor", text, [], user_site()))
        dims = dims_of("new_tensor", ne)
        full = full_ne(dims)
        try:
            nb = contiguous_nb(dtype, full)
        except (ShapeError, DTypeError, Varies) as e:
            raise type(e)(explain("new_tensor", str(e), [], user_site())) from None
        t = Tensor(self, dtype, full, nb, max(len(dims), rank_of(full)), user_site())
        t.name += check_name(name)
        return t

    def from_numpy(self, array: Any, dtype: DType | None = None, name: str = "") -> Tensor:
        """A leaf with a copy of `array` (NumPy shape reversed is its ne), converted to `dtype`.

        Without `dtype` an array keeps its own type, where a tensor can have it and it is not float64: that, and other
        floats, become F32; Python's integers (lists of them), bools and unsigned ones become I32. Raises DTypeError for
        arrays of other kinds, and values that the type does not have (as `Tensor.set`), ShapeError for more than four
        dimensions or no elements. Numbers beyond those of a float type become infinite, as in `gg.cast`.
        """
        return self.adopt(self._copy_of(array, dtype, name))

    def constant(self, array: Any, dtype: DType | None = None) -> Tensor:
        """As `from_numpy`, a leaf that the context does not keep: it goes with the last node that reads it. Expressions
        make such leafs of arrays and numbers."""
        return self.note(self._copy_of(array, dtype, ""))

    def _copy_of(self, array: Any, dtype: DType | None, name: str) -> Tensor:
        if isinstance(array, DType):
            text = f"the array comes before the type: from_numpy(array, {array.name})"
            raise DTypeError(explain("from_numpy", text, [], user_site()))
        a = codec.as_array("from_numpy", array)
        if dtype is None:
            own = dtype_of(a) if isinstance(array, np.ndarray | np.generic | Tensor) else None
            usual = {"f": DType.F32, "i": DType.I32, "u": DType.I32, "b": DType.I32}.get(a.dtype.kind)
            dtype = usual if own in (None, DType.F64) else own
        if dtype is None:
            raise DTypeError(f"from_numpy: no tensor type stores {a.dtype}")
        if a.ndim > 4 or 0 in a.shape:
            raise ShapeError(f"from_numpy: shape {a.shape} is not one to four positive numbers")
        return self._new_leaf(dtype, a.shape[::-1] or (1,), name).set(a.reshape(a.shape or (1,)))

    def from_bytes(self, data: bytes | Array, dtype: DType, ne: int | Sequence[int], name: str = "") -> Tensor:
        """A leaf with a copy of stored bytes of any type. Raises ShapeError where the byte count does not match ne,
        DTypeError where `data` holds no bytes."""
        if isinstance(data, DType) or isinstance(ne, DType):
            text = "the data comes first, then the type, then the shape: from_bytes(data, dtype, ne)"
            raise DTypeError(explain("from_bytes", text, [], user_site()))
        t = self._new_leaf(dtype, ne, name)
        try:
            raw = np.frombuffer(data, np.uint8)
        except (TypeError, ValueError, BufferError) as e:
            raise DTypeError(f"from_bytes: {type(data).__name__} is not bytes: {e}") from None
        if raw.nbytes != int(t.nbytes):
            raise ShapeError(f"from_bytes: {raw.nbytes} bytes given, {t.describe()} takes {t.nbytes}")
        t.allocate()
        t.raw()[...] = raw
        t.hold()
        return self.adopt(t)

    def get_tensor(self, name: str) -> Tensor | None:
        """The first tensor of that name that it owns, or None."""
        return next((t for t in self.tensors if t.name == name), None)


def allocate_tensors(tensors: Iterable[Tensor], buft: str = "CPU") -> Buffer:
    """One buffer for all `tensors` (leafs without memory), each aligned. Raises AllocError where there is no memory."""
    where: list[tuple[Tensor, int]] = []
    size = 0
    for t in tensors:
        where.append((t, size))
        size += -(-largest(t.nbytes) // ALIGNMENT) * ALIGNMENT
    buffer = Buffer.allocate(size, buft)
    for t, offset in where:
        t.buffer, t.offset = buffer, offset
    return buffer
