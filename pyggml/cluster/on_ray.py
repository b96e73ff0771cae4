"""Actors that Ray runs: processes on this machine, or on the machines of a cluster."""

from __future__ import annotations

import logging
import os
import socket
from importlib import import_module
from typing import Any

from pyggml.errors import BackendError, ModelError

from .actors import ActorDied
from .seats import Node, Seat

_HERE = "local"
_PATIENCE = 60.0  # seconds, for a node to answer


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends no statistics home
    os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15, other processes stop the workers
    try:
        import_module("ray.util")  # a folder of that name is no Ray
        return import_module("ray")
    except ImportError:
        raise ModelError("Ray is not installed: pip install pyggml[ray]") from None


class _RayActor:
    def __init__(self, ray: Any, handle: Any) -> None:
        self._ray, self._handle = ray, handle

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._handle, method).remote(*args)

    def kill(self) -> None:
        if self._ray.is_initialized():
            self._ray.kill(self._handle)


class RayActors:
    """Processes of a Ray cluster: at `address`; "auto" is the one that this machine belongs to; "local" starts one on
    this machine, on `n_cpus` (default: all), which ends with it. A context manager.

    Raises ModelError when Ray is not installed, BackendError when it does not start or there is no such cluster.
    """

    def __init__(self, address: str = _HERE, n_cpus: int | None = None) -> None:
        self._ray = _ray()
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address == _HERE:
            quiet |= {"address": "local", "include_dashboard": False, "num_cpus": n_cpus}
        else:
            quiet["address"] = address
        try:
            host, _, port = address.rpartition("/")[2].rpartition(":")
            if host:  # Ray tries for minutes, and then ends the process
                socket.create_connection((host, int(port)), _PATIENCE).close()
            self._ray.init(**quiet)
        except (Exception, SystemExit) as e:  # Ray raises many kinds of errors
            raise BackendError(f"Ray at {address}: {_short(e)}") from e

    def __enter__(self) -> RayActors:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ray.shutdown()

    def nodes(self) -> list[Node]:
        """See `Actors`."""
        found: list[Node] = []
        for n in self._ray.nodes():
            if n["Alive"]:
                has = n["Resources"]
                found.append(Node(n["NodeID"], int(has.get("CPU", 0)), int(has.get("memory", 0))))
        return found

    def start(self, kind: type, seat: Seat) -> _RayActor:
        """See `Actors`."""
        place = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy(seat.node, soft=False)
        made = self._ray.remote(kind).options(num_cpus=seat.share, max_restarts=0, scheduling_strategy=place)
        return _RayActor(self._ray, made.remote())

    def get(self, result: Any) -> Any:
        """See `Actors`."""
        errors = import_module("ray.exceptions")
        try:
            return self._ray.get(result)
        except errors.RayTaskError as e:
            if isinstance(e.cause, errors.RayError):
                raise ActorDied(_short(e.cause)) from e
            raise e.cause from None
        except errors.RayError as e:
            raise ActorDied(_short(e)) from e


def _short(e: BaseException) -> str:
    """The beginning of what Ray says about the end of an actor, which is a page long."""
    return f"{' '.join(str(e).split()):.200}"
