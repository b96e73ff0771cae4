"""Options of verbs that take pictures and sounds. Names as in llama-mtmd-cli."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Optional

from .command import Group, Option

_PANEL = "Pictures and sound (names as in llama-mtmd-cli)"


@dataclass(frozen=True)
class TowerOptions:
    """What a model sees or hears with."""

    mmproj: Annotated[
        Optional[str],
        Option("-mm", "--mmproj", help="File with what sees or hears (folders have it).", metavar="FILE", panel=_PANEL),
    ] = None
    image_min_tokens: Annotated[
        Optional[int],
        Option("--image-min-tokens", help="Tokens of a picture, at least (default: the model's).", min=1, panel=_PANEL),
    ] = None
    image_max_tokens: Annotated[
        Optional[int], Option("--image-max-tokens", help="... and at most.", min=1, panel=_PANEL)
    ] = None

    @property
    def image_tokens(self) -> tuple[int | None, int | None]:
        """See `load_model`."""
        return self.image_min_tokens, self.image_max_tokens


Towers = Annotated[TowerOptions, Group.of(TowerOptions)]


@dataclass(frozen=True)
class MediaOptions:
    """The values of these options."""

    towers: Towers
    image: Annotated[
        Optional[list[str]], Option("--image", help="A picture (repeatable).", metavar="FILE", panel=_PANEL)
    ] = None
    audio: Annotated[
        Optional[list[str]],
        Option("--audio", help="A sound: wav, flac, mp3 (repeatable).", metavar="FILE", panel=_PANEL),
    ] = None

    @property
    def things(self) -> list[tuple[str, str]]:
        """The pictures, then the sounds: ("image", PATH), ("audio", PATH)."""
        return [*(("image", x) for x in self.image or ()), *(("audio", x) for x in self.audio or ())]


Media = Annotated[MediaOptions, Group.of(MediaOptions)]
