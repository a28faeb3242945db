"""What live metrics say is wrong, and which knob to turn: asking, figures, rules, words."""
