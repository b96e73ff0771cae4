"""Encoders. The folder says how embeddings are pooled (modules.json, of the sentence-transformers library)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyggml import limits
from pyggml.errors import ModelError
from pyggml.small_file import read_text

from ..config import Config
from ..family import Family, Key, Of
from ..metadata import layers_of
from ..moves import PLUS_ONE, Array, Move, Shape, Sizes
from ..parts import read_object
from .gemma import scores
from .spelling import SANDWICH

_ACTIVATION = Of(
    lambda c: c.get("hidden_act", "hidden_activation", default=None),
    lambda name, keys: {"hidden_act": name, "hidden_activation": name},
)
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
    try:
        text = read_text(modules, limits.JSON_BYTES, ModelError)
    except FileNotFoundError:
        return {}
    path = next((p for p in ("1_Pooling",) if p in text), None)
    about = read_object(folder / path / "config.json") if path else {}
    found = next((kind for name, kind in _POOLING.items() if about.get(name)), None)
    return {} if found is None else {"pooling_type": found}


def pooling_files(kind: object) -> dict[str, object]:
    """The files that tell the sentence-transformers library about a `pooling_type`, by path."""
    name = next((name for name, number in _POOLING.items() if number == kind), None)
    if name is None:
        return {}
    library = "sentence_transformers.models"
    parts = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules = [{"idx": i, "name": str(i), "path": p, "type": f"{library}.{t}"} for i, (p, t) in enumerate(parts)]
    return {"modules.json": modules, "1_Pooling/config.json": {name: True}}


def _local_back(n: int, keys: Mapping[str, Any]) -> dict[str, object]:
    pattern = keys.get("attention.sliding_window_pattern")
    every = {"global_attn_every_n_layers": pattern} if isinstance(pattern, int) else {}
    return {"local_attention": n, **every}


def _token_types(ne: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    return {"type_vocab_size": ne["token_types.weight"][1]} if "token_types.weight" in ne else {}


_BERT = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    **{f"attn_{x[0]}": f"attention.self.{x}" for x in ("query", "key", "value")},
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_BARE = {"token_embd": "embed_tokens", "output_norm": "norm"}


def _both_ways(c: Config) -> dict[str, object]:
    if c.get("use_bidirectional_attention", default=False) is not True:
        c.fail("use_bidirectional_attention: an encoder whose tokens do not see those after them is not supported")
    return _window(c)


def _window(c: Config) -> dict[str, object]:
    if c.rope["rope_type"] != "default":
        c.fail(f"rope_parameters: rope_type is {c.rope['rope_type']!r:.60}: only default is supported beside a window")
    every = c.get("global_attn_every_n_layers", "_sliding_window_pattern", "sliding_window_pattern", default=3)
    keys: dict[str, object] = {"attention.sliding_window": c.integer("local_attention", "sliding_window")}
    if c.get("layer_types", default=None):
        keys["attention.sliding_window_pattern"] = layers_of(c, "sliding_attention")
    else:
        keys["attention.sliding_window_pattern"] = every
    return keys | _pooling(c)


_PADDING = 2  # RoBERTa's positions begin after the id of padding, which is 1, so the first two rows are unused


def _after_padding(a: Array, s: Sizes) -> Array:
    return a[_PADDING:]


def _with_padding(a: Array, s: Sizes) -> Array:
    import numpy as np

    return np.concatenate((np.zeros_like(a[:_PADDING]), a))


def _fewer(shape: Shape, s: Sizes) -> Shape:
    return (shape[0] - _PADDING, *shape[1:])


_ROWS = Move(lambda a, s: a, lambda a, s: a.reshape(-1, a.shape[-1]))  # also of a file with only one row

FAMILIES = (
    Family(
        arch="bert",
        types=("bert",),
        cls="BertModel",
        moves={"token_types": _ROWS},
        keys=_ENCODER,
        more=_pooling,
        skip=_HEADS,
        by_tensors=_token_types,
        spelled=_BERT,
        layers="encoder.layer",
    ),
    Family(
        arch="bert",
        types=("xlm-roberta", "roberta"),
        cls="XLMRobertaModel",
        keys={
            **_ENCODER,
            "context_length": Of(
                lambda c: c.integer("max_position_embeddings") - _PADDING,
                lambda n, keys: {"max_position_embeddings": n + _PADDING},
            ),
        },
        more=_pooling,
        by_tensors=_token_types,
        spelled=_BERT,
        layers="encoder.layer",
        moves={"position_embd": Move(_after_padding, _with_padding, _fewer), "token_types": _ROWS},
        skip=_HEADS,
    ),
    Family(
        arch="nomic-bert",
        types=("nomic_bert",),
        cls="NomicBertModel",
        constants={"pad_token_id": 0},  # must be a number here
        keys=_ENCODER,
        more=_pooling,
        skip=_HEADS,
        by_tensors=_token_types,
        spelled={
            "token_embd": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "emb_ln",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
            "attn_output_norm": "norm1",
            "layer_output_norm": "norm2",
        },
        layers="encoder.layers",
    ),
    Family(
        arch="modern-bert",
        types=("modernbert",),
        cls="ModernBertModel",
        keys={
            **_ENCODER,
            "attention.layer_norm_epsilon": "norm_eps",
            "attention.layer_norm_rms_epsilon": None,
            "attention.sliding_window": Of(lambda c: None, _local_back),
        },
        more=_window,
        skip=(*_HEADS, r"^head\.", r"^decoder\."),
        spelled={
            "token_embd": "embeddings.tok_embeddings",
            "token_embd_norm": "embeddings.norm",
            "output_norm": "final_norm",
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
        layers="layers",
    ),
    Family(
        arch="eurobert",
        types=("eurobert",),
        cls="EuroBertModel",
        keys={"attention.causal": False},
        more=_pooling,
        spelled=_BARE,
        layers="layers",
    ),
    Family(
        arch="gemma-embedding",
        types=("gemma3_text",),
        cls="Gemma3TextModel",
        act="gelu_pytorch_tanh",
        keys={"attention.causal": False, **scores()},
        moves={"*_norm.weight": PLUS_ONE},
        more=_both_ways,
        constants={"use_bidirectional_attention": True},
        spelled={**SANDWICH, **_BARE},
        layers="layers",
    ),
)
