"""Published models, small, and what each tool of tfopt does to their training."""
