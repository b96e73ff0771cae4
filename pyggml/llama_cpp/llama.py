"""The class `Llama`."""

from __future__ import annotations

import logging
import os
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..dtypes import DType
from ..errors import BatchError, GGMLError, ModelError, whole
from ..llm.context import LlamaContext
from ..llm.embed import embed_tokens
from ..llm.generate.engine import Pending
from ..llm.generate.generation import Generation, functions
from ..llm.generate.kept import KeptContext
from ..llm.generate.lookup import LookupGeneration
from ..llm.generate.prefixes import common_prefix, keep_prefix
from ..llm.generate.speculative import with_draft
from ..llm.model import Model, load_model
from ..llm.openai.types import EmbeddingAnswer, EmbeddingData
from ..llm.samplers import SamplerChain, SamplingParams, log_softmax, our_names, with_options
from ..llm.state.save_load import load_state_bytes, state_bytes
from ..types import Floats
from ._internals import LlamaContext as InternalContext
from ._internals import LlamaModel
from .chat_formats import find_chat_format
from .function_formats import FUNCTION_FORMATS
from .llama_cache import BaseLlamaCache, LlamaState
from .llama_chat_format import MTMDChatHandler, find_registered
from .llama_cpp import (
    LLAMA_DEFAULT_SEED,
    LLAMA_POOLING_TYPE_UNSPECIFIED,
    LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
    llama_numa_init,
)
from .llama_speculative import CalledDrafter, LlamaDraftModel
from .llama_tokenizer import BaseLlamaTokenizer, LlamaTokenizer

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger("pyggml")
_POOLING = {-1: None, 0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
_ROPE = {0: "none", 1: "linear", 2: "yarn"}
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
        "verbose",
        "no_perf",
        "swa_full",
        "rpc_servers",
        "kv_unified",
        "spm_infill",
        "attention_type",
        "lora_base",
        "mul_mat_q",
        "f16_kv",
        "low_vram",
        "n_gqa",
        "n_parts",
    ]
)


class LogitsProcessorList(list[Callable[..., Any]]):
    """Functions (ids, logits) -> logits, one after the other."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        for f in self:
            scores = f(input_ids, scores)
        return scores


class StoppingCriteriaList(list[Callable[..., bool]]):
    """Functions (ids, logits) -> whether to stop; any of them does."""

    def __call__(self, input_ids: Any, logits: Any) -> bool:
        return any(f(input_ids, logits) for f in self)


# the order in which arguments may stand
_COMPLETION = """
    suffix max_tokens temperature top_p min_p typical_p logprobs echo stop frequency_penalty presence_penalty
    repeat_penalty top_k stream seed tfs_z mirostat_mode mirostat_tau mirostat_eta model stopping_criteria
    logits_processor grammar logit_bias
"""
_CHAT = """
    functions function_call tools tool_choice temperature top_p top_k min_p typical_p stream stop seed response_format
    max_tokens presence_penalty frequency_penalty repeat_penalty tfs_z mirostat_mode mirostat_tau mirostat_eta model
    logits_processor grammar logit_bias logprobs top_logprobs
