"""What StepProfiler is made of: a trace of some steps, and its summary."""
