"""Commands that look after a running fleet from another terminal, one file each."""
