"""What ThroughputLogger is made of: step times, waits, examples, FLOPs and what is left."""
