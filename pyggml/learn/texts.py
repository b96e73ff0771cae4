"""Graphs of whole texts: all tokens of a batch at once, and nothing remembered from before or for later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import OneSite
from pyggml.models.architecture import Architecture
from pyggml.models.blocks import NO_ADAPTERS, Adapters, Build
from pyggml.models.hparams import HParams
from pyggml.models.memory.kv_mask import KVMask
from pyggml.models.memory.memory import Memory
from pyggml.models.ubatch import UBatch
from pyggml.models.weights import Weights
from pyggml.tensor import Tensor, allocate_tensors
from pyggml.types import Ints

BUFT = "CPU"
PAD = 0  # the token behind the end of shorter texts


class Shape(NamedTuple):
    """The shape of a batch: `n_seqs` texts of `n_tokens` tokens, the longest of them. `n_encoded`: of encoder-decoders,
    the tokens of the longest text that is encoded for one of them."""

    n_seqs: int
    n_tokens: int
    n_encoded: int = 0


class TextGraph:
    """The graph of a batch of one shape, of a model with logits.

    build    its nodes and inputs. `build.graph` ends with the logits
    logits   ne [n_vocab, n_seqs * n_tokens]: of each token of the first text, then of the second ...

    Texts do not see each other, and begin at position 0. Shorter ones are filled up with tokens that no text sees.
    """

    def __init__(
        self,
        architecture: Architecture,
        hp: HParams,
        weights: Weights,
        shape: Shape,
        adapters: Adapters = NO_ADAPTERS,
        *,
        flash_attn: bool = False,
    ) -> None:
        """Raises ModelError for a graph that the hyperparameters do not make."""
        self.shape = shape
        n = shape.n_seqs * shape.n_tokens
        memory = architecture.new_memory(
            hp,
            max(n, shape.n_seqs * shape.n_encoded),
            n_batch=max(n, shape.n_seqs * shape.n_encoded),
            n_seq_max=shape.n_seqs + 1,  # the last one has the tokens behind the ends, when others would see them
            type_k=DType.F32,
            type_v=DType.F32,
            flash_attn=flash_attn,
            transient=True,
        )
        memory.allocate(BUFT)
        self._encoder = None
        with OneSite():
            if architecture.encode is not None:
                assert memory.encoding is not None, memory
                encoded = self._build(hp, weights, memory.encoding, shape.n_encoded, adapters)
                architecture.encode(encoded)
                self._encoder = _Filled(encoded, memory.encoding, hp)
            self.build = self._build(hp, weights, memory, shape.n_tokens, adapters)
            if self._encoder is not None:
                self.build.kept.update(self._encoder.build.kept)
            architecture.build(self.build)
        self._decoder = _Filled(self.build, memory, hp)

    @property
    def logits(self) -> Tensor:
        """See the class."""
        return self.build.graph.nodes[-1]

    def fill(self, texts: Sequence[Ints], encoded: Sequence[Ints] = ()) -> None:
        """Set the inputs for a batch: the token ids of each text, at most as many as the shape has. `encoded`: of
        encoder-decoders, the text that is encoded for each of them."""
        self._decoder.memory.clear()
        if self._encoder is not None:
            self._encoder.memory.clear()
            self._encoder.fill(encoded, self.shape.n_encoded)
        self._decoder.fill(texts, self.shape.n_tokens)

    def _build(self, hp: HParams, weights: Weights, memory: Memory, n_tokens: int, adapters: Adapters) -> Build:
        n_seqs = self.shape.n_seqs
        n_kv = tuple(n_seqs * (self.shape.n_encoded if c.cross else n_tokens) for c in memory.caches)
        n = n_seqs * n_tokens
        return Build(hp, weights, memory, n, n, n_kv, adapters=adapters, n_seqs=n_seqs)


class _Filled:
    """The inputs of one graph, in memory of their own, and what fills them."""

    def __init__(self, build: Build, memory: Memory, hp: HParams) -> None:
        self.build, self.memory = build, memory
        # Masks of all tokens are for layers in which texts do not attend to themselves alone.
        unused = {use.mask for use in build.uses if (i := build.inputs.get(use.mask)) and i.tensor not in build.graph}
        self._inputs = {name: i for name, i in build.inputs.items() if name not in unused}
        allocate_tensors([i.tensor for i in self._inputs.values()], BUFT)
        self._apart = any(not c.causal and not c.cross for c in memory.caches)  # tokens see those after them
        alibi = hp.f_max_alibi_bias > 0
        self._masks = [
            KVMask(use.kv, self._inputs[use.mask].tensor.numpy(), use.kv.causal, use.kv.n_swa, alibi, use.kv.swa_type)
            for use in build.uses
            if use.mask in self._inputs
        ]
        self._masked: list[bytes] = []  # positions and sequences that the masks are written for

    def fill(self, texts: Sequence[Ints], n_tokens: int) -> None:
        """Set the inputs for texts of at most `n_tokens` tokens. The memory must be empty."""
        u = _ubatch(texts, n_tokens, self._apart)
        self.memory.take(self.memory.slot(u, ()), u)
        for i in self._inputs.values():
            if i.fill is not None:
                _set(i.tensor, i.fill(u, self.memory))
        for group in self.build.input_groups:
            for name, values in zip(group.names, group.fill(u, self.memory), strict=True):
                _set(self.build.inputs[name].tensor, values)
        cells = (x for mask in self._masks for x in (mask.cells.pos, mask.cells.seq))
        masked = [x.tobytes() for x in (u.pos, u.seq, *cells)]
        if masked != self._masked:
            for mask in self._masks:
                mask.write(u.pos, u.seq, None, len(mask.memory[0]))
            self._masked = masked


def _set(t: Tensor, values: np.ndarray[tuple[int, ...], np.dtype[np.int32] | np.dtype[np.float32]]) -> None:
    t.numpy().reshape(-1)[: values.size] = values.reshape(-1)


def _ubatch(texts: Sequence[Ints], n_tokens: int, apart: bool) -> UBatch:
    """Texts of at most `n_tokens` tokens, one after the other. The tokens behind the end of each belong to its
    sequence, or, `apart`, to one more."""
    n_seqs = len(texts)
    tokens = np.full((n_seqs, n_tokens), PAD, np.int32)
    seq = np.repeat(np.arange(n_seqs, dtype=np.int32), n_tokens).reshape(tokens.shape)
    for i, text in enumerate(texts):
        tokens[i, : len(text)] = text
        seq[i, len(text) :] = n_seqs if apart else i
    n = n_seqs * n_tokens
    ids = np.arange(n, dtype=np.int32)
    pos = ids % np.int32(n_tokens)
    return UBatch(True, n, n_tokens, n_seqs, tokens.reshape(-1), None, pos, seq.reshape(-1), None, ids, ids)
