"""Report an experiment: one tidy table (table.py) -> statistics -> tables and figures -> templates."""
