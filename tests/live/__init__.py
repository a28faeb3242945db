"""Predictions held against real engines: unmodified vLLM whose model runner only counts and sleeps.

`python -m tests.live` prints the table. An environment with vLLM is needed: WARMROUTE_LIVE names the folder that
`setup.sh` in ../shared/real-vllm has made. Without it the tests are skipped.
"""
