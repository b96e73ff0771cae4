"""What Python's operators, indices and NumPy do with a tensor; `pyggml.ops._operators` records the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, TypeVar

T = TypeVar("T", bound="Operand")


class Recorder(Protocol):
    """Records the nodes of an expression (NotImplemented: not of such operands); the ops package installs itself."""

    def binary(self, symbol: str, a: Any, b: Any) -> Any: ...
    def unary(self, symbol: str, a: Any) -> Any: ...
    def item(self, a: Any, key: Any) -> Any: ...


class Operand:
    """`+ - * / @ **`, `abs`, indices and `.T` of tensors, as NumPy has them. All record nodes and compute nothing.

    The other operand is a tensor, a number, or a NumPy array (which becomes a constant leaf, of floats F32). Shapes are
    broadcast as in NumPy; and, as in ggml, a dimension may repeat whole times. The result has the type of the left
    operand; integers next to floats, and in `/`, `**` and `@`, count as F32 (`gg.div` of integers truncates). `@` is
    NumPy's matmul [.., m, k] @ [.., k, n] -> [.., m, n]: mul_mat(cont(transpose(b)), a), without the `cont` where `b`
    is itself a transpose (`x @ w.T`). `a ** p` takes any number p (whole and half ones exactly as products and roots,
    the others as exp(p log a)), `p ** a` a positive p. An index is whole numbers, slices, `...` and None: a view of the
    same memory. Raises ShapeError for what has no view (negative steps, empty slices, more than four dimensions),
    DTypeError for lists of indices (see `get_rows`) and for other types.
    """

    __slots__ = ()
    __array_ufunc__ = None  # NumPy's scalars and arrays leave their operators to ours

    recorder: ClassVar[Recorder]

    def __add__(self: T, other: Any) -> T:
        return self.recorder.binary("+", self, other)

    def __radd__(self: T, other: Any) -> T:
        return self.recorder.binary("+", other, self)

    def __sub__(self: T, other: Any) -> T:
        return self.recorder.binary("-", self, other)

    def __rsub__(self: T, other: Any) -> T:
        return self.recorder.binary("-", other, self)

    def __mul__(self: T, other: Any) -> T:
        return self.recorder.binary("*", self, other)

    def __rmul__(self: T, other: Any) -> T:
        return self.recorder.binary("*", other, self)

    def __truediv__(self: T, other: Any) -> T:
        return self.recorder.binary("/", self, other)

    def __rtruediv__(self: T, other: Any) -> T:
        return self.recorder.binary("/", other, self)

    def __matmul__(self: T, other: Any) -> T:
        return self.recorder.binary("@", self, other)

    def __rmatmul__(self: T, other: Any) -> T:
        return self.recorder.binary("@", other, self)

    def __pow__(self: T, other: Any) -> T:
        return self.recorder.binary("**", self, other)

    def __rpow__(self: T, other: Any) -> T:
        return self.recorder.binary("**", other, self)

    def __neg__(self: T) -> T:
        return self.recorder.unary("-", self)

    def __abs__(self: T) -> T:
        return self.recorder.unary("abs", self)

    @property
    def T(self: T) -> T:
        """The dimensions in reverse order, a view (NumPy's; `gg.transpose` exchanges the first two of ggml's)."""
        return self.recorder.unary("T", self)

    def __getitem__(self: T, key: Any) -> T:
        return self.recorder.item(self, key)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self: T) -> Iterator[T]:
        """Views of the entries along NumPy's first dimension."""
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return True  # as any object: values are not known when a graph is built

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dimension in NumPy order."""
        raise NotImplementedError
