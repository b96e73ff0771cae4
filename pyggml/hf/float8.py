"""Read the small floats of checkpoints: 8 bits with a scale for a tensor, a row or a block of 128 x 128; and MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pyggml.codec import bf16_to_f32
from pyggml.errors import ModelError

from .safetensors import StoredTensor

_SCALES = ("weight_scale_inv", "weight_scale", "scale")
_OTHER_SCALES = ("input_scale", "activation_scale", "k_scale", "v_scale", "q_scale")  # not weights'
MX_BLOCKS, _MX_SCALES = "_blocks", "_scales"  # ends of the names of MXFP4 tensors
Floats = npt.NDArray[np.float32]


def is_scale(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor is a scale: of a weight of 8 bits, or of the activations beside it."""
    stem, _, end = name.rpartition(".")
    weight = stored.get(f"{stem}.weight")
    if name.endswith(_MX_SCALES) and name.removesuffix(_MX_SCALES) + MX_BLOCKS in stored:
        return True
    return end in (*_SCALES, *_OTHER_SCALES) and weight is not None and weight.dtype.startswith("F8")


def scale_of(t: StoredTensor, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """The scales of a weight of few bits, or None."""
    if t.name.endswith(MX_BLOCKS):
        return stored.get(t.name.removesuffix(MX_BLOCKS) + _MX_SCALES)
    if not t.dtype.startswith("F8"):
        return None
    stem = t.name.removesuffix("weight")
    return next((stored[stem + end] for end in _SCALES if stem + end in stored), None)


def f8_to_f32(bits: npt.NDArray[Any], dtype: str, scale: npt.NDArray[Any] | None, name: str) -> Floats:
    """Values of E4M3 (finite) or E5M2 times their scales. Raises ModelError for a scale of another shape."""
    x = _table(dtype)[bits]
    if scale is None:
        return x
    s = bf16_to_f32(scale) if scale.dtype == np.uint16 else scale.astype(np.float32)
    if s.size == 1:
        return x * s.reshape(())
    if s.ndim == 1:
        s = s[:, None]
    if s.ndim != x.ndim or any(n > m for n, m in zip(s.shape, x.shape, strict=True)):
        raise ModelError(f"the scale of {name} has shape {list(s.shape)}, which does not fit {list(x.shape)}")
    for axis, n in enumerate(x.shape):
        n_blocks = s.shape[axis]
        block = 128 if n_blocks == -(-n // 128) else -(-n // n_blocks)  # the last block may be cut
        s = np.repeat(s, block, axis)[(slice(None),) * axis + (slice(0, n),)]
    return x * s


def mxfp4_blocks(t: StoredTensor, scales: StoredTensor | None) -> npt.NDArray[np.uint8]:
    """ggml's blocks of MXFP4, uint8 [..., rows, 17 * blocks of a row], from nibbles [..., rows, blocks, 16] and
    exponents [..., rows, blocks]. Neighbours share a byte in the checkpoint, elements half a block apart in ggml.
    Raises ModelError when nibbles and exponents do not fit each other."""
    if scales is None or t.dtype != "U8" or (*scales.shape, 16) != t.shape:
        raise ModelError(f"{t.file.path}: {t.name} of shape {list(t.shape)} has no scales of its blocks")
    pairs = t.stored()
    values = np.stack((pairs & 0xF, pairs >> 4), -1).reshape(*pairs.shape[:-1], 32)
    packed = values[..., :16] | values[..., 16:] << 4
    blocks = np.concatenate((scales.stored()[..., None], packed), -1)
    return np.asarray(blocks.reshape(*blocks.shape[:-2], -1), np.uint8)


@cache
def _table(dtype: str) -> Floats:
    """The values of all 256 bytes."""
    b = np.arange(256)
    n_man = {"F8_E4M3": 3, "F8_E5M2": 2}[dtype]
    sign = np.where(b & 0x80, -1.0, 1.0)
    exp, man = (b & 0x7F) >> n_man, (b & ((1 << n_man) - 1)) / (1 << n_man)
    bias = {3: 7, 2: 15}[n_man]
    x = sign * np.where(exp == 0, man * 2.0 ** (1 - bias), (1 + man) * 2.0 ** (exp - float(bias)))
    if n_man == 3:
        x[(b & 0x7F) == 0x7F] = np.nan
    else:
        x[(exp == 31) & (man == 0)] = np.inf * sign[(exp == 31) & (man == 0)]
        x[(exp == 31) & (man != 0)] = np.nan
    return x.astype(np.float32)
