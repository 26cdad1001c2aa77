"""What a model computes again in the backward pass, and how it does."""
