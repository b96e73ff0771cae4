"""The interface of everything that runs a model: generation, evaluation, a cluster and a server use a `Decoder`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from pyggml.models.memory.memory import Memory
from pyggml.types import Floats, Ints

from .batch import Batch
from .loaded import LoadedModel

if TYPE_CHECKING:
    from typing_extensions import Self

    from .adapters.active import Scaled


class Decoder(Protocol):
    """A model with a memory of sequences. `LlamaContext` runs a model, or some layers of it (a stage), on this machine;
    `StagedContext` runs the stages of a cluster. Callers need not know which of the two they have.

    A decoder is used by one thread at a time, as a context manager that closes it at the end.

    model       the hyperparameters, the vocabulary and the way of writing tokens
    memory      the sequences, as the last decode and the operations on them left them. An operation that raises
                changes nothing; `seq_rm` returns False, with nothing changed, when a sequence cannot be cut there
    n_ctx       cells of the memory, for all sequences together
    n_batch     tokens that one decode takes at most
    n_threads   threads that it computes on in this process
    logits      float32 [n_outputs, n_vocab] of the last decode, in the order of its batch. The array stays as it is:
                the next decode makes another
    outputs     int32 [n_outputs]: the indices in the batch of the rows of `logits`, ascending
    embeddings  float32 [n_outputs, n_embd]: embeddings instead of logits, when the decoder gives embeddings or has an
                encoder
    hidden      after `keep_hidden`: float32 [n_tokens, n_embd] of all tokens of the last decode
    """

    @property
    def model(self) -> LoadedModel: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def n_batch(self) -> int: ...
    @property
    def n_threads(self) -> int: ...
    @property
    def logits(self) -> Floats: ...
    @property
    def outputs(self) -> Ints: ...
    @property
    def embeddings(self) -> Floats: ...
    @property
    def hidden(self) -> Floats: ...

    def decode(self, batch: Batch | Sequence[int]) -> None:
        """Evaluate a batch: its tokens continue their sequences. Plain token ids are appended to sequence 0, and the
        last of them gets logits. On any error the memory is as it was before. Raises BatchError for a bad batch,
        KVCacheFull when it does not fit."""
        ...

    def encode(self, batch: Batch | Sequence[int]) -> None:
        """Run the encoder on the texts that the next decodes of their sequences see. Raises ModelError for a model
        without an encoder."""
        ...

    def keep_hidden(self) -> None:
        """Set `hidden` after each decode from now on. Raises ModelError when the decoder cannot give it."""
        ...

    def set_loras(self, loras: Iterable[Scaled]) -> None:
        """Run the next decodes with these adapters, each with its scale. Raises ModelError for adapters that do not
        fit, and when the decoder takes none."""
        ...

    def save_state(self, path: str | os.PathLike[str], tokens: Sequence[int] = ()) -> None:
        """Write memory and logits to a file, and `tokens` with them. Raises StateError when it cannot be written,
        ModelError when the decoder has no state to save."""
        ...

    def load_state(self, path: str | os.PathLike[str]) -> list[int]:
        """Restore what `save_state` wrote, and return its tokens. Raises StateError for a file of another model or a
        damaged one, KVCacheFull when it does not fit; then nothing has changed."""
        ...

    def perf_sampled(self, start: float) -> None:
        """Count a token that was sampled since `start` (of time.perf_counter())."""
        ...

    def perf_guessed(self, n: int) -> None:
        """Count the last decode, of `n` tokens, as that of a token and guesses; or, with 0, a guess that was right."""
        ...

    def close(self) -> None:
        """Free what it holds. Closing again does nothing."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...
