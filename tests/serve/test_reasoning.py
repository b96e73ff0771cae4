"""Where reasoning goes, and how long it may be. A grammar makes the model write as a reasoning model would."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import pyggml as gg
from pyggml.errors import ModelError
from pyggml.llm.openai.budget import ReasoningBudget
from pyggml.serve import ServeOptions, create_app

from .conftest import events

HI = [{"role": "user", "content": "Tell me of a fox."}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if enable_thinking else '' }}"
SAID = 'root ::= "<think>why</think> so"'


@pytest.fixture(scope="module")
def client(tales: gg.Model) -> Iterator[TestClient]:
    options = ServeOptions(n_parallel=1, chat_template=TEMPLATE, context={"n_threads": 1})
    with TestClient(create_app(tales, options)) as c:
        yield c


def message(client: TestClient, **body: Any) -> Any:
    body = {"messages": HI, "max_tokens": 40, "temperature": 0, **body}
    r = client.post("/v1/chat/completions", json=body)
    assert r.status_code == 200, r.text
    if not body.get("stream"):
        return r.json()["choices"][0]["message"]
    whole = {"role": "assistant"}
    for e in events(r.text)[1:-1]:
        for name, text in json.loads(e)["choices"][0]["delta"].items():
            whole[name] = whole.get(name, "") + text
    return whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("form", "content", "reasoning"),
    [
        ("auto", " so", "why"),
        ("deepseek", " so", "why"),
        ("none", "<think>why</think> so", None),
        ("deepseek-legacy", "<think>why</think> so", "why"),
    ],
)
def test_formats(client: TestClient, form: str, content: str, reasoning: str | None, stream: bool) -> None:
    got = message(client, reasoning_format=form, grammar=SAID, stream=stream)
    assert got["content"] == content and got.get("reasoning_content") == reasoning


def test_reasoning_that_the_prompt_begins(client: TestClient) -> None:
    begun = {"grammar": 'root ::= "why</think> so"', "chat_template_kwargs": {"enable_thinking": True}}
    assert message(client, reasoning_format="none", **begun)["content"] == "why</think> so"
    legacy = message(client, reasoning_format="deepseek-legacy", **begun)
    assert (legacy["content"], legacy["reasoning_content"]) == ("<think>why</think> so", "why")


def test_budget(client: TestClient, tales: gg.Model) -> None:
    begun = {"chat_template_kwargs": {"enable_thinking": True}, "ignore_eos": True}
    free = message(client, **begun)
    assert "content" not in free or not free["content"]  # the model ends no reasoning by itself
    for n in (1, 5):
        got = message(client, thinking_budget_tokens=n, **begun)
        assert 0 < len(tales.tokenize(got["reasoning_content"], False)) <= n + 1
        assert got["content"] and free["reasoning_content"].startswith(got["reasoning_content"])
        assert message(client, thinking_budget_tokens=n, stream=True, **begun) == got
    none = message(client, thinking_budget_tokens=0, **begun)
    assert none["content"] and "reasoning_content" not in none
    assert "reasoning_content" not in message(client, thinking_budget_tokens=0)  # chats ask the template for none
    assert message(client, thinking_budget_tokens=3) == message(client)  # a reply that does not reason
    body = {"messages": HI, "max_tokens": 40, "ignore_eos": True, "thinking": {"type": "enabled", "budget_tokens": 4}}
    blocks = client.post("/v1/messages", json=body).json()["content"]
    assert [b["type"] for b in blocks] == ["thinking", "text"]


def test_reasoning_is_ended_on_demand(client: TestClient) -> None:
    """While it is written, by the answer's id."""
    begun: Any = {"chat_template_kwargs": {"enable_thinking": True}, "ignore_eos": True, "max_tokens": 400}
    running, path = client.app.state.service.reasoning, "/v1/chat/completions/control"  # pyright: ignore
    free = message(client, **begun)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(message, client, reasoning_control=True, **begun)
        while not running:
            time.sleep(1e-3)
        (id,) = running
        r = client.post(path, json={"id": id, "action": "reasoning_end"})
        assert r.status_code == 200 and r.json() == {"success": True}
        got = answer.result()
    assert got["content"] and free["reasoning_content"].startswith(got.get("reasoning_content", ""))
    assert message(client, reasoning_control=True, **begun) == free and not running  # and nobody asks
    for other in (id, "chatcmpl-other"):
        r = client.post(path, json={"id": other, "action": "reasoning_end"})
        assert r.status_code == 200 and not r.json()["success"] and "under way" in r.json()["message"]
    for bad, says in (({"action": "reasoning_end"}, "missing"), ({"id": id, "action": "stop"}, "unknown"), ({}, "id")):
        r = client.post(path, json=bad)
        assert r.status_code == 400 and says in r.json()["error"]["message"]


def test_options_of_the_server(tales: gg.Model) -> None:
    options = ServeOptions(
        n_parallel=1,
        chat_template=TEMPLATE,
        chat_template_kwargs='{"enable_thinking": true}',
        reasoning_budget=4,
        reasoning_budget_message=" Enough.",
    )
    with TestClient(create_app(tales, options)) as c:
        got = message(c, ignore_eos=True)
    assert got["reasoning_content"].endswith(" Enough.") and got["content"]
    for bad in ({"reasoning_format": "loud"}, {"reasoning_budget": -2}):
        with pytest.raises(ModelError):
            ServeOptions(**bad)  # pyright: ignore[reportArgumentType]


def test_a_budget_counts_what_the_model_begins_itself(tales: gg.Model) -> None:
    vocab = tales.vocab
    end = vocab.tokenize("</think>", False, True, continued=True)
    logits = np.zeros(tales.hparams.n_vocab, np.float32)

    def forced(said: str, n: int) -> list[int]:
        """The tokens that a reply, which begins with `said`, must go on with."""
        ids = [1, 1, *vocab.tokenize(said, False, True, continued=True)]
        budget, found = ReasoningBudget(vocab, 2, n, "<think>", "</think>", end), []
        for i in range(2, len(ids)):
            assert budget(np.array(ids[:i]), logits) is logits
        while np.isneginf(only := budget(np.array(ids), logits)).any():
            found.append(int(only.argmax()))
            ids.append(found[-1])
        return found

    assert forced("<think>", 0) == end
    assert forced("<think>a</think> so long a text", 20) == forced("a <think> b", 0) == forced("<think>a", 20) == []


def test_a_message_is_tokenized_once(tales: gg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """2048 answers with a message of 16 MB would have taken an hour, and more memory than there is."""
    texts, tokenize = list[str](), type(tales.vocab).tokenize

    def noted(self: Any, text: Any, *args: Any, **options: Any) -> list[int]:
        texts.append(text)
        return tokenize(self, text, *args, **options)

    monkeypatch.setattr(type(tales.vocab), "tokenize", noted)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "n": 5, "thinking_budget_tokens": 3}
    with TestClient(create_app(tales, ServeOptions(n_ctx=2048, context={"n_threads": 1}))) as client:
        r = client.post("/v1/chat/completions", json={**body, "reasoning_budget_message": "Enough."})
    assert r.status_code == 200 and sum(text == "Enough.</think>" for text in texts) == 1, r.text
