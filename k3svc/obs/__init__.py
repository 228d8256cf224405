"""What operators see: log lines and metrics. Knows no engine and no wire."""
