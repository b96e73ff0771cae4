"""A model: loaded from a file, it makes contexts and continues texts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn
from weakref import WeakSet

import numpy as np

from pyggml.backends.cpu import isa_name
from pyggml.backends.cpu.repack import CpuRepacking, allow_rounding, be_fast, can_repack, repack_in_passing
from pyggml.backends.cpu.repack import repack as repack_weights
from pyggml.errors import ModelError, path_name, whole
from pyggml.gguf_io.bind import bind
from pyggml.gguf_io.read import GGUFFile, Override, is_whisper_file, lock_memory, with_overrides
from pyggml.gguf_io.split import SPLIT_KEYS, open_model
from pyggml.hub import find_model
from pyggml.inspect.watch import Watches
from pyggml.logger import LOG
from pyggml.models import get_architecture
from pyggml.signature import hands_on, keywords_of
from pyggml.stream.sizes import memory_size
from pyggml.tensor import Tensor

from .adapters.active import Scaled, checked
from .adapters.control import ControlVector
from .adapters.lora import Lora, load_lora_gguf
from .context import LlamaContext
from .elsewhere import Elsewhere
from .figures.report import log_model
from .generate.generation import GenerateOptions, Prompt, Token, in_thread, new_generation, pieces
from .generate.kept import KeptContext, stream_tokens
from .loaded import DraftHead, LoadedModel
from .options import ContextOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pyggml.hf.folder import HFFolder
    from pyggml.learn.lora import LoRA
    from pyggml.learn.optimisers import Optimiser
    from pyggml.learn.trainer import Trainer


DEFAULT_MODEL = "tales-Q8_0.gguf"
_REPACKED_AT_ONCE = 64 << 20  # bytes: larger models are repacked while their first tokens are computed
_N_SAMPLES, _SAMPLE = 256, 64  # `model_digest` reads this many samples, with this many bytes each
Progress = Callable[[float], bool]
PRECISIONS = ("exact", "fast")  # of products: `load_model`
_GENERATES = hands_on(*keywords_of(new_generation))


class Model(LoadedModel):
    """A loaded GGUF model; made by `load_model`.

    Its memory is freed with the last reference to it, by `close()`, or at the end of a `with` block; after that all use
    raises ModelError. Closing a model closes its contexts, also those of unfinished generations.

    arch      `general.architecture`
    kv        the metadata, overrides applied
    tensors   all tensors of the file by name; their memory is the file's (read-only)
    weights   the tensors that the architecture reads; `unused` names the tensors that neither it nor heads read
    """

    @hands_on(*keywords_of(LlamaContext.__init__))
    def new_context(self, n_ctx: int = 512, **options: Unpack[ContextOptions]) -> LlamaContext:
        """A context with a cache of `n_ctx` cells, see `LlamaContext`."""
        return LlamaContext(self, n_ctx, **options)

    @hands_on(*keywords_of(LlamaContext.__init__))
    def keep_context(self, n_ctx: int = 512, **options: Unpack[ContextOptions]) -> KeptContext:
        """A context that stays between texts: what one text and the next begin with alike is evaluated once. For the
        option `kept` of `generate`, `stream` and `create_completion`. Arguments: see `LlamaContext`."""
        self._name()  # raises when the model was closed
        return KeptContext(lambda: self.new_context(n_ctx, **options))

    @cached_property
    def heads(self) -> tuple[DraftHead, ...]:
        """The heads in the file that draft tokens (multi-token prediction), loaded on first use; see
        `generate.speculative.with_draft`.

        Raises ModelError for a file without heads, for an architecture whose heads are not supported, for a model
        loaded with `ram`, and for heads that lack a tensor.
        """
        self._name()
        if not self.n_heads:
            raise ModelError(f"{self.path} has no heads that draft (multi-token prediction layers)")
        if not self.architecture.nextn:
            raise ModelError(f"the heads of {self.arch} that draft are not supported")
        if self.vocab_only or self.weight_stream is not None:
            what = "vocab_only=True: it has no weights" if self.vocab_only else "ram=: its heads cannot draft"
            raise ModelError(f"the model was loaded with {what}")
        heads = tuple(DraftHead(self, i) for i in range(self.n_heads))
        if self.repacking is not None:
            self.repacking.finish()
            factors = [t for head in heads for t in _factors(head.weights)]
            repack_weights(factors)
            if self.precision == "fast":
                be_fast(factors)
        return heads

    def load_lora(self, path: str | os.PathLike[str]) -> Lora:
        """A LoRA adapter for this model, from a GGUF file or a PEFT folder. `ctx.set_loras([(lora, 1.0)])` switches it
        on.

        Raises GGUFError for a bad file, ModelError for an adapter that does not fit: its architecture differs, or one
        of its tensors is missing in the model or has another shape.
        """
        self._name()  # raises when the model was closed
        name = path_name(path, ModelError)
        if self.vocab_only:
            raise ModelError("the model was loaded with vocab_only=True: it has no weights to adapt")
        if os.path.isdir(name):
            from .adapters.peft import load_lora_peft

            lora = load_lora_peft(Path(name), self)
        else:
            lora = load_lora_gguf(name)
        lora.check(self)
        return lora

    def trainer(
        self,
        opt: Optimiser,
        train: Literal["all"] | LoRA = "all",
        n_ctx: int = 512,
        n_threads: int | None = None,
        n_ubatch: int | None = None,
        clip: float | None = None,
        checkpoint: bool = False,
        ram: int | str | None = None,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> Trainer:
        """A `Trainer`, which trains copies of all weights of this model, or adapters (`gg.LoRA`) beside its weights as
        they are stored, on texts of up to `n_ctx` tokens:

            t = model.trainer(gg.AdamW(lr=1e-4), gg.LoRA(r=8))
            losses = [t.step([ids]) for ids in texts]
            t.save("adapter.gguf")

        n_threads  as of a context
        n_ubatch   texts in memory at a time: a larger batch is computed in parts, its step is the same; None: all
        clip       gradients whose common norm is larger are made smaller, to this norm (arXiv 1211.5063); None: never
        checkpoint what a layer has computed is not kept for the gradients, but computed again from what the layer read:
                   much less memory, more time, and the same results
        ram        a budget ("4GiB", or bytes) for all that a step holds: what is trained, its states, the weights, the
                   values of the batch. As few layers as possible are computed again; None: what it takes
        dropout    in each step about this share of some elements is set to zero: of the token embeddings and of what
                   attention and networks add to the residual stream; for adapters, of what they read (arXiv 1207.0580)
        seed       which elements these are follows from it, the number of the step, and the part of the batch

        Raises ModelError for a model that predicts no tokens, for weights of block types (with "all"), and for an
        adapter's target that is in no product of the model; ModelError and GraphError for bad numbers. A step raises
        ModelError when `ram` is too small for it, with what it needs.
        """
        from pyggml.learn.trainer import Trainer

        self._name()
        return Trainer(self, opt, train, n_ctx, n_threads, n_ubatch, clip, checkpoint, ram, dropout, seed)

    def adapt(self, loras: Iterable[Scaled] = (), control_vector: ControlVector | None = None) -> None:
        """Set the adapters (with their scales) and the control vector for all contexts that are made from now on, also
        for those of generations. Raises ModelError when one does not fit the model."""
        self._name()
        scaled = checked(loras)
        for lora, _ in scaled:
            lora.check(self)
        if control_vector is not None and not isinstance(control_vector, ControlVector):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(f"a ControlVector is wanted, not {control_vector!r:.60}")
        self.loras = tuple(scaled)
        self.control = ControlVector({}) if control_vector is None else control_vector

    @_GENERATES
    def generate(
        self,
        prompt: Prompt,
        n_predict: int = 128,
        *,
        kept: KeptContext | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[str]:
        """Continue `prompt` as `stream` does, yielding the text alone, in pieces of whole characters."""
        return pieces(stream_tokens(self, prompt, n_predict, None, kept, **options))

    @_GENERATES
    def infill(
        self, prefix: str, suffix: str, n_predict: int = 128, **options: Unpack[GenerateOptions]
    ) -> Iterator[str]:
        """The text that the model puts between two others, yielded like the text of `generate`. Raises ModelError for a
        model without the tokens for it."""
        return self.generate(self.vocab.infill_ids(prefix, suffix), n_predict, **options)

    @_GENERATES
    def stream(
        self,
        prompt: Prompt,
        n_predict: int = 128,
        n_probs: int = 0,
        *,
        kept: KeptContext | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Token]:
        """Continue `prompt` token by token, until the model ends the text or after `n_predict` tokens (negative: until
        the context is full). Closing the iterator ends it. The prompt is text, token ids, a `MediaPrompt`, or the
        messages of a chat. The content of a message may be a list of parts: {"type": "text", "text": ...},
        {"type": "image", "image": PATH}.

        Each token has its log-probability and the `n_probs` likeliest alternatives. `stop` strings end the text and are
        not shown. `n_ctx` None makes room for prompt and continuation. `cfg_scale` is the factor by which the prompt
        counts more than `negative_prompt` (classifier-free guidance; 1: off). `context`: further arguments for the
        `LlamaContext`. `kept`: a context of `keep_context`, which has evaluated what the prompt begins with. `special`:
        control tokens are text, too. All other options: `SamplingParams`.
        Raises ModelError, BatchError for a bad prompt, KVCacheFull when the prompt is longer than the context,
        SamplerError for bad sampling parameters.
        """
        return stream_tokens(self, prompt, n_predict, n_probs, kept, **options)

    @_GENERATES
    def agenerate(self, prompt: Prompt, n_predict: int = 128, **options: Unpack[GenerateOptions]) -> AsyncIterator[str]:
        """`generate` for `async for`; each step runs in a thread."""
        return in_thread(self.generate(prompt, n_predict, **options))

    @_GENERATES
    def astream(
        self, prompt: Prompt, n_predict: int = 128, n_probs: int = 0, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[Token]:
        """`stream` for `async for`; each step runs in a thread."""
        return in_thread(self.stream(prompt, n_predict, n_probs, **options))

    if TYPE_CHECKING:
        from .embed import embed, rerank
        from .generate.batched import generate_batch, stream_batch
        from .openai.chat import create_chat_completion
        from .openai.text import create_completion
        from .picture import classify_image, embed_image, encode_image, picture_features, process_image
        from .sound import encode_audio, sound_features
        from .transcribe import transcribe
    else:
        embed, rerank = Elsewhere("pyggml.llm.embed"), Elsewhere("pyggml.llm.embed")
        generate_batch = Elsewhere("pyggml.llm.generate.batched")
        stream_batch = Elsewhere("pyggml.llm.generate.batched")
        create_chat_completion = Elsewhere("pyggml.llm.openai.chat")
        create_completion = Elsewhere("pyggml.llm.openai.text")
        process_image, picture_features = Elsewhere("pyggml.llm.picture"), Elsewhere("pyggml.llm.picture")
        encode_image, embed_image = Elsewhere("pyggml.llm.picture"), Elsewhere("pyggml.llm.picture")
        classify_image = Elsewhere("pyggml.llm.picture")
        encode_audio, sound_features = Elsewhere("pyggml.llm.sound"), Elsewhere("pyggml.llm.sound")
        transcribe = Elsewhere("pyggml.llm.transcribe")


class TowerModel(Model):
    """A folder that is an encoder of pictures (CLIP, SigLIP, DINOv2, ViT): a model with a tower and no decoder. It
    encodes and embeds pictures, and those of CLIP and SigLIP embed texts, too; what needs a decoder raises ModelError.

    `kv` has the keys `clip.*`, `tensors` and `weights` are the tower's.
    """

    def __init__(self, path: str, precision: str, image_tokens: tuple[int | None, int | None]) -> None:
        from .picture import sight_of
        from .tower import open_tower_of

        self.precision, self.image_tokens = precision, image_tokens
        tower = open_tower_of(path, None, "vision", fast=precision == "fast")
        assert tower is not None, path
        self.path, self.arch, self.kv, self.mmproj = tower.path, "clip", tower.kv, None
        self.contexts = WeakSet()
        self.loras, self.control, self.vocab_only = (), ControlVector({}), False
        self.watches = Watches()
        self.weight_stream, self.repacking = None, None
        self.tensors, self.weights, self.stage = dict(tower.weights), tower.weights, None
        self.senses = {"vision": sight_of(self, tower)}

    def _no_decoder(self) -> NoReturn:
        raise ModelError(f"{self.path}: an encoder of pictures has no decoder, and no vocabulary")

    if TYPE_CHECKING:
        from .text_tower import embed_text as embed  # pyright: ignore[reportAssignmentType]
        from .text_tower import match, tokenize  # pyright: ignore[reportAssignmentType]
    else:
        embed = Elsewhere("pyggml.llm.text_tower", "embed_text")
        match, tokenize = Elsewhere("pyggml.llm.text_tower"), Elsewhere("pyggml.llm.text_tower")

    architecture = hparams = vocab = property(_no_decoder)  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

    @property
    def unused(self) -> list[str]:
        """The names of the tensors that nothing reads: there are none."""
        return []

    def _name(self) -> str:
        return f"Model {self.path} {len(self.tensors)} tensors"


def default_model_path() -> Path:
    """The model that ships with the package. Raises ModelError when it is missing."""
    path = Path(__file__).parents[1] / "data" / DEFAULT_MODEL
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
    ram: int | str | None = None,
    layers: tuple[int, int] | None = None,
    mmproj: str | os.PathLike[str] | None = None,
    precision: str = "exact",
    image_tokens: tuple[int | None, int | None] = (None, None),
) -> Model:
    """Load a GGUF file, a Hugging Face folder, or a Whisper model of whisper.cpp (`ggml-base.bin`, read into memory);
    by default the model that ships with the package. `path` may also be a repository of the Hugging Face Hub
    ("Qwen/Qwen3-0.6B", "USER/REPO:Q4_K_M"), a URL, or an alias of the configuration, see `hub.find_model`. For a model
    in several files, it is the first (NAME-00001-of-00003.gguf). Weights stay where they are in the mapped files
    (`use_mmap=False` reads them into memory); weights of a folder that have another layout there are copied.

    `use_mlock` keeps them in RAM; `vocab_only` loads metadata and vocabulary alone; `kv_overrides` replaces metadata
    (`{arch}` in a key is the architecture, as in `gguf.Keys`);
    `progress(fraction)` is called now and then and cancels the load by returning False. `repack` copies the weights of
    matrix products to the layout that is fastest on this CPU, and gives the file's pages back. The copies of a large
    model are made after the first decode, some before each further one. Without `repack`, products
    repack blocks each time they read them: the results are the same, but it is slower. A mapped file must not be
    written to while it is in use; when it is made shorter, reading it raises GGUFError (see `MappedFile`).

    `ram` ("2GiB", or bytes) is a budget for all weights in memory: as many layers as fit stay there, and the others are
    read each time a graph needs them, each while the layer before it computes. Results are the same. The K/V cache and
    the compute buffers of contexts are not part of the budget; `model.weight_stream` has the figures.
    `layers` (first, end): load a stage of the model, these layers alone (`end` not included). The first stage has the
    embeddings of tokens, the last one the output; no other weights are read. A context of a later stage takes what the
    layer before gave (`Batch.add_embd`), and one of an earlier stage gives what the next layer reads (`embeddings`).
    `mmproj`: the file with the towers of a model that sees or hears (`clip.*`, as llama.cpp writes it). A folder's own
    tower is found, and loaded with the first picture; folders of CLIP, SigLIP, DINOv2 and ViT are a tower alone.
    `precision`: "exact", or "fast": products with quantised weights round their columns to bytes, with a step for each
    16 elements (or, on CPUs with AMX, both to bf16), so that prompts take less time and logits are less precise
    (docs/products.md has figures). Products with weights in F16 and BF16, those of towers too, round both to 16 bits.
    Products with other weights do not change.
    `image_tokens`: how many tokens a picture has at least and at most (None: as its processor says), for families that
    resize a picture within such limits: Qwen2-VL to Qwen3-VL, GLM-4V and LFM2-VL.
    What is loaded is logged ("pyggml", INFO). Raises GGUFError for a bad file, ModelError for a file that its
    architecture cannot run, for a `ram` that is too small, for an unknown `precision`, or when cancelled; MediaError
    for `image_tokens` of a model of another family.
    """
    if precision not in PRECISIONS:
        raise ModelError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r:.40}")
    image_tokens = _limits(image_tokens)
    budget = memory_size(ram) if ram is not None else None if layers is None else sys.maxsize
    if budget is not None and not use_mmap:
        what = "layers" if ram is None else "ram"
        raise ModelError(f"{what}: weights that use_mmap=False reads into memory are no longer read from the file")
    source = default_model_path() if path is None else find_model(path_name(path, ModelError))
    if not vocab_only and os.path.isdir(source):
        from pyggml.hf.towers import is_tower

        if is_tower(source):
            return TowerModel(os.fspath(source), precision, image_tokens)
    if is_whisper_file(source):
        if budget is not None or kv_overrides or mmproj is not None or any(image_tokens):
            taken = "ram, layers, kv_overrides, mmproj, image_tokens"
            raise ModelError(f"{path_name(source, ModelError)}: whisper.cpp's files take no {taken}")
        return _of_whisper_file(path_name(source, ModelError), vocab_only, repack, precision, progress)
    file = _opened(source, use_mmap, vocab_only)
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
        tensors, encoder = _bound(file, use_mmap, budget is None, repack), {}
        if arch == "whisper":
            tensors, encoder = _halves(tensors)
        model = Model(file.path, arch, kv, tensors, layers, None if mmproj is None else path_name(mmproj, ModelError))
        _refuse_unused(file, model)
        if model.unused:
            LOG.warning("%s: nothing asks for the tensors %s", file.path, ", ".join(model.unused))
        _report(progress, 0.0)
        if budget is not None:
            from pyggml.stream.read import origins_of
            from pyggml.stream.weights import WeightStream

            graph = model.architecture.least_graph(model.hparams, model.weights, model.stage)
            leafs = set(graph.leafs)
            weights = {n: t for n, t in model.weights.items() if model.stage is None or t in leafs}
            (allow_rounding if repack else repack_in_passing)(_factors(model.weights))
            packs = partial(can_repack, isa_name()) if repack else None
            model.weight_stream = WeightStream(weights, origins_of(file), graph, budget, packs)
            model.weight_stream.load(lambda done: _report(progress, done))
        else:
            _make_ready(model, repack, use_mlock, progress)
        model.precision = precision
        if precision == "fast":
            be_fast(_factors(model.weights))
        _report(progress, 1.0)
    except ModelError as e:
        raise ModelError(f"{file.path}: {e}") from None
    if use_mlock and model.weight_stream is not None:
        lock_memory(model.weight_stream.memory)
    elif use_mlock:
        all(lock_memory(t.raw() if (copy := t.form.copy) is None else copy.memory) for t in model.weights.values())
    if mmproj is not None:
        _check_towers(model)
    if any(image_tokens):
        from .picture import sight

        model.image_tokens = image_tokens
        sight(model)
    if encoder and isinstance(file, GGUFFile):
        _give_hearing(model, encoder)
    log_model(model)
    return model


def _limits(tokens: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    if not isinstance(tokens, tuple) or len(tokens) != 2:  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
        raise ModelError(f"image_tokens must be the least and the most tokens of a picture, not {tokens!r:.60}")
    least, most = (None if n is None else whole("image_tokens", n, 1, 1 << 20, ModelError) for n in tokens)
    return least, most


def _make_ready(model: Model, repack: bool, at_once: bool, progress: Progress | None) -> None:
    """Make the weights ready for products. A large model is repacked later, unless `at_once`."""
    factors = _factors(model.weights)
    if not repack:
        repack_in_passing(factors)
        return
    repacking = model.repacking = CpuRepacking(factors)
    if at_once or repacking.size < _REPACKED_AT_ONCE:
        repacking.finish(lambda done: _report(progress, done))
    else:
        repacking.put_off()


def _of_whisper_file(path: str, vocab_only: bool, repack: bool, precision: str, progress: Progress | None) -> Model:
    """The model in a file of whisper.cpp (`ggml-base.bin`), with its tower."""
    from .ggml_whisper import read_whisper  # most programs hear nothing

    file = read_whisper(path, vocab_only)
    try:
        if vocab_only:
            model = Model(path, "whisper", file.kv, None)
            _ = model.vocab
            return model
        decoder, encoder = _halves(file.tensors)
        model = Model(path, "whisper", file.kv, decoder)
        if model.unused:
            raise ModelError(f"nothing asks for the tensors {', '.join(model.unused):.300}")
        model.precision = precision
        _give_hearing(model, encoder)
        _report(progress, 0.0)
        _make_ready(model, repack, False, progress)
        if precision == "fast":
            be_fast(_factors(model.weights))
        _report(progress, 1.0)
    except ModelError as e:
        raise ModelError(str(e) if path in str(e) else f"{path}: {e}") from None
    log_model(model)
    return model


def _halves(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of Whisper's decoder, and those of its encoder, which is a tower."""
    encoder = {name: t for name, t in tensors.items() if name.startswith("a.")}
    return {name: t for name, t in tensors.items() if name not in encoder}, encoder


