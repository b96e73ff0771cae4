"""The backends: `ref` interprets a graph with the NumPy references, `cpu` runs the C kernels."""
