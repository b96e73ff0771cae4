"""Chat: templates, a cache that is used again, commands; at a pseudo-terminal and through pipes."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyggml.tools.cli import main

from pyggml.errors import KVCacheFull, ModelError
from pyggml.llm.generate.chat import ChatSession
from pyggml.llm.generate.named_templates import TEMPLATES
from pyggml.llm.generate.templates import ChatTemplate, Message, find_template
from pyggml.llm.model import Model, load_model
from pyggml.llm.samplers import SamplerChain, SamplingParams

from ...tiny_model import WriteModel

TALK: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
PYGGML = (sys.executable, "-m", "pyggml")


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


def session(model: Model, template: str | ChatTemplate = "llama2", n_ctx: int = 512, **kwargs: object) -> ChatSession:
    if isinstance(template, str):
        template = find_template(template, {})
    params = SamplingParams(**{"temp": 0.0, "ignore_eos": True, **kwargs})
    ctx = model.new_context(n_ctx, n_threads=1)
    return ChatSession(ctx, SamplerChain(params, model.vocab), template, n_predict=6)


def test_named_templates(model: Model, tmp_path: Path) -> None:
    """Against llama.cpp's rendering of the same chats, for each of its names."""
    wanted = json.loads(Path(__file__).with_name("named_templates.json").read_text(encoding="utf-8"))
    start = [("system", " You are kind. "), ("user", " Hi there "), ("assistant", " Hello.\n")]
    more = [("tool", " 42 "), ("assistant_tool_call", "f(x)"), ("system", "Again.")]
    assert set(TEMPLATES) == set(wanted)
    for name, texts in wanted.items():
        for text, chat in zip(texts, (start, start + more), strict=True):
            messages = [{"role": role, "content": content} for role, content in [*chat, ("user", "Bye")]]
            assert find_template(name, {}).render(messages, model.vocab) == text, name
    unknown = "unknown chat template 'alpaca': there is no such file, and known are: bailing, .*, zephyr"
    with pytest.raises(ModelError, match=unknown):
        find_template("alpaca", {})
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[0].content }}!")
    for given in (str(file), file.read_text()):
        assert find_template(given, {}).render(TALK, model.vocab) == "Be brief.!"


def test_template_of_the_model(model: Model) -> None:
    source = """{% for m in messages %}
    {% if m['role'] == 'system' %}
        {{- raise_exception('no system message') }}
    {% endif %}
    {{- bos_token ~ m.role ~ ': ' ~ m.content ~ '\n' -}}
{% endfor %}"""
    template = find_template(None, {"tokenizer.chat_template": source})
    assert template.render(TALK[1:3], model.vocab) == "<s>user: Hi\n<s>assistant: Hello.\n"
    with pytest.raises(ModelError, match="no system message"):
        template.render(TALK, model.vocab)
    assert find_template(None, {}).name == "chatml"
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    for bad in ("{% for %}", "{{ x.y.z }}", "{{ messages.append(1) }}", escape):
        with pytest.raises(ModelError, match="the chat template of the model"):
            find_template(None, {"tokenizer.chat_template": bad}).render(TALK, model.vocab)


@pytest.mark.parametrize("template", ["llama2", "chatml"])
def test_only_new_tokens_are_evaluated(model: Model, template: str) -> None:
    s = session(model, template, temp=1.0, seed=3)
    for turn in range(3):
        before = s.ctx.memory.seq_pos_max(0) + 1
        text = "".join(t.text for t in s.say(f"message {turn}"))
        assert s.generation is not None and len(s.generation.ids) == 6
        held = s.ctx.memory.seq_pos_max(0) + 1
        assert held == before + len(s.generation.prompt) + 5  # the last token waits for the next turn
        assert s.messages[-1] == {"role": "assistant", "content": text}
    assert len(s.messages) == 6
    # What the context holds is the chat: fresh evaluation gives the same logits.
    fresh = model.new_context(512, n_threads=1)
    fresh.decode(s._ids[:held])  # pyright: ignore[reportPrivateUsage]
    assert abs(fresh.logits[-1] - s.ctx.logits[-1]).max() < 0.05


def test_interrupted_and_closed_replies_are_kept(model: Model) -> None:
    s = session(model)
    tokens = s.say("one")
    some = next(tokens).text + next(tokens).text
    tokens.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert s.messages[-1]["role"] == "assistant" and s.messages[-1]["content"].startswith(some)
    list(s.say("two"))
    assert [m["role"] for m in s.messages] == ["user", "assistant"] * 2


