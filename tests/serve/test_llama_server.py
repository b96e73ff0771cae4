"""Each flag, endpoint and member of a request that llama-server has works or is refused by name, and is in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyggml.tools.llama_options import INSTEAD
from starlette.testclient import TestClient

import pyggml as gg
from pyggml.serve import ServeOptions, create_app
from pyggml.serve.anthropic import MessagesBody
from pyggml.serve.responses import ResponsesBody
from pyggml.serve.schemas import HINTS, REFUSED, Body

from ..tools.test_options import flags
from .llama_server_names import NAMES

FLAGS, ENDPOINTS, MEMBERS = (part.split("\n") for part in NAMES.read_text().strip().split("\n\n"))
DOCS = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
WORDS = {word for code in re.findall(r"`([^`\n]+)`", DOCS) for word in re.split(r"[\s,=?]+", code)}
ELSEWHERE = {"filename", "language"}  # of /slots, and of forms with a sound


def words(lines: list[str]) -> list[str]:
    return " ".join(lines).split()


def test_flags() -> None:
    theirs = set(words(FLAGS))
    assert len(theirs) > 400
    others = flags("generate") | flags("embed") | {"-h", "--help", "--version"}  # named as options of these verbs
    assert not theirs - flags("serve") - INSTEAD.keys() - others
    assert not theirs - WORDS, f"docs/server.md lacks {sorted(theirs - WORDS)}"


def test_endpoints(client: TestClient) -> None:
    """A path that exists has an answer other than 404 and 405."""
    for line in ENDPOINTS:
        method, path = line.split()
        r = client.request(method, path.replace("{id}", "0"), json={} if method == "POST" else None)
        assert r.status_code not in (404, 405), line
        if r.status_code == 501:
            assert len(r.json()["error"]["message"]) > 20, line
    missing = [line for line in ENDPOINTS if line.split()[1].replace("{id}", "N") not in WORDS]
    assert not missing, f"docs/server.md lacks {missing}"


def test_members(client: TestClient) -> None:
    theirs, known = set(words(MEMBERS)), ELSEWHERE | HINTS
    assert len(theirs) > 100
    kinds: list[type[Body]] = [Body, MessagesBody, ResponsesBody]
    for kind in kinds:
        known |= kind.model_fields.keys()
        kinds += kind.__subclasses__()
    assert not theirs - known
    assert not HINTS & (known - HINTS) and not theirs - WORDS, f"docs/server.md lacks {sorted(theirs - WORDS)}"
    for name, harmless in REFUSED.items():
        for value, code in ((harmless, 200), (None, 200), (not harmless, 501)):
            r = client.post("/completion", json={"prompt": "a", "n_predict": 0, name: value})
            assert r.status_code == code and (code == 200 or name in r.json()["error"]["message"])


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_progress_of_prompts(tales: gg.Model, path: str) -> None:
    app = create_app(tales, ServeOptions(n_ctx=128, n_parallel=1, context={"n_threads": 1, "n_batch": 16}))
    with TestClient(app) as c:
        body = {"prompt": [5] * 60, "messages": [{"role": "user", "content": "word " * 40}], "stream": True}
        for again in (False, True):
            text = c.post(path, json={**body, "n_predict": 1, "max_tokens": 1, "return_progress": True}).text
            seen = [tuple(map(int, x)) for x in re.findall(r'"total":(\d+),"cache":(\d+),"processed":(\d+)', text)]
            total, cache, done = seen[-1]
            assert cache == (total - 1 if again else 0) and done == total and (again or len(seen) > 3)
            assert [x[2] for x in seen] == sorted(x[2] for x in seen)
