"""/v1/files and /v1/batches: files of requests that are answered when there is time, in the shape of OpenAI's API.

Files, batches and answers are files of one folder, so that a server that was ended goes on with what is left. A request
of a batch is answered by the endpoint that it names, a few at a time beside the requests of clients. So that these
clients do not wait for a disk, files are read and written in threads; how far a batch has come is kept in memory, and
counted again in the files of its answers by the next server.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from array import array
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message

from pyggml import limits
from pyggml.gguf_io.atomic_file import AtomicFile, append
from pyggml.llm.openai.batch_lines import ENDPOINTS, why_not
from pyggml.llm.openai.request import new_id, now

from .errors import HTTPError, of_request
from .forms import read_form
from .http import Json, body_of, dumps, is_dense, json_object, read_json

_ID = re.compile(r"(?:file|batch)-[0-9a-f]{32}")
_OPEN = ("in_progress", "cancelling")
_GROW = ("output_file_id", "error_file_id")  # the files that a batch writes
_LEFT = 3600  # seconds after which data without a name is no upload of another server any more
_PIECE = 1 << 16  # bytes of a file that are read at a time
_MOST_WRONG = 1000  # lines of a file that an answer says to be wrong
Object = dict[str, Any]


class Batches:
    """The files and batches of a folder. `app` answers the requests, `n_parallel` at a time."""

    def __init__(self, folder: str, app: ASGIApp, n_parallel: int, timeout: float) -> None:
        self._folder, self._app, self._n_parallel, self._timeout = Path(folder), app, n_parallel, timeout
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._one_file = asyncio.Lock()  # one is read at a time: its names, or a form, take memory
        self._turns = asyncio.Semaphore(n_parallel)  # requests under way, of all batches together
        self._beginning: list[Object] = []  # batches whose files are being read or made
        self._newer: dict[str, Object] = {}  # batches of which the folder knows less: they run, or the disk was full

    def routes(self) -> list[BaseRoute]:
        """The paths."""
        return [
            Route("/v1/files", self._files, methods=["GET", "POST"]),
            Route("/v1/files/{id}", self._file, methods=["GET", "DELETE"]),
            Route("/v1/files/{id}/content", self._content, methods=["GET"]),
            Route("/v1/batches", self._batches, methods=["GET", "POST"]),
            Route("/v1/batches/{id}", self._batch, methods=["GET"]),
            Route("/v1/batches/{id}/cancel", self._cancel, methods=["POST"]),
        ]

    @asynccontextmanager
    async def running(self, app: Starlette) -> AsyncGenerator[None]:
        """While it lasts, batches are answered, those first that an earlier server left."""
        for path in self._folder.glob("file-*.jsonl"):
            lost = _ID.fullmatch(path.stem) and path.is_file() and not self._about(path.stem).exists()
            if lost and now() - path.stat().st_mtime > _LEFT:  # a kill ended an upload or a deletion half-way
                path.unlink()
        for batch in self._objects("batch"):
            if batch["status"] in _OPEN:
                self._start(batch)
        try:
            yield
        finally:
            for task in tuple(self._tasks.values()):
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._write_ended()

    # -- files ------------------------------------------------------------------------------------------------------

    async def _files(self, request: Request) -> Response:
        """GET /v1/files; POST: a form with a file, and its purpose."""
        if request.method == "GET":
            return Json(await self._list("file"))
        body = await body_of(request, self._timeout, limits.BATCH_BYTES, paced=False)
        kind = request.headers.get("content-type", "")
        async with self._one_file:
            with _faults_named():
                return Json(await run_in_threadpool(lambda: self._new_file(*_form(kind, body))))

    async def _file(self, request: Request) -> Response:
        """GET and DELETE /v1/files/{id}."""
        file = self._object(request, "file")
        if request.method == "GET":
            return Json(file)
        if self._is_needed(file["id"], "input_file_id", *_GROW):
            raise HTTPError(400, f"{file['id']} is needed by a batch that is under way")
        self._remove(file["id"])
        return Json({"id": file["id"], "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        """GET /v1/files/{id}/content. Of a file that grows: the lines so far."""
        id = self._object(request, "file")["id"]
        try:
            file, size = await run_in_threadpool(_opened, self._data(id), self._is_needed(id, *_GROW))
        except FileNotFoundError:  # it was deleted just now
            raise _none("file", id) from None
        headers = {"content-length": str(size)}
        return StreamingResponse(_parts(file, size), headers=headers, media_type="application/octet-stream")

    def _is_needed(self, id: str, *roles: str) -> bool:
        """Whether a batch that is under way has a file in one of these roles."""
        under_way = [*self._beginning, *(b for b in self._newer.values() if b["status"] in _OPEN)]
        return any(id in map(b.get, roles) for b in under_way)

    def _new_file(self, name: str, purpose: str, data: bytes) -> Object:
        id = new_id("file")
        file = {"id": id, "object": "file", "bytes": len(data), "created_at": now(), "filename": name}
        with AtomicFile(self._data(id)) as f:
            f.file.write(data)
        try:
            return self._put({**file, "purpose": purpose, "status": "processed"})
        except BaseException:  # nobody could ask for it
            self._data(id).unlink()
            raise

    def _remove(self, id: str) -> None:
        self._about(id).unlink()  # first: a kill between the two leaves no file that cannot be read
        self._data(id).unlink(missing_ok=True)

    # -- batches ----------------------------------------------------------------------------------------------------

    async def _batches(self, request: Request) -> Response:
        """GET /v1/batches; POST: begin one."""
        if request.method == "GET":
            return Json(await self._list("batch"))
        asked = await json_object(request, self._timeout)
        endpoint, source = asked.get("endpoint"), asked.get("input_file_id")
        if endpoint not in ENDPOINTS:
            raise HTTPError(400, f"endpoint: one of {', '.join(ENDPOINTS)}, not {endpoint!r:.60}")
        if not isinstance(source, str) or not _ID.fullmatch(source) or not self._data(source).is_file():
            raise HTTPError(400, f"input_file_id: there is no file {source!r:.60}")
        about = {"completion_window": asked.get("completion_window", "24h"), "metadata": asked.get("metadata")}
        if len(await run_in_threadpool(dumps, about)) > (most := limits.BATCH_ABOUT):
            raise HTTPError(400, f"completion_window and metadata: more than {most} bytes, which all lists show")
        batch: Object = {
            "id": new_id("batch"),
            "object": "batch",
            "endpoint": endpoint,
            "input_file_id": source,
            **about,
            "created_at": now(),
            "errors": None,
            "output_file_id": None,
            "error_file_id": None,
        }
        self._beginning.append(batch)
        try:
            with _faults_named():
                return Json(await self._begun(batch))
        finally:
            self._beginning.remove(batch)

    async def _begun(self, batch: Object) -> Object:
        """Begin a batch; one whose lines are wrong has failed."""
        async with self._one_file:
            n, wrong = await run_in_threadpool(_requests, self._data(batch["input_file_id"]), batch["endpoint"])
        batch["request_counts"] = {"total": n, "completed": 0, "failed": 0}
        if wrong:
            return await run_in_threadpool(self._put, _failed(batch, wrong))
        batch |= {"status": "in_progress", "in_progress_at": now()}
        await run_in_threadpool(self._make_files, batch)
        self._start(batch)
        return batch

    def _make_files(self, batch: Object) -> None:
        """Make the files of a new batch."""
        try:
            for role, name in zip(_GROW, ("output", "error"), strict=True):
                batch[role] = self._new_file(f"{batch['id']}_{name}.jsonl", "batch_output", b"")["id"]
            self._put(batch)
        except BaseException:  # no batch would have these files
            for id in filter(None, map(batch.get, _GROW)):
                self._remove(id)
            raise

    async def _batch(self, request: Request) -> Response:
        """GET /v1/batches/{id}."""
        return Json(self._object(request, "batch"))

    async def _cancel(self, request: Request) -> Response:
        """POST /v1/batches/{id}/cancel: requests under way end, what was answered stays."""
        batch = self._object(request, "batch")
        if batch["status"] not in _OPEN:
            raise HTTPError(400, f"the batch is {batch['status']}")
        task = self._tasks.get(batch["id"])
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        batch = self._object(request, "batch")
        return Json(await self._ended({**batch, "status": "cancelled", "cancelled_at": now()}))

    def _start(self, batch: Object) -> None:
        self._newer[batch["id"]] = batch
        task = asyncio.ensure_future(self._run(batch))
        self._tasks[batch["id"]] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch["id"], None))

    async def _run(self, batch: Object) -> None:
        """Answer the requests of a batch that have no answer yet."""
        try:
            async with self._one_file:
                left = iter(await run_in_threadpool(self._left, batch))
            await self._count(batch)
            await run_in_threadpool(self._put_lengths, batch)
            workers = [asyncio.ensure_future(self._work(batch, left)) for _ in range(self._n_parallel)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
            await self._ended({**batch, "status": "completed", "finalizing_at": now(), "completed_at": now()})
        except Exception as e:  # most likely, the disk is full
            why = str(e.strerror) if isinstance(e, OSError) else type(e).__name__
            wrong = {"code": "server_error", "message": why, "line": None, "param": None}
            await self._ended(_failed(batch, [wrong]))

    async def _work(self, batch: Object, left: Iterator[int]) -> None:
        for at in left:
            line = await run_in_threadpool(_request_at, self._data(batch["input_file_id"]), at)
            while True:
                async with self._turns:
                    code, body = await self._asked(batch["endpoint"], line["body"])
                if code != 503:
                    break
                await asyncio.sleep(1)  # the queue is full: clients go first
            response = {"status_code": code, "request_id": new_id("req"), "body": body}
            answer = {"id": new_id("batch_req"), "custom_id": line["custom_id"], "response": response, "error": None}
            text = await run_in_threadpool(dumps, answer)
            path = self._data(batch["output_file_id" if code == 200 else "error_file_id"])
            with open(path, "ab", 0) as f:
                append(f.fileno(), text + b"\n", path)
            batch["request_counts"]["completed" if code == 200 else "failed"] += 1

    async def _asked(self, path: str, body: Object) -> tuple[int, Any]:
        """The status and the body of what the application answers."""
        left, parts, status = list[bytes](), list[bytes](), [500]
        waits = asyncio.Event()  # for ever: the client does not leave

        async def receive() -> Message:
            if not left:
                await waits.wait()
            return {"type": "http.request", "body": left.pop(), "more_body": False}

        async def send(message: Message) -> None:
            status[0] = message.get("status", status[0])
            parts.append(message.get("body", b""))

        scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "query_string": b""}
        scope |= {"path": path, "raw_path": path.encode(), "root_path": "", "headers": [], "server": ("batch", 80)}
        try:
            left.append(await run_in_threadpool(dumps, body))
            await self._app(scope, receive, send)
        except Exception as e:  # an error that nobody thought of ends its request alone
            return 500, {"error": {"code": 500, "message": type(e).__name__, "type": "server_error"}}
        return status[0], await run_in_threadpool(json.loads, b"".join(parts))

    def _left(self, batch: Object) -> array[int]:
        """The places in the file of the requests that have no answer yet. What a kill left of a line is taken away."""
        done, left, at = set[str](), array("q"), 0
        for path in (self._data(str(batch[role])) for role in _GROW):
            size = 0
            for line in _whole_lines(path):
                done.add(json.loads(line)["custom_id"])
                size += len(line)
            os.truncate(path, size)
        with open(self._data(batch["input_file_id"]), "rb") as f:
            for text in f:
                if text.strip() and _request(text)["custom_id"] not in done:
                    left.append(at)
                at += len(text)
        return left

    async def _count(self, batch: Object) -> None:
        """Count the answers in the files."""
        for id, kind in zip(map(batch.get, _GROW), ("completed", "failed"), strict=True):
            batch["request_counts"][kind] = await run_in_threadpool(_n_lines, self._data(str(id)))

    def _put_lengths(self, batch: Object) -> None:
        """Write down how long the files of answers are."""
        for id in map(str, map(batch.get, _GROW)):
            if (file := self._read(id)) is not None:  # else it was deleted
                self._put({**file, "bytes": self._data(id).stat().st_size})

    async def _ended(self, batch: Object) -> Object:
        """Write down that a batch has ended: now, or when there is room again on a disk that is full."""
        with suppress(OSError):
            await self._count(batch)
        self._newer[batch["id"]] = batch
        self._write_ended()
        return batch

    def _write_ended(self) -> None:
        for id, batch in tuple(self._newer.items()):
            if batch["status"] in _OPEN:
                continue
            with suppress(OSError):
                self._put_lengths(batch)
                self._put(batch)
                del self._newer[id]

    # -- the folder -------------------------------------------------------------------------------------------------

    def _data(self, id: str) -> Path:
        return self._folder / f"{id}.jsonl"

    def _about(self, id: str) -> Path:
        return self._folder / f"{id}.json"

    def _put(self, value: Object) -> Object:
        with AtomicFile(self._about(value["id"])) as f:
            f.file.write(dumps(value))
        return value

    def _object(self, request: Request, kind: str) -> Object:
        id = request.path_params["id"]
        self._write_ended()
        value = self._read(id) if _ID.fullmatch(id) and id.startswith(kind) else None
        if value is None:
            raise _none(kind, id)
        return value

    def _read(self, id: str) -> Object | None:
        """The file or batch of this name; None when there is none, or what stands there is not a server's. A batch that
        begins is none yet: nobody was told its name."""
        if (newer := self._newer.get(id)) is not None:
            return newer
        if any(b["id"] == id for b in tuple(self._beginning)) or not self._about(id).is_file():
            return None
        try:
            value: Any = json.loads(self._about(id).read_bytes())
            return value if value["id"] == id and value["object"] == id.partition("-")[0] else None
        except (ValueError, TypeError, LookupError, RecursionError, FileNotFoundError):  # which was deleted just now
            return None

    async def _list(self, kind: str) -> Object:
        self._write_ended()
        data = await run_in_threadpool(lambda: list(self._objects(kind)))
        return {"object": "list", "data": data, "has_more": False}

    def _objects(self, kind: str) -> Iterator[Object]:
        names = [p.stem for p in self._folder.glob(f"{kind}-*.json") if _ID.fullmatch(p.stem)]
        yield from sorted(filter(None, map(self._read, names)), key=lambda o: -o["created_at"])


@contextmanager
def _faults_named() -> Generator[None]:
    """A disk that is full, or fails, is an HTTPError."""
    try:
        yield
    except OSError as e:
        raise of_request(e) from e


def _form(kind: str, body: bytes) -> tuple[str, str, bytes]:
    """The name, the purpose and the bytes of the file in a form."""
    parts = read_form(kind, body)
    if "file" not in parts or "purpose" not in parts:
        raise HTTPError(400, "a form with a file and its purpose is wanted")
    if len(parts["purpose"].data) > (most := limits.BATCH_ABOUT):
        raise HTTPError(400, f"purpose: more than {most} bytes, which all lists of files show")
    file = parts["file"]
    return file.filename or "file", parts["purpose"].data.decode("utf-8", "replace"), file.data


def _requests(path: Path, endpoint: str) -> tuple[int, list[Object]]:
    """How many requests a file has, and what is wrong with it."""
    n, wrong, seen = 0, list[Object](), set[str]()
    with open(path, "rb") as f:
        for i, text in enumerate(f, 1):
            if not text.strip():
                continue
            line, why = _request(text), ""
            if len(text) > limits.REQUEST_BYTES:
                why = f"the line is longer than {limits.REQUEST_BYTES} bytes"
            why = why or why_not(line, (endpoint,), seen)
            if why and len(wrong) == _MOST_WRONG:
                wrong.append({"code": "invalid_request", "message": "more lines are wrong", "line": i, "param": None})
                break
            if why:
                wrong.append({"code": "invalid_request", "message": why, "line": i, "param": None})
            else:
                n += 1
                seen.add(line["custom_id"])
    if not n and not wrong:
        wrong.append({"code": "empty_file", "message": "the file has no requests", "line": None, "param": None})
    return n, wrong


def _request(text: bytes) -> Any:
    """What a line says; "" for one that is too long, or no JSON."""
    if len(text) > limits.REQUEST_BYTES or is_dense(text):
        return ""
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        return ""


def _request_at(path: Path, at: int) -> Any:
    """The request at this place of a file."""
    with open(path, "rb") as f:
        f.seek(at)
        return _request(f.readline())


def _none(kind: str, id: str) -> HTTPError:
    return HTTPError(404, f"there is no {kind} {id!r:.60}")


def _opened(path: Path, grows: bool) -> tuple[BinaryIO, int]:
    """A file, and how many bytes of it are to be shown: those of whole lines, of one that grows."""
    with ExitStack() as stack:
        file = stack.enter_context(open(path, "rb"))
        at = file.seek(0, os.SEEK_END)
        while grows and at > 0:
            begin = max(at - _PIECE, 0)
            file.seek(begin)
            at = begin + file.read(at - begin).rfind(b"\n") + 1
            if at > begin:
                break
        file.seek(0)
        stack.pop_all()
    return file, at


async def _parts(file: BinaryIO, size: int) -> AsyncGenerator[bytes]:
    """The first bytes of an open file, which is closed then."""
    with file:
        while size > 0 and (part := await run_in_threadpool(file.read, min(size, _PIECE))):
            size -= len(part)
            yield part


def _whole_lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as f:
        yield from takewhile(lambda line: line.endswith(b"\n"), f)


def _n_lines(path: Path) -> int:
    with open(path, "rb") as f:
        return sum(piece.count(b"\n") for piece in iter(lambda: f.read(_PIECE), b""))


def _failed(batch: Object, wrong: list[Object]) -> Object:
    return {**batch, "status": "failed", "failed_at": now(), "errors": {"object": "list", "data": wrong}}
