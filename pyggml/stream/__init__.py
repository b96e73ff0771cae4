"""Models larger than memory: what fits a budget stays, the rest is read while the graph runs, layer by layer."""
