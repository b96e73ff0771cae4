"""Requests on a cluster: the results of one process, in their order, whoever dies. The actors are threads here."""

from __future__ import annotations

import json
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import pyggml as gg
from pyggml.cluster.actors import About, ModelRef, check_alike
from pyggml.cluster.pool import Pool, WorkerDied
from pyggml.cluster.run import batch_on, chain_of
from pyggml.cluster.seats import Node, Seat, spread, take_seats
from pyggml.errors import BatchError, GGMLError, GGUFError, KVCacheFull, ModelError
from pyggml.llm.batch import Batch
from pyggml.llm.decoder import Decoder
from pyggml.llm.generate.request_file import RequestFile
from pyggml.llm.model import default_model_path, load_model
from pyggml.llm.options import ContextOptions

from .fakes import FakeActor, FakeActors

TEXTS = ["Once upon a time", "The wolf said", "There was once a king", "The cat", "In a forest"]
REQUESTS: list[Any] = [{"prompt": TEXTS[i % 5], "id": i, "n_predict": 1 + i * 3 % 5} for i in range(13)]
REQUESTS[3] = {"promt": "?"}
REQUESTS[11] = {"prompt": TEXTS[0], "json_schema": {"type": "boolean"}}
KINDS: list[dict[str, Any]] = [{"workers": 2}, {"stages": 2}]


@pytest.fixture(scope="module")
def want() -> list[dict[str, Any]]:
    return list(gg.batch(load_model(), REQUESTS, temp=0.0, n_threads=1))


class Killer:
    """Ends the process of an actor in front of its nth call of a method."""

    def __init__(self, kind: str, method: str, *nth: int) -> None:
        self._kind, self._method, self._nth, self._calls, self.killed = kind, method, nth, count(1), 0

    def __call__(self, actor: FakeActor, method: str) -> None:
        if actor.kind.__name__ == self._kind and method == self._method and next(self._calls) in self._nth:
            actor.dead = True
            self.killed += 1


@pytest.mark.parametrize("kind", [*KINDS, {"stages": 3, "ram": "1GiB"}], ids=str)
def test_as_in_one_process(want: list[Any], kind: dict[str, Any]) -> None:
    actors = FakeActors()
    assert list(batch_on(actors, None, REQUESTS, n_parallel=4, temp=0.0, **kind)) == want
    assert len(actors.started) == kind.get("workers", kind.get("stages"))
    assert all(a.dead for a in actors.started)


def test_a_worker_that_dies_is_replaced(want: list[Any]) -> None:
    killer = Killer("BatchActor", "more", 6, 11)
    actors = FakeActors(before=killer)
    assert list(batch_on(actors, None, REQUESTS, n_parallel=4, temp=0.0, workers=2)) == want
    assert killer.killed == 2 and len(actors.started) == 4


def test_a_stage_that_dies_is_replaced(want: list[Any]) -> None:
    killer = Killer("StageActor", "decode", 12, 21)
    actors = FakeActors(before=killer)
    assert list(batch_on(actors, None, REQUESTS, n_parallel=4, temp=0.0, stages=2)) == want
    assert killer.killed == 2 and len(actors.started) == 4


def test_one_that_dies_while_it_loads(want: list[Any]) -> None:
    actors = FakeActors(before=Killer("BatchActor", "load", 2))
    assert list(batch_on(actors, None, REQUESTS, n_parallel=4, temp=0.0, workers=2)) == want
    actors = FakeActors(before=Killer("StageActor", "load", 1, 3))
    assert list(batch_on(actors, None, REQUESTS, n_parallel=4, temp=0.0, stages=2)) == want
    with pytest.raises(ModelError, match="3 processes died loading stage 2"):
        list(batch_on(FakeActors(before=Killer("StageActor", "load", 2, 3, 4)), None, REQUESTS, stages=2))


def test_the_others_go_on_where_a_node_is_gone(want: list[Any]) -> None:
    killer = Killer("BatchActor", "more", 6)
    actors = FakeActors()

    def before(actor: FakeActor, method: str) -> None:
        killer(actor, method)
        if actor.dead:
            actors.alive = [n for n in actors.alive if n.id != actor.seat.node]

    actors.before = before
    assert list(batch_on(actors, None, REQUESTS, n_parallel=4, temp=0.0)) == want
    assert len(actors.started) == 2


