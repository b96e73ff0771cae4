"""The options of contexts, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypedDict
from warnings import warn_explicit

from pyggml.dtypes import CACHE_TYPES, DType
from pyggml.errors import ModelError, user_site
from pyggml.models.hparams import HParams


class ContextOptions(TypedDict, total=False):
    """Keyword arguments of `Model.new_context`, which are those of `LlamaContext`."""

    n_batch: int
    n_ubatch: int
    n_seq_max: int
    type_k: DType
    type_v: DType
    n_threads: int | None
    n_threads_batch: int | None
    flash_attn: bool
    backend: str | Sequence[str]
    defrag_thold: float
    embeddings: bool | None
    pooling: str | None
    layer: int
    kv_ram: int | str | None


SHORTER = (
    "give a shorter prompt or a smaller n_predict, let old text go (--context-shift), or scale the rope, if it has one "
    "(--rope-scaling yarn --rope-scale 2; kv_overrides in Python)"
)  # advice for texts that are too long
_warned: dict[Any, Any] = {}  # the registry of `warnings`: which lines have been warned of what


def warn_beyond(hp: HParams) -> None:
    """Warn, at the user's line, that a text is longer than those that the model was trained on."""
    said = f"a text has more than the {hp.n_ctx_scaled} tokens that the model was trained for, and is worse from there"
    warn_explicit(f"{said}: {SHORTER}", UserWarning, *user_site(), registry=_warned)


def check_types(**given: Any) -> None:
    """Raises ModelError for arguments of `LlamaContext` with a wrong type."""
    stored = f"one of {', '.join(f'gg.{t.name}' for t in CACHE_TYPES)}"
    rules = {
        "type_k": stored,
        "type_v": stored,
        "n_threads": "a whole number, or None for one per core",
        "backend": "'cpu', 'ref', or a list of them",
        "defrag_thold": "a number",
        "flash_attn": "True or False",
        "embeddings": "True or False",
    }
    fits = {
        "type_k": isinstance(given["type_k"], DType),
        "type_v": isinstance(given["type_v"], DType),
        "n_threads": given["n_threads"] is None or isinstance(given["n_threads"], Integral),
        "backend": isinstance(given["backend"], (str, list, tuple)),
        "defrag_thold": isinstance(given["defrag_thold"], Real),
        "flash_attn": given["flash_attn"] in (None, False, True),  # "off" would switch it on
        "embeddings": given["embeddings"] in (None, False, True),
    }
    for name, value in given.items():
        if not fits[name]:
            raise ModelError(f"{name} must be {rules[name]}, not {value!r:.60}")
