"""Cut a text into chunks. The model predicts each chunk by itself, as in llama.cpp's tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pyggml.errors import BatchError, ModelError
from pyggml.types import Floats

from ..batch import Batch
from ..context import LlamaContext
from ..decoder import Decoder
from ..options import ContextOptions

if TYPE_CHECKING:
    from ..loaded import LoadedModel

Tokens = npt.NDArray[np.int32]
_N_BATCH = 512
_BLOCK = 1 << 20  # logits that are processed together


@dataclass(frozen=True)
class Chunks:
    """A text in chunks of `n_ctx` tokens; a chunk begins every `step` tokens. In each chunk the tokens after position
    `first` are predicted. When `bos` is not None, it replaces the first token of each chunk."""

    ids: Tokens
    n_ctx: int
    step: int
    n_chunks: int
    first: int
    bos: int | None

    def __getitem__(self, i: int) -> Tokens:
        return self.ids[i * self.step : i * self.step + self.n_ctx]


def cut(model: LoadedModel, text: str | Sequence[int], n_ctx: int, n_chunks: int, stride: int = 0) -> Chunks:
    """The chunks of a text. Options and errors: see `perplexity.perplexity`."""
    n_ctx = n_ctx or model.hparams.n_ctx_train
    if n_ctx < 3 or not 0 <= stride < n_ctx or n_chunks == 0:
        raise BatchError(f"chunks of {n_ctx} tokens with stride {stride}, {n_chunks} of them, make no sense")
    if model.vocab.add_eos:
        raise ModelError("the model ends each text with eos; what follows it could not be predicted")
    n_ctx += stride // 2
    ids = np.array(model.tokenize(text) if isinstance(text, str) else text, np.int32)
    if len(ids) < 2 * n_ctx:
        raise BatchError(f"chunks of {n_ctx} tokens need a text of {2 * n_ctx}; it has {len(ids)}")
    n_all = (len(ids) - n_ctx + stride - 1) // stride if stride else len(ids) // n_ctx
    n_chunks = n_all if n_chunks < 0 else min(n_chunks, n_all)
    first = n_ctx - stride - 1 if stride else n_ctx // 2
    return Chunks(ids, n_ctx, stride or n_ctx, n_chunks, first, bos_of(model) if not stride else None)


def bos_of(model: LoadedModel) -> int | None:
    """The bos token, when texts of this model begin with it; None when they do not."""
    return model.vocab.bos if model.vocab.add_bos else None


def new_context(model: LoadedModel, n_ctx: int, context: ContextOptions | None) -> LlamaContext:
    """A context for chunks of `n_ctx` tokens."""
    options: ContextOptions = {"n_batch": _N_BATCH}
    options.update(context or {})
    return LlamaContext(model, n_ctx, **options)


def predicted(
    ctx: Decoder, chunk: Tokens, first: int, bos: int | None, every_output: bool = False
) -> Iterator[tuple[Floats, Tokens]]:
    """Evaluate a chunk. Gives, in parts, the logits [n, n_vocab] and the tokens [n] that they predict, which are those
    after position `first`. `every_output`: the earlier tokens go through the whole model too."""
    tokens: list[int] = chunk.tolist()
    if bos is not None:
        tokens[0] = bos
    ctx.memory.clear()
    for start in range(0, len(tokens), ctx.n_batch):
        batch = Batch()
        for pos, token in enumerate(tokens[start : start + ctx.n_batch], start):
            batch.add(token, pos, 0, every_output or first <= pos < len(tokens) - 1)
        ctx.decode(batch)
        at = ctx.outputs + start
        wanted = (first <= at) & (at < len(tokens) - 1)
        yield (ctx.logits[wanted] if every_output else ctx.logits), chunk[at[wanted] + 1]


def nll_of(logits: Floats, tokens: Tokens) -> npt.NDArray[np.float64]:
    """-log(softmax(logits)) of one token in each row: float64 [n], for `logits` [n, n_vocab] and `tokens` [n]."""
    out = np.empty(len(tokens))
    n = max(_BLOCK // logits.shape[1], 1)
    for i in range(0, len(tokens), n):
        x = logits[i : i + n] - logits[i : i + n].max(axis=1, keepdims=True)
        picked = x[np.arange(len(x)), tokens[i : i + n]].astype(np.float64)
        out[i : i + n] = np.log(np.exp(x).sum(axis=1, dtype=np.float64)) - picked
    return out