"""


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

    chat_handler  one of `llama_chat_format`, with the file of the towers that see; or a function that answers chats
    draft_model   guesses tokens, see `llama_speculative`
    tokenizer     makes the tokens of prompts that are text, and the text of `detokenize`; chats use the file's own
    logits_all    `eval` keeps the logits of each token, for `scores`

    An object can be pickled: it is made again from its arguments. Raises GGUFError for a bad file, ModelError for one
    that cannot be run, TypeError for arguments that are not known.
    """

    def __init__(
        self,
        model_path: str,
        *,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
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
        chat_handler: Callable[..., Any] | None = None,
        draft_model: LlamaDraftModel | None = None,
        tokenizer: BaseLlamaTokenizer | None = None,
        logits_all: bool = False,
        rope_scaling_type: int | None = LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = 1.0,
        yarn_beta_fast: float = 32.0,
        yarn_beta_slow: float = 1.0,
        yarn_orig_ctx: int = 0,
        type_k: int | None = None,
        type_v: int | None = None,
        numa: bool | int = False,
        **ignored: Any,
    ) -> None:
        self._arguments = {k: v for k, v in locals().items() if k not in ("self", "ignored", "__class__")} | ignored
        llama_numa_init(int(numa))
        unknown = sorted(set(ignored) - _IGNORED)
        if unknown:
            raise TypeError(f"Llama() does not know the argument {unknown[0]!r}")
        if pooling_type not in _POOLING:
            raise ModelError(f"pooling_type must be one of {', '.join(map(str, _POOLING))}, not {pooling_type!r:.60}")
        for name, given in (("type_k", type_k), ("type_v", type_v)):
            if given is not None and given not in _TYPES:
                raise ModelError(f"{name} must be one of {', '.join(map(str, _TYPES))}, not {given!r:.60}")
        self.model_path, self.verbose = model_path, bool(ignored.get("verbose", True))
        self.last_n_tokens_size = whole("last_n_tokens_size", last_n_tokens_size, -1, error=ModelError)
        rope = {
            "scaling.type": _ROPE.get(-1 if rope_scaling_type is None else rope_scaling_type),
            "freq_base": rope_freq_base or None,
            "scaling.factor": 1 / rope_freq_scale if rope_freq_scale else None,
            "scaling.yarn_ext_factor": yarn_ext_factor if yarn_ext_factor >= 0 else None,
            "scaling.yarn_attn_factor": yarn_attn_factor if yarn_attn_factor != 1 else None,
            "scaling.yarn_beta_fast": yarn_beta_fast if yarn_beta_fast != 32 else None,
            "scaling.yarn_beta_slow": yarn_beta_slow if yarn_beta_slow != 1 else None,
            "scaling.original_context_length": yarn_orig_ctx or None,
        }
        overrides = {f"{{arch}}.rope.{k}": v for k, v in rope.items() if v is not None} | dict(kv_overrides or {})
        self.chat_handler = chat_handler
        sees = chat_handler if isinstance(chat_handler, MTMDChatHandler) else None
        self.model: Model = load_model(
            model_path,
            use_mmap,
            use_mlock,
            vocab_only,
            kv_overrides=overrides or None,
            mmproj=None if sees is None else sees.clip_model_path,
        )
        self.tokenizer_: BaseLlamaTokenizer = tokenizer or LlamaTokenizer(self)
        self._own_tokenizer = tokenizer is None
        self._registered = find_registered(chat_format)
        if chat_format is None and sees is not None and "tokenizer.chat_template" not in self.model.kv:
            chat_format = sees.chat_format
        self.chat_format, self._template = find_chat_format(None if self._registered else chat_format, self.model)
        if self._registered:
            self.chat_format = str(chat_format)
        self.metadata = {k: str(v) for k, v in self.model.kv.items() if not isinstance(v, (list, np.ndarray))}
        self._n_ctx = n_ctx if vocab_only or n_ctx else self.model.hparams.n_ctx_train
        self._seed, self._embedding, self._flash_attn = seed, embedding, flash_attn
        self._n_threads, self._pooling = n_threads, _POOLING[pooling_type]
        self._cache: dict[str, Any] = {"n_batch": n_batch, "n_ubatch": n_ubatch, "n_threads_batch": n_threads_batch}
        self._cache |= {k: _TYPES[t] for k, t in (("type_k", type_k), ("type_v", type_v)) if t is not None}
        self._logits_all, self._rows = logits_all, list[Floats]()
        self._scored: list[int] = []  # the tokens after which `_rows` are the logits
        self.draft_model = draft_model
        self.cache: BaseLlamaCache | None = None
        prepare = None if draft_model is None else self._drafted
        self._kept = KeptContext(self._new_context, self._recall, self._remember, prepare)
        if lora_path is not None:
            self.model.adapt([(self.model.load_lora(lora_path), lora_scale)])

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        additional_files: Sequence[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        local_dir_use_symlinks: bool | str = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Self:
        """The model in a file of a repository of the Hub, which is downloaded unless the cache has it. `filename` may
        be a pattern (`*Q8_0.gguf`); so may `additional_files`, which are downloaded, too. Raises ModelError when no
        file matches, or several do, and what `hub.download` raises."""
        from ..hub import download

        for pattern in additional_files or ():
            download(repo_id, pattern, cache_dir, local_dir)
        return cls(download(repo_id, filename, cache_dir, local_dir), **options)

    # -- completions ------------------------------------------------------------------------------------------------

    def create_completion(
        self, prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]], *args: Any, **request: Any
    ) -> Any:
        """See `Model.create_completion`."""
        options = self.request({**dict(zip(_COMPLETION.split(), args, strict=False)), **request})
        if self._own_tokenizer or options.get("suffix") is not None:
            return self.model.create_completion(prompt, **options)
        prompts: list[Any] = list(prompt) if isinstance(prompt, (list, tuple)) else [prompt]
        ids = [self.tokenize(p.encode(), special=True) if isinstance(p, str) else p for p in prompts]
        return self.model.create_completion(ids if isinstance(prompt, (list, tuple)) else ids[0], **options)

    __call__ = create_completion

    def create_chat_completion(self, messages: Sequence[Mapping[str, Any]], *args: Any, **request: Any) -> Any:
        """See `Model.create_chat_completion`."""
        request = {**dict(zip(_CHAT.split(), args, strict=False)), **request}
        if isinstance(self.chat_handler, MTMDChatHandler):
            messages = self.chat_handler.messages(messages)
        elif self.chat_handler is not None:
            return self.chat_handler(llama=self, messages=messages, **request)
        options = self.request(request)
        if self.chat_format in FUNCTION_FORMATS and "chat_template" not in options:
            choice = options.get("tool_choice") or options.get("function_call")
            if choice is None and self.chat_format == "chatml-function-calling":
                options["tool_choice"] = "none"  # this format offers tools to those alone who ask for a choice
            of_format = {"tool_choice": choice, "functions": options.get("tools") is None}
            given: Any = options.get("chat_template_kwargs") or {}
            options["chat_template_kwargs"] = {**of_format, **given} if isinstance(given, Mapping) else given
        if self._registered is not None and "chat_template" not in options:
            options |= self._registered.options(messages)
        options.setdefault("chat_template", self._template)
        return self.model.create_chat_completion(messages, **options)

    def create_chat_completion_openai_v1(self, *args: Any, **request: Any) -> Any:
        """`create_chat_completion` with objects of the openai package. Raises ImportError without it."""
        from openai.types.chat import ChatCompletion, ChatCompletionChunk

        found = self.create_chat_completion(*args, **request)
        if request.get("stream"):
            return (ChatCompletionChunk(**chunk) for chunk in found)
        return ChatCompletion(**found)

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `Model.create_completion` and its kin for a request: with the object's context, seed and so
        on, unless the request has its own."""
        request["name"] = request.pop("model", None) or self.model_path
        if request.get("seed") is None and self._seed != LLAMA_DEFAULT_SEED:
            self._seed = random.Random(self._seed).randrange(1 << 32)  # another one each time, the same in each run
            request["seed"] = self._seed
        own: dict[str, Any] = {"n_ctx": self._n_ctx, "n_threads": self._n_threads, "flash_attn": self._flash_attn}
        if not own.keys() & request.keys():  # else the request wants a context of its own
            own["kept"] = self._kept
        return {**own, "repeat_last_n": self.last_n_tokens_size, **request}

    def _drafted(self, g: Generation) -> Generation:
        """The same generation, with guesses of the draft model."""
        assert self.draft_model is not None
        n = getattr(self.draft_model, "num_pred_tokens", 10)
        drafts = type(g) in (Generation, LookupGeneration)
        return with_draft(g, CalledDrafter(self.draft_model), max(int(n), 1)) if drafts else g

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
        return self.tokenizer_.tokenize(text, add_bos, special)

    def detokenize(self, tokens: Iterable[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """The text of tokens, as bytes. After a bos token the space is dropped that vocabularies add before a text."""
        return self.tokenizer_.detokenize(list(tokens), prev_tokens, special)

    def tokenizer(self) -> LlamaTokenizer:
        """The tokenizer of the file."""
        return LlamaTokenizer(self)

    def reset(self) -> None:
        """Forget what was evaluated."""
        self._kept.clear()

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after those that the context has. Raises KVCacheFull when they do not fit."""
        ctx, held = self._kept.ctx, self._kept.held
        known = self._scored == held  # whether the logits of all tokens so far are there
        for i in range(0, len(tokens), ctx.n_batch):
            part = [int(t) for t in tokens[i : i + ctx.n_batch]]
            ctx.decode(part, "all" if self._logits_all else "last")
            held.extend(part)
            if self._logits_all and known:
                self._rows.append(np.array(ctx.logits))
                self._scored = list(held)

    def sample(self, **sampling: Any) -> int:
        """A token for what was evaluated last, or with `idx` for the token at this place."""
        idx: Any = sampling.pop("idx", None)
        chain, _ = self._chain(sampling)
        n = self.n_tokens if idx is None else whole("idx", idx, 0, self.n_tokens - 1, BatchError) + 1
        chain.prime(self._kept.held[:n])
        return chain.sample(self._last_logits() if n == self.n_tokens else self.scores[n - 1])

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
        """Tokens that were evaluated. A smaller number may be set: the tokens behind it are forgotten. Raises
        BatchError for a larger one, and when the model cannot go back so far."""
        return len(self._kept.held)

    @n_tokens.setter
    def n_tokens(self, n: int) -> None:
        n = whole("n_tokens", n, 0, self.n_tokens, BatchError)
        if n == 0:
            self.reset()
        elif n < self.n_tokens:
            if not self._kept.ctx.memory.seq_rm(0, n):
                raise BatchError(f"the model cannot go back to {n} tokens: a window or a state has moved on; reset()")
            del self._kept.held[n:]

    @property
    def input_ids(self) -> npt.NDArray[np.intc]:
        """The tokens that were evaluated, int32 [n_tokens]."""
        return np.array(self._kept.held, np.intc)

    @property
    def scores(self) -> Floats:
        """The logits after each token that was evaluated, float32 [n_tokens, n_vocab]. Those that `eval` did not keep
        (`logits_all`) are made by evaluating all tokens again."""
        held = self._kept.held
        if not held:
            return np.empty((0, self.n_vocab()), np.float32)
        if self._scored != held:
            with self._new_context() as ctx:
                rows: list[Floats] = []
                for i in range(0, len(held), ctx.n_batch):
                    ctx.decode(held[i : i + ctx.n_batch], "all")
                    rows.append(np.array(ctx.logits))
            self._rows, self._scored = rows, list(held)
        return np.concatenate(self._rows)

    _input_ids, _scores = input_ids, scores  # programs use these names of llama-cpp-python, too

    @property
    def eval_tokens(self) -> deque[int]:
        """The tokens that were evaluated."""
        return deque(self._kept.held, self._n_ctx)

    @property
    def eval_logits(self) -> deque[list[float]]:
        """`scores` as lists; without `logits_all` the last row alone."""
        rows = self.scores if self._logits_all else [self._last_logits()]
        return deque([row.tolist() for row in rows], self._n_ctx)

    # -- states -----------------------------------------------------------------------------------------------------

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Keep what is evaluated in a cache, too, where later prompts find what they begin with. Without a cache the
        last text alone is kept."""
        self.cache = cache

    def save_state(self) -> LlamaState:
        """What was evaluated."""
        held = self._kept.held
        data = state_bytes(self._kept.ctx, held)
        scores = np.empty((0, self.n_vocab()), np.float32)
        return LlamaState(self.input_ids, scores, len(held), data, len(data), self._seed, self._adapters())

    def load_state(self, state: LlamaState) -> None:
        """Go on from what `save_state` gave. Raises StateError for a state of another model, and KVCacheFull when it is
        too long for the context; then nothing has changed."""
        self._kept.held[:] = load_state_bytes(self._kept.ctx, state.llama_state)
        self._seed = state.seed

    def _adapters(self) -> str:
        """Which adapters change what is evaluated."""
        loras, control = self.model.loras, self.model.control.directions
        return repr([(lora.path, scale) for lora, scale in loras] + [(i, v.tobytes()) for i, v in control.items()])

    def _recall(self, prompt: Sequence[int]) -> None:
        """Load the state in the cache that has more of a prompt than the context."""
        if self.cache is None:
            return
        state, tokens = self.cache.find(prompt, self._adapters()), list(prompt)
        if state is None:
            return
        n = common_prefix(state.input_ids.tolist(), tokens)
        cuts = self._kept.ctx.memory.keeps_all
        if n > common_prefix(self._kept.held, tokens) and (cuts or n == state.n_tokens):
            seed = self._seed
            try:
                self.load_state(state)
            except GGMLError as e:  # of another model, or too long
                _log.warning("a state of the cache cannot be used: %s", e)
            self._seed = seed

    def _remember(self) -> None:
        if self.cache is not None and self._kept.held:
            self.cache[self._kept.held] = self.save_state()

    def __getstate__(self) -> dict[str, Any]:
        return {**self._arguments, "seed": self._seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def _new_context(self) -> LlamaContext:
        options: Any = {"n_threads": self._n_threads, "flash_attn": self._flash_attn, **self._cache}
        return self.model.new_context(self._n_ctx, **options)

    def _last_logits(self) -> Any:
        if not self._kept.held:
            raise BatchError("nothing was evaluated yet")
        return self._kept.ctx.logits[-1]

    def _chain(self, sampling: dict[str, Any]) -> tuple[SamplerChain, Sequence[Callable[..., bool]]]:
        given = {k: v for k, v in sampling.items() if v is not None and k not in ("tfs_z", "penalize_nl")}
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

    def pooling_type(self) -> int:
        """How embeddings of tokens become that of a text, one of LLAMA_POOLING_TYPE_..."""
        pooling = self._pooling or self.model.hparams.pooling
        return next(number for number, name in _POOLING.items() if name == pooling)

    @property
    def ctx(self) -> LlamaContext:
        """The context that `eval` and `generate` use."""
        return self._kept.ctx

    @property
    def _model(self) -> LlamaModel:
        return LlamaModel.of(self.model)

    @property
    def _ctx(self) -> InternalContext:
        return InternalContext.of(self._model, self._kept.ctx, self._kept.held)

    @property
    def _is_recurrent(self) -> bool:
        return self.model.architecture.memory == "recurrent"

    @property
    def _is_hybrid(self) -> bool:
        return self.model.architecture.memory == "hybrid"

    @staticmethod
    def logits_to_logprobs(logits: npt.ArrayLike, axis: int = -1) -> Floats:
        """Logarithms of the probabilities that belong to logits."""
        x = np.asarray(logits, np.float32)
        return np.apply_along_axis(log_softmax, axis, x)

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """How many tokens two texts begin with alike."""
        return common_prefix(list(a), list(b))

    def close(self) -> None:
        """Close the model."""
        self.model.close()
