"""Tokenizers: that of a model, and those of the transformers library, for `Llama(tokenizer=...)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ..errors import ModelError

if TYPE_CHECKING:
    from .llama import Llama


def text_of(utf8: bytes) -> str:
    """UTF-8 as text, without what is none. Raises ModelError for what is not bytes, such as text."""
    if not isinstance(utf8, bytes | bytearray):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"tokenize takes UTF-8, as in llama-cpp-python (text.encode()), not {utf8!r:.60}")
    return utf8.decode("utf-8", "ignore")


class BaseLlamaTokenizer(ABC):
    """Makes tokens of UTF-8, and UTF-8 of tokens."""

    @abstractmethod
    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of a text. `special`: whether texts of control tokens become these tokens."""

    @abstractmethod
    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """The text of tokens, which follow `prev_tokens`. `special`: whether control tokens are shown."""


class LlamaTokenizer(BaseLlamaTokenizer):
    """The tokenizer of a model's file."""

    def __init__(self, llama: Llama) -> None:
        self._vocab = llama.model.vocab

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        return self._vocab.tokenize(text_of(text), add_bos, special)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """As `BaseLlamaTokenizer.detokenize`. After a bos token the space is dropped that vocabularies add before a
        text."""
        text = b"".join(self._vocab.token_to_piece(t, special=special) for t in tokens)
        bos = self._vocab.bos
        return text[1:] if not prev_tokens and text[:1] == b" " and bos is not None and tokens[0] == bos else text

    def encode(self, text: str, add_bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of a text."""
        return self.tokenize(text.encode("utf-8", "ignore"), add_bos, special)

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        return self.detokenize(tokens).decode("utf-8", "ignore")

    @classmethod
    def from_ggml_file(cls, path: str) -> LlamaTokenizer:
        """Of a GGUF file."""
        from .llama import Llama

        return cls(Llama(path, vocab_only=True))


class LlamaHFTokenizer(BaseLlamaTokenizer):
    """A tokenizer of the transformers library."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self.hf_tokenizer = hf_tokenizer

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of a text. `special`: whether the tokenizer adds its control tokens, as in llama-cpp-python."""
        return self.hf_tokenizer.encode(text_of(text), add_special_tokens=special)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        def text(ids: list[int]) -> bytes:
            return self.hf_tokenizer.decode(ids, skip_special_tokens=not special).encode("utf-8", "ignore")

        return text(tokens) if prev_tokens is None else text(prev_tokens + tokens)[len(text(prev_tokens)) :]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str) -> LlamaHFTokenizer:
        """The tokenizer of a folder, or of a repository of the Hub. Raises ImportError without transformers."""
        try:
            from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
        except ImportError:
            raise ImportError("LlamaHFTokenizer needs the transformers library: pip install transformers") from None
        found: Any = AutoTokenizer.from_pretrained(pretrained_model_name_or_path)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return cls(found)
