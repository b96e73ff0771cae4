"""What a tower makes of one picture or one sound, on its way into the text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Features:
    """Rows that take the places of a picture's (or sound's) placeholder tokens.

    - `rows`: float32, NumPy shape [n_tokens, n_embd]; row i takes the place of the i-th placeholder.
    - `grid`: (t, h, w), the rows as frames, lines and columns (t * h * w == n_tokens), where the text counts positions
      in three directions (M-RoPE); None elsewhere.
    - `deepstack`: float32 [n_levels, n_tokens, n_embd], added to what the first n_levels layers give (Qwen3-VL); None
      elsewhere.
    """

    rows: Floats
    grid: tuple[int, int, int] | None = None
    deepstack: Floats | None = None
