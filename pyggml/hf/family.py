"""The record of a family of checkpoints: its architecture, the keys its config becomes, how its tensors are moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .config import Config
from .moves import Merged, Move, Value

Array = npt.NDArray[Any]
Change = Move | Value
Back = Callable[[Any, Mapping[str, Any]], Mapping[str, object]]


@dataclass(frozen=True)
class Of:
    """A key that is computed from the config: `there(config)`; None when the file gets no such key. `back(value, keys)`
    gives the config's entries for the value, given all keys of the file; without `back` the config gets none."""

    there: Callable[[Config], object]
    back: Back | None = None


Key = str | tuple[str, ...] | Of | int | float | bool | None
"""How a key of the GGUF is found: by its name or names in the config (the first name is written back), by a function
(`Of`), as a constant, or not at all (None)."""


@dataclass(frozen=True, kw_only=True)
class NextnLayers:
    """How a checkpoint spells drafting layers (multi-token prediction), which follow the model's layers in a GGUF.

    says     the config's key for their number
    own      role -> name of a tensor that other layers do not have, or that they spell otherwise. `{layer}` stands for
             the beginning of the layer's names; a name without it is one tensor for all drafting layers
    layers   the beginning of these layers' names, in which they count from 0; empty: they have the names and numbers of
             layers after those of the model
    """

    says: str
    own: Mapping[str, str]
    layers: str = ""

    def layer(self, i: int, n_layer: int, layers: str) -> str:
        """The beginning of the names of drafting layer `i`, which follows `n_layer` layers whose names begin with
        `layers`."""
        return f"{self.layers}.{i}" if self.layers else f"{layers}.{n_layer + i}"

    def named(self, role: str, layer: str) -> str | None:
        """The name of a tensor that only drafting layers have, of the layer whose names begin with `layer`; None for a
        role that all layers have."""
        return self.own[role].replace("{layer}", layer) if role in self.own else None


@dataclass(frozen=True, kw_only=True)
class Family:
    """One or more model types that are read alike.

    arch     `general.architecture`
    types    values of `model_type`; the first is written back
    cls      the class in transformers, as `architectures` names it
    act      the activation when a file names none, by the transformers library's name; empty: the architecture has one
             fixed activation, and configs with another are refused
    keys     keys of the GGUF (without the architecture) that differ from `metadata.COMMON` or are not in it
    more     several keys that one function finds together (layer types ...)
    made     tensors that are computed from the config
    by_tensors  entries of a written config that depend on the shapes (ne) of the file's tensors
    padded   roles of tables with one row for each token. A checkpoint may lack rows at the end; its first row is
             repeated for them
    moves    how tensors are moved, by role (`attn_q`; `attn_q.bias` alone; `*_norm.weight`: all that end so)
    merged   end of a name in the checkpoint -> how that tensor becomes several tensors
    names    regular expression -> replacement: turns names that gguf's tables lack into names that they have
    skip     regular expressions of tensors that no GGUF has
    table    the architecture whose tensor names are used when gguf has no table for `arch`
    constants   further entries of a written config
    spelled  names of tensors in a written checkpoint, by role, that differ from `families/spelling.py`.
             `attn_output|attn_gate`: the spelling of attn_output in layers that have an attn_gate
    layers   the beginning of a layer's names in the checkpoint
    sides    that of models with several stacks of layers, by what begins their names in a GGUF (`enc.`, `dec.`, `a.`)
    files    further files of a written folder (JSON), given the keys of the GGUF without the architecture
    scaled   factors of tensors, by role (`attn_k`: of the weight; `attn_k.bias`): one number, or one for each row.
             The GGUF gets the products; a written config gets 1
    untied   whether the GGUF needs an output of its own although the config ties it to the embeddings
    scalars  end of the names of tensors with one number for each layer -> the key that they become, and their shape
    nextn    how drafting layers are spelled, in families that may have them
    told     keys of the config that need not be read: tensors or other keys say the same, or nothing depends on them
    untrained   roles of tensors that the transformers library never trains (its buffers)
    by_norm  key of the config that tells whether layers have a norm -> the norm's role, and the value that means yes.
             The tensors tell it too, and both must agree
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
    moves: Mapping[str, Change | tuple[Change, ...]] = field(default_factory=dict[str, "Change | tuple[Change, ...]"])
    merged: Mapping[str, Merged] = field(default_factory=dict[str, Merged])
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    skip: tuple[str, ...] = ()
    table: str = ""
    constants: Mapping[str, object] = field(default_factory=dict[str, object])
    spelled: Mapping[str, str] = field(default_factory=dict[str, str])
    layers: str = "model.layers"
    sides: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Callable[[Mapping[str, Any]], Mapping[str, object]] = lambda keys: {}
    scaled: Callable[[Config], Mapping[str, float | Array]] = lambda c: {}
    untied: Callable[[Config], bool] = lambda c: False
    scalars: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict[str, "tuple[str, tuple[int, ...]]"])
    nextn: NextnLayers | None = None
    told: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    by_norm: Mapping[str, tuple[str, bool]] = field(default_factory=dict[str, "tuple[str, bool]"])

    def moves_of(self, name: str) -> list[Change]:
        """The moves of a tensor by its GGUF name, such as `blk.3.attn_q.weight`."""
        role = name.split(".", 2)[2] if name.startswith("blk.") else name
        suffixed, role = role, role.removesuffix(".weight").removesuffix(".bias")
        found = self.moves.get(suffixed) or self.moves.get(role)
        if found is None:
            ends = (m for pattern, m in self.moves.items() if pattern[0] == "*" and suffixed.endswith(pattern[1:]))
            found = next(ends, ())
        return list(found) if isinstance(found, tuple) else [found]


def float32(value: float) -> float:
    """The value rounded to F32, as a GGUF file holds it."""
    return float(np.float32(value))
