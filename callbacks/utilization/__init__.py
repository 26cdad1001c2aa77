"""What UtilizationLogger is made of: an epoch's figures, and several workers'."""
