"""Pictures and sounds in requests: the clients of OpenAI and Anthropic, what is refused, and transcription."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

import pyggml as gg
from pyggml import limits
from pyggml.errors import ModelError
from pyggml.llm.generate.media_chat import read_marked
from pyggml.serve import ServeOptions, create_app, media

from ..media_model import MM, TALL, WIDE, write_folder
from ..random_whisper import sound, write_whisper

pytestmark = pytest.mark.skipif(not MM.is_dir(), reason=f"no golden data in {MM}")
CHAT = "/v1/chat/completions"
GREEDY: dict[str, Any] = {"max_tokens": 5, "temperature": 0}


def served(model: gg.Model, **options: Any) -> TestClient:
    return TestClient(create_app(model, ServeOptions(n_parallel=2, context={"n_threads": 1}, **options)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gg.Model]:
    pytest.importorskip("PIL")
    with gg.load_model(write_folder(tmp_path_factory.mktemp("serve") / "m")) as m:
        yield m


@pytest.fixture(scope="module")
def client(model: gg.Model) -> Iterator[TestClient]:
    with served(model, media_path=str(MM / "images"), n_ctx=512) as c:
        yield c


def data_url(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}]


def want(model: gg.Model, *parts: Any) -> str:
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return "".join(model.generate([{"role": "user", "content": content}], 5, temp=0.0))


def test_openai(model: gg.Model, client: TestClient) -> None:
    openai = pytest.importorskip("openai")
    c = openai.OpenAI(base_url="http://testserver/v1", api_key="x", http_client=client)
    messages: Any = user("Look: ", part(data_url(WIDE)), part(data_url(TALL)), "?")
    whole = c.chat.completions.create(model="m", messages=messages, **GREEDY)
    assert whole.choices[0].message.content == want(model, "Look: ", WIDE, TALL, "?")
    n = sum(len(model.encode_image(x)) for x in (WIDE, TALL))
    assert whole.usage.prompt_tokens > n
    stream = c.chat.completions.create(model="m", messages=messages, stream=True, **GREEDY)
    assert "".join(x.choices[0].delta.content or "" for x in stream) == whole.choices[0].message.content
    again = c.chat.completions.create(model="m", messages=messages, **GREEDY)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    other = c.chat.completions.create(
        model="m", messages=user("Look: ", part(data_url(TALL)), part(data_url(WIDE)), "?"), **GREEDY
    )
    assert other.choices[0].message.content == want(model, "Look: ", TALL, WIDE, "?")
    assert other.usage.prompt_tokens_details.cached_tokens < 20  # other pictures, though the same placeholders
    text = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert text.count("<|image_pad|>") == n


def test_completion(model: gg.Model, client: TestClient) -> None:
    """llama-server's prompts with markers; several at once, some of them with pictures."""

    def data(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    def prompt(text: str, *paths: Path) -> dict[str, Any]:
        return {"prompt_string": text, "multimodal_data": [data(p) for p in paths]}

    props = client.get("/props").json()
    assert props["modalities"]["vision"] is True
    mark, body = props["media_marker"], {"n_predict": 5, "temperature": 0}
    several = [prompt(f"See {mark} and {mark}.", WIDE, TALL), "plain", prompt(f"{mark}?", TALL)]
    got = client.post("/completion", json={"prompt": several, **body}).json()
    asked = [
        read_marked(model, f"See {mark} and {mark}.", [WIDE, TALL]),
        "plain",
        read_marked(model, f"{mark}?", [TALL]),
    ]
    assert [x["content"] for x in got] == ["".join(model.generate(p, 5, temp=0.0)) for p in asked]
    for bad in (prompt("no marker", WIDE), {"prompt_string": mark, "multimodal_data": ["?"]}, prompt(mark)):
        r = client.post("/completion", json={"prompt": bad, **body})
        assert r.status_code == 400 or not bad["multimodal_data"], r.text
    assert client.post("/v1/completions", json={"prompt": several[0], **body}).status_code == 501


def test_many_pictures(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs its tower's time, before it is known whether all have room."""
    monkeypatch.setattr(limits, "REQUEST_MEDIA", 2)
    monkeypatch.setattr(gg.Model, "picture_features", lambda *_: pytest.fail("a tower ran"))
    chat = {"messages": user(*[part(data_url(WIDE))] * 3)}
    several = {"prompt": [{"prompt_string": "<__media__>", "multimodal_data": ["eA=="]}] * 3}
    for path, body in (("/v1/chat/completions", chat), ("/completion", several)):
        r = client.post(path, json=body)
        assert r.status_code == 400 and "at most 2" in r.text


def test_responses(model: gg.Model, client: TestClient) -> None:
    content = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": data_url(WIDE), "detail": "auto"},
        {"type": "input_text", "text": "b"},
    ]
    body: dict[str, Any] = {"max_output_tokens": 5, "temperature": 0}
    openai = pytest.importorskip("openai")
    c = openai.OpenAI(base_url="http://testserver/v1", api_key="x", http_client=client)
    got = c.responses.create(model="m", input=[{"role": "user", "content": content}], **body)
    assert got.output_text == want(model, "a", WIDE, "b")
    for bad in ({"type": "input_image", "file_id": "f"}, {"type": "input_file", "file_id": "f"}, {"type": "x"}):
        r = client.post("/v1/responses", json={"input": [{"role": "user", "content": [bad]}], **body})
        assert r.status_code == 400 and bad["type"] in r.json()["error"]["message"]


def test_anthropic(model: gg.Model, client: TestClient) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(WIDE.read_bytes()).decode()}
    blocks = [{"type": "text", "text": "a"}, {"type": "image", "source": source}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": blocks}], "model": "m", **GREEDY}
    got = client.post("/v1/messages", json=body).json()
    assert "".join(b.get("text", "") for b in got["content"]) == want(model, "a", WIDE, "b")
    blocks[1] = {"type": "image", "source": {"type": "url", "url": "http://localhost/x"}}
    assert client.post("/v1/messages", json=body).status_code == 403
    blocks[1] = {"type": "image", "source": {"type": "file", "file_id": "x"}}
    assert client.post("/v1/messages", json=body).status_code == 400


def test_files(model: gg.Model, client: TestClient) -> None:
    """Files of one folder, and no others; a path is never taken."""

    def post(p: Any) -> httpx.Response:
        return client.post(CHAT, json={"messages": user(p, "?"), **GREEDY})

    got = post(part("file://wide.png"))
    assert got.json()["choices"][0]["message"]["content"] == want(model, WIDE, "?")
    for url in (
        "file://../mm.npz",
        "file:///etc/passwd",
        "file://%2e%2e/mm.npz",
        "file://none.png",
        "file://",
        "file:\0",
    ):
        assert post(part(url)).status_code == 404, url
    for kind in ("image", "audio"):
        r = post({"type": kind, kind: str(WIDE)})
        assert r.status_code == 400 and "is refused" in r.json()["error"]["message"]
    with pytest.raises(ModelError, match="media_path"):
        ServeOptions(media_path="/none")


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ("data:image/png;base64,!!!", 400, "no base64"),
        ("data:image/png", 400, "comma"),
        ("data:image/png;base64,aGVsbG8=", 400, "picture"),
        ("ftp://localhost/x", 400, "begins with data:"),
        ("nothing", 400, "begins with data:"),
        ("https://localhost/x.png", 403, "--allow-url"),
        (7, 400, "url is wanted"),
    ],
)
def test_bad_pictures(client: TestClient, given: Any, code: int, says: str) -> None:
    r = client.post(CHAT, json={"messages": user(part(given)), **GREEDY})
    assert r.status_code == code and says in r.json()["error"]["message"], r.text
    assert r.json()["error"]["code"] == code


