"""Reads live metrics for a diagnosis; the rules are in `router.dashboard.doctor`."""
