"""What ReportWriter is made of: a record of the training, its timeline, charts and page."""
