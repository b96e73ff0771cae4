"""Pictures on the command line: convert, generate and chat with a small model that sees."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from pyggml.tools.cli import main

import pyggml as gg
from pyggml.errors import BatchError
from pyggml.llm.generate.chat import ChatSession
from pyggml.llm.generate.media_chat import read_marked
from pyggml.llm.generate.templates import find_template
from pyggml.llm.samplers import SamplerChain, SamplingParams

from ..media_model import MM, TALL, WIDE, write_folder

pytestmark = pytest.mark.skipif(not MM.is_dir(), reason=f"no golden data in {MM}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("PIL")
    return write_folder(tmp_path_factory.mktemp("media") / "m")


def run(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> Any:
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in args])
    got = capsys.readouterr()
    assert e.value.code == code, got.err
    return got


def ids(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[list[int], list[int]]:
    out = json.loads(run(capsys, "generate", *args, "-n", 5, "--temp", 0, "--json").out)
    return out["prompt_ids"], out["ids"]


def test_generate(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Marks stand for pictures, which come first otherwise; files and the folder give the same text."""
    prompt, made = ids(capsys, "-m", folder, "-p", "a<__media__>b<__media__>", "--image", WIDE, "--image", TALL)
    with gg.load_model(folder) as model:
        n = [len(model.encode_image(x)) for x in (WIDE, TALL)]
        assert prompt == [97, 499, *[500] * n[0], 498, 98, 499, *[500] * n[1], 498]
        media = gg.MediaPrompt(prompt, images=[WIDE, TALL])
        assert made == [t.id for t in model.stream(media, 5, temp=0.0)]
        with pytest.raises(BatchError, match="1 markers <__media__> for 2 pictures"):
            read_marked(model, "<__media__>", [WIDE, TALL])
    first, _ = ids(capsys, "-m", folder, "-p", "a", "--image", WIDE)
    assert first == [499, *[500] * n[0], 498, 97]
    run(capsys, "convert", folder, tmp_path / "m.gguf")
    run(capsys, "convert", folder, "--mmproj", tmp_path / "mm.gguf")
    files = ("-m", tmp_path / "m.gguf", "-mm", tmp_path / "mm.gguf")
    both = ids(capsys, *files, "-p", "a<__media__>b<__media__>", "--image", WIDE, "--image", TALL)
    assert both == (prompt, made)
    few, _ = ids(capsys, *files, "-p", "a", "--image", WIDE, "--image-max-tokens", 8)
    assert 0 < few.count(500) <= 8 < n[0]
    wrong = run(
        capsys, "generate", *files, "-p", "a", "--image", WIDE, "--image-min-tokens", 9, "--image-max-tokens", 8, code=1
    )
    assert "at least 9 and at most 8 tokens" in wrong.err
    refused = run(capsys, "generate", "-p", "a", "--image-min-tokens", 9, code=1)
    assert "has no tower that sees" in refused.err
    args = ("generate", "-m", folder, "-p", "a", "-n", 1)
    assert "no placeholder for audio" in run(capsys, *args, "--audio", WIDE, code=1).err
    assert "No such file" in run(capsys, *args, "--image", "/none.png", code=1).err
    assert "take no --suffix" in run(capsys, *args, "--image", WIDE, "--lookup", code=2).err
    args = ("generate", "-m", tmp_path / "m.gguf", "-p", "a", "-n", 1)
    assert "mmproj" in run(capsys, *args, "--image", WIDE, code=1).err


def test_chat(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """--image belongs to the first message, /image to the next. What is held of the chat is not evaluated again."""
    monkeypatch.setattr("sys.stdin", io.StringIO(f"What?\n/image {TALL}\n/audio\n/image /none\nAnd?\n"))
    got = run(capsys, "chat", "-m", folder, "--image", WIDE, "-n", 3, "-c", 256, "--temp", 0, "--json", code=1)
    lines = [json.loads(line) for line in got.out.splitlines()]
    replies = [line["content"] for line in lines if "content" in line]
    errors = [line["error"]["message"] for line in lines if "error" in line]
    assert len(replies) == 2 and errors == ["/audio needs a file name", "/image: there is no file /none"]
    chat: list[dict[str, Any]] = []
    with gg.load_model(folder) as model:
        for path, text, reply in ((WIDE, "What?", replies[0]), (TALL, "And?", replies[1])):
            parts = [{"type": "image", "image": path}, {"type": "text", "text": text}]
            chat.append({"role": "user", "content": parts})
            assert "".join(model.generate(chat, 3, temp=0.0)) == reply
            chat.append({"role": "assistant", "content": reply})


def test_a_session_keeps_its_pictures(folder: Path) -> None:
    with gg.load_model(folder) as model, model.new_context(256) as ctx:
        template, chain = find_template(None, model.kv), SamplerChain(SamplingParams(temp=0.0), model.vocab)
        session = ChatSession(ctx, chain, template, n_predict=2)
        list(session.say("hi", [("image", WIDE)]))
        first = len(session._ids)
        list(session.say("hi"))
        assert session.generation is not None and session.generation.prompt[0] != 499
        held = len(session._ids) - 2 - len(session.generation.prompt)
        assert held == first - 2 - len("reply>")  # the reply itself is spelled anew
        session = ChatSession(ctx, chain, template, n_predict=2, context_shift=True)
        with pytest.raises(gg.GGMLError, match="cannot be dropped"):
            list(session.say("hi", [("image", WIDE)]))
        assert not session.messages


def test_inspect(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.html"
    said = run(capsys, "inspect", "-m", folder, "-p", "hi<__media__>?", "--image", WIDE, "-o", out).out
    assert "nodes" in said and "|vision_start|" in out.read_text() and str(WIDE) in out.read_text()
