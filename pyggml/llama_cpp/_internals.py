"""The objects behind a `Llama`, for programs that reach for `llm._model` and `llm._ctx`, and for those that run a model
without a `Llama`: model, context, batch and sampler, with llama-cpp-python's names of methods."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import GGMLError, ModelError
from ..llm.model import Model
from ..types import Floats
from . import llama_cpp as low
from .llama_tokenizer import text_of


class LlamaModel:
    """A model: `model` is pyggml's, `vocab` its vocabulary. Raises ValueError for a file that cannot be loaded."""

    def __init__(self, *, path_model: str, params: low.llama_model_params, verbose: bool = True) -> None:
        model = low.llama_model_load_from_file(path_model.encode(), params)
        if model is None:
            raise ValueError(f"Failed to load model from file: {path_model}")
        self._set(model)

    @classmethod
    def of(cls, model: Model) -> LlamaModel:
        """That of a model which is loaded already."""
        made = cls.__new__(cls)
        made._set(model)
        return made

    def _set(self, model: Model) -> None:
        self.model, self.vocab, self.path_model = model, model.vocab, model.path
        self._contexts: list[LlamaContext] = []

    def close(self) -> None:
        """Close the model and its contexts."""
        for ctx in self._contexts:
            ctx.close()
        self.model.close()

    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return self.vocab.n_tokens

    def n_ctx_train(self) -> int:
        """The length of context that the model was trained for."""
        return low.llama_model_n_ctx_train(self.model)

    def n_embd(self) -> int:
        """Length of embeddings."""
        return low.llama_model_n_embd(self.model)

    def n_params(self) -> int:
        """Numbers that the weights are."""
        return low.llama_model_n_params(self.model)

    def size(self) -> int:
        """Bytes of all tensors."""
        return low.llama_model_size(self.model)

    def desc(self) -> str:
        """The architecture, and the name in the metadata."""
        return f"{self.model.arch} {self.model.kv.get('general.name', '')}".strip()

    def metadata(self) -> dict[str, str]:
        """The metadata, without arrays."""
        return {k: str(v) for k, v in self.model.kv.items() if not isinstance(v, (list, np.ndarray))}

    def token_get_text(self, token: int) -> str:
        """A token as the vocabulary spells it."""
        return self.vocab.text(token)

    def token_bos(self) -> int:
        """The token at the beginning of texts; -1 when there is none, as for the other tokens below."""
        return low.llama_vocab_bos(self.vocab)

    def token_eos(self) -> int:
        """The token at the end of texts."""
        return low.llama_vocab_eos(self.vocab)

    def token_nl(self) -> int:
        """The token of a new line."""
        return low.llama_vocab_nl(self.vocab)

    def token_eot(self) -> int:
        """The token at the end of a turn."""
        return low.id_or_minus_1(self.vocab.eot)

    def token_sep(self) -> int:
        """The token between texts."""
        return low.id_or_minus_1(self.vocab.sep)

    def token_prefix(self) -> int:
        """The token before what comes before a gap."""
        return low.id_or_minus_1(self.vocab.fim_pre)

    def token_middle(self) -> int:
        """The token before what fills a gap."""
        return low.id_or_minus_1(self.vocab.fim_mid)

    def token_suffix(self) -> int:
        """The token before what comes after a gap."""
        return low.id_or_minus_1(self.vocab.fim_suf)

    def add_bos_token(self) -> bool:
        """Whether a text begins with bos."""
        return self.vocab.add_bos

    def add_eos_token(self) -> bool:
        """Whether a text ends with eos."""
        return self.vocab.add_eos

    def tokenize(self, text: bytes, add_bos: bool, special: bool) -> list[int]:
        """Token ids of UTF-8."""
        return self.vocab.tokenize(text_of(text), add_bos, special)

    def token_to_piece(self, token: int, special: bool = False) -> bytes:
        """The text of a token."""
        return self.vocab.token_to_piece(token, special=special)

    def detokenize(self, tokens: list[int], special: bool = False) -> bytes:
        """The text of tokens. After a bos token the space is dropped that vocabularies add before a text."""
        text = b"".join(self.vocab.token_to_piece(t, special=special) for t in tokens)
        return text[1:] if tokens and tokens[0] == self.vocab.bos and text[:1] == b" " else text

    @staticmethod
    def default_params() -> low.llama_model_params:
        """The default parameters of models."""
        return low.llama_model_default_params()


