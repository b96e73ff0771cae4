"""`pyggml batch` killed again and again, over hostile lines: each good line has the answer of a run that nobody
stopped, each bad one an error, whatever order kills and retries come in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ..tiny_model import write_gguf
from .workers import attack

PIECES: list[Any] = [
    *(None, 0, -1, 1e-45, 1e38, 2**31, 2**63, 1e300, True, False, "", "x", "\0", "\ud800", [], {}, [[]], {"": ""}),
    *({"5": 1}, {"5": False}, {"x": 1}, "root ::= (", 'root ::= "a"', 'root ::= "a"{9999999}', "root ::= root"),
    *({"type": "boolean"}, {"type": "string", "pattern": "^(a{1000}){1000}$"}, {"$ref": "#"}, {"enum": []}),
    *("top_k;temp", "none", ["\n"], [1, 2, 3], [-1], [99999], "the " * 2000, [{"role": "user", "content": "x"}]),
]
FIELDS = ["id", "n_predict", "stop", "temp", "top_k", "top_p", "repeat_penalty", "repeat_last_n", "dry_multiplier"]
FIELDS += ["dry_base", "mirostat", "seed", "logit_bias", "grammar", "json_schema", "samplers", "xtc_probability"]
FIELDS += ["max_tokens", "temperature", "messages", "input", "prompt", "what", "dry_sequence_breakers", "min_p"]
RAW = [
    "{",
    "null",
    "5",
    '"a"',
    "[]",
    '{"prompt": NaN}',
    '{"prompt": "a", "id": 1e999}',
    "[" * 100000,
    "\0",
    '{"a": 1, }',
]
OPTIONS = ["-n", "4", "--temp", "0", "-t", "1"]


def hostile_line(rng: np.random.Generator) -> str:
    if rng.integers(8) == 0:
        return RAW[rng.integers(len(RAW))]
    request: dict[str, Any] = {"prompt": "ab"}
    for _ in range(rng.integers(0, 4)):
        request[FIELDS[rng.integers(len(FIELDS))]] = PIECES[rng.integers(len(PIECES))]
    return json.dumps(request)


def started(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    files = ["-m", str(folder / "tiny.gguf"), "-i", str(folder / "in"), "-o", str(folder / "out")]
    return subprocess.Popen(
        [sys.executable, "-m", "pyggml", "batch", *files, *OPTIONS, *more], stderr=subprocess.PIPE, cwd=folder
    )


def run_killed(rng: np.random.Generator, folder: Path, _: Path) -> str:
    """Kill a run at random moments until it ends by itself; a torn last line now and then, and retries."""
    write_gguf(folder / "tiny.gguf")
    lines = [hostile_line(rng) for _ in range(rng.integers(5, 60))]
    out = folder / "out"
    out.unlink(missing_ok=True)
    (folder / "in").write_bytes(b"".join(line.encode("utf-8", "replace") + b"\n" for line in lines))
    kept: dict[int, bytes] = {}
    kills = 0
    for _ in range(5):
        more = ("--retry-errors",) if rng.integers(3) == 0 else ()
        process = started(folder, *more)
        try:
            _, said = process.communicate(timeout=rng.uniform(0.4, 1.2))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
        else:
            assert process.returncode == 0, said.decode()[-500:]
        data = out.read_bytes() if out.exists() else b""
        results = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
        for r in results:
            if "error" not in r:
                text = json.dumps(r).encode()
                assert kept.setdefault(r["index"], text) == text
        if data and rng.integers(2):
            out.write_bytes(data[: len(data) - rng.integers(0, min(len(data), 300))])
            kept.clear()
    _, said = started(folder).communicate()
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["index"] for r in results] == list(range(len(results))) and len(results) == len(lines), said
    assert all(("error" in r) != ("text" in r or "embedding" in r) for r in results)
    return f"{'killed' if kills else 'not killed'}, {'with' if any('error' in r for r in results) else 'no'} errors"


def test_killed(tmp_path: Path) -> None:
    attack(run_killed, tmp_path, tmp_path)
