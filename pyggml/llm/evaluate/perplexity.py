"""Perplexity of a text: how well a model predicts it, computed as llama.cpp does, so that the numbers compare."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import exp, nan, sqrt
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pyggml.errors import BatchError

from ..decoder import Decoder
from ..options import ContextOptions
from .chunks import Chunks, cut, new_context, nll_of, predicted
from .logits_file import LogitsWriter

if TYPE_CHECKING:
    from ..loaded import LoadedModel


@dataclass(frozen=True)
class Perplexity:
    """The estimate from the first `n_done` of `n_chunks` chunks.

    ppl       exp(nll)
    error     its standard error, llama.cpp's "+/-"; NaN for a single token
    nll       mean negative log-likelihood of a token, in nats
    n_scored  tokens that were predicted
    """

    n_done: int
    n_chunks: int
    n_scored: int
    nll: float
    ppl: float
    error: float


def perplexity(
    model: LoadedModel,
    text: str | Sequence[int],
    n_ctx: int = 512,
    stride: int = 0,
    n_chunks: int = -1,
    context: ContextOptions | None = None,
    save_logits: str | os.PathLike[str] | None = None,
) -> Iterator[Perplexity]:
    """The perplexity of a text (or of token ids). Yields an estimate after each chunk; the last one is the result.

    The text is cut into chunks of `n_ctx` tokens (0: as trained), of which the first `n_chunks` are taken (negative:
    all). Each is evaluated by itself, its first token replaced by bos when the model wants one. The tokens of its
    second half are predicted: those at n_ctx / 2 + 1 and after.

    With `stride` > 0 a chunk begins every `stride` tokens and its last `stride` tokens are predicted, so that each has
    at least n_ctx - stride tokens before it. Chunks are then `stride` / 2 tokens longer, and their first token stays:
    llama.cpp means to put bos there, but does so only after the chunk was evaluated.

    `save_logits`: a file for the log-probabilities of the whole vocabulary at each predicted token, see `logits_file`.
    It appears with the last chunk. It cannot be combined with a stride.

    Raises BatchError for a text of fewer than two chunks and for sizes that make no sense, ModelError for a model that
    ends each text with eos.
    """
    chunks = cut(model, text, n_ctx, n_chunks, stride)
    if save_logits is not None and stride:
        raise BatchError("perplexity: log-probabilities are saved of chunks side by side, not with a stride")
    return _estimates(new_context(model, chunks.n_ctx, context), chunks, save_logits)


def _estimates(ctx: Decoder, chunks: Chunks, save_logits: str | os.PathLike[str] | None) -> Iterator[Perplexity]:
    total, n_vocab = NllSum(), ctx.model.hparams.n_vocab
    with ctx, nullcontext() if save_logits is None else LogitsWriter(save_logits, chunks, n_vocab) as file:
        for i in range(chunks.n_chunks):
            for logits, tokens in predicted(ctx, chunks[i], chunks.first, chunks.bos):
                total.add(nll_of(logits, tokens))
                if file is not None:
                    file.add(logits)
            if i + 1 < chunks.n_chunks:
                yield total.estimate(i + 1, chunks.n_chunks)
    yield total.estimate(chunks.n_chunks, chunks.n_chunks)


@dataclass
class NllSum:
    """Negative log-likelihoods, summed up."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, nll: npt.NDArray[np.float64]) -> None:
        """Count some more tokens."""
        self.count += len(nll)
        self.total += float(nll.sum())
        self.squares += float((nll**2).sum())

    def estimate(self, n_done: int, n_chunks: int) -> Perplexity:
        """The perplexity after `n_done` of `n_chunks` chunks."""
        mean = self.total / self.count
        variance = self.squares / self.count - mean**2
        error = sqrt(variance / (self.count - 1)) * exp(mean) if variance > 0 and self.count > 1 else nan
        return Perplexity(n_done, n_chunks, self.count, mean, exp(mean), error)
