"""One replica's cache as its events tell it: its blocks, their keys, and the changes that follow."""
