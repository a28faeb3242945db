"""Finds out what is wrong by live metrics; the rules are in `router.doctor`."""
