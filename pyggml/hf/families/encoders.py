"""Encoders, whose embeddings are pooled as the folder says (modules.json, of the sentence-transformers library)."""

from __future__ import annotations

from pathlib import Path

from ..config import Config, read_json
from ..family import Family, Key, Of
from ..metadata import layers_of
from ..moves import PLUS_ONE, Array, Move, Shape, Sizes

_ACTIVATION = Of(lambda c: c.get("hidden_act", "hidden_activation", default=None))
_ENCODER: dict[str, Key] = {
    "attention.causal": False,
    "hidden_activation": _ACTIVATION,
    "attention.head_count_kv": Of(lambda c: c.n_head),
}
_POOLING = {"pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": 2, "pooling_mode_lasttoken": 3}
_HEADS = (r"(^|\.)pooler\.", r"position_ids$", r"^cls\.", r"^lm_head\.(bias|decoder|dense|layer_norm)")


def _pooling(c: Config) -> dict[str, object]:
    folder = Path(c.path).parent
    modules = folder / "modules.json"
    if not modules.is_file():
        return {}
    text = modules.read_text(encoding="utf-8")
    path = next((p for p in ("1_Pooling",) if p in text), None)
    about = read_json(folder / path / "config.json") if path else {}
    found = next((kind for name, kind in _POOLING.items() if about.get(name)), None)
    return {} if found is None else {"pooling_type": found}


def _window(c: Config) -> dict[str, object]:
    keys: dict[str, object] = {"attention.sliding_window": c.integer("local_attention", "sliding_window")}
    if c.get("layer_types", default=None):
        keys["attention.sliding_window_pattern"] = layers_of(c, "sliding_attention")
    else:
        keys["attention.sliding_window_pattern"] = c.integer("global_attn_every_n_layers", "_sliding_window_pattern")
    return keys | _pooling(c)


_PADDING = 2  # RoBERTa counts positions from the id of padding, 1, on: as many rows are for nothing


def _after_padding(a: Array, s: Sizes) -> Array:
    return a[_PADDING:]


def _with_padding(a: Array, s: Sizes) -> Array:
    import numpy as np

    return np.concatenate((np.zeros_like(a[:_PADDING]), a))


def _fewer(shape: Shape, s: Sizes) -> Shape:
    return (shape[0] - _PADDING, *shape[1:])


FAMILIES = (
    Family(arch="bert", types=("bert",), cls="BertModel", keys=_ENCODER, more=_pooling, skip=_HEADS),
    Family(
        arch="bert",
        types=("xlm-roberta", "roberta"),
        cls="XLMRobertaModel",
        keys={**_ENCODER, "context_length": Of(lambda c: c.integer("max_position_embeddings") - _PADDING)},
        more=_pooling,
        moves={"position_embd": Move(_after_padding, _with_padding, _fewer)},
        skip=_HEADS,
    ),
    Family(
        arch="nomic-bert",
        types=("nomic_bert",),
        cls="NomicBertModel",
        keys=_ENCODER,
        more=_pooling,
        skip=_HEADS,
    ),
    Family(
        arch="modern-bert",
        types=("modernbert",),
        cls="ModernBertModel",
        keys={**_ENCODER, "attention.layer_norm_epsilon": "norm_eps", "attention.layer_norm_rms_epsilon": None},
        more=_window,
        skip=(*_HEADS, r"^head\.", r"^decoder\."),
    ),
    Family(
        arch="eurobert",
        types=("eurobert",),
        cls="EuroBertModel",
        keys={"attention.causal": False},
        more=_pooling,
    ),
    Family(
        arch="gemma-embedding",
        types=("gemma3_text",),
        cls="Gemma3TextModel",
        keys={"attention.causal": False},
        moves={"*_norm.weight": PLUS_ONE},
        more=_window,
    ),
)
