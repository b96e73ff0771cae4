"""Methods that another module defines, which is imported when they are first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Elsewhere:
    """A method of a class: the function of the same name in `module`, or of the name `function`. Type checkers are
    given an import instead."""

    def __init__(self, module: str, function: str = "") -> None:
        self.module, self.name = module, function

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = self.name or name

    def __get__(self, instance: Any, owner: type) -> Any:
        return getattr(import_module(self.module), self.name).__get__(instance, owner)
