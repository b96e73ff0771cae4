"""From texts to vectors, several at a time, and from a question and documents to scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypedDict, cast

import numpy as np

from pyggml.errors import BatchError, ModelError, whole
from pyggml.types import Floats

from .batch import Batch
from .context import LlamaContext
from .decoder import Decoder
from .loaded import LoadedModel
from .options import ContextOptions

HEADS = {"cls.weight", "cls.output.weight"}  # a reranker has one of these

_WORTH = 8  # tokens that texts must begin with alike to be evaluated once
INT16_LARGEST = 32760.0  # what llama.cpp scales to
Text = str | Sequence[int]


class EmbedOptions(TypedDict, total=False):
    """Keyword arguments of `Model.embed` and `Model.rerank`, besides the texts."""

    n_ubatch: int
    n_threads: int | None
    flash_attn: bool
    context: ContextOptions | None


def embed(
    model: LoadedModel,
    texts: Sequence[Text],
    pooling: str | None = None,
    normalize: bool | float = True,
    layer: int = -1,
    *,
    n_ubatch: int = 512,
    n_threads: int | None = None,
    flash_attn: bool = False,
    context: ContextOptions | None = None,
) -> Floats:
    """Embeddings of texts (or of token ids), float32 [n_texts, n_embd].

    `pooling`: mean, cls, last, or rank (scores, [n_texts, n_classes]); by default as the file says, or mean when it
    does not say. `normalize`: see `normalized`; scores are left as they are. `layer`: see `LlamaContext`. Texts are
    evaluated together, up to `n_ubatch` tokens at a time; an encoder-decoder evaluates them with its encoder.
    `context`: further arguments for the `LlamaContext`. Raises BatchError for a text without tokens or longer than the
    model was trained for, ModelError for bad arguments.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"texts must be a list of texts, not {type(texts).__name__}")
    whole("n_ubatch", n_ubatch, 1, error=ModelError)
    hp = model.hparams
    if pooling is None and hp.pooling == "none":
        pooling = "mean"
    if pooling == "rank" and not HEADS & set(model.weights):
        raise ModelError("the model has no weights cls or cls.output: it is no reranker")
    if pooling == "none":
        raise ModelError("pooling = 'none' makes no vector of a text: decode it in a context with embeddings=True")
    ids = [model.tokenize(t) if isinstance(t, str) else t for t in texts]
    for i, tokens in enumerate(cast("Sequence[object]", ids)):
        if not isinstance(tokens, Sequence | np.ndarray):
            raise ModelError(f"texts must be a list of texts, or of lists of token ids; item {i} is {tokens!r:.60}")
    for i, tokens in enumerate(ids):
        if not 0 < len(tokens) <= hp.n_ctx_train:
            raise BatchError(f"text {i} has {len(tokens)} tokens; the model takes 1 to {hp.n_ctx_train}")
    if not ids:
        return np.empty((0, hp.n_embd), np.float32)
    size = max(n_ubatch, *map(len, ids))
    n_shared = _n_shared(model, ids, pooling)
    parts = list(_packed([tokens[n_shared:] for tokens in ids], size - n_shared))
    n_texts = max(map(len, parts))
    options: ContextOptions = {"n_threads": n_threads, "flash_attn": flash_attn}
    options.update(context or {})
    options.update(n_batch=size, n_ubatch=size, n_seq_max=n_texts + bool(n_shared))
    options.update(embeddings=True, pooling=pooling, layer=layer)
    with LlamaContext(model, size, **options) as ctx:
        if n_shared:
            ctx.decode(Batch.prompt(list(ids[0][:n_shared]), 0, n_texts))
        rows = np.concatenate([_embedded(ctx, [ids[i] for i in part], n_shared, n_texts) for part in parts])
        rows = rows[np.argsort(np.concatenate(parts))]
        return rows if ctx.pooling == "rank" else normalized(rows, normalize)


def rerank(
    model: LoadedModel,
    query: str,
    documents: Sequence[str],
    *,
    n_ubatch: int = 512,
    n_threads: int | None = None,
    flash_attn: bool = False,
    context: ContextOptions | None = None,
) -> Floats:
    """How well documents answer a question, float32 [n_documents]: the first score that the model's head gives for each
    pair of question and document. A score is a probability only when the head ends with a softmax.

    The file's own template (`tokenizer.chat_template.rerank`) puts a pair together; without a template `Vocab.pair`
    does. Raises ModelError for a model without a head, BatchError like `embed`.
    """
    pairs = rank_pairs(model, query, documents)
    scores = embed(model, pairs, "rank", n_ubatch=n_ubatch, n_threads=n_threads, flash_attn=flash_attn, context=context)
    return scores[:, 0]


