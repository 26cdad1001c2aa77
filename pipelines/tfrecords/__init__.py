"""TFRecord files: `verify_records`, and what lies below `records` and `write_records`, which stand in sources/."""
