"""Other projects' policies in our simulated fleet, written from their published rules."""
