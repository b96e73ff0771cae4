"""Texts to train on, and the command line of training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from pyggml.tools.cli import app

import pyggml as gg
from pyggml.errors import ModelError
from pyggml.learn.optimisers import schedule
from pyggml.learn.texts_file import Batches, Example, read_examples


def lines(path: Path, *entries: object) -> Path:
    path.write_text("\n".join(json.dumps(e) if not isinstance(e, str) else e for e in entries) + "\n\n")
    return path


def test_lines(tiny: Path, tmp_path: Path) -> None:
    model = gg.load_model(tiny)
    messages = [
        {"role": "user", "content": "A?"},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "C?"},
        {"role": "assistant", "content": "D"},
    ]
    entries = {"text": "abc"}, {"prompt": "ab", "completion": "cd"}, {"messages": messages}
    path = lines(tmp_path / "a.jsonl", *entries)
    text, pair, chat = read_examples(path, model, 500)
    assert text.ids[:-1] == model.tokenize("abc")
    assert text.ids[-1] == model.vocab.eos
    assert pair.ids == [*model.tokenize("ab"), *model.tokenize("cd", add_special=False), model.vocab.eos]
    assert all(text.mask)
    assert all(pair.mask)
    whole = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert model.detokenize(chat.ids).strip("▁ \n") == whole.strip()
    _, pair, chat = read_examples(path, model, 500, mask_prompt=True)
    n = len(model.tokenize("ab"))
    assert pair.mask == [0] * n + [1] * (len(pair.ids) - n)
    counted = [i for i, m in zip(chat.ids, chat.mask, strict=True) if m]
    assert model.detokenize(counted).split() == ["B<|im_end|>", "D<|im_end|>"]
    assert [len(e.ids) for e in read_examples(path, model, 4)] == [4, 4, 4]


def test_plain_text_and_packing(tiny: Path, tmp_path: Path) -> None:
    model = gg.load_model(tiny)
    (tmp_path / "a.txt").write_text("x" * 50)
    pieces = read_examples(tmp_path / "a.txt", model, 16)
    assert [i for e in pieces for i in e.ids] == model.tokenize("x" * 50)
    path = lines(tmp_path / "a.jsonl", *({"text": "ab"} for _ in range(5)))
    alone = read_examples(path, model, 16)
    n = len(alone[0].ids)
    packed = read_examples(path, model, 2 * n + 1, pack=True)
    assert [len(e.ids) for e in packed] == [2 * n, 2 * n, n]
    assert packed[0].ids == alone[0].ids * 2
    assert packed[0].mask == [0, *[1] * (n - 1)] * 2


def test_bad_files(tiny: Path, tmp_path: Path) -> None:
    model = gg.load_model(tiny)
    good = {"text": "abc"}
    cases: list[tuple[tuple[object, ...], str]] = [
        ((good, "{"), "line 2: is no JSON"),
        (([1],), "line 1: is no JSON object"),
        ((good, {"prompt": "a"}), "line 2: has neither `text`, nor"),
        (({"text": 3},), "line 1: `text` must be a string"),
        (({"messages": []},), "line 1: `messages` must be a list of messages"),
        (({"messages": [3]},), "line 1: a message must have a `role` and a `content`, not 3"),
        (({"messages": [{"role": "user", "content": 5}]},), "line 1: a message must have a `role`"),
        ((), "holds no text with a token to predict"),
    ]
    for entries, text in cases:
        with pytest.raises(ModelError, match=text):
            read_examples(lines(tmp_path / "a.jsonl", *entries), model, 100)
    with pytest.raises(ModelError, match="cannot be read"):
        read_examples(tmp_path / "none.txt", model, 100)
    (tmp_path / "bytes.txt").write_bytes(b"a\xff")
    with pytest.raises(ModelError, match="no UTF-8"):
        read_examples(tmp_path / "bytes.txt", model, 100)


def test_batches_follow_from_the_seed() -> None:
    examples = [Example([i] * (2 + i % 7), [1] * (2 + i % 7)) for i in range(23)]
    batches, again = Batches(examples, 4, 1), Batches(examples, 4, 1)
    assert batches.n_epoch == 6
    for epoch in range(2):
        seen = [e.ids[0] for i in range(6) for e in batches[6 * epoch + i]]
        assert sorted(seen) == list(range(23))
    assert [again[i] for i in (9, 2)] == [batches[i] for i in (9, 2)]
    assert [batches[i] for i in range(6)] != [batches[i] for i in range(6, 12)]


def test_schedules() -> None:
    rates = [schedule(1.0, 14, "cosine", 4)(i) for i in range(14)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[9] == pytest.approx(0.5)
    assert np.diff(rates[4:]).max() < 0
    assert schedule(2.0, 10, "linear")(5) == 1.0
    assert schedule(2.0, 10)(9) == 2.0


def test_the_command_line(tiny: Path, tmp_path: Path) -> None:
    data = lines(tmp_path / "a.jsonl", *({"prompt": "ab", "completion": c} for c in "cdefgh"))
    state, adapter = tmp_path / "state", tmp_path / "a.gguf"
    common = ["-m", str(tiny), "-b", "2", "--warmup", "1", "--schedule", "constant", "-t", "1"]

    def run(verb: str, *args: object) -> str:
        result = CliRunner().invoke(app, [verb, str(data), *common, *map(str, args)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    lora = ["--lr", 0.05, "--targets", "attn_q,ffn_*", "--mask-prompt"]
    text = run("finetune", *lora, "-o", adapter, "--steps", 12, "--test", data)
    before, after = (float(line.split()[2].rstrip(",")) for line in text.splitlines() if line.startswith("test:"))
    assert after < before
    model = gg.load_model(tiny)
    whole = model.load_lora(adapter)
    run("finetune", *lora, "-o", tmp_path / "b.gguf", "--steps", 5, "--state", state)
    run("finetune", *lora, "-o", tmp_path / "c.gguf", "--steps", 12, "--resume", state)
    resumed = model.load_lora(tmp_path / "c.gguf")
    assert all(resumed.pairs[name].b.tobytes() == p.b.tobytes() for name, p in whole.pairs.items())
    run("train", "-o", tmp_path / "m.gguf", "--epochs", 1, "--lr", 0.01)
    assert gg.load_model(tmp_path / "m.gguf").weights.keys() == model.weights.keys()
