"""Requests on a cluster: starts workers or stages on its nodes, hands out the requests, and ends everything."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyggml.errors import BatchError, ModelError, path_name, whole
from pyggml.gguf_io.read import Override
from pyggml.llm.generate.requests import Result
from pyggml.llm.model import default_model_path, load_model, tensor_sizes
from pyggml.llm.run_batch import batch
from pyggml.signature import hands_on, keywords_of

from .actors import About, Actor, Actors, ModelRef, Prepare, StageActor, check_alike, is_there
from .chain import Chain
from .pool import Pool, Worker
from .seats import spread, take_seats
from .workers import ModelWorker, StagesWorker

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pyggml.llm.generate.batched import BatchOptions

_BLOCK = re.compile(r"blk\.(\d+)\.")


@hands_on(*keywords_of(batch))
def batch_on(
    actors: Actors,
    model: str | os.PathLike[str] | None,
    requests: Iterable[Any],
    n_predict: int = 128,
    *,
    workers: int | None = None,
    stages: int | None = None,
    ram: str | None = None,
    prepare: Prepare | None = None,
    kv_overrides: Mapping[str, Override] | None = None,
    precision: str = "exact",
    **options: Unpack[BatchOptions],
) -> Iterator[Result]:
    """`gg.batch` on a cluster: the same results, in the same order.

    The file of `model` (by default the one that ships with the package) must be on every node, under the same path.
    Each of the `workers` (default: one on each node) loads it, uses as many threads as its node has CPUs for it, and
    has `n_parallel` prompts under way.

    With `stages` the layers of one model are spread over this number of processes; a process with more threads gets
    more layers. Then `n_parallel` prompts are under way in all. They are divided into one group more than there are
    stages, so that each stage always has something to do.

    `ram` is the memory that each process may use for weights. `prepare(model)` is called in each process when the model
    is loaded. `kv_overrides` and `precision` are those of `load_model`. A process that dies is replaced, and its
    prompts are done again.

    Raises as `gg.batch` and `load_model`; ModelError for a model that cannot be split, or that the nodes cannot hold;
    BatchError when three processes in a row die at the same prompt, or no process can be started any more.
    """
    if workers is not None and stages is not None:
        raise ModelError("workers have whole models each, stages are parts of one: give one of the two")
    if isinstance(requests, str | bytes | Mapping) or not isinstance(requests, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BatchError(f"requests must be a list of them, not {requests!r:.60}")
    path = default_model_path() if model is None else Path(path_name(model, ModelError)).resolve()
    ref = ModelRef(str(path), ram, prepare, kv_overrides, precision)
    options = options.copy()
    n_parallel = whole("n_parallel", options.get("n_parallel", 32), 1, error=BatchError)
    todo = list(requests)
    made: list[Worker] = []
    try:
        if stages is None:
            made += _workers(actors, ref, workers, n_predict, options)
        else:
            chain = chain_of(actors, ref, stages, options.pop("n_threads", None))
            n_groups = stages + 1
            n_parallel = options["n_parallel"] = -(-n_parallel // n_groups)
            made += [StagesWorker(chain, n_predict, options) for _ in range(n_groups)]
        yield from Pool(made, n_parallel).run(todo)
    finally:
        for w in made:
            w.close()


def _workers(actors: Actors, ref: ModelRef, n: int | None, n_predict: int, options: BatchOptions) -> list[ModelWorker]:
    made: list[ModelWorker] = []
    for seat in take_seats(actors.nodes(), n):
        own = options.copy()
        own["n_threads"] = options.get("n_threads") or seat.n_threads
        made.append(ModelWorker(actors, seat, ref, n_predict, own))
    check_alike([about for w in made if (about := w.about()) is not None])
    return made


def chain_of(actors: Actors, ref: ModelRef, n: int, n_threads: int | None) -> Chain:
    """A model in `n` stages. Raises ModelError when it cannot be split."""
    whole("stages", n, 1, error=ModelError)
    seats = take_seats(actors.nodes(), n)
    driver = load_model(ref.path, vocab_only=True, kv_overrides=ref.kv_overrides)
    hp, sizes = driver.hparams, tensor_sizes(ref.path)
    blocks: dict[int, int] = {}
    for name, size in sizes.items():
        if found := _BLOCK.match(name):
            blocks[int(found[1])] = blocks.get(int(found[1]), 0) + size
    head = sizes.get("output.weight", sizes.get("token_embd.weight", 0))
    layers = spread([blocks.get(hp.block(il), 0) for il in range(hp.n_layer)], head, seats, ref.ram is not None)
    loaded: dict[int, About] = {}

    def start(i: int) -> Actor:
        if not is_there(actors, seats[i].node):
            raise ModelError(f"the node of stage {i + 1} (layers {layers[i][0]} to {layers[i][1] - 1}) is gone")
        actor = actors.start(StageActor, seats[i])
        loaded[i] = actors.get(actor.call("load", ref, layers[i], n_threads or seats[i].n_threads))
        check_alike(list(loaded.values()))
        return actor

    return Chain(driver, actors, n, start)
