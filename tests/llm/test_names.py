"""What a user is told: options by the names of other libraries, types by what they can be, texts that are too long."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from pyggml.tools.cli import main

import pyggml as gg
from pyggml.errors import BatchError, ModelError
from pyggml.llm.model import Model, load_model

from ..tiny_model import WriteModel

TRAINED = "more than the 128 tokens that the model was trained for"
LONG = {"temp": 0.0, "logit_bias": {123: 100.0}, "n_threads": 1}


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


def test_options_by_the_names_of_others(model: Model) -> None:
    ours = "".join(model.generate("Hello", 5, temp=0.0, typ_p=0.5))
    theirs: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0, "typical_p": 0.5}
    assert "".join(model.generate("Hello", **theirs)) == ours
    assert "".join(t.text for t in model.stream("Hello", **theirs)) == ours
    assert model.generate_batch(["Hello"], **theirs) == [ours]
    assert model.generate_batch(["Hello"], each=[theirs]) == [ours]
    for twice in ({"temp": 0, "temperature": 0}, {"n_predict": 3, "max_tokens": 5}):
        with pytest.raises(TypeError, match="another name of"):
            model.generate("Hello", **twice)
        with pytest.raises(TypeError, match="another name of"):
            model.stream_batch(["Hello"], **twice)
    with pytest.raises(TypeError, match="is 'temp' meant"):
        model.generate("Hello", tem=1)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"type_k": "f16"}, "type_k must be one of gg.F32, gg.F16, .*gg.Q8_0.*, not 'f16'"),
        ({"type_v": 1}, "type_v must be one of gg.F32"),
        ({"n_threads": "all"}, "n_threads must be a whole number, or None"),
        ({"backend": 5}, "backend must be 'cpu', 'ref'"),
        ({"defrag_thold": "x"}, "defrag_thold must be a number"),
    ],
)
def test_a_wrong_type_is_told_what_can_be(model: Model, option: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        model.new_context(**option)


def test_a_text_beyond_the_training_is_warned_of_once(model: Model) -> None:
    """At the user's line, on every way; and not before it is there."""
    ctx = model.new_context(512)
    ctx.decode([5] * 128)
    with pytest.warns(UserWarning, match=TRAINED) as said:
        ctx.decode([5])
        ctx.decode([5] * 9)
    assert len(said) == 1 and said[0].filename == __file__ and "--context-shift" in str(said[0].message)
    with pytest.warns(UserWarning, match=TRAINED) as said:
        list(model.generate("Hello", 140, **LONG))
    assert len(said) == 1
    with pytest.warns(UserWarning, match=TRAINED):
        model.generate_batch(["x", "Hello"], 140, **LONG)
    with warnings.catch_warnings(record=True) as none:
        warnings.simplefilter("always")
        list(model.generate("Hello", 100, **LONG))
        results = list(gg.batch(model, ["Hello", "a" * 200], 200, temp=0, logit_bias={123: 100}))
    assert not none and results[0]["n_prompt"] + results[0]["n_predicted"] == 128
    assert "--context-shift" in results[1]["error"]


def test_an_error_of_the_warning_leaves_the_context_as_it_is(model: Model) -> None:
    ctx = model.new_context(512)
    ctx.decode([5] * 128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=TRAINED):
            ctx.decode([5])
    assert ctx.memory.seq_pos_max(0) == 127


def test_a_rope_that_was_scaled_goes_further(tiny: Path, write_model: WriteModel) -> None:
    for factor, n in ((2.0, 256), (0.5, 128)):
        over: dict[str, Any] = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": factor}
        ctx = load_model(tiny, kv_overrides=over).new_context(512)
        ctx.decode([5] * n)
        with pytest.warns(UserWarning, match=f"more than the {n} tokens"):
            ctx.decode([5])


def test_positions_that_were_learned_have_an_end(shared: Path) -> None:
    ctx = load_model(shared / "golden" / "hf" / "gpt2").new_context(512)
    ctx.decode([5] * 256)
    with pytest.raises(BatchError, match="has learned 256 positions, and knows no others: give a shorter prompt"):
        ctx.decode([5])
    assert ctx.memory.seq_pos_max(0) == 255


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_the_command_line_warns_once(
    verb: str, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "in").write_text("Hello\n")
    with (tmp_path / "in").open() as stdin, pytest.warns(UserWarning, match=TRAINED) as said:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(SystemExit) as e:
            more = ("-p", "Hello") if verb == "generate" else ("--chat-template", "chatml")
            main([verb, "-m", str(tiny), *more, "-n", "150", "-c", "512", "-t", "1", "--temp", "0", "-l", "123+100"])
    assert e.value.code == 0 and len(said) == 1 and "x" * 150 in capsys.readouterr().out


def test_pieces_that_are_no_text_are_bytes(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In JSON no text looks like a part of a character."""
    shown: list[Any] = []
    for text in ("é", "\\xc3"):
        with pytest.raises(SystemExit):
            main(["tokenize", "-m", str(tiny), "--no-bos", "--json", text])
        shown.append(json.loads(capsys.readouterr().out)["pieces"])
    assert shown[0][-2:] == [[0xC3], [0xA9]] and shown[1][-4:] == [*"\\xc3"]
    with pytest.raises(SystemExit):
        main(["tokenize", "-m", str(tiny), "--no-bos", "é\\"])
    pieces = [line.split(" -> ")[1] for line in capsys.readouterr().out.splitlines()]
    assert pieces[-3:] == [r"b'\xc3'", r"b'\xa9'", r"'\\'"]