class LlamaContext:
    """A context: `ctx` is pyggml's, None after `close`; `memory` is its memory. Raises ValueError when it cannot be
    made."""

    def __init__(self, *, model: LlamaModel, params: low.llama_context_params, verbose: bool = True) -> None:
        ctx = low.llama_init_from_model(model.model, params)
        if ctx is None:
            raise ValueError("Failed to create llama_context")
        self._set(model, ctx, [])
        model._contexts.append(self)  # pyright: ignore[reportPrivateUsage]

    @classmethod
    def of(cls, model: LlamaModel, ctx: Any, held: list[int]) -> LlamaContext:
        """That of a context which is there already, and has evaluated the tokens `held`. These follow what is removed
        from the memory."""
        made = cls.__new__(cls)
        made._set(model, ctx, held)
        return made

    def _set(self, model: LlamaModel, ctx: Any, held: list[int]) -> None:
        self.model, self.memory, self._held = model, ctx.memory, held
        self.ctx: Any = ctx

    def close(self) -> None:
        """Close the context."""
        if self.ctx is not None:
            self.ctx.close()
            self.ctx = None

    def n_ctx(self) -> int:
        """Tokens of the context."""
        return self.ctx.n_ctx

    def kv_cache_clear(self) -> None:
        """Forget everything."""
        self.memory.clear()
        self._held.clear()

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        """Forget the positions from p0 on, and before p1, of a sequence; negative: all."""
        removed = self.memory.seq_rm(max(seq_id, 0), p0, p1)
        del self._held[max(p0, 0) :]
        return removed

    def kv_cache_seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int, p1: int) -> None:
        """Let a sequence share positions of another."""
        self.memory.seq_cp(seq_id_src, seq_id_dst, p0, p1)
        if seq_id_dst == 0:
            del self._held[max(p0, 0) :]

    def kv_cache_seq_keep(self, seq_id: int) -> None:
        """Forget all other sequences."""
        self.memory.seq_keep(seq_id)
        if seq_id:
            self._held.clear()

    def kv_cache_seq_shift(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        """Move positions of a sequence."""
        self.memory.seq_add(seq_id, p0, p1, shift)
        del self._held[max(min(p0, p0 + shift), 0) :]

    def decode(self, batch: LlamaBatch) -> None:
        """Evaluate a batch. Raises RuntimeError when it cannot be taken, or does not fit."""
        status = low.llama_decode(self.ctx, batch.batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def get_logits(self) -> Floats:
        """The logits of the last decode, float32, row by row."""
        return low.llama_get_logits(self.ctx)

    def get_logits_ith(self, i: int) -> Floats:
        """The logits of a token of the last batch, float32 [n_vocab]; negative: from its end."""
        return low.llama_get_logits_ith(self.ctx, i)

    def get_embeddings(self) -> Floats:
        """The embeddings of the last decode, float32, row by row."""
        return low.llama_get_embeddings(self.ctx)

    def get_embeddings_seq(self, seq_id: int) -> Floats:
        """The embedding of a sequence, float32 [n_embd]."""
        return low.llama_get_embeddings_seq(self.ctx, seq_id)

    @staticmethod
    def default_params() -> low.llama_context_params:
        """The default parameters of contexts."""
        return low.llama_context_default_params()


class LlamaBatch:
    """Tokens to evaluate: `batch` is that of the low-level functions, with room for `n_tokens` tokens."""

    def __init__(self, *, n_tokens: int, embd: int = 0, n_seq_max: int = 1, verbose: bool = True) -> None:
        self._room = n_tokens, embd, n_seq_max
        self.batch = low.llama_batch_init(*self._room)

    def n_tokens(self) -> int:
        """Tokens that are in it."""
        return self.batch.n_tokens

    def reset(self) -> None:
        """Make it empty."""
        self.batch.n_tokens = 0

    def set_batch(self, batch: Iterable[int], n_past: int, logits_all: bool) -> None:
        """Tokens of sequence 0, from position `n_past` on. The last, or with `logits_all` each, gets logits."""
        self.reset()
        self.add_sequence(batch, 0, logits_all, n_past)

    def add_sequence(self, batch: Iterable[int], seq_id: int, logits_all: bool, n_past: int = 0) -> None:
        """Add tokens of another sequence, as `set_batch`. Raises ModelError when there is no room for them."""
        tokens, to, begin = list(batch), self.batch, self.batch.n_tokens
        if begin + len(tokens) > self._room[0]:
            raise ModelError(f"the batch has room for {self._room[0]} tokens, not for {begin + len(tokens)}")
        for i, token in enumerate(tokens, begin):
            to.token[i], to.pos[i], to.n_seq_id[i], to.logits[i] = token, n_past + i - begin, 1, logits_all
            to.seq_id[i][0] = seq_id
        to.n_tokens = begin + len(tokens)
        if tokens:
            to.logits[to.n_tokens - 1] = True


class LlamaSampler:
    """Samplers, one after the other."""

    def __init__(self) -> None:
        self.sampler = low.llama_sampler_chain_init(low.llama_sampler_chain_default_params())

    def add_greedy(self) -> None:
        """Takes the likeliest token."""
        low.llama_sampler_chain_add(self.sampler, low.llama_sampler_init_greedy())

    def add_dist(self, seed: int) -> None:
        """Draws a token."""
        low.llama_sampler_chain_add(self.sampler, low.llama_sampler_init_dist(seed))

    def add_top_k(self, k: int) -> None:
        """Keeps the k likeliest tokens."""
        low.llama_sampler_chain_add(self.sampler, low.llama_sampler_init_top_k(k))

    def add_top_p(self, p: float, min_keep: int = 1) -> None:
        """Keeps the likeliest tokens that together have this probability."""
        low.llama_sampler_chain_add(self.sampler, low.llama_sampler_init_top_p(p, min_keep))

    def add_min_p(self, p: float, min_keep: int = 1) -> None:
        """Keeps tokens that are at least so likely, beside the likeliest."""
        low.llama_sampler_chain_add(self.sampler, low.llama_sampler_init_min_p(p, min_keep))

    def add_temp(self, temp: float) -> None:
        """Divides logits."""
        low.llama_sampler_chain_add(self.sampler, low.llama_sampler_init_temp(temp))

    def add_penalties(
        self, penalty_last_n: int, penalty_repeat: float, penalty_freq: float, penalty_present: float
    ) -> None:
        """Makes tokens that were there less likely."""
        made = low.llama_sampler_init_penalties(penalty_last_n, penalty_repeat, penalty_freq, penalty_present)
        low.llama_sampler_chain_add(self.sampler, made)

    def sample(self, ctx: LlamaContext, idx: int = -1) -> int:
        """Choose a token by the logits of a token of the last batch. Raises GGMLError for a closed context."""
        if ctx.ctx is None:
            raise GGMLError("the context is closed")
        return low.llama_sampler_sample(self.sampler, ctx.ctx, idx)

    def reset(self) -> None:
        """Forget all tokens."""
        low.llama_sampler_reset(self.sampler)

    def close(self) -> None:
        """Nothing has to be freed."""
