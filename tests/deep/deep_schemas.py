"""Random JSON schemas with merged and recursive definitions: texts that their grammars end follow them (jsonschema)."""

from __future__ import annotations

import json
import random
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml.errors import SamplerError
from pyggml.llm.model import load_model
from pyggml.llm.samplers.candidates import Candidates
from pyggml.llm.samplers.grammar import Grammar
from tests.tiny_model import write_gguf

from . import SECONDS, SEED

NAMES = "abcd"
LEAVES: list[Any] = [
    {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}, {"const": "x"}, {"enum": [1, "y", None]},
    {"type": "string", "maxLength": 2}, {"type": "null"}, {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"},
]  # fmt: skip


def an_object(rng: random.Random, depth: int) -> dict[str, Any]:
    members = {name: a_schema(rng, depth - 1) for name in rng.sample(NAMES, rng.randint(0, 3))}
    required = [name for name in NAMES if rng.random() < (0.5 if name in members else 0.05)]
    more = rng.choice([{}, {}, {}, {}, {"additionalProperties": False}, {"patternProperties": {"^a": True}}])
    return {"type": "object", "properties": members, "required": required, **more}


def a_schema(rng: random.Random, depth: int) -> Any:
    if depth <= 0:
        return rng.choice(LEAVES)
    parts = [an_object(rng, depth - 1), rng.choice(LEAVES[-2:]), an_object(rng, depth - 1)]
    match rng.randrange(7):
        case 0:
            return {"type": "array", "items": a_schema(rng, depth - 1), "maxItems": 2}
        case 1:
            return {"anyOf": [a_schema(rng, depth - 1), an_object(rng, depth - 1)]}
        case 2:
            return {"allOf": rng.sample(parts, 2)}
        case 3:
            return {**parts[0], "anyOf": parts[1:]}
        case 4:
            return {**parts[0], **parts[1]}
        case _:
            return parts[0]


def test_schemas(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    vocab = load_model(write_gguf(tmp_path / "m.gguf"), vocab_only=True).vocab
    end, rng = time.monotonic() + SECONDS, random.Random(SEED)
    schemas = refused = texts = cut = 0
    while time.monotonic() < end:
        schema = {**an_object(rng, 2), "$defs": {"A": an_object(rng, 2), "B": a_schema(rng, 2)}}
        schemas += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                g = Grammar(vocab, None, schema)
        except SamplerError:
            refused += 1
            continue
        for _ in range(3):
            g.reset()
            text = bytearray()
            try:
                while len(text) < 300:
                    c = Candidates(np.zeros(vocab.n_tokens, np.float32))
                    g.apply(c)
                    tokens = c.tokens()
                    ends = [int(t) for t in tokens if vocab.is_eog(int(t))]
                    plain = [int(t) for t in tokens if t >= 3 and chr(int(t) - 3) not in " \n\t" and t not in ends]
                    if ends:
                        jsonschema.validate(json.loads(text.decode(errors="replace")), schema)
                        texts += 1
                        break
                    closing = [t for t in plain if chr(t - 3) in '"}]']
                    token = rng.choice(closing if closing and rng.random() < 0.3 else plain or [int(tokens[0])])
                    text += vocab.token_to_piece(token)
                    g.accept(token)
                else:
                    cut += 1
            except SamplerError:
                refused += 1
                break
            except jsonschema.ValidationError as e:
                raise AssertionError(json.dumps(schema), text) from e
    print(f"{schemas} schemas, {refused} refused, {texts} texts, {cut} cut")
    assert texts
