"""Read and write tokenizer.model: the parts of a SentencePiece model that make up a vocabulary.

The file is a protobuf message (sentencepiece_model.proto of github.com/google/sentencepiece); reading its dozen fields
takes fewer lines than a dependency on protobuf would.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pyggml import limits
from pyggml.errors import ModelError

UNIGRAM, BPE = 1, 2  # values of `trainer_spec.model_type`
_BYTE = 6  # a value of `SentencePiece.type`
_TYPES = range(1, 7)  # all of them
_NONE = 2**64 - 1  # -1 in an int32 field
_VARINT = 10  # bytes, at most


@dataclass
class SentencePiece:
    """The pieces in the order of their ids: text, score, type (numbers as in GGUF: 1 normal ... 6 byte). `roles` has
    the ids of `unk`, `bos`, `eos` and `pad`, as far as the model has them."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list[tuple[str, float, int]])
    model_type: int = UNIGRAM
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    roles: Mapping[str, int] = field(default_factory=dict[str, int])


def parse(data: bytes, path: str) -> SentencePiece:
    """Read a model. Raises ModelError for data that is not a model, and for more pieces than a tokenizer may have
    tokens."""
    found = SentencePiece()
    try:
        for number, value in _fields(data):
            if number == 1:
                piece = dict(_fields(_bytes(value)))
                score = struct.unpack("<f", _bytes(piece[2]))[0] if 2 in piece else 0.0
                kind = _number(piece.get(3, 1))
                if kind not in _TYPES:
                    raise ModelError(f"{path}: a piece has the type {kind}; there are 1 to 6")
                found.pieces.append((_bytes(piece.get(1, b"")).decode(), score, kind))
                if len(found.pieces) > limits.TOKENIZER_TOKENS:
                    raise ModelError(f"{path}: has more than {limits.TOKENIZER_TOKENS} pieces")
            elif number == 2:
                found.model_type = _number(dict(_fields(_bytes(value))).get(3, UNIGRAM))
            elif number == 3:
                spec = dict(_fields(_bytes(value)))
                found.charsmap = _bytes(spec.get(2, b""))
                found.add_dummy_prefix = bool(_number(spec.get(3, 1)))
                found.remove_extra_whitespaces = bool(_number(spec.get(4, 1)))
    except (IndexError, ValueError, TypeError, struct.error):
        raise ModelError(f"{path}: is no SentencePiece model") from None
    if not found.pieces:
        raise ModelError(f"{path}: is no SentencePiece model")
    return found


def build(model: SentencePiece) -> bytes:
    """The bytes of tokenizer.model, as the sentencepiece library reads it. Raises ModelError for a model that has some
    of the 256 byte pieces and lacks others."""
    n_bytes = sum(kind == _BYTE for _, _, kind in model.pieces)
    if n_bytes not in (0, 256):
        raise ModelError(f"the vocabulary has {n_bytes} tokens of bytes: SentencePiece wants all 256, or none")

    def number(field_no: int, value: int) -> bytes:
        return _varint(field_no << 3) + _varint(value)

    def data(field_no: int, value: bytes) -> bytes:
        return _varint(field_no << 3 | 2) + _varint(len(value)) + value

    out = b"".join(
        data(1, data(1, text.encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind))
        for text, score, kind in model.pieces
    )
    trainer = number(3, model.model_type) + number(4, len(model.pieces)) + number(35, int(n_bytes > 0))
    for i, role in enumerate(("unk", "bos", "eos", "pad")):
        found = model.roles.get(role)
        trainer += number(40 + i, _NONE if found is None else found)
        trainer += b"" if found is None else data(45 + i, model.pieces[found][0].encode())
    spaces = number(3, int(model.add_dummy_prefix)) + number(4, int(model.remove_extra_whitespaces))
    return out + data(2, trainer) + data(3, data(2, model.charsmap) + spaces)


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def parse_charsmap(data: bytes) -> bytes:
    """The character map in `data`, which is a sentencepiece model and need not have anything else."""
    spec = dict(_fields(_bytes(dict(_fields(data)).get(3, b""))))
    return _bytes(spec.get(2, b""))


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError
    return value


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise TypeError
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The number and the value of each field of a message. A value is an int, or bytes for strings, messages and
    floats."""
    pos = 0

    def varint() -> int:
        nonlocal pos
        value = 0
        for shift in range(0, 7 * _VARINT, 7):
            byte = data[pos]
            pos += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError

    while pos < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        n = {1: 8, 5: 4}.get(kind) or (varint() if kind == 2 else -1)
        if n < 0 or n > len(data) - pos:
            raise ValueError
        pos += n
        yield key >> 3, data[pos - n : pos]
