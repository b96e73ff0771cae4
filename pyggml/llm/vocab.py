"""The vocabulary of a GGUF model: text to token ids and back, with llama.cpp's exact ids.

`tokenizer.ggml.model = llama` (SPM) only. The merging (greedy: the adjacent pair whose union has the highest score, the
leftmost of equals) is sentencepiece's BPE, run on a model that is built from the GGUF's vocabulary. What llama.cpp does
otherwise than sentencepiece is done here: special tokens are cut out of the raw text before spaces are escaped, every
piece takes part in merges whatever its type, and a piece that is no token becomes byte tokens.

HF tokenizers was the other candidate. It ranks merges by the pair, one rank for each, so that pairs of equal score are
not merged from left to right as they must be, and it depends on huggingface-hub.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pyggml.errors import ModelError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

_KEY = "tokenizer.ggml."
_SPACE = "\u2581"
_UNKNOWN = 0  # the merger's piece for what is no token

# llama.cpp knows these by their text, for files that do not say what they are: all of them end generation and are
# control tokens. The first set may also be the end of turn (eot).
_EOT_TEXTS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>"),
    *("<EOT>", "_<EOT>", "[EOT]", "<｜end\u2581of\u2581sentence｜>"),
}
_EOG_TEXTS = _EOT_TEXTS | {"</s>", "<eos>", "[EOS]", "<|eom_id|>", "<|return|>", "<|call|>"}


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Vocab:
    """Tokens and their ids; made by `Vocab.from_gguf`. The ids `bos eos unk eot nl` are None where there is none."""

    def __init__(self, texts: Sequence[str], scores: Sequence[float], types: Sequence[TokenType]) -> None:
        # llama.cpp reads a token up to its first NUL; sentencepiece refuses pieces with one.
        self._texts = [text.partition("\0")[0] or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
        self._ids = {text: i for i, text in enumerate(self._texts)}
        if len(self._ids) != len(self._texts):
            twice = next(text for i, text in enumerate(self._texts) if self._ids[text] != i)
            raise ModelError(f"{_KEY}tokens: the token {twice!r} occurs twice")
        self._types = list(types)
        self._eog: set[int] = set()
        self.bos: int | None = 1
        self.eos: int | None = 2
        self.unk: int | None = 0
        self.eot: int | None = None
        self.add_bos = True
        self.add_eos = False
        self.add_space_prefix = True
        self._find_ends()
        self._byte_ids = [self._ids.get(f"<0x{b:02X}>", self._ids.get(chr(b)) if b < 128 else None) for b in range(256)]
        self.nl = self._byte_ids[10]
        self._pieces = [self._piece(i) for i in range(len(self._texts))]
        special = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
        cut = [(text, i) for i, text in enumerate(self._texts) if self._types[i] in special]
        # The longest first, in bytes: llama.cpp cuts token by token, not from left to right.
        self._cut = sorted(cut, key=lambda c: -len(_utf8(c[0])))
        # What is not UTF-8 in the file can match no text.
        self._ids_of_pieces = [_UNKNOWN, *(i for i, text in enumerate(self._texts) if _is_text(text))]
        self._merger = _merger([(self._texts[i], scores[i]) for i in self._ids_of_pieces[1:]])

    @staticmethod
    def from_gguf(kv: Mapping[str, object]) -> Vocab:
        """The vocabulary in a GGUF's metadata. Raises ModelError where it is missing, malformed or of another kind."""
        model = kv.get(f"{_KEY}model")
        if model is None:
            raise ModelError(f"the file has no vocabulary: {_KEY}model is missing")
        if model != "llama":
            raise ModelError(f"the tokenizer model {model!r} is not supported yet; 'llama' (SPM) is")
        texts = kv.get(f"{_KEY}tokens")
        if not isinstance(texts, list) or not all(isinstance(t, str) for t in cast("list[Any]", texts)):
            raise ModelError(f"{_KEY}tokens is missing or not an array of strings")
        texts = cast("list[str]", texts)
        n = len(texts)
        scores = _numbers(kv, "scores", n, 0)
        codes = [int(code) for code in _numbers(kv, "token_type", n, TokenType.NORMAL)]
        known = frozenset(TokenType)
        types = [TokenType(code) if code in known else TokenType.UNDEFINED for code in codes]
        vocab = Vocab(texts, scores, types)
        vocab.bos = _id(kv, "bos_token_id", n, vocab.bos)
        vocab.eos = _id(kv, "eos_token_id", n, vocab.eos)
        vocab.unk = _id(kv, "unknown_token_id", n, vocab.unk)
        vocab.eot = _id(kv, "eot_token_id", n, vocab.eot)
        vocab._eog |= {i for i in (vocab.eos, vocab.eot, _id(kv, "eom_token_id", n, None)) if i is not None}
        if vocab.nl is None:
            vocab.nl = _id(kv, "padding_token_id", n, None)
        vocab.add_bos = _flag(kv, "add_bos_token", True) and vocab.bos is not None
        vocab.add_eos = _flag(kv, "add_eos_token", False) and vocab.eos is not None
        vocab.add_space_prefix = _flag(kv, "add_space_prefix", True)
        return vocab

    @property
    def n_tokens(self) -> int:
        return len(self._texts)

    def text(self, token: int) -> str:
        """The token as the vocabulary spells it: U+2581 for spaces, bytes that are not UTF-8 as surrogates."""
        return self._texts[self._checked(token)]

    def is_control(self, token: int) -> bool:
        return self._types[self._checked(token)] == TokenType.CONTROL

    def is_byte(self, token: int) -> bool:
        return self._types[self._checked(token)] == TokenType.BYTE

    def is_eog(self, token: int) -> bool:
        """Whether the token ends generation: eos, eot, or one that is known to by its text."""
        return self._checked(token) in self._eog

    def tokenize(
        self, text: str, add_special: bool = True, parse_special: bool = False, continued: bool = False
    ) -> list[int]:
        """Ids of `text`. `add_special` adds bos and eos where the model wants them; `parse_special` takes the text of
        control tokens for the tokens (user-defined tokens always are). `continued` says that it follows other text, so
        that no space is put before it. Lone surrogates are read as U+FFFD.
        Raises ModelError where the vocabulary has neither byte tokens nor an unknown token for a character."""
        out: list[int] = []
        if add_special and self.add_bos and self.bos is not None:
            out.append(self.bos)
        after_special = not continued
        for part in self._split(_well_formed(text), parse_special):
            if isinstance(part, int):
                out.append(part)
            else:
                self._merge(" " + part if self.add_space_prefix and after_special else part, out)
            after_special = isinstance(part, int)
        if add_special and self.add_eos and self.eos is not None:
            out.append(self.eos)
        return out

    def token_to_piece(self, token: int, special: bool = False) -> bytes:
        """The bytes that a token stands for, perhaps part of a UTF-8 character. Control and unknown tokens are empty
        unless `special`. Raises ModelError for an id outside the vocabulary."""
        kind = self._types[self._checked(token)]
        return b"" if not special and kind in (TokenType.CONTROL, TokenType.UNKNOWN) else self._pieces[token]

    def detokenize(self, ids: Iterable[int], remove_special: bool = False, unparse_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. As in llama.cpp, the space prefix is dropped only from
        the first id: not behind a bos, shown or removed. `remove_special` drops the bos and eos that tokenize added;
        `unparse_special` shows control tokens by their text. Raises ModelError for an id outside the vocabulary."""
        tokens = list(ids)
        strip = self.add_space_prefix
        if remove_special and self.add_bos and tokens[:1] == [self.bos]:
            del tokens[0]
            strip = False
        if remove_special and self.add_eos and tokens[-1:] == [self.eos]:
            del tokens[-1]
        pieces = [self.token_to_piece(t, unparse_special) for t in tokens]
        if strip and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        return b"".join(pieces).decode("utf-8", "replace")

    def _checked(self, token: int) -> int:
        if not 0 <= token < len(self._texts):
            raise ModelError(f"token {token} is not in the vocabulary of {len(self._texts)}")
        return token

    def _find_ends(self) -> None:
        for i, text in enumerate(self._texts):
            if text in _EOG_TEXTS:
                self._eog.add(i)
                self._types[i] = TokenType.CONTROL
                if self.eot is None and text in _EOT_TEXTS:
                    self.eot = i

    def _piece(self, token: int) -> bytes:
        text, kind = self._texts[token], self._types[token]
        if kind == TokenType.NORMAL:
            return _utf8(text.replace(_SPACE, " "))
        if kind == TokenType.BYTE:
            try:
                return bytes([int(text.removeprefix("<0x").removesuffix(">"), 16)])
            except ValueError:
                raise ModelError(f"{_KEY}tokens: {text!r} is typed as a byte and does not spell one") from None
        return b"" if kind in (TokenType.UNUSED, TokenType.UNDEFINED) else _utf8(text)

    def _split(self, text: str, parse_special: bool) -> list[str | int]:
        """Text with the special tokens cut out."""
        parts: list[str | int] = [text] if text else []
        for needle, token in self._cut:
            if needle not in text or not (parse_special or self._types[token] == TokenType.USER_DEFINED):
                continue
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                for i, piece in enumerate(part.split(needle)):
                    if i:
                        cut.append(token)
                    if piece:
                        cut.append(piece)
            parts = cut
        return parts

    def _merge(self, text: str, out: list[int]) -> None:
        text = text.replace(" ", _SPACE)
        merged = cast("list[int]", self._merger.encode(text, out_type=int))
        if _UNKNOWN not in merged:
            out += [self._ids_of_pieces[i] for i in merged]
            return
        # A run of unknown characters is one piece, and may spell a token that no merge leads to: hence ids and texts.
        pieces = cast("list[str]", self._merger.encode(text, out_type=str))
        for i, piece in zip(merged, pieces, strict=True):
            out += self._bytes(piece) if i == _UNKNOWN else [self._ids_of_pieces[i]]

    def _bytes(self, piece: str) -> list[int]:
        tokens: list[int] = []
        for byte in piece.encode():
            token = self._byte_ids[byte]
            token = self.unk if token is None else token
            if token is None:
                raise ModelError(f"the vocabulary has no token for byte 0x{byte:02X} and no unknown token")
            tokens.append(token)
        return tokens


class StreamDecoder:
    """Text of tokens as they come, in whole UTF-8 characters. The joined results are what one decode would give."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that this token completes, perhaps none."""
        return self._decoder.decode(self._vocab.token_to_piece(token))

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD; the decoder is then as new."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _well_formed(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _numbers(kv: Mapping[str, object], name: str, n: int, default: float) -> list[float]:
    """The first `n` numbers of an array, as Python's."""
    values = kv.get(_KEY + name)
    if values is None:
        return [default] * n
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iuf" or len(array) < n:
        raise ModelError(f"{_KEY}{name} is not an array of {n} numbers, one for each token")
    if np.isnan(array).any():
        raise ModelError(f"{_KEY}{name} has a NaN")
    return cast("list[float]", array[:n].tolist())


def _id(kv: Mapping[str, object], name: str, n: int, default: int | None) -> int | None:
    """A token id; files write ids outside the vocabulary (2**32 - 1) for "none", and then the default holds."""
    value = kv.get(_KEY + name)
    if value is not None and type(value) is not int:
        raise ModelError(f"{_KEY}{name} is not an integer: {value!r}")
    for token in (value, default):
        if isinstance(token, int) and 0 <= token < n:
            return token
    return None


def _flag(kv: Mapping[str, object], name: str, default: bool) -> bool:
    value = kv.get(_KEY + name, default)
    if not isinstance(value, bool):
        raise ModelError(f"{_KEY}{name} is not a bool: {value!r}")
    return value


def _merger(pieces: Sequence[tuple[str, float]]) -> SentencePieceProcessor:
    """A sentencepiece BPE model of these pieces with their scores, all of the normal type, numbered from 1.

    The model is a protobuf message, written here field by field (sentencepiece_model.proto): protobuf itself would be
    a dependency for four message types.
    """
    from sentencepiece import SentencePieceProcessor

    unknown = "<unk>"
    texts = {text for text, _ in pieces}
    while unknown in texts:  # sentencepiece wants one unknown piece, and llama.cpp's takes part in merges
        unknown += ">"
    model = bytearray(_field(1, _field(1, unknown.encode()) + b"\x18\x02"))  # type = UNKNOWN
    for text, score in pieces:  # -0.0 + 0.0 is 0.0; sentencepiece would rank -0.0 below it
        model += _field(1, _field(1, text.encode()) + b"\x15" + struct.pack("<f", score + 0.0))
    model += _field(2, b"\x18\x02")  # model_type = BPE
    model += _field(3, _field(1, b"identity") + b"\x18\x00\x20\x00\x28\x00")  # no dummy prefix; leave spaces alone
    try:
        return SentencePieceProcessor(model_proto=bytes(model))
    except RuntimeError as e:  # a piece of 8000 bytes or more
        raise ModelError(f"{_KEY}tokens: sentencepiece cannot take this vocabulary: {e}") from e


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _field(number: int, payload: bytes) -> bytes:
    """A length-delimited protobuf field."""
    size, n = b"", len(payload)
    while n > 127:
        size += bytes([n & 127 | 128])
        n >>= 7
    return bytes([number << 3 | 2]) + size + bytes([n]) + payload
