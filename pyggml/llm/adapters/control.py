"""Control vectors (arXiv:2310.01405): a direction for each layer, which is added to the layer's result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Real
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pyggml.dtypes import DType
from pyggml.errors import ModelError, path_name, whole
from pyggml.gguf_io.read import open_gguf, says
from pyggml.gguf_io.write import GGUFOut, kv_record
from pyggml.types import Floats

from .lora import MAX_SCALE

_ARCH = "controlvector"
_HINT, _COUNT = f"{_ARCH}.model_hint", f"{_ARCH}.layer_count"
_ALIGNMENT = 32


class ControlVector:
    """Directions by layer, float32 [n_embd] each. Layers count from 1; the first layer, 0, has none, as in llama.cpp.

    `directions` may be an array [n, n_embd], whose first row is for layer 1. Control vectors can be added. Raises
    ModelError for values that are not directions.
    """

    def __init__(self, directions: Mapping[int, Any] | npt.ArrayLike, what: str = "the control vector") -> None:
        self.directions: dict[int, Floats] = {}
        if isinstance(directions, Mapping):
            rows: dict[int, Any] = dict(directions)
        else:
            try:
                array = np.asarray(directions)
            except ValueError:  # rows of different lengths
                array = np.empty(0, object)
            if array.ndim != 2 or array.dtype.kind not in "fiu":
                raise ModelError(
                    f"{what} must be numbers of shape [n_layer - 1, n_embd], not {array.dtype}{array.shape}"
                )
            rows = dict(enumerate(array, 1))
        for il, row in sorted(rows.items()):
            d = np.asarray(row)
            if il < 1 or d.ndim != 1 or d.dtype.kind not in "fiu" or not len(d):
                raise ModelError(f"{what}: direction.{il} must be numbers of shape [n_embd], of a layer from 1 on")
            with np.errstate(over="ignore"):  # infinities are refused below
                self.directions[int(il)] = d.astype(np.float32)
            if not np.isfinite(self.directions[int(il)]).all():
                raise ModelError(f"{what}: direction.{il} holds numbers that are not finite")
        sizes = {len(d) for d in self.directions.values()}
        if len(sizes) > 1:
            raise ModelError(f"{what}: its directions have {' and '.join(map(str, sorted(sizes)))} numbers")

    @property
    def n_embd(self) -> int:
        """The length of the directions; 0 when there are none."""
        return next((len(d) for d in self.directions.values()), 0)

    def __add__(self, other: ControlVector) -> ControlVector:
        if self.directions and other.directions and self.n_embd != other.n_embd:
            raise ModelError(f"control vectors of {self.n_embd} and {other.n_embd} numbers cannot be added")
        total = dict(self.directions)
        for il, d in other.directions.items():
            total[il] = total[il] + d if il in total else d
        return ControlVector(total)

    def save(self, path: str | os.PathLike[str], model_hint: str) -> None:
        """Write a GGUF file that llama.cpp reads: general.architecture `controlvector`, direction.N F32 [n_embd]. The
        file appears when it is complete. `model_hint`: the architecture of the model. Raises OSError."""
        kv = {"general.architecture": _ARCH, _HINT: model_hint, _COUNT: np.int32(len(self.directions))}
        infos = [(f"direction.{il}", DType.F32, (len(d),)) for il, d in self.directions.items()]
        with GGUFOut(path, [kv_record(k, v) for k, v in kv.items()], infos, _ALIGNMENT) as out:
            for d in self.directions.values():
                out.write_tensor([d])


Directions = ControlVector | str | os.PathLike[str] | npt.ArrayLike


def control_vector(
    vector: Directions | None, scale: float = 1.0, il_start: int = 1, il_end: int | None = None
) -> ControlVector:
    """`scale` times the directions of the layers `il_start` to `il_end` (both included; None: the last layer). `vector`
    is a GGUF file, a ControlVector, an array [n, n_embd] whose first row is layer 1's, or None: no direction.

    Raises GGUFError for a bad file; ModelError for bad directions, a scale that is not a number, and bad layers.
    """
    if isinstance(vector, (str, os.PathLike)):
        vector = load_control_vector(vector)
    elif not isinstance(vector, ControlVector):
        vector = ControlVector({} if vector is None else vector)
    start = whole("il_start", il_start, error=ModelError)
    last = max(vector.directions, default=0) if il_end is None else whole("il_end", il_end, error=ModelError)
    if not isinstance(scale, Real) or not abs(cast("float", scale)) <= MAX_SCALE:
        raise ModelError(f"the scale of a control vector must be a number up to {MAX_SCALE:g}, not {scale!r:.40}")
    rows = {il: d.astype(np.float64) * scale for il, d in vector.directions.items() if start <= il <= last}
    return ControlVector(rows)


def load_control_vector(path: str | os.PathLike[str]) -> ControlVector:
    """The control vector in a GGUF file. Raises GGUFError for a bad file, ModelError naming a tensor that is not a
    direction."""
    file = open_gguf(path_name(path, ModelError))
    if not says(file.kv, "general.architecture", _ARCH):
        found = file.kv.get("general.architecture")
        raise ModelError(f"{file.path}: is no control vector: general.architecture is {found!r:.60}, not {_ARCH!r}")
    directions: dict[int, Floats] = {}
    for t in file.tensors.values():
        prefix, _, layer = t.name.partition(".")
        if prefix != "direction" or not layer.isdecimal() or int(layer) < 1:
            raise ModelError(f"{file.path}: the tensor {t.name} is no direction.N of a layer from 1 on")
        if t.dtype is not DType.F32 or t.ne[1:] != (1, 1, 1):
            raise ModelError(f"{file.path}: {t.name} is {t.dtype.name} ne {list(t.ne)}, not F32 of one dimension")
        if int(layer) in directions:
            raise ModelError(f"{file.path}: there are two directions of layer {int(layer)}")
        directions[int(layer)] = file.tensor_bytes(t.name).view(np.float32)
    return ControlVector(directions, file.path)
