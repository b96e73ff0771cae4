"""JSON of numbers that may not be finite."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, cast


def json_text(value: Any, ensure_ascii: bool = True, separators: tuple[str, str] | None = None) -> str:
    """A value as JSON, with null in the place of NaN and infinities, which JSON lacks. The options are those of
    `json.dumps`."""
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, allow_nan=False)
    except ValueError:
        return json.dumps(_with_null(value), ensure_ascii=ensure_ascii, separators=separators, allow_nan=False)


def _with_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_null(x) for key, x in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_with_null(x) for x in cast("list[Any]", value)]
    return None if isinstance(value, float) and not isfinite(value) else value
