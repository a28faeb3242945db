"""Tests of routers with several processes."""
