"""What an architecture is: its names, how its hyperparameters are read, its builder, and its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, get_args

from pyggml.errors import GGMLError, ModelError, one_of
from pyggml.graph import Graph

from .blocks import Build
from .hparams import MAX_LAYERS, H, HParams
from .memory.encoded_text import EncodedText
from .memory.kv_cache import CacheOptions, KVCache
from .memory.memory import Memory, Store
from .memory.recurrent import RecurrentCells
from .memory.window import WindowCache
from .metadata import Reader
from .stage import begin_at
from .weights import Weights

if TYPE_CHECKING:
    from typing_extensions import Unpack

_BLOCK_COUNT = "{arch}.block_count"
MemoryKind = Literal["kv", "recurrent", "hybrid", "cross", "none"]


@dataclass(frozen=True)
class Architecture(Generic[H]):
    """How the models of one or more `general.architecture` are read, built and remembered.

    names    the architectures
    build    records the graph of a ubatch. The tensors that it asks of `b.weights` are those that a file must or may
             have
    read     reads the hyperparameters in the metadata: HParams, or a subclass with those of this family. They also say
             whether tokens see those after them (`causal_attn`), and which layers see a window only (`n_swa`)
    memory   kv: keys and values of each token (with a sliding window when the hyperparameters ask for it); recurrent:
             a state; hybrid: both; cross: keys and values, also of a text that was encoded; none: nothing, all tokens
             are evaluated at once
    logits   its graphs end with logits; graphs of encoders end with embeddings
    nextn    files may have draft heads: layers after the model's that guess the next tokens (multi-token prediction).
             Given the hyperparameters of a draft head, `build` records the graph of that head
    encode   for encoder-decoders: records the graph of the encoder. It fills `Build.cross` with the keys and values
             that the decoder's layers attend to, and ends with embeddings
    """

    names: tuple[str, ...]
    build: Callable[[Build[H]], Graph]
    read: Callable[[Reader], H]
    memory: MemoryKind = "kv"
    logits: bool = True
    nextn: bool = False
    encode: Callable[[Build[H]], Graph] | None = None

    def __post_init__(self) -> None:
        one_of(f"the memory of {', '.join(self.names)}", self.memory, get_args(MemoryKind), ModelError)

    def hparams(self, name: str, kv: Mapping[str, object]) -> H:
        """The hyperparameters in a GGUF's metadata, keys prefixed with `name`.

        Raises ModelError naming the key that is missing, of another type or out of range.
        """
        r = Reader(name, kv)
        n_layer = r.integer(_BLOCK_COUNT, 0)
        if n_layer > MAX_LAYERS:  # before any list with a value for each of them
            r.fail(_BLOCK_COUNT, f"is {n_layer}: more than the {MAX_LAYERS} layers supported")
        hp = self.read(r)
        if not isinstance(hp, HParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(f"the architecture {name}: its `read` gave no HParams, but {hp!r:.60}")
        return hp

    def head_hparams(self, name: str, kv: Mapping[str, object], head: int) -> H:
        """The hyperparameters of draft head number `head` of the file, from 0 on. Raises as `hparams`."""
        return self.read(Reader(name, kv, head))

    def declare(self, hp: H, weights: Weights) -> Weights:
        """Let the builder ask for all its weights. `weights` then has those that exist, in the builder's order.

        Raises ModelError naming the tensor that is missing or has another shape.
        """
        self.least_graph(hp, weights)
        return weights

    def build_stage(self, b: Build[H]) -> None:
        """Record the graph of a ubatch, from its first layer on. Raises ModelError when it cannot begin there."""
        self.build(b)
        if b.first:
            begin_at(b)

    def least_graph(self, hp: H, weights: Weights, stage: range | None = None) -> Graph:
        """The graph of one token, over one cell (of an encoder-decoder the decoder's), of all layers or of a stage.
        Raises as `declare`, ModelError when the model cannot be split there."""
        if stage is not None and (self.encode is not None or not self.logits or hp.is_head):
            raise ModelError("a model with an encoder, or one that guesses for another, does not run in stages")
        first, end = (0, None) if stage is None else (stage.start, stage.stop if stage.stop < hp.n_layer else None)
        memory = self.new_memory(hp, 1, n_batch=1)
        try:
            if self.encode is not None and memory.encoding is not None:
                encoded = tuple(c.size for c in memory.encoding.caches)
                self.encode(Build(hp, weights, memory.encoding, 1, 1, encoded))
            sizes, ends = tuple(c.size for c in memory.caches), end is not None
            b = Build(hp, weights, memory, 1, 1, sizes, embeddings=ends, layer=end, first=first)
            self.build_stage(b)
        except ModelError:
            raise
        except GGMLError as e:
            raise ModelError(f"the hyperparameters make no graph: {e}") from e
        last = b.graph.nodes[-1] if b.graph.nodes else None
        if self.logits and not ends and (last is None or last.ne[0] != hp.n_vocab):
            found = "no nodes" if last is None else last.describe()
            want = f"ne [{hp.n_vocab}, n_outputs], as build_lm_head records"
            raise ModelError(f"the graph of {self.names[0]} (b.graph) ends with {found}, not with logits of {want}")
        return b.graph

    def new_memory(
        self,
        hp: H,
        size: int,
        *,
        n_batch: int = 512,
        **options: Unpack[CacheOptions],
    ) -> Memory:
        """The memory of a context of `size` cells, without its buffers. A `transient` one remembers nothing: graphs
        over it evaluate whole texts at once, and write into none of its tensors. Raises ModelError for types that it
        cannot store."""
        if hp.is_head:  # guesses are taken back: the cache of a draft head keeps what lies before a window, too
            return Memory(KVCache(hp, size, n_swa=hp.n_swa if hp.is_swa(0) else 0, **options))
        transient = options.get("transient", False)
        n_seq_max, held = options.get("n_seq_max", 1), options.get("held")
        if self.memory == "recurrent":
            return Memory(RecurrentCells(hp, size, n_seq_max, held, transient))
        if self.memory == "cross":
            decoder = KVCache(hp, size, **options)
            text = EncodedText(hp, decoder, **options)
            n = max(min(decoder.size, n_batch), hp.n_heard)
            encoder = KVCache(hp, n, causal=False, **options | {"transient": True})
            return Memory(decoder, text, encoding=Memory(encoder, text))
        options["transient"] = transient or self.memory == "none"
        full = [il for il in hp.cache_layers if not hp.is_swa(il)] if hp.n_swa else None
        base = KVCache(hp, size, layers=full, **options)
        stores: list[Store] = [base]
        if hp.n_swa:
            stores.append(WindowCache(hp, base, n_batch, layers=list(filter(hp.is_swa, hp.cache_layers)), **options))
        if self.memory == "hybrid":
            stores.append(RecurrentCells(hp, base.size, n_seq_max, held, transient))
        return Memory(*stores)
