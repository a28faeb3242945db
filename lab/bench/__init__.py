"""A load generator: asks an OpenAI endpoint for answers as users would, and says how it did."""
