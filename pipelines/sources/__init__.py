"""Where examples come from: a file for each source; `as_source`, a folder up, chooses one."""
