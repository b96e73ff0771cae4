"""Lines of OpenAI's batch files, and chats with tools, answered by `gg.batch` and `pyggml batch`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pyggml.tools.cli import main

import pyggml as gg
from pyggml.llm.model import Model, load_model
from pyggml.llm.openai.batch_lines import ENDPOINTS, why_not

from ...tiny_model import write_gguf

CHAT = [{"role": "user", "content": "hi"}]
TOOL = {"name": "w", "parameters": {"type": "object", "properties": {"c": {"const": "x"}}, "required": ["c"]}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kv = {"llama.context_length": 1024}
    return write_gguf(tmp_path_factory.mktemp("lines") / "m.gguf", kv=kv)


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return load_model(path)


def line(name: str, **body: Any) -> dict[str, Any]:
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def test_lines(model: Model) -> None:
    greedy: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0}
    requests = [
        line("a", messages=CHAT, model="m", **greedy),
        "plain",
        line("b", prompt="ab", logprobs=1, echo=True, **greedy),
        line("b", prompt="again"),
        line("c", prompt="x", stream=True),
        {**line("d", prompt="x"), "url": "/v1/other"},
        line("e", prompt="x", n=2),
        line("f", prompt="x" * 2000),
        {"custom_id": "g", "body": {"prompt": "no url", **greedy}},
    ]
    found = list(gg.batch(model, requests, 3, n_threads=1))
    assert [r["index"] for r in found] == list(range(9)) and found[1]["text"] and "custom_id" not in found[1]
    chat: Any = model.create_chat_completion(CHAT, n_threads=1, **greedy)
    text: Any = model.create_completion("ab", logprobs=1, echo=True, n_threads=1, **greedy)
    for result, want in ((found[0], chat), (found[2], text)):
        body = result["response"]["body"]
        assert body["choices"] == want["choices"] and body["usage"] == want["usage"] and result["error"] is None
    assert found[0]["response"]["body"]["model"] == "m" and found[8]["response"]["body"]["choices"]
    for i, why in {3: "no other line", 4: "no stream", 5: "POST", 6: "one answer", 7: "was trained for"}.items():
        assert why in found[i]["error"] and found[i]["custom_id"], found[i]


def test_tools_in_a_line(model: Model) -> None:
    tools = [{"type": "function", "function": TOOL}]
    request = {"id": 7, "messages": CHAT, "tools": tools, "tool_choice": "required", "max_tokens": 200, "seed": 1}
    (result,) = gg.batch(model, [request], n_threads=1)
    call = result["tool_calls"][0]["function"]
    assert call["name"] == "w" and json.loads(call["arguments"]) == {"c": "x"} and result["id"] == 7
    assert result["finish_reason"] == "tool_calls"


def test_the_command_reads_its_standard_input(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(line("a", prompt="ab", max_tokens=2)), "", json.dumps({"prompt": "c", "max_tokens": 2}), "{"]
    out = tmp_path / "out.jsonl"
    for had in (0, 3):  # the second time nothing is left to do

        class Stdin(io.StringIO):
            buffer = io.BytesIO("\n".join(lines).encode())

        monkeypatch.setattr(sys, "stdin", Stdin())
        with pytest.raises(SystemExit) as e:
            main(["batch", "-m", str(path), "-i", "-", "-o", str(out), "-t", "1", "--json"])
        assert e.value.code == 0
        about = json.loads(capsys.readouterr().out)
        assert about["requests"] == 3 and about["resumed_at"] == had and about["errors"] == 1
    results = [json.loads(text) for text in out.read_text().splitlines()]
    assert [r["index"] for r in results] == [0, 1, 2] and results[0]["response"]["status_code"] == 200


def test_names_that_answers_cannot_have() -> None:
    """An answer has ? in the place of a lone surrogate: the name of another line."""
    seen = {"a"}
    for name, is_one in (("a", False), ("\ud800", False), ("\U0001f600", True), ("?", True)):
        why = why_not({"custom_id": name, "url": "/v1/completions", "body": {}}, ENDPOINTS, seen)
        assert why == "" if is_one else "no other line" in why, name
