"""Many prompts: results in order, errors beside them, and files that a kill does not spoil."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pyggml.tools.cli import main

import pyggml as gg
from pyggml.errors import BatchError, ModelError, SamplerError
from pyggml.llm.generate.request_file import RequestFile
from pyggml.llm.model import Model, load_model

TEXTS = ["Once upon a time", "The wolf said", "There was once a king", "The cat", "In a forest"]


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model()


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("n_parallel", [1, 3, 64])
def test_as_one_by_one(model: Model, n_parallel: int) -> None:
    lengths = [9, 2, 14, 1, 6]
    requests = [{"prompt": t, "n_predict": n, "id": t[:3]} for t, n in zip(TEXTS, lengths, strict=True)]
    results = list(gg.batch(model, requests, temp=0.0, n_parallel=n_parallel))
    for i, (r, text, n) in enumerate(zip(results, TEXTS, lengths, strict=True)):
        assert r["text"] == "".join(model.generate(text, n, temp=0.0))
        assert (r["index"], r["id"], r["n_predicted"], r["finish_reason"]) == (i, text[:3], n, "length")
        assert r["n_prompt"] == len(model.tokenize(text))


def test_options_of_a_request_go_before_those_of_all(model: Model) -> None:
    requests = [
        TEXTS[0],
        model.tokenize(TEXTS[0]),
        {"prompt": TEXTS[0], "stop": "a", "n_predict": 40},
        {"prompt": TEXTS[0], "json_schema": {"type": "boolean"}},
        {"messages": [{"role": "user", "content": "Hi"}], "temp": 0.8, "seed": 7},
    ]
    a, b, c, d, e = gg.batch(model, requests, 6, temp=0.0, stop=["zzz"])
    assert a["text"] == b["text"] == "".join(model.generate(TEXTS[0], 6, temp=0.0))
    assert c["finish_reason"] == "stop" and "a" not in c["text"]
    assert d["text"] in ("true", "false")
    assert e["n_predicted"] == 6


BAD: list[tuple[Any, str]] = [
    (17, "text or token ids"),
    (None, "text or token ids"),
    ({}, "either a prompt or messages"),
    ({"prompt": "a", "messages": []}, "either a prompt or messages"),
    ({"promt": "a"}, "no field 'promt'"),
    ({"prompt": []}, "empty"),
    ({"prompt": [3, 99999]}, "99999"),
    ({"prompt": [-1]}, "a token"),
    ({"prompt": "a", "temp": "hot"}, "temp"),
    ({"prompt": "a", "temp": -1}, "temp"),
    ({"prompt": "a", "n_predict": 0}, "n_predict"),
    ({"prompt": "a", "n_predict": 1.5}, "n_predict"),
    ({"prompt": "a", "stop": [5]}, "stop"),
    ({"prompt": "a", "grammar": "root ::= ("}, "grammar"),
    ({"prompt": "a", "json_schema": '{"$ref": "#"}'}, "no text follows it"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"messages": 5}, "messages"),
    ({"prompt": "the " * 100000}, "trained"),
]


def test_what_is_wrong_is_said_in_its_place(model: Model) -> None:
    requests = [r for request, _ in BAD for r in (request, "The cat")]
    results = list(gg.batch(model, requests, 2, n_parallel=4))
    assert [r["index"] for r in results] == list(range(len(requests)))
    for (request, text), bad, good in zip(BAD, results[::2], results[1::2], strict=True):
        assert text in bad["error"] and "text" not in bad, request
        assert good["n_predicted"] == 2
    assert list(gg.batch(model, [])) == []


@pytest.mark.parametrize("n_good", [0, 3])
def test_the_last_that_is_left_is_wrong(model: Model, n_good: int) -> None:
    for bad in ({"prompt": "x", "grammar": "root := "}, {"prompt": "x", "stop": ""}):
        *good, a, b = gg.batch(model, [*["a"] * n_good, bad, bad], 2, n_parallel=1)
        assert "error" in a and "error" in b and [r["n_predicted"] for r in good] == [2] * n_good


def test_bad_arguments(model: Model) -> None:
    with pytest.raises(BatchError, match="n_parallel"):
        gg.batch(model, [], n_parallel=0)
    with pytest.raises(BatchError, match="requests must be"):
        gg.batch(model, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SamplerError, match="temp"):
        gg.batch(model, [], temp=-1)
    with pytest.raises(ModelError, match="closed"), load_model() as closed:
        closed.close()
        gg.batch(closed, ["a"])


def test_files(model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = write(tmp_path / "i.jsonl", [{"prompt": TEXTS[0], "id": 5}, "", "{no", *({"prompt": t} for t in TEXTS)])
    out = tmp_path / "o.jsonl"
    args = ["batch", "-i", str(requests), "-o", str(out), "-n", "4", "--temp", "0", "--ram", "1GiB", "--json"]
    for had, errors in ((0, 1), (7, 0)):
        with pytest.raises(SystemExit) as e:
            main(args)
        assert e.value.code == 0
        about = json.loads(capsys.readouterr().out)
        assert (about["requests"], about["resumed_at"], about["errors"]) == (7, had, errors)
    results = read(out)
    assert [r["index"] for r in results] == list(range(7))
    assert results[0]["id"] == 5 and "no JSON" in results[1]["error"]
    assert results[0]["text"] == results[2]["text"]
    whole = out.read_bytes()
    for size in (len(whole) - 1, len(whole) - 30, 10, 0):  # a kill within a line
        out.write_bytes(whole[:size])
        with pytest.raises(SystemExit):
            main(args)
        assert [(r["of"], r.get("error")) for r in read(out)] == [(r["of"], r.get("error")) for r in results]
    capsys.readouterr()


def test_results_of_other_requests_are_not_gone_on_with(tmp_path: Path) -> None:
    requests, out = write(tmp_path / "i.jsonl", TEXTS[:1]), tmp_path / "o.jsonl"
    with pytest.raises(BatchError, match="over their requests"):
        RequestFile(requests, requests)
    assert requests.read_text() == TEXTS[0] + "\n"
    for text in ('{"index": 0, "of": "x"}\n', "5\n", "{\n", "[]\n"):
        out.write_text(text)
        with pytest.raises(BatchError, match="line 1 is no result"):
            RequestFile(requests, out)
        assert out.read_text() == text
    out.write_text("{}\n{}\n")
    with pytest.raises(BatchError, match="2 results of 1"):
        RequestFile(requests, out)
    out.unlink()
    with RequestFile(requests, out), pytest.raises(BatchError, match="another process"):
        RequestFile(requests, out)
    with RequestFile(requests, out) as file:
        assert (file.n_requests, file.n_done) == (1, 0)
    with pytest.raises(BatchError, match="no file"):
        RequestFile(requests, "/dev/null")
    with pytest.raises(OSError):
        RequestFile(tmp_path / "none", out)


def test_killed_and_run_again(tmp_path: Path) -> None:
    requests = write(tmp_path / "i.jsonl", [{"prompt": TEXTS[i % 5], "id": i} for i in range(60)])
    out = tmp_path / "o.jsonl"
    args = [sys.executable, "-m", "pyggml", "batch", "-i", str(requests), "-o", str(out), "-n", "40", "-np", "2"]
    process = subprocess.Popen(args, stderr=subprocess.DEVNULL)
    while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = out.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    assert before.count(b"\n") >= 3
    subprocess.run([*args[:-4], "-n", "3"], check=True, stderr=subprocess.DEVNULL)
    assert out.read_bytes().startswith(before)
    assert [(r["index"], r["id"]) for r in read(out)] == [(i, i) for i in range(60)]


def test_embeddings_among_texts(model: Model) -> None:
    ids = model.tokenize(TEXTS[1])
    requests: list[Any] = [
        {"input": TEXTS[0], "id": 4},
        {"prompt": TEXTS[0]},
        {"input": ids},
        *({"input": bad} for bad in (5, [99999], ["a"], [], "the " * 100000)),
        {"input": "a", "prompt": "a"},
        {"input": TEXTS[2]},
    ]
    results = list(gg.batch(model, requests, 3, temp=0.0))
    want = model.embed([TEXTS[0], ids, TEXTS[2]])
    for i, row in zip((0, 2, len(requests) - 1), want, strict=True):
        assert results[i]["embedding"] == row.tolist() and "text" not in results[i]
    assert (results[0]["id"], results[2]["n_prompt"], results[1]["n_predicted"]) == (4, len(ids), 3)
    assert all("error" in r for r in results[3:-1]) and [r["index"] for r in results] == list(range(len(requests)))


def test_killed_while_weights_are_streamed(tmp_path: Path) -> None:
    """With a budget for weights and none for the cache: the same bytes as of a run that nothing stopped or limited."""
    requests = write(tmp_path / "i.jsonl", [{"prompt": TEXTS[i % 5], "id": i} for i in range(24)])
    out, want = tmp_path / "o.jsonl", tmp_path / "want.jsonl"
    with RequestFile(requests, want) as file:
        assert len(list(file.run(lambda todo: gg.batch(load_model(), todo, 8, n_parallel=2, temp=0.0)))) == 24
    args = [sys.executable, "-m", "pyggml", "batch", "-i", str(requests), "-o", str(out), "-n", "8", "-np", "2"]
    args += ["--temp", "0", "--ram", "4.5MB", "--kv-ram", "1"]
    process = subprocess.Popen(args, stderr=subprocess.DEVNULL)
    while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert out.read_bytes().count(b"\n") >= 3
    subprocess.run(args, check=True, stderr=subprocess.DEVNULL)
    assert out.read_bytes() == want.read_bytes()
