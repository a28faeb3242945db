"""What live metrics say is wrong, and which knob to turn: asking, comparing, words; `router.doctor` judges."""
