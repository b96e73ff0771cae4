"""Options of verbs that take pictures and sounds. Names as in llama-mtmd-cli."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Optional

from .command import Group, Option

_PANEL = "Pictures and sound (names as in llama-mtmd-cli)"
Mmproj = Annotated[
    Optional[str],
    Option("-mm", "--mmproj", help="File with what sees or hears (folders have it).", metavar="FILE", panel=_PANEL),
]


@dataclass(frozen=True)
class MediaOptions:
    """The values of these options."""

    mmproj: Mmproj = None
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
