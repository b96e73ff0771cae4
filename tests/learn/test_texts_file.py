"""Texts to train on, and the command line of training."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from pyggml.tools.cli import app

import pyggml as gg
from pyggml.errors import ModelError
from pyggml.learn.optimisers import schedule
from pyggml.learn.saved import check_save
from pyggml.learn.texts_file import Batches, Example, read_examples

from ..conftest import shared_dir


def read(*args: Any, **more: Any) -> list[Example]:
    """`read_examples`, as lists."""
    return [Example(np.asarray(e.ids).tolist(), np.asarray(e.mask).tolist()) for e in read_examples(*args, **more)]


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
    text, pair, chat = read(path, model, 500)
    assert text.ids[:-1] == model.tokenize("abc")
    assert text.ids[-1] == model.vocab.eos
    assert pair.ids == [*model.tokenize("ab"), *model.tokenize("cd", add_special=False), model.vocab.eos]
    assert all(text.mask)
    assert all(pair.mask)
    whole = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert model.detokenize(chat.ids).strip("▁ \n") == whole.strip()
    _, pair, chat = read(path, model, 500, mask_prompt=True)
    n = len(model.tokenize("ab"))
    assert pair.mask == [0] * n + [1] * (len(pair.ids) - n)
    counted = [i for i, m in zip(chat.ids, chat.mask, strict=True) if m]
    assert model.detokenize(counted).split() == ["B<|im_end|>", "D<|im_end|>"]
    assert [len(e.ids) for e in read(path, model, 4)] == [4, 4, 4]


def test_a_long_chat_is_rendered_as_far_as_it_counts(tiny: Path, tmp_path: Path) -> None:
    """Each answer takes as long as all that came before it: 6 MB of them took a day."""
    model = gg.load_model(tiny)
    messages = [{"role": ("user", "assistant")[i % 2], "content": "abc"} for i in range(20_000)]
    long = read(lines(tmp_path / "a.jsonl", {"messages": messages}), model, 100)
    short = read(lines(tmp_path / "b.jsonl", {"messages": messages[:40]}), model, 100)
    assert [long[0].ids, long[0].mask] == [short[0].ids, short[0].mask] and len(long[0].ids) == 100


def test_plain_text_and_packing(tiny: Path, tmp_path: Path) -> None:
    model = gg.load_model(tiny)
    (tmp_path / "a.txt").write_text("x" * 50)
    pieces = read(tmp_path / "a.txt", model, 16)
    assert [i for e in pieces for i in e.ids] == model.tokenize("x" * 50)
    path = lines(tmp_path / "a.jsonl", *({"text": "ab"} for _ in range(5)))
    alone = read(path, model, 16)
    n = len(alone[0].ids)
    packed = read(path, model, 2 * n + 1, pack=True)
    assert [len(e.ids) for e in packed] == [2 * n, 2 * n, n]
    assert packed[0].ids == alone[0].ids * 2
    assert packed[0].mask == [0, *[1] * (n - 1)] * 2


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_that_never_ends(name: str, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="is no regular file"):
        read(tmp_path / name, gg.load_model(tiny), 16)


def test_bad_files(tiny: Path, tmp_path: Path) -> None:
    model = gg.load_model(tiny)
    good = {"text": "abc"}
    cases: list[tuple[tuple[object, ...], str]] = [
        ((good, "{"), "line 2: is no JSON"),
        (([1],), "line 1: is no JSON object"),
        ((good, {"prompt": "a"}), "line 2: has neither `text`, nor"),
        (({"text": 3},), "line 1: `text` must be a string"),
        (({"text": None},), "line 1: `text` must be a string, not None"),
        (({"text": 0},), "line 1: `text` must be a string, not 0"),
        (({"messages": []},), "line 1: `messages` must be a list of messages"),
        (({"messages": [3]},), "line 1: a message must have a `role` and a `content`, not 3"),
        (({"messages": [{"role": "user", "content": 5}]},), "line 1: a message must have a `role`"),
        ((), "holds no text with a token to predict"),
        (({"text": ""},), "holds no text with a token to predict"),
    ]
    for entries, text in cases:
        with pytest.raises(ModelError, match=text):
            read_examples(lines(tmp_path / "a.jsonl", *entries), model, 100)
    with pytest.raises(ModelError, match="cannot be read"):
        read_examples(tmp_path / "none.txt", model, 100)
    (tmp_path / "bytes.txt").write_bytes(b"a\xff")
    with pytest.raises(ModelError, match="no UTF-8"):
        read_examples(tmp_path / "bytes.txt", model, 100)


def test_lines_that_have_nothing_to_learn(tiny: Path, tmp_path: Path) -> None:
    model, good = gg.load_model(tiny), {"text": "abc"}
    path = lines(tmp_path / "a.jsonl", good, {"text": ""}, "", good, {"prompt": "abcdef", "completion": "g"})
    with pytest.warns(UserWarning, match=r"a\.jsonl: 2 texts have no token to predict and are left out: lines 2, 5$"):
        assert len(read_examples(path, model, 4, mask_prompt=True)) == 2
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "abc"}\n{"text": "a\xff"}\n')
    with pytest.raises(ModelError, match="line 2: is no JSON"):
        read_examples(tmp_path / "b.jsonl", model, 10)
    for name in ("empty.txt", "empty.jsonl"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(ModelError, match="holds no text with a token to predict"):
            read_examples(tmp_path / name, model, 10)


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
    text = run("train", "-o", tmp_path / "m.gguf", "--epochs", 2, "--lr", 0.01, "--val-split", 0.3)
    assert [line[:14] for line in text.splitlines() if line.startswith("epoch")] == ["epoch 1: loss ", "epoch 2: loss "]
    assert "validation: loss" in text
    assert gg.load_model(tmp_path / "m.gguf").weights.keys() == model.weights.keys()


def refused(*args: object) -> tuple[int, str]:
    """The exit code and the message of a command that fails."""
    result = CliRunner().invoke(app, [*map(str, args)])
    assert result.exit_code
    return result.exit_code, str(result.exception) if result.exit_code == 1 else result.output


def test_other_optimisers_and_targets(tiny: Path, tmp_path: Path) -> None:
    data = lines(tmp_path / "a.jsonl", *({"text": "ab" + c} for c in "cdefgh"))
    common = ["finetune", data, "-m", tiny, "-b", 2, "--steps", 2, "-t", 1, "-o", tmp_path / "a.gguf"]
    for more in (
        ["--optimizer", "sgd", "--clip", 0.1, "--targets", "all-linear"],
        ["--optimizer", "muon", "-ub", 1, "--rslora", "-r", 4],
        ["--optimizer", "adafactor", "--targets", "blk.1.*"],
        ["--optimizer", "adamw8", "--targets", "all-linear"],
    ):
        result = CliRunner().invoke(app, [*map(str, [*common, *more])], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        pairs = gg.load_model(tiny).load_lora(tmp_path / "a.gguf").pairs
        if "--rslora" in more:
            assert {p.factor for p in pairs.values()} == {16 / 2}
        elif "all-linear" in more:
            assert {n.split(".")[2] for n in pairs} >= {"attn_k", "attn_output", "ffn_down", "ffn_gate", "ffn_up"}
            assert "output.weight" not in pairs


def test_resuming_something_else_is_refused(tiny: Path, tmp_path: Path) -> None:
    data = lines(tmp_path / "a.jsonl", *({"text": "ab" + c} for c in "cdefgh"))
    other = lines(tmp_path / "b.jsonl", *({"text": "ba" + c} for c in "cdefgh"))
    common = ["-m", tiny, "-b", 2, "-t", 1, "--warmup", 0, "-o", tmp_path / "a.gguf"]
    run = ["finetune", data, *common, "--steps", 2, "--state", tmp_path / "s"]
    result = CliRunner().invoke(app, [*map(str, run)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for what, more, text in (
        (other, [], "texts was"),
        (data, ["--lr", 0.1], "the learning rates of the steps"),
        (data, ["--steps", 3], "a schedule may depend on the number of steps"),
        (data, ["-r", 4], r'train was ["LoRA", {"r": 8'),
        (data, ["--seed", 4], "seed was 0 there, and is 4 here"),
        (data, ["--optimizer", "sgd"], "optimiser was"),
        (data, ["--clip", 1], "clip was null there, and is 1.0 here"),
    ):
        code, message = refused("finetune", what, *common, "--steps", 2, *more, "--resume", tmp_path / "s")
        assert code == 1 and text in message, message


def test_options_in_a_file(tiny: Path, tmp_path: Path) -> None:
    data = lines(tmp_path / "a.jsonl", *({"text": "ab" + c} for c in "cdefgh"))
    config = tmp_path / "c.yaml"
    config.write_text(f"data: {data}\nmodel: {tiny}\nsteps: 3\nrank: 2\nlr: 1e-3\nrslora: true\nthreads: 1\n")
    out = tmp_path / "a.gguf"
    args = ["finetune", "--config", config, "-o", out, "--rank", 4]
    result = CliRunner().invoke(app, [*map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0 and "step 3 of 3" in result.output, result.output
    pair = next(iter(gg.load_model(tiny).load_lora(out).pairs.values()))
    assert (pair.rank, pair.factor) == (4, 8.0)  # the command line counts more
    code, message = refused("finetune", data, "-m", tiny, "--dora", "-o", out)
    assert code == 1 and "blk.0.attn_q.weight: GGUF adapters have no magnitudes (DoRA)" in message
    for text, says in (
        ("rnak: 2", "there is no option 'rnak'; is it rank?"),
        ("help: true", "help is for the command line alone"),
        ("rank: [2]", "rank must be one value"),
        ("steps: many", "is not a whole number"),
        ("rank: {", "is no YAML"),
        ("rank: 2001-99-99", "is no YAML"),
        ("rank: !!int ''", "is no YAML"),
        ("rank: !!bool x", "is no YAML"),
        ("rank: !!timestamp x", "is no YAML"),
        ("rank: &a [1]\nlr: [*a, *a]", "an alias (*) could stand for a billion values"),
        ("3", "must hold lines"),
    ):
        config.write_text(text)
        code, message = refused(*args, data)
        assert code == 2 and says in " ".join(message.split()), message


@pytest.mark.skipif(not (shared_dir() / "golden").is_dir(), reason="no golden data")
def test_what_cannot_be_written_is_told_before_the_training(tiny: Path, tmp_path: Path) -> None:
    """Adapters of experts that are one tensor in the checkpoint; outputs in folders where nothing can be made."""
    data = lines(tmp_path / "a.jsonl", *({"text": "ab" + c} for c in "cdefgh"))
    for name in ("granite-moe", "gpt-oss"):
        model = gg.load_model(shared_dir() / "golden" / "hf" / name)
        t = model.trainer(gg.SGD(), gg.LoRA(targets=("ffn_gate_exps",)))
        with pytest.raises(
            ModelError, match=r"blk\.0\.ffn_gate_exps\.weight is .* in the checkpoint: .* write a GGUF file"
        ):
            check_save(t, tmp_path / "folder")
        check_save(t, tmp_path / "a.gguf")
    before = {*tmp_path.iterdir()}
    for verb, out in (("finetune", "/proc/a.gguf"), ("train", "/proc/m.gguf"), ("train", "/proc/folder")):
        code, message = refused(verb, data, "-m", tiny, "-o", out, "--steps", 1)
        assert code == 1 and f"{out}: cannot be written: " in message
    code, message = refused("finetune", data, "-m", tiny, "--steps", 1, "-o", tmp_path / "a.gguf", "--state", "/proc/s")
    assert code == 1 and "/proc/s: cannot be written: " in message
    assert {*tmp_path.iterdir()} == before


@pytest.mark.parametrize("verb", ["train", "finetune"])
def test_sigterm_saves_the_state_and_leaves_nothing_behind(verb: str, tiny: Path, tmp_path: Path) -> None:
    data = lines(tmp_path / "a.jsonl", *({"text": "ab" + c} for c in "cdefgh"))
    like = ["--from-config", tiny] if verb == "train" else ["-m", tiny]
    args = [
        verb,
        data,
        *like,
        "-o",
        tmp_path / "m.gguf",
        "--steps",
        10**6,
        "--state",
        tmp_path / "s",
        "--save-every",
        2,
        "-t",
        1,
    ]
    running = [sys.executable, "-m", "pyggml", *map(str, args)]
    with subprocess.Popen(running, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        while child.poll() is None and not (tmp_path / "s").exists():
            time.sleep(0.05)
        assert verb == "finetune" or any(p.name.startswith(".m.gguf.") for p in tmp_path.iterdir())
        child.terminate()
        child.communicate()
    assert child.returncode == 130
    assert {p.name for p in tmp_path.iterdir()} - {"s"} == {"a.jsonl"}
