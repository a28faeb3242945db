"""What is written down of requests: logs and traces."""
