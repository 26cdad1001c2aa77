"""A model and another version of it: built again, compared and measured side by side."""
