"""Analyse runs: one tidy table of all scores, which runs may share a table, cells, tests and verdicts. No text."""
