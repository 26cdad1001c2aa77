"""Tables as a source: Parquet and CSV files, and data frames, which pyarrow reads."""
