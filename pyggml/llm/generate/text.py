"""Text from tokens as they come: whole characters, and nothing of a stop string."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, cast

from pyggml.errors import GGMLError, SamplerError

from ..vocab import StreamDecoder, Vocab


def stop_strings(stop: Any, error: type[GGMLError]) -> tuple[str, ...]:
    """One stop string, or several, as a tuple. Raises `error` for anything else."""
    several: Any = (stop,) if isinstance(stop, str) else stop
    if not isinstance(several, Sequence) or not all(isinstance(s, str) for s in cast("Sequence[object]", several)):
        raise error(f"stop must be a string, or a list of them, not {stop!r:.60}")
    return tuple(cast("Sequence[str]", several))


def chat_ids(vocab: Vocab, text: str) -> list[int]:
    """The tokens of a chat that a template has rendered, whose markers are control tokens. The text gets the token that
    begins texts unless the template has written it already."""
    has_bos = vocab.bos is not None and text.startswith(vocab.text(vocab.bos))
    return vocab.tokenize(text, not has_bos, True)


class TextStream:
    """Turns tokens into text. Text that may be the beginning of a stop string is held back until that is clear. With
    `special`, control tokens are shown as text."""

    def __init__(self, vocab: Vocab, stop: Sequence[str] = (), special: bool = False) -> None:
        if not isinstance(stop, Sequence) or not all(isinstance(s, str) and s for s in stop):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SamplerError("a stop string must not be empty, or no string")
        self._decoder = StreamDecoder(vocab, special)
        self._stop = frozenset(stop)  # each token is compared with few of them, however many there are
        self._in_order, self._lengths = sorted(self._stop), sorted({len(s) for s in self._stop})
        self._held: str = ""
        self.found: str = ""  # the stop string that was found; it and what follows are never shown

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return bool(self.found)

    def push(self, token: int) -> str:
        """The text that may be shown now."""
        return self._filter(self._decoder.push(token))

    def flush(self) -> str:
        """What was held back, at the end."""
        shown = self._filter(self._decoder.flush())
        shown, self._held = shown + self._held, ""
        return shown

    def _filter(self, text: str) -> str:
        if not self._stop:
            return text
        n_held, text = len(self._held), self._held + text
        lengths = self._lengths[: bisect_right(self._lengths, len(text))]
        # What was held back has no stop string in it: one that is found now ends behind it.
        places = ((i, n) for n in lengths for i in range(max(n_held - n + 1, 0), len(text) - n + 1))
        first = min(((i, n) for i, n in places if text[i : i + n] in self._stop), default=None)
        if first is not None:
            i, n = first
            self.found, self._held = text[i : i + n], ""
            return text[:i]
        n = self._n_begun(text)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def _n_begun(self, text: str) -> int:
        """How many characters at the end of `text` are the beginning of a stop string: of those that come behind these
        characters in order, the first one begins with them, if any does."""
        for n in range(min(len(text), self._lengths[-1] - 1), 0, -1):
            end = text[len(text) - n :]
            at = bisect_right(self._in_order, end)
            if at < len(self._in_order) and self._in_order[at].startswith(end):
                return n
        return 0
