"""Several models behind one address, and one that sleeps."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from pyggml.tools.cli import app
from starlette.testclient import TestClient

import pyggml as gg
from pyggml.llm.model import default_model_path
from pyggml.serve import ServeOptions, create_app, http
from pyggml.serve.router import models_in
from pyggml.serve.service import Service

from ..tiny_model import write_gguf
from .conftest import events, http_client, post, process

ONE = {"n_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a file that is none, and what must not be taken for one."""
    path = tmp_path_factory.mktemp("models")
    shutil.copy(default_model_path(), path / "tales.gguf")
    (path / "tiny").mkdir()
    write_gguf(path / "tiny" / "model.gguf")
    (path / "broken.gguf").write_bytes(b"no model")
    (path / "mmproj-x.gguf").write_bytes(b"")
    (path / "readme.txt").write_text("x")
    (path / "empty").mkdir()
    return path


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    options = ServeOptions(models_dir=str(folder), models_max=1, n_parallel=2, n_ctx=256, context=ONE)
    with TestClient(create_app(None, options)) as c:
        yield c


def ask(client: TestClient, model: str | None, **body: Any) -> httpx.Response:
    named = {} if model is None else {"model": model}
    return client.post("/completion", json={"prompt": "Once", "n_predict": 3, "temperature": 0, **named, **body})


def states(client: TestClient) -> dict[str, str]:
    return {m["id"]: m["status"]["value"] for m in client.get("/v1/models").json()["data"]}


