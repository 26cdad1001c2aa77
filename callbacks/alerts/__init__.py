"""When a metric is out of its bound, for how long, and why."""
