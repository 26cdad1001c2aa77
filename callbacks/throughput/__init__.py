"""What ThroughputLogger measures and computes: step times, the wait for input, FLOPs per second."""
