"""Data sets for training: examples as NumPy arrays, and which of them are in the batch of each step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from pyggml.codec import Array, as_array
from pyggml.dtypes import DType
from pyggml.errors import BatchError, DTypeError, ShapeError, whole
from pyggml.tensor import Context, Tensor
from pyggml.types import Ints

B = TypeVar("B", covariant=True)


class Batches(Protocol[B]):
    """The batches of all steps: step i has the same batch in every run. n_epoch: steps of an epoch."""

    @property
    def n_epoch(self) -> int: ...
    def __getitem__(self, step: int, /) -> B: ...


class Dataset:
    """Examples to learn from, for `gg.fit`.

        gg.Dataset(points, labels)                     # arrays whose first dimension counts examples
        gg.Dataset({"points": points, "label": labels})   # the same, by name
        gg.Dataset(examples)                           # a sequence: its items are arrays, tuples or dicts of arrays

    The arrays of an example are its fields: up to three dimensions each, of the same shape in all examples. Arrays are
    not copied, so a `np.memmap` is read as it is needed, and so is a sequence: any object with `len` and `[i]`.
    In a graph floats are F32; integers and bools are I32.

    shard  so many successive examples stay together when the data is shuffled (ggml_opt_dataset's ndata_shard)

    Raises BatchError for data without examples, for fields of different lengths, and when an example of a sequence is
    not like the first one (when it is read); ShapeError and DTypeError for what no tensor holds. Source:
    ggml_opt_dataset_init.
    """

    def __init__(self, *data: Any, shard: int = 1) -> None:
        self.shard = whole("Dataset: shard", shard, 1, error=BatchError)
        self.names: tuple[str, ...] | None = None  # of the fields, when they have names
        self._arrays: list[Array] | None = None
        self._examples = cast("Sequence[Any]", ())
        if len(data) > 1:
            self._arrays = _arrays(data)
        for only in data if len(data) == 1 else ():
            if isinstance(only, Mapping):
                fields = cast("Mapping[str, Any]", only)
                self._arrays, self.names = _arrays([*fields.values()]), tuple(fields)
            elif isinstance(only, np.ndarray | Tensor):
                self._arrays = _arrays(data)
            elif hasattr(only, "__len__") and hasattr(only, "__getitem__") and not isinstance(only, str):
                self._examples = only
            else:
                raise BatchError(f"a Dataset needs arrays or a sequence of examples, not {only!r:.40}")
        if not data:
            raise BatchError("a Dataset needs data: arrays, a dict of arrays, or a sequence of examples")
        if self.names is not None and not all(isinstance(n, str) and n.isidentifier() for n in self.names):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BatchError(f"Dataset: fields must be called like parameters of a function, not {self.names!r:.80}")
        self._n = len(self._examples if self._arrays is None else self._arrays[0])
        if not self._n:
            raise BatchError("a Dataset needs at least one example")
        if self._arrays is None:
            first = self._examples[0]
            if isinstance(first, Mapping):
                self.names = tuple(cast("Mapping[str, Any]", first))
            self._first = self._fields(first, 0)
        self._like = [(_dtype(a), a.shape[:0:-1]) for a in self[np.zeros(1, np.int32)]]
        if any(len(ne) > 3 or 0 in ne for _, ne in self._like):
            raise ShapeError(f"Dataset: a field of an example has up to three dimensions, and elements: {self!r}")

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        names = self.names or ("",) * len(self._like)
        fields = (f"{n + ' ' if n else ''}{d.name} ne {list(ne)}" for n, (d, ne) in zip(names, self._like, strict=True))
        return f"<Dataset {self._n} examples of {', '.join(fields)}>"

    def __getitem__(self, indices: Ints) -> list[Array]:
        """The fields of the examples of these indices, each with one more dimension in front."""
        if self._arrays is not None:
            return [a[indices] for a in self._arrays]
        rows = [self._fields(self._examples[i], i) for i in indices.tolist()]
        for i, row in zip(indices.tolist(), rows, strict=True):
            if [a.shape for a in row] != [a.shape for a in self._first]:
                have, want = ([a.shape for a in fields] for fields in (row, self._first))
                raise BatchError(f"example {i} of the Dataset has fields of shapes {have}, the first one {want}")
        return [np.stack(column) for column in zip(*rows, strict=True)]

    def tensors(self, ctx: Context, n: int) -> list[Tensor]:
        """An input for each field of a batch of `n` examples."""
        names = self.names or [f"field_{i}" for i in range(len(self._like))]
        new = (ctx.new_tensor(d, (*ne, n), name) for name, (d, ne) in zip(names, self._like, strict=True))
        return [t.set_input() for t in new]

    def digest(self) -> str:
        """What tells this data from other data: a hash of all arrays; of a sequence that of its length and of its first
        and last example, since reading all of them may take long."""
        found = hashlib.blake2b(digest_size=16)
        arrays = self[np.array([0, self._n - 1], np.int32)] if self._arrays is None else self._arrays
        kinds = [f"{a.dtype} {a.shape}" for a in arrays]
        found.update(repr((self._n, self.names, kinds)).encode())
        for a in arrays:
            for i in range(0, len(a), _HASHED):
                found.update(a[i : i + _HASHED].tobytes())
        return found.hexdigest()

    def _fields(self, example: Any, i: int) -> list[Array]:
        """The fields of example `i` of a sequence."""
        if (self.names is not None) != isinstance(example, Mapping):
            raise BatchError(f"example {i} of the Dataset is no {'dict, as' if self.names else 'field like'} the first")
        if self.names is not None:
            fields = cast("Mapping[str, Any]", example)
            if {*fields} != {*self.names}:
                raise BatchError(f"example {i} of the Dataset has the fields {[*fields]}, the first one {self.names}")
            values = [fields[name] for name in self.names]
        else:
            values = [*cast("tuple[Any, ...]", example)] if isinstance(example, tuple) else [example]
        return [_array(f"example {i}", v) for v in values]


_HASHED = 1 << 12  # so many examples are hashed at a time


def _arrays(data: Sequence[Any]) -> list[Array]:
    arrays = [_array(f"field {i}", v) for i, v in enumerate(data)]
    if not arrays:
        raise BatchError("a Dataset needs at least one field")
    for i, a in enumerate(arrays):
        if not a.ndim or len(a) != len(arrays[0]):
            text = f"field {i} of shape {a.shape} and the first one of {arrays[0].shape}"
            raise BatchError(f"Dataset: the first dimension counts examples; it differs for {text}")
    return arrays


def _array(what: str, value: Any) -> Array:
    return as_array(f"Dataset: {what}", value.numpy() if isinstance(value, Tensor) else value)


def _dtype(a: Array) -> DType:
    """The type of the tensor that holds a field."""
    if a.dtype.kind not in "fiub":
        raise DTypeError(f"Dataset: a field holds numbers, not {a.dtype}")
    return DType.F32 if a.dtype.kind == "f" else DType.I32


class Order:
    """Which examples of a data set are in the batch of each step, as indices: it follows from the seed.

    n_epoch  steps of an epoch
    held     the batches of the examples that are held back for validation

    The data is shuffled once, in shards, and its last part is held back. Each epoch has the rest in an order of its
    own. The last batch of an epoch may be smaller.
    """

    def __init__(self, n: int, n_batch: int, seed: int, val_split: float, shard: int = 1) -> None:
        self._n, self._n_batch, self._seed, self._shard = n, n_batch, seed, shard
        self._train, held = split(-(-n // shard), val_split, seed)
        self.held = self._cut(held)
        self.n_epoch = len(self._cut(self._train))
        self._epoch, self._order = -1, list[Ints]()

    def __getitem__(self, step: int) -> Ints:
        epoch, at = divmod(step, self.n_epoch)
        if epoch != self._epoch:
            shuffled = np.random.default_rng((self._seed, epoch)).permutation(self._train)
            self._epoch, self._order = epoch, self._cut(shuffled)
        return self._order[at]

    def _cut(self, shards: Ints) -> list[Ints]:
        """The examples of these shards, in batches."""
        each = (shards[:, None] * self._shard + np.arange(self._shard, dtype=np.int32)).reshape(-1)
        each = each[each < self._n]
        return [each[i : i + self._n_batch] for i in range(0, len(each), self._n_batch)]


def split(n: int, val_split: float, seed: int) -> tuple[Ints, Ints]:
    """The indices 0 to n - 1, shuffled: those to train on, and a part `val_split` of them to hold back. Raises
    BatchError when nothing would be left for one of the two."""
    good = isinstance(val_split, Real) and not isinstance(val_split, bool) and 0 <= val_split < 1  # pyright: ignore[reportUnnecessaryIsInstance]
    if not good:
        raise BatchError(f"val_split must be a number from 0 on and below 1, not {val_split!r:.40}")
    order = np.random.default_rng(seed).permutation(n).astype(np.int32)
    n_held = round(val_split * n)
    if val_split and not 0 < n_held < n:
        raise BatchError(f"val_split={val_split} of {n} examples or shards leaves none for one of the two parts")
    return order[: n - n_held], order[n - n_held :]


def steps_of(epochs: float, n_epoch: int) -> int:
    """The steps of so many epochs. Raises BatchError."""
    if isinstance(epochs, bool) or not isinstance(epochs, Real) or not 0 < epochs < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BatchError(f"epochs must be a positive number, not {epochs!r:.40}")
    return max(1, math.ceil(epochs * n_epoch))
