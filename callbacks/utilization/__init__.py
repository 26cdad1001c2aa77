"""What UtilizationLogger is made of: an epoch's figures, and the summaries of several workers."""
