"""Ops that Python computes (OpDef.host), called from the threads of a running plan."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

from pyggml.native import ffi, lib

from ...lock import act_for
from ...opdef import OPS
from ...tensor import Tensor
from ..protocol import Resolve, node_error
from .isa import Kernel

HOST_KERNEL = Kernel("pg_host_call", int(ffi.cast("intptr_t", ffi.addressof(lib, "pg_host_call"))), ffi.new("pg_row *"))
_calls: WeakValueDictionary[int, HostCalls] = WeakValueDictionary()  # by the address of their plan


class HostCalls:
    """The host ops of one plan. `nodes` has the node of each record."""

    def __init__(self, plan: int, nodes: Sequence[Tensor], resolve: Resolve) -> None:
        self._nodes, self._resolve = nodes, resolve
        self._error: BaseException | None = None
        self.thread = 0  # that runs the plan
        _calls[plan] = self

    def call(self, index: int, ith: int, nth: int) -> int:
        """Compute one share of node `index`; a status."""
        try:
            act_for(self.thread)
            t = self._nodes[index]
            host = OPS[t.op].host
            assert host is not None
            host(t, [None if s is None else self._resolve(s) for s in t.src], ith, nth)
        except BaseException as e:
            self.failed(e)
            return lib.PG_E_HOST
        return lib.PG_OK

    def failed(self, e: BaseException) -> None:
        """Note that a call has raised. Only the first one is kept."""
        self._error = self._error or e

    def reraise(self, t: Tensor) -> None:
        """Raise the error `e` of a call for node `t`: as the cause of a BackendError, or as it is when it is Ctrl-C."""
        e, self._error = self._error, None
        if e is not None and not isinstance(e, Exception):
            raise e
        raise node_error(t, "interrupted" if e is None else f"{type(e).__name__}: {e}") from e


def _of(task: Any) -> HostCalls:
    return _calls[int(ffi.cast("intptr_t", task.plan))]


def _before_call(_kind: object, e: BaseException, trace: TracebackType) -> None:
    """Note a Ctrl-C that was raised on the way into `call`."""
    _of(trace.tb_frame.f_locals["task"]).failed(e)


@ffi.def_extern(name="pg_host_call", error=lib.PG_E_HOST, onerror=_before_call)
def _call(task: Any, ith: int, nth: int) -> int:  # pyright: ignore[reportUnusedFunction]
    return _of(task).call(int(task.index), ith, nth)
