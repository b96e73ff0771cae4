"""How families of models write tool calls and reasoning, found by their chat templates; and how a call is forced."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..generate.templates import ChatTemplate
from ..grammars.members import rebased
from ..vocab import Vocab
from . import reply
from .reply import Reader, Reply

Schema = Mapping[str, Any]
# Where reasoning goes. "none": it stays in the content, as the model wrote it; "deepseek" and "auto": into a text of
# its own; "deepseek-legacy": into both.
REASONING_FORMATS = ("auto", "none", "deepseek", "deepseek-legacy")
# A call that the model is made to write: fixed texts, and the schemas of what stands between them.
Forced = Callable[[str, Schema], Sequence[str | Schema]]


@dataclass(frozen=True)
class Format:
    """How a family of models writes calls of tools, and reasoning.

    read       the function that reads a reply
    force      gives the `Forced` call of a tool, from its name and the schema of its parameters
    markers    special tokens that are part of replies
    reasoning  the texts that stand before and after reasoning
    opened     what stands before content, and before reasoning, besides: a reply that goes on there is read after it
    """

    name: str
    read: Reader
    force: Forced
    markers: tuple[str, ...] = ()
    reasoning: tuple[str, str] = ("<think>", "</think>")
    opened: tuple[str, str] = ("", "")

    def parse(
        self,
        text: str,
        done: bool,
        names: frozenset[str],
        thinking: bool = False,
        reasoning: str = "auto",
        goes_on: bool = False,
    ) -> Reply:
        """Read a reply. `thinking`: the text begins inside the reasoning; `reasoning`: one of REASONING_FORMATS;
        `goes_on`: the text continues a beginning, so that its first spaces count."""
        text = reply.shown(text, (*self.markers, *self.reasoning), done)
        thought, rest = reply.split_reasoning(text, *self.reasoning, thinking, done, goes_on)
        found = self.read(rest, done, names)
        if thought and reasoning != "none":
            found.reasoning = thought
        if reasoning in ("none", "deepseek-legacy"):
            opened = self.reasoning[0] if thinking and reasoning == "deepseek-legacy" else ""
            found.content = opened + text[: len(text) - len(rest)] + found.content
        if not done or found.calls:  # spaces before a call do not belong to the content
            found.content, found.reasoning = found.content.rstrip(), found.reasoning.rstrip()
        return found

    @property
    def ends_reasoning(self) -> bool:
        """Whether a text ends the reasoning, so that it can be cut short."""
        return self.reasoning[1] != "\0"

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends within reasoning."""
        begin, end = self.reasoning
        return prompt.rfind(begin) > prompt.rfind(end) and prompt.rstrip().endswith(begin)


def _named(first: str, key: str, last: str, **more: Any) -> Forced:
    """A call as JSON: the name of the tool, and its arguments as member `key`."""

    def force(name: str, schema: Schema) -> Sequence[str | Schema]:
        inner = rebased(schema, f"/properties/{key}")
        properties: dict[str, Any] = {**more, "name": {"const": name}, key: inner}
        return first, _object(properties), last

    return force


def _listed(first: str, name_key: str, key: str, last: str, **more: Any) -> Forced:
    def force(name: str, schema: Schema) -> Sequence[str | Schema]:
        inner = rebased(schema, f"/items/properties/{key}")
        item = _object({**more, name_key: {"const": name}, key: inner})
        return first, {"type": "array", "items": item, "minItems": 1, "maxItems": 1}, last

    return force


