"""Provide the commands around runs: search learning rates, plan costs, compare speeds, list runs."""
