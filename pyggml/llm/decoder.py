"""What runs a model for others: generation, evaluation, a cluster and a server ask a `Decoder` for tokens' logits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pyggml.models.memory.memory import Memory
from pyggml.types import Floats, Ints

from .batch import Batch
from .loaded import LoadedModel

if TYPE_CHECKING:
    from typing_extensions import Self


class Decoder(Protocol):
    """A model with a memory of sequences. `LlamaContext` is one, on this machine, also of some layers of a model (a
    stage); `StagedContext` runs all stages of a cluster. Nobody asks which of them it has.

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
    embeddings  in their place in a decoder of embeddings, float32 [n_outputs, n_embd], and of what was encoded
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
        """Evaluate the tokens of a batch behind what their sequences have; token ids are appended to sequence 0, with
        logits of the last. On any error the memory is as it was before. Raises BatchError for a batch that cannot be
        taken, KVCacheFull when it does not fit."""
        ...

    def encode(self, batch: Batch | Sequence[int]) -> None:
        """Encode the texts that the next decodes of their sequences see. Raises ModelError without an encoder."""
        ...

    def keep_hidden(self) -> None:
        """Have `hidden` from the next decode on. Raises ModelError when the decoder cannot give it."""
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

    def close(self) -> None:
        """Free what it holds. Closing again does nothing."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...
