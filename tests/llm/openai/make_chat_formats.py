"""Writes chat_formats.json: the prompts and stop strings that llama-cpp-python makes of chats, by its chat formats.

    python -m tests.llm.openai.make_chat_formats FOLDER_OF_ITS_SOURCE

Only its module of chat formats is run, without the library: `_Recorder` stands for the model."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jinja2

FILE = Path(__file__).with_name("chat_formats.json")
OWN_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}]{{ m.content or '' }}\n{% endfor %}"
)
BEGIN_CALL = "<|START_OF_FUNCTION_CALL|>"  # a token of Functionary's vocabulary, in its version 1

_CALL = {"id": "call1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
_S, _U = {"role": "system", "content": "Be <brief> & 'kind'."}, {"role": "user", "content": "How is it in Zürich?\n"}
_A, _V = {"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "{thanks}"}
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "user": [_U],
    "system": [_S, _U],
    "all": [_S, _U, _A, _V, {"role": "assistant", "content": " Bye.\n"}, _U],
    "ends with the assistant": [_S, _U, _A],
    "begins with the assistant": [_A, _U],
    "empty": [*({"role": role, "content": ""} for role in ("system", "user", "assistant")), _U],
    "late system": [_U, _S, _A, {"role": "system", "content": "no"}, _V],
    "calls": [_S, _U, {"role": "assistant", "content": None, "tool_calls": [_CALL]}],
    "results": [_U, {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call1", "content": "sun"}, _V],
    "functions": [_U, {"role": "function", "name": "weather", "content": "sun"}, _V],
}  # fmt: skip
WITH_TOOLS = frozenset(("all", "results", "functions"))
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "of a <city>", "parameters": {
        "type": "object", "required": ["city"], "$defs": {"Unit": {"enum": ["C", "F"]}, "Where": {
            "type": "object", "properties": {"x": {"type": "number"}, "unit": {"$ref": "#/$defs/Unit"}}}},
        "properties": {"city": {"type": "string", "description": "the city's name"}, "where": {"$ref": "#/$defs/Where"},
                       "days": {"type": "array", "items": {"type": "object", "properties": {"d": {"enum": ["a"]}}}}}}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "weather"}}
CHOICES: dict[str, dict[str, Any]] = {
    "": {},
    "none": {"tools": TOOLS, "tool_choice": "none"},
    "default": {"tools": TOOLS},
    "auto": {"tools": TOOLS, "tool_choice": "auto"},
    "named": {"tools": TOOLS, "tool_choice": NAMED},
    "functions": {"functions": [t["function"] for t in TOOLS], "function_call": {"name": "weather"}},
}


class _Done(Exception): ...


class _Recorder:
    """A model that keeps what it is asked."""

    verbose = False

    def __init__(self, version: str) -> None:
        self.asked: dict[str, Any] = {}
        template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(OWN_TEMPLATE)
        tokenizer = SimpleNamespace(
            additional_special_tokens=[BEGIN_CALL] if version == "v1" else [],
            apply_chat_template=lambda messages, tokenize: template.render(messages=messages),
        )
        self.tokenizer_ = SimpleNamespace(hf_tokenizer=tokenizer)

    def tokenize(self, text: bytes, **_: Any) -> str:
        return text.decode()

    def create_completion(self, prompt: str, stop: Any = (), **_: Any) -> Any:
        self.asked = {"prompt": prompt, "stop": [stop] if isinstance(stop, str) else list(stop)}
        raise _Done


def main(folder: Path) -> None:
    """Record all."""
    sys.path.insert(0, str(folder))
    package = ModuleType("llama_cpp")
    package.__path__ = [str(folder / "llama_cpp")]
    kind = SimpleNamespace(from_json_schema=lambda *_, **__: None, from_string=lambda *_, **__: None)
    grammar = SimpleNamespace(LlamaGrammar=kind, json_schema_to_gbnf=lambda *_: "", JSON_GBNF="")
    utils = SimpleNamespace(suppress_stdout_stderr=lambda disable: _Nothing(), Singleton=object)
    logger = SimpleNamespace(logger=SimpleNamespace(debug=lambda *_: None))
    sys.modules |= {"llama_cpp": package, "transformers": SimpleNamespace(AutoTokenizer=None)}  # pyright: ignore[reportAssignmentType]
    for name, module in (("llama_cpp", SimpleNamespace()), ("llama", SimpleNamespace()), ("llama_types", _Types()),
                         ("llama_grammar", grammar), ("_utils", utils), ("_logger", logger)):  # fmt: skip
        sys.modules[f"llama_cpp.{name}"] = module  # pyright: ignore[reportArgumentType]
        setattr(package, name, module)
    formats = importlib.import_module("llama_cpp.llama_chat_format")
    handlers = formats.LlamaChatCompletionHandlerRegistry()._chat_handlers
    out: list[dict[str, Any]] = []
    for name, handler in handlers.items():
        takes_tools = name in ("functionary", "functionary-v1", "functionary-v2", "chatml-function-calling")
        for history, messages in HISTORIES.items():
            if (
                name == "open-orca"
            ):  # there it knows the roles by these names alone, and leaves out all messages of others
                messages = [{**m, "role": m["role"].capitalize()} for m in messages]
            for choice, options in CHOICES.items() if takes_tools and history in WITH_TOOLS else [("", {})]:
                recorder = _Recorder(name[-2:])
                try:
                    handler(llama=recorder, **json.loads(json.dumps({"messages": messages, **options})))
                except _Done:
                    out.append({"format": name, "history": history, "choice": choice, **recorder.asked})
                except Exception as e:
                    print(f"{name}, {history}, {choice}: {type(e).__name__}: {e}")
    FILE.write_text(json.dumps(out, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _Types(ModuleType):
    """Whatever type is asked for is a dict."""

    def __init__(self) -> None:
        super().__init__("llama_types")

    def __getattr__(self, name: str) -> Any:
        return dict


if __name__ == "__main__":
    main(Path(sys.argv[1]))