def test_full_context(model: Model) -> None:
    s = session(model, n_ctx=64)
    list(s.say("one"))
    with pytest.raises(KVCacheFull):
        list(s.say("x" * 80))
    assert len(s.messages) == 2
    s.reset()
    assert s.messages == [] and len(list(s.say("again"))) == 6


def test_system_message_survives_a_reset(model: Model) -> None:
    s = session(model)
    s.reset("Be brief.")
    list(s.say("Hi"))
    s.reset()
    assert s.messages == [{"role": "system", "content": "Be brief."}]
    s.reset("")
    assert s.messages == []


def run(*args: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PYGGML, *map(str, args)], input=stdin, capture_output=True, text=True, timeout=600)


def test_piped(tiny: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    talk = f"hello\n/help\n/nothing\n\n/save {saved}\n/timings\n/quit\nnot read\n"
    done = run("chat", "-m", tiny, "-n", 5, "-t", 1, "--temp", 0, "--logit-bias", "123+100", "-sys", "S", stdin=talk)
    assert done.returncode == 1 and done.stdout == "x" * 5 + "\n"  # the command that there is not
    assert "/reset" in done.stderr and "no command /nothing" in done.stderr and "eval time" in done.stderr
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant"] and messages[2]["content"] == "xxxxx"


def test_piped_json_and_an_error(write_model: WriteModel) -> None:
    tiny = write_model(kv={"tokenizer.chat_template": "{{ messages[-1].content }}"})
    talk = "a\n" + "b" * 300 + "\n/reset\nc\n"
    done = run("chat", "-m", tiny, "-n", 3, "-t", 1, "--temp", 0, "-l", "123+100", "--json", stdin=talk)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    error = lines.pop(1)["error"]
    assert error["type"] == "KVCacheFull" and "the prompt has 300 tokens" in error["message"] and done.returncode == 1
    assert [(o["content"], o["finish_reason"]) for o in lines] == [("xxx", "length")] * 2
    assert lines[1]["timings"]["predicted_n"] == 3
    done = run("chat", "-m", "missing.gguf", "--json")
    assert json.loads(done.stdout)["error"]["type"] == "GGUFError" and done.returncode == 1


def test_a_chat_goes_on_where_the_context_is_full(model: Model) -> None:
    """With context shift: what the cache holds is what the session says, and the system message stays."""
    ctx = model.new_context(96, n_threads=1)
    chain = SamplerChain(SamplingParams(temp=0.0, ignore_eos=True), model.vocab)
    template = ChatTemplate("t", "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    s = ChatSession(ctx, chain, template, "Be brief.", n_predict=10, context_shift=True)
    start = model.tokenize("Be brief.\n")
    for i in range(12):
        message = f"message {i} " + "y" * (3 * i)
        assert len(list(s.say(message))) == 10
        held = ctx.memory.seq_pos_max(0) + 1
        assert held == ctx.memory.used and len(s._ids) - held in (0, 1)
        assert s._ids[: len(start)] == start
        assert message[len(message) // 2 :] in model.detokenize(s._ids).replace("▁", " ")
    assert s.generation is not None and s.generation.long is not None
    with pytest.raises(KVCacheFull, match="the prompt has 1"):
        list(s.say("z" * 120))
    assert len(list(s.say("on"))) == 10
    s.template = ChatTemplate("t2", "{{ messages[0].content }}|{% for m in messages[1:] %}{{ m.content }}+{% endfor %}")
    assert len(list(s.say("another form"))) == 10  # all is evaluated anew, but for what does not fit
    assert "another form+" in model.detokenize(s._ids).replace("▁", " ")


class Terminal:
    """A program at a pseudo-terminal."""

    def __init__(self, *args: object, **env: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [*PYGGML, *map(str, args)], {**os.environ, **env})
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 600.0) -> None:
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"no {text!r} in {self.seen!r}"
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.fd, 4096).decode("utf-8", "replace")
                except OSError:  # the program is gone
                    assert text in self.seen, f"no {text!r} in {self.seen!r}"
        self.seen = self.seen[self.seen.index(text) + len(text) :]

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def exit_code(self) -> int:
        while select.select([self.fd], [], [], 600)[0]:
            try:
                self.seen += os.read(self.fd, 4096).decode("utf-8", "replace")
            except OSError:
                break
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.fd)
        return code


def test_chat_at_a_terminal(tiny: Path) -> None:
    t = Terminal("chat", "-m", tiny, "-t", 1, "--temp", 0, "-l", "123+100", "--ignore-eos", "-c", 20000, "-n", 19000)
    t.wait_for("> ")
    t.type("hello\n")
    t.wait_for("hello\r\n")
    t.wait_for("xxxx")
    t.type("\x03")  # ends the reply, not the program
    t.wait_for("> ")
    t.type("/help\n")
    t.wait_for("/save")
    t.wait_for("> ")
    t.type("/quit\n")
    assert t.exit_code() == 0


