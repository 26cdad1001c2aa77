"""The cache on disk: what it is called, how it is written and published, and how a damaged one is never served."""
