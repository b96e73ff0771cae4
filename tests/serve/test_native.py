"""llama-server's own endpoints."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import pyggml as gg
from pyggml import limits
from pyggml.serve import ServeOptions, create_app

from ..llm.adapters.make import halves, write_lora
from ..tiny_model import WriteModel
from .conftest import events, slots_path

PROMPT = "Once upon a time"


def ask(client: TestClient, path: str = "/completion", **body: Any) -> Any:
    r = client.post(path, json={"prompt": PROMPT, "n_predict": 8, "temperature": 0, **body})
    assert r.status_code == 200, r.text
    return r.json()


def test_a_completion_is_what_the_model_generates(client: TestClient, tales: gg.Model) -> None:
    got = ask(client, n_probs=2, return_tokens=True)
    assert got["content"] == "".join(tales.generate(PROMPT, 8, temp=0.0, n_threads=1))
    assert got["stop"] is True and got["stop_type"] == "limit" and got["model"] == "tales"
    assert (got["tokens_predicted"], got["tokens_evaluated"]) == (8, 6) and len(got["tokens"]) == 8
    probs = got["completion_probabilities"]
    assert [p["id"] for p in probs] == got["tokens"] and all(len(p["top_logprobs"]) == 2 for p in probs)
    assert bytes(probs[0]["bytes"]).decode() == probs[0]["token"] and probs[0]["logprob"] < 0
    settings = got["generation_settings"]
    assert settings["temperature"] == 0 and settings["n_predict"] == 8 and settings["top_k"] == 40
    assert "lookup" not in settings  # the names are llama-server's
    assert {"prompt_n", "prompt_ms", "predicted_n", "predicted_per_second", "cache_n"} <= got["timings"].keys()


def test_a_stream_has_the_same_text(client: TestClient) -> None:
    r = client.post("/completion", json={"prompt": PROMPT, "n_predict": 8, "temperature": 0, "stream": True})
    assert r.headers["content-type"].startswith("text/event-stream")
    parts = [json.loads(e) for e in events(r.text)]
    assert "".join(p["content"] for p in parts) == ask(client)["content"]
    assert [p["tokens_predicted"] for p in parts] == [*range(1, 9), 8]
    assert [p["stop"] for p in parts] == [False] * 8 + [True] and parts[-1]["stop_type"] == "limit"


def test_prompts_in_all_forms(client: TestClient, tales: gg.Model) -> None:
    plain, ids = ask(client)["content"], tales.tokenize(PROMPT)
    assert ask(client, prompt=ids)["content"] == ask(client, prompt={"prompt_string": PROMPT})["content"] == plain
    assert ask(client, prompt=[ids[0], *ids[1:-1], ids[-1]])["content"] == plain
    several = ask(client, prompt=[PROMPT, ids, "A dog"])
    assert [x["index"] for x in several] == [0, 1, 2] and [x["content"] for x in several[:2]] == [plain, plain]
    mixed = ask(client, prompt=[1, " Once", ids[-1]], n_predict=1)
    assert mixed["tokens_evaluated"] == 2 + len(tales.tokenize(" Once", False))
    assert len(ask(client, n_cmpl=3, temperature=1)) == 3


def test_ends(client: TestClient, tales: gg.Model) -> None:
    text = ask(client, n_predict=20)["content"]
    word = text.split()[3]
    got = ask(client, n_predict=20, stop=[word])
    assert got["stop_type"] == "word" and got["stopping_word"] == word and text.startswith(got["content"])
    nothing = ask(client, n_predict=0)
    assert nothing["content"] == "" and nothing["tokens_predicted"] == 0 and nothing["stop_type"] == "limit"
    full = ask(client, n_predict=-1, ignore_eos=True)
    assert full["tokens_predicted"] + full["tokens_evaluated"] in (512, 513) and full["stop_type"] == "limit"
    lines = ask(client, n_predict=100, t_max_predict_ms=1, logit_bias=[[tales.vocab.nl, 1000]])
    assert lines["stop_type"] == "limit" and lines["tokens_predicted"] < 100


def test_probabilities_after_the_samplers(client: TestClient) -> None:
    """They are those of the tokens that could be chosen: here two, or with temperature 0 one."""
    for more, n in (({"top_k": 2, "temperature": 1, "top_p": 1, "min_p": 0}, 2), ({}, 1)):
        got = ask(client, n_probs=4, post_sampling_probs=True, **more)["completion_probabilities"]
        assert len(got) == 8
        for x in got:
            assert 0 < x["prob"] <= 1 and len(x["top_probs"]) == n and "logprob" not in x
            assert abs(sum(t["prob"] for t in x["top_probs"]) - 1) < 1e-6
            assert x["id"] in [t["id"] for t in x["top_probs"]]
    kept = ask(client, n_probs=9, post_sampling_probs=True, temperature=1, top_p=1e-6, min_p=1, min_keep=3, n_predict=1)
    assert len(kept["completion_probabilities"][0]["top_probs"]) == 3


def test_a_line_that_is_not_indented_ends_a_text(client: TestClient) -> None:
    body = {"n_indent": 2, "n_predict": 40}
    text = ask(client, grammar='root ::= "a\\n  b\\n\\n  c\\n d" "e"*', **body)
    assert text["content"].endswith("\n  c\n d") and text["stop_type"] == "limit" and text["tokens_predicted"] < 40


def test_samplers_follow_the_record(client: TestClient) -> None:
    first, second = ([ask(client, temperature=1.2, seed=s)["content"] for s in (1, 2, 1)] for _ in "ab")
    assert first == second and first[0] == first[2] != first[1]
    assert json.loads(ask(client, json_schema={"enum": ["aye"]}, n_predict=20)["content"]) == "aye"
    assert ask(client, grammar='root ::= "no"', n_predict=9)["content"] == "no"
    assert ask(client, temp=0, temperature=None)["content"] == ask(client)["content"]
    assert ask(client, n_predict=8.0, top_k=-1)["content"] == ask(client)["content"]
    token = ask(client, return_tokens=True, n_predict=1)["tokens"][0]
    for bias in ([[token, False]], {str(token): -100}, [[token, -100.0]]):
        assert ask(client, logit_bias=bias, return_tokens=True, n_predict=1)["tokens"] != [token]
    fields = ["content", "generation_settings/top_k", "no/such"]
    assert ask(client, response_fields=fields).keys() == {*fields[:2]}
    settings = ask(client, n_keep=3, n_discard=2, timings_per_token=True)["generation_settings"]
    assert settings.items() >= {"n_keep": 3, "n_discard": 2, "timings_per_token": True, "lora": []}.items()


def test_the_cache_of_prompts_can_be_left_out(client: TestClient) -> None:
    ask(client)
    assert ask(client)["timings"]["cache_n"] == 5
    off = ask(client, cache_prompt=False)
    assert off["timings"]["cache_n"] == 0 and off["timings"]["prompt_n"] == 6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", "x" * 20_000),
        ("stop", ["x" * 10_000, "y" * 10_000]),
        ("grammar", f'root ::= "a"+\n#{"x" * 20_000}'),
        ("json_schema", {"description": "x" * 20_000}),
        ("dry_sequence_breakers", ["x" * 20_000]),
    ],
)
def test_long_options_are_not_repeated(client: TestClient, name: str, value: Any) -> None:
    """A request has up to 2048 answers: of one with 16 MB they would be 32 GB."""
    r = client.post("/completion", json={"prompt": PROMPT, "n_predict": 1, "n": 9, "seed": 3, name: value})
    assert r.status_code == 200 and len(r.content) < 9 * 10_000, r.text[:100]
    assert [a["generation_settings"].get(name) for a in r.json()] == [None] * 9
    assert [a["generation_settings"]["seed"] for a in r.json()] == [*range(3, 12)]
    assert len(client.get("/slots").content) < 4 * 50_000
    short = ask(client, stop=["x"])["generation_settings"]
    assert short["stop"] == ["x"] and short["grammar"] == ""


def test_tokens(client: TestClient, tales: gg.Model) -> None:
    ids = client.post("/tokenize", json={"content": "á dog", "with_pieces": True}).json()["tokens"]
    assert [t["id"] for t in ids] == tales.tokenize("á dog", False, True)
    assert b"".join(bytes(p) if isinstance(p := t["piece"], list) else p.encode() for t in ids).decode().endswith("dog")
    plain = client.post("/tokenize", json={"content": PROMPT, "add_special": True}).json()["tokens"]
    assert client.post("/tokenize", json={"content": [PROMPT, 5]}).json()["tokens"] == [*plain[1:], 5]
    assert plain == tales.tokenize(PROMPT)
    assert client.post("/detokenize", json={"tokens": plain[1:]}).json() == {"content": PROMPT}


def test_what_goes_on(client: TestClient) -> None:
    assert client.get("/health").json() == client.get("/v1/health").json() == {"status": "ok"}
    props = client.get("/props").json()
    assert props["total_slots"] == 4 and props["default_generation_settings"]["n_ctx"] == 512
    params = props["default_generation_settings"]["params"]
    assert params["top_k"] == 40 and params["lora"] == [] and params["max_tokens"] == params["n_predict"] == -1
    assert "{%" in props["chat_template"] and props["chat_template_caps"]["supports_system_role"]
    assert props["model_ftype"] == "Q8_0" and props["ui"] is True and props["ui_settings"] == {}
    about = client.get("/v1/models").json()["data"][0]
    assert about["aliases"] == ["tales"] and about["meta"]["vocab_type"] == 1 and about["meta"]["ftype"] == "Q8_0"
    ask(client)
    ask(client)  # whose prompt is kept by now, whichever tests ran before
    slots = client.get("/slots?fail_on_no_slot=1").json()
    assert [s["id"] for s in slots] == [0, 1, 2, 3] and not any(s["is_processing"] for s in slots)
    lines = dict(line.split() for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    assert float(lines["llamacpp:prompt_tokens_cached_total"]) > 0
    assert float(lines["llamacpp:tokens_predicted_total"]) >= 8 and lines["llamacpp:requests_processing"] == "0"
    assert client.post("/props", json={}).status_code == 501


def test_slots_are_saved_and_restored(client: TestClient) -> None:
    """What was evaluated before need not be evaluated again."""
    for seq in range(4):
        client.post(f"/slots/{seq}?action=erase")
    story = PROMPT + " there was a king who had three sons, and the youngest of them was a fool."
    n = ask(client, prompt=story)["tokens_evaluated"]
    saved = client.post("/slots/0?action=save", json={"filename": "s.bin"}).json()
    assert saved["n_saved"] == n + 7 and saved["n_written"] == (slots_path(client) / "s.bin").stat().st_size
    assert client.post("/slots/0?action=erase").json()["n_erased"] == n + 7
    assert ask(client, prompt=story)["timings"]["cache_n"] == 0
    for seq in range(4):
        client.post(f"/slots/{seq}?action=erase")
    restored = client.post("/slots/2?action=restore", json={"filename": "s.bin"}).json()
    assert restored["n_restored"] == n + 7 and restored["id_slot"] == 2
    assert ask(client, prompt=story)["timings"]["cache_n"] == n - 1
    for path, body in (
        ("/slots/9?action=save", {"filename": "x"}),
        ("/slots/0?action=dance", {"filename": "x"}),
        ("/slots/0?action=save", {"filename": "../x"}),
        ("/slots/0?action=restore", {"filename": "missing"}),
    ):
        assert client.post(path, json=body).status_code == 400
    (slots_path(client) / "bad").write_bytes(b"no state")
    assert client.post("/slots/0?action=restore", json={"filename": "bad"}).status_code == 400


def test_a_slot_is_saved_when_its_text_has_ended(client: TestClient) -> None:
    """No further request is needed for that."""
    with ThreadPoolExecutor(2) as pool:
        text = pool.submit(ask, client, n_predict=400, ignore_eos=True, id_slot=0)
        while not client.get("/slots").json()[0]["is_processing"]:
            assert not text.done()
        saved = pool.submit(client.post, "/slots/0?action=save", json={"filename": "later"})
        n = text.result()["tokens_cached"]
        try:
            assert saved.result(60).json()["n_saved"] == n
        finally:
            client.get("/slots")  # the pool ends, whatever was found


def test_infill(client: TestClient, write_model: WriteModel) -> None:
    r = client.post("/infill", json={"input_prefix": "def f(", "input_suffix": "return"})
    assert r.status_code == 501 and "Infill" in r.json()["error"]["message"]
    fim = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("fim_pre", "fim_suf", "fim_mid"), 10)}
    with TestClient(create_app(str(write_model(kv=fim)), ServeOptions(n_parallel=1))) as c:
        body = {"input_prefix": "ab", "input_suffix": "cd", "prompt": "e", "n_predict": 2}
        body["input_extra"] = [{"filename": "f", "text": "xy"}]
        got = c.post("/infill", json=body).json()
        plain = c.post("/infill", json={**body, "input_extra": None}).json()
    assert got["tokens_evaluated"] == plain["tokens_evaluated"] + 5  # bytes: three of a space, x, y
    assert got["tokens_predicted"] == 2


def test_a_long_suffix_and_many_prompts(write_model: WriteModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suffix is read with each prompt: 8 MB with 2048 of them would be 16 GB. Each token of a list was a prompt."""
    fim = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("fim_pre", "fim_suf", "fim_mid"), 10)}
    with TestClient(create_app(str(write_model(kv=fim)), ServeOptions(n_parallel=1))) as c:
        body = {"prompt": ["ab", "c"], "suffix": "d", "max_tokens": 1}
        got = c.post("/v1/completions", json=body).json()
        assert len(got["choices"]) == 2
        for prompt, says in (([1] * 5000, "1 to 2048 texts"), ([1, 2], "list of texts"), ([], "1 to 2048 texts")):
            r = c.post("/v1/completions", json={**body, "prompt": prompt})
            assert r.status_code == 400 and says in r.text
        monkeypatch.setattr(limits, "REQUEST_BYTES", 1000)
        r = c.post("/v1/completions", json={**body, "suffix": "d" * 501})
        assert r.status_code == 413 and "each of 2 prompts" in r.text


