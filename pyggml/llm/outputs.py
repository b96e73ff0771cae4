"""What a context gives after a decode: logits or embeddings, in the order of the batch, perhaps pooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

import numpy as np

from pyggml.errors import ModelError, whole
from pyggml.models.hparams import HParams, Pooling
from pyggml.types import Floats, Ints

from .ubatch import SBatch, UBatch

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
Members = dict[int, Ints]  # sequence -> the tokens (indices of a batch, ascending) that count


class Output(NamedTuple):
    """What the graphs of a context give at their end.

    embeddings   True: embeddings of tokens; False: logits
    pooling      how the embeddings of a sequence are made into one
    layer        the layer after which embeddings are taken, see `Build`
    """

    embeddings: bool = False
    pooling: Pooling = "none"
    layer: int | None = None


def checked_output(
    hp: HParams, logits: bool, embeddings: bool | None, pooling: str | None, layer: int, stage: range | None = None
) -> Output:
    """Check the options of a context, and make its Output of them. `logits`: whether the model has logits. A `stage`
    that does not reach the model's end gives the output of its last layer, for each token. Raises ModelError."""
    if stage is not None and stage.stop < hp.n_layer:
        if embeddings is not None or pooling is not None or layer != -1:
            raise ModelError(f"layers up to {stage.stop} of {hp.n_layer} give embeddings of tokens, and nothing else")
        return Output(True, "none", stage.stop)
    if embeddings is None:
        embeddings = not logits
    if not embeddings and not logits:
        raise ModelError("embeddings=False: the model has no logits, it is an encoder")
    if pooling is not None and pooling not in POOLINGS:
        raise ModelError(f"pooling = {pooling!r}: known are {', '.join(POOLINGS)}")
    last = hp.n_layer
    il = whole("layer", layer, error=ModelError)
    if not -last - 1 <= il <= last:
        raise ModelError(f"layer = {layer}: the model has layers 0 to {last}, or from the end {-last - 1} to -1")
    if not embeddings:
        if pooling is not None or il not in (-1, last):
            raise ModelError(f"pooling = {pooling!r}, layer = {layer}: they are of a context with embeddings=True")
        return Output()
    il = il + last + 1 if il < 0 else il
    return Output(True, hp.pooling if pooling is None else pooling, None if il == last else il)


def gathered(parts: Sequence[UBatch], rows: Sequence[Floats], none: Floats) -> tuple[Ints, Floats]:
    """The tokens with outputs, and the rows of these, in the order of the batch. The rows are `none` when no token has
    an output."""
    ids = [u.ids if len(u.outputs) == u.n_tokens else u.ids[u.outputs] for u in parts]
    outputs = ids[0] if len(ids) == 1 else np.concatenate(ids)
    logits = rows[0] if len(rows) == 1 else np.concatenate(rows) if rows else none
    if len(outputs) > 1 and (outputs[1:] < outputs[:-1]).any():
        order = np.argsort(outputs)
        outputs, logits = outputs[order], logits[order]
    return outputs, logits


def of_all(parts: Sequence[UBatch], rows: Sequence[Floats]) -> Floats:
    """The rows of all tokens, in the order of the batch."""
    out = np.concatenate(rows)
    ids = np.concatenate([u.ids for u in parts])
    if (ids[1:] < ids[:-1]).any():
        out[ids] = out.copy()
    return out


def members(batch: SBatch, kind: Pooling) -> Members:
    """Which tokens of each sequence are pooled: all of them (mean), the token with the smallest position (cls), or the
    one with the largest (last). Sequences ascend."""
    tokens: dict[int, list[int]] = {}
    for i, seqs in enumerate(batch.seq_ids):
        for s in seqs:
            tokens.setdefault(s, []).append(i)
    if kind != "mean":
        end = min if kind == "cls" else max
        tokens = {s: [end(ids, key=lambda i: int(batch.pos[i]))] for s, ids in tokens.items()}
    return {s: np.array(tokens[s], np.int32) for s in sorted(tokens)}


def pool(rows: Floats, outputs: Ints, of: Members) -> Floats:
    """The mean row of each sequence, float32 [n_seqs, n_embd]. `rows` belong to the tokens `outputs`; `of` says which
    tokens count for each sequence."""
    means = [rows[np.searchsorted(outputs, tokens)].mean(axis=0, dtype=np.float64) for tokens in of.values()]
    return np.array(means, np.float32)
