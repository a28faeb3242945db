"""Predictions held against real engines: unmodified vLLM whose worker computes nothing, and SGLang's own cache.

`python -m qualification.engines.setup DIR` sets them up, and `python -m qualification.engines` prints the table.
WARMROUTE_LIVE names DIR. Without it the tests are skipped.
"""