def test_adapters(tiny: Path, tmp_path: Path) -> None:
    """New scales count for the texts that begin then, also for one whose prompt was evaluated with the old ones."""
    model = gg.load_model(tiny)
    names = [n for n, t in model.weights.items() if t.rank > 1]
    write_lora(tmp_path / "l.gguf", halves(model, names))
    model.adapt([(model.load_lora(tmp_path / "l.gguf"), 1.0)])
    with TestClient(create_app(model, ServeOptions(n_parallel=2, lora_init_without_apply=True))) as c:
        plain = ask(c, n_probs=1, prompt="Hello there")["completion_probabilities"]
        assert c.get("/lora-adapters").json() == [{"id": 0, "path": str(tmp_path / "l.gguf"), "scale": 0.0}]
        assert c.post("/lora-adapters", json=[{"id": 0, "scale": 1.0}]).json() == {"success": True}
        assert c.get("/lora-adapters").json()[0]["scale"] == 1.0
        got = ask(c, n_probs=1, prompt="Hello there")
        assert got["timings"]["cache_n"] == 0 and got["completion_probabilities"] != plain
        assert c.post("/lora-adapters", json=[]).json() == {"success": True}
        assert ask(c, n_probs=1, prompt="Hello there")["completion_probabilities"] == plain
        for bad in ([{"id": 1, "scale": 1}], [{"id": 0}], {"id": 0}, [3]):
            assert c.post("/lora-adapters", json=bad).status_code == 400, bad
