"""GGUF names of tensors, by the tables of the `gguf` package."""

from __future__ import annotations

from functools import cache

from pyggml.gguf_io.constants import TENSOR_NAMES


def tensor_name(role: str, il: int = -1, suffix: str = "weight") -> str:
    """`attn_q`, 3 -> `blk.3.attn_q.weight`. A role is a name of gguf's TENSOR_NAMES without `blk.{bid}.`; one that the
    package does not know yet is named alike. Without a `suffix` the name ends with the role."""
    name = _names().get(role) or (role if il < 0 else f"blk.{{bid}}.{role}")
    return f"{name.format(bid=il)}.{suffix}".rstrip(".")


@cache
def _names() -> dict[str, str]:
    """`attn_q` -> `blk.{bid}.attn_q`, `output` -> `output`, `enc.attn_q` -> `enc.blk.{bid}.attn_q`."""
    return {name.replace("blk.{bid}.", ""): name for name in TENSOR_NAMES.values()}
