"""Hyperparameters out of a GGUF's metadata, under the keys of the `gguf` package, with llama.cpp's defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from pyggml.errors import ModelError
from pyggml.gguf_io.keys import Keys

from .hparams import (
    MAX_INT,
    ROPE_SCALING,
    Activation,
    AttnTemperature,
    Gating,
    H,
    NormKind,
    PerLayer,
    Pooling,
    RankHead,
    Router,
)

T = TypeVar("T")
_GATING: tuple[tuple[Gating, bool], ...] = (  # values of `expert_gating_func` from 1: (gating, of_selected)
    ("softmax", False),
    ("sigmoid", False),
    ("softmax", True),
    ("sqrt_softplus", False),
)
PLAIN_ROPE: dict[str, Any] = {"rope_freq_scale_swa": 1.0, "yarn_ext_factor_swa": 0.0, "rope_attn_factor_swa": 1.0}
_HIDDEN_ACT = "{arch}.hidden_activation"
ACTIVATIONS: dict[str, Activation] = {  # the transformers library's names; gelu is the exact one
    **dict.fromkeys(("gelu", "gelu_python"), "gelu_erf"),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu"),
    "quick_gelu": "gelu_quick",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu_sqr",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}
_POOLING: tuple[Pooling, ...] = ("none", "mean", "cls", "last", "rank")  # values of `pooling_type` from 0


class _Required:
    """The default of a key without one."""


class Reader:
    """Typed access to the metadata of one architecture. Keys are the gguf package's (`Keys.LLM.CONTEXT_LENGTH`).

    A method takes a default for a key that a file may lack. It raises ModelError naming a key that is missing and has
    no default, or whose value has another type or is out of range. With `head`, the number of a draft head, arrays give
    the value for that head, not those for the model's own layers.
    """

    def __init__(self, arch: str, kv: Mapping[str, object], head: int | None = None) -> None:
        self.arch, self.kv, self._head = arch, kv, head

    @property
    def n_layer(self) -> int:
        """The layers of the model: the blocks of the file without the draft heads, which come last."""
        return self.integer(Keys.LLM.BLOCK_COUNT) - self.integer(Keys.LLM.NEXTN_PREDICT_LAYERS, 0)

    @property
    def layers(self) -> range:
        """The blocks that this reader is for: the model's layers, or the one of the draft head."""
        first = self.n_layer
        return range(first) if self._head is None else range(first + self._head, first + self._head + 1)

    def of_layers(self, values: Sequence[T]) -> tuple[T, ...]:
        """The values of `layers`, from an array with a value for each block of the file."""
        if len(values) == 1 or not self.integer(Keys.LLM.NEXTN_PREDICT_LAYERS, 0):
            return tuple(values)
        if len(values) == self.n_layer:  # no values for draft heads: they are as the last layer
            return tuple(values) if self._head is None else tuple(values[-1:])
        return tuple(values[self.layers.start : self.layers.stop])

    def name(self, key: str) -> str:
        """`{arch}.context_length` -> `llama.context_length`."""
        return key.format(arch=self.arch)

    def fail(self, key: str, text: str) -> NoReturn:
        """Raise the ModelError about a key."""
        raise ModelError(f"the key {self.name(key)} {text}")

    def get(self, key: str, default: object = _Required) -> Any:
        """The value, of any type."""
        value = self.kv.get(self.name(key), default)
        if value is _Required:
            self.fail(key, "is missing")
        return value

    def integer(self, key: str, default: int | type[_Required] = _Required) -> int:
        """A number from 0 to 2^31 - 1."""
        value = self.get(key, default)
        if type(value) is not int or not 0 <= value < MAX_INT:
            self.fail(key, f"must be an integer from 0 to {MAX_INT - 1}, not {value!r}")
        return value

    def number(self, key: str, default: float | type[_Required] = _Required) -> float:
        """A finite number."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            self.fail(key, f"must be a finite number, not {value!r}")
        return float(value)

    def numbers(self, key: str, n: int) -> tuple[float, ...]:
        """A finite number for each of `n` layers, or an array with one for each."""
        value = self.get(key)
        if not isinstance(value, np.ndarray):
            return (self.number(key),) * n
        values = self.of_layers([float(v) for v in cast("Sequence[float]", value.tolist())])
        if len(values) != n or not all(map(math.isfinite, values)):
            self.fail(key, f"must hold {n} finite numbers, one for each layer")
        return values

    def boolean(self, key: str, default: bool | type[_Required] = _Required) -> bool:
        """True or false."""
        value = self.get(key, default)
        if type(value) is not bool:
            self.fail(key, f"must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str | type[_Required] = _Required) -> str:
        """A string."""
        value = self.get(key, default)
        if not isinstance(value, str):
            self.fail(key, f"must be a string, not {value!r}")
        return value

    def flags(self, key: str) -> tuple[int, ...]:
        """An array with 0 or 1 (or false or true) for each layer."""
        value = self.get(key)
        values = cast("Sequence[object]", value.tolist()) if isinstance(value, np.ndarray) else ()
        if not values or not all(type(v) in (int, bool) and v in (0, 1) for v in values):
            self.fail(key, "must hold 0 or 1 for each layer")
        return self.of_layers([int(cast("int", v)) for v in values])

    def per_layer(self, key: str, default: PerLayer | type[_Required] = _Required) -> PerLayer:
        """A positive number for all layers, or an array with a number for each layer. Numbers in an array may be 0."""
        value = self.get(key, default)
        if isinstance(value, np.ndarray):
            values = cast("Sequence[object]", value.tolist())
            if not values or not all(type(v) is int and 0 <= v < MAX_INT for v in values):
                self.fail(key, "must hold whole numbers, one for each layer")
            found = self.of_layers(cast("Sequence[int]", values))
            if not found:
                self.fail(key, f"has {len(values)} values, and none for the layers from {self.layers.start} on")
            return found
        if value is default and (value == 0 or isinstance(value, tuple)):
            return cast("PerLayer", value)
        if type(value) is not int or not 0 < value < MAX_INT:
            self.fail(key, f"must be a positive integer, not {value!r}")
        return value


def read_clamps(r: Reader, key: str) -> tuple[float, ...]:
    """The limit of gate and up of a feed-forward network, for each layer; 0: no limit. 0 for all layers when the file
    says nothing."""
    n = len(r.layers)
    return r.numbers(key, n) if r.get(key, None) is not None else (0.0,) * n


def read_rope_sections(r: Reader) -> tuple[int, ...]:
    """How many pairs of a head turn by each of the four positions of a token. Empty when the file does not say."""
    key = Keys.Rope.DIMENSION_SECTIONS
    values = r.get(key, np.empty(0, np.int32))
    if not isinstance(values, np.ndarray):
        return (r.integer(key),) * 4
    if values.dtype.kind not in "iu":
        r.fail(key, "must hold whole numbers")
    return tuple(cast("list[int]", values.tolist()))


def read_window(
    r: Reader, n_pattern: int, default: int | None = None, *, dense_first: bool = False, plain_rope: bool = False
) -> dict[str, Any]:
    """The hyperparameters of a sliding window of `default` positions (None: the file must say the number). In each
    group of `n_pattern` layers all but the last have the window (with `dense_first`: all but the first), unless the
    file says otherwise.

    `plain_rope`: layers with the window are roped without scaling, with base 10000 unless the file says another. When
    it is false, they are roped as the other layers.
    """
    own = r.get(Keys.Rope.FREQ_BASE_SWA, None) is not None
    return {
        "n_swa": r.integer(Keys.Attention.SLIDING_WINDOW, *() if default is None else (default,)),
        "swa_pattern": read_swa_pattern(r, n_pattern, dense_first),
        "rope_freq_base_swa": r.number(Keys.Rope.FREQ_BASE_SWA) if own else 10000.0 if plain_rope else 0.0,
        **(PLAIN_ROPE if plain_rope else {}),
    }


def read_swa_pattern(r: Reader, n_pattern: int, dense_first: bool = False) -> tuple[int, ...]:
    """Which layers have a sliding window, 1 of each that has one, see `read_window`."""
    key = Keys.Attention.SLIDING_WINDOW_PATTERN
    if isinstance(r.get(key, None), np.ndarray):
        flags = r.flags(key)
        if len(flags) != len(r.layers):
            r.fail(key, f"must hold {len(r.layers)} numbers, one for each layer")
        return flags
    n = r.integer(key, n_pattern)
    dense = 0 if dense_first else n - 1
    return tuple(int(n == 0 or il % n != dense) for il in r.layers)


def read_own_window(r: Reader) -> int:
    """The sliding window of an architecture that has none in llama.cpp. It is read only when the file says for each
    layer whether it has the window, which files of llama.cpp do not say; otherwise it is 0."""
    said = isinstance(r.get(Keys.Attention.SLIDING_WINDOW_PATTERN, None), np.ndarray)
    return r.integer(Keys.Attention.SLIDING_WINDOW) if said else 0


def read_own_pattern(r: Reader) -> PerLayer:
    """Which layers have the window of `read_own_window`, see `read_swa_pattern`."""
    return read_swa_pattern(r, 0) if read_own_window(r) else 0


def read_recurrent(r: Reader, n_pattern: int) -> tuple[int, ...]:
    """Which layers are recurrent, 1 for each that is. When the file does not say, all are but the last of every n: the
    file's number, or `n_pattern`."""
    n_layer = len(r.layers)
    key = "{arch}.attention.recurrent_layers"
    if r.get(key, None) is not None:
        flags = r.flags(key)
        if len(flags) != n_layer:
            r.fail(key, f"must hold {n_layer} numbers, one for each layer")
        return flags
    if r.layers.start:  # draft heads attend
        return (0,) * n_layer
    n = r.integer(Keys.LLM.FULL_ATTENTION_INTERVAL, n_pattern)
    if n < 1:
        r.fail(Keys.LLM.FULL_ATTENTION_INTERVAL, "must be positive")
    return tuple(int((il + 1) % n != 0) for il in r.layers)


