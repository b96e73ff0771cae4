"""GGUF files that tests write."""

from __future__ import annotations

import gguf


def write_all(w: gguf.GGUFWriter) -> None:
    """Write the file whose keys and tensors a writer has been given."""
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
