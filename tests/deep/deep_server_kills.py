"""A server is killed (SIGKILL) at a random moment, and another one follows on the same folders, again and again. What a
server has said is done is there afterwards, whole, and what was under way is there whole, or not at all.

PYGGML_DEEP (200) says how often it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import pyggml as gg
from pyggml.serve import ServeOptions
from pyggml.serve.options import ListenOptions
from pyggml.serve.run import run
from tests.serve.conftest import free_port, http_client
from tests.serve.test_batches import URL, requests

from . import COUNT, SEED

KILLS_OF_A_FOLDER = 20  # then all batches end, their answers are looked at, and the next folder is empty
ENDED = ("completed", "cancelled")


@contextmanager
def server(model: gg.Model, folder: Path) -> Iterator[tuple[httpx.Client, int]]:
    """A server in a fork, and a client of it. It is killed at the end."""
    slots, batches = folder / "slots", folder / "batches"
    for path in (slots, batches):
        path.mkdir(parents=True, exist_ok=True)
    options = ServeOptions(
        n_parallel=2, n_ctx=512, batches_dir=str(batches), slot_save_path=str(slots), context={"n_threads": 1}
    )
    port = free_port()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            run(lambda _: model, options, ListenOptions(port=port))
        finally:
            os._exit(1)
    try:
        no_reuse = httpx.Limits(max_keepalive_connections=0)  # a busy machine: the server ends those that are idle
        with http_client(base_url=f"http://127.0.0.1:{port}", limits=no_reuse) as client:
            while True:
                with suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        break
                assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the server has not started"
                time.sleep(0.01)
            yield client, pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class Known:
    """What the servers of a folder have said, and what they were asked for when they were killed."""

    def __init__(self, folder: Path, rng: np.random.Generator, texts: dict[str, str]) -> None:
        self.folder, self.rng, self.texts = folder, rng, texts
        self.files: dict[str, bytes] = {}  # uploads by id
        self.asked: bytes | str | None = None  # an upload, or the id of a file that is deleted, without an answer
        self.batches: dict[str, Any] = {}
        self.slot: bytes | None = None  # the file of a slot
        self.is_saving = False

    # -- clients --------------------------------------------------------------------------------------------------

    def ask(self, client: httpx.Client) -> None:
        """Upload, delete, begin and cancel until the server is gone."""
        while True:
            what = self.rng.random()
            if what < 0.4 or not self.files:
                data = requests(int(self.rng.choice([1, 3, 8, 2000])), max_tokens=int(self.rng.integers(1, 6)))
                self.asked = data
                r = client.post("/v1/files", files={"file": ("a.jsonl", data)}, data={"purpose": "batch"})
                self.files[r.json()["id"]] = data
            elif what < 0.8:
                id = str(self.rng.choice(list(self.files)))
                if len(self.files[id]) < 10_000:
                    batch = client.post("/v1/batches", json={"input_file_id": id, "endpoint": URL}).json()
                    assert batch["status"] == "in_progress"
                    self.batches[batch["id"]] = batch
            elif what < 0.9:
                id = str(self.rng.choice(list(self.files)))
                self.asked = id
                if client.delete(f"/v1/files/{id}").status_code == 200:  # none that a batch needs
                    del self.files[id]
            elif self.batches:
                id = str(self.rng.choice(list(self.batches)))
                if client.post(f"/v1/batches/{id}/cancel").status_code == 200:
                    self.batches[id] = {**self.batches[id], "status": "cancelled"}
            self.asked = None

    def save(self, client: httpx.Client) -> None:
        """Save a slot until the server is gone."""
        for n in range(1, 1000):
            body = {"prompt": "a b c " * (n % 7 + 1), "n_predict": 1, "id_slot": 0}
            assert client.post("/completion", json=body).status_code == 200
            self.is_saving = True
            answer = client.post("/slots/0?action=save", json={"filename": "s"})
            self.slot = (self.folder / "slots/s").read_bytes()
            assert answer.status_code == 200 and len(self.slot) == answer.json()["n_written"]
            self.is_saving = False

    # -- what must hold -------------------------------------------------------------------------------------------

    def check(self, client: httpx.Client) -> Iterator[str]:
        """What was found, after a kill."""
        slot = self.folder / "slots/s"
        assert not slot.parent.exists() or {path.name for path in slot.parent.iterdir()} <= {"s"}
        data = slot.read_bytes() if slot.exists() else None
        if data != self.slot:
            assert self.is_saving and data is not None
            yield "new slots"
        self.slot, self.is_saving = data, False
        if data is not None:
            r = client.post("/slots/1?action=restore", json={"filename": "s"})
            assert r.status_code == 200 and r.json()["n_read"] == len(data), r.text

        batches = {b["id"]: b for b in client.get("/v1/batches").json()["data"]}
        assert batches.keys() >= self.batches.keys()
        for id, batch in batches.items():
            before = self.batches.get(id, batch)
            assert batch["status"] in ("in_progress", *ENDED), batch
            assert before["status"] not in ENDED or batch["status"] in ENDED
            assert (
                batch["request_counts"]["completed"] == len(self.answers(client, batch)) or batch["status"] not in ENDED
            )
        yield from ["in-between batches"] * any(b["status"] == "in_progress" for b in batches.values())
        yield from ["new batches"] * (len(batches) - len(self.batches))
        self.batches = batches

        grown = {b[role] for b in batches.values() for role in ("output_file_id", "error_file_id")}
        found = {f["id"]: f for f in client.get("/v1/files").json()["data"] if f["purpose"] == "batch"}
        for id, file in found.items():
            data = client.get(f"/v1/files/{id}/content").content
            assert len(data) == file["bytes"] and (data == self.files.get(id) or data == self.asked), file
        if gone := self.files.keys() - found.keys():
            assert gone == {self.asked}
            yield "deleted"
        yield from ["new uploads"] * len(found.keys() - self.files.keys())
        self.files = {id: self.files.get(id) or client.get(f"/v1/files/{id}/content").content for id in found}
        self.asked = None
        for path in (self.folder / "batches").iterdir():
            if path.name.startswith("."):
                yield "left something hidden"
                continue
            if not path.with_suffix(".json").exists():
                assert path.suffix == ".jsonl", path
                yield "data without a name"  # a later server removes it
                continue
            if path.stem.startswith("file-") and path.stem not in found and path.stem not in grown:
                yield "answers of no batch"

    def answers(self, client: httpx.Client, batch: Any) -> list[Any]:
        """The answers of a batch so far: whole, each once, and the same each time."""
        found = [json.loads(x) for x in client.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()]
        ids = [a["custom_id"] for a in found]
        assert len(set(ids)) == len(ids) <= batch["request_counts"]["total"]
        for a in found:
            body = a["response"]["body"]
            key = f"{a['custom_id']} {body['usage']['completion_tokens']}"
            assert self.texts.setdefault(key, body["choices"][0]["text"]) == body["choices"][0]["text"]
        return found

    def check_ends(self, client: httpx.Client) -> int:
        """All batches end, with all their answers. How many there were."""
        for id in self.batches:
            while (batch := client.get(f"/v1/batches/{id}").json())["status"] == "in_progress":
                time.sleep(0.02)
            n = len(self.answers(client, batch))
            assert batch["request_counts"]["completed"] == n and batch["request_counts"]["failed"] == 0
            assert batch["status"] == "cancelled" or n == batch["request_counts"]["total"]
        return len(self.batches)


def test_killed_again_and_again(tmp_path: Path) -> None:
    rng, model, counts = np.random.default_rng(SEED), gg.load_model(), Counter[str]()
    texts: dict[str, str] = {}
    while counts["killed"] < COUNT:
        known = Known(tmp_path / str(counts["killed"]), rng, texts)
        for _ in range(KILLS_OF_A_FOLDER):
            with server(model, known.folder) as (client, pid):
                counts.update(known.check(client))
                wrong: list[BaseException] = []

                def until_gone(work: Any, client: httpx.Client = client, wrong: list[BaseException] = wrong) -> None:
                    try:
                        work(client)
                    except httpx.TransportError:
                        pass
                    except BaseException as e:
                        wrong.append(e)

                threads = [threading.Thread(target=until_gone, args=(work,)) for work in (known.ask, known.save)]
                for t in threads:
                    t.start()
                time.sleep(float(rng.uniform(0, 0.6)))
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                for t in threads:
                    t.join()
                assert not wrong, wrong
            counts["killed"] += 1
        with server(model, known.folder) as (client, _):
            counts.update(known.check(client))
            counts["batches"] += known.check_ends(client)
    print(f"\n{', '.join(f'{n} {what}' for what, n in counts.items())}")
