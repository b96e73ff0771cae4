"""What a family of checkpoints is: which architecture, which keys its config becomes, how its tensors are moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .config import Config
from .moves import Move, Split, Value

Array = npt.NDArray[Any]
Step = Move | Value
Back = Callable[[Any, Mapping[str, Any]], Mapping[str, object]]


@dataclass(frozen=True)
class Of:
    """A key that follows from the config: `there(config)`, None where the file has no such key. `back(value, keys)` is
    what the config says for a value, of all the file's keys; without one the key is not said back."""

    there: Callable[[Config], object]
    back: Back | None = None


Key = str | tuple[str, ...] | Of | int | float | bool | None
"""Of the name in the config (the first is written back), how it follows, a constant, or None where there is none."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Layers that draft what follows (multi-token prediction), which a GGUF has behind the model's, and how a
    checkpoint spells them.

    says     the config's name for how many there are
    own      role -> name of what other layers do not have, or spell otherwise. `{layer}` is how the names of the layer
             begin; one without it is of all heads
    layers   how names of these layers begin, which are counted from 0 on; empty: as those of the model, counted on
    """

    says: str
    own: Mapping[str, str]
    layers: str = ""

    def layer(self, i: int, n_layer: int, layers: str) -> str:
        """How the names of head `i` begin, behind `n_layer` layers whose names begin with `layers`."""
        return f"{self.layers}.{i}" if self.layers else f"{layers}.{n_layer + i}"

    def named(self, role: str, layer: str) -> str | None:
        """The name of what only they have, of the head whose names begin with `layer`; None of what all layers have."""
        return self.own[role].replace("{layer}", layer) if role in self.own else None


@dataclass(frozen=True, kw_only=True)
class Family:
    """One or more model types that are read alike.

    arch     `general.architecture`
    types    their `model_type`, the first of which is written back
    cls      the class in transformers, as `architectures` names it
    act      what networks of the architecture go through where a file does not say, by the transformers library's name;
             empty: it is built for one activation alone, and configs with another are refused
    keys     keys of the GGUF (without the architecture) that differ from `metadata.COMMON`, or come besides
    more     keys that come of a config together (layer types ...)
    made     tensors that follow from a config
    by_tensors  what the config says besides on the way back, by the ne of a file's tensors
    padded   roles of tables with a row for each token, which a checkpoint may have of the first ones only: the others
             have the first one's
    moves    what becomes of tensors, by role (`attn_q`, or `attn_q.bias` alone; `*_norm.weight`: all that end so)
    splits   by the end of a name in the checkpoint: a tensor that becomes several
    names    regular expression -> replacement: names that gguf's tables do not have, as they have them
    skip     regular expressions: tensors that no GGUF has
    table    the architecture whose names they are, where gguf has no table for `arch`
    constants   what the config says besides, on the way back
    spelled  how tensors are spelled on the way back, by role, where that is not as in `families/spelling.py`;
             `attn_output|attn_gate`: where the layer has the latter
    layers   how the name of a layer begins there
    scaled   numbers that tensors are multiplied with, by role (`attn_k` its weight, `attn_k.bias`): one, or one for
             each row; a file has the products, and its way back 1
    untied   whether an output of its own is made of embeddings that are the output, too
    scalars  ends of names of tensors of one number, of each layer one -> the key that they become, and their shape
    heads    how layers that draft are spelled, where it may have them
    told     keys of the config that need not be read: tensors or other keys say the same, or nothing depends on them
    by_norm  keys of the config that say whether layers have a norm, which tensors tell, too -> its role, and which
             value means that they have
    """

    arch: str
    types: tuple[str, ...]
    cls: str
    act: str = "silu"
    keys: Mapping[str, Key] = field(default_factory=dict[str, Key])
    more: Callable[[Config], Mapping[str, object]] = lambda c: {}
    made: Callable[[Config], Mapping[str, Array]] = lambda c: {}
    by_tensors: Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, object]] = lambda ne: {}
    padded: tuple[str, ...] = ()
    moves: Mapping[str, Step | tuple[Step, ...]] = field(default_factory=dict[str, "Step | tuple[Step, ...]"])
    splits: Mapping[str, Split] = field(default_factory=dict[str, Split])
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    skip: tuple[str, ...] = ()
    table: str = ""
    constants: Mapping[str, object] = field(default_factory=dict[str, object])
    spelled: Mapping[str, str] = field(default_factory=dict[str, str])
    layers: str = "model.layers"
    scaled: Callable[[Config], Mapping[str, float | Array]] = lambda c: {}
    untied: Callable[[Config], bool] = lambda c: False
    scalars: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict[str, "tuple[str, tuple[int, ...]]"])
    heads: Heads | None = None
    told: tuple[str, ...] = ()
    by_norm: Mapping[str, tuple[str, bool]] = field(default_factory=dict[str, "tuple[str, bool]"])

    def moves_of(self, name: str) -> list[Step]:
        """What becomes of the tensor that the GGUF calls `blk.3.attn_q.weight`."""
        role = name.split(".", 2)[2] if name.startswith("blk.") else name
        suffixed, role = role, role.removesuffix(".weight").removesuffix(".bias")
        found = self.moves.get(suffixed) or self.moves.get(role)
        if found is None:
            ends = (m for pattern, m in self.moves.items() if pattern[0] == "*" and suffixed.endswith(pattern[1:]))
            found = next(ends, ())
        return list(found) if isinstance(found, tuple) else [found]


def float32(value: float) -> float:
    """As a file has it."""
    return float(np.float32(value))
