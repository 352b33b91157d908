"""The report of an experiment: one tidy table (`posbench.reporting.table`) -> statistics -> tables and figures -> templates."""
