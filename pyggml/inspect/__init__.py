"""Look into graphs: drawings, recorded runs, traces, taps and edits."""
