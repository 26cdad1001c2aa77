"""What several callbacks need: threads, log files, readings, and what Keras does not tell about the running `fit`."""
