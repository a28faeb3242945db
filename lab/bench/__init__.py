"""A load generator for OpenAI endpoints."""
