"""The report of an experiment: one tidy table (`posbench.results`) -> statistics -> tables and figures -> templates."""