def _give_hearing(model: Model, encoder: Mapping[str, Tensor]) -> None:
    """Give a Whisper its tower, which is in the same file. A folder's tower is loaded when it is first asked for."""
    from .sound import encoder_keys, hearing_of
    from .tower import LoadedTower

    keeps = model.weight_stream is None
    tower = LoadedTower(model.path, encoder_keys(model.kv), encoder, "audio", keeps, model.precision == "fast")
    model.senses["audio"] = hearing_of(model, tower)


def _check_towers(model: Model) -> None:
    """Look at the towers of the model's mmproj file. Raises ModelError when they are not of this model."""
    from .tower import open_tower_of

    opened = (open_tower_of(model.path, model.mmproj, side, keeps=False) for side in ("vision", "audio"))
    towers = [tower for tower in opened if tower is not None]
    if not towers:
        raise ModelError(f"{model.mmproj}: has no tower (clip.has_vision_encoder, clip.has_audio_encoder)")
    for tower in towers:
        if tower.hparams.n_embd_out != model.hparams.n_embd:
            n, n_embd = tower.hparams.n_embd_out, model.hparams.n_embd
            raise ModelError(f"{model.mmproj}: its features have {n} elements, the embeddings of {model.path} {n_embd}")


def tensor_sizes(path: str | os.PathLike[str]) -> dict[str, int]:
    """Bytes of each tensor of a model, without reading the tensors. Raises GGUFError for a bad file."""
    return {name: t.nbytes for name, t in _bound(_opened(path, True, False), True, False, False).items()}


