"""Read objects of a folder's JSON files, checking each value's type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from pyggml import small_file
from pyggml.errors import ModelError

_NAMES = {str: "a string", int: "a whole number", bool: "true or false", list: "an array", dict: "an object"}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty when the file does not exist. Raises ModelError when it holds something else."""
    try:
        found = small_file.read_json(path, ModelError)
    except FileNotFoundError:
        return {}
    if not isinstance(found, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return cast("dict[str, Any]", found)


class Part:
    """A JSON object that knows where it stands. A null counts as missing. When a value has another type than asked for,
    ModelError is raised, which says where the value is."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    @staticmethod
    def of_file(path: Path) -> Part:
        """The object in a file, see `read_object`."""
        return Part(read_object(path), f"{path}: ")

    def fail(self, key: str, must: str) -> NoReturn:
        """Raise the ModelError about a value."""
        raise ModelError(f"{self.where}{key} {must}, not {self.values.get(key)!r:.60}")

    def _get(self, key: str, kind: type) -> Any:
        value = self.values.get(key)
        if value is not None and type(value) is not kind:
            self.fail(key, f"must be {_NAMES[kind]}")
        return value

    def text(self, key: str) -> str | None:
        """A string."""
        value: str | None = self._get(key, str)
        if value is not None and small_file.HALF.search(value):
            self.fail(key, "must be text of whole characters")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value: bool | None = self._get(key, bool)
        return default if value is None else value

    def number(self, key: str) -> int | None:
        """A whole number."""
        return self._get(key, int)

    def array(self, key: str) -> list[Any]:
        """An array; empty when it is missing."""
        return self._get(key, list) or []

    def part(self, key: str) -> Part:
        """An object; empty when it is missing."""
        return Part(self._get(key, dict) or {}, f"{self.where}{key}.")

    def parts(self, key: str) -> list[Part]:
        """An array of objects."""
        found: list[Part] = []
        for i, value in enumerate(self.array(key)):
            if not isinstance(value, dict):
                self.fail(f"{key}[{i}]", f"must be an object: {value!r:.60}")
            found.append(Part(cast("dict[str, Any]", value), f"{self.where}{key}[{i}]."))
        return found

    def steps(self, key: str, of_sequence: str) -> Iterator[Part]:
        """The steps under `key`: one object, or the objects of a Sequence, which lists them under `of_sequence`. A
        Sequence may contain others."""
        rest = [self.part(key)]
        while rest:
            step = rest.pop()
            if step.text("type") == "Sequence":
                rest += reversed(step.parts(of_sequence))
            elif step.values:
                yield step
