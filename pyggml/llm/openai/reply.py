"""What a model's reply says: reasoning, content and tool calls, written in the form its family was trained on."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast
from warnings import catch_warnings, simplefilter

_DECODER = json.JSONDecoder(strict=False)


class Call(NamedTuple):
    """A tool call: `arguments` as JSON text. `id`: the model's own, "" when it gave none."""

    name: str
    arguments: str
    id: str = ""


@dataclass
class Reply:
    """A reply, or as much of it as there is yet. `begun`: the call that is being written, with the beginning of its
    arguments, in families that write the name first."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list[Call])
    begun: Call | None = None


# A reader takes the text so far, whether that is all, and the names of the tools. What may still become a marker or a
# call is held back until all is there.
Reader = Callable[[str, bool, frozenset[str]], Reply]


def split_reasoning(
    text: str, begin: str, end: str, inside: bool, done: bool, goes_on: bool = False
) -> tuple[str, str]:
    """Split a text that starts with reasoning between `begin` and `end`. Returns the reasoning and the rest. `inside`:
    the text starts after `begin`; `goes_on`: in the middle of a text, whose spaces count."""
    start = text if goes_on and inside else text.lstrip()
    if not inside:
        if not done and begin.startswith(start):
            return "", ""
        if not start.startswith(begin):
            return "", text
        start = start[len(begin) :]
    thought, _, rest = start.partition(end)
    return thought.rstrip() if goes_on else thought.strip(), rest.lstrip("\n")


def read_plain(text: str, done: bool, names: frozenset[str]) -> Reply:
    """A reply that is a call as JSON, by the name of a tool, or text."""
    return _bare_json(text, done, names)


def read_hermes(text: str, done: bool, names: frozenset[str]) -> Reply:
    """Hermes, Qwen: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`; Qwen-Coder with tags inside."""
    return _blocks(text, done, "<tool_call>", "</tool_call>", lambda body: _tagged(body) or _calls(body))


def read_functionary(text: str, done: bool, names: frozenset[str]) -> Reply:
    """Functionary 3.1: `<function=NAME>{...}</function>`."""

    def call(body: str) -> list[Call]:
        name, _, text = body.partition(">")
        arguments = json_object(text)
        return [] if arguments is None else [Call(name.strip(), arguments)]

    return _blocks(text, done, "<function=", "</function>", call)


def read_functionary_v32(text: str, done: bool, names: frozenset[str]) -> Reply:
    """Functionary 3.2: `all` or a name, a new line, then text or arguments; parts begin with `>>>`."""
    content: list[str] = []
    calls: list[Call] = []
    parts = text.removeprefix(">>>").split(">>>")
    for i, part in enumerate(parts):
        name, newline, body = part.partition("\n")
        last = i == len(parts) - 1
        if name.strip() == "all":
            content.append(body)
        elif newline and (done or not last):
            arguments = json_object(body)
            calls.append(Call(name.strip(), json.dumps({"code": body}) if arguments is None else arguments))
        elif done:
            content.append(part)
    return Reply("".join(content), calls=calls)


def read_llama3(text: str, done: bool, names: frozenset[str]) -> Reply:
    """Llama 3: JSON with `parameters`, alone or after `<|python_tag|>`; or `NAME.call(x="y")`; or code."""
    content, tag, body = text.partition("<|python_tag|>")
    if not tag:
        return _bare_json(text, done, names)
    if not done:
        return Reply(content)
    if calls := _calls(body):
        return Reply(content, calls=calls)
    builtin = re.fullmatch(r"\s*([A-Za-z_]\w*)\.call\((.*)\)\s*", body, re.DOTALL)
    arguments = _keywords(builtin.group(2)) if builtin else None
    if builtin and arguments is not None:
        return Reply(content, calls=[Call(builtin.group(1), arguments)])
    code = "code_interpreter" if "code_interpreter" in names else "python"
    return Reply(content, calls=[Call(code, json.dumps({"code": body}, ensure_ascii=False))])


def read_mistral(text: str, done: bool, names: frozenset[str]) -> Reply:
    """Mistral: `[TOOL_CALLS]` before a list, or before each `NAME[ARGS]{...}` (`NAME[CALL_ID]ID[ARGS]{...}`)."""
    content, tag, body = text.partition("[TOOL_CALLS]")
    if not tag:
        return Reply(text)
    if body.lstrip().startswith("["):
        calls = _calls(body) if done or body.rstrip().endswith("]") else []
        return Reply(content if calls or not done else text, calls=calls)
    said: list[str] = [content]
    calls: list[Call] = []
    begun: Call | None = None
    for part in body.split("[TOOL_CALLS]"):
        head, found, given = part.partition("[ARGS]")
        if not found:
            head, brace, rest = part.partition("{")
            given = brace + rest
        name, _, id = head.partition("[CALL_ID]")
        arguments = json_object(given)
        if arguments is not None:
            calls.append(Call(name.strip(), arguments, id.strip()))
        elif done:
            said.append(tag + part)
        else:
            begun = _begun(part)
    return Reply("".join(said), calls=calls, begun=begun)


def read_deepseek(text: str, done: bool, names: frozenset[str]) -> Reply:
    """DeepSeek: `function<｜tool▁sep｜>NAME` and a block of code between two tokens; 3.1: `NAME<｜tool▁sep｜>{...}`."""
    begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

    def call(body: str) -> list[Call]:
        head, _, rest = body.partition(sep)
        if head.strip() == "function":
            head, _, rest = rest.partition("\n")
            rest = rest.strip().removeprefix("```json").removesuffix("```")
        arguments = json_object(rest)
        return [] if arguments is None else [Call(head.strip(), arguments)]

    reply = _blocks(text, done, begin, end, call)
    for marker in ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"):
        reply.content = reply.content.replace(marker, "")
    return reply


def read_command_r(text: str, done: bool, names: frozenset[str]) -> Reply:
    """Command R: calls are a list of `tool_name` and `parameters` between `<|START_ACTION|>` and its end, or in a block
    of code after `Action:`. The text stands between `<|START_RESPONSE|>` and its end."""
    text = text.replace("<|START_RESPONSE|>", "").replace("<|END_RESPONSE|>", "")
    if "Action:" not in text:
        content, begin, body = text.partition("<|START_ACTION|>")
        if not begin or "<|END_ACTION|>" in body:
            return _blocks(text, done, "<|START_ACTION|>", "<|END_ACTION|>", _calls)
        calls, begun = _list_so_far(body)
        return Reply(text if done and not calls else content, calls=calls, begun=None if done else begun)
    content, _, body = text.partition("Action:")
    found = re.search(r"```json(.*?)```", body, re.DOTALL)
    calls, begun = (_calls(found.group(1)), None) if found else _list_so_far(body.partition("```json")[2])
    calls = [c for c in calls if c.name != "directly_answer"]
    if found is None:
        return Reply(text if done and not calls else content, calls=calls, begun=None if done else begun)
    return Reply((content + body[found.end() :]).strip(), calls=calls)


