"""The interface of a runner, what it is given, how it draws; and the runner that computes nothing."""
