"""`create_completion` and `create_chat_completion`: OpenAI's shapes, tools, JSON, parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.errors import ModelError, SamplerError
from pyggml.llm.model import Model, load_model
from pyggml.llm.openai.formats import (
    COMMAND_R7B,
    DEEPSEEK,
    FUNCTIONARY,
    HARMONY,
    HERMES,
    LLAMA3,
    MISTRAL,
    PLAIN,
    Format,
)

from ...tiny_model import write_gguf

CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
BODY = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + CALLS + "\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}a:{% endif %}{% if enable_thinking %}<think>\n{% endif %}"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Genf"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    },
}
USER = [{"role": "user", "content": "hi"}]


def model_with(path: Path, sign: str) -> Model:
    template = "{% if tools %}{{ tools | tojson }}" + sign + "{% endif %}" + BODY + PROMPT
    return load_model(
        write_gguf(path / "tiny.gguf", kv={"tokenizer.chat_template": template, "llama.context_length": 1024})
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_with(tmp_path_factory.mktemp("chat"), "<tool_call>")


def joined(chunks: Any) -> dict[str, Any]:
    """What the parts of a chat say together."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    out: dict[str, Any] = {"message": message, "logprobs": []}
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk" and chunk["id"].startswith("chatcmpl-")
        choice = chunk["choices"][0]
        for call in choice["delta"].pop("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        for key, value in choice["delta"].items():
            message[key] = message.get(key, "") + value if isinstance(value, str) else message[key] + value
        out["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        out["finish_reason"] = choice["finish_reason"]
    return out


def test_completion(model: Model) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "n_threads": 1, "logit_bias": {"2": -100}}
    answer: Any = model.create_completion("ab", logprobs=2, echo=True, **options)
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == model.path
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}
    choice = answer["choices"][0]
    assert choice["text"].startswith("ab") and choice["finish_reason"] == "length" and choice["index"] == 0
    shown = choice["logprobs"]
    assert len(shown["tokens"]) == len(shown["token_logprobs"]) == len(shown["text_offset"]) == 12 + 5
    assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None  # as OpenAI's API has it
    assert all(len(t) <= 3 and max(t.values()) <= 0 for t in shown["top_logprobs"][1:])
    parts: Any = list(model.create_completion("ab", stream=True, echo=True, **options))
    assert "".join(p["choices"][0]["text"] for p in parts) == choice["text"]
    streamed: Any = list(model.create_completion("ab", stream=True, echo=True, logprobs=2, **options))
    entries = [p["choices"][0]["logprobs"] for p in streamed]
    assert [t for entry in entries if entry is not None for t in entry["tokens"]] == shown["tokens"]
    silent: Any = model.create_completion("ab", logprobs=2, **options)
    assert {k: v[5:] for k, v in shown.items()} == silent["choices"][0]["logprobs"]
    assert shown["text_offset"][5] == 2
    assert [p["choices"][0]["finish_reason"] for p in parts][-1] == "length" and "usage" not in parts[0]
    assert model.create_completion("ab", **options)["choices"][0]["logprobs"] is None  # pyright: ignore[reportCallIssue, reportArgumentType, reportIndexIssue, reportGeneralTypeIssues]


def test_logprobs_of_a_prompt_that_is_echoed(model: Model) -> None:
    options: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "n_threads": 1, "logprobs": 1, "echo": True}
    text = "The quick brown fox jumps over the lazy dog, and over the fence behind which it sleeps."
    answer: Any = model.create_completion(text, **options)
    shown, ids = answer["choices"][0]["logprobs"], model.tokenize(text)
    assert len(ids) > 64  # more than are evaluated at once
    with model.new_context(len(ids), n_threads=1) as ctx:
        for i in range(1, len(ids) - 1):
            ctx.decode(ids[: i + 1] if i == 1 else ids[i : i + 1])
            logits = ctx.logits[-1].astype(np.float64)
            want = logits[ids[i + 1]] - np.log(np.exp(logits).sum())
            assert abs(shown["token_logprobs"][i] - want) < 1e-4
            assert abs(max(shown["top_logprobs"][i].values()) - logits.max() + np.log(np.exp(logits).sum())) < 1e-4


def test_offsets_of_a_prompt_that_is_echoed() -> None:
    model, text = load_model(), "Once upon a time there was a little girl."
    answer: Any = model.create_completion(text, max_tokens=1, logprobs=0, echo=True, n_threads=1)
    shown, n = answer["choices"][0]["logprobs"], len(model.tokenize(text)) - 1
    places = list(zip(shown["text_offset"], shown["tokens"], strict=True))
    assert all(text[at:].startswith(t if at else t.lstrip()) for at, t in places[:n]) and places[n][0] == len(text)


def test_names_of_newer_clients(model: Model) -> None:
    chat: Any = model.create_chat_completion(USER, n=1, max_completion_tokens=3, max_tokens=9, temperature=0.0)
    assert chat["usage"]["completion_tokens"] == 3


