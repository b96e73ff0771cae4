"""Hyperparameters of towers, out of the keys `clip.vision.*` and `clip.audio.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from pyggml.errors import ModelError
from pyggml.gguf_io.keys import Keys

from ..hparams import MAX_LAYERS, Activation
from ..metadata import ACTIVATIONS, Reader, read_activation

T = TypeVar("T", bound="TowerHParams")


@dataclass(frozen=True, kw_only=True)
class TowerHParams:
    """What all towers have.

    n_embd, n_ff, n_layer, n_head   sizes of the encoder
    n_embd_out                      elements of a row of features: those of the text model's embeddings
    eps                             of the norms
    act                             of the encoder's networks
    """

    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    n_embd_out: int
    eps: float
    act: Activation


@dataclass(frozen=True, kw_only=True)
class VisionHParams(TowerHParams):
    """What all towers for pictures have: `image_size`, the side in pixels of the pictures that the tower was trained
    on, and `patch_size`, the side of a patch."""

    image_size: int
    patch_size: int

    @property
    def side(self) -> int:
        """How many patches a side of a picture had in training."""
        return self.image_size // self.patch_size


def read_tower(cls: type[T], r: Reader, act: Activation, /, **own: Any) -> T:
    """Read the hyperparameters of one tower: those of all towers, and `own`. `act`: when the file names no activation.

    Raises ModelError that names the key when it is missing, has another type, or is out of range.
    """
    found: dict[str, Any] = {
        "n_embd": r.integer(Keys.LLM.EMBEDDING_LENGTH),
        "n_ff": r.integer(Keys.LLM.FEED_FORWARD_LENGTH),
        "n_layer": r.integer(Keys.LLM.BLOCK_COUNT),
        "n_head": r.integer(Keys.Attention.HEAD_COUNT),
        "n_embd_out": r.integer("{arch}.projection_dim"),
        "eps": r.number(Keys.Attention.LAYERNORM_EPS),
        "act": read_activation(r) or act,
        **own,
    }
    n_embd, n_head = found["n_embd"], found["n_head"]
    if not 0 < found["n_layer"] <= MAX_LAYERS:
        r.fail(Keys.LLM.BLOCK_COUNT, f"is {found['n_layer']}: 1 to {MAX_LAYERS} layers are supported")
    if not n_head or not n_embd or n_embd % n_head or n_embd // n_head % 4:
        r.fail(Keys.Attention.HEAD_COUNT, f"is {n_head}: {n_embd} elements make no such heads")
    if found["eps"] < 0:
        r.fail(Keys.Attention.LAYERNORM_EPS, f"is {found['eps']}: a norm adds no negative number")
    for key in ("n_ff", "n_embd_out"):
        if not found[key]:
            raise ModelError(f"{r.arch}: {key} must be positive")
    return cls(**found)


def read_vision(cls: type[T], r: Reader, act: Activation = "gelu", /, **own: Any) -> T:
    """As `read_tower`, for towers that see (`VisionHParams`)."""
    image, patch = r.integer("{arch}.image_size"), r.integer("{arch}.patch_size")
    if not 0 < patch <= image <= 1 << 16:
        r.fail("{arch}.patch_size", f"is {patch}: a picture of {image} pixels has no such patches")
    return read_tower(cls, r, act, image_size=image, patch_size=patch, **own)


def read_mm_act(r: Reader, default: Activation = "gelu_erf") -> Activation:
    """The activation of a projector or pooler, by the transformers library's name."""
    key = "{arch}.projector.hidden_activation"
    name = r.text(key, "")
    if name and name not in ACTIVATIONS:
        r.fail(key, f"is {name!r}; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name] if name else default
