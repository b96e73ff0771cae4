"""Tokens that are guessed, by a smaller model or by looking the text up in itself, beside other texts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import pyggml as gg
from pyggml.llm.model import default_model_path
from pyggml.serve import ServeOptions, create_app

from ..random_model import write_random
from ..tiny_model import write_gguf

ONE = {"n_threads": 1}
PROMPTS = ["Once upon a time", "The fox and the dog. The fox and the", "A king had", "Once upon a time there", "Who"]
WINDOW = {"attention.sliding_window": 16, "attention.key_length": 8, "attention.value_length": 8}


def ask(client: TestClient, prompt: Any, n: int = 24, **body: Any) -> Any:
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, **body}
    r = client.post("/completion", json=body)
    assert r.status_code == 200, r.text
    return r.json()


def answers(c: TestClient) -> list[str]:
    with ThreadPoolExecutor(5) as pool:
        return list(pool.map(lambda p: ask(c, p)["content"], PROMPTS * 2))


@pytest.fixture(scope="module")
def alone(tales: gg.Model) -> list[str]:
    with TestClient(create_app(tales, ServeOptions(n_parallel=1, n_ctx=256, cache_ram=0, context=ONE))) as c:
        return [ask(c, p)["content"] for p in PROMPTS * 2]


@pytest.mark.parametrize("n_parallel", [1, 3])
@pytest.mark.parametrize("by", ["model", "lookup"])
def test_the_texts_are_those_without_drafts(tales: gg.Model, alone: list[str], by: str, n_parallel: int) -> None:
    drafts: dict[str, Any] = {"model_draft": str(default_model_path())} if by == "model" else {"lookup": True}
    options = ServeOptions(n_parallel=n_parallel, n_ctx=256 * n_parallel, context=ONE, draft_max=5, **drafts)
    with TestClient(create_app(tales, options)) as c:
        assert answers(c) == alone
        got = ask(c, PROMPTS[1])
        assert got["timings"]["draft_n"] >= got["timings"]["draft_n_accepted"] >= 0
        if by == "model":  # it guesses as the model does
            assert got["timings"]["draft_n_accepted"] > 10
        assert c.get("/slots").json()[0]["speculative"] is True
        assert [ask(c, PROMPTS[0], n)["tokens_predicted"] for n in (0, 1, 2, 3)] == [0, 1, 2, 3]
        full = ask(c, PROMPTS[0], -1)
        assert full["tokens_predicted"] + full["tokens_evaluated"] in (256, 257)
        assert answers(c) == alone


def test_a_slot_that_is_full_goes_on(tales: gg.Model) -> None:
    plain = ServeOptions(n_parallel=1, n_ctx=64, context=ONE, context_shift=True)
    with TestClient(create_app(tales, plain)) as c:
        want = ask(c, PROMPTS[0], 150)
    drafts = ServeOptions(
        n_parallel=1, n_ctx=64, context=ONE, context_shift=True, model_draft=str(default_model_path())
    )
    with TestClient(create_app(tales, drafts)) as c:
        got = ask(c, PROMPTS[0], 150)
    assert got["tokens_predicted"] == 150 and got["truncated"] and got["content"][:60] == want["content"][:60]


def test_windows(tmp_path: Path) -> None:
    """One text at a time."""
    path = write_random(tmp_path / "m.gguf", "gemma3", WINDOW, tokens=[f"{i:02d}" for i in range(64)])
    model, prompt = gg.load_model(path), [5, 6, 7, 8] * 12
    with TestClient(create_app(model, ServeOptions(n_parallel=1, n_ctx=256, context=ONE))) as c:
        want = [ask(c, p, 60, return_tokens=True)["tokens"] for p in (prompt, prompt[2:])]
    options = ServeOptions(n_parallel=1, n_ctx=256, context=ONE, model_draft=str(path))
    with TestClient(create_app(model, options)) as c:
        assert [ask(c, p, 60, return_tokens=True)["tokens"] for p in (prompt, prompt[2:])] == want
    with pytest.raises(gg.ModelError, match="one text at a time"):
        create_app(model, ServeOptions(n_parallel=2, lookup=True))


def test_heads_of_the_file(tmp_path: Path) -> None:
    kv = {"block_count": 3, "nextn_predict_layers": 1}
    model = gg.load_model(write_random(tmp_path / "m.gguf", "glm4", kv, tokens=[f"{i:02d}" for i in range(64)]))
    prompts = [[5, 6, 7, 8] * 4, [5, 6, 7, 8, 5, 6, 9], [5, 6, 7, 8] * 5]
    with TestClient(create_app(model, ServeOptions(n_parallel=1, n_ctx=128, context=ONE))) as c:
        want = [ask(c, p, 30, return_tokens=True)["tokens"] for p in prompts]
    with TestClient(create_app(model, ServeOptions(n_parallel=1, n_ctx=128, context=ONE, mtp=True))) as c:
        got = [ask(c, p, 30, return_tokens=True) for p in prompts]
    assert [g["tokens"] for g in got] == want and all(g["timings"]["draft_n"] for g in got)
    assert got[2]["timings"]["cache_n"] > 4


def test_what_makes_no_sense(tales: gg.Model, tmp_path: Path) -> None:
    other = str(write_gguf(tmp_path / "other.gguf"))
    with pytest.raises(gg.ModelError, match="tokens"):
        create_app(tales, ServeOptions(model_draft=other))
    with pytest.raises(gg.ModelError, match="only one"):
        ServeOptions(model_draft=other, lookup=True)
    with pytest.raises(gg.ModelError, match="no heads"):
        create_app(tales, ServeOptions(mtp=True, n_parallel=1))
    with pytest.raises(gg.ModelError, match="n_parallel"):
        ServeOptions(mtp=True)
