"""GGUF names of tensors. A test compares them with the tables of the `gguf` package."""

from __future__ import annotations

_SIDES = ("enc", "dec", "v", "a", "t")  # what the roles of an encoder-decoder begin with, and those of towers


def tensor_name(role: str, il: int = -1, suffix: str = "weight") -> str:
    """`attn_q`, 3 -> `blk.3.attn_q.weight`; `enc.attn_q`, 3 -> `enc.blk.3.attn_q.weight`, and so `v.attn_q` of
    a tower that sees (`a.`: one that hears, `t.`: one that reads). A role is a name of
    gguf's TENSOR_NAMES without `blk.{bid}.`. Without a `suffix` the name ends with the role."""
    if il >= 0:
        side, _, rest = role.partition(".")
        role = f"{side}.blk.{il}.{rest}" if side in _SIDES else f"blk.{il}.{role}"
    return f"{role}.{suffix}" if suffix else role
