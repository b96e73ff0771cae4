"""Models by name, from a small server that answers as the Hugging Face Hub does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from pyggml.tools.cli import main

import pyggml as gg
from pyggml.config import Config, read_config
from pyggml.errors import ModelError
from pyggml.hub import cached, download, find_model
from pyggml.llama_cpp import Llama
from pyggml.system.files import lock_file

from ..tiny_model import write_gguf

hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Server(ThreadingHTTPServer):
    """Repositories of files. `asked` are the requests; a file in `damaged` comes with other bytes; after `stop_after`
    bytes a download is broken off once; `sent` is the part that comes, whatever was asked for; `gated` repositories are
    refused."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        self.damaged: set[str] = set()
        self.stop_after: int | None = None
        self.sent: slice | None = None
        self.gated: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.server.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        steps = path.split("/")
        if steps[:2] == ["api", "models"] and "tree" in steps:
            files = self.server.repos["/".join(steps[2:4])]
            tree = [{"type": "file", "path": n, "size": len(d), "oid": sha256(d).hexdigest()} for n, d in files.items()]
            return self.send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        if steps[:2] == ["api", "models"]:
            return self.about("/".join(steps[2:4]))
        repo, name = "/".join(steps[:2]), "/".join(steps[4:])
        data = self.server.repos.get(repo, {}).get(name)
        if data is None:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
        etag = sha256(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if name in self.server.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        first = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0]) if "Range" in self.headers else 0
        if self.server.sent is not None:
            a, b, _ = self.server.sent.indices(len(data))
            headers["Content-Range"] = f"bytes {a}-{b - 1}/{len(data)}"
            return self.send(206, data[a:b], headers, body)
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        if body and self.server.stop_after is not None:
            n, self.server.stop_after = self.server.stop_after, None
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data[:n])
            self.wfile.flush()
            self.close_connection = True
            return None
        return self.send(206 if first else 200, data[first:], headers, body)

    def about(self, repo: str) -> None:
        if repo in self.server.gated:
            return self.send(403, b"", {"X-Error-Code": "GatedRepo"})
        if repo not in self.server.repos:
            return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
        files = self.server.repos[repo]
        siblings = [
            {"rfilename": n, "size": len(d), "blobId": "0" * 40}
            | (
                {"lfs": {"sha256": sha256(d).hexdigest(), "size": len(d), "pointerSize": 1}}
                if n.endswith("gguf")
                else {}
            )
            for n, d in files.items()
        ]
        found = {
            "_id": "1",
            "id": repo,
            "modelId": repo,
            "sha": COMMIT,
            "siblings": siblings,
            "tags": [],
            "downloads": 0,
        }
        return self.send(200, json.dumps({**found, "private": False}).encode(), {"Content-Type": "application/json"})

    def send(self, code: int, data: bytes, headers: dict[str, str], body: bool = True) -> None:
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(data)


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("hub") / "tiny.gguf").read_bytes()


