"""The record of a family of folders with a tower: the keys that its config becomes, how its tensors are named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..config import Config

Array = npt.NDArray[Any]
PROCESSOR_KEY = "pyggml.media.processor"  # of a file: the processor's config, as JSON; what the folder says of pictures
Split = Callable[[Array], Sequence[Array]]  # a tensor of the checkpoint -> those of the file, in the order of its names


class TowerConfig:
    """A config.json with a tower: `whole`, the part of the tower (`vision_config`), and `text`."""

    def __init__(self, path: str, raw: Mapping[str, Any], part: str) -> None:
        self.path, self._raw, self._part = path, raw, part
        self.whole = Config(path, {k: v for k, v in raw.items() if k != "text_config"})

    def _config(self, name: str) -> Config:
        values = self._raw.get(name)
        return Config(self.path, cast("dict[str, Any]", values) if isinstance(values, dict) else {})

    @cached_property
    def tower(self) -> Config:
        """The tower's part; the whole config of a folder that is a tower alone."""
        return self._config(self._part) if self._part and self._part in self._raw else self.whole

    @cached_property
    def text(self) -> Config:
        """The text model's part; the whole config in folders that keep it there."""
        return self._config("text_config") if "text_config" in self._raw else self.whole


@dataclass(frozen=True, kw_only=True)
class Name:
    """How tensors of a checkpoint whose names match `pattern` (a regular expression) become tensors of a file.

    to     the names in the file, in which `\\1` is the first group of the pattern
    split  makes their arrays of the array as it is stored (BF16: as uint16); None: it stays as it is
    value  `split` changes values: it gets them in float32
    """

    pattern: str
    to: tuple[str, ...]
    split: Split | None = None
    value: bool = False


def name(pattern: str, *to: str, split: Split | None = None, value: bool = False) -> Name:
    """See `Name`. Without names in the file, nothing reads the tensor."""
    return Name(pattern=pattern, to=to, split=split, value=value)


@dataclass(frozen=True, kw_only=True)
class TowerFamily:
    """One or more model types whose towers are read alike.

    types    values of `model_type`
    of       values of the tower's own `model_type`, where a folder may have one of several towers; empty: any
    keys     the keys of the file without `clip.vision.` or `clip.audio.`; `projector_type` among them is
             `clip.projector_type`
    names    how its tensors are named: the first that matches
    begin    what the names of the tower's tensors begin with (after `model.`); all others are the text model's
    part     the tower's part of the config; empty: the folder is a tower alone
    side     `vision`, `audio` or `text`
    alone    the folder has no decoder
    """

    types: tuple[str, ...]
    of: tuple[str, ...] = ()
    keys: Callable[[TowerConfig], Mapping[str, object]]
    names: Callable[[TowerConfig], Sequence[Name]]
    begin: tuple[str, ...]
    part: str = "vision_config"
    side: str = "vision"
    alone: bool = False

    def metadata(self, c: TowerConfig) -> dict[str, Any]:
        """The metadata of the file."""
        kv: dict[str, Any] = {"general.architecture": "clip", "general.type": "mmproj"}
        kv[f"clip.has_{self.side}_encoder"] = True
        for key, value in self.keys(c).items():
            if value is None:
                continue
            where = "clip.projector_type" if key == "projector_type" else key
            where = where if where == "clip.projector_type" else f"clip.{self.side}.{where}"
            kv[where] = float(np.float32(value)) if isinstance(value, float) else value
        return kv