def model_digest(path: str | os.PathLike[str] | None = None, kv_overrides: Mapping[str, Override] | None = None) -> str:
    """A hash that tells models apart, 16 hexadecimal digits: of the metadata, the names, types and shapes of tensors,
    the sizes of the files, and some of their bytes. The model's path and name do not count. Raises GGUFError for a bad
    file, ModelError for a bad folder."""
    from hashlib import sha256  # which loads OpenSSL

    file = _opened(default_model_path() if path is None else path, True, False)
    h = sha256()
    for key, value in sorted(with_overrides(file.kv, kv_overrides).items()):
        if key != "general.name" and key not in SPLIT_KEYS:
            h.update(key.encode("utf-8", "surrogateescape"))
            h.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    for name, t in file.tensors.items():
        h.update(repr((name, t.dtype.name, t.ne)).encode())
    for data in file.contents:
        h.update(repr(data.size).encode())
        for at in range(0, data.size, max(data.size // _N_SAMPLES, _SAMPLE)):
            h.update(data[at : at + _SAMPLE].tobytes())
    return h.hexdigest()[:16]


def _refuse_unused(file: GGUFFile | HFFolder, model: Model) -> None:
    """Raise ModelError when a checkpoint has tensors that nothing reads: then it is another model than the one that its
    config describes. Tensors of heads that are not supported are allowed."""
    first_head = 1 + max(map(model.hparams.block, range(model.hparams.n_layer)))
    blocks = [(name, re.match(r"blk\.(\d+)\.", name)) for name in model.unused]
    names = [name for name, block in blocks if block is None or int(block[1]) < first_head]
    if names and not isinstance(file, GGUFFile):
        raise ModelError(f"{file.path}: nothing asks for the tensors {', '.join(names):.300}: it is not supported")


def _opened(path: str | os.PathLike[str], use_mmap: bool, vocab_only: bool) -> GGUFFile | HFFolder:
    if not os.path.isdir(path):
        return open_model(path, use_mmap)
    from pyggml.hf.folder import open_hf_folder  # imported late: loading a file does not need it

    return open_hf_folder(path, vocab_only)


def _bound(file: GGUFFile | HFFolder, use_mmap: bool, copy: bool, repacked: bool) -> Mapping[str, Tensor]:
    if isinstance(file, GGUFFile):
        return bind(file, repacked and copy)
    from pyggml.hf.folder import bind_folder

    return bind_folder(file, use_mmap, copy)


def _factors(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The weights that matrix products read. The embeddings are among them only when they also serve as the output's
    weights."""
    return [t for name, t in weights.items() if name != "token_embd.weight" or "output.weight" not in weights]


def _report(progress: Progress | None, fraction: float) -> None:
    if progress is not None and progress(fraction) is False:
        raise ModelError("loading was cancelled by its progress callback")