@pytest.fixture
def server(model_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server()
    made.repos["user/tiny-GGUF"] = {"tiny-Q4_K_M.gguf": model_bytes, "tiny-Q8_0.gguf": model_bytes, "README.md": b"x"}
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("PYGGML_MODEL", "PYGGML_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    thread = Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    if hasattr(hub, "close_session"):
        hub.close_session()
    made.shutdown()
    made.server_close()
    thread.join()


def downloads(server: Server) -> list[str]:
    """The files that were downloaded since the last call."""
    found = [line.split("/")[-1] for line in server.asked if line.startswith("GET") and "/resolve/" in line]
    server.asked.clear()
    return found


def test_a_repository_is_a_model(server: Server, model_bytes: bytes) -> None:
    with gg.load_model("user/tiny-GGUF") as model:
        assert Path(model.path).name == "tiny-Q4_K_M.gguf" and Path(model.path).read_bytes() == model_bytes
    assert downloads(server) == ["tiny-Q4_K_M.gguf"]
    assert find_model("hf:user/tiny-GGUF:q8_0").endswith("tiny-Q8_0.gguf") and downloads(server) == []  # equal files
    for name in ("user/tiny-GGUF", "user/tiny-GGUF:Q8_0"):  # from the cache
        find_model(name)
    assert downloads(server) == []
    with pytest.raises(ModelError, match=r"no file matches .*Q5_K.*tiny-Q4_K_M.gguf, tiny-Q8_0.gguf"):
        find_model("user/tiny-GGUF:Q5_K")
    with pytest.raises(ModelError, match="no such repository on the Hub"):
        find_model("user/nothing")
    server.gated.add("user/gated")
    with pytest.raises(ModelError, match="is gated"):
        find_model("user/gated")


def test_llama_from_pretrained(server: Server) -> None:
    llm = Llama.from_pretrained("user/tiny-GGUF", "*Q8_0.gguf", n_ctx=64, n_threads=1, verbose=False)
    assert llm("a", max_tokens=2)["usage"]["completion_tokens"] <= 2 and downloads(server) == ["tiny-Q8_0.gguf"]
    with pytest.raises(ModelError, match="several files match"):
        Llama.from_pretrained("user/tiny-GGUF", "*.gguf")


def test_all_parts_of_a_model_come(server: Server) -> None:
    names = [f"Q4_K_M/big-Q4_K_M-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    server.repos["user/big"] = {name: name.encode() for name in names} | {"mmproj-F16.gguf": b"m"}
    path = Path(download("user/big"))
    assert path.name.endswith("-00001-of-00003.gguf") and len(list(path.parent.iterdir())) == 3
    assert Path(download("user/big", "mmproj*")).read_bytes() == b"m"


def test_a_folder_with_weights(server: Server) -> None:
    server.repos["user/folder"] = {"config.json": b"{}", "model.safetensors": b"w", "pytorch_model.bin": b"no"}
    path = Path(find_model("user/folder"))
    assert {p.name for p in path.iterdir()} == {"config.json", "model.safetensors"}


def test_damaged_files_are_refused(server: Server, model_bytes: bytes) -> None:
    server.damaged.add("tiny-Q8_0.gguf")
    with pytest.raises(ModelError, match="came damaged"):
        find_model("user/tiny-GGUF:Q8_0")
    server.damaged.clear()
    assert Path(find_model("user/tiny-GGUF:Q8_0")).read_bytes() == model_bytes


def test_without_a_network_the_cache_is_asked(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By HF_HUB_OFFLINE, which the library reads when it is imported; and when nobody answers."""
    path = find_model("user/tiny-GGUF")
    server.asked.clear()
    found = "import sys; from pyggml.hub import find_model; print(find_model(sys.argv[1]))"
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "cache")}
    for name, says in (("user/tiny-GGUF", path), ("user/other", "the cache does not have it")):
        command = [sys.executable, "-c", found, name]
        done = subprocess.run(command, env=offline, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert says in done.stdout and not server.asked
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert find_model("user/tiny-GGUF") == path


def test_urls(server: Server, model_bytes: bytes, tmp_path: Path) -> None:
    of_hub = f"{server.url}/user/tiny-GGUF/resolve/main/tiny-Q8_0.gguf"
    assert "models--user--tiny-GGUF" in find_model(of_hub)
    server.repos["a/b"] = {"m.gguf": model_bytes}
    url = f"http://localhost:{server.server_port}/a/b/x/y/m.gguf"  # no site of the Hub
    server.stop_after = 1000
    with pytest.raises(ModelError, match=f"1000 of {len(model_bytes)} bytes came"):
        find_model(url)
    server.asked.clear()
    path = Path(find_model(url))
    assert path.read_bytes() == model_bytes and server.asked == ["GET a/b/x/y/m.gguf bytes=1000-"]
    assert path.is_relative_to(tmp_path / "pyggml") and find_model(url) == str(path)
    with pytest.raises(ModelError, match="404"):
        find_model(f"{url}x")


def test_another_part_than_was_asked_for(server: Server, model_bytes: bytes) -> None:
    """It was put behind what was there already, and the file was taken for whole."""
    server.repos["a/b"] = {"m.gguf": model_bytes}
    url = f"http://localhost:{server.server_port}/a/b/x/y/m.gguf"
    server.stop_after = 1000
    with pytest.raises(ModelError, match="1000 of"):
        find_model(url)
    for sent in (slice(900, None), slice(5, None)):  # where 1000 and 0 were asked for
        server.sent = sent
        with pytest.raises(ModelError, match="another part came than was asked for"):
            find_model(url)
    server.sent = slice(0, 2000)  # less than was asked for
    with pytest.raises(ModelError, match=f"2000 of {len(model_bytes)} bytes came"):
        find_model(url)
    server.sent = None
    assert Path(find_model(url)).read_bytes() == model_bytes


@pytest.mark.parametrize(
    "answer",
    [
        "HTTP/1.1 200 OK\r\nContent-Length: abc\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello",
        "HTTP/1.1 200 OK\r\n" + "A: b\r\n" * 500,
        "HTTP/1.1 302 x\r\nLocation: http://[::1\r\n\r\n",
        "HTTP/1.1 302 x\r\nLocation: file:///etc/passwd\r\n\r\n",
        "hello\r\n\r\n",
    ],
)
def test_sites_that_do_not_speak_http(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they sent was an exception of Python's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            client, _ = listening.accept()
            with client:
                client.recv(1 << 16)
                client.sendall(answer.encode())

        Thread(target=serve).start()
        with pytest.raises(ModelError, match=r"a\.gguf: (is no file that can be had|302)"):
            find_model(f"http://127.0.0.1:{listening.getsockname()[1]}/a.gguf")


def test_a_site_that_does_not_answer(server: Server) -> None:
    with pytest.raises(ModelError, match=r"http://127\.0\.0\.1:9/a\.gguf: cannot be reached: .*refused"):
        find_model("http://127.0.0.1:9/a.gguf")


@pytest.mark.parametrize("url", ["http://[::1/x", "http://127.0.0.1:1/ x", "http://a\nb/"])
def test_what_is_no_url(server: Server, url: str) -> None:
    with pytest.raises(ModelError):
        find_model(url)


@pytest.mark.parametrize(("name", "kept"), [("..", "model.gguf"), ("a%00b", "ab")])
def test_a_url_whose_name_no_file_can_have(name: str, kept: str, server: Server, model_bytes: bytes) -> None:
    server.repos["a/b"] = {name: model_bytes}
    for _ in range(2):
        path = Path(find_model(f"http://localhost:{server.server_port}/a/b/x/y/{name}"))
        assert path.name == kept and path.read_bytes() == model_bytes


def test_two_processes_do_not_download_one_file(server: Server, model_bytes: bytes, tmp_path: Path) -> None:
    """The second emptied the file of the first, which then had its name while its beginning was missing."""
    server.repos["a/b"] = {"m.gguf": model_bytes}
    url = f"http://localhost:{server.server_port}/a/b/x/y/m.gguf"
    server.stop_after = 1000
    with pytest.raises(ModelError, match="1000 of"):
        find_model(url)
    (part,) = (tmp_path / "pyggml").rglob("*.part")
    with open(part, "ab") as first:
        lock_file(first.fileno())
        with pytest.raises(ModelError, match="another process is downloading it"):
            find_model(url)
    assert Path(find_model(url)).read_bytes() == model_bytes


def test_names_of_the_configuration(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "pyggml" / "config.toml"
    config.parent.mkdir()
    config.write_text('model = "small"\n[aliases]\nsmall = "user/tiny-GGUF:Q8_0"\n')
    assert find_model("small").endswith("tiny-Q8_0.gguf")
    config.write_text("model = 3")
    with pytest.raises(ModelError, match="model must be a text"):
        find_model("small")
    config.write_text("[aliases")
    with pytest.raises(ModelError, match="is no TOML"):
        find_model("small")


@pytest.mark.skipif(sys.platform == "win32", reason="homes and users of POSIX")
def test_a_home_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of another user, as after `sudo -u`; none at all, as of a container's user without a name."""
    for name in ("PYGGML_CONFIG", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError, as of a number that is no user's
    assert read_config() == Config()

    def forbidden(path: object, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("os.stat", forbidden)
    config = read_config()
    monkeypatch.undo()
    assert config == Config()


def test_the_command_line(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as e:
            main(list(args))
        assert e.value.code == code, capsys.readouterr()
        return capsys.readouterr().out

    assert run("pull", "user/tiny-GGUF:Q8_0").strip().endswith("tiny-Q8_0.gguf")
    listed = json.loads(run("list", "--json"))
    assert [m["model"] for m in listed["models"]] == ["user/tiny-GGUF"]
    assert "tiny-Q8_0.gguf" in run("list")
    line = ("generate", "-hf", "user/tiny-GGUF:Q8_0", "-p", "a", "-n", "2", "--json")
    assert len(json.loads(run(*line))["ids"]) == 2
    monkeypatch.setenv("PYGGML_MODEL", "user/tiny-GGUF")
    assert json.loads(run("info", "--json")) and "tiny-Q4_K_M.gguf" in run("list")
    config = tmp_path / "config.toml"
    monkeypatch.setenv("PYGGML_CONFIG", str(config))
    config.write_text("[options]\nthreads = 1\n[generate]\npredict = 3\n")
    assert len(json.loads(run("generate", "-p", "a", "--json"))["ids"]) == 3
    config.write_text("[generate]\npredicts = 3\n")
    run("generate", "-p", "a", code=2)
    config.write_text("[nothing]\npredicts = 3\n")
    run("generate", "-p", "a", code=2)
    config.unlink()
    run("rm", "user/tiny-GGUF:Q4_K_M")
    assert "Q4_K_M" not in run("list") and "Q8_0" in run("list")
    run("rm", "user/tiny-GGUF")
    assert run("list") == ""
    run("rm", "user/tiny-GGUF", code=1)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install pyggml\[hub\]"):
        gg.load_model("some/model")
    assert find_model("some/model.gguf") == "some/model.gguf" and not os.path.exists("some")
    with pytest.raises(ModelError, match="package huggingface_hub, which is not installed: pip install"):
        cached()
