"""Text of tokens as they come."""

from __future__ import annotations

import codecs

from .vocab import Vocab


class StreamDecoder:
    """Text of tokens as they come, in whole UTF-8 characters. The joined results are what one decode would give, spaces
    before punctuation included; with `special` those of control tokens, too."""

    def __init__(self, vocab: Vocab, special: bool = False) -> None:
        self._vocab, self._special = vocab, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that this token completes, perhaps none."""
        return self._decoder.decode(self._vocab.token_to_piece(token, special=self._special))

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD; the decoder is then as new."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
