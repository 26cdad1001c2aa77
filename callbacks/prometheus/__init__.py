"""What PrometheusExporter serves: names, labels and units of its metrics."""
