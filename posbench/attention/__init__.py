"""How scores become weights: kinds of attention, and the ways softmax attention runs."""