def _object(properties: Mapping[str, Any]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_DEEPSEEK = tuple(f"<｜tool▁{x}｜>" for x in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
_COHERE = tuple(f"<|{x}_{y}|>" for x in ("START", "END") for y in ("ACTION", "THINKING", "RESPONSE"))
_HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")

HERMES = Format(
    "hermes",
    reply.read_hermes,
    _named("<tool_call>\n", "arguments", "\n</tool_call>"),
    ("<tool_call>", "</tool_call>", "<think>", "</think>"),
)
LLAMA3 = Format("llama3", reply.read_llama3, _named("", "parameters", ""), ("<|python_tag|>",))
MISTRAL = Format(
    "mistral",
    reply.read_mistral,
    _listed("[TOOL_CALLS]", "name", "arguments", ""),
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ("[THINK]", "[/THINK]"),
)
MISTRAL_ARGS = Format(
    "mistral-args",
    reply.read_mistral,
    lambda name, schema: (f"[TOOL_CALLS]{name}[ARGS]", schema),
    MISTRAL.markers,
    MISTRAL.reasoning,
)
DEEPSEEK = Format(
    "deepseek",
    reply.read_deepseek,
    lambda name, schema: (
        f"{_DEEPSEEK[0]}{_DEEPSEEK[1]}function{_DEEPSEEK[2]}{name}\n```json\n",
        schema,
        f"\n```{_DEEPSEEK[3]}{_DEEPSEEK[4]}",
    ),
    (*_DEEPSEEK, "<think>", "</think>"),
)
HARMONY = Format(
    "harmony",
    reply.read_harmony,
    lambda name, schema: (f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", schema),
    _HARMONY,
    ("\0", "\0"),  # no texts stand around reasoning: it has a channel of its own
    ("<|channel|>final<|message|>", "<|channel|>analysis<|message|>"),
)
FUNCTIONARY = Format(
    "functionary",
    reply.read_functionary,
    lambda name, schema: (f"<function={name}>", schema, "</function>"),
    ("<function=",),
)
FUNCTIONARY_V32 = Format(
    "functionary-v3.2",
    reply.read_functionary_v32,
    lambda name, schema: (f"{name}\n", schema),
    (">>>",),
    opened=("all\n", ""),
)
COMMAND_R7B = Format(
    "command-r7b",
    reply.read_command_r,
    _listed("<|START_ACTION|>", "tool_name", "parameters", "<|END_ACTION|>", tool_call_id={"const": "0"}),
    _COHERE,
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
COMMAND_R = Format(
    "command-r", reply.read_command_r, _listed("Action: ```json\n", "tool_name", "parameters", "\n```"), ("Action:",)
)
PLAIN = Format("plain", reply.read_plain, _named("", "arguments", ""), ("<think>", "</think>"))


@dataclass(frozen=True)
class Dialect(ChatTemplate):
    """A chat template with the format `form` of its replies, which the source of the template does not show."""

    form: Format = PLAIN


# A text in a chat template -> the format that it is a sign of. The first text that is found counts.
_SIGNS: tuple[tuple[str, Format], ...] = (
    ("<|channel|>", HARMONY),
    ("<｜tool▁calls▁begin｜>", DEEPSEEK),
    (">>>all", FUNCTIONARY_V32),
    ("<|START_ACTION|>", COMMAND_R7B),
    ("Action: ```json", COMMAND_R),
    ("Action:\n```json", COMMAND_R),
    ("[ARGS]", MISTRAL_ARGS),
    ("[TOOL_CALLS]", MISTRAL),
    ("<tool_call>", HERMES),
    ("<function=", FUNCTIONARY),
    ("<|python_tag|>", LLAMA3),
    ("<|start_header_id|>ipython", LLAMA3),
)


def find_format(source: str) -> Format:
    """The format of a chat template, given its source; PLAIN when the template does not know tools."""
    return next((f for sign, f in _SIGNS if sign in source), PLAIN)


def forced_calls(form: Format, tools: Mapping[str, Schema], vocab: Vocab, compiled: Callable[[Schema], str]) -> str:
    """A grammar (llguidance's Lark) for one call of any of the tools. `compiled` turns a schema into the text that the
    grammar engine takes."""
    names = [f"call{i}" for i in range(len(tools))]
    lines = ["start: " + " | ".join(names)]
    for rule, (name, schema) in zip(names, tools.items(), strict=True):
        parts = (
            _spelled(part, form, vocab) if isinstance(part, str) else "%json " + compiled(part)
            for part in form.force(name, schema)
        )
        lines.append(f"{rule}: " + " ".join(p for p in parts if p))
    return "\n".join(lines) + "\n"


def _spelled(text: str, form: Format, vocab: Vocab) -> str:
    """A text as a term of Lark, in which markers that are tokens are written as tokens."""
    parts: list[str] = []
    while text:
        found = [(at, -len(m), m) for m in form.markers if (at := text.find(m)) >= 0 and _is_token(m, vocab)]
        at, _, marker = min(found, default=(len(text), 0, ""))
        if at:
            parts.append(json.dumps(text[:at]))
        if marker:
            parts.append(f"<[{vocab.tokenize(marker, False, True, continued=True)[0]}]>")
        text = text[at + len(marker) :]
    return " ".join(parts)


def _is_token(marker: str, vocab: Vocab) -> bool:
    return len(vocab.tokenize(marker, False, True, continued=True)) == 1