def test_what_kills_every_worker() -> None:
    killer = Killer("BatchActor", "more", *range(1, 100))
    with pytest.raises(BatchError, match="3 workers died at request 1 or"):
        list(batch_on(FakeActors((1,), killer), None, REQUESTS, n_parallel=4))
    actors = FakeActors((1,), killer)

    def before(actor: FakeActor, method: str) -> None:
        actors.alive = [] if method == "more" else actors.alive
        killer(actor, method)

    actors.before = before
    with pytest.raises(BatchError, match="no worker is left"):
        list(batch_on(actors, None, REQUESTS, n_parallel=4))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_resumed(want: list[Any], kind: dict[str, Any], tmp_path: Path) -> None:
    requests, out = tmp_path / "i.jsonl", tmp_path / "o.jsonl"
    requests.write_text("".join(json.dumps(r) + "\n" for r in REQUESTS))
    with RequestFile(requests, out) as file:
        results = file.run(lambda todo: batch_on(FakeActors(), None, todo, n_parallel=4, temp=0.0, **kind))
        for _ in range(7):
            next(results)
        results.close()
    out.write_bytes(out.read_bytes()[:-9])
    with RequestFile(requests, out) as file:
        assert file.n_done == 6
        list(file.run(lambda todo: batch_on(FakeActors(), None, todo, n_parallel=4, temp=0.0, **kind)))
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [{k: v for k, v in r.items() if k != "of"} for r in found] == want


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_metadata_and_contexts_are_those_of_one_process(want: list[Any], kind: dict[str, Any]) -> None:
    """What replaces metadata, and how contexts are made, is the same for all: else the record of a result would lie."""
    over: dict[str, Any] = {"llama.rope.freq_base": 50.0}
    context: ContextOptions = {"type_k": gg.F32, "n_batch": 8, "n_ubatch": 4}
    model = load_model(kv_overrides=over, precision="fast")
    alone = list(gg.batch(model, REQUESTS, temp=0.0, n_threads=1, context=context))
    assert alone != want
    options: dict[str, Any] = {"n_parallel": 4, "temp": 0.0, "context": context, "kv_overrides": over}
    options["precision"] = "fast"
    assert list(batch_on(FakeActors(), None, REQUESTS, **options, **kind)) == alone


def edited(ctx: Decoder) -> list[Any]:
    """Logits and the places of all tokens, after operations on sequences of each kind."""
    found: list[Any] = []
    memory = ctx.memory

    def step(*tokens: tuple[int, int]) -> None:
        batch = Batch()
        for token, seq in tokens:
            batch.add(token, memory.seq_pos_max(seq) + 1, seq, True)
        ctx.decode(batch)
        found.extend([ctx.logits.tolist(), ctx.outputs.tolist(), memory.cells, memory.used])

    with ctx:
        ctx.decode([5, 6, 7, 8, 9, 10])
        found.append(ctx.logits.tolist())
        memory.seq_cp(0, 1, 0, 4)
        found.append(memory.seq_rm(0, 5))
        step((11, 0), (12, 1))
        memory.seq_rm(0, 1, 3)
        memory.seq_add(0, 3, -1, -2)
        step((13, 0), (14, 1))
        memory.seq_div(1, 0, -1, 2)
        step((15, 0))
        with pytest.raises(KVCacheFull):
            ctx.decode([1] * (ctx.n_ctx - memory.used + 1))
        with pytest.raises(BatchError):
            ctx.decode([1 << 30])
        ctx.decode([1] * (ctx.n_ctx - memory.used))  # holes are closed for it
        memory.seq_keep(1)
        step((16, 1))
        memory.clear()
        step((17, 2))
    return found


