"""What all rooms of the pipelines use: elements, seeds, and what is random in a graph or a dataset."""