def read_hparams(cls: type[H], r: Reader, norm: NormKind = "rms", /, **own: Any) -> H:
    """Read the hyperparameters of one architecture: those that all architectures have, and `own`, which are added to
    them or replace them.

    `norm` says which epsilon a file must have. Raises ModelError that names the key when it is missing, has another
    type, or is out of range.
    """
    try:
        return cls(**{**_common(r, own, norm), **own})
    except ModelError as e:
        raise ModelError(f"{e} (the keys {r.arch}.*)") from None


def read_attn_temperature(r: Reader, floor_scale: int) -> AttnTemperature | None:
    """How Q is scaled by its position, in steps of `floor_scale` positions; None when the file does not ask for it."""
    scale = r.number(Keys.Attention.TEMPERATURE_SCALE, 0.0)
    return AttnTemperature(scale, floor_scale) if scale else None


def read_router(r: Reader, default: Router | None = None) -> Router:
    """How experts are chosen, as the file says; what it does not say is taken from `default`."""
    default, llm = default or Router(), Keys.LLM
    gating, of_selected = default.gating, default.of_selected
    func = r.integer(llm.EXPERT_GATING_FUNC, 0)
    if func > len(_GATING):
        r.fail(llm.EXPERT_GATING_FUNC, f"is {func}; known are 1 to {len(_GATING)}")
    if func:
        gating, of_selected = _GATING[func - 1]
    return Router(
        gating=gating,
        of_selected=of_selected,
        norm=r.boolean(llm.EXPERT_WEIGHTS_NORM, default.norm),
        scale=r.number(llm.EXPERT_WEIGHTS_SCALE, default.scale),
        n_group=r.integer(llm.EXPERT_GROUP_COUNT, default.n_group),
        n_group_used=r.integer(llm.EXPERT_GROUP_USED_COUNT, default.n_group_used),
    )


