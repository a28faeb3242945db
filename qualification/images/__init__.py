"""The Dockerfile's text, and its images in real containers."""
