"""Hugging Face folders, read as if they were GGUF files: metadata, and tensors that are read when they are wanted.

`config.py` reads config.json. `families/` tells, for each model_type, its architecture, the GGUF keys that its config
becomes, and how its tensors are moved; `moves.py` has the moves, each with its inverse. `tensors.py` turns safetensors
into GGUF tensors, `tokenizer.py` turns tokenizer files into metadata, and `folder.py` puts the two together.
`export.py` writes a GGUF file as a folder. To add a family, write one `Family` in a page of `families/` and enter its
model_type in the table of `families/__init__.py`.
"""
