"""Write models for sentencepiece field by field (sentencepiece_model.proto), which saves a dependency on protobuf."""

from __future__ import annotations


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited protobuf field."""
    size, n = b"", len(payload)
    while n > 127:
        size += bytes([n & 127 | 128])
        n >>= 7
    return bytes([number << 3 | 2]) + size + bytes([n]) + payload


def normalizer(charsmap: bytes) -> bytes:
    """A model that only applies a compiled character map, and leaves spaces alone."""
    unknown = field(1, field(1, b"<unk>") + b"\x18\x02")  # type = UNKNOWN; sentencepiece wants one, and another piece
    piece = field(1, field(1, b"a") + b"\x15" + bytes(4))
    spec = field(1, b"map") + field(2, charsmap) + b"\x18\x00\x20\x00\x28\x00"  # no dummy prefix; leave spaces alone
    return unknown + piece + field(2, b"") + field(3, spec)
