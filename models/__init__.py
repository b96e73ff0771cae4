"""Model builders: hyperparameters, tensor names, the KV cache, building blocks, and one file per architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pyggml.errors import ModelError
from pyggml.graph import Graph

from .blocks import Build
from .hparams import HParams
from .kv_cache import KVCache
from .llama import build_llama, llama_tensors
from .names import TensorSpec, empty_weights


@dataclass(frozen=True)
class Architecture:
    """What makes a model of `general.architecture`: the tensors it reads, and the builder of its graph."""

    name: str
    tensors: Callable[[HParams], Iterable[TensorSpec]]
    build: Callable[[Build], Graph]


ARCHITECTURES = {a.name: a for a in (Architecture("llama", llama_tensors, build_llama),)}


def get_architecture(name: str) -> Architecture:
    """The architecture of that name. Raises ModelError naming those there are."""
    try:
        return ARCHITECTURES[name]
    except KeyError:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"the architecture {name!r} is not supported; known are: {known}") from None


def graph_of_hparams(
    hp: HParams,
    n_tokens: int,
    n_outputs: int = 1,
    n_ctx: int = 512,
    *,
    n_kv: int | None = None,
    flash_attn: bool = False,
    arch: str = "llama",
) -> Graph:
    """The graph of a model that needs no file: weights and cache have no memory. `n_kv` defaults to the whole cache.

    Raises ModelError, GraphError for sizes that do not fit.
    """
    architecture = get_architecture(arch)
    kv = KVCache(hp, n_ctx, flash_attn=flash_attn)
    weights = empty_weights(architecture.tensors(hp))
    return architecture.build(Build(hp, weights, kv, n_tokens, n_outputs, (kv.size if n_kv is None else n_kv,)))
