"""Which channels, units and heads a model can lose, which it needs least, and the smaller model without them."""
