"""Why a GPU is poorly used: thresholds, causes and remedies, shared by alerts and reports."""
