"""Large bodies, read in processes of their own: whatever they are, the router goes on."""