def test_sounds_are_refused_by_a_model_that_sees(client: TestClient) -> None:
    r = client.post(
        CHAT, json={"messages": user({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})}
    )
    assert r.status_code == 400 and "input_audio" in r.json()["error"]["message"]


class _Elsewhere(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("location", "ftp://127.0.0.1/x" if self.path == "/ftp" else "file:///etc/passwd")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize("elsewhere", [False, True])
def test_urls(model: gg.Model, elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture that another server has; never a file, and none that is too large."""
    handler: Any = _Elsewhere if elsewhere else partial(_Files, directory=str(MM / "images"))
    with HTTPServer(("127.0.0.1", 0), handler) as there, served(model, allow_url=True, n_ctx=512) as c:
        thread = threading.Thread(target=there.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{there.server_port}"

            def post(path: str) -> httpx.Response:
                return c.post(CHAT, json={"messages": user(part(f"{url}/{path}"), "?"), **GREEDY})

            if elsewhere:
                assert [post(x).status_code for x in ("ftp", "file")] == [400, 400]
                return
            assert post("wide.png").json()["choices"][0]["message"]["content"] == want(model, WIDE, "?")
            assert post("none.png").status_code == 400
            monkeypatch.setattr(media, "_fetches", threading.BoundedSemaphore(1))
            assert [post(x).status_code for x in ("none.png", "wide.png")] == [400, 200]
            assert media._fetches.acquire(blocking=False)  # another request waits for its picture
            r = post("wide.png")
            assert r.status_code == 503 and "are being fetched" in r.text
            media._fetches.release()
            monkeypatch.setattr(limits, "MEDIA_BYTES", 100)
            assert post("wide.png").status_code == 413
        finally:
            there.shutdown()
            thread.join()


def test_transcriptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openai, soundfile = pytest.importorskip("openai"), pytest.importorskip("soundfile")
    data = io.BytesIO()
    soundfile.write(data, sound(3), 16000, format="FLAC")
    with gg.load_model(write_whisper(tmp_path / "w")) as whisper, served(whisper) as client:
        c = openai.OpenAI(base_url="http://testserver/v1", api_key="x", http_client=client)
        made = whisper.transcribe(data.getvalue(), language="en")
        file = ("a.flac", data.getvalue())
        assert c.audio.transcriptions.create(model="w", file=file, language="en").text == made.text.strip()
        whole = c.audio.transcriptions.create(model="w", file=file, language="en", response_format="verbose_json")
        assert len(whole.segments) == len(made.segments) and whole.duration == pytest.approx(3)
        srt = c.audio.transcriptions.create(model="w", file=file, language="en", response_format="srt")
        assert srt == made.srt()
        path = "/v1/audio/transcriptions"
        for files, fields, code in (
            ({"file": ("a.wav", b"no sound")}, {}, 400),
            ({"file": file}, {"response_format": "xml"}, 400),
            ({"file": file}, {"temperature": "hot"}, 400),
            ({"file": file}, {"language": "xx"}, 400),
            ({"file": file}, {"prompt": "a " * 40_000}, 400),
            ({"other": file}, {}, 400),
        ):
            r = client.post(path, files=files, data=fields)
            assert r.status_code == code and r.json()["error"]["message"], r.text
        assert client.post(path, json={}).status_code == 400
        monkeypatch.setattr(limits, "MEDIA_BYTES", 100)
        assert client.post(path, files={"file": file}).status_code == 413


def test_a_text_model_transcribes_nothing(model: gg.Model, client: TestClient) -> None:
    assert client.post("/v1/audio/transcriptions", files={"file": ("a", b"x")}).status_code == 501


def wav(samples: Any) -> bytes:
    soundfile = pytest.importorskip("soundfile")
    out = io.BytesIO()
    soundfile.write(out, samples, 16000, format="WAV")
    return out.getvalue()


@pytest.mark.parametrize(("name", "token"), [("qwen2-audio", "<|AUDIO|>"), ("voxtral", "[AUDIO]")])
def test_a_model_that_hears(name: str, token: str, tmp_path: Path) -> None:
    """The server and `generate` with the same sound, two of them, and bytes that are no sound."""
    data = {"data": base64.b64encode(wav(sound(1.0))).decode(), "format": "wav"}
    heard = {"type": "input_audio", "input_audio": data}
    with gg.load_model(write_folder(tmp_path / "m", name, {500: token}, token)) as m, served(m, n_ctx=2048) as c:
        for n in (1, 2):
            r = c.post(CHAT, json={"messages": user("Hear: ", *[heard] * n, "?"), **GREEDY})
            asked = [{"type": "text", "text": "Hear: "}, *[{"type": "audio", "audio": wav(sound(1.0))}] * n]
            content = [*asked, {"type": "text", "text": "?"}]
            want = "".join(m.generate([{"role": "user", "content": content}], 5, temp=0.0))
            assert r.status_code == 200, r.text
            assert r.json()["choices"][0]["message"]["content"] == want
            assert r.json()["usage"]["prompt_tokens"] > n * len(m.encode_audio(wav(sound(1.0))))
        bad = {"type": "input_audio", "input_audio": {**data, "data": "aGVsbG8="}}
        r = c.post(CHAT, json={"messages": user(bad), **GREEDY})
        assert r.status_code == 400 and "is no sound that can be read" in r.json()["error"]["message"]
