"""How often the tests and intervals of a report are right: trials with a known truth."""

HELD_OUT = 20261123  # the seed of the trials whose rates are quoted
