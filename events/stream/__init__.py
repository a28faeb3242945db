"""One replica's batches put in order, without sockets or a clock: facts in, actions out."""
