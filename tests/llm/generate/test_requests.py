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
from pyggml.llm.model import Model, load_model, model_digest
from pyggml.llm.samplers import SamplerChain, SamplingParams

from ...tiny_model import WriteModel

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
    with pytest.raises(ModelError, match="the model is loaded"):
        gg.batch(model, [], ram="1GiB")


def test_the_path_of_a_model_and_a_budget_for_its_weights(tiny: Path) -> None:
    requests = ["ab", {"prompt": "abc", "n_predict": 2}]
    want = list(gg.batch(load_model(tiny), requests, 4, temp=0.0, n_threads=1))
    for ram in (None, "1MiB"):
        assert list(gg.batch(tiny, requests, 4, temp=0.0, n_threads=1, ram=ram)) == want
    with pytest.raises(ModelError, match="closed"), load_model() as closed:
        closed.close()
        gg.batch(closed, ["a"])


def test_files(model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = write(tmp_path / "i.jsonl", [{"prompt": TEXTS[0], "id": 5}, "", "{no", *({"prompt": t} for t in TEXTS)])
    out = tmp_path / "o.jsonl"
    args = ["batch", "-i", str(requests), "-o", str(out), "-n", "4", "--temp", "0", "--ram", "1GiB", "--json"]
    for had, errors in ((0, 1), (7, 1)):
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
    subprocess.run([*args[:-2], "-np", "8"], check=True, stderr=subprocess.DEVNULL)
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
    assert [{k: v for k, v in r.items() if k != "by"} for r in read(out)] == read(want)


def batch(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> Any:
    """What `pyggml batch` says: its JSON, or the error."""
    with pytest.raises(SystemExit) as e:
        main(["batch", "-t", "1", "--json", *map(str, args)])
    said = capsys.readouterr()
    assert e.value.code == code, said.err
    return said.err if code else json.loads(said.out)


def test_results_of_another_model_or_other_options_are_refused(
    tiny: Path, write_model: WriteModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, out = write(tmp_path / "i.jsonl", ["a", "b"]), tmp_path / "o.jsonl"
    requests.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    args = ("-i", requests, "-o", out, "-n", 2, "--temp", 0)
    assert batch(capsys, *args, "-m", tiny)["n_predicted"] == 4
    before = out.read_bytes()
    by = read(out)[0]["by"]
    assert by == {"model": model_digest(tiny), "options": {"n_predict": 2, "temp": 0.0}}
    other = write_model(kv={"llama.rope.freq_base": 500.0})
    for more, says in (
        (("-m", other), "by another model"),
        (("-m", tiny, "--override-kv", "llama.rope.freq_base=float:500"), "by another model"),
        (("-m", tiny, "-n", 3), "with n_predict 2, which is 3 now"),
        (("-m", tiny, "-r", "x"), "with stop its default, which is ['x'] now"),
        (("-m", tiny, "--samplers", "top_k"), "with samplers its default"),
        (("-m", tiny, "-ctk", "f32"), "with type_k its default"),
        (("-m", tiny, "-l", "12-1"), "with logit_bias its default"),
    ):
        assert f"line 1 was answered otherwise: {says}" in batch(capsys, *args, *more, code=1)
        assert out.read_bytes() == before
    requests.write_text('{"prompt": "a"}\n{"prompt": "c"}\n')
    assert "line 2 is no result of request 2" in batch(capsys, *args, "-m", tiny, code=1)
    assert out.read_bytes() == before
    for same in (("-np", 1), ("--no-mmap",), ("-fa",)):  # what no answer depends on
        requests.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
        assert batch(capsys, *args, "-m", tiny, *same)["resumed_at"] == 2


def test_a_model_is_told_from_another_by_what_it_holds(write_model: WriteModel, tmp_path: Path) -> None:
    one = write_model()
    first = model_digest(one)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(one.read_bytes())
    assert model_digest(copy) == first
    data = bytearray(one.read_bytes())
    data[len(data) * 3 // 4 :] = bytes(len(data) - len(data) * 3 // 4)  # other weights, and the same metadata
    copy.write_bytes(data)
    assert model_digest(copy) != first != model_digest(one, {"llama.rope.freq_base": 5.0})


def test_errors_are_counted_and_tried_again(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line that was mended, one that was not, and a kill while they are tried again."""
    bad = ['{"promt": "a"}', '{"prompt": "b", "temp": -1}']
    requests, out = tmp_path / "i.jsonl", tmp_path / "o.jsonl"
    args = ("-m", tiny, "-i", requests, "-o", out, "-n", 2, "--temp", 0)
    requests.write_text("\n".join(['{"prompt": "x"}', *bad, '{"prompt": "y"}', ""]))
    assert batch(capsys, *args)["errors"] == 2
    first = out.read_bytes().splitlines()
    assert batch(capsys, *args)["errors"] == 2 and out.read_bytes().splitlines() == first
    requests.write_text("\n".join(['{"prompt": "x"}', '{"prompt": "a"}', bad[1], '{"prompt": "y"}', ""]))
    assert "line 2 is no result" in batch(capsys, *args, code=1)
    record = read(out)[0]["by"]
    with RequestFile(requests, out, record, retry=True) as file:
        assert file.n_done == 2
        results = file.run(lambda todo: gg.batch(load_model(tiny), todo, 2, temp=0.0))
        assert next(results)["n_predicted"] == 2
        results.close()  # as a kill: the second try stands at the end
    assert [r["index"] for r in read(out)] == [0, 1, 2, 3, 1]
    assert batch(capsys, *args) == {"requests": 4, "resumed_at": 4, "errors": 1, "n_predicted": 0}
    assert [r["index"] for r in read(out)] == [0, 1, 2, 3] and "error" in read(out)[2]
    out.chmod(0o600)
    assert batch(capsys, *args, "--retry-errors")["errors"] == 1
    assert [r.get("n_predicted") for r in read(out)] == [2, 2, None, 2] and out.stat().st_mode & 0o777 == 0o600
    lines = out.read_bytes().splitlines()
    assert (lines[0], lines[3]) == (first[0], first[3])


@pytest.mark.parametrize("text", ["notes", "a\nb", '{"promt": 5}', '{"index": 0}\nnotes', "\0" * 20])
def test_a_file_that_is_none_of_results_stays(text: str, tmp_path: Path) -> None:
    requests, out = write(tmp_path / "i.jsonl", ['{"prompt": "a"}'] * 3), tmp_path / "notes.txt"
    out.write_text(text)
    with pytest.raises(BatchError, match="name another file"):
        RequestFile(requests, out)
    assert out.read_text() == text


class _Fails(dict[str, Any]):
    """A request that cannot be read, in a way that nobody thought of."""

    def __init__(self, e: Exception) -> None:
        super().__init__(prompt="a")
        self._e = e

    def items(self) -> Any:
        raise self._e


def test_a_line_that_is_bad_in_any_way_ends_itself_alone(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(tiny)
    chosen = SamplerChain.sample

    def sample(self: SamplerChain, logits: Any) -> int:
        if self.params.seed == 13:
            raise SamplerError("no token is left")
        if self.params.seed == 14:
            raise MemoryError
        return chosen(self, logits)

    monkeypatch.setattr(SamplerChain, "sample", sample)
    bad: list[tuple[Any, str]] = [
        ({"prompt": "a", "seed": 13}, "no token is left"),
        ({"prompt": "a", "seed": 14}, "not enough memory"),
        ({"prompt": "a\ud800"}, ""),
        (_Fails(ZeroDivisionError("why")), "ZeroDivisionError: why"),
        (_Fails(MemoryError()), "not enough memory"),
        ({"prompt": "a", "temp": 1, "temperature": 1}, "another name of temp"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"5": True}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ]
    for n_parallel in (1, 2, 50):
        requests = ["x", *(r for b, _ in bad for r in (b, "The"))]
        results = list(gg.batch(model, requests, 2, temp=0.0, n_parallel=n_parallel))
        assert results[0]["n_predicted"] == 2
        for (request, says), r, good in zip(bad, results[1::2], results[2::2], strict=True):
            assert says in r["error"] if says else "error" in r or "text" in r, request
            assert "text" not in good or good["n_predicted"] == 2


def test_options_as_json_and_others_name_them(tiny: Path) -> None:
    model = load_model(tiny)
    requests = [
        {"prompt": "a", "n_predict": 3, "temp": 0, "logit_bias": {"123": 100}},
        {"prompt": "a", "max_tokens": 3, "temperature": 0, "logit_bias": {123: 100}},
        {"prompt": "a", "max_tokens": 3, "temperature": 0, "logit_bias": {"123": 100, "7": False}},
    ]
    assert [r["text"] for r in gg.batch(model, requests)] == ["xxx"] * 3
    assert SamplingParams(logit_bias={"7": False}).logit_bias == {7: float("-inf")}  # pyright: ignore


def test_results_are_json(model: Model, tmp_path: Path) -> None:
    """Numbers that JSON does not have are an error of their line, in requests and in results."""
    lines = ['{"prompt": "a", "id": NaN}', '{"prompt": "a", "id": [-Infinity]}', '{"prompt": "a", "temp": 1e999}']
    requests = write(tmp_path / "i.jsonl", [*lines, '{"prompt": "a"}', '{"prompt": "b", "id": 1e300}'])
    out = tmp_path / "o.jsonl"

    def answers(todo: list[Any]) -> Any:
        for result in gg.batch(model, todo, 1):
            yield {**result, "embedding": [float("nan")]} if result["index"] == 3 else result

    with RequestFile(requests, out) as file:
        list(file.run(answers))
        assert file.n_errors == 4

    def refuse(text: str) -> Any:
        raise AssertionError(text)

    results = [json.loads(line, parse_constant=refuse) for line in out.read_text().splitlines()]
    assert ["no finite number" in r.get("error", "") for r in results] == [True] * 3 + [False] * 2
    assert "not finite" in results[3]["error"] and results[4]["id"] == 1e300
