"""Local SGD: rounds of steps that each replica takes by itself."""
