"""Where examples come from: a file for each source, `as_source` to choose one, `write_records` to store one."""
