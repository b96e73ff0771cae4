"""Memory: blocks of it, the places of a graph's tensors in them, and which tensors share bytes."""
