"""What runs in the processes of a cluster, and what the driver asks of them. Nothing here knows what starts them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pyggml.errors import GGMLError
from pyggml.gguf_io.read import Override
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.decoder import Decoder
from pyggml.llm.generate.requests import Result
from pyggml.llm.model import Model, load_model
from pyggml.llm.run_batch import batch
from pyggml.types import Floats

from .seats import Node, Seat

if TYPE_CHECKING:
    from pyggml.llm.generate.batched import BatchOptions
    from pyggml.llm.options import ContextOptions

Prepare = Callable[[Model], None]


class ActorDied(Exception):
    """The process of an actor is gone, with all it had."""


class Actor(Protocol):
    """An object in another process. Calls run one at a time, in their order."""

    def call(self, method: str, *args: Any) -> Any:
        """Begin a call, and return a handle of its result. The handle may be an argument of other calls."""
        ...

    def kill(self) -> None:
        """End its process."""
        ...


class Actors(Protocol):
    """Starts actors on the nodes of a cluster."""

    def nodes(self) -> list[Node]:
        """The nodes that are alive."""
        ...

    def start(self, kind: type, seat: Seat) -> Actor:
        """Start an actor, a new `kind()`, in that seat."""
        ...

    def get(self, result: Any) -> Any:
        """Wait for the result of a call; `result` is the handle that `call` gave. Raises the error that the call
        raised. Raises ActorDied when the actor is gone, or another actor whose results were its arguments."""
        ...


def is_there(actors: Actors, node: str) -> bool:
    """Whether the node of that name is alive."""
    return any(n.id == node for n in actors.nodes())


class ModelRef(NamedTuple):
    """Which model an actor loads, and how. `prepare` is called with the model when it is loaded."""

    path: str
    ram: str | None = None
    prepare: Prepare | None = None
    kv_overrides: Mapping[str, Override] | None = None
    precision: str = "exact"

    def load(self, layers: tuple[int, int] | None = None) -> Model:
        """Load it, or a stage. Raises as `load_model`."""
        model = load_model(
            self.path, ram=self.ram, layers=layers, kv_overrides=self.kv_overrides, precision=self.precision
        )
        if self.prepare is not None:
            self.prepare(model)
        return model


class About(NamedTuple):
    """Describes the model that an actor has loaded, and the actor's process. The model must be the same everywhere."""

    version: str
    arch: str
    size: int
    pid: int


def about(model: Model) -> About:
    """The About of a model, in the process that has it."""
    from pyggml import __version__

    return About(__version__, model.arch, sum(t.nbytes for t in model.tensors.values()), os.getpid())


class MemoryOp(NamedTuple):
    """An operation on the sequences of a context, for every stage to do: a function of `Memory`, and its arguments."""

    do: Callable[..., object]
    args: tuple[int, ...]


class BatchActor:
    """A model that answers requests."""

    def load(self, model: ModelRef) -> About:
        """Load the model. Raises as `load_model`."""
        self._model = model.load()
        return about(self._model)

    def begin(self, requests: Sequence[Any], n_predict: int, options: BatchOptions) -> None:
        """Take requests, in the place of earlier ones. Raises as `batch`."""
        self._results: Iterator[Result] = batch(self._model, requests, n_predict, **options)

    def more(self) -> Result:
        """The result of the next request."""
        return next(self._results)


class StageActor:
    """Some of the layers of a model, and contexts that run these layers, by number."""

    def load(self, model: ModelRef, layers: tuple[int, int], n_threads: int) -> About:
        """Load these layers. Contexts run on `n_threads` threads. Raises as `load_model`."""
        self._model, self._n_threads = model.load(layers), n_threads
        self._contexts: dict[int, Decoder] = {}
        return about(self._model)

    def open(self, key: int, n_ctx: int, options: ContextOptions) -> None:
        """Make a context. Raises as `LlamaContext`."""
        own: ContextOptions = {**options, "n_threads": self._n_threads}
        self._contexts[key] = LlamaContext(self._model, n_ctx, **own)

    def close(self, key: int) -> None:
        """Close a context, when it is still there."""
        if key in self._contexts:
            self._contexts.pop(key).close()

    def reset(self) -> None:
        """Close all contexts."""
        for key in list(self._contexts):
            self.close(key)

    def decode(self, key: int, ops: Sequence[MemoryOp], part: Batch, hidden: Floats | None) -> Floats:
        """Do `ops` on the memory of a context, then evaluate the tokens of a batch. `hidden` is what the stage before
        gave.

        Returns float32 [n_tokens, n_embd]; the last stage returns logits, [n_outputs, n_vocab]. Raises as
        `LlamaContext.decode`.
        """
        ctx, stage = self._contexts[key], self._model.stage
        for op in ops:
            op.do(ctx.memory, *op.args)
        ends = stage is None or stage.stop == self._model.hparams.n_layer
        here = Batch()
        here.pos, here.seq_ids = part.pos, part.seq_ids
        here.logits = part.logits if ends else [True] * len(part)
        if hidden is None:
            here.tokens = part.tokens
        else:
            here.embd = list(hidden)
        ctx.decode(here)
        return ctx.logits if ends else ctx.embeddings


def check_alike(actors: Sequence[About]) -> None:
    """Raise GGMLError when the actors do not all have the same model and the same version of pyggml."""
    for other in actors[1:]:
        if other[:3] != actors[0][:3]:
            raise GGMLError(f"the nodes have different models, or versions of pyggml: {actors[0][:3]}, {other[:3]}")