def read_activation(r: Reader) -> Activation | None:
    """The activation of networks, by the transformers library's name; None when the file does not say. Among
    llama.cpp's files only those of ModernBERT say it."""
    name = r.text(_HIDDEN_ACT, "")
    if name and name not in ACTIVATIONS:
        r.fail(_HIDDEN_ACT, f"is {name!r}; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name] if name else None


def read_pooling(r: Reader, key: str, default: Pooling) -> Pooling:
    """What pools the embeddings of tokens, by its number."""
    number = r.integer(key, _POOLING.index(default))
    if number >= len(_POOLING):
        r.fail(key, f"is {number}; known are 0 to {len(_POOLING) - 1}")
    return _POOLING[number]


def read_rank_head(r: Reader, default: RankHead | None = None) -> RankHead:
    """The head of a reranker, as the file says; what it does not say is taken from `default`."""
    default = default or RankHead()
    labels = r.get(Keys.Classifier.OUTPUT_LABELS, None)
    return RankHead(
        pooling=read_pooling(r, "{arch}.classifier.pooling_type", default.pooling),
        act=default.act,
        soft_max=default.soft_max,
        n_out=len(cast("list[object]", labels)) if isinstance(labels, list) and labels else default.n_out,
    )


def _common(r: Reader, own: Mapping[str, Any], norm: NormKind) -> dict[str, Any]:
    llm, attention, rope = Keys.LLM, Keys.Attention, Keys.Rope
    scaling = r.text(rope.SCALING_TYPE, "linear")
    if scaling not in ROPE_SCALING:
        r.fail(rope.SCALING_TYPE, f"is {scaling!r}; known are {', '.join(ROPE_SCALING)}")
    factor = r.number(rope.SCALING_FACTOR, r.number("{arch}.rope.scale_linear", 0.0))  # scale_linear: in old files
    n_head: PerLayer = own["n_head"] if "n_head" in own else r.per_layer(attention.HEAD_COUNT)
    eps = "f_norm_rms_eps" if norm == "rms" else "f_norm_eps"
    key = attention.LAYERNORM_RMS_EPS if norm == "rms" else attention.LAYERNORM_EPS
    n_ff_exp = r.per_layer(llm.EXPERT_FEED_FORWARD_LENGTH, 0)
    return {
        "n_vocab": r.integer(llm.VOCAB_SIZE, 0) or _n_tokens(r, llm.VOCAB_SIZE),
        "n_embd": r.integer(llm.EMBEDDING_LENGTH),
        "n_layer": len(r.layers),
        "first_block": r.layers.start,
        "n_head": n_head,
        "n_ff": own["n_ff"] if "n_ff" in own else r.per_layer(llm.FEED_FORWARD_LENGTH),
        "n_ctx_train": r.integer(llm.CONTEXT_LENGTH),
        "n_head_kv": own["n_head_kv"] if "n_head_kv" in own else r.per_layer(attention.HEAD_COUNT_KV, n_head),
        "n_embd_head_k": r.integer(attention.KEY_LENGTH, 0),
        "n_embd_head_v": r.integer(attention.VALUE_LENGTH, 0),
        "n_rot": r.integer(rope.DIMENSION_COUNT, 0),
        "n_embd_head_k_swa": r.integer(attention.KEY_LENGTH_SWA, 0),
        "n_embd_head_v_swa": r.integer(attention.VALUE_LENGTH_SWA, 0),
        "n_rot_swa": r.integer(rope.DIMENSION_COUNT_SWA, 0),
        **({} if eps in own else {eps: r.number(key)}),
        "f_norm_inner_eps": r.number("{arch}.attention.inner_rms_epsilon", 0.0),  # only pyggml's files have it
        "f_attention_scale": r.number(attention.SCALE, 0.0),
        "act": read_activation(r),
        "rope_freq_base": r.number(rope.FREQ_BASE, 10000.0),
        "rope_scaling_type": scaling,
        "rope_freq_scale": 1.0 / factor if factor else 1.0,
        "rope_attn_factor": r.number(rope.SCALING_ATTN_FACTOR, 1.0) * r.number(rope.SCALING_YARN_ATTN_FACTOR, 1.0),
        "n_ctx_orig_yarn": r.integer(rope.SCALING_ORIG_CTX_LEN, 0),
        "yarn_ext_factor": r.number(rope.SCALING_YARN_EXT_FACTOR, -1.0),
        "yarn_beta_fast": r.number(rope.SCALING_YARN_BETA_FAST, 32.0),
        "yarn_beta_slow": r.number(rope.SCALING_YARN_BETA_SLOW, 1.0),
        "yarn_truncate": r.boolean("{arch}.rope.scaling.yarn_truncate", True),  # only pyggml's files have it
        "n_expert": r.integer(llm.EXPERT_COUNT, 0),
        "n_expert_used": r.integer(llm.EXPERT_USED_COUNT, 0),
        "n_ff_exp": n_ff_exp,
        "n_ff_shexp": r.integer(llm.EXPERT_SHARED_FEED_FORWARD_LENGTH, 0)
        or r.integer(llm.EXPERT_SHARED_COUNT, 0) * (n_ff_exp if isinstance(n_ff_exp, int) else n_ff_exp[-1]),
        "n_layer_dense_lead": max(r.integer(llm.LEADING_DENSE_BLOCK_COUNT, 0) - r.layers.start, 0),
        "n_moe_layer_step": 1 if r.layers.start else r.integer(llm.INTERLEAVE_MOE_LAYER_STEP, 1),
        "router": read_router(r),
        "causal_attn": r.boolean(attention.CAUSAL, True),
        "pooling": read_pooling(r, llm.POOLING_TYPE, "none"),
        **({} if "rank_head" in own else {"rank_head": read_rank_head(r)}),
    }


def _n_tokens(r: Reader, key: str) -> int:
    tokens = r.kv.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        r.fail(key, "is missing, and so are tokenizer.ggml.tokens")
    return len(cast("list[object]", tokens))
