"""Why a GPU is not used well: thresholds, causes and remedies, shared by alerts, reports and the diagnosis."""
