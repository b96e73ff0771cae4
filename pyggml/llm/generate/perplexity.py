"""Perplexity of a text: how well a model predicts it, computed as llama.cpp does, so that the numbers compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, nan, sqrt
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pyggml.errors import BatchError, ModelError
from pyggml.models.memory.kv_cells import Floats

from ..batch import Batch
from ..context import LlamaContext
from ..options import ContextOptions

if TYPE_CHECKING:
    from ..loaded import LoadedModel

_N_BATCH = 512
_BLOCK = 1 << 20  # logits that are looked at together


@dataclass(frozen=True)
class Perplexity:
    """The estimate from the first `n_done` of `n_chunks` chunks.

    ppl       exp(nll)
    error     its standard error, llama.cpp's "+/-"; NaN where there is none (one token)
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
) -> Iterator[Perplexity]:
    """The perplexity of a text (or of token ids), estimated anew after each chunk; the last one is the result.

    The text is cut into chunks of `n_ctx` tokens (0: as trained), of which the first `n_chunks` are taken (negative:
    all). Each is evaluated by itself, its first token replaced by bos where the model wants one, and the tokens of its
    second half are predicted: those at n_ctx / 2 + 1 and after.

    With `stride` > 0 a chunk begins every `stride` tokens and its last `stride` tokens are predicted, so that each has
    at least n_ctx - stride before it; the chunks have `stride` / 2 tokens more, and their first token stays, as in
    llama.cpp (it means to put bos there, but only does so after the chunk was evaluated).

    Raises BatchError for a text of fewer than two chunks and for sizes that make no sense, ModelError for a model that
    ends each text with eos.
    """
    n_ctx = n_ctx or model.hparams.n_ctx_train
    if n_ctx < 3 or not 0 <= stride < n_ctx or n_chunks == 0:
        raise BatchError(f"perplexity: n_ctx {n_ctx}, stride {stride}, {n_chunks} chunks make no sense")
    if model.vocab.add_eos:
        raise ModelError("perplexity: the model ends each text with eos; what follows it could not be predicted")
    n_ctx += stride // 2
    ids = np.array(model.tokenize(text) if isinstance(text, str) else text, np.int32)
    if len(ids) < 2 * n_ctx:
        raise BatchError(f"perplexity with chunks of {n_ctx} tokens needs {2 * n_ctx} of them; the text has {len(ids)}")
    n_all = (len(ids) - n_ctx + stride - 1) // stride if stride else len(ids) // n_ctx
    n_chunks = n_all if n_chunks < 0 else min(n_chunks, n_all)
    ctx = LlamaContext(model, n_ctx, **{"n_batch": _N_BATCH, **(context or {})})
    first = n_ctx - stride - 1 if stride else n_ctx // 2
    bos = model.vocab.bos if model.vocab.add_bos and not stride else None
    return _estimates(ctx, ids, n_ctx, stride or n_ctx, n_chunks, first, bos)


def _estimates(
    ctx: LlamaContext, ids: npt.NDArray[np.int32], n_ctx: int, step: int, n_chunks: int, first: int, bos: int | None
) -> Iterator[Perplexity]:
    count, total, squares = 0, 0.0, 0.0
    with ctx:
        for i in range(n_chunks):
            chunk = ids[i * step : i * step + n_ctx]
            nll = _chunk(ctx, chunk, first, bos)
            count += len(nll)
            total += float(nll.sum())
            squares += float((nll**2).sum())
            mean = total / count
            variance = squares / count - mean**2
            error = sqrt(variance / (count - 1)) * exp(mean) if variance > 0 and count > 1 else nan
            yield Perplexity(i + 1, n_chunks, count, mean, exp(mean), error)


def _chunk(ctx: LlamaContext, chunk: npt.NDArray[np.int32], first: int, bos: int | None) -> npt.NDArray[np.float64]:
    """Negative log-likelihoods of the tokens behind position `first` of a chunk."""
    tokens: list[int] = chunk.tolist()
    if bos is not None:
        tokens[0] = bos
    ctx.memory.clear()
    parts: list[npt.NDArray[np.float64]] = []
    for start in range(0, len(tokens), ctx.n_batch):
        batch = Batch()
        for pos, token in enumerate(tokens[start : start + ctx.n_batch], start):
            batch.add(token, pos, 0, first <= pos < len(tokens) - 1)
        ctx.decode(batch)
        parts.append(_nll(ctx.logits, chunk[ctx.outputs + start + 1]))
    return np.concatenate(parts)


def _nll(logits: Floats, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """-log(softmax(logits)) [n] of one token in each row of logits [n, n_vocab]."""
    out = np.empty(len(tokens))
    n = max(_BLOCK // logits.shape[1], 1)
    for i in range(0, len(tokens), n):
        x = logits[i : i + n] - logits[i : i + n].max(axis=1, keepdims=True)
        picked = x[np.arange(len(x)), tokens[i : i + n]].astype(np.float64)
        out[i : i + n] = np.log(np.exp(x).sum(axis=1, dtype=np.float64)) - picked
    return out
