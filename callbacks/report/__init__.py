"""The page that ReportWriter writes."""
