"""Predictions held against real engines: unmodified vLLM whose worker computes nothing, and SGLang's own cache.

`python -m tests.live.setup DIR` sets them up, and `python -m tests.live` prints the table. WARMROUTE_LIVE names DIR.
Without it the tests are skipped.
"""
