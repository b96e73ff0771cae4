"""Files of requests, and their answers."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

import pyggml as gg
from pyggml import limits
from pyggml.serve import ServeOptions, batches, create_app, forms
from pyggml.serve.batches import Batches
from pyggml.serve.errors import HTTPError
from pyggml.serve.service import Service

from .conftest import KEY, process

URL = "/v1/completions"


def requests(n: int, **body: Any) -> bytes:
    of_all = {"max_tokens": 4, "temperature": 0, **body}
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": URL, "body": {"prompt": f"A dog and {i}", **of_all}}
        for i in range(n)
    ]
    return b"\n".join(json.dumps(line).encode() for line in lines) + b"\n"


def app(tales: gg.Model, folder: Path) -> Any:
    return create_app(tales, ServeOptions(n_parallel=2, n_ctx=256, batches_dir=str(folder), context={"n_threads": 1}))


@pytest.fixture
def client(tales: gg.Model, tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(app(tales, tmp_path)) as c:
        yield c


def upload(client: TestClient, data: bytes) -> str:
    r = client.post("/v1/files", files={"file": ("a.jsonl", data)}, data={"purpose": "batch"})
    assert r.status_code == 200, r.text
    assert r.json()["bytes"] == len(data) and r.json()["filename"] == "a.jsonl" and r.json()["purpose"] == "batch"
    return r.json()["id"]


def begun(client: TestClient, data: bytes) -> Any:
    body = {"input_file_id": upload(client, data), "endpoint": URL, "completion_window": "24h"}
    return client.post("/v1/batches", json=body).json()


def ended(client: TestClient, id: str) -> Any:
    while (batch := client.get(f"/v1/batches/{id}").json())["status"] == "in_progress":
        time.sleep(0.02)
    return batch


def lines(client: TestClient, id: str) -> list[Any]:
    return [json.loads(x) for x in client.get(f"/v1/files/{id}/content").text.splitlines()]


def test_a_batch(client: TestClient) -> None:
    data = (
        requests(6)
        + json.dumps({"custom_id": "bad", "method": "POST", "url": URL, "body": {"prompt": [99999]}}).encode()
    )
    batch = ended(client, begun(client, data)["id"])
    assert batch["status"] == "completed" and batch["request_counts"] == {"total": 7, "completed": 6, "failed": 1}
    answers = {a["custom_id"]: a["response"] for a in lines(client, batch["output_file_id"])}
    assert set(answers) == {f"r{i}" for i in range(6)}
    for i in range(6):
        body = {"prompt": f"A dog and {i}", "max_tokens": 4, "temperature": 0}
        alone = client.post(URL, json=body).json()["choices"]
        assert answers[f"r{i}"]["status_code"] == 200 and answers[f"r{i}"]["body"]["choices"] == alone
    (wrong,) = lines(client, batch["error_file_id"])
    assert wrong["custom_id"] == "bad" and wrong["response"]["status_code"] == 400
    assert client.get("/v1/batches").json()["data"] == [batch]
    assert len(client.get("/v1/files").json()["data"]) == 3
    file = batch["output_file_id"]
    assert client.get(f"/v1/files/{file}").json()["bytes"] == len(client.get(f"/v1/files/{file}/content").content)
    assert client.delete(f"/v1/files/{file}").json()["deleted"] is True
    assert client.get(f"/v1/files/{file}").status_code == 404


def test_what_is_wrong(client: TestClient) -> None:
    data = b'no JSON\n{"custom_id": 3}\n' + requests(1) + requests(1) + requests(1, stream=True)
    batch = begun(client, data)
    assert batch["status"] == "failed" and [e["line"] for e in batch["errors"]["data"]] == [1, 2, 4, 5]
    assert begun(client, b"\n")["errors"]["data"][0]["code"] == "empty_file"
    assert [e["line"] for e in begun(client, b"x\n" * 5000)["errors"]["data"]][-2:] == [1000, 1001]
    file = upload(client, requests(1))
    for body in (
        {"endpoint": "/slots", "input_file_id": file},
        {"endpoint": URL, "input_file_id": "file-" + "0" * 32},
        {"endpoint": URL, "input_file_id": "../x"},
    ):
        assert client.post("/v1/batches", json=body).status_code == 400
    assert client.post("/v1/files", content=b"x").status_code == 400
    for path in ("/v1/files/x", "/v1/batches/..%2Fx", f"/v1/batches/{file}", "/v1/files/x/content"):
        assert client.get(path).status_code == 404, path
    with pytest.raises(gg.ModelError, match="batches_dir"):
        ServeOptions(batches_dir="/no/such/folder")


def test_a_form_in_a_form(client: TestClient) -> None:
    of_purpose = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    of_file = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\ncontent-type: multipart/mixed; '
    body = of_purpose + of_file + b"boundary=y\r\n\r\n--y\r\n\r\n{}\r\n--y--\r\n\r\n--x--\r\n"
    r = client.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=x"})
    assert r.status_code == 400 and "forms of their own" in r.text


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (b"--x\r\n\r\n\r\n", "more than 100 parts"),
        (b"--x\r\ncontent-type: multipart/mixed; boundary=x\r\n\r\n", "forms of their own"),
        (b"a:\n", "a file and its purpose is wanted"),
        (b"\r\n--xy --x-- x\r\n", "a file and its purpose is wanted"),
        (b"\r\n--x\r\na: b", "no headers that end"),
        (b"\r\n--x\r\n" + b"a: b\r\n" * 1000, "or more than 4096 bytes"),
    ],
)
def test_forms_that_are_none(part: bytes, says: str) -> None:
    """They are read in a moment: Python's parser of mails took 20 seconds for a megabyte of parts."""
    start = time.monotonic()
    with pytest.raises(HTTPError, match=says):
        batches._form("multipart/form-data; boundary=x", part * (1_000_000 // len(part)))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("charset", [b"a\0b", b"idna", b"punycode", b"undefined", b"no-such"])
def test_names_in_encodings_that_python_has(charset: bytes) -> None:
    """Some of them raise errors of their own. Those that nobody knows are UTF-8."""
    body = b"--x\r\ncontent-disposition: form-data; name*=" + charset + b"''%66%fft\r\n\r\n\r\n--x--"
    with pytest.raises(HTTPError) as e:
        batches._form("multipart/form-data; boundary=x", body)
    assert e.value.code == 400


def test_a_form_is_cut_at_its_boundaries_alone() -> None:
    """What a regular expression finds in one call, in which nobody else has a turn."""
    rng, pieces = random.Random(5), (b"--a", b"--", b"\r\n", b" ", b"\t", b"a", b"\r", b"\r\n--a\r\n", b"\r\n--a--")
    for _ in range(3000):
        body = b"".join(rng.choices(pieces, k=rng.randrange(12)))
        want = re.finditer(rb"(?:\A|\r\n)--a(--)?[ \t]*(?=\r\n|\Z)", body)
        assert list(forms._marks(b"--a", body)) == [(*m.span(), m[1] is not None) for m in want], body


def test_a_form_as_others_write_it() -> None:
    body = b"before\r\n--a b \r\nContent-Disposition: form-data; filename*=utf-8''%C3%A9; name=file\r\n"
    body += b"X: y\r\n\r\n--a\r\n--a bc\n\r\n\r\n--a b\r\n"
    body += b'CONTENT-DISPOSITION:form-data;name="purpose"\r\n\r\n\r\n--a b--\r\n'
    assert batches._form('Multipart/Form-Data; charset=x; boundary="a b"', body) == ("é", "", b"--a\r\n--a bc\n\r\n")
    for end in (b"\r\n--a b--", b"\r\n--a b--\r\n"):
        with pytest.raises(HTTPError, match="has no end"):
            batches._form('multipart/form-data; boundary="a b"', body.replace(end, b""))


OF_OTHERS = ["", "{", "[]", "5", "{}", '{"id": 1}', "[" * 100_000, '{"id": "batch-0", "object": "batch"}']


@pytest.mark.parametrize("text", OF_OTHERS)
def test_what_others_left_in_the_folder(tales: gg.Model, tmp_path: Path, text: str) -> None:
    for kind in ("file", "batch"):
        (tmp_path / f"{kind}-{'0' * 32}.json").write_text(text)
    with TestClient(app(tales, tmp_path)) as client:
        assert client.get("/v1/batches").json()["data"] == client.get("/v1/files").json()["data"] == []
        assert client.get(f"/v1/batches/batch-{'0' * 32}").status_code == 404
        assert ended(client, begun(client, requests(1))["id"])["status"] == "completed"


def test_a_file_stays_while_its_batch_begins(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    read, answer, file = batches._requests, list[Any](), upload(client, requests(2))

    def deleted_meanwhile(*args: Any) -> Any:
        answer.append(client.delete(f"/v1/files/{file}"))
        return read(*args)

    monkeypatch.setattr(batches, "_requests", deleted_meanwhile)
    batch = client.post("/v1/batches", json={"input_file_id": file, "endpoint": URL}).json()
    assert answer[0].status_code == 400 and "needed by a batch" in answer[0].text
    assert ended(client, batch["id"])["request_counts"]["completed"] == 2
    assert client.delete(f"/v1/files/{file}").json()["deleted"]


def test_files_that_are_deleted_meanwhile(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read and listed in threads, beside other requests: one may go just after it was there."""
    there, is_file = [upload(client, b"{}") for _ in range(3)], Path.is_file

    def found_and_lost(path: Path) -> bool:
        found = is_file(path)
        if path.stem == there[0]:
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "is_file", found_and_lost)
    listed = client.get("/v1/files")
    assert listed.status_code == 200 and {f["id"] for f in listed.json()["data"]} == {*there[1:]}
    opened = batches._opened

    def lost(path: Path, grows: bool) -> Any:
        path.unlink()
        return opened(path, grows)

    monkeypatch.setattr(batches, "_opened", lost)
    r = client.get(f"/v1/files/{there[1]}/content")
    assert r.status_code == 404 and there[1] in r.json()["error"]["message"]


@pytest.mark.parametrize("n", [0, 1, 70_000])
def test_whole_lines_of_a_file_that_grows(tmp_path: Path, n: int) -> None:
    path = tmp_path / "file"
    for data in (b"", b"x" * n, b"\n" + b"x" * n, b"a\nbc\n" + b"x" * n, b"x" * n + b"\n"):
        path.write_bytes(data)
        file, size = batches._opened(path, True)
        with file:
            assert file.read(size) == data[: data.rfind(b"\n") + 1]


def test_a_batch_that_begins_cannot_be_cancelled_yet(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in the folder before its requests are begun, and would be answered nevertheless."""
    make, answers = Batches._make_files, list[Any]()

    def cancelled_meanwhile(self: Batches, batch: Any) -> None:
        make(self, batch)
        answers.append(client.get("/v1/batches").json()["data"])
        answers.append(client.post(f"/v1/batches/{batch['id']}/cancel").status_code)

    monkeypatch.setattr(Batches, "_make_files", cancelled_meanwhile)
    batch = begun(client, requests(2))
    assert answers == [[], 404] and ended(client, batch["id"])["status"] == "completed"


def test_many_batches_keep_no_client_out(tales: gg.Model, tmp_path: Path) -> None:
    """Requests of all batches together are as many as there are slots: else those of a few fill the queue."""
    options = ServeOptions(n_parallel=2, n_queue=4, batches_dir=str(tmp_path), context={"n_threads": 1})
    with TestClient(create_app(tales, options)) as client:
        several = [begun(client, requests(40, max_tokens=200, ignore_eos=True)) for _ in range(8)]
        for _ in range(9):
            assert client.post(URL, json={"prompt": "A dog", "max_tokens": 1}).status_code == 200
        for b in several:
            cancelled = client.post(f"/v1/batches/{b['id']}/cancel").json()
            assert cancelled["status"] == "cancelled" and not cancelled["request_counts"]["failed"]


def test_a_line_that_is_too_long(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    data = requests(2) + b"\n" + requests(1, user="x" * 500).replace(b"r0", b"r2")
    monkeypatch.setattr(limits, "REQUEST_BYTES", 500)
    batch = begun(client, data)
    assert batch["status"] == "failed" and batch["request_counts"]["total"] == 2
    (wrong,) = batch["errors"]["data"]
    assert wrong["line"] == 4 and wrong["message"] == "the line is longer than 500 bytes"


def test_what_lists_show_is_short(client: TestClient) -> None:
    """A purpose of 256 MB, and metadata of 16 MB, were in each list, which others waited for."""
    r = client.post("/v1/files", files={"file": ("a.jsonl", b"")}, data={"purpose": "x" * 20_000})
    assert r.status_code == 400 and "purpose: more than 16384 bytes" in r.text
    body = {"input_file_id": upload(client, requests(1)), "endpoint": URL}
    for long in ({"metadata": {"a": "x" * 20_000}}, {"completion_window": [10**4000] * 5}):
        r = client.post("/v1/batches", json={**body, **long})
        assert r.status_code == 400 and "metadata: more than 16384 bytes" in r.text
    r = client.post("/v1/batches", json={**body, "metadata": {"a": "x" * 10_000}})
    assert r.status_code == 200 and ended(client, r.json()["id"])["status"] == "completed"


def test_a_line_that_is_nested_deep_fails_alone(client: TestClient) -> None:
    """It is read, but not written: numbers that are not finite are looked for level by level."""
    deep = (
        requests(1, user=0)
        .replace(b"r0", b"r9")
        .replace(b'"user": 0', b'"user": ' + b"[" * 900 + b"1e400" + b"]" * 900)
    )
    batch = ended(client, begun(client, requests(2) + deep)["id"])
    assert batch["status"] == "completed" and batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}


def test_cancelled(client: TestClient) -> None:
    batch = begun(client, requests(40, max_tokens=60, ignore_eos=True))
    got = client.post(f"/v1/batches/{batch['id']}/cancel").json()
    assert got["status"] == "cancelled" and got["request_counts"]["completed"] < 40
    assert client.post(f"/v1/batches/{batch['id']}/cancel").status_code == 400
    assert client.delete(f"/v1/files/{batch['input_file_id']}").status_code == 200


def test_a_request_without_memory_is_not_tried_again(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Service, "generations", no_memory)
    batch = ended(client, begun(client, requests(2))["id"])
    assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    assert {a["response"]["status_code"] for a in lines(client, batch["error_file_id"])} == {507}


def test_answers_so_far(client: TestClient) -> None:
    """Whole lines, though the file grows while it is read."""
    batch = begun(client, requests(30, max_tokens=30, ignore_eos=True))
    path = f"/v1/files/{batch['output_file_id']}/content"
    seen: list[int] = []
    while client.get(f"/v1/batches/{batch['id']}").json()["status"] == "in_progress":
        answer = client.get(path)
        assert answer.status_code == 200 and int(answer.headers["content-length"]) == len(answer.content)
        seen.append(len([json.loads(line) for line in answer.text.splitlines()]))
    assert seen == sorted(seen) and len(set(seen)) > 2 and len(lines(client, batch["output_file_id"])) == 30


def test_requests_are_whole_while_they_are_answered(client: TestClient) -> None:
    """A file of requests need not end with a line break."""
    data = requests(20, max_tokens=60, ignore_eos=True).rstrip()
    batch = begun(client, data)
    assert client.get(f"/v1/files/{batch['input_file_id']}/content").content == data
    assert client.delete(f"/v1/files/{batch['input_file_id']}").status_code == 400
    assert client.post(f"/v1/batches/{batch['id']}/cancel").status_code == 200


def test_a_disk_that_fills(tales: gg.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch fails with the reason, and the file has whole lines."""
    write, room = os.write, 1000

    def write_some(fd: int, data: bytes) -> int:
        nonlocal room
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(".jsonl"):
            return write(fd, data)
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n = write(fd, data[:room])
        room -= n
        return n

    monkeypatch.setattr(os, "write", write_some)
    with TestClient(app(tales, tmp_path)) as c:
        done = ended(c, begun(c, requests(9))["id"])
        assert done["status"] == "failed" and "No space left" in done["errors"]["data"][0]["message"]
        n_whole = len(lines(c, done["output_file_id"]))
        assert 0 < n_whole < 9 and (tmp_path / f"{done['output_file_id']}.jsonl").read_bytes().count(b"\n") == n_whole
        assert done["request_counts"]["completed"] == n_whole
        assert c.get(f"/v1/files/{done['output_file_id']}").json()["bytes"] > 0


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, no file takes a byte."""

    def write(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)  # of a line
    monkeypatch.setattr("pyggml.serve.batches.AtomicFile.commit", lambda _: write(0, b""))


def test_a_disk_without_any_room(tales: gg.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch has failed though that cannot be written either, which is made up for when there is room."""
    answered = Batches._asked  # pyright: ignore[reportPrivateUsage]

    async def then_full(self: Batches, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        answer = await answered(self, path, body)
        full_disk(monkeypatch)
        return answer

    with TestClient(app(tales, tmp_path)) as c:
        file = upload(c, requests(9))
        monkeypatch.setattr(Batches, "_asked", then_full)
        id = c.post("/v1/batches", json={"input_file_id": file, "endpoint": URL}).json()["id"]
        done = ended(c, id)
        assert done["status"] == "failed" and "No space left" in done["errors"]["data"][0]["message"]
        assert c.get("/v1/batches").json()["data"] == [done] and not lines(c, done["output_file_id"])
        written = tmp_path / f"{id}.json"
        assert json.loads(written.read_bytes())["status"] == "in_progress"
        for _ in range(2):
            r = c.post("/v1/files", files={"file": ("a.jsonl", requests(1))}, data={"purpose": "batch"})
            assert (r.status_code, r.json()["error"]["message"]) == (507, "No space left on device")
        r = c.post("/v1/batches", json={"input_file_id": file, "endpoint": URL})
        assert r.status_code == 507 and len(list(tmp_path.iterdir())) == 7  # three files, and a batch
        monkeypatch.undo()
    assert json.loads(written.read_bytes()) == done
    with TestClient(app(tales, tmp_path)) as c:
        assert c.get(f"/v1/batches/{id}").json() == done


def test_what_a_full_disk_leaves_of_an_upload(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, when there was room for the file and none to say what it is."""
    commits = iter([False, True])
    commit = Batches._put.__globals__["AtomicFile"].commit

    def once(self: Any) -> None:
        if next(commits):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        commit(self)

    monkeypatch.setattr("pyggml.serve.batches.AtomicFile.commit", once)
    r = client.post("/v1/files", files={"file": ("a.jsonl", requests(1))}, data={"purpose": "batch"})
    assert r.status_code == 507 and not list(tmp_path.iterdir())


def test_clients_do_not_wait_for_long_files(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that clients make long are read and written in other threads than the one that all requests share; that one
    waits for the disk when a batch has ended, and not for each answer."""
    names: set[str] = set()
    shared: set[int] = set()
    committed = list[int]()

    async def remember(self: Batches, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        shared.add(threading.get_ident())
        return await answered(self, path, body)

    def watched(name: str) -> Any:
        f = getattr(batches, name)

        def run(*args: Any) -> Any:
            names.add(name)
            used.add(threading.get_ident())
            return f(*args)

        return run

    answered, used = Batches._asked, set[int]()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(Batches, "_asked", remember)
    for name in ("_form", "_requests", "_whole_lines", "_n_lines"):
        monkeypatch.setattr(batches, name, watched(name))

    def commit(self: Any) -> None:
        committed.append(threading.get_ident())
        commits(self)

    commits = Batches._put.__globals__["AtomicFile"].commit
    monkeypatch.setattr("pyggml.serve.batches.AtomicFile.commit", commit)
    batch = begun(client, requests(9, max_tokens=30, ignore_eos=True))
    client.get(f"/v1/files/{batch['output_file_id']}/content")
    ended(client, batch["id"])
    assert len(names) == 4 and shared and not shared & used
    assert sum(thread in shared for thread in committed) == 3  # its files' lengths, and the batch


def test_a_server_that_is_started_again_goes_on(
    tales: gg.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = Batches._asked  # pyright: ignore[reportPrivateUsage]
    begun_here: list[str] = []

    async def few_answered(self: Batches, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        begun_here.append(path)
        if len(begun_here) > 5:
            await asyncio.Event().wait()  # until the server is stopped
        return await answered(self, path, body)

    monkeypatch.setattr(Batches, "_asked", few_answered)
    with TestClient(app(tales, tmp_path)) as c:
        batch = begun(c, requests(20, max_tokens=20))
        while not c.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"]:
            time.sleep(0.01)
    output = tmp_path / f"{batch['output_file_id']}.jsonl"
    n_before = output.read_bytes().count(b"\n")
    monkeypatch.undo()
    with open(output, "ab") as f:
        f.write(b'{"custom_id": "cut')  # by a kill
    unfinished, under_way = (tmp_path / f"file-{digit * 32}.jsonl" for digit in "01")
    for path in (unfinished, under_way):  # of an upload that a kill ended; of one to another server
        path.write_bytes(b"x")
    os.utime(unfinished, (0, 0))
    with TestClient(app(tales, tmp_path)) as c:
        done = ended(c, batch["id"])
        assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0} and 0 < n_before < 20
        assert not unfinished.exists() and under_way.exists()
        assert {a["custom_id"] for a in lines(c, done["output_file_id"])} == {f"r{i}" for i in range(20)}


def test_the_openai_package(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(requests(3))
    with process("-c", 256, "-np", 1, "--batches-dir", tmp_path, "--api-key", KEY) as (url, _):
        client, stranger = (openai.OpenAI(base_url=f"{url}/v1", api_key=key) for key in (KEY, "other"))
        with client, stranger, open(tmp_path / "in.jsonl", "rb") as f:
            file = client.files.create(file=f, purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
            while (batch := client.batches.retrieve(batch.id)).status == "in_progress":
                time.sleep(0.05)
            assert batch.status == "completed" and batch.output_file_id is not None
            assert len(client.files.content(batch.output_file_id).text.splitlines()) == 3
            with pytest.raises(openai.AuthenticationError):
                stranger.files.content(batch.output_file_id)
