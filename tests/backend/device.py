"""A third backend from outside: a "device" whose memory the host cannot read, with code for a few ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

import pyggml as gg
from pyggml.backends.ref import compute_node
from pyggml.buffers.alloc import Step, steps_of
from pyggml.buffers.buffer import ALIGNMENT, Buffer, DeviceBuffer

OPS = ("mul_mat", "add", "scale", "sqr", "cpy")


class XorBuffer(DeviceBuffer):
    """Bytes that only make sense on the device."""

    def __init__(self, size: int) -> None:
        super().__init__(1 << 40, size, "XOR")
        self.cells = np.full(size, 0x5A, np.uint8)

    def fetch(self, start: int, n: int) -> np.ndarray:
        return self.cells[start : start + n] ^ 0x5A

    def write(self, start: int, data: np.ndarray) -> None:
        self.cells[start : start + data.nbytes] = data ^ 0x5A


class Program:
    def __init__(self, steps: Sequence[Step], resolve) -> None:
        self.nodes, self.resolve = [t for s in steps for t in s.nodes], resolve

    def run(self, interruptible: bool = True, n_threads: int | None = None) -> None:
        for t in self.nodes:
            compute_node(t, self.resolve)


class Device:
    name, buft, alignment = "device", "XOR", ALIGNMENT

    def supports_op(self, t: gg.Tensor) -> bool:
        return t.op in OPS

    def supports_buft(self, buft: str) -> bool:
        return buft == "XOR"

    def fuse(self, nodes: Sequence[gg.Tensor], uses: Mapping[gg.Tensor, int]) -> list[Step]:
        return steps_of(nodes)

    def reads(self, step: Step) -> list[Buffer]:
        return []

    def compile(self, steps: Sequence[Step], resolve) -> Program:
        return Program(steps, resolve)


def register() -> None:
    gg.register_device_buffer("XOR", XorBuffer)
    gg.register_backend("device", lambda n_threads: Device())
