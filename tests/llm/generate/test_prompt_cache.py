"""Session files: what of a prompt they spare, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pyggml.tools.cli import main

from pyggml.errors import StateError
from pyggml.llm.context import LlamaContext
from pyggml.llm.generate.prompt_cache import open_session, save_session
from pyggml.llm.model import Model, load_model
from pyggml.llm.state.save_load import state_bytes

A = [1, 70, 68, 80, 111]


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


def new(model: Model) -> LlamaContext:
    return model.new_context(64, n_threads=1)


@pytest.fixture
def session(model: Model, tmp_path: Path) -> Path:
    ctx = new(model)
    ctx.decode(A)
    save_session(ctx, tmp_path / "s", A)
    return tmp_path / "s"


@pytest.mark.parametrize(
    ("prompt", "n_matched", "n_past", "report"),
    [
        ([1, 70, 9, 9, 9], 2, 2, "session file matches 2 / 5 tokens of prompt"),
        ([1, 9, 9, 9], 1, 1, "low similarity to prompt (1 / 4 tokens); will mostly be reevaluated"),
        ([9, 9, 9, 9], 0, 0, "low similarity to prompt (0 / 4 tokens)"),
        (A, 5, 5, "session file has exact match for prompt!"),
        (A[:3], 3, 2, "session file has exact match for prompt!"),
        (A[:1], 1, 0, "session file has exact match for prompt!"),
        ([*A, 7], 5, 5, "session file matches 5 / 6 tokens of prompt"),
        ([], 5, 5, "using full prompt from session file"),
    ],
)
def test_a_prefix_is_reused(
    model: Model, session: Path, prompt: list[int], n_matched: int, n_past: int, report: str
) -> None:
    ctx, fresh = new(model), new(model)
    s = open_session(ctx, session, prompt)
    assert (s.prompt, s.n_matched, s.n_past) == (prompt or A, n_matched, n_past) and report in s.report
    assert ctx.memory.used == n_past == ctx.memory.seq_pos_max(0) + 1
    fresh.decode(s.prompt)
    if n_past < len(s.prompt):
        ctx.decode(s.prompt[n_past:])
    assert np.abs(ctx.logits_ith(-1) - fresh.logits_ith(-1)).max() < 2e-2
    ctx.decode([5])
    fresh.decode([5])
    assert np.abs(ctx.logits - fresh.logits).max() < 2e-2


def test_new_sessions(model: Model, tmp_path: Path) -> None:
    ctx = new(model)
    assert open_session(ctx, tmp_path / "s", A) == (A, 0, 0, "session file does not exist, will create")
    (tmp_path / "s").touch()
    assert open_session(ctx, tmp_path / "s", A)[1:3] == (0, 0)


def test_only_evaluated_tokens_are_saved(model: Model, tmp_path: Path) -> None:
    ctx = new(model)
    ctx.decode(A)
    save_session(ctx, tmp_path / "s", [*A, 8])
    assert open_session(new(model), tmp_path / "s", []).prompt == A


def test_a_state_of_other_tokens_matches_nothing(model: Model, tmp_path: Path) -> None:
    ctx = new(model)
    ctx.decode(A)
    ctx.save_state(tmp_path / "s", A[:4])
    assert open_session(ctx, tmp_path / "s", A).n_matched == 0 and ctx.memory.used == 0


def test_a_damaged_file_changes_nothing(model: Model, session: Path) -> None:
    session.write_bytes(session.read_bytes()[:-1])
    ctx = new(model)
    ctx.decode([4])
    before = state_bytes(ctx)
    with pytest.raises(StateError, match="truncated"):
        open_session(ctx, session, A)
    assert state_bytes(ctx) == before
    with pytest.raises(StateError, match="cannot read"):
        open_session(ctx, session.parent, A)


def test_command_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s"

    def run(*args: str) -> tuple[list[int], list[int], int, str]:
        with pytest.raises(SystemExit) as e:
            main(["generate", "-m", str(tiny), "--temp", "0", "-n", "6", "--json", "-t", "1", *args])
        out, err = capsys.readouterr()
        assert e.value.code in (0, None), err
        d = json.loads(out)
        return d["prompt_ids"], d["ids"], d["timings"]["prompt_n"], err

    cache = ("--prompt-cache", str(path))
    prompt, ids, n, err = run("-p", "abcdef", *cache)
    assert n == len(prompt) and "does not exist, will create" in err
    assert run("-p", "abcdef", *cache)[1:3] == (ids, 0)
    _, _, n, err = run("-p", "abcxyz", *cache, "--prompt-cache-ro")
    assert n == 3 and f"matches {len(prompt) - 3} / {len(prompt)} tokens of prompt" in err
    before = path.read_bytes()
    assert run("-p", "abcd", *cache)[2] == 1 and path.read_bytes() == before  # a longer session is kept
    assert run("-p", "abcdef", *cache, "--prompt-cache-all")[1:3] == (ids, 0)
    before = path.read_bytes()
    got, more, n, err = run("-p", "", *cache, "--prompt-cache-ro")
    assert got == [*prompt, *ids[:-1]] and n == 0 and more[0] == ids[-1] and "using full prompt" in err
    assert path.read_bytes() == before
    _, none, _, _ = run("-p", "other", "--prompt-cache", str(tmp_path / "t"), "-n", "0")
    assert none == [] and run("-p", "other", "--prompt-cache", str(tmp_path / "t"))[2] == 0
    path.write_bytes(before[:-1])
    with pytest.raises(SystemExit) as e:
        main(["generate", "-m", str(tiny), "-p", "a", *cache])
    assert e.value.code == 1 and "truncated" in capsys.readouterr().err


def test_generation_in_a_small_context(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*args: str) -> int:
        options = ["--temp", "0", "--ignore-eos", "-c", "32", "--json", "-t", "1", "-p", "abcdef"]
        with pytest.raises(SystemExit) as e:
            main(["generate", "-m", str(tiny), *options, *args])
        assert e.value.code in (0, None)
        return len(json.loads(capsys.readouterr().out)["ids"])

    assert run("-n", "80", "--keep", "-1", "--context-shift") == 80
    assert run("-n", "80", "--no-context-shift") == run("-n", "-2") < 32
    assert run("-n", "15", "--grp-attn-n", "2", "--grp-attn-w", "8") == 15
