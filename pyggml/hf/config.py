"""Read config.json: values by name, and errors that name what is missing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, cast

from pyggml import limits
from pyggml.errors import ModelError
from pyggml.models.hparams import MAX_LAYERS
from pyggml.models.metadata import ACTIVATIONS

from .parts import read_object

_NO_DEFAULT = object()
_INTEGER = 1 << 63
_ROPE_NUMBERS = {
    *("rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "low_freq_factor"),
    *("high_freq_factor", "extrapolation_factor", "beta_fast", "beta_slow", "attention_factor", "attn_factor"),
    *("mscale", "mscale_all_dim", "short_mscale", "long_mscale", "alpha"),
}
_N_LAYER = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
# Classes that are beside their checkpoints, not in the library -> the class of the library whose defaults they have.
_LIKE = {"minicpmv": "qwen2", "minicpmo": "qwen2"}
# Where configs kept the parameters of a rope before `rope_parameters`.
_THETA = ("rope_theta", "rotary_emb_base", "global_rope_theta")
_THETA_SWA = ("rope_local_base_freq", "local_rope_theta", "swa_rope_theta")
_PARTIAL = ("partial_rotary_factor", "rotary_pct")


@cache
def _classes() -> dict[str, dict[str, Any]]:
    """For each model_type the keys that the transformers library reads, with the library's default of each key.
    `tests/deep/config_classes.py` writes the file. It may contain `Infinity`, which Python reads and JSON forbids."""
    return json.loads(Path(__file__).with_name("classes.json").read_bytes())


def _check_integers(path: Path, values: Mapping[str, Any]) -> None:
    """Raises ModelError for an integer beyond 64 bits, which no GGUF key can hold."""
    todo: list[tuple[str, Any]] = list(values.items())
    while todo:
        key, value = todo.pop()
        if isinstance(value, dict):
            todo += [(f"{key}.{name}", v) for name, v in cast("dict[str, Any]", value).items()]
        elif isinstance(value, list):
            todo += [(key, v) for v in cast("list[Any]", value)]
        elif isinstance(value, int) and not -_INTEGER <= value < _INTEGER:
            raise ModelError(f"{path}: {key} is an integer of {value.bit_length()} bits: up to 64 are supported")


class Config:
    """The values of config.json, and the transformers library's defaults for keys that the file lacks. When the text
    model is one of several parts, its part (`text_config`) is asked first.

    outer     the whole of a config that has a part for the text model; empty for the config of a text model
    last      the name that was asked for last; errors mention it
    n_nextn   how many drafting layers follow the model's `n_layer` layers in the checkpoint. The tensors tell, because
              configs count the layers that were trained, even when a copy of the checkpoint has dropped them
    asked     the names that were asked for so far; `refuse_unread` refuses other keys that change the model
    """

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self.path, self.n_nextn, self.last = path, 0, ""
        text = values.get("text_config")
        self.outer: Mapping[str, Any] = values if isinstance(text, dict) else {}
        self.values: dict[str, Any] = {**values, **text} if isinstance(text, dict) else dict(values)
        if "tie_word_embeddings" in self.outer:  # the whole model's class ties them, not that of the text model
            self.values["tie_word_embeddings"] = self.outer["tie_word_embeddings"]
        self.asked: set[str] = set()
        kind = self.values.get("model_type")
        self._defaults: Mapping[str, Any] = _classes().get(_LIKE.get(kind, kind), {}) if isinstance(kind, str) else {}

    @classmethod
    def of_folder(cls, folder: Path) -> Config:
        """The config of a folder. Raises ModelError when the folder has no config.json."""
        path = folder / "config.json"
        values = read_object(path)
        if not values:
            raise ModelError(f"{folder}: has no config.json: neither a GGUF file nor a Hugging Face folder")
        _check_integers(path, values)
        return cls(str(path), values)

    def fail(self, text: str) -> NoReturn:
        """Raise the ModelError about this config."""
        raise ModelError(f"{self.path}: {text}")

    def get(self, *names: str, default: Any = _NO_DEFAULT) -> Any:
        """The value of the first of `names` that the config has and that is not null; else the first default that the
        model's class has; else `default`. A name may be a path (`attn_config.clip_qkv`). Raises ModelError when no
        value is found and no default is given."""
        self.asked.update(names)
        self.last = names[0]
        for name in names:
            value = self._said(name)
            if value is not None and value is not _NO_DEFAULT:
                return value
        for name in names:
            value = self._defaults.get(name)
            if value is not None and self._said(name) is not None:
                return value
        if default is _NO_DEFAULT:
            self.fail(f"has no {' or '.join(names)}")
        return default

    def _said(self, name: str) -> Any:
        """The value in the file, or `_NO_DEFAULT`."""
        value: Any = self.values
        for part in name.split("."):
            if not isinstance(value, dict):
                return _NO_DEFAULT
            value = cast("dict[str, Any]", value).get(part, _NO_DEFAULT)
        return value

    def knows(self, name: str) -> bool:
        """Whether the class of this model_type reads a key of that name. True for a model_type without a record."""
        return not self._defaults or name in self._defaults

    def refuse_unread(self) -> None:
        """Raise ModelError for a key that the model's class reads, that differs from the class's default, and that
        nobody has asked for: the model would be another one than the config describes."""
        for name in self._defaults.keys() - self.asked:
            value, usual = self._said(name), self._defaults[name]
            if isinstance(value, str) and isinstance(usual, str):
                value, usual = ACTIVATIONS.get(value, value), ACTIVATIONS.get(usual, usual)  # some have two names
            if value is not _NO_DEFAULT and value != usual and (value or usual):
                text = f"{name} is {self._said(name)!r:.60}: of {self.model_type} only"
                self.fail(f"{text} {self._defaults[name]!r:.60} is supported")

    def integer(self, *names: str, default: Any = _NO_DEFAULT) -> int:
        """A whole number."""
        value = self.get(*names, default=default)
        if type(value) is not int:
            self.fail(f"{names[0]} must be a whole number, not {value!r:.60}")
        return value

    def number(self, *names: str, default: Any = _NO_DEFAULT) -> float:
        """A number."""
        value = self.get(*names, default=default)
        if type(value) not in (int, float):
            self.fail(f"{names[0]} must be a number, not {value!r:.60}")
        return float(value)

    def damaged(self) -> NoReturn:
        """Raise the ModelError about the value that was asked for last: its type or shape makes no sense."""
        self.fail(f"{self.last} cannot be {self.get(self.last, default=None)!r:.60}")

    @property
    def model_type(self) -> str:
        """The model_type, which tells the family."""
        value = self.get("model_type")
        if not isinstance(value, str):
            self.fail(f"model_type must be a string, not {value!r:.60}")
        return value

    @property
    def rope(self) -> dict[str, Any]:
        """The rope of most layers: `rope_parameters`, or the older keys `rope_theta`, `rope_scaling` and
        `partial_rotary_factor`."""
        return self._rope("full_attention", _THETA)

    @property
    def rope_swa(self) -> dict[str, Any]:
        """The rope of layers with a sliding window; empty when the config and its class make no difference."""
        usual: dict[str, Any] = self._defaults.get("rope_parameters") or {}
        told = self.get("rope_parameters.sliding_attention", *_THETA_SWA, default=None)
        return self._rope("sliding_attention", _THETA_SWA) if told or "sliding_attention" in usual else {}

    def _rope(self, kind: str, theta: tuple[str, ...]) -> dict[str, Any]:
        self.last = "rope_scaling" if self.values.get("rope_scaling") else "rope_parameters"
        self.asked.update(("rope_parameters", "rope_scaling", *theta, *_PARTIAL))
        if not self.knows("rope_parameters"):
            return {"rope_type": "default"}
        usual, own = (_of_kind(v.get("rope_parameters") or {}, kind) for v in (self._defaults, self.values))
        scaling: dict[str, Any] = self.values.get("rope_scaling") or {}
        if kind == "full_attention" and scaling:
            own = dict(scaling)
        rope = own or dict(usual)
        for name, names in (("rope_theta", theta), ("partial_rotary_factor", _PARTIAL)):
            said = next((self.values[n] for n in names if self.values.get(n) is not None and self._reads(n)), None)
            said = usual.get(name) if said is None else said
            if said is not None and own.get(name) is None:
                rope[name] = said
        if not self.knows("partial_rotary_factor"):
            rope.pop("partial_rotary_factor", None)
        rope.setdefault("rope_type", rope.get("type", "default"))
        if rope["rope_type"] == "mrope":  # Qwen2-VL's first configs; the positions do not change the frequencies
            rope["rope_type"] = "default"
        self._check_rope(rope)
        return rope

    def _reads(self, name: str) -> bool:
        """Whether the class reads a parameter of the rope outside of `rope_parameters`. A class that reads the base
        there reads `partial_rotary_factor` there too."""
        return self.knows(name) and (name != "partial_rotary_factor" or self.knows("rope_theta"))

    def _check_rope(self, rope: Mapping[str, Any]) -> None:
        """Raise ModelError when a numeric parameter of the rope is not a number."""
        for name in _ROPE_NUMBERS & rope.keys():
            value = rope[name]
            if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
                self.fail(f"{name} of the rope must be a finite number, not {value!r:.60}")

    @property
    def n_layer(self) -> int:
        """How many layers."""
        kinds: Any = self.get("layers_block_type", default=None)
        if isinstance(kinds, list) and self.get(*_N_LAYER, default=None) is None:
            return len(cast("list[object]", kinds))
        return self._checked_layers(self.integer(*_N_LAYER), 1)

    @property
    def n_layer_decoder(self) -> int:
        """How many layers the decoder of an encoder-decoder has; 0 when the config does not say."""
        return self._checked_layers(self.integer("num_decoder_layers", default=0), 0)

    def _checked_layers(self, n: int, least: int) -> int:
        if not least <= n <= MAX_LAYERS:
            self.fail(f"{n} layers: {least} to {MAX_LAYERS} are supported")
        return n

    @property
    def n_head(self) -> int:
        """How many heads of Q."""
        return self.integer("num_attention_heads", "n_head", "n_heads", "num_heads")

    @property
    def n_embd(self) -> int:
        """Elements of an embedding."""
        if self._defaults and self.knows("n_embed") and self.values.get("n_embed") is not None:
            return self.integer("n_embed")  # BLOOM's and Falcon's old name, which comes first
        return self.integer("hidden_size", "n_embd", "d_model", "dim")

    @property
    def head(self) -> int:
        """Elements of a head."""
        n = self.integer("head_dim", "attention_head_dim", default=0) or self.n_embd // self.n_head
        if n > limits.HEAD_DIM:
            self.fail(f"head_dim = {n}: up to {limits.HEAD_DIM} are supported")
        return n


def _of_kind(ropes: dict[str, Any], kind: str) -> dict[str, Any]:
    """The rope of one kind of layers out of `ropes`, which may have one for each kind. The library reads `truncate`
    beside these, for all kinds."""
    if kind not in ropes:
        return dict(ropes)
    return {**(ropes[kind] or {}), "truncate": ropes.get("truncate", True)}
