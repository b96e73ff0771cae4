"""Vocabularies: text to token ids and back."""

from .stream import StreamDecoder
from .tokens import TokenType
from .vocab import Vocab

__all__ = ["StreamDecoder", "TokenType", "Vocab"]
