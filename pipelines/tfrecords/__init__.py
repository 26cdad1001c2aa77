"""TFRecord files below `records`, `write_records` and `verify_records`: format, framing, damage, shards."""
