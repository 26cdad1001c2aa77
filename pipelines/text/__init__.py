"""Text for language models: documents of tokens, and how they become rows and batches."""
