"""What `UtilizationAlert` consists of."""