def _list_so_far(text: str) -> tuple[list[Call], Call | None]:
    """The calls of a JSON list that is being written: those that are whole, and the one that is not."""
    calls: list[Call] = []
    at = text.find("[") + 1
    while at and (first := text.find("{", at)) >= 0:
        try:
            value, at = _DECODER.raw_decode(text, first)
            calls += _of_values(iter((value,)))
        except (ValueError, RecursionError):
            return calls, _begun(text[first:])
    return calls, None


def read_harmony(text: str, done: bool, names: frozenset[str]) -> Reply:
    """gpt-oss: messages of channels: `analysis` is reasoning, `commentary to=functions.NAME` a call, the rest text."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[Call] = []
    begun: Call | None = None
    parts = re.split(r"<\|start\|>|<\|end\|>|<\|call\|>|<\|return\|>", text)
    for i, part in enumerate(parts):
        head, found, body = part.partition("<|message|>")
        closed = done or i < len(parts) - 1
        if not found:
            if done and "<|channel|>" not in part and part.strip() not in ("", "assistant"):
                content.append(part)
            continue
        channel, to = re.search(r"<\|channel\|>\s*(\w+)", head), re.search(r"to=(\S+?)(?=<\||\s|$)", head)
        if to is not None and to.group(1) != "assistant":
            name = to.group(1).removeprefix("functions.")
            if closed:
                calls.append(Call(name, json_object(body) or body.strip()))
            elif body.lstrip().startswith("{"):
                begun = Call(name, _written(body.lstrip()))
        elif channel is not None and channel.group(1) == "analysis":
            if reasoning or body:
                reasoning.append(body)
        else:
            content.append(body)
    return Reply("".join(content), "\n".join(reasoning), calls, begun)


def _blocks(text: str, done: bool, begin: str, end: str, read: Callable[[str], list[Call]]) -> Reply:
    """Text, and calls between `begin` and `end`. A block that is no call stays text; so does one that was broken off,
    unless its call is whole."""
    content: list[str] = []
    calls: list[Call] = []
    at, begun = 0, None
    while (first := text.find(begin, at)) >= 0:
        content.append(text[at:first])
        last = text.find(end, first + len(begin))
        if last < 0 and not done:
            begun = _begun(text[first + len(begin) :])
            at = len(text)
            break
        at = len(text) if last < 0 else last + len(end)
        found = read(text[first + len(begin) : last if last >= 0 else None])
        calls += found
        if not found:
            content.append(text[first:at])
    content.append(text[at:])
    return Reply("".join(content), calls=calls, begun=begun)


_BEGUN_JSON = re.compile(
    r'\s*\{\s*(?:"tool_call_id"\s*:\s*"([^"\\]*)"\s*,\s*)?"(?:tool_)?name"\s*:\s*"([^"\\]+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_BEGUN_DEEPSEEK = re.compile(r"\s*(?:function<｜tool▁sep｜>([^\n]+)\n\s*```json|([^\s<]+)<｜tool▁sep｜>)\s*(?=\{)")
_BEGUN_NAMED = re.compile(r"\s*([^\s>\[{]+)(?:>|\[ARGS\])\s*(?=\{)")  # NAME>{...}, NAME[ARGS]{...}


def _begun(body: str) -> Call | None:
    """The call that a text begins; None when its name is not there yet, or stands behind the arguments."""
    if found := _BEGUN_JSON.match(body):
        return Call(found.group(2), json_prefix(body[found.end() :]), found.group(1) or "")
    if found := _BEGUN_DEEPSEEK.match(body):
        return Call((found.group(1) or found.group(2)).strip(), _written(body[found.end() :]))
    if found := _BEGUN_NAMED.match(body):
        return Call(found.group(1), _written(body[found.end() :]))
    return None


def _written(text: str) -> str:
    """The JSON object that a text begins with, as it is written, or as much of it as there is."""
    depth = 0
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', text, re.DOTALL):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found.group(), 0)
        if not depth:
            return text[: found.end()]
    return text.rstrip()


_SCALAR = re.compile(r"[-+.\w]+")
_OPEN_ESCAPE = re.compile(
    r"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?)$"
)
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)("?)', re.DOTALL)


def json_prefix(text: str) -> str:
    """The beginning of a JSON value, as `json.dumps` will write it when it is whole; what may still change is left
    out."""
    out: list[str] = []
    at, depth = 0, 0
    try:
        while at < len(text):
            c = text[at]
            if c == '"':
                piece, at = _string_prefix(text, at)
                out.append(piece)
            elif found := _SCALAR.match(text, at):
                if found.end() == len(text):
                    break
                out.append(_json(json.loads(found.group())))
                at = found.end()
            else:
                out.append({",": ", ", ":": ": "}.get(c, c.strip()))
                depth += (c in "[{") - (c in "]}")
                at += 1
                if c in "]}" and not depth:
                    break
    except (ValueError, RecursionError):
        pass
    return "".join(out)


def _string_prefix(text: str, at: int) -> tuple[str, int]:
    """A string that begins at `at`, or as much of it as there is, and the index after it."""
    found = _STRING.match(text, at)
    assert found is not None
    body, end = found.group(1), found.end()
    if not found.group(2):
        body, end = text[at + 1 :], len(text)
        if open_escape := _OPEN_ESCAPE.search(body):
            body = body[: open_escape.start(1)]
    written = _json(json.loads(f'"{body}"', strict=False))
    return (written if found.group(2) else written[:-1]), end


def shown(text: str, markers: tuple[str, ...], done: bool) -> str:
    """The text without what may be the beginning of a marker, unless it is all."""
    n = 0
    for m in () if done else markers:
        longest = next((k for k in range(len(m), 0, -1) if text.endswith(m[:k])), 0)
        n = max(n, longest if longest < len(m) else 0)
    return text[: len(text) - n]


def _bare_json(text: str, done: bool, names: frozenset[str]) -> Reply:
    start = text.lstrip()
    if names and start[:1] in ("{", "["):
        calls = _calls(start) if done else []
        if not done or (calls and all(c.name in names for c in calls)):
            return Reply(calls=calls, begun=None if done else _begun(start))
    return Reply(text if start or done else "")


def _values(text: str) -> Iterator[Any]:
    """The JSON values of a text, one after the other, with nothing but spaces, commas and semicolons between them."""
    at = 0
    while at < len(text):
        if text[at] in " \t\r\n;,":
            at += 1
            continue
        value, at = _DECODER.raw_decode(text, at)
        yield value


def _calls(text: str) -> list[Call]:
    """The calls in a text of JSON; empty when it is not JSON, or holds anything else."""
    try:
        return _of_values(_values(text))
    except (ValueError, RecursionError):
        return []


def _of_values(values: Iterator[Any]) -> list[Call]:
    calls: list[Call] = []
    for value in values:
        for item in cast("list[Any]", value if isinstance(value, list) else [value]):
            if not isinstance(item, dict):
                return []
            call = cast("dict[str, Any]", item)
            inner = call.get("function")
            if isinstance(inner, dict):
                call = {**call, **cast("dict[str, Any]", inner)}
            name = next((call[k] for k in ("name", "tool_name", "function") if isinstance(call.get(k), str)), None)
            if name is None:
                return []
            none: dict[str, Any] = {}
            given: Any = next((call[k] for k in ("arguments", "parameters", "args") if k in call), none)
            arguments = given if isinstance(given, str) else _json(given)
            calls.append(Call(name, arguments, str(call.get("id", call.get("tool_call_id", "")))))
    return calls


def _tagged(body: str) -> list[Call]:
    """`<function=NAME><parameter=X>value</parameter></function>`."""
    name, at = _tag(body, "<function=", 0)
    if not name:
        return []
    end = body.find("</function>", at)
    inside = body[at : end if end >= 0 else None]
    arguments: dict[str, Any] = {}
    name_of, at = _tag(inside, "<parameter=", 0)
    while name_of and (end := inside.find("</parameter>", at)) >= 0:
        arguments[name_of.strip()] = _value(inside[at:end].removeprefix("\n").removesuffix("\n"))
        name_of, at = _tag(inside, "<parameter=", end)
    try:
        return [Call(name.strip(), _json(arguments))]
    except (ValueError, RecursionError):
        return []


def _tag(text: str, begin: str, at: int) -> tuple[str, int]:
    """The text between `begin`, at or after index `at`, and the next `>`, and the index after it; "" when there is no
    such text."""
    while (first := text.find(begin, at)) >= 0 and (last := text.find(">", first)) >= 0:
        if name := text[first + len(begin) : last]:
            return name, last + 1
        at = last
    return "", len(text)


def _value(text: str) -> Any:
    """The value of a parameter's text. It is read as JSON when it is an object, a list, a number, true, false or null;
    anything else is a text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def json_object(text: str) -> str | None:
    """Rewrite a JSON object as JSON that every reader takes; None when the text is no JSON object."""
    try:
        value = json.loads(text, strict=False)
        if not isinstance(value, dict):
            return None
        written = _json(value)
    except (ValueError, RecursionError):
        return None
    try:
        json.loads(text)
    except ValueError:  # control characters within strings
        return written
    return text.strip()


def _keywords(text: str) -> str | None:
    """The keyword arguments of a call in Python's notation, as JSON; None when JSON has no such values."""
    try:
        with catch_warnings():
            simplefilter("ignore")  # Python warns of escapes that it does not know
            call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(k.arg for k in call.keywords):
            return None
        return _json({k.arg: ast.literal_eval(k.value) for k in call.keywords})
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None


def _json(value: Any) -> str:
    """A value as JSON. Raises ValueError for NaN and infinity, TypeError for what JSON does not have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
