"""The report of an experiment: one tidy table (`posbench.table`) -> statistics -> tables and figures -> templates."""
