"""An importance matrix, measured on a text as llama.cpp's imatrix tool does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pyggml.errors import BatchError

from ..decoder import Decoder
from ..options import ContextOptions
from ..quantize.collect import Collector
from ..quantize.imatrix import ImatrixSums
from .chunks import Chunks, cut, new_context, nll_of, predicted
from .perplexity import NllSum, Perplexity

if TYPE_CHECKING:
    from ..loaded import LoadedModel


@dataclass(frozen=True)
class Measured:
    """The progress: chunks done, chunks in all, and the perplexity so far (None when it is not computed)."""

    n_done: int
    n_chunks: int
    perplexity: Perplexity | None


def measure_imatrix(
    model: LoadedModel,
    text: str | Sequence[int],
    sums: ImatrixSums,
    n_chunks: int = -1,
    first_chunk: int = 0,
    *,
    parse_special: bool = False,
    process_output: bool = False,
    with_perplexity: bool = True,
    context: ContextOptions | None = None,
) -> Iterator[Measured]:
    """Evaluate a text (or token ids) in chunks of `sums.chunk_size` tokens, from `first_chunk` on, and add to `sums`
    the squares of the rows that the model's weights are multiplied with. Yields after each chunk.

    `process_output`: output.weight counts too. Raises BatchError for a text of fewer than two chunks,
    ModelError for a model that ends each text with eos, or one that gives values that are not finite.
    """
    n_ctx = sums.chunk_size
    ids = model.vocab.tokenize(text, True, parse_special) if isinstance(text, str) else list(text)
    if first_chunk > 0 and (first_chunk + 2) * n_ctx >= len(ids):
        raise BatchError(
            f"imatrix: the text has {len(ids)} tokens, too few to leave out {first_chunk} chunks of {n_ctx}"
        )
    chunks = cut(model, ids[max(first_chunk, 0) * n_ctx :], n_ctx, n_chunks)
    return _measured(new_context(model, n_ctx, context), chunks, sums, process_output, with_perplexity)


def _measured(
    ctx: Decoder, chunks: Chunks, sums: ImatrixSums, process_output: bool, with_perplexity: bool
) -> Iterator[Measured]:
    total = NllSum()
    with ctx, Collector(ctx.model.watches, sums, process_output):
        for i in range(chunks.n_chunks):
            for logits, tokens in predicted(ctx, chunks[i], chunks.first, chunks.bos, every_output=True):
                total.add(nll_of(logits, tokens) if with_perplexity else np.empty(0))
            yield Measured(i + 1, chunks.n_chunks, total.estimate(i + 1, chunks.n_chunks) if with_perplexity else None)
