"""`close()` and `with` for objects that hold much memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyggml.errors import ClosedError

if TYPE_CHECKING:
    from typing_extensions import Self


class Closeable:
    """`close()` frees what an object holds; all use of it after that raises ClosedError with its name."""

    def close(self) -> None:
        """Free the memory now. Arrays, tensors and a memory that others still hold stay valid. Closing again does
        nothing."""
        if "_closed" not in vars(self):
            self.__dict__ = {"_closed": self._name()}  # one store: a signal finds it open or closed

    def _name(self) -> str:
        """What it is, for messages."""
        raise NotImplementedError

    def _meant(self, name: str) -> str:
        """What may be meant by an attribute that it does not have; empty when nothing is known."""
        return ""

    def __enter__(self) -> Self:
        self._name()  # raises when it was closed
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = vars(self).get("_closed")
        return f"<{self._name()}>" if closed is None else f"<closed {closed}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            closed = vars(self).get("_closed")
            if closed is None or name.startswith("__"):
                meant = self._meant(name)
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{f': {meant}' * bool(meant)}")
            raise ClosedError(f"{closed} was closed: it cannot be used any more ({name})")
