"""What a context can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypedDict

from pyggml.dtypes import DType
from pyggml.errors import ModelError


class ContextOptions(TypedDict, total=False):
    """Keyword arguments of `Model.new_context`: those of `LlamaContext`."""

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


def check_types(**given: Any) -> None:
    """Raises ModelError for arguments of `LlamaContext` that are of another type."""
    fits = {
        "type_k": isinstance(given["type_k"], DType),
        "type_v": isinstance(given["type_v"], DType),
        "n_threads": given["n_threads"] is None or isinstance(given["n_threads"], Integral),
        "backend": isinstance(given["backend"], (str, list, tuple)),
        "defrag_thold": isinstance(given["defrag_thold"], Real),
    }
    for name, value in given.items():
        if not fits[name]:
            raise ModelError(f"{name} cannot be {value!r:.60}")
