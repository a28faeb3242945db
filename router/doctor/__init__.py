"""What figures of a router and its replicas say is wrong, and which knob to turn: plain numbers in, findings out."""
