"""Nodes of a prompt, and edits of them."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import pyggml as gg
from pyggml import limits


def ask(client: TestClient, *nodes: str, **body: Any) -> dict[str, Any]:
    r = client.post("/v1/activations", json={"prompt": "A dog and a cat", "nodes": nodes, **body})
    assert r.status_code == 200, r.text
    (n,) = struct.unpack("<Q", r.content[:8])
    header, data = json.loads(r.content[8 : 8 + n]), r.content[8 + n :]
    found: dict[str, Any] = {"tokens": json.loads(header.pop("__metadata__")["tokens"])}
    for name, t in header.items():
        begin, end = t["data_offsets"]
        found[name] = np.frombuffer(data[begin:end], {"F32": "<f4", "F16": "<f2", "I32": "<i4"}[t["dtype"]])
        found[name] = found[name].reshape(t["shape"])
    return found


def test_nodes(client: TestClient, tales: gg.Model) -> None:
    got = ask(client, "l_out-*", "kq_soft_max_ext-1", "result_output")
    ids = tales.tokenize("A dog and a cat", True, True)
    ctx = tales.new_context(64, n_threads=1)
    with tales.tap("l_out-*", "kq_soft_max_ext-1", "result_output") as t:
        ctx.decode(ids)
    assert got.pop("tokens") == ids and got.keys() == t.keys()
    for name, array in got.items():
        if name.startswith("l_out"):
            np.testing.assert_array_equal(array, t[name][0])
    assert got["l_out-0"].shape == (len(ids), tales.hparams.n_embd) and got["kq_soft_max_ext-1"].ndim == 3
    r = client.post("/v1/activations", json={"prompt": ids, "nodes": ["l_out-1"], "format": "npy"})
    np.testing.assert_allclose(np.load(io.BytesIO(r.content)), got["l_out-1"], atol=1e-5)  # scores are watched there
    assert client.post("/completion", json={"prompt": "a", "n_predict": 2}).status_code == 200


def test_edits(client: TestClient, tales: gg.Model) -> None:
    plain = ask(client, "l_out-1", "l_out-2")
    row = np.linspace(-1, 1, tales.hparams.n_embd).tolist()
    edits = [{"node": "l_out-1", "tokens": [2], "scale": 0.5, "add": row}]
    got = ask(client, "l_out-2", edits=edits)["l_out-2"]
    with tales.edit("l_out-1", lambda x: halved(x, row)), tales.tap("l_out-2") as t:
        tales.new_context(64, n_threads=1).decode(plain["tokens"])
    np.testing.assert_array_equal(got, t["l_out-2"][0])
    np.testing.assert_array_equal(got[:2], plain["l_out-2"][:2])
    assert (got[2:] != plain["l_out-2"][2:]).any()
    np.testing.assert_array_equal(ask(client, "l_out-2")["l_out-2"], plain["l_out-2"])  # nothing stays


def halved(x: Any, row: list[float]) -> Any:
    x[2] = x[2] * np.float32(0.5) + np.array(row, np.float32)
    return x


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"nodes": []}, "names of nodes"),
        ({"nodes": ["nothing"]}, "no node is called"),
        ({"nodes": ["l_out-*"], "format": "npy"}, "one node"),
        ({"nodes": ["l_out-0"], "format": "zip"}, "safetensors or npy"),
        ({"nodes": ["l_out-0"], "prompt": []}, "empty"),
        ({"nodes": ["l_out-0"], "prompt": ["a", "b"]}, "one text"),
        ({"nodes": ["l_out-0"], "prompt": [[1], [2]]}, "one text"),
        ({"nodes": ["l_out-0"], "prompt": [1] * 2000}, "exceeds"),
        ({"nodes": ["l_out-0"], "prompt": [1, 99999]}, "vocabulary"),
        ({"nodes": ["l_out-0"], "edits": [{"node": "nothing", "add": 1}]}, "no node is called"),
        ({"nodes": ["l_out-0"], "edits": [{"node": "l_out-0", "tokens": [99]}]}, "l_out-0"),
        ({"nodes": ["l_out-0"], "edits": [{"node": "l_out-0", "add": [1.0, 2.0]}]}, "l_out-0"),
        ({"nodes": ["l_out-0"], "edits": [{"add": 1}]}, "node"),
    ],
)
def test_what_is_wrong(client: TestClient, body: Any, says: str) -> None:
    r = client.post("/v1/activations", json={"prompt": "A dog", **body})
    assert r.status_code == 400 and says in r.json()["error"]["message"], r.text


def test_the_size_of_an_answer_is_bounded(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ACTIVATION_BYTES", 1000)
    r = client.post("/v1/activations", json={"prompt": "A dog", "nodes": ["*"]})
    assert r.status_code == 400 and "1000 bytes" in r.json()["error"]["message"]


def test_names_and_edits_are_bounded(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name is compared with each node, and an edit copies its nodes, while all other texts wait."""
    edits = [{"node": "l_out-0", "scale": 1}]
    for body in (
        {"nodes": ["x"] * 300},
        {"nodes": ["l_out-0", "[" * 300]},
        {"nodes": ["l_out-0"], "edits": edits * 300},
    ):
        r = client.post("/v1/activations", json={"prompt": "A dog", **body})
        assert r.status_code == 400 and "at most 256 names" in r.json()["error"]["message"], r.text
    monkeypatch.setattr(limits, "ACTIVATION_EDITED", 1000)
    r = client.post("/v1/activations", json={"prompt": "A dog", "nodes": ["l_out-0"], "edits": edits})
    assert r.status_code == 400 and "1000 bytes" in r.json()["error"]["message"], r.text
    assert ask(client, "l_out-0")["l_out-0"].size