def test_a_decoder_of_stages_is_one_like_any_other() -> None:
    source, model = ModelRef(str(default_model_path())), load_model()
    options: ContextOptions = {"n_seq_max": 3, "n_batch": 64, "n_ubatch": 4}
    chain = chain_of(FakeActors(), source, 2, 1)
    staged = edited(chain.context(64, options))
    chain.close()
    assert staged == edited(model.new_context(64, n_threads=1, **options))


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="none"):
        list(batch_on(FakeActors(), tmp_path / "none.gguf", REQUESTS))
    with pytest.raises((GGUFError, OSError), match="none"):
        list(batch_on(FakeActors(), tmp_path / "none.gguf", REQUESTS, stages=2))
    for bad in ({"stages": 99}, {"stages": 0}, {"workers": 0}, {"workers": 1, "stages": 1}):
        with pytest.raises(ModelError):
            list(batch_on(FakeActors(), None, REQUESTS, **bad))
    with pytest.raises(BatchError, match="requests"):
        list(batch_on(FakeActors(), None, 5))  # pyright: ignore[reportArgumentType]
    with pytest.raises(BatchError, match="n_parallel"):
        list(batch_on(FakeActors(), None, REQUESTS, n_parallel=0))
    for kind in KINDS:
        with pytest.raises(GGMLError, match="temp"):
            list(batch_on(FakeActors(), None, REQUESTS, temp=-1, **kind))
        assert list(batch_on(FakeActors(), None, [], **kind)) == []
    with pytest.raises(GGMLError, match="different models"):
        check_alike([About("1", "llama", 5, 1), About("1", "llama", 6, 2)])


def test_seats() -> None:
    nodes = [Node("a", 8, 800), Node("b", 3, 300), Node("none", 0, 0)]
    assert take_seats(nodes, None) == [Seat("a", 8, 8, 800), Seat("b", 3, 3, 300)]
    assert [(s.node, s.n_threads) for s in take_seats(nodes, 5)] == [("a", 2)] * 4 + [("b", 3)]
    crowd = take_seats([Node("a", 2, 600)], 3)
    assert [s.n_threads for s in crowd] == [1, 1, 1] and sum(s.share for s in crowd) <= 2
    with pytest.raises(ModelError, match="no CPUs"):
        take_seats(nodes[2:], None)


def test_layers_are_spread_by_threads_and_memory() -> None:
    def seats(*threads: int, memory: int = 1000) -> list[Seat]:
        return [Seat(str(i), n, n, memory) for i, n in enumerate(threads)]

    assert spread([10] * 12, 0, seats(1, 1, 1), False) == [(0, 4), (4, 8), (8, 12)]
    assert spread([10] * 12, 0, seats(1, 4, 1), False) == [(0, 2), (2, 10), (10, 12)]
    assert spread([10] * 12, 60, seats(1, 1), False) == [(0, 9), (9, 12)]
    assert spread([10] * 12, 0, seats(1, 9, memory=80), False) == [(0, 4), (4, 12)]
    with pytest.raises(ModelError, match="cannot hold 120"):
        spread([10] * 12, 0, seats(1, 1, memory=50), False)
    assert spread([10] * 12, 0, seats(1, 1, memory=50), True) == [(0, 6), (6, 12)]
    with pytest.raises(ModelError, match="13 stages of a model of 12 layers"):
        spread([10] * 12, 0, seats(*[1] * 13), False)


class Echo:
    """A worker that dies in front of some requests, the first time."""

    def __init__(self, dies: Counter[int]) -> None:
        self.dies, self.chunks = dies, []

    def answers(self, requests: Any) -> Any:
        self.chunks.append(list(requests))
        for i, r in enumerate(requests):
            if self.dies[r]:
                self.dies[r] -= 1
                raise WorkerDied(f"at {r}")
            yield {"index": i, "text": r}

    def replace(self) -> bool:
        return True

    def close(self) -> None:
        pass


def test_the_pool() -> None:
    n = 200
    dies = Counter({0: 1, 7: 2, 199: 2, 100: 1})
    workers = [Echo(dies) for _ in range(3)]
    assert list(Pool(workers, 4).run(range(n))) == [{"index": i, "text": i} for i in range(n)]
    assert max(len(c) for w in workers for c in w.chunks) <= 32
    with pytest.raises(BatchError, match="at request 8 "):
        list(Pool([Echo(Counter({7: 3}))], 4).run(range(n)))
    results = Pool([Echo(Counter())], 4).run(range(n))
    assert next(results)["index"] == 0
    results.close()
