"""Several processes as one router: behind one port, with one answer whichever of them is asked."""
