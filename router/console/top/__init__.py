"""`warmroute top`: a live view of a running router; pure parts are separate from the terminal."""
