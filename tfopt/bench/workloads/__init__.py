"""Real data and models to train on it."""
