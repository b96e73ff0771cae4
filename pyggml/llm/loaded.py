"""A loaded file: hyperparameters, weights as they lie in the file, and the vocabulary."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex
from weakref import WeakSet

from pyggml.errors import ModelError, not_sent, whole
from pyggml.form import Repacking
from pyggml.gguf_io.read import KVValue
from pyggml.inspect.taps import Callback, Change, Edit, Tap
from pyggml.inspect.watch import Watches
from pyggml.models import Architecture, get_architecture
from pyggml.models.hparams import HParams
from pyggml.models.metadata import Reader
from pyggml.models.names import tensor_name
from pyggml.models.weights import Weights
from pyggml.tensor import Tensor

from .adapters.active import Scaled
from .adapters.control import ControlVector
from .closeable import Closeable
from .vocab import Vocab

if TYPE_CHECKING:
    from pyggml.media import Features
    from pyggml.stream.weights import WeightStream


class LoadedModel(Closeable):
    """What contexts and generations know of a model; `Model` adds what starts them."""

    def __init__(
        self,
        path: str,
        arch: str,
        kv: Mapping[str, KVValue],
        tensors: Mapping[str, Tensor] | None,
        layers: tuple[int, int] | None = None,
        mmproj: str | None = None,
    ) -> None:
        """`layers`: the first layer and the end (not included) of a stage; None: the whole model. `mmproj`: the file of
        its towers. Raises ModelError when the model has no such stage."""
        self.path, self.arch, self.kv, self.mmproj = path, arch, kv, mmproj
        self.contexts: WeakSet[Closeable] = WeakSet()  # open contexts, which are closed with the model
        self.loras: tuple[Scaled, ...] = ()  # new contexts begin with these
        self.control = ControlVector({})
        self.vocab_only = tensors is None
        self.precision = "exact"  # of products: `load_model`
        self.image_tokens: tuple[int | None, int | None] = (None, None)  # the least and the most of a picture
        self.watches = Watches()  # the taps and edits that look into the graphs of its contexts
        # What its towers made of the last pictures and sounds, by kind and digest (`media_prompt.features_of`).
        self.features: OrderedDict[tuple[str, bytes], Features] = OrderedDict()
        self.senses: dict[str, Any] = {}  # its towers with their processors, see `sense`
        self.weight_stream: WeightStream | None = None  # for weights kept within a budget
        self.repacking: Repacking | None = None  # of the weights: contexts go on with it before they decode
        self.tensors: Mapping[str, Tensor] = tensors or {}
        self.weights = Weights(self.tensors)
        if not self.vocab_only:
            self.architecture.declare(self.hparams, self.weights)
        self.stage: range | None = None if layers is None else self._checked(layers)  # the layers of a stage; None: all

    @cached_property
    def architecture(self) -> Architecture:
        """The record of `arch` in its page. Raises ModelError when it is not supported."""
        return get_architecture(self.arch)

    @cached_property
    def hparams(self) -> HParams:
        """The hyperparameters. Raises ModelError naming the key that is missing or wrong."""
        return self.architecture.hparams(self.arch, self.kv)

    @cached_property
    def vocab(self) -> Vocab:
        """The vocabulary. Raises ModelError when the file has no vocabulary, or one of an unsupported kind."""
        return Vocab.from_gguf(self.kv)

    @property
    def decoder_start(self) -> int | None:
        """The token that an encoder-decoder's decoder begins with: the one that the file names, or otherwise bos. None
        for other models. Raises ModelError when there is no such token."""
        if self.architecture.encode is None:
            return None
        key = f"{self.arch}.decoder_start_token_id"
        token = self.kv.get(key, self.vocab.bos)
        if type(token) is not int or not 0 <= token < self.hparams.n_vocab:
            raise ModelError(f"the key {key} says which token begins an answer: {token} is none")
        return token

    @property
    def unused(self) -> list[str]:
        """The names of the tensors that neither the model nor its heads read."""
        hp = self.hparams
        blocks = range(hp.n_layer, hp.n_layer + self.n_heads) if self.architecture.nextn else ()
        own = tuple(f"blk.{i}." for i in blocks)
        return [name for name in self.weights.unused if not name.startswith(own)] if own else self.weights.unused

    @property
    def n_heads(self) -> int:
        """How many layers in the file come after the model's own and draft tokens (multi-token prediction)."""
        said = range(Reader(self.arch, self.kv).integer("{arch}.nextn_predict_layers", 0))
        n_layer = self.hparams.n_layer
        return sum(tensor_name("nextn.eh_proj", n_layer + i) in self.tensors for i in said)

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`, see `Vocab.tokenize`."""
        return self.vocab.tokenize(text, add_special, parse_special)

    def detokenize(self, ids: Iterable[int], remove_special: bool = False, unparse_special: bool = False) -> str:
        """Text of token ids, see `Vocab.detokenize`."""
        return self.vocab.detokenize(ids, remove_special, unparse_special)

    def tap(self, *patterns: str, callback: Callback | None = None) -> Tap:
        """While a `with` block lasts, copy the values of all nodes whose names match, in all contexts:

            with model.tap("l_out-*") as t:
                ctx.decode(ids)
            t["l_out-3"]  # a list: an array (n_tokens, n_embd) for each run of the graph

        With a `callback`, `callback(name, array)` is called for each node as soon as it is computed. The (read-only)
        array is the tensor's memory, valid until the callback returns. See `Tap`. Raises GraphError for a bad name.
        """
        return Tap(self.watches, patterns, callback)

    def edit(self, pattern: str, change: Change) -> Edit:
        """While a `with` block lasts, change nodes whose names match before anything reads them: `change(array)` writes
        into the array, or returns another array of its shape. See `Edit`.

            with model.edit("l_out-5", lambda x: x + 4 * direction):
                print("".join(model.generate("I think that", 32)))

        Raises GraphError for a bad name. The decode raises ShapeError for a result of another shape, and GraphError
        when `change` raises.
        """
        return Edit(self.watches, (pattern,), change)

    @property
    def first_layer(self) -> int:
        """The first layer that it runs: 0, unless it is a stage that continues another stage."""
        return 0 if self.stage is None else self.stage.start

    def _meant(self, name: str) -> str:
        from pyggml.missing import of_model  # imported late: few programs need it

        return of_model(name)

    def _checked(self, layers: tuple[int, int]) -> range:
        n = self.hparams.n_layer
        if len(layers) != 2:
            raise ModelError(f"layers must be the first and the end, not {layers!r:.60}")
        first, end = (whole("layers", il, 0, n, ModelError) for il in layers)
        if first >= end:
            raise ModelError(f"layers: from {first} to {end} there are none")
        return range(first, end)

    def close(self) -> None:
        """Close the contexts, then free weights and file. Tensors and arrays that others hold stay valid."""
        for ctx in tuple(vars(self).get("contexts", ())):
            ctx.close()
        stream = vars(self).get("weight_stream")
        if stream is not None:
            stream.close()
        super().close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        instead = f"call load_model({self.path!r}) there; processes share the memory of mapped files"
        raise not_sent(self, instead, ModelError)

    def _name(self) -> str:
        return f"Model {self.arch} {self.path} {len(self.tensors)} tensors"


class DraftHead(LoadedModel):
    """One of the heads in the file of `model`: a model of one layer that drafts from tokens and hidden states.
    Embeddings, last norm or output that the head lacks are those of `model`. Its contexts close with the contexts of
    `model`.

    Raises ModelError when a tensor is missing or has another shape.
    """

    def __init__(self, model: LoadedModel, i: int) -> None:
        vars(self).update(architecture=model.architecture, vocab=model.vocab)
        vars(self).update(hparams=model.architecture.head_hparams(model.arch, model.kv, i))
        super().__init__(model.path, model.arch, model.kv, model.tensors)
        self.contexts = model.contexts
