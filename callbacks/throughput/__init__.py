"""What ThroughputLogger is made of: the pace of the steps, and their wait for input."""
