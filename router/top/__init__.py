"""`warmroute top`: a running router, looked at live; what is pure is apart from the terminal."""
