"""What a model remembers: KV cells and the caches over them, masks, shift, defrag, recurrent cells."""
