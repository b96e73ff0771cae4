"""Golden folders of models that see or hear, with a small vocabulary: bytes, and special tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from .conftest import shared_dir
from .gguf_files import write_all

MM = shared_dir() / "golden" / "mm"
WIDE, TALL = MM / "images" / "wide.png", MM / "images" / "tall.png"
TEMPLATE = (  # PIC stands for what a family's template writes for a picture
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' or p.type == 'audio' %}PIC{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}<reply>"
)
QWEN = {500: "<|image_pad|>", 499: "<|vision_start|>", 498: "<|vision_end|>"}


def characters() -> list[str]:
    """The characters by which GPT-2's vocabularies spell bytes."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    more = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(more)) for b in range(256)]


def copy_mmproj(
    path: Path, out: Path, changes: Mapping[str, Any], names: Mapping[str, str], more: Mapping[str, Any]
) -> None:
    """A copy of an mmproj file with other values of keys, other parts of tensors' names, and `more` tensors. What
    pyggml says besides is left out."""
    source, made = gguf.GGUFReader(path), gguf.GGUFWriter(out, "clip")
    for key, field in source.fields.items():
        if not key.startswith(("GGUF.", "general.arch", "pyggml.")):
            value = changes.get(key, field.contents())
            made.add_key_value(key, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for t in source.tensors:
        made.add_tensor(".".join(names.get(x, x) for x in t.name.split(".")), t.data, raw_dtype=t.tensor_type)
    for name, a in more.items():
        made.add_tensor(name, a)
    write_all(made)


def write_folder(folder: Path, name: str = "qwen2-vl", specials: Mapping[int, str] = QWEN, pic: str = "") -> Path:
    """A copy of a golden folder with a tokenizer: tokens 0 to 255 are bytes, 256 is "hi", the others are special."""
    shutil.copytree(MM / name, folder)
    added = {i: specials.get(i, f"<unused{i}>") for i in range(257, 512)} | {511: "<end>"}
    vocab = {c: i for i, c in enumerate(characters())} | {"hi": 256}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": text,
                "special": True,
                "normalized": False,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
            }
            for i, text in added.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab | {text: i for i, text in added.items()}, "merges": ["h i"]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = TEMPLATE.replace("PIC", pic or "<|vision_start|><|image_pad|><|vision_end|>")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
