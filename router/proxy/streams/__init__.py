"""Streams of foreign engines, read on their way so that another replica can go on with them."""