def test_a_python_without_readline(tiny: Path, tmp_path: Path) -> None:
    """Windows' has none, nor have some that people compile."""
    (tmp_path / "readline.py").write_text("raise ImportError")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    t = Terminal("chat", "-m", tiny, "-t", 1, "-c", 100, "-n", 3, PYTHONPATH=path)
    t.wait_for("> ")
    t.type("/quit\n")
    assert t.exit_code() == 0


def test_messages_of_several_lines_and_commands(tiny: Path, tmp_path: Path) -> None:
    bias = ("--temp", 0, "-l", "123+100", "--ignore-eos", "-n", 3, "-t", 1)
    state = {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "INPUTRC": "/dev/null"}
    t = Terminal("chat", "-m", tiny, "-c", 400, *bias, **state)
    t.wait_for("> ")
    t.type("one\\\n")
    t.wait_for(". ")
    t.type("two\n")
    t.wait_for("xxx")
    t.wait_for("> ")
    t.type("\x1b[200~three\nfour\x1b[201~\n")  # pasted
    t.wait_for("xxx")
    t.wait_for("> ")
    for line in ("/undo", "/regen", f"/save {tmp_path / 'chat.json'}"):
        t.type(f"{line}\n")
        t.wait_for("> ")
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert [m["content"] for m in saved] == ["one\ntwo", "xxx"]
    t.type("seven\n")
    t.wait_for("xxx")
    t.wait_for("> ")
    t.type(f"/load {tmp_path / 'chat.json'}\n")
    t.wait_for("> ")
    t.type(f"/save {tmp_path / 'again.json'}\n")
    t.wait_for("> ")
    assert json.loads((tmp_path / "again.json").read_text()) == saved
    t.type("\x03")  # while it waits: the end
    assert t.exit_code() == 0
    assert "three" in (tmp_path / "pyggml" / "chat_history").read_text()


def test_undo_and_again(model: Model) -> None:
    ctx = model.new_context(200, n_threads=1)
    s = ChatSession(ctx, SamplerChain(SamplingParams(temp=0.0), model.vocab), find_template(None, {}), n_predict=4)
    first = "".join(t.text for t in s.say("one"))
    list(s.say("two"))
    assert "".join(t.text for t in s.again()) == s.messages[-1]["content"] and len(s.messages) == 4
    assert s.undo() == {"role": "user", "content": "two"} and len(s.messages) == 2
    assert "".join(t.text for t in s.again()) == first
    s.load([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])
    assert len(s.messages) == 2
    for bad in ("x", [1], [{"role": "user"}], [{"role": "user", "content": "y"}, {"role": "system", "content": "x"}]):
        with pytest.raises(ModelError, match="message"):
            s.load(bad)
    s.reset("")
    with pytest.raises(ModelError, match="no message yet"):
        s.again()


def test_generate_at_a_terminal_and_ctrl_c(tiny: Path) -> None:
    bias = ("--temp", 0, "-l", "123+100", "--ignore-eos", "-t", 1)
    t = Terminal("generate", "-m", tiny, "-p", "Hello", "-n", 5, *bias)
    t.wait_for("Helloxxxxx\r\n")
    t.wait_for("eval time")
    assert t.exit_code() == 0
    t = Terminal("generate", "-m", tiny, "-p", "Hello", "-n", 20000, *bias)
    t.wait_for("Helloxxxxx")
    t.type("\x03")
    t.wait_for("total time")
    assert t.exit_code() == 130


def test_interrupted_json_is_whole(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[int] = []

    def accept(_: SamplerChain, token: int) -> None:
        taken.append(token)
        if len(taken) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(SamplerChain, "accept", accept)
    with pytest.raises(SystemExit) as e:
        main(["generate", "-m", str(tiny), "-p", "Hello", "--ignore-eos", "-l", "123+100", "-t", "1", "--json"])
    got = json.loads(capsys.readouterr().out)
    assert e.value.code == 130 and got["finish_reason"] == "interrupted" and got["text"] == "x" * len(got["ids"])


def test_ctrl_c_in_the_middle_of_the_prompt(tiny: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text("a" * 30000)
    args = ("generate", "-m", tiny, "-f", long, "-n", "5", "-t", "1")
    with subprocess.Popen([*PYGGML, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        assert p.stdout is not None
        assert p.stdout.read(30000) == b"a" * 30000  # shown before it is evaluated, which takes seconds
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=600)
    assert p.returncode == 130 and out == b"\n" and b"total time" in err
