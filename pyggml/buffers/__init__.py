"""Blocks of memory, where the tensors of a graph lie in them, and which tensors share bytes."""
