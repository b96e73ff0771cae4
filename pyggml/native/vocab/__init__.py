"""What vocabularies need of C: lists of strings, texts found by their bytes, words into tokens."""
