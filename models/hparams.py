"""Hyperparameters of a model, from the keys of its GGUF file or from plain keyword arguments. Names: llama.cpp's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from pyggml.errors import ModelError

PerLayer = int | tuple[int, ...]  # one value for all layers, or one for each

MAX_LAYERS, MAX_EXPERTS = 512, 512  # llama.cpp's; they keep a lying file from costing memory
_MAX_INT = 1 << 31
_ROPE_SCALING = ("none", "linear", "yarn", "longrope")


class LayerShape(NamedTuple):
    """The sizes of one layer that may differ from layer to layer, and what follows from them."""

    n_head: int
    n_head_kv: int
    n_ff: int
    n_embd_q: int  # n_head * n_embd_head_k
    n_embd_k_gqa: int  # elements of K per token: n_head_kv * n_embd_head_k
    n_embd_v_gqa: int
    n_embd_out: int  # what the attention's output product reads: n_head * n_embd_head_v


@dataclass(frozen=True, kw_only=True)
class HParams:
    """What a graph builder must know of a model; 0 asks for the default that follows from the others.

    `rope_freq_scale` is 1 / the factor of position scaling; `yarn_ext_factor` is 1 for YaRN, else 0 (-1: by
    `rope_scaling_type`). Raises ModelError for values that contradict each other.
    """

    n_vocab: int
    n_embd: int
    n_layer: int
    n_head: PerLayer
    n_ff: PerLayer
    n_ctx_train: int
    n_head_kv: PerLayer = 0  # n_head
    n_embd_head_k: int = 0  # n_embd / n_head
    n_embd_head_v: int = 0  # n_embd / n_head
    n_rot: int = 0  # n_embd_head_k
    f_norm_rms_eps: float = 1e-5
    f_attention_scale: float = 0.0  # 1 / sqrt(n_embd_head_k)
    rope_freq_base: float = 10000.0
    rope_scaling_type: str = "linear"
    rope_freq_scale: float = 1.0
    rope_attn_factor: float = 1.0
    n_ctx_orig_yarn: int = 0  # n_ctx_train
    yarn_ext_factor: float = -1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    n_expert: int = 0
    n_expert_used: int = 0
    causal_attn: bool = True  # tokens do not see those after them
    f_max_alibi_bias: float = 0.0  # ALiBi's largest slope exponent; 0: none
    n_swa: int = 0  # positions that a sliding-window layer sees, its own included; 0: there are no such layers
    swa_pattern: int = 0  # every swa_pattern-th layer sees all; 0: all layers have the window

    def __post_init__(self) -> None:
        for name in ("n_vocab", "n_embd", "n_layer", "n_ctx_train"):
            self._in_range(name, getattr(self, name))
        if self.n_layer > MAX_LAYERS:
            _refuse("n_layer", self.n_layer, f"more than the {MAX_LAYERS} layers supported")
        self._set("n_head", self._per_layer("n_head", self.n_head))
        self._set("n_ff", self._per_layer("n_ff", self.n_ff))
        self._set("n_head_kv", self._per_layer("n_head_kv", self.n_head_kv) if self.n_head_kv else self.n_head)
        heads = self._layers(self.n_head)
        for name in ("n_embd_head_k", "n_embd_head_v"):
            if not getattr(self, name) and self.n_embd % heads[0]:
                _refuse("n_head", heads[0], f"n_embd {self.n_embd} is no multiple of it, and no {name} is given")
            self._set(name, getattr(self, name) or self.n_embd // heads[0])
            self._in_range(name, getattr(self, name))
        for n_head, n_head_kv in zip(heads, self._layers(self.n_head_kv), strict=True):
            if n_head % n_head_kv:
                _refuse("n_head_kv", n_head_kv, f"n_head {n_head} is no multiple of it")
        self._set("n_rot", self.n_rot or self.n_embd_head_k)
        if self.n_rot % 2 or not 0 < self.n_rot <= self.n_embd_head_k:
            _refuse("n_rot", self.n_rot, f"it must be even and at most n_embd_head_k {self.n_embd_head_k}")
        self._set("n_ctx_orig_yarn", self.n_ctx_orig_yarn or self.n_ctx_train)
        self._set("f_attention_scale", self.f_attention_scale or 1.0 / math.sqrt(self.n_embd_head_k))
        if self.rope_scaling_type not in _ROPE_SCALING:
            _refuse("rope_scaling_type", self.rope_scaling_type, f"known are {', '.join(_ROPE_SCALING)}")
        if self.yarn_ext_factor < 0:
            self._set("yarn_ext_factor", 1.0 if self.rope_scaling_type == "yarn" else 0.0)
        if self.rope_scaling_type == "none":
            self._set("rope_freq_scale", 1.0)
        if not 0 <= self.n_expert <= MAX_EXPERTS:
            _refuse("n_expert", self.n_expert, f"it must be 0 to {MAX_EXPERTS}")
        for name in ("n_swa", "swa_pattern"):
            if not 0 <= getattr(self, name) < _MAX_INT:
                _refuse(name, getattr(self, name), "it must not be negative")
        if not (0 < self.n_expert_used <= self.n_expert or self.n_expert == self.n_expert_used == 0):
            _refuse("n_expert_used", self.n_expert_used, f"there are {self.n_expert} experts")

    def layer(self, il: int) -> LayerShape:
        """The sizes of layer `il`."""
        n_head, n_head_kv = _of(self.n_head, il), _of(self.n_head_kv, il)
        k, v = self.n_embd_head_k, self.n_embd_head_v
        return LayerShape(n_head, n_head_kv, _of(self.n_ff, il), n_head * k, n_head_kv * k, n_head_kv * v, n_head * v)

    def is_swa(self, il: int) -> bool:
        """Whether layer `il` attends to a sliding window only."""
        return self.n_swa > 0 and (self.swa_pattern == 0 or il % self.swa_pattern < self.swa_pattern - 1)

    @classmethod
    def from_kv(cls, arch: str, kv: Mapping[str, object]) -> HParams:
        """The hparams in a GGUF's metadata, keys prefixed with `arch`.

        Raises ModelError naming the key that is missing, of another type or out of range.
        """
        r = _Reader(arch, kv)
        factor = r.number("rope.scaling.factor", None)
        if factor is None:
            factor = r.number("rope.scale_linear", 0.0)  # what old files call it
        scaling = r.text("rope.scaling.type", "linear")
        if scaling not in _ROPE_SCALING:
            r.fail("rope.scaling.type", f"is {scaling!r}; known are {', '.join(_ROPE_SCALING)}")
        n_head = r.per_layer("attention.head_count")
        try:
            return cls(
                n_vocab=r.integer("vocab_size", None) or r.n_tokens(),
                n_embd=r.integer("embedding_length"),
                n_layer=r.integer("block_count"),
                n_head=n_head,
                n_ff=r.per_layer("feed_forward_length"),
                n_ctx_train=r.integer("context_length"),
                n_head_kv=r.per_layer("attention.head_count_kv", n_head),
                n_embd_head_k=r.integer("attention.key_length", 0),
                n_embd_head_v=r.integer("attention.value_length", 0),
                n_rot=r.integer("rope.dimension_count", 0),
                f_norm_rms_eps=r.number("attention.layer_norm_rms_epsilon"),
                f_attention_scale=r.number("attention.scale", 0.0),
                rope_freq_base=r.number("rope.freq_base", 10000.0),
                rope_scaling_type=scaling,
                rope_freq_scale=1.0 / factor if factor else 1.0,
                rope_attn_factor=r.number("rope.scaling.attn_factor", 1.0)
                * r.number("rope.scaling.yarn_attn_factor", 1.0),
                n_ctx_orig_yarn=r.integer("rope.scaling.original_context_length", 0),
                yarn_ext_factor=r.number("rope.scaling.yarn_ext_factor", -1.0),
                yarn_beta_fast=r.number("rope.scaling.yarn_beta_fast", 32.0),
                yarn_beta_slow=r.number("rope.scaling.yarn_beta_slow", 1.0),
                n_expert=r.integer("expert_count", 0),
                n_expert_used=r.integer("expert_used_count", 0),
            )
        except ModelError as e:
            raise ModelError(f"{e} (the keys {arch}.*)") from None

    # -- checks ---------------------------------------------------------------------------------------------------

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _in_range(self, name: str, value: int) -> None:
        if not 0 < value < _MAX_INT:
            _refuse(name, value, "it must be a positive 32-bit number")

    def _per_layer(self, name: str, value: PerLayer) -> PerLayer:
        """One int where all layers agree, else a tuple with a value for each."""
        values = value if isinstance(value, tuple) else (value,)
        if len(values) not in (1, self.n_layer):
            _refuse(name, f"{len(values)} values", f"there are {self.n_layer} layers")
        for v in values:
            self._in_range(name, v)
        return values[0] if len(set(values)) == 1 else values

    def _layers(self, value: PerLayer) -> tuple[int, ...]:
        return value if isinstance(value, tuple) else (value,) * self.n_layer


def _of(value: PerLayer, il: int) -> int:
    return value[il] if isinstance(value, tuple) else value


def _refuse(name: str, value: object, why: str) -> NoReturn:
    raise ModelError(f"hyperparameter {name} = {value}: {why}")


class _Required:
    """The default of a key without one."""


class _Reader:
    """Typed access to the keys of one architecture."""

    def __init__(self, arch: str, kv: Mapping[str, object]) -> None:
        self.arch, self.kv = arch, kv

    def fail(self, name: str, text: str) -> NoReturn:
        raise ModelError(f"the key {self.arch}.{name} {text}")

    def get(self, name: str, default: object) -> Any:
        value = self.kv.get(f"{self.arch}.{name}", default)
        if value is _Required:
            self.fail(name, "is missing")
        return value

    def integer(self, name: str, default: Any = _Required) -> int:
        value = self.get(name, default)
        if value is None:
            return 0
        if type(value) is not int or not 0 <= value < _MAX_INT:
            self.fail(name, f"must be an integer from 0 to {_MAX_INT - 1}, not {value!r}")
        return value

    def number(self, name: str, default: Any = _Required) -> Any:
        value = self.get(name, default)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value):
            self.fail(name, f"must be a finite number, not {value!r}")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            self.fail(name, f"must be a string, not {value!r}")
        return value

    def per_layer(self, name: str, default: Any = _Required) -> PerLayer:
        value = self.get(name, default)
        if isinstance(value, np.ndarray):
            values = cast("Sequence[object]", value.tolist())
            if not values or not all(type(v) is int and 0 < v < _MAX_INT for v in values):
                self.fail(name, "must hold positive integers, one for each layer")
            return tuple(cast("Sequence[int]", values))
        if value is default and isinstance(value, tuple):
            return cast("tuple[int, ...]", value)
        if type(value) is not int or not 0 < value < _MAX_INT:
            self.fail(name, f"must be a positive integer, not {value!r}")
        return value

    def n_tokens(self) -> int:
        tokens = self.kv.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list):
            self.fail("vocab_size", "is missing, and so are tokenizer.ggml.tokens")
        return len(cast("list[object]", tokens))
