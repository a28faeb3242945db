"""What the Dockerfile makes, checked without a container engine: see `python -m tests.images --help`."""