def rank_pairs(model: LoadedModel, query: str, documents: Sequence[str]) -> list[list[int]]:
    """The tokens of each pair of question and document, as `rerank` gives them to the model."""
    if not HEADS & set(model.weights):
        raise ModelError("the model has no weights cls or cls.output: it is no reranker")
    template = model.kv.get("tokenizer.chat_template.rerank")
    if not isinstance(template, str):
        return [model.vocab.pair(query, text) for text in documents]
    texts = [template.replace("{query}", query).replace("{document}", text) for text in documents]
    return [model.tokenize(text, add_special=False, parse_special=True) for text in texts]


def embed_tokens(
    model: LoadedModel,
    ids: Sequence[int],
    normalize: bool | float = False,
    *,
    n_threads: int | None = None,
    context: ContextOptions | None = None,
) -> Floats:
    """The embedding of each token of a text, float32 [n_tokens, n_embd]. `context`: further arguments for the
    `LlamaContext`. Raises BatchError for a text without tokens, and what `normalized` raises."""
    n = max(len(ids), 1)
    options: ContextOptions = {"n_threads": n_threads, **(context or {}), "n_batch": n, "n_seq_max": 1}
    options.update(embeddings=True, pooling="none", n_ubatch=max(n, options.get("n_ubatch", 512)))
    with LlamaContext(model, n, **options) as ctx:
        ctx.decode(ids)
        return normalized(np.array(ctx.embeddings), normalize)


def normalized(rows: Floats, normalize: bool | float = True) -> Floats:
    """Scale each row. True or 2: to length 1. False or -1: not at all. 0: so that its largest number is 32760 (for
    int16). Another number p: to 1 in the p-norm. The numbers are llama.cpp's. Rows of zeros stay zeros."""
    p = {True: 2.0, False: -1.0}[normalize] if isinstance(normalize, bool) else float(normalize)
    if p == -1.0:
        return rows
    if not (p == 0.0 or 1.0 <= p < np.inf):
        raise ModelError(f"normalize = {normalize}: it must be true, false, -1, 0, or a number from 1 on")
    x = np.abs(rows.astype(np.float64))
    top = x.max(axis=1, keepdims=True, initial=0.0)  # taken out, so that no power overflows
    top[top == 0.0] = 1.0
    norm = top * ((x / top) ** p).sum(axis=1, keepdims=True) ** (1.0 / p) if p else top / INT16_LARGEST
    norm[norm == 0.0] = 1.0
    return np.array(rows / norm, np.float32)


def _packed(ids: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Lists of the indices of texts to evaluate together: texts of similar length, at most `size` tokens in all."""
    part: list[int] = []
    n = 0
    for i in sorted(range(len(ids)), key=lambda i: len(ids[i])):
        if part and n + len(ids[i]) > size:
            yield part
            part, n = [], 0
        part.append(i)
        n += len(ids[i])
    yield part


def _n_shared(model: LoadedModel, ids: Sequence[Sequence[int]], pooling: str | None) -> int:
    """How many tokens all texts begin with that are evaluated once, such as an instruction. 0 when it is not worth it,
    or the model does not look back: only the embedding of a last token depends on them by keys and values alone."""
    hp = model.hparams
    looks_back = hp.causal_attn and model.architecture.encode is None and model.architecture.memory == "kv"
    if len(ids) < 2 or (pooling or hp.pooling) != "last" or not looks_back or hp.n_swa:
        return 0
    texts = [list(tokens) for tokens in ids]
    first, last = min(texts), max(texts)  # all others are between them, and so begin with what these two begin with
    n = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    n = min(n, min(map(len, texts)) - 1)
    return n if n >= _WORTH else 0


def _embedded(ctx: Decoder, ids: Sequence[Sequence[int]], n_shared: int, shared: int) -> Floats:
    """The embeddings of some texts, whose first `n_shared` tokens sequence `shared` has evaluated."""
    batch = Batch()
    for seq in range(shared if n_shared else 0):
        ctx.memory.seq_rm(seq)
    if not n_shared:
        ctx.memory.clear()
    for seq, tokens in enumerate(ids):
        if n_shared:
            ctx.memory.seq_cp(shared, seq)
        for pos, token in enumerate(tokens[n_shared:], n_shared):
            batch.add(token, pos, seq)
    (ctx.decode if ctx.model.architecture.encode is None else ctx.encode)(batch)
    return np.array(ctx.embeddings)
