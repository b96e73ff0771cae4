"""What is kept of texts: slots, snapshots under --cache-ram, adapters of requests, and a slot that is full."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import pyggml as gg
from pyggml.errors import ModelError
from pyggml.llm.generate.snapshots import Snapshots
from pyggml.serve import ServeOptions, create_app
from pyggml.serve.budget import kv_bytes, ram_of_weights, weights_bytes

from ..llm.adapters.make import halves, write_lora
from ..random_model import random_weights, write_random

ONE = {"n_threads": 1}
WINDOW = {"attention.sliding_window": 16, "attention.key_length": 8, "attention.value_length": 8}
STATES = {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.time_step_rank": 4}
HYBRID = {**STATES, "attention.head_count_kv": [0, 2, 0, 2]}


def ask(client: TestClient, prompt: Any, n: int = 6, **body: Any) -> Any:
    r = client.post(
        "/completion", json={"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, **body}
    )
    assert r.status_code == 200, r.text
    return r.json()


def cached(client: TestClient, prompt: Any, n: int = 6, **body: Any) -> int:
    return ask(client, prompt, n, **body)["timings"]["cache_n"]


def snapshots(client: TestClient) -> Snapshots:
    found = client.app.state.service.thread.engine._snapshots  # pyright: ignore
    assert isinstance(found, Snapshots)
    return found


def prompts(n: int, length: int = 40) -> list[list[int]]:
    """Prompts of a vocabulary with 64 tokens, none of which begin alike."""
    rng = random.Random(1)
    return [[i + 3, *(rng.randrange(3, 60) for _ in range(length - 1))] for i in range(n)]


def test_slots_are_chosen_by_what_they_hold(tales: gg.Model) -> None:
    """The slot that nobody has needed for longest is taken, not one with a text that is needed again."""
    with TestClient(create_app(tales, ServeOptions(n_ctx=512, n_parallel=2, cache_ram=0, context=ONE))) as c:
        a, b, other = prompts(3)
        assert [ask(c, p)["id_slot"] for p in (a, b, a)] == [0, 1, 0]
        assert ask(c, other)["id_slot"] == 1 and cached(c, a) == 39  # b was the oldest
        assert ask(c, other, id_slot=0)["id_slot"] == 0 and ask(c, a, id_slot=1)["id_slot"] == 1
        assert c.post("/completion", json={"prompt": "a", "id_slot": 2}).status_code == 400


def test_texts_beyond_the_slots(tales: gg.Model) -> None:
    with TestClient(create_app(tales, ServeOptions(n_ctx=256, n_parallel=1, context=ONE))) as c:
        several = prompts(4)
        first = [ask(c, p)["content"] for p in several]
        again = [ask(c, p) for p in several]
        assert [a["content"] for a in again] == first and [a["timings"]["cache_n"] for a in again] == [39] * 4
        longer = [*several[0], 7, 8, 9]
        assert cached(c, longer) >= 40 and cached(c, several[1], cache_prompt=False) == 0
    with TestClient(create_app(tales, ServeOptions(n_ctx=256, n_parallel=1, cache_ram=0, context=ONE))) as c:
        assert [ask(c, p)["content"] for p in several] == first and cached(c, several[0]) == 0


def test_the_cache_stays_within_its_budget(tales: gg.Model) -> None:
    with TestClient(create_app(tales, ServeOptions(n_ctx=512, n_parallel=1, cache_ram=1, context=ONE))) as c:
        kept = snapshots(c)
        n_most = 0
        for p in prompts(30, 60):
            ask(c, p, 2)
            assert kept.nbytes <= 1 << 20
            n_most = max(n_most, len(kept.kept))
        assert 1 <= len(kept.kept) <= n_most < 29
        kept.n_bytes = 1000  # too small for any
        ask(c, prompts(1, 200)[0], 2)
        ask(c, prompts(2, 200)[1], 2)
        assert kept.nbytes <= 1 << 20


def test_what_saves_most_stays(tales: gg.Model) -> None:
    """A text that is asked for again and again outlives others that came later."""
    with TestClient(create_app(tales, ServeOptions(n_ctx=512, n_parallel=1, context=ONE))) as c:
        mine, *others = prompts(12, 60)
        ask(c, mine, 2)
        ask(c, others[0], 2)
        snapshots(c).n_bytes = int(3.5 * snapshots(c).nbytes)
        for p in others[1:]:
            ask(c, p, 2)
            assert cached(c, mine, 2) == 59


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_no_text_of_another_conversation(tales: gg.Model, n_parallel: int) -> None:
    """Conversations that begin alike, side by side and in turn: each gets the answers that it gets alone."""
    rng = random.Random(2)
    head = "You are a poet. "
    names = ["fox", "dog", "cat", "king", "queen", "owl"]
    talks = {x: [f"{head}Tell of a {x}. ", f"And where did the {x} go? ", "Then? "] for x in names}

    def talk(c: TestClient, x: str) -> list[str]:
        text, said = "", list[str]()
        for turn in talks[x]:
            said.append(ask(c, text + turn, 5)["content"])
            text += turn + said[-1] + " "
        return said

    with TestClient(create_app(tales, ServeOptions(n_parallel=1, cache_ram=0, context=ONE))) as c:
        alone = {x: talk(c, x) for x in names}
    with TestClient(create_app(tales, ServeOptions(n_parallel=n_parallel, cache_ram=8, context=ONE))) as c:
        for _ in range(2):
            order = rng.sample(names, len(names))
            with ThreadPoolExecutor(4) as pool:
                got = dict(zip(order, pool.map(lambda x: talk(c, x), order), strict=True))
            assert got == alone


@pytest.mark.parametrize("options", [{"cache_ram": 0}, {}, {"context_shift": True}])
def test_answers_do_not_depend_on_slots_and_caches(tales: gg.Model, options: dict[str, Any]) -> None:
    """Greedy and seeded ones, from 1, 4 and 16 clients in any order."""
    rng = random.Random(7)
    heads = prompts(3, 60)
    jobs = [(rng.choice(heads)[: rng.randrange(10, 60)] + heads[0][: rng.randrange(9)], i % 3) for i in range(12)]

    def answer(c: TestClient, i: int, **more: Any) -> list[int]:
        prompt, seed = jobs[i]
        body = {"temperature": 0.8 if seed else 0, "seed": seed, "return_tokens": True, **more}
        return ask(c, prompt, 3 + i, **body)["tokens"]

    with TestClient(create_app(tales, ServeOptions(n_ctx=100, n_parallel=1, context=ONE))) as c:
        alone = [answer(c, i, cache_prompt=False) for i in range(len(jobs))]
    with TestClient(create_app(tales, ServeOptions(n_ctx=400, n_parallel=4, context=ONE, **options))) as c:
        for n_clients in (1, 4, 16):
            order = rng.sample(range(len(jobs)), len(jobs))
            with ThreadPoolExecutor(n_clients) as pool:
                got = dict(zip(order, pool.map(lambda i: answer(c, i), order), strict=True))
            assert [got[i] for i in range(len(jobs))] == alone


@pytest.mark.parametrize(("arch", "kv"), [("gemma3", WINDOW), ("mamba", STATES), ("jamba", HYBRID)])
def test_windows_and_states_go_on(arch: str, kv: dict[str, Any], tmp_path: Path) -> None:
    """Another turn of a chat, and another answer to the same prompt, do not evaluate the whole prompt again."""
    weights = random_weights(arch, kv)
    weights |= {name: -np.abs(a) for name, a in weights.items() if name.endswith("ssm_a")}  # states that fade
    tokens = [f"{i:02d}" for i in range(64)]
    model = gg.load_model(write_random(tmp_path / "m.gguf", arch, kv, weights, tokens))
    a, b = prompts(2, 120)
    with TestClient(create_app(model, ServeOptions(n_ctx=256, n_parallel=1, context=ONE, cache_ram=0))) as c:
        alone = [ask(c, p, return_tokens=True)["tokens"] for p in (a, b)]
    with TestClient(create_app(model, ServeOptions(n_ctx=256, n_parallel=1, context=ONE))) as c:
        got = [ask(c, p, return_tokens=True) for p in (a, b, a, a, b)]
        assert [g["tokens"] for g in got] == [alone[i] for i in (0, 1, 0, 0, 1)]
        assert [g["timings"]["cache_n"] for g in got[2:]] == [104] * 3
        turn = [*b, *alone[1], 4, 5, 6]
        assert cached(c, turn) >= 120  # the slot itself goes on
        assert cached(c, [*a[:110], 9, 9]) == 104
    with TestClient(create_app(model, ServeOptions(n_ctx=256, n_parallel=1, context=ONE, ctx_checkpoints=0))) as c:
        assert ask(c, a, return_tokens=True)["tokens"] == alone[0] and cached(c, a) == 0


def test_adapters_of_a_request(tiny: Path, tmp_path: Path) -> None:
    model = gg.load_model(tiny)
    names = [n for n, t in model.weights.items() if t.rank > 1]
    for i in (1, 2):
        write_lora(tmp_path / f"{i}.gguf", halves(model, names, seed=i))
    model.adapt([(model.load_lora(tmp_path / f"{i}.gguf"), 1.0) for i in (1, 2)])
    sets = [None, [], [{"id": 0, "scale": 0.7}], [{"id": 1, "scale": 1.0}, {"id": 0, "scale": 0.3}]]

    def answer(c: TestClient, lora: Any, prompt: str = "Hello there, who is it that comes?") -> Any:
        got = ask(c, prompt, 5, lora=lora, n_probs=1)
        return [(p["id"], p["logprob"]) for p in got["completion_probabilities"]], got["timings"]["cache_n"]

    options = ServeOptions(n_parallel=1, n_ctx=128, cache_ram=0, context=ONE)
    with TestClient(create_app(model, options)) as c:
        alone = [answer(c, lora)[0] for lora in sets]
        assert all(alone[i] != alone[j] for i in range(4) for j in range(i)) and answer(c, sets[1])[1] == 0
    with TestClient(create_app(model, ServeOptions(n_parallel=3, n_ctx=384, context=ONE))) as c:
        with ThreadPoolExecutor(8) as pool:
            order = [*range(4)] * 4
            got = list(pool.map(lambda i: answer(c, sets[i]), order))
        assert [g[0] for g in got] == [alone[i] for i in order]
        assert all(answer(c, lora)[1] > 20 for lora in sets)  # each set has its own texts
        assert c.post("/lora-adapters", json=[{"id": 0, "scale": 0.7}]).json() == {"success": True}
        assert answer(c, None)[0] == alone[2]
        for bad in (
            [{"id": 2, "scale": 1.0}],
            [{"id": 0}],
            [3],
            [{"id": 0, "scale": 1e30}],
            [{"id": 0, "scale": 1.0}] * 2,
        ):
            assert c.post("/completion", json={"prompt": "a", "lora": bad}).status_code == 400, bad


def test_a_saved_slot_is_restored_for_its_own_adapters_alone(tiny: Path, tmp_path: Path) -> None:
    """What was evaluated with the adapters of a request is not taken for a text without them."""
    model = gg.load_model(tiny)
    write_lora(tmp_path / "a.gguf", halves(model, [n for n, t in model.weights.items() if t.rank > 1], seed=1))
    model.adapt([(model.load_lora(tmp_path / "a.gguf"), 1.0)])
    options = ServeOptions(n_parallel=1, n_ctx=128, cache_ram=0, context=ONE, slot_save_path=str(tmp_path))
    with TestClient(create_app(model, options)) as c:

        def act(action: str, name: str) -> int:
            return c.post(f"/slots/0?action={action}", json={"filename": name}).status_code

        prompt, plain = "Hello there, who is it that comes?", [{"id": 0, "scale": 0.0}]
        alone = ask(c, prompt, return_tokens=True)["tokens"]
        assert act("save", "own") == 200
        assert ask(c, prompt, lora=plain, return_tokens=True)["tokens"] != alone
        assert act("save", "other") == 200
        assert act("restore", "own") == 200 and cached(c, prompt) > 20
        assert act("restore", "other") == 400
        assert ask(c, prompt, return_tokens=True)["tokens"] == alone
        assert c.post("/lora-adapters", json=plain).status_code == 200
        assert act("restore", "own") == 400 and act("restore", "other") == 200 and cached(c, prompt) > 20
    write_lora(tmp_path / "a.gguf", halves(model, [n for n, t in model.weights.items() if t.rank > 1], seed=2))
    model.adapt([(model.load_lora(tmp_path / "a.gguf"), 1.0)])
    with TestClient(create_app(model, options)) as c:  # another adapter in a file of the same name
        assert c.post("/slots/0?action=restore", json={"filename": "own"}).status_code == 400
        assert c.post("/lora-adapters", json=plain).status_code == 200
        assert c.post("/slots/0?action=restore", json={"filename": "other"}).status_code == 200


def test_context_shift(tales: gg.Model) -> None:
    """A slot that is full goes on, also beside others with which it began."""
    with TestClient(create_app(tales, ServeOptions(n_ctx=128, n_parallel=2, context=ONE, context_shift=True))) as c:
        prompt = prompts(1, 30)[0]
        short = ask(c, prompt, 20)
        assert short["truncated"] is False
        alone = ask(c, prompt, 150, return_tokens=True)
        assert alone["tokens_predicted"] == 150 and alone["truncated"] is True and alone["tokens_cached"] < 64
        assert cached(c, prompt, 20, id_slot=1) <= 29
        assert ask(c, prompt, 20)["content"] == short["content"]  # what was shifted is not taken for the prompt
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda n: ask(c, prompt, n, return_tokens=True)["tokens"], [150, 20, 150, 40]))
        assert got[0] == got[2] == alone["tokens"] and got[3] == alone["tokens"][:40] and got[1] == got[3][:20]
        kept = ask(c, prompt, 150, n_keep=-1, return_tokens=True)["tokens"]
        assert kept[:34] == alone["tokens"][:34] and len(kept) == 150
    with TestClient(create_app(tales, ServeOptions(n_ctx=128, n_parallel=2, context=ONE))) as c:
        assert ask(c, prompt, 150)["tokens_predicted"] == 35


def test_options() -> None:
    for bad in ({"cache_ram": -1}, {"ctx_checkpoints": -1}, {"n_keep": -2}):
        with pytest.raises(gg.ModelError):
            ServeOptions(**bad)  # pyright: ignore[reportArgumentType]


def test_one_budget_for_weights_slots_and_texts() -> None:
    """All that is accounted for stays within `ram`, whatever is asked. Texts that are kept give way first, then weights
    are streamed, and answers stay the same."""
    texts = prompts(4, 60)
    answers: list[list[str]] = []
    with gg.load_model(vocab_only=True) as known:
        options = ServeOptions(n_ctx=512, n_parallel=2, context=ONE, cache_ram=1, metrics=True)
        kv = kv_bytes(known, options)
    whole = 8 << 20  # all weights, repacked, and what reading them needs
    for ram in (kv + whole + (4 << 20), kv + whole + 200_000, kv + (6 << 20)):
        budgeted = replace(options, ram=ram)
        with gg.load_model(vocab_only=True) as known:
            weights = ram_of_weights(known, budgeted)
        with gg.load_model(ram=weights) as model, TestClient(create_app(model, budgeted)) as c:
            assert c.app.state.service.thread.ctx.memory.nbytes == kv  # pyright: ignore
            room = snapshots(c).n_bytes
            answers.append([])
            for text in texts:
                answers[-1].append(ask(c, text, 2)["content"])
                assert weights_bytes(model) + kv + snapshots(c).nbytes <= ram
            rows = re.findall(r"^llamacpp:(\S+) (\S+)$", c.get("/metrics").text, re.MULTILINE)
            seen = {name: float(value) for name, value in rows}
            assert seen["memory_weights_bytes"] == weights_bytes(model) and seen["memory_kv_bytes"] == kv
            assert seen["memory_cache_bytes"] == snapshots(c).nbytes
            if ram > kv + whole:
                assert room == min(1 << 20, ram - kv - weights_bytes(model)) and model.weight_stream.streamed == 0
                assert snapshots(c).nbytes > 0
            else:
                assert snapshots(c).nbytes == 0 and model.weight_stream.streamed > 0
    assert answers[0] == answers[1] == answers[2]
    with (
        gg.load_model(vocab_only=True) as known,
        pytest.raises(ModelError, match="leave nothing for weights: K and V of 2"),
    ):
        ram_of_weights(known, replace(options, ram=kv))
