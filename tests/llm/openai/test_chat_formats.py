"""llama-cpp-python's chat formats: the prompts and stop strings that it makes, recorded by make_chat_formats.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest

from pyggml.errors import ModelError
from pyggml.llama_cpp import Llama
from pyggml.llama_cpp.chat_formats import NAMES
from pyggml.llama_cpp.function_formats import FUNCTION_FORMATS
from pyggml.llm.openai.formats import Format

from ...gguf_files import write_all
from ...tiny_model import TOKENS, write_gguf
from .make_chat_formats import BEGIN_CALL, CHOICES, FILE, HISTORIES, NAMED, OWN_TEMPLATE

CASES: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
CITY = {"type": "object", "properties": {"city": {"enum": ["Bern", "Genf"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


class _Asked(Exception):
    """Carries what the model would be asked."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("formats") / "tiny.gguf", kv={"tokenizer.chat_template": OWN_TEMPLATE})


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary with the token of Functionary's version 1."""
    path = tmp_path_factory.mktemp("formats") / "v1.gguf"
    w = gguf.GGUFWriter(path, "llama")
    w.add_uint32("llama.context_length", 64)
    w.add_string("tokenizer.chat_template", OWN_TEMPLATE)
    w.add_tokenizer_model("llama")
    w.add_token_list([*TOKENS, BEGIN_CALL])
    w.add_token_scores([0.0] * (len(TOKENS) + 1))
    w.add_token_types([2, 3, 3, *[6] * 256, 3])
    write_all(w)
    return path


def _asked(llm: Llama, **request: Any) -> tuple[str, list[str]]:
    """The prompt and the stop strings of a request; what a forced call begins with is part of the prompt."""
    from pyggml.llm.openai import chat

    prompts: list[str] = []
    prompt_of = chat.prompt_of

    def asked_for(*args: Any) -> None:
        raise _Asked(args[-1]["stop"])

    def forced_calls(form: Format, tools: Mapping[str, Any], *_: Any) -> str:
        (name,) = tools
        prompts.append(str(form.force(name, {})[0]))
        return ""

    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Asked) as e:
        patch.setattr(chat, "prompt_of", lambda *args: prompts.append(prompt_of(*args)) or prompts[0])  # pyright: ignore[reportUnknownLambdaType]
        patch.setattr(chat, "forced_calls", forced_calls)
        patch.setattr(chat, "asked_for", asked_for)
        llm.create_chat_completion(**request)
    return "".join(prompts), list(e.value.args[0])


@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_stops_are_those_of_llama_cpp_python(path: Path, v1: Path, name: str) -> None:
    llm = Llama(str(v1 if name == "functionary-v1" else path), chat_format=name, vocab_only=True)
    cases = [c for c in CASES if c["format"] == name]
    assert len(cases) >= 10
    for case in cases:
        if name == "functionary" and case["choice"] == "none":
            continue  # llama-cpp-python then asks for a call of a function named "none"
        options = CHOICES[case["choice"]]
        prompt, stop = _asked(llm, messages=HISTORIES[case["history"]], **options)
        assert prompt == case["prompt"], (case["history"], case["choice"])
        if case["choice"] in ("", "none"):  # for a call it asks the model several times
            assert stop == case["stop"], (case["history"], case["choice"])


def test_all_names_are_recorded() -> None:
    assert len(NAMES) == 27 and {c["format"] for c in CASES} == set(NAMES)


def test_the_format_is_checked_when_the_object_is_made(path: Path, tiny: Path) -> None:
    with pytest.raises(
        ModelError, match=r"unknown chat_format 'nope'.* are: llama-2, llama-3, .*; llama.cpp's: bailing"
    ):
        Llama(str(path), chat_format="nope", vocab_only=True)
    with pytest.raises(ModelError, match="the model's metadata has no such template"):
        Llama(str(path), chat_format="chat_template.rag", vocab_only=True)
    with pytest.raises(ModelError, match="'functionary-v2' writes chats by the model's own template"):
        Llama(str(tiny), chat_format="functionary-v2", vocab_only=True)
    with pytest.raises(ModelError, match="pooling_type must be one of -1, 0"):
        Llama(str(path), pooling_type=9, vocab_only=True)
    with pytest.raises(ModelError, match="type_k must be one of 0, 1"):
        Llama(str(path), type_k=99, vocab_only=True)
    assert Llama(str(path), vocab_only=True).chat_format == "chat_template.default"
    assert Llama(str(tiny), vocab_only=True).chat_format == "llama-2"
    assert Llama(str(tiny), chat_format="llama3", vocab_only=True).chat_format == "llama3"  # llama.cpp's name


W, N = '{"city": "Bern"}', "{}"


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("chatml-function-calling", "message:\nHello", "Hello", []),
        ("chatml-function-calling", f"functions.weather:\n{W}\nfunctions.now:\n{N}", "", [("weather", W), ("now", N)]),
        ("chatml-function-calling", "functions.weather:\nno", "functions.weather:\nno", []),
        ("chatml-function-calling", "Hello", "Hello", []),
        ("functionary", ":\nHello", "Hello", []),
        ("functionary", f" to=functions.weather:\n{W}", "", [("weather", W)]),
        ("functionary", " to=functions.weather:\nno", " to=functions.weather:\nno", []),
        ("functionary-v1", "Hello", "Hello", []),
        ("functionary-v1", f"<|START_OF_FUNCTION_CALL|>weather:\n{W}<|END_OF_FUNCTION_CALL|>", "", [("weather", W)]),
        ("functionary-v2", "all\n<|content|>Hello", "Hello", []),
        ("functionary-v2", f"weather\n<|content|>{W}\n<|from|>assistant\n<|recipient|>now\n<|content|>{N}", "",
         [("weather", W), ("now", N)]),
        ("functionary-v2", f"all\n<|content|>Look.\n<|from|>assistant\n<|recipient|>now\n<|content|>{N}", "Look.",
         [("now", N)]),
    ],
)  # fmt: skip
def test_replies_are_read(path: Path, v1: Path, name: str, text: str, content: str, calls: list[Any]) -> None:
    llm = Llama(str(v1 if name == "functionary-v1" else path), chat_format=name, vocab_only=True)
    form: Format = FUNCTION_FORMATS[name](llm.model).form
    names = frozenset(("weather", "now"))
    reply = form.parse(text, True, names)
    assert (reply.content, [(c.name, c.arguments) for c in reply.calls]) == (content, calls)
    said, n = "", 0
    for i in range(len(text) + 1):
        part = form.parse(text[:i], False, names)
        assert part.content.startswith(said) and len(part.calls) >= n
        said, n = part.content, len(part.calls)
    assert content.startswith(said)


@pytest.mark.parametrize("name", FUNCTION_FORMATS)
def test_a_call_can_be_forced(path: Path, name: str) -> None:
    llm = Llama(str(path), chat_format=name, n_threads=1, n_ctx=4096, seed=1)
    options: dict[str, Any] = {"tools": [TOOL], "tool_choice": NAMED}
    answer = llm.create_chat_completion(HISTORIES["all"], **options)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": call["function"]["arguments"]}
    assert json.loads(call["function"]["arguments"])["city"] in ("Bern", "Genf")
    assert llm.create_chat_completion(HISTORIES["all"], max_tokens=2, tools=[TOOL])["choices"]
    with pytest.raises(ModelError, match="chat_template_kwargs must be a dict"):
        llm.create_chat_completion(HISTORIES["all"], chat_template_kwargs="x")
