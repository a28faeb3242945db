"""Records of requests: logs and traces."""
