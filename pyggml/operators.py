"""Gives tensors Python's operators, NumPy's methods and functions, and indices. `pyggml.ops._operators` records their
nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Never

T = TypeVar("T", bound="Operand")


class Recorder(Protocol):
    """Records the nodes of an expression, or returns NotImplemented when it does not know the operands. The ops package
    sets it as `Operand.recorder`, because this module may not import ops."""

    def binary(self, symbol: str, a: Any, b: Any) -> Any: ...
    def unary(self, symbol: str, a: Any) -> Any: ...
    def item(self, a: Any, key: Any) -> Any: ...
    def method(self, name: str, a: Any, *args: Any, **unused: None) -> Any: ...
    def refuse(self, what: str, text: str) -> NoReturn: ...
    def ufunc(self, name: str, method: str, inputs: Sequence[Any], options: Sequence[str]) -> Any: ...
    def array_function(self, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any: ...


class Operand:
    """Lets tensors be written as expressions: `+ - * / @ **`, `abs`, comparisons, methods, indices, `.T` and NumPy's
    functions. All of these record nodes and compute nothing.

    The other operand may be a tensor, a number or a NumPy array. An array becomes a constant leaf: F16 when it is
    float16, F32 when it has other floats. Shapes are broadcast as in NumPy. As in ggml, a dimension may also be
    repeated several times to fit.

    The result of two tensors has a type that can hold the values of both, whichever stands first, as in NumPy. Tensors
    of one type keep it; two types of floats give F32; two types of integers give the larger. Integers become F32 beside
    floats, and in `/`, `**` and `@` (`gg.div` of integers truncates). I32 and I64 wrap around. A number does not change
    the type of a tensor, except that integers with a fraction give F32. (ggml's own functions, such as `gg.add`, give
    the type of their first tensor.)

    `== != < <= > >=` give I32: 1 where the comparison holds, 0 elsewhere (NaN as in NumPy). With them
    `gg.where(a < b, a, b)` chooses elements, `x * (a > 0)` sets elements to 0, and `(a > 0).sum()` counts. No value is
    known yet, so `bool(t)` raises, and so does `t in [a, b]` unless t is one of the two. `is` tells whether two names
    mean one tensor. As a key of a dict a tensor stands for itself, not for its values.

    `& | ^ ~` combine conditions as those of boolean arrays do: `(a > 0) & (a < 1)`. Conditions are comparisons, what
    these operators make of them, and boolean arrays; np.logical_and and its like take any numbers. `% // << >>` raise
    DTypeError.

    `@` is NumPy's matmul, [.., m, k] @ [.., k, n] -> [.., m, n]. It records mul_mat(cont(transpose(b)), a), without the
    `cont` when `b` is a transpose itself (`x @ w.T`). `a ** p` takes any number p: whole and half numbers are computed
    exactly, by products and roots, others as exp(p log a). `p ** a` takes a positive number p.

    NumPy's functions of a tensor record nodes too: np.add, np.exp, np.maximum, np.isfinite, np.logical_and,
    np.concatenate, np.stack, np.where, np.clip, np.argmax and others. Functions for which there is no op raise
    DTypeError. Those that look at values (np.asarray, np.array_equal, np.allclose, np.save, np.linalg) read them.

    An index may have whole numbers, slices, `...` and None. It gives a view of the same memory. Vars and Sizes may
    stand for numbers; they must be within the tensor for every value. Raises ShapeError when there can be no view (a
    negative step, an empty slice, more than four dimensions), and DTypeError for lists of indices (see `get_rows`) and
    other types.
    """

    __slots__ = ()

    recorder: ClassVar[Recorder]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """NumPy calls this for `np.exp(t)`, `np.add(t, 1)` and also `array + t`."""
        return self.recorder.ufunc(ufunc.__name__, method, inputs, [*options])

    def __array_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """NumPy calls this for `np.concatenate([t, u])` and its other functions that are no ufuncs."""
        return self.recorder.array_function(func, args, kwargs)

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

    def __and__(self: T, other: Any) -> T:
        return self.recorder.binary("&", self, other)

    def __rand__(self: T, other: Any) -> T:
        return self.recorder.binary("&", other, self)

    def __or__(self: T, other: Any) -> T:
        return self.recorder.binary("|", self, other)

    def __ror__(self: T, other: Any) -> T:
        return self.recorder.binary("|", other, self)

    def __xor__(self: T, other: Any) -> T:
        return self.recorder.binary("^", self, other)

    def __rxor__(self: T, other: Any) -> T:
        return self.recorder.binary("^", other, self)

    def __invert__(self: T) -> T:
        return self.recorder.unary("~", self)

    def __mod__(self, other: Any) -> NoReturn:
        self._refuse_op("%", "a - gg.floor(a / b) * b for floats")

    def __floordiv__(self, other: Any) -> NoReturn:
        self._refuse_op("//", "gg.floor(a / b) for floats")

    def __lshift__(self, other: Any) -> NoReturn:
        self._refuse_op("<< and >>", "a product with a power of 2")

    __rmod__, __rfloordiv__, __rlshift__, __rshift__, __rrshift__ = __mod__, __floordiv__, *[__lshift__] * 3
    __divmod__ = __rdivmod__ = __floordiv__

    def _refuse_op(self, symbol: str, instead: str) -> NoReturn:
        self.recorder.refuse(symbol, f"no op records it: write {instead}; t.numpy() has the operator, for values")

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

    __hash__ = object.__hash__  # as a key, a tensor stands for itself, not for its values

    @property
    def T(self: T) -> T:
        """A view with all dimensions in reverse order, as in NumPy. (`gg.transpose` exchanges ggml's first two.)"""
        return self.recorder.unary("T", self)

    def __getitem__(self: T, key: Any) -> T:
        return self.recorder.item(self, key)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        text = "what a graph has computed does not change. gg.cpy(x, t[1:3]) and gg.set(t, x, ..) record a store"
        self.recorder.refuse("[] =", f"{text}; t[1:3].set(array) writes values now")

    # -- methods --------------------------------------------------------------------------------------------------

    def reshape(self: T, *shape: Any, order: str = "C") -> T:
        """The same elements in another shape, in NumPy's order. In `t.reshape(2, -1)` the -1 stands for the size that
        fits the number of elements. The result is a view when the elements are contiguous, and otherwise a view of a
        copy (`gg.cont`). It is the tensor itself when that has the shape already."""
        if order != "C":
            self.recorder.refuse("reshape", f"order must be 'C', not {order!r:.40}")
        return self.recorder.method("reshape", self, *shape)

    def flatten(self: T) -> T:
        """The elements in one dimension: `reshape(-1)`."""
        return self.recorder.method("reshape", self, -1)

    def permute(self: T, *axes: Any) -> T:
        """A view whose axis i is axis `axes[i]` of this tensor. Axes count in NumPy's order (in ggml's for
        `gg.permute`)."""
        return self.recorder.method("permute", self, *axes)

    def transpose(self: T, *axes: Any) -> T:
        """As `permute`; without axes they are reversed, as in NumPy. (`gg.transpose` exchanges ggml's first two.)"""
        return self.recorder.method("transpose", self, *axes)

    def astype(self: T, dtype: Any) -> T:
        """A contiguous copy in another type (`gg.cast`). `dtype` is a `DType`, its name, or a NumPy type."""
        return self.recorder.method("astype", self, dtype)

    def sum(
        self: T, axis: Any = None, dtype: None = None, out: None = None, keepdims: bool = False, **unknown: Never
    ) -> T:
        """The sum along axes in NumPy's order. `axis` is a number, several numbers, or None for all axes. With
        `keepdims` the summed axes stay, with one element each. Floats keep their type, and are summed in double; I8,
        I16, I32 and I64 give I64. `dtype` and `out` are there because `np.sum(t, axis)` passes them on; they must be
        None."""
        return self.recorder.method("sum", self, axis, keepdims, dtype=dtype, out=out, **unknown)

    def mean(
        self: T, axis: Any = None, dtype: None = None, out: None = None, keepdims: bool = False, **unknown: Never
    ) -> T:
        """The mean, with arguments as in `sum`. Integers give F32."""
        return self.recorder.method("mean", self, axis, keepdims, dtype=dtype, out=out, **unknown)

    def var(
        self: T,
        axis: Any = None,
        dtype: None = None,
        out: None = None,
        ddof: float = 0,
        keepdims: bool = False,
        **unknown: Never,
    ) -> T:
        """The variance: squared differences from the mean, summed and divided by n - ddof. Other arguments and the
        types are as in `mean`."""
        return self.recorder.method("var", self, axis, keepdims, ddof, dtype=dtype, out=out, **unknown)

    def max(self: T, axis: Any = None, out: None = None, keepdims: bool = False, **unknown: Never) -> T:
        """The largest element; NaN when one of the elements is NaN. Axes as in `sum`. Takes F32, F16, BF16, I32 and
        I64."""
        return self.recorder.method("max", self, axis, keepdims, out=out, **unknown)

    def min(self: T, axis: Any = None, out: None = None, keepdims: bool = False, **unknown: Never) -> T:
        """The smallest element; everything else as in `max`."""
        return self.recorder.method("min", self, axis, keepdims, out=out, **unknown)

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
