"""What the layers would say, and where attention looks."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import pyggml as gg
from pyggml.llm.media_prompt import media_token
from pyggml.media import Features
from pyggml.serve import ServeOptions, create_app
from pyggml.serve.inside import _grid

from ..media_model import MM, TALL, WIDE, write_folder
from ..random_model import write_random

PROMPT = "A dog and a cat"


def test_the_lens_and_attention_are_those_of_the_nodes(client: TestClient, tales: gg.Model) -> None:
    r = client.post("/v1/inside", json={"prompt": PROMPT, "n_top": 3})
    assert r.status_code == 200, r.text
    got, ids = r.json(), tales.tokenize(PROMPT, True, True)
    assert [t["id"] for t in got["tokens"]] == ids
    with tales.tap("l_out-*", "kq_soft_max_ext-*") as t:
        ctx = tales.new_context(64, n_threads=1)
        ctx.decode(ids)
    head = tales.weights.get("output.weight", tales.weights["token_embd.weight"]).numpy()
    norm, eps = tales.weights["output_norm.weight"].numpy(), tales.hparams.f_norm_rms_eps
    assert [x["layer"] for x in got["layers"]] == [*range(tales.hparams.n_layer)]
    assert [x["layer"] for x in got["attention"]] == [*range(tales.hparams.n_layer)]
    for x, a in zip(got["layers"], got["attention"], strict=True):
        hidden = t[f"l_out-{x['layer']}"][0][-1].astype(np.float64)
        logits = head @ (hidden / np.sqrt((hidden * hidden).mean() + eps) * norm)
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        found = [best["logprob"] for best in x["top"]]
        np.testing.assert_allclose(found, np.sort(logprobs)[:-4:-1], atol=0.05)  # the head's kernel rounds to 8 bits
        np.testing.assert_allclose(found, logprobs[[best["id"] for best in x["top"]]], atol=0.05)
        weights = t[f"kq_soft_max_ext-{x['layer']}"][0][:, -1, : len(ids)].mean(0)
        np.testing.assert_allclose(a["weights"], weights, atol=2e-3)
    best = got["layers"][-1]["top"][0]
    assert best["id"] == int(ctx.logits[-1].argmax()) and best["token"].strip() == tales.detokenize([best["id"]])
    again = client.post("/v1/inside", json={"prompt": ids[:1]}).json()
    assert [a["weights"] for a in again["attention"]] == [[pytest.approx(1.0, abs=1e-3)]] * len(again["layers"])
    assert all(len(x["top"]) == 1 for x in again["layers"])


HEADS = {"attention.key_length": 8, "attention.value_length": 8}
WINDOWS = {"attention.sliding_window": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 50.0, **HEADS}
STATES = {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 8, "ssm.time_step_rank": 2}


@pytest.mark.parametrize(("arch", "kv"), [("gemma2", WINDOWS), ("mamba", STATES)])
def test_any_head_and_any_layers(arch: str, kv: dict[str, Any], tmp_path: Path) -> None:
    """Capped logits, windows, and layers without attention."""
    model = gg.load_model(write_random(tmp_path / "m.gguf", arch, kv, tokens=[f"t{i}" for i in range(64)]))
    ids = np.random.default_rng(1).integers(3, 64, 40).tolist()
    with TestClient(create_app(model, ServeOptions(n_ctx=128, n_parallel=1, context={"n_threads": 1}))) as c:
        got = c.post("/v1/inside", json={"prompt": ids}).json()
    ctx = model.new_context(64, n_threads=1)
    ctx.decode(ids)
    x = ctx.logits[-1].astype(np.float64)
    best = got["layers"][-1]["top"][0]
    assert best["id"] == int(x.argmax())
    assert best["logprob"] == pytest.approx(-np.log(np.exp(x - x.max()).sum()), abs=1e-3)
    assert [a["layer"] for a in got["attention"]] == ([] if arch == "mamba" else [0, 1, 2, 3])
    for a in got["attention"]:
        seen = np.array(a["weights"]) > 0
        assert sum(a["weights"]) == pytest.approx(1, abs=1e-3)
        assert seen.sum() == (8 if a["layer"] % 2 == 0 else 40) and seen[-8:].all()  # every other layer has a window


@pytest.mark.skipif(not MM.is_dir(), reason=f"no golden data in {MM}")
def test_attention_on_pictures(tmp_path: Path) -> None:
    """A chat up to the middle of an answer: where its pictures are, and how much attention their rows get."""
    pytest.importorskip("PIL")
    model = gg.load_model(write_folder(tmp_path / "m"))
    urls = [f"data:image/png;base64,{base64.b64encode(p.read_bytes()).decode()}" for p in (WIDE, TALL)]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    chat = [
        {"role": "user", "content": [*parts, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "So"},
    ]
    with TestClient(create_app(model, ServeOptions(n_parallel=1, n_ctx=256, context={"n_threads": 1}))) as c:
        r = c.post("/v1/inside", json={"messages": chat})
        assert r.status_code == 200, r.text
        got, ids = r.json(), [t["id"] for t in r.json()["tokens"]]
        assert "".join(t["token"] for t in got["tokens"]).endswith("?<assistant>So")
        assert c.post("/v1/inside", json={"prompt": "hi"}).json()["pictures"] == []
        long = [{"role": "user", "content": [parts[0], {"type": "text", "text": "word" * 400}]}]
        assert "exceeds" in c.post("/v1/inside", json={"messages": long}).json()["error"]["message"]
    grids = [model.picture_features(p).grid for p in (WIDE, TALL)]
    assert [(1, p["lines"], p["columns"]) for p in got["pictures"]] == grids
    for p in got["pictures"]:
        assert p["n"] == p["lines"] * p["columns"] and set(ids[p["first"] : p["first"] + p["n"]]) == {
            media_token(model)
        }
    with model.tap("kq_soft_max_ext-*") as t:
        model.new_context(256, n_threads=1).decode(gg.MediaPrompt(ids, [WIDE, TALL]))
    for a in got["attention"]:
        want = t[f"kq_soft_max_ext-{a['layer']}"][0][:, len(ids) - 1, : len(ids)].mean(0)
        np.testing.assert_allclose(a["weights"], want, atol=2e-3)


@pytest.mark.parametrize(
    ("places", "shape", "grid"),
    [
        ([*range(5, 14)], (1, 3, 8, 8), (3, 3)),
        ([*range(5, 14)], (9, 3, 8, 8), (0, 0)),  # tiles, which happen to have a square number of rows
        ([*range(5, 12)], (1, 3, 8, 8), (0, 0)),
        ([0, 1, 2, 4, 5, 6], (1, 3, 8, 8), (2, 3)),  # a token at the end of each line
        ([0, 1, 2, 4, 5, 7], (1, 3, 8, 8), (0, 0)),
        ([0, 1, 2, 3, 9, 10, 11, 12], (2, 3, 8, 8), (0, 0)),
        ([3], (1, 3, 8, 8), (1, 1)),
    ],
)
def test_grids(places: list[int], shape: tuple[int, ...], grid: tuple[int, int]) -> None:
    model: Any = SimpleNamespace(process_image=lambda picture: {"pixel_values": np.zeros(shape)})
    assert _grid(model, None, Features(np.zeros((len(places), 4), np.float32)), places) == grid


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": []}, "empty"),
        ({"messages": [5]}, "list of dicts"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "exceeds"),
        ({"prompt": ["a", "b"]}, "one text"),
        ({"prompt": [1] * 2000}, "exceeds"),
        ({"prompt": [1, 99999]}, "vocabulary"),
        ({"n_top": 0}, "n_top must be 1 to 20, not 0"),
        ({"n_top": 21}, "n_top"),
    ],
)
def test_what_is_wrong(client: TestClient, body: Any, says: str) -> None:
    r = client.post("/v1/inside", json={"prompt": PROMPT, **body})
    assert r.status_code == 400 and says in r.json()["error"]["message"], r.text
