"""The class `Llama`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..dtypes import DType
from ..errors import BatchError, ModelError, whole
from ..llm.context import LlamaContext
from ..llm.embed import embed_tokens
from ..llm.generate.engine import Pending
from ..llm.generate.generation import Generation, functions
from ..llm.generate.kept import KeptContext
from ..llm.generate.prefixes import keep_prefix
from ..llm.model import Model, load_model
from ..llm.openai.types import EmbeddingAnswer, EmbeddingData
from ..llm.samplers import SamplerChain, SamplingParams, our_names, with_options
from ..types import Floats
from .chat_formats import find_chat_format
from .function_formats import FUNCTION_FORMATS

LLAMA_DEFAULT_SEED = 0xFFFFFFFF  # another seed each time
LLAMA_POOLING_TYPE_UNSPECIFIED = -1
LLAMA_POOLING_TYPE_NONE, LLAMA_POOLING_TYPE_MEAN, LLAMA_POOLING_TYPE_CLS = 0, 1, 2
LLAMA_POOLING_TYPE_LAST, LLAMA_POOLING_TYPE_RANK = 3, 4
_POOLING = {-1: None, 0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
_TYPES = {0: DType.F32, 1: DType.F16, 2: DType.Q4_0, 3: DType.Q4_1, 6: DType.Q5_0, 7: DType.Q5_1, 8: DType.Q8_0}
# Arguments about other machines, and arguments without a meaning here: taken, without effect.
_IGNORED = frozenset(
    [
        "n_gpu_layers",
        "split_mode",
        "main_gpu",
        "tensor_split",
        "offload_kqv",
        "op_offload",
        "numa",
        "verbose",
        "no_perf",
        "swa_full",
        "logits_all",
        "n_threads_batch",
        "rpc_servers",
        "kv_unified",
        "spm_infill",
    ]
)


@dataclass(eq=False)
class _Endless(Generation):
    """A text that no token ends. Functions that stop it see the tokens that are evaluated.

    held  the tokens that the context has evaluated, which `Llama` keeps
    sent  the tokens that the caller puts after the last token
    """

    held: list[int] = field(kw_only=True)
    sent: Sequence[int] = field(default=(), init=False)

    def _take(self, token: int, logits: Floats) -> str:
        self.chain.accept(token)
        self.ids.append(token)
        if any(f(np.array(self.held), logits) for f in self.stopping):
            self.finish_reason = "stop"
        return ""

    def _step(self, token: int) -> Generator[Pending, Floats, Floats]:
        return (yield from self._evaluate((token, *self.sent)))[-1]

    def _part(self, tokens: Sequence[int]) -> Generator[Pending, Floats, Floats]:
        at = self.n_done
        rows = yield from super()._part(tokens)
        self.held += tokens[: self.n_done - at]
        return rows


class Llama:
    """A model and how it is used. Arguments have llama-cpp-python's names and defaults; those about GPUs do nothing.

    Raises GGUFError for a bad file, ModelError for one that cannot be run, TypeError for arguments that are not known.
    """

    def __init__(
        self,
        model_path: str,
        *,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        seed: int = LLAMA_DEFAULT_SEED,
        vocab_only: bool = False,
        use_mmap: bool = True,
        use_mlock: bool = False,
        kv_overrides: Mapping[str, Any] | None = None,
        embedding: bool = False,
        pooling_type: int = LLAMA_POOLING_TYPE_UNSPECIFIED,
        flash_attn: bool = False,
        last_n_tokens_size: int = 64,
        lora_path: str | None = None,
        lora_scale: float = 1.0,
        chat_format: str | None = None,
        chat_handler: None = None,
        draft_model: None = None,
        type_k: int | None = None,
        type_v: int | None = None,
        **ignored: Any,
    ) -> None:
        unknown = sorted(set(ignored) - _IGNORED)
        if unknown:
            raise TypeError(f"Llama() does not know the argument {unknown[0]!r}")
        if chat_handler is not None:
            raise ModelError(
                "chat_handler is not supported: handlers of llama-cpp-python read images, and models see text alone "
                "here. For another form of chats give chat_format: a name, Jinja, or the path of a file with Jinja"
            )
        if draft_model is not None:
            raise ModelError("draft_model is not supported; see pyggml.llm.generate.speculative")
        if pooling_type not in _POOLING:
            raise ModelError(f"pooling_type must be one of {', '.join(map(str, _POOLING))}, not {pooling_type!r:.60}")
        for name, given in (("type_k", type_k), ("type_v", type_v)):
            if given is not None and given not in _TYPES:
                raise ModelError(f"{name} must be one of {', '.join(map(str, _TYPES))}, not {given!r:.60}")
        self.model_path, self.verbose = model_path, bool(ignored.get("verbose", True))
        self.last_n_tokens_size = whole("last_n_tokens_size", last_n_tokens_size, -1, error=ModelError)
        self.model: Model = load_model(model_path, use_mmap, use_mlock, vocab_only, kv_overrides=kv_overrides)
        self.chat_format, self._template = find_chat_format(chat_format, self.model)
        self.metadata = {k: str(v) for k, v in self.model.kv.items() if not isinstance(v, (list, np.ndarray))}
        self._n_ctx = n_ctx if vocab_only or n_ctx else self.model.hparams.n_ctx_train
        self._seed, self._embedding, self._flash_attn = seed, embedding, flash_attn
        self._n_threads, self._pooling = n_threads, _POOLING[pooling_type]
        self._cache: dict[str, Any] = {"n_batch": n_batch, "n_ubatch": n_ubatch}
        self._cache |= {k: _TYPES[t] for k, t in (("type_k", type_k), ("type_v", type_v)) if t is not None}
        self._kept = KeptContext(self._new_context)
        if lora_path is not None:
            self.model.adapt([(self.model.load_lora(lora_path), lora_scale)])

    # -- completions ------------------------------------------------------------------------------------------------

    def create_completion(self, prompt: str | Sequence[int], *args: Any, **request: Any) -> Any:
        """See `Model.create_completion`."""
        names = ("suffix", "max_tokens")
        return self.model.create_completion(
            prompt, **self._options({**dict(zip(names, args, strict=False)), **request})
        )

    __call__ = create_completion

    def create_chat_completion(self, messages: Sequence[Mapping[str, Any]], *args: Any, **request: Any) -> Any:
        """See `Model.create_chat_completion`."""
        names = ("functions", "function_call", "tools", "tool_choice")
        options = self._options({**dict(zip(names, args, strict=False)), **request})
        if self.chat_format in FUNCTION_FORMATS and "chat_template" not in options:
            choice = options.get("tool_choice") or options.get("function_call")
            if choice is None and self.chat_format == "chatml-function-calling":
                options["tool_choice"] = "none"  # this format offers tools to those alone who ask for a choice
            of_format = {"tool_choice": choice, "functions": options.get("tools") is None}
            given: Any = options.get("chat_template_kwargs") or {}
            options["chat_template_kwargs"] = {**of_format, **given} if isinstance(given, Mapping) else given
        options.setdefault("chat_template", self._template)
        return self.model.create_chat_completion(messages, **options)

    def _options(self, request: dict[str, Any]) -> dict[str, Any]:
        request["name"] = request.pop("model", None) or self.model_path
        if request.get("seed") is None and self._seed != LLAMA_DEFAULT_SEED:
            request["seed"] = self._seed
        own: dict[str, Any] = {"n_ctx": self._n_ctx, "n_threads": self._n_threads, "flash_attn": self._flash_attn}
        if not own.keys() & request.keys():  # else the request wants a context of its own
            own["kept"] = self._kept
        return {**own, "repeat_last_n": self.last_n_tokens_size, **request}

    # -- embeddings -------------------------------------------------------------------------------------------------

    def create_embedding(self, input: str | list[str], model: str | None = None) -> EmbeddingAnswer:
        """Embeddings in OpenAI's shape."""
        found, n = self.embed(input if isinstance(input, list) else [input], return_count=True)
        data: list[EmbeddingData] = [{"object": "embedding", "embedding": e, "index": i} for i, e in enumerate(found)]
        usage = {"prompt_tokens": n, "total_tokens": n}
        return {"object": "list", "data": data, "model": model or self.model_path, "usage": usage}

    def embed(
        self, input: str | list[str], normalize: bool = False, truncate: bool = True, return_count: bool = False
    ) -> Any:
        """The embedding of a text, or of each of several: a list of numbers, or, when the model does not pool, one
        such list for each token. Raises ModelError without `embedding=True`."""
        if not self._embedding:
            raise ModelError("embeddings need Llama(..., embedding=True)")
        texts = [input] if isinstance(input, str) else input
        ids = [self.model.tokenize(t)[: self._n_ctx if truncate else None] for t in texts]
        pooling = self._pooling or self.model.hparams.pooling
        if pooling == "none":
            options: Any = {"n_threads": self._n_threads}
            rows: list[Any] = [embed_tokens(self.model, i, normalize, **options).tolist() for i in ids]
        else:
            rows = self.model.embed(ids, pooling, normalize, n_threads=self._n_threads).tolist()
        found: Any = rows[0] if isinstance(input, str) else rows
        return (found, sum(map(len, ids))) if return_count else found

    # -- tokens, one by one -----------------------------------------------------------------------------------------

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of UTF-8."""
        return self.model.tokenize(text.decode("utf-8", "ignore"), add_bos, special)

    def detokenize(self, tokens: Iterable[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """The text of tokens, as bytes. After a bos token the space is dropped that vocabularies add before a text."""
        tokens = list(tokens)
        text = b"".join(self.model.vocab.token_to_piece(t, special=special) for t in tokens)
        return text[1:] if not prev_tokens and text[:1] == b" " and tokens[0] == self.token_bos() else text

    def reset(self) -> None:
        """Forget what was evaluated."""
        self._kept.clear()

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after those that the context has. Raises KVCacheFull when they do not fit."""
        ctx = self._kept.ctx
        for i in range(0, len(tokens), ctx.n_batch):
            ctx.decode(list(tokens[i : i + ctx.n_batch]))
        self._kept.held.extend(tokens)

    def sample(self, **sampling: Any) -> int:
        """A token for what was evaluated last."""
        chain, _ = self._chain(sampling)
        chain.prime(self._kept.held)
        return chain.sample(self._last_logits())

    def generate(self, tokens: Sequence[int], reset: bool = True, **sampling: Any) -> Generator[int, Any, None]:
        """The tokens that follow `tokens`, without end. Tokens that are sent in are evaluated after the last one. The
        beginning that the context has evaluated already is not evaluated again. With `reset` false, `tokens` follow
        everything that the context has.
        """
        chain, stopping = self._chain(sampling)
        ctx, held, new = self._kept.ctx, self._kept.held, list(tokens)
        if not new:
            raise BatchError("there are no tokens to generate from")
        if reset:
            del held[keep_prefix(ctx.memory, 0, held, new) :]
            new = new[len(held) :]
        prompt = [*held, *new]
        chain.prime(prompt)
        g = _Endless(ctx, prompt, chain, n_past=len(held), stopping=stopping, held=held)
        for token in g:
            if token.finish_reason is None:
                g.sent = (yield token.id) or ()

    @property
    def n_tokens(self) -> int:
        """Tokens that were evaluated."""
        return len(self._kept.held)

    def _new_context(self) -> LlamaContext:
        options: Any = {"n_threads": self._n_threads, "flash_attn": self._flash_attn, **self._cache}
        return self.model.new_context(self._n_ctx, **options)

    def _last_logits(self) -> Any:
        if not self._kept.held:
            raise BatchError("nothing was evaluated yet")
        return self._kept.ctx.logits[-1]

    def _chain(self, sampling: dict[str, Any]) -> tuple[SamplerChain, Sequence[Callable[..., bool]]]:
        given = {k: v for k, v in sampling.items() if v is not None and k not in ("tfs_z", "idx")}
        options = our_names(given)
        processors: Any = options.pop("logits_processor", ())
        stopping: Any = options.pop("stopping_criteria", ())
        grammar = options.get("grammar")
        options["grammar"] = getattr(grammar, "_grammar", grammar)
        options.setdefault("repeat_last_n", self.last_n_tokens_size)
        if self._seed != LLAMA_DEFAULT_SEED:
            options.setdefault("seed", self._seed)
        params = with_options(SamplingParams(), options)
        chain = SamplerChain(params, self.model.vocab, functions("logits_processor", processors))
        return chain, functions("stopping_criteria", stopping)

    # -- what it is -------------------------------------------------------------------------------------------------

    def n_ctx(self) -> int:
        """Tokens of the context."""
        return self._n_ctx

    def n_embd(self) -> int:
        """Length of embeddings."""
        return self.model.hparams.n_embd

    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return self.model.vocab.n_tokens

    def token_bos(self) -> int:
        """The token at the beginning of texts; -1 when there is no such token."""
        return -1 if self.model.vocab.bos is None else self.model.vocab.bos

    def token_eos(self) -> int:
        """The token at the end of texts; -1 when there is no such token."""
        return -1 if self.model.vocab.eos is None else self.model.vocab.eos

    def token_nl(self) -> int:
        """The token of a new line; -1 when there is no such token."""
        return -1 if self.model.vocab.nl is None else self.model.vocab.nl

    def set_seed(self, seed: int) -> None:
        """Sample with this seed from now on."""
        self._seed = seed

    def set_cache(self, cache: object) -> None:
        """Without effect: what the last text and the next one begin with alike is kept in any case."""

    def close(self) -> None:
        """Close the model."""
        self.model.close()