def test_a_body_is_read_once(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that answers gets what the router has read, and nobody else waits twice as long."""
    n, read = list[int](), http.read_json
    monkeypatch.setattr(http, "read_json", lambda text: n.append(len(text)) or read(text))  # pyright: ignore
    assert ask(client, "tales").json()["tokens_predicted"] == 3 and len(n) == 1
    assert client.post("/slots/0?action=erase&model=tales", json=[]).status_code == 200 and len(n) == 2


def test_files(folder: Path) -> None:
    assert {name: Path(path).name for name, path in models_in(str(folder)).items()} == {
        "tales": "tales.gguf",
        "tiny": "model.gguf",
        "broken": "broken.gguf",
    }
    with pytest.raises(gg.ModelError, match="no folder"):
        ServeOptions(models_dir=str(folder / "missing"))
    with pytest.raises(gg.ModelError, match="models of a folder"):
        create_app(default_model_path(), ServeOptions(models_dir=str(folder)))


def test_the_model_of_a_request_chooses(client: TestClient, tales: gg.Model) -> None:
    assert states(client) == dict.fromkeys(("broken", "tales", "tiny"), "unloaded")
    assert client.get("/health").status_code == 200 and client.get("/slots").status_code == 503
    got = ask(client, "tales").json()
    assert got["model"] == "tales" and got["content"] == "".join(tales.generate("Once", 3, temp=0.0))
    assert states(client)["tales"] == "loaded" and client.get("/slots").json()[0]["n_ctx"] == 128
    assert client.get("/v1/models").json()["data"][1]["meta"]["n_vocab"] == tales.hparams.n_vocab
    assert ask(client, None).json()["model"] == "tales"  # without a name: the one that was used last
    assert ask(client, "tiny").json()["model"] == "tiny" and states(client)["tales"] == "unloaded"
    assert client.get("/props?model=tales").json()["model_alias"] == "tales" and states(client)["tiny"] == "unloaded"
    chat = {"messages": [{"role": "user", "content": "x"}], "model": "tiny", "max_tokens": 2, "stream": True}
    assert events(client.post("/v1/chat/completions", json=chat).text)[-1] == "[DONE]"


def test_loading_by_hand(client: TestClient) -> None:
    assert client.post("/models/load", json={"model": "tiny"}).json() == {"success": True}
    assert states(client)["tiny"] == "loaded"
    assert client.post("/models/load", json={"model": "tiny"}).status_code == 400
    assert client.post("/models/unload", json={"model": "tiny"}).json() == {"success": True}
    assert client.post("/models/unload", json={"model": "tiny"}).status_code == 400
    for path in ("/models/load", "/models/unload"):
        assert client.post(path, json={"model": "../tales"}).status_code == 404
    assert "tales, tiny" in ask(client, "none").json()["error"]["message"]
    r = ask(client, "broken")
    assert r.status_code == 500 and "cannot be loaded" in r.json()["error"]["message"]
    assert (
        client.get("/models").json()["data"][0]["status"]["failed"] is True and ask(client, "tiny").status_code == 200
    )
    assert client.post("/completion", content=b"{").status_code == 400 and ask(client, 3).status_code == 404  # pyright: ignore


def test_a_busy_model_is_not_unloaded(client: TestClient) -> None:
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda i: ask(client, ("tales", "tiny")[i % 2], n_predict=30), range(12)))
    assert {r.status_code for r in got} in ({200}, {200, 503})
    assert all(r.json()["model"] == ("tales", "tiny")[i % 2] for i, r in enumerate(got) if r.status_code == 200)


def test_requests_without_json(client: TestClient) -> None:
    """A form, and what needs no body, come to a model, too."""
    assert ask(client, "tales").status_code == 200
    assert client.post("/slots/0?action=erase&model=tales").json()["id_slot"] == 0
    r = client.post("/v1/audio/transcriptions?model=tales", files={"file": ("x.wav", b"x")})
    assert "JSON" not in r.json()["error"]["message"] and r.status_code in (400, 501), r.text
    assert "JSON" in client.post("/completion?model=tales").json()["error"]["message"]


@pytest.mark.parametrize("path", ["/completion", "/tokenize", "/v1/embeddings", "/v1/inside"])
def test_a_model_that_is_unloaded_in_the_midst_of_a_request(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The client is told to try again, and is not blamed."""
    assert ask(client, "tales").status_code == 200
    plain = Service.prompts

    def prompts(self: Service, *args: Any) -> Any:
        found = plain(self, *args)
        self.thread.stop()
        self.model.close()  # as the router does
        return found

    monkeypatch.setattr(Service, "prompts", prompts)
    r = client.post(path, json={"model": "tales", "prompt": "x", "input": "x", "content": ["x"], "with_pieces": True})
    assert r.status_code in (200, 503), r.text


def test_without_autoload(folder: Path) -> None:
    options = ServeOptions(models_dir=str(folder), models_autoload=False, n_ctx=256, context=ONE, api_key="k")
    with TestClient(create_app(None, options), headers={"authorization": "Bearer k"}) as c:
        assert ask(c, "tiny").status_code == 400
        assert c.post("/models/load", json={"model": "tiny"}).status_code == 200 and ask(c, "tiny").status_code == 200
        assert (
            c.get("/v1/models/tiny").json()["status"]["value"] == "loaded" and c.get("/v1/models/no").status_code == 404
        )
        c.headers["authorization"] = "Bearer other"
        assert ask(c, "tiny").status_code == c.post("/models/load", json={"model": "tales"}).status_code == 401


def test_a_model_sleeps(folder: Path) -> None:
    """It is unloaded after a while, and the next request loads it."""
    options = ServeOptions(sleep_idle_seconds=1, n_ctx=256, n_parallel=1, context=ONE, alias="mine")
    with TestClient(create_app(folder / "tiny" / "model.gguf", options)) as c:
        first = ask(c, "any").json()
        assert first["model"] == "mine"
        while states(c) != {"mine": "sleeping"}:
            assert c.get("/slots").status_code in (200, 503)  # who only looks does not keep it awake
            time.sleep(0.05)
        assert c.get("/slots").status_code == 503
        assert ask(c, None).json()["content"] == first["content"] and states(c) == {"mine": "loaded"}


def test_on_the_command_line(folder: Path) -> None:
    with process("--models-dir", folder, "-np", 1, "-c", 128) as (url, _):
        r = post(f"{url}/completion", json={"model": "tiny", "prompt": "a", "n_predict": 2})
        assert r.status_code == 200 and r.json()["model"] == "tiny"


def write_presets(path: Path, folder: Path) -> Path:
    path.write_text(
        f"""version = 1
[*]            ; for all
c = 64
temp = 0.5
[big]
model = {folder / "tales.gguf"}
ctx-size = 128  # more
ctx-size = 192
no-slots = false
jinja = true
lookup = true
load-on-startup = on
stop-timeout = 10
[tiny]
parallel = 1
"""
    )
    return path


def test_presets(folder: Path, tmp_path: Path, tales: gg.Model) -> None:
    """A section has the options of its model, [*] those of all; the command line counts more."""
    ini = write_presets(tmp_path / "m.ini", folder)
    with (
        process("--models-preset", ini, "--models-dir", folder, "--temp", 0, "-np", 2) as (url, _),
        http_client(base_url=url) as c,
    ):
        data = {m["id"]: m for m in c.get("/models").json()["data"]}
        assert data.keys() == {"big", "broken", "tales", "tiny"} and data["big"]["status"]["value"] == "loaded"
        got = c.post("/completion", json={"model": "big", "prompt": "Once", "n_predict": 3}).json()
        assert got["content"] == "".join(tales.generate("Once", 3, temp=0.0)) and "draft_n" in got["timings"]
        sizes: dict[str, int] = {}
        for name in ("big", "tales", "tiny"):
            sizes[name] = c.get(f"/props?model={name}").json()["default_generation_settings"]["n_ctx"]
        assert sizes == {"big": 96, "tales": 32, "tiny": 32}  # of each of two slots
        r = c.post("/completion", json={"model": "tiny", "prompt": "a", "n_predict": 2})
        assert r.status_code == 200 and r.json()["generation_settings"]["temperature"] == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the presets name no model"),
        ("[a]\nmodel", "line 2 is neither"),
        ("[a]\nctx-sise = 5", "m.ini: [a]: No such option"),
        ("[a]\nn-gpu-layers = 9", "[a]: --n-gpu-layers is an option of llama.cpp. Here pyggml computes on the CPU"),
        ("[a]\njinja = perhaps", "[a]: 'perhaps' is neither true nor false"),
        ("[a]\nc = x", "'x' is not a whole number"),
        ("[a]\nc = 5", "the preset 'a' names no model"),
        ("[a]\nm = x\nreasoning-budget = -7", "-7 is below -1"),
        ("[a]\nm = x\nload-on-startup = maybe", "[a]: 'maybe' is neither"),
    ],
)
def test_presets_that_make_no_sense(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "m.ini"
    path.write_text(text)
    r = CliRunner().invoke(app, ["serve", "--models-preset", str(path), "--host", str(tmp_path / "none" / "a.sock")])
    assert r.exit_code and says in " ".join(f"{r.output} {r.exception}".split()), r.output
