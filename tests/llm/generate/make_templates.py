"""Writes templates/expected.json: chats as the transformers library, where it is installed, renders them.
The templates are our own, and use what those of well-known models use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'What\'s the <weather> & "wind" in Zürich?',
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {"city": {"type": "string", "enum": ["Bern", "Genève"]}, "days": {"type": "integer"}},
        },
    },
}
CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Bern"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be <brief> & kind.  "},
    {"role": "user", "content": "How is it in 'Bern'?"},
    {"role": "assistant", "content": None, "reasoning_content": "I must look.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "get_weather", "content": '{"sun": true, "°C": 21.5}'},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSunny, 21.5 °C."},
    {"role": "user", "content": [{"type": "text", "text": "Thanks"}, {"type": "text", "text": " & bye"}]},
]
PLAIN = [TALK[1], {"role": "assistant", "content": "Well."}, {"role": "user", "content": "Bye"}]
DOCS = [{"title": "Bern", "text": "A <town>."}, {"title": "Rhône", "text": "A river & a wine."}]

FOLDER = Path(__file__).with_name("templates")
TEMPLATES = {p.stem: p.read_text(encoding="utf-8") for p in sorted(FOLDER.glob("*.jinja"))}
VARIABLES: dict[str, dict[str, Any]] = {
    "bare": {"messages": PLAIN},
    "prompt": {"messages": PLAIN, "add_generation_prompt": True, "enable_thinking": False, "date_string": "1 May"},
    "all": {
        "messages": TALK,
        "tools": [WEATHER, WEATHER],
        "documents": DOCS,
        "add_generation_prompt": True,
        "enable_thinking": True,
        "xtra": {"deep": [{"er": "é<"}]},
        "builtin_tools": ["a"],
    },
    "tools": {"messages": PLAIN, "tools": [WEATHER]},
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # of tests/tiny_model.py


def main() -> None:
    """Render all, by all."""
    from transformers.utils.chat_template_utils import (  # pyright: ignore[reportMissingImports]
        render_jinja_template,  # pyright: ignore[reportUnknownVariableType]
    )

    cases: list[dict[str, Any]] = []
    for name, template in TEMPLATES.items():
        for which, variables in VARIABLES.items():
            rest = {k: v for k, v in variables.items() if k != "messages"}
            case: dict[str, Any] = {"template": name, "variables": which}
            try:
                texts, _ = render_jinja_template([variables["messages"]], chat_template=template, **rest, **SPECIAL)
                case["text"] = texts[0]
            except Exception as e:
                case["error"] = str(e)
            cases.append(case)
    text = json.dumps(cases, indent=1, ensure_ascii=False) + "\n"
    (FOLDER / "expected.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
