"""Check the Dockerfile's images without a container engine: see `python -m qualification.images --help`."""
