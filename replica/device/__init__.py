"""The runner for a GPU: inputs on the device, graphs, and steps that are started before the last one is known."""
