"""What a tower is: its names, how its hyperparameters are read, its builder, and what its results become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pyggml.errors import GGMLError, ModelError, ShapeError
from pyggml.media import Features

from ..blocks.tower import TowerBuild, TowerSize
from ..metadata import Reader
from ..weights import Weights
from .hparams import TowerHParams, VisionHParams

Array = npt.NDArray[Any]
Arrays = Mapping[str, Any]  # what a processor gives, by its names
H = TypeVar("H", bound=TowerHParams)
H_co = TypeVar("H_co", bound=TowerHParams, covariant=True)


class Encoded(NamedTuple):
    """What a tower makes of one picture or sound: the features, and, of encoders for search, the embedding of the
    whole, float32 [n_embd_out]; of those that classify, the scores of the classes, float32 [n_classes]."""

    features: Features
    embedding: Array | None = None
    scores: Array | None = None


class TowerRun(Protocol[H_co]):
    """Runs a loaded tower. Calling it runs the graph of that size on `inputs` (float32 or int32, NumPy order), and
    gives the graph's results by name, in NumPy order. `tensor(name)` gives the values of a weight in float32, None for
    one that the tower lacks."""

    @property
    def hparams(self) -> H_co: ...
    def tensor(self, name: str) -> Array | None: ...
    def __call__(self, size: TowerSize, **inputs: Array) -> Mapping[str, Array]: ...


@dataclass(frozen=True)
class Tower(Generic[H]):
    """How the towers of one or more names are read, built and run.

    names   values of `clip.projector_type`
    read    reads the hyperparameters; the reader's `{arch}` is `clip.vision` or `clip.audio`
    build   records the graph of `b.size`, with `b.result("features", ...)`. The tensors that it asks of `b.weights` are
            those that a file must or may have
    encode  what the results become, given the arrays that the processor makes of one picture or sound. It raises
            ShapeError for arrays that do not fit
    least   the size of a small graph, which is built to learn what the tensors are
    side    `v`: it sees; `a`: it hears; `t`: it reads
    """

    names: tuple[str, ...]
    read: Callable[[Reader], H]
    build: Callable[[TowerBuild[H]], None]
    encode: Callable[[TowerRun[H], Arrays], Encoded]
    least: Callable[[H], TowerSize]
    side: str = "v"

    def hparams(self, kv: Mapping[str, object]) -> H:
        """The hyperparameters in a file's metadata. Raises ModelError naming the key that is missing or wrong."""
        return self.read(Reader({"v": "clip.vision", "a": "clip.audio", "t": "clip.text"}[self.side], kv))

    def graph(self, hp: H, weights: Weights, size: TowerSize) -> TowerBuild[H]:
        """The graph of that size."""
        b = TowerBuild(hp, weights, self.side, size)
        with b.ctx:
            self.build(b)
        return b

    def declare(self, hp: H, weights: Weights) -> None:
        """Let the builder ask for all its weights. Raises ModelError naming the tensor that is missing or has another
        shape."""
        try:
            self.graph(hp, weights, self.least(hp))
        except ModelError:
            raise
        except GGMLError as e:
            raise ModelError(f"the hyperparameters of {self.names[0]} make no graph: {e}") from e


def squares_of(arrays: Arrays, hp: VisionHParams, n: int | None = None) -> Array:
    """`pixel_values` of `n` pictures or tiles (None: of any number), as many of their pixels as whole patches have:
    with SigLIP so400m/14-384 these are 378 of 384. Raises ShapeError as `array_of`."""
    size = hp.side * hp.patch_size
    return array_of(arrays, "pixel_values", (n, 3, hp.image_size, hp.image_size))[:, :, :size, :size]


def array_of(arrays: Arrays, name: str, shape: tuple[int | None, ...], dtype: type = np.float32) -> Array:
    """The array of that name, with a size of its own where `shape` has None. Leading dimensions of size 1 may be more
    or fewer. Raises ShapeError for a missing array, and for another shape."""
    if name not in arrays:
        raise ShapeError(f"the tower reads {name}, which the processor did not give: {', '.join(arrays) or 'nothing'}")
    try:
        a: Array = np.asarray(arrays[name], np.dtype(dtype))
    except (TypeError, ValueError) as e:
        raise ShapeError(f"{name} must be an array of numbers: {e}") from None
    found = a.shape
    while a.ndim > len(shape) and a.shape[0] == 1:
        a = a[0]
    if a.ndim == len(shape) - 1:
        a = a[None]
    fits = a.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, a.shape, strict=True)) and a.size > 0
    if not fits:
        want = ", ".join("any" if n is None else str(n) for n in shape)
        raise ShapeError(f"{name} has the shape {list(found)}; the tower reads [{want}]")
    return a
