"""Report an experiment: one table of all scores (table.py) -> statistics -> tables and figures -> templates."""
