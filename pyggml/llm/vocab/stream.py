"""The text of tokens as they come."""

from __future__ import annotations

import codecs

from .vocab import Vocab


class StreamDecoder:
    """Gives the text of tokens as they come, in whole UTF-8 characters. Joined, the results are the text of
    `Vocab.detokenize`. `special`: show control tokens too."""

    def __init__(self, vocab: Vocab, special: bool = False) -> None:
        self._vocab, self._special = vocab, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that this token completes; may be empty."""
        return self._decoder.decode(self._vocab.token_to_piece(token, special=self._special))

    def flush(self) -> str:
        """End the text: returns U+FFFD when a character is unfinished, and otherwise "". The decoder then begins
        anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
