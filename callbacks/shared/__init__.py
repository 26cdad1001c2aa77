"""What several callbacks need: threads, log files, readings, and facts about the running `fit`."""
