"""The command line's dispatcher; the controller of many replicas is planned."""
