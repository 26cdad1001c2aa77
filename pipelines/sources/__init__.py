"""Where examples come from: one file for each kind of source."""
