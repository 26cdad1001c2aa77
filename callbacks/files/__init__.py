"""Rows in CSV, JSONL and event files that a kill leaves whole."""
