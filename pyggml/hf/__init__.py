"""Hugging Face folders, presented as what the loader understands: metadata, and tensors that are read when wanted.

`config.py` reads config.json. `families/` says of each model_type which architecture it is, which keys its config
becomes, and how its tensors are moved; `moves.py` has the moves, each with its inverse. `tensors.py` makes GGUF tensors
of the safetensors, `tokenizer.py` the vocabulary's metadata, and `folder.py` puts them together. `export.py` is the way
back. How to add a family: one `Family` in a page of `families/`, and its model_type in the table of `families/`.
"""