def test_several_answers(model: Model) -> None:
    options: dict[str, Any] = {"max_tokens": 4, "seed": 3, "temperature": 1.5, "n_threads": 1}
    alone: Any = [model.create_completion("ab", **{**options, "seed": 3 + i}) for i in range(2)]
    both: Any = model.create_completion("ab", n=2, **options)
    assert [c["text"] for c in both["choices"]] == [a["choices"][0]["text"] for a in alone]
    assert [c["index"] for c in both["choices"]] == [0, 1] and both["usage"]["prompt_tokens"] == 6
    listed: Any = model.create_completion(["ab", "c"], n=1, **options)
    assert listed["choices"][0] == both["choices"][0] and len(listed["choices"]) == 2
    ids: Any = model.create_completion([[1, 5], [1, 6]], **options)
    assert len(ids["choices"]) == 2
    best: Any = model.create_completion("ab", best_of=4, logprobs=0, **options)
    shown = [model.create_completion("ab", logprobs=0, **{**options, "seed": 3 + i}) for i in range(4)]
    means = [np.mean(s["choices"][0]["logprobs"]["token_logprobs"]) for s in shown]  # pyright: ignore[reportIndexIssue, reportCallIssue, reportArgumentType]
    assert best["choices"][0]["text"] == shown[int(np.argmax(means))]["choices"][0]["text"]  # pyright: ignore[reportIndexIssue, reportCallIssue, reportArgumentType]
    usage = {"include_usage": True}
    *parts, last = list(model.create_completion("ab", n=2, stream=True, stream_options=usage, **options))
    assert last["choices"] == [] and last["usage"] == both["usage"]  # pyright: ignore[reportArgumentType, reportCallIssue]
    texts = ["".join(p["choices"][0]["text"] for p in parts if p["choices"][0]["index"] == i) for i in range(2)]  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert texts == [c["text"] for c in both["choices"]]
    chat: Any = model.create_chat_completion(USER, n=2, **options)
    streamed: Any = list(model.create_chat_completion(USER, n=2, stream=True, stream_options=usage, **options))
    assert len(chat["choices"]) == 2 and streamed[-1]["usage"] == chat["usage"]
    for bad in ({"n": 0}, {"n": 2, "best_of": 1}, {"best_of": 2, "stream": True}, {"n": 2, "cfg_scale": 2.0}):
        with pytest.raises(SamplerError):
            model.create_completion("ab", **bad)


def test_stop_grammar_and_functions(model: Model) -> None:
    grammar = 'root ::= "one two three"'
    answer: Any = model.create_completion("x", max_tokens=None, grammar=grammar, stop=" t", n_threads=1)
    assert answer["choices"][0]["text"] == "one" and answer["choices"][0]["finish_reason"] == "stop"

    def only_z(ids: Any, logits: Any) -> Any:
        logits[:] = -1e9
        logits[ord("z") + 3] = len(ids)
        return logits

    answer = model.create_completion(
        "x", max_tokens=20, logits_processor=only_z, stopping_criteria=[lambda ids, _: len(ids) == 10]
    )
    assert answer["choices"][0]["text"] == "zzzzz" and answer["choices"][0]["finish_reason"] == "stop"
    short: dict[str, Any] = {"logits_processor": lambda ids, x: x[:3]}  # pyright: ignore[reportUnknownLambdaType]
    for bad in ({"logits_processor": 3}, {"stopping_criteria": "x"}, short, {"nothing": 1}, {"logprobs": -1}):
        with pytest.raises(SamplerError):
            model.create_completion("x", **bad)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize(
    ("form", "sign"),
    [(HERMES, "<tool_call>"), (LLAMA3, "<|python_tag|>"), (MISTRAL, "[TOOL_CALLS]"),
     (DEEPSEEK, "<｜tool▁calls▁begin｜>"), (HARMONY, "<|channel|>"), (FUNCTIONARY, "<function="),
     (COMMAND_R7B, "<|START_ACTION|>"), (PLAIN, "")],
    ids=lambda x: x.name if isinstance(x, Format) else "",
)  # fmt: skip
def test_forced_calls(tmp_path: Path, form: Format, sign: str, choice: Any) -> None:
    model = model_with(tmp_path, sign)
    options: dict[str, Any] = {"tools": [WEATHER, ADD], "tool_choice": choice, "seed": 5, "temperature": 1.0}
    answer: Any = model.create_chat_completion(USER, **options)
    chosen = answer["choices"][0]
    (call,) = chosen["message"]["tool_calls"]
    assert chosen["finish_reason"] == "tool_calls" and chosen["message"]["content"] is None
    assert call["type"] == "function" and call["id"]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Bern", "Genf") if call["function"]["name"] == "get_weather" else "a" in arguments
    assert choice == "required" or call["function"]["name"] == "get_weather"
    streamed = joined(model.create_chat_completion(USER, stream=True, **options))
    assert [c["function"] for c in streamed["message"]["tool_calls"]] == [call["function"]]
    assert streamed["finish_reason"] == "tool_calls" and not streamed["message"]["content"]
    back = [*USER, chosen["message"], {"role": "tool", "tool_call_id": call["id"], "content": "sun"}]
    assert model.create_chat_completion(back, tools=[WEATHER], max_tokens=2)


