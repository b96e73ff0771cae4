"""The file of log-probabilities that llama.cpp's perplexity tool saves of a base model (--kl-divergence-base).

"_logits_", n_ctx, n_vocab, n_chunks (uint32 each), the tokens (int32 [n_chunks, n_ctx]); then, for each predicted token
of each chunk (those of its second half but the first), a scale and the least log-probability (float32 each) and n_vocab
uint16: log p = scale * x + least. Rows are padded to an even number of them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyggml.errors import GGUFError
from pyggml.gguf_io.atomic_file import AtomicFile
from pyggml.small_file import open_regular
from pyggml.types import Floats

from .chunks import Chunks, Tokens

if TYPE_CHECKING:
    from typing_extensions import Self

_MAGIC = b"_logits_"
_HEADER = struct.Struct("<8sIII")
_RANGE = 16.0  # log-probabilities further below the largest are stored as the least
_STEPS = np.float32(65535)
Codes = npt.NDArray[np.uint16]


class LogitsWriter:
    """Writes the file at `path`; it appears when the `with` block ends without an exception. Raises OSError."""

    def __init__(self, path: str | os.PathLike[str], chunks: Chunks, n_vocab: int) -> None:
        self._out = AtomicFile(path)
        try:
            self._out.file.write(_HEADER.pack(_MAGIC, chunks.n_ctx, n_vocab, chunks.n_chunks))
            self._out.file.write(chunks.ids[: chunks.n_chunks * chunks.n_ctx].astype("<i4").tobytes())
        except BaseException:
            self._out.discard()
            raise

    def add(self, logits: Floats) -> None:
        """The rows [n, n_vocab] of the next tokens."""
        self._out.file.write(_encoded(logits).tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._out.__exit__(kind, e, tb)


class LogitsFile:
    """A saved file, opened.

    n_ctx, n_vocab, n_chunks   the sizes it was computed with
    tokens                     int32 [n_chunks, n_ctx]

    Raises GGUFError for a file that is not one, or that ends too early.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        name = os.fspath(path)
        try:
            with open_regular(name, GGUFError) as f:
                head = f.read(_HEADER.size)
                size = os.fstat(f.fileno()).st_size
        except OSError as e:
            raise GGUFError(f"{name}: cannot be read: {e.strerror}") from e
        if len(head) < _HEADER.size or not head.startswith(_MAGIC):
            raise GGUFError(f"{name}: is no file of log-probabilities (perplexity --kl-divergence-base)")
        _, self.n_ctx, self.n_vocab, self.n_chunks = _HEADER.unpack(head)
        self._n_rows = self.n_ctx - 1 - self.n_ctx // 2  # rows of each chunk
        at, n_tokens = _HEADER.size, self.n_ctx * self.n_chunks
        row = 4 + 2 * ((self.n_vocab + 1) // 2)
        needed = at + 4 * n_tokens + 2 * row * self._n_rows * self.n_chunks
        if size < needed or self._n_rows < 1 or not self.n_vocab or not self.n_chunks:
            raise GGUFError(
                f"{name}: is truncated: {self.n_chunks} chunks of {self.n_ctx} tokens do not fit its {size} bytes"
            )
        tokens = np.memmap(name, "<i4", "r", at, (self.n_chunks, self.n_ctx))
        self.tokens: Tokens = np.array(tokens, np.int32)
        shape = (self.n_chunks, self._n_rows, row)
        self._rows: np.memmap[Any, Any] = np.memmap(name, "<u2", "r", at + 4 * n_tokens, shape)

    def log_probs(self, chunk: int) -> Iterator[Floats]:
        """The log-probabilities float32 [n_vocab] of the predicted tokens of a chunk."""
        for row in self._rows[chunk]:
            scale, least = row[:4].view("<f4")
            yield row[4 : 4 + self.n_vocab].astype(np.float32) * scale + least


def _encoded(logits: Floats) -> Codes:
    """Rows of the file for rows of logits."""
    n, n_vocab = logits.shape
    out = np.zeros((n, 4 + 2 * ((n_vocab + 1) // 2)), "<u2")
    top = logits.max(axis=1, keepdims=True)
    least = np.maximum(logits.min(axis=1, keepdims=True), top - np.float32(_RANGE))
    log_sum = np.log(np.exp(logits - top).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
    scale = (top - least) / _STEPS
    out[:, :4] = np.concatenate((scale, least - top - log_sum), axis=1).astype("<f4").view("<u2")
    steps = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    out[:, 4 : 4 + n_vocab] = np.rint(np.maximum(logits - least, 0) * steps)
    return out
