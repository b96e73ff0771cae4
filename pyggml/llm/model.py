"""A model: hyperparameters, weights as they lie in the file, and the vocabulary."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from pyggml.backends.cpu.repack import copy_of
from pyggml.backends.cpu.repack import repack as repack_weights
from pyggml.buffer import Buffer
from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.gguf_io import GGUFFile, KVValue, Override, lock_memory, open_gguf, with_overrides
from pyggml.models import Architecture, get_architecture
from pyggml.models.hparams import HParams
from pyggml.models.names import bind_weights
from pyggml.tensor import Context, Tensor, contiguous_nb, rank_of

from .batched import BatchOptions, generate_batch, stream_batch
from .context import LlamaContext
from .generate import GenerateOptions, Token, in_thread, new_generation, pieces
from .vocab import Vocab

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_MODEL = "tales-Q8_0.gguf"
Progress = Callable[[float], bool]


class Model:
    """A loaded GGUF model; made by `load_model`.

    arch      `general.architecture`
    kv        the metadata, overrides applied
    tensors   all tensors of the file by name; their memory is the file's (read-only)
    weights   those that the architecture reads
    """

    def __init__(self, path: str, arch: str, kv: Mapping[str, KVValue], tensors: Mapping[str, Tensor] | None) -> None:
        self.path, self.arch, self.kv = path, arch, kv
        self.vocab_only = tensors is None
        self.tensors: Mapping[str, Tensor] = tensors or {}
        self.weights = bind_weights(self.architecture.tensors(self.hparams), tensors) if tensors is not None else {}

    @cached_property
    def architecture(self) -> Architecture:
        """The tensors and the graph builder of `arch`. Raises ModelError where it is not supported."""
        return get_architecture(self.arch)

    @cached_property
    def hparams(self) -> HParams:
        """The hyperparameters. Raises ModelError naming the key that is missing or wrong."""
        return HParams.from_kv(self.arch, self.kv)

    @cached_property
    def vocab(self) -> Vocab:
        """The vocabulary. Raises ModelError where the file has none, or one of a kind that is not supported."""
        return Vocab.from_gguf(self.kv)

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`, see `Vocab.tokenize`."""
        return self.vocab.tokenize(text, add_special, parse_special)

    def detokenize(self, ids: Iterable[int], remove_special: bool = False, unparse_special: bool = False) -> str:
        """Text of token ids, see `Vocab.detokenize`."""
        return self.vocab.detokenize(ids, remove_special, unparse_special)

    def new_context(
        self,
        n_ctx: int = 512,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        type_k: DType = DType.F16,
        type_v: DType = DType.F16,
        n_threads: int | None = None,
        flash_attn: bool = False,
        backend: str | Sequence[str] = "cpu",
        defrag_thold: float = 0.0,
    ) -> LlamaContext:
        """A context with a cache of `n_ctx` cells (0: as many as the model was trained with; padded to 32, to 256 with
        `flash_attn`) for sequences 0 .. n_seq_max - 1.

        A decode takes up to `n_batch` tokens and runs `n_ubatch` at a time. `type_k` and `type_v` are what the cache
        stores. `backend` is "cpu", "ref", or several in order of priority. Where more than the part `defrag_thold` of
        the cells in use are holes after a decode, they are closed before the next one (0: only when room is needed).
        Raises ModelError for sizes and types that do not fit the model, BackendError for an unknown backend.
        """
        if self.vocab_only:
            raise ModelError("the model was loaded with vocab_only=True: it has no weights")
        return LlamaContext(
            self,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_seq_max=n_seq_max,
            type_k=type_k,
            type_v=type_v,
            n_threads=n_threads,
            flash_attn=flash_attn,
            backend=backend,
            defrag_thold=defrag_thold,
        )

    def generate(
        self, prompt: str | Sequence[int], n_predict: int = 128, **options: Unpack[GenerateOptions]
    ) -> Iterator[str]:
        """Continue `prompt` as `stream` does, yielding the text alone, in pieces of whole characters."""
        return pieces(iter(new_generation(self, prompt, n_predict, **options)))

    def stream(
        self, prompt: str | Sequence[int], n_predict: int = 128, n_probs: int = 0, **options: Unpack[GenerateOptions]
    ) -> Iterator[Token]:
        """Continue `prompt` (text, or token ids) token by token, until the model ends the text or after `n_predict`
        tokens (negative: until the context is full). Closing the iterator ends it.

        Each token has its log-probability and the `n_probs` likeliest alternatives. `stop` strings end the text and are
        not shown. `n_ctx` None makes room for prompt and continuation. With `cfg_scale` other than 1 the prompt counts
        so many times more than `negative_prompt` (classifier-free guidance). All else: `SamplingParams`.
        Raises ModelError, BatchError for a bad prompt, KVCacheFull where the prompt is longer than the context,
        SamplerError for bad sampling parameters.
        """
        return iter(new_generation(self, prompt, n_predict, n_probs, **options))

    def agenerate(
        self, prompt: str | Sequence[int], n_predict: int = 128, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[str]:
        """`generate` for `async for`; each step runs in a thread."""
        return in_thread(self.generate(prompt, n_predict, **options))

    def astream(
        self, prompt: str | Sequence[int], n_predict: int = 128, n_probs: int = 0, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[Token]:
        """`stream` for `async for`; each step runs in a thread."""
        return in_thread(self.stream(prompt, n_predict, n_probs, **options))

    def generate_batch(
        self, prompts: Sequence[str | Sequence[int]], n_predict: int = 128, **options: Unpack[BatchOptions]
    ) -> list[str]:
        """The texts that follow several prompts, evaluated `n_parallel` (8) at a time, see `stream_batch`."""
        return generate_batch(self, prompts, n_predict, **options)

    def stream_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        n_predict: int = 128,
        n_probs: int = 0,
        **options: Unpack[BatchOptions],
    ) -> Iterator[tuple[int, Token]]:
        """Continue several prompts at once, each as `stream` does, `n_parallel` (8) at a time: as one ends, the next
        joins. Yields the index of the prompt with each token."""
        return stream_batch(self, prompts, n_predict, n_probs, **options)

    def __repr__(self) -> str:
        return f"<Model {self.arch} {self.path} {len(self.tensors)} tensors>"


def default_model_path() -> Path:
    """The model that ships with the package. Raises ModelError where it is missing."""
    path = Path(str(files("pyggml") / "data" / DEFAULT_MODEL))
    if not path.is_file():
        raise ModelError(f"this installation has no model of its own ({path} is missing): name a GGUF file")
    return path


def load_model(
    path: str | os.PathLike[str] | None = None,
    use_mmap: bool = True,
    use_mlock: bool = False,
    vocab_only: bool = False,
    repack: bool = True,
    kv_overrides: Mapping[str, Override] | None = None,
    progress: Progress | None = None,
) -> Model:
    """Load a GGUF model, by default the one that ships with the package. Weights stay where they are in the mapped file
    (`use_mmap=False` reads it into memory).

    `use_mlock` keeps them in RAM; `vocab_only` loads metadata and vocabulary alone; `kv_overrides` replaces metadata;
    `progress(fraction)` is called now and then and cancels the load by returning False. `repack` copies the weights of
    matrix products to the layout that the CPU's kernels are fastest with, and gives the file's pages back; without it
    they are used as they are stored.
    Raises GGUFError for a bad file, ModelError for one that its architecture cannot run, or when cancelled.
    """
    file = open_gguf(default_model_path() if path is None else path, use_mmap)
    kv = with_overrides(file.kv, kv_overrides)
    arch = kv.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelError(f"{file.path}: the key general.architecture is missing or no string")
    try:
        if vocab_only:
            model = Model(file.path, arch, kv, None)
            _ = model.vocab
            return model
        get_architecture(arch)
        model = Model(file.path, arch, kv, _bind(file, "CPU_MMAP" if use_mmap else "CPU"))
        _report(progress, 0.0)
        if repack:
            repack_weights(_factors(model.weights), lambda done: _report(progress, done))
        _report(progress, 1.0)
    except ModelError as e:
        raise ModelError(f"{file.path}: {e}") from None
    if use_mlock:
        all(lock_memory(t.raw() if (copy := copy_of(t)) is None else copy.memory) for t in model.weights.values())
    return model


def _factors(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The weights that matrix products read: not the embeddings, unless they are the output's weights, too."""
    return [t for name, t in weights.items() if name != "token_embd.weight" or "output.weight" not in weights]


def _bind(file: GGUFFile, buft: str) -> dict[str, Tensor]:
    """A tensor for each of the file's, with the file as its memory."""
    ctx = Context()
    buffer = Buffer(file.data, buft)
    tensors: dict[str, Tensor] = {}
    for t in file.tensors.values():
        tensor = Tensor(ctx, t.dtype, t.ne, contiguous_nb(t.dtype, t.ne), rank_of(t.ne))
        tensor.name, tensor.buffer, tensor.offset = t.name, buffer, t.offset
        tensors[t.name] = ctx.adopt(tensor)
    return tensors


def _report(progress: Progress | None, fraction: float) -> None:
    if progress is not None and progress(fraction) is False:
        raise ModelError("loading was cancelled by its progress callback")
