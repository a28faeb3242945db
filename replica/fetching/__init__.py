"""`warmroute fetch`: the files of a model, put into a folder."""
