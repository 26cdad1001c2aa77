"""Documents of tokens, and their packing into rows of one length."""
