"""What Python's operators, methods, indices and NumPy do with a tensor; `pyggml.ops._operators` records the nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

T = TypeVar("T", bound="Operand")


class Recorder(Protocol):
    """Records the nodes of an expression (NotImplemented: not of such operands); the ops package installs itself."""

    def binary(self, symbol: str, a: Any, b: Any) -> Any: ...
    def unary(self, symbol: str, a: Any) -> Any: ...
    def item(self, a: Any, key: Any) -> Any: ...
    def method(self, name: str, a: Any, *args: Any, **unused: None) -> Any: ...
    def refuse(self, what: str, text: str) -> NoReturn: ...
    def ufunc(self, name: str, method: str, inputs: Sequence[Any], options: Sequence[str]) -> Any: ...


class Operand:
    """`+ - * / @ **`, `abs`, comparisons, methods, indices and `.T` of tensors, and NumPy's functions of them. All
    record nodes and compute nothing.

    The other operand is a tensor, a number, or a NumPy array (which becomes a constant leaf, of floats F32, of float16
    F16). Shapes are broadcast as in NumPy; and, as in ggml, a dimension may repeat whole times.

    Two tensors give the type that has the values of both, on either side, as in NumPy: the same where they are of one
    type, F32 for two types of floats, the larger of two types of integers. Integers next to floats, and in `/`, `**`
    and `@`, count as F32 (`gg.div` of integers truncates). I32 and I64 wrap around. A number does not change the type
    of a tensor, but for a fraction beside integers. (ggml's named functions, `gg.add` and its like, are ggml's: the
    type of the first.)

    `== != < <= > >=` give I32: 1 where it holds, else 0 (NaN as in NumPy); `gg.where(a < b, a, b)` chooses, `x * (a >
    0)` leaves out, `(a > 0).sum()` counts. So `bool(t)` raises, as does `t in [a, b]` where it is none of them: `is`
    compares tensors themselves, and a key of a dict is the tensor itself.

    `@` is NumPy's matmul [.., m, k] @ [.., k, n] -> [.., m, n]: mul_mat(cont(transpose(b)), a), without the `cont`
    where `b` is itself a transpose (`x @ w.T`). `a ** p` takes any number p (whole and half ones exactly as products
    and roots, the others as exp(p log a)), `p ** a` a positive p.

    NumPy's functions of a tensor are nodes, too: np.add, np.exp, np.maximum, np.isfinite, np.logical_and ..; those that
    no op records raise DTypeError.

    An index is whole numbers, slices, `...` and None: a view of the same memory. Vars and Sizes may stand for numbers;
    they must be within the tensor for every value. Raises ShapeError for what has no view (negative steps, empty
    slices, more than four dimensions), DTypeError for lists of indices (see `get_rows`) and for other types.
    """

    __slots__ = ()

    recorder: ClassVar[Recorder]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """`np.exp(t)`, `np.add(t, 1)`, and `array + t`, too."""
        return self.recorder.ufunc(ufunc.__name__, method, inputs, [*options])

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

    def __lt__(self: T, other: Any) -> T:
        return self.recorder.binary("<", self, other)

    def __le__(self: T, other: Any) -> T:
        return self.recorder.binary("<=", self, other)

    def __gt__(self: T, other: Any) -> T:
        return self.recorder.binary(">", self, other)

    def __ge__(self: T, other: Any) -> T:
        return self.recorder.binary(">=", self, other)

    def __eq__(self: T, other: Any) -> T:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.recorder.binary("==", self, other)

    def __ne__(self: T, other: Any) -> T:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.recorder.binary("!=", self, other)

    __hash__ = object.__hash__  # a key is this very tensor

    @property
    def T(self: T) -> T:
        """The dimensions in reverse order, a view (NumPy's; `gg.transpose` exchanges the first two of ggml's)."""
        return self.recorder.unary("T", self)

    def __getitem__(self: T, key: Any) -> T:
        return self.recorder.item(self, key)

    # -- methods --------------------------------------------------------------------------------------------------

    def reshape(self: T, *shape: Any, order: str = "C") -> T:
        """The elements in another shape, in NumPy's order: `t.reshape(2, -1)`, where -1 is what is left of them. A view
        where they lie densely, else of a copy (`gg.cont`); the tensor itself where it has that shape."""
        if order != "C":
            self.recorder.refuse("reshape", f"order must be 'C', not {order!r:.40}")
        return self.recorder.method("reshape", self, *shape)

    def flatten(self: T) -> T:
        """The elements in one dimension: `reshape(-1)`."""
        return self.recorder.method("reshape", self, -1)

    def permute(self: T, *axes: Any) -> T:
        """A view whose axis i is axis `axes[i]` of this one, in NumPy's order (`gg.permute` counts in ggml's)."""
        return self.recorder.method("permute", self, *axes)

    def transpose(self: T, *axes: Any) -> T:
        """NumPy's: as `permute`; without axes they are reversed, as in `.T` (`gg.transpose` exchanges ggml's first
        two)."""
        return self.recorder.method("transpose", self, *axes)

    def astype(self: T, dtype: Any) -> T:
        """A dense copy in another type, `gg.cast`: a `DType`, its name, or a NumPy type."""
        return self.recorder.method("astype", self, dtype)

    def sum(self: T, axis: Any = None, dtype: None = None, out: None = None, keepdims: bool = False) -> T:
        """The sum along axes of NumPy's order (a number, several, None for all), which `keepdims` leaves with one
        element each. Floats keep their type, and are summed in double; I8, I16, I32 and I64 give I64. `dtype` and `out`
        are what `np.sum(t, axis)` hands on: None."""
        return self.recorder.method("sum", self, axis, keepdims, dtype=dtype, out=out)

    def mean(self: T, axis: Any = None, dtype: None = None, out: None = None, keepdims: bool = False) -> T:
        """The mean, as `sum`. Integers give F32."""
        return self.recorder.method("mean", self, axis, keepdims, dtype=dtype, out=out)

    def var(
        self: T, axis: Any = None, dtype: None = None, out: None = None, ddof: float = 0, keepdims: bool = False
    ) -> T:
        """The mean square of what elements differ from their mean, as `mean`; of n elements it is divided by
        n - ddof."""
        return self.recorder.method("var", self, axis, keepdims, ddof, dtype=dtype, out=out)

    def max(self: T, axis: Any = None, out: None = None, keepdims: bool = False) -> T:
        """The largest element, NaN where there is one; axes as in `sum`. F32, F16, BF16, I32, I64."""
        return self.recorder.method("max", self, axis, keepdims, out=out)

    def min(self: T, axis: Any = None, out: None = None, keepdims: bool = False) -> T:
        """The smallest element, NaN where there is one, as `max`."""
        return self.recorder.method("min", self, axis, keepdims, out=out)

    def __len__(self) -> int:
        if not self.shape:
            self.recorder.refuse("len", "a tensor of shape () has no entries")
        if not isinstance(self.shape[0], int):  # pyright: ignore[reportUnnecessaryIsInstance]
            text = f"a tensor of shape {self.shape} has as many entries as its Var says when a graph runs"
            self.recorder.refuse("len", f"{text}; t.shape[0] stands for them")
        return self.shape[0]

    def __iter__(self: T) -> Iterator[T]:
        """Views of the entries along NumPy's first dimension."""
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> NoReturn:
        text = "values are not known when a graph is built. gg.where(c, a, b) chooses between them; of computed values"
        self.recorder.refuse("bool", f"{text} t.item() and t.numpy() tell, and `is` compares tensors themselves")

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dimension in NumPy order."""
        raise NotImplementedError
