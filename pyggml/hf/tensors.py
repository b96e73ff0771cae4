"""Turn the tensors of a checkpoint into tensors of a GGUF: renamed, moved, and read when they are wanted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pyggml.codec import bf16_to_f32, f32_to_bf16
from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.models.hparams import MAX_LAYERS
from pyggml.tensor import full_ne

from .family import Array, Change, Family
from .float8 import MX_BLOCKS, f8_to_f32, is_scale, mxfp4_blocks, scale_of
from .moves import Merged, Move, Shape, Sizes, Value
from .safetensors import StoredTensor

Bytes = npt.NDArray[np.uint8]

_STORED_AS = {"BF16": DType.BF16, "F16": DType.F16, "F32": DType.F32, "F64": DType.F32}
_AS_NUMPY = {DType.BF16: np.dtype("<u2"), DType.F16: np.dtype("<f2"), DType.F32: np.dtype("<f4")}
_F32_ROLES = (  # llama.cpp keeps these matrices in F32, and all vectors
    *("ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd", "token_types", "ssm_conv1d", "shortconv.conv"),
    *("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "altup_correct_coef", "altup_predict_coef", "indexer.proj"),
)
_BARE = (".ssm_a", ".ssm_d")  # ends of names that have no suffix `.weight`
_EXPERT = re.compile(
    r"^(.*\b(?:experts|altup_projections|altup_unembed_projections|[qk]_layernorm\.norms))\.(\d+)\.(.*)$"
)
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class MovedTensor:
    """One tensor of the checkpoint, and how it becomes a tensor of the GGUF. `pick`: which result of `merged` is
    taken."""

    source: StoredTensor
    scale: StoredTensor | None
    steps: Sequence[Move | Value]
    sizes: Sizes
    merged: Merged | None = None
    pick: int = 0

    def read(self) -> Array:
        """The elements after all moves. They have the type in which they are stored, or F32 when values were
        changed."""
        a = self.source.stored()
        if self.source.name.endswith(MX_BLOCKS):
            a = mxfp4_blocks(self.source, self.scale)
        elif self.source.dtype.startswith("F8"):
            a = f8_to_f32(a, self.source.dtype, None if self.scale is None else self.scale.stored(), self.source.name)
        elif self.source.dtype == "F64":
            a = a.astype(np.float32)
        try:
            if self.merged is not None:
                a = self.merged.there(a, self.sizes)[self.pick]
            for step in self.steps:
                a = step.there(as_f32(a)) if isinstance(step, Value) else step.there(a, self.sizes)
        except FloatingPointError as e:
            raise ModelError(
                f"{self.source.file.path}: the tensor {self.source.name} has a value of no use: {e}"
            ) from None
        except (ValueError, IndexError, ZeroDivisionError) as e:
            raise misshapen(self.source, str(e)) from None
        return a

    def shape(self) -> Shape:
        """The shape of the array that `read` gives."""
        shape = self.source.shape
        if 0 in shape:
            raise misshapen(self.source, "it holds nothing")
        if self.source.name.endswith(MX_BLOCKS):
            shape = (*shape[:-2], shape[-2] * 32)
        try:
            if self.merged is not None:
                shape = self.merged.shapes(shape, self.sizes)[self.pick]
            for step in self.steps:
                shape = shape if isinstance(step, Value) else step.shape(shape, self.sizes)
        except (ValueError, IndexError, ZeroDivisionError) as e:
            raise misshapen(self.source, str(e)) from None
        if min(shape, default=1) < 1:
            raise misshapen(self.source, f"it would have the shape {list(shape)}")
        return shape


def misshapen(t: StoredTensor, why: str) -> ModelError:
    """The error for a tensor whose shape does not fit its move."""
    return ModelError(f"{t.file.path}: the tensor {t.name} of shape {list(t.shape)} is not as the config says: {why}")


def as_f32(a: Array) -> Array:
    """Convert an array to F32. It holds F32, F16, or the bits of BF16 (as uint16)."""
    return bf16_to_f32(a) if a.dtype == np.uint16 else a.astype(np.float32, copy=False)


@dataclass(frozen=True)
class HFTensor:
    """A tensor as it will be in the GGUF. It is read a few rows at a time. `ne` has four entries."""

    name: str
    dtype: DType
    ne: tuple[int, int, int, int]
    n_dims: int
    parts: Sequence[MovedTensor] = ()
    array: Array | None = field(default=None, compare=False)  # the elements, when the tensor is in no file
    n_pad: int = 0  # how many copies of the first row follow the other rows
    scale: Array | None = field(default=None, compare=False)  # [rows or 1, elements or 1]: factors of the elements

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in `dtype`."""
        return self.dtype.row_size(self.ne[0]) * math.prod(self.ne[1:])

    def mapped(self) -> StoredTensor | None:
        """The stored tensor when it can be used as it is; None when something must be done to it."""
        if len(self.parts) != 1 or self.parts[0].steps or self.parts[0].merged is not None or self.n_pad:
            return None
        if self.scale is not None:
            return None
        t = self.parts[0].source
        fits = _STORED_AS.get(t.dtype) is self.dtype and t.dtype != "F64"
        return t if fits and t.offset % _AS_NUMPY[self.dtype].itemsize == 0 else None

    def rows(self, n_elements: int) -> Iterator[Bytes]:
        """The tensor's bytes in pieces, uint8 [rows, bytes of a row]. A piece has about `n_elements` elements and lies
        within one matrix."""
        n, per_matrix = self.ne[0], self.ne[1]
        width = self.dtype.row_size(n) if self.dtype.is_quantized else n
        step = max(1, n_elements // max(n, 1))
        for a, release in self._arrays():
            rows = a.reshape(-1, width)
            for first in range(0, len(rows), per_matrix):
                end = min(first + per_matrix, len(rows))
                for i in range(first, end, step):
                    piece = _converted(self._scaled(rows, i, min(i + step, end)), self.dtype)
                    yield piece.view(np.uint8).reshape(len(piece), -1)
                    release()  # so that the pages of the mapping do not stay in memory

    def _scaled(self, rows: Array, i: int, j: int) -> Array:
        if self.scale is None:
            return rows[i:j]
        return as_f32(rows[i:j]) * (self.scale if len(self.scale) == 1 else self.scale[i:j])

    def _arrays(self) -> Iterator[tuple[Array, Callable[[], None]]]:
        if self.array is not None:
            yield self.array, lambda: None
        for part in self.parts:
            yield part.read(), part.source.release
        if self.n_pad:
            first = self.parts[0].read()[:1]
            yield np.repeat(first, self.n_pad, 0), lambda: None


def _converted(rows: Array, dtype: DType) -> Array:
    if not dtype.is_quantized and rows.dtype != _AS_NUMPY[dtype]:
        rows = as_f32(rows)
        rows = f32_to_bf16(rows) if dtype is DType.BF16 else rows.astype(_AS_NUMPY[dtype])
    return np.ascontiguousarray(rows)


def text_name(hf: str) -> str:
    """A tensor's name in the checkpoint, without the prefix that the tensors of the text model have when the model
    also sees or hears."""
    for prefix, text in _PREFIXES:
        if hf.startswith(prefix):
            return text + hf.removeprefix(prefix)
    return hf


def count_nextn(family: Family, n_layer: int, stored: Iterable[str]) -> int:
    """How many drafting layers a checkpoint has after its `n_layer` other layers. A layer counts when the checkpoint
    has the tensor that joins the two inputs of a drafting layer."""
    nextn, names = family.nextn, {text_name(name) for name in stored}
    for i in range(0 if nextn is None else MAX_LAYERS):
        assert nextn is not None
        layer = nextn.layer(i, n_layer, family.layers)
        joins, begin = text_name(f"{nextn.named('nextn.eh_proj', layer)}.weight"), text_name(f"{layer}.")
        if joins not in names or not any(name.startswith(begin) for name in names):
            return i
    return 0


class Tensors:
    """Turns the tensors of a checkpoint into tensors of a GGUF. Raises ModelError for a tensor with an unknown name."""

    def __init__(
        self,
        family: Family,
        n_layer: int,
        sizes: Sizes,
        scaled: Mapping[str, float | Array] | None = None,
        n_nextn: int = 0,
    ) -> None:
        """`n_nextn`: how many of the `n_layer` layers are drafting layers, which come last."""
        import gguf  # takes a while to import

        archs = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        self.family, self.sizes, self._scaled = family, sizes, scaled or {}
        self._map = gguf.get_tensor_name_map(archs[family.table or family.arch], n_layer)
        self._names = [(re.compile(pattern), text) for pattern, text in family.names.items()]
        self._skip = [re.compile(pattern) for pattern in (*_NEVER, *family.skip)]
        # The prefix of a drafting layer's names -> their prefix when it counts as a layer after those of the model.
        self._nextn_layers: list[tuple[str, str]] = []
        # Names that only drafting layers have -> names in a GGUF; both without suffixes.
        self._of_nextn: dict[str, list[str]] = {}
        for i, nextn in enumerate([family.nextn] * n_nextn):
            assert nextn is not None, family
            il = n_layer - n_nextn + i
            layer = nextn.layer(i, n_layer - n_nextn, family.layers)
            self._nextn_layers.append((f"{text_name(layer)}.", f"{family.layers}.{il}."))
            for role in nextn.own:
                self._of_nextn.setdefault(text_name(nextn.named(role, layer) or ""), []).append(f"blk.{il}.{role}")

    def name(self, hf: str) -> str | None:
        """The GGUF's name, with its suffix, of a tensor of the checkpoint; None when gguf's tables do not have it."""
        hf = text_name(hf)
        for pattern, text in self._names:
            hf = pattern.sub(text, hf)
        if hf.startswith("="):
            return hf[1:]
        for name in (hf, hf.partition(".")[2], f"model.{hf}", f"{hf}.weight"):
            found = self._map.get_name(name, try_suffixes=(".weight", ".bias"))
            if found is not None:
                return found if found.endswith((".weight", ".bias", *_BARE)) else f"{found}.weight"
        return None

    def make(self, stored: Mapping[str, StoredTensor], extra: Mapping[str, Array]) -> dict[str, HFTensor]:
        """The tensors by their GGUF names, in the order of the layers."""
        parts: dict[str, dict[int, MovedTensor]] = {}
        for t in stored.values():
            if is_scale(t.name, stored) or any(p.search(t.name) for p in self._skip):
                continue
            for name, expert, part in self._parts(t, scale_of(t, stored)):
                twin = parts.setdefault(name, {}).setdefault(expert, part)
                if twin is not part:
                    raise ModelError(f"{t.file.path}: {t.name} and {twin.source.name} both are {name}")
        made = {name: HFTensor(name, DType.F32, full_ne(a.shape[::-1]), a.ndim, array=a) for name, a in extra.items()}
        made |= {name: self._tensor(name, of) for name, of in parts.items()}
        return {t.name: t for t in sorted(made.values(), key=_order)}

    def _parts(self, t: StoredTensor, scale: StoredTensor | None) -> Iterator[tuple[str, int, MovedTensor]]:
        hf = text_name(t.name)
        found = _EXPERT.match(hf)
        hf, expert = (f"{found[1]}.{found[3]}", int(found[2])) if found else (hf, -1)
        stem, _, suffix = hf.rpartition(".")
        for own in self._of_nextn.get(stem, ()):
            name = f"{own}.{suffix}"
            yield name, expert, MovedTensor(t, scale, self._moves(t, name), self.sizes)
        if stem in self._of_nextn:
            return
        for begin, text in self._nextn_layers:
            hf = text + hf.removeprefix(begin) if hf.startswith(begin) else hf
        for end, merged in self.family.merged.items():
            if hf.endswith(end):
                layer = self._layer(hf)
                for i, role in enumerate(merged.roles):
                    name = f"blk.{layer}.{role}" if role.endswith(".bias") else f"blk.{layer}.{role}.weight"
                    yield name, expert, MovedTensor(t, scale, self._moves(t, name), self.sizes, merged, i)
                return
        name = self.name(hf)
        if name is None or ".nextn." in name:  # ".nextn.": a drafting layer among the model's own layers
            raise ModelError(f"{t.file.path}: the tensor {t.name} is not known to {self.family.types[0]}")
        yield name, expert, MovedTensor(t, scale, self._moves(t, name), self.sizes)

    def _moves(self, t: StoredTensor, name: str) -> Sequence[Change]:
        return () if t.name.endswith(MX_BLOCKS) else self.family.moves_of(name)  # `mxfp4_blocks` moves those

    @staticmethod
    def _layer(name: str) -> int:
        found = re.search(r"\.(\d+)\.", name)
        assert found is not None, name
        return int(found[1])

    def _tensor(self, name: str, of: Mapping[int, MovedTensor]) -> HFTensor:
        parts = [of[i] for i in sorted(of)]
        first = parts[0]
        shape = first.shape()
        for p in parts[1:]:
            if p.shape() != shape or p.source.dtype != first.source.dtype:
                raise misshapen(p.source, f"{first.source.name} has {list(first.source.shape)} {first.source.dtype}")
        if sorted(of)[-1] >= len(of):
            missing = next(i for i in range(len(of) + 1) if i not in of)
            raise ModelError(f"{first.source.file.path}: {first.source.name} is there, that of expert {missing} is not")
        if min(of) >= 0:
            shape = (len(parts), *shape)
        role = (
            name.removesuffix(".weight").split(".", 2)[-1] if name.startswith("blk.") else name.removesuffix(".weight")
        )
        if first.source.name.endswith(MX_BLOCKS):
            return HFTensor(name, DType.MXFP4, full_ne(shape[::-1]), len(shape), parts)
        n_pad = max(self.sizes.ints("vocab_size") - shape[0], 0) if role in self.family.padded else 0
        shape = (shape[0] + n_pad, *shape[1:])
        f32 = len(shape) < 2 or not name.endswith(".weight") or role.endswith("_norm") or role in _F32_ROLES
        scale = self._scale(first.source, role, shape)
        rounds = scale is not None and bool((np.frexp(scale)[0] != 0.5).any())  # powers of two are exact
        dtype = DType.F32 if f32 or rounds else _STORED_AS.get(first.source.dtype, DType.BF16)
        return HFTensor(name, dtype, full_ne(shape[::-1]), len(shape), parts, n_pad=n_pad, scale=scale)

    def _scale(self, t: StoredTensor, role: str, shape: Shape) -> Array | None:
        if role not in self._scaled:
            return None
        scale = np.asarray(self._scaled[role], np.float32).reshape(-1)
        if len(scale) not in (1, shape[0]):
            raise misshapen(t, f"it has {shape[0]} rows, not {len(scale)}")
        return scale.reshape(-1, 1) if len(shape) > 1 else scale.reshape(1, -1)


# The prefixes of text models in models that also see or hear.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
    ("llm.model.", "model."),
    ("llm.lm_head.", "lm_head."),
    ("model.mtp.", "mtp."),
)
# Tensors of towers and projectors, which a text model leaves aside: the parts that their names begin with (after
# `model.`), and tensors that belong to a projector alone.
TOWERS = re.compile(
    r"^(model\.)?((vision_tower|visual|vision_model|audio_tower|multi_modal_projector|embed_vision|embed_audio|connector"
    r"|merger|vpm|resampler|apm|audio_projection_layer|tts)\.|image_newline$)"
)
# Buffers that are computed from the config.
_NEVER = (
    r"rotary_emb\.inv_freq$",
    r"\.rotary_emb\.",
    r"\.attention\.(masked_)?bias$",
    r"\.attn\.(masked_)?bias$",
)


def _order(t: HFTensor) -> tuple[int, int]:
    found = _LAYER.match(t.name)
    if found:
        return 1, int(found[1])
    return (2 if t.name.startswith("output") else 0), 0