def test_json_logprobs_and_reasoning(model: Model) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer: Any = model.create_chat_completion(USER, response_format=form, logprobs=True, top_logprobs=3, seed=1)
    choice = answer["choices"][0]
    assert json.loads(choice["message"]["content"])["n"] in (1, 22) and choice["finish_reason"] == "stop"
    entries = choice["logprobs"]["content"]
    assert bytes(b for e in entries for b in e["bytes"]).decode() == choice["message"]["content"]
    assert all(len(e["top_logprobs"]) == 3 for e in entries)
    streamed = joined(model.create_chat_completion(USER, response_format=form, logprobs=True, seed=1, stream=True))
    assert streamed["message"]["content"] == choice["message"]["content"] and len(streamed["logprobs"]) == len(entries)
    thinking: Any = model.create_chat_completion(
        USER, response_format={"type": "json_object", "schema": schema}, chat_template_kwargs={"enable_thinking": True}
    )
    message = thinking["choices"][0]["message"]
    assert json.loads(message["content"].partition("</think>")[2])["n"] in (1, 22)
    grammar = 'root ::= "so" "</think>\\n\\n" "Yes."'
    thinking = model.create_chat_completion(USER, grammar=grammar, chat_template_kwargs={"enable_thinking": True})
    assert thinking["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "reasoning_content": "so"}


def test_functions_of_old(model: Model) -> None:
    answer: Any = model.create_chat_completion(
        USER, functions=[WEATHER["function"]], function_call={"name": "get_weather"}
    )
    assert answer["choices"][0]["message"]["function_call"]["name"] == "get_weather"


def test_a_template_without_tools_is_told_of_them(tmp_path: Path) -> None:
    from pyggml.llm.generate.templates import find_template
    from pyggml.llm.openai.messages import prompt_of

    model = model_with(tmp_path, "")
    chatml = find_template("chatml", {})
    talk: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": true}'}}]},
        {"role": "tool", "content": "3"},
    ]
    text = prompt_of(chatml, model.vocab, talk, [ADD], {})
    assert "Be\nkind.\n\nYou can call" in text and '"add"' in text and "The function's result: 3" in text
    own = find_template(None, model.kv)
    assert 'assistant: {"a": true}' in prompt_of(own, model.vocab, talk, [], {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_choice": "required"}, "'required' needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "there is no tool 'x'"),
        ({"tools": [WEATHER], "tool_choice": "perhaps"}, "tool_choice must be"),
        ({"tools": [{"name": "x"}]}, r"tools\[0\] must be a dict"),
        ({"tools": ["x"]}, r"tools\[0\] must be a dict"),
        ({"response_format": {"type": "yaml"}}, "the type must be text"),
        ({"response_format": {"type": "json_schema"}}, "a schema is missing"),
        ({"response_format": "json"}, "a dict with a type"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs must be a dict without"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs must be a dict"),
        ({"n_ctx": "x"}, "n_ctx must be a whole number"),
        ({"messages": "hi"}, "messages must be a list"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\] has no role"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of type text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}, "no JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "a call must have a function"),
    ],
)  # fmt: skip
def test_bad_requests(model: Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model.create_chat_completion(**{"messages": USER, **options})


def test_batches(model: Model) -> None:
    texts = model.generate_batch(["ab"] * 4, 8, seed=3, temp=1.0, n_threads=1, ignore_eos=True)
    assert len(set(texts)) == 4 and texts[0] == "".join(
        model.generate("ab", 8, seed=3, temp=1.0, n_threads=1, ignore_eos=True)
    )
    assert texts == model.generate_batch(["ab"] * 4, 8, seed=3, temp=1.0, n_threads=1, ignore_eos=True)
    each: list[dict[str, Any]] = [
        {"grammar": 'root ::= "yes"'},
        {"n_predict": 2, "logit_bias": {100: 99.0}},
        {"n_predict": 0},
    ]
    assert model.generate_batch(["ab", "ab", "c"], 5, each=each, temp=0.0) == ["yes", "aa", ""]
    for bad in ([{}], "abc", [1, 2, 3], {}):
        with pytest.raises(gg.BatchError, match="each must be a list of 3"):
            model.generate_batch(["a", "b", "c"], 1, each=bad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SamplerError, match="prompt 1"):
        model.generate_batch(["a", "b"], 1, each=[{}, {"nothing": 1}])


def test_a_chat_session_is_public() -> None:
    assert gg.ChatSession.__name__ == "ChatSession" and "ChatSession" in gg.__all__
