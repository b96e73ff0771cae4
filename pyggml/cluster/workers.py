"""Two kinds of workers: a process with a model of its own, and some sequences of a model in stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyggml.llm.decoder import Decoder
from pyggml.llm.generate.requests import Result, answer

from .actors import About, Actor, ActorDied, Actors, BatchActor, ModelRef, is_there
from .chain import Chain
from .pool import WorkerDied
from .seats import Seat

if TYPE_CHECKING:
    from pyggml.llm.generate.batched import BatchOptions
    from pyggml.llm.options import ContextOptions

_AHEAD = 2  # results that are asked for before they are needed


class ModelWorker:
    """A worker whose actor has a model of its own."""

    def __init__(self, actors: Actors, seat: Seat, model: ModelRef, n_predict: int, options: BatchOptions) -> None:
        self._actors, self._seat, self._model = actors, seat, model
        self._n_predict, self._options = n_predict, options
        self._actor, self._loaded = self._start()

    def _start(self) -> tuple[Actor, Any]:
        """Start an actor, and return it with the handle of the About of its model."""
        actor = self._actors.start(BatchActor, self._seat)
        return actor, actor.call("load", self._model)

    def about(self) -> About | None:
        """Wait for the About of its model. None when the actor died meanwhile. Raises as `load_model`."""
        try:
            return self._actors.get(self._loaded)
        except ActorDied:
            return None

    def answers(self, requests: Sequence[Any]) -> Iterator[Result]:
        """See `Worker`."""
        try:
            call, get = self._actor.call, self._actors.get
            get(self._loaded)
            get(call("begin", list(requests), self._n_predict, self._options))
            waiting = deque(call("more") for _ in requests[:_AHEAD])
            for i in range(len(requests)):
                result = get(waiting.popleft())
                if i + _AHEAD < len(requests):
                    waiting.append(call("more"))
                yield result
        except ActorDied as e:
            raise WorkerDied(str(e)) from e

    def replace(self) -> bool:
        """See `Worker`: the new actor runs on the same node, as long as that is alive."""
        if not is_there(self._actors, self._seat.node):
            return False
        self._actor, self._loaded = self._start()
        return True

    def close(self) -> None:
        """See `Worker`."""
        self._actor.kill()


class StagesWorker:
    """A worker that sends some of the sequences through the stages of a model."""

    def __init__(self, chain: Chain, n_predict: int, options: BatchOptions) -> None:
        self._chain, self._epoch = chain, chain.epoch
        self._n_predict = n_predict
        self._options: dict[str, Any] = {**options}
        self._context: ContextOptions = {"flash_attn": bool(self._options.pop("flash_attn", True))}
        self._context.update(self._options.pop("context", None) or {})

    def answers(self, requests: Sequence[Any]) -> Iterator[Result]:
        """See `Worker`."""
        self._epoch = self._chain.epoch

        def new_context(n_ctx: int, options: ContextOptions) -> Decoder:
            return self._chain.context(n_ctx, {**self._context, **options})

        return answer(self._chain.model, requests, new_context, self._n_predict, **self._options)

    def replace(self) -> bool:
        """See `Worker`."""
        self._chain.repair(self._epoch)
        return True

    def close(self) -> None:
        """See `Worker`."""
        self._chain.close()
