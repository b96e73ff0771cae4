"""Tasks of several answers: the likeliest by its tokens' mean log-probability, each evaluated by itself."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from pyggml.tools.cli import main

from pyggml.errors import BatchError, GGUFError, KVCacheFull
from pyggml.llm.evaluate.choices import Task, choice_tasks, chosen_tasks, hellaswag_tasks, score
from pyggml.llm.model import Model, load_model

TASKS = [
    Task("The cat", ["sat", "ran off", "sang a song", "x"], [0, 1, 0, 0]),
    Task("One and one", ["is two", "are three"], [1, 0]),
    Task("Again", ["and again", "and", "and on"], [0, 0, 1]),
]


@pytest.fixture
def model(tiny: Path) -> Model:
    return load_model(tiny)


def best(model: Model, task: Task) -> int:
    """The likeliest answer: each text evaluated token by token, from where they are no longer the same."""
    texts = [model.tokenize(f"{task.question} {a}") for a in task.answers]
    common = next((i for i, t in enumerate(zip(*texts, strict=False)) if len(set(t)) > 1), min(map(len, texts)) - 1)
    found = []
    for text in texts:
        ctx, sums = model.new_context(64), []
        for i, token in enumerate(text[:-1]):
            ctx.decode([token])
            x = ctx.logits[0].astype(np.float64)
            if i >= common - 1:
                sums.append(x[text[i + 1]] - np.log(np.exp(x).sum()))
        found.append(np.mean(sums))
    return int(np.argmax(found))


@pytest.mark.parametrize("n_batch", [2048, 5])
def test_scores(model: Model, n_batch: int) -> None:
    right = [task.right[best(model, task)] for task in TASKS]
    scores = list(score(model, TASKS, 128, {"n_batch": n_batch}))
    assert [s.n_right for s in scores] == np.cumsum(right).tolist()
    last = scores[-1]
    assert (last.n_done, last.n_answers, last.chance) == (3, 9, 1 / 3)
    low, high = last.interval
    assert 0 <= low <= last.share <= high <= 1


def test_files(tmp_path: Path) -> None:
    text = "The cat\n1\nsat\nran off\nsang a song\nx\nA\n3\na\nb\nc\nd\n"
    assert hellaswag_tasks(text)[0] == TASKS[0] and hellaswag_tasks(text)[1].right == [0, 0, 0, 1]
    for bad in ("a\nb\n", text.replace("1", "7")):
        with pytest.raises(BatchError, match="HellaSwag"):
            hellaswag_tasks(bad)

    def packed(s: str) -> bytes:
        return struct.pack("<I", len(s)) + s.encode()

    def answers(t: Task) -> bytes:
        return (
            struct.pack("<I", len(t.answers))
            + b"".join(map(packed, t.answers))
            + struct.pack(f"<{len(t.right)}I", *t.right)
        )

    data = struct.pack("<4I", 3, 0, 0, 0) + b"".join(packed(t.question) + answers(t) + answers(t) for t in TASKS)
    assert choice_tasks(data) == TASKS
    for bad in (data[:-1], b"", b"\xff" * 8, data[:4] + data[20:]):
        with pytest.raises(GGUFError, match="no file of multiple-choice tasks"):
            choice_tasks(bad)
    some = chosen_tasks(TASKS * 5, 4)
    assert len(some) == 4 and some == chosen_tasks(TASKS * 5, 4) and chosen_tasks(TASKS, 0) == TASKS


def test_what_cannot_be_scored(model: Model) -> None:
    for bad in ([], [Task("", ["a"], [1])], [Task("a", [], [])], [Task("a", ["b", ""], [1, 0])]):
        with pytest.raises(BatchError):
            score(model, bad)
    with pytest.raises(KVCacheFull, match="where the context has 32 cells"):
        list(score(model, [Task("a" * 40, ["b", "c"], [1, 0])], 32))
    assert list(score(model, [Task("a", ["b", "b"], [1, 0]), Task("a", ["b"], [1])]))[-1].n_right == 2


def test_on_the_command_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tasks.txt"
    file.write_text("The cat\n1\nsat\nran off\nsang a song\nx\n" * 3)
    args = ["perplexity", "-m", str(tiny), "-t", "1", "-f", str(file)]
    for options, code in ((["--hellaswag"], 0), (["--multiple-choice"], 1), (["--hellaswag", "--kl-divergence"], 2)):
        with pytest.raises(SystemExit) as e:
            main([*args, *options])
        assert e.value.code == code
    assert "Final result: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*args, "--hellaswag", "--hellaswag-tasks", "2", "--json"])
    assert json.loads(capsys.readouterr().out)["n_tasks"] == 2
