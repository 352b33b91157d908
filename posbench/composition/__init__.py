"""Turn the overrides of the command line into checked configurations with Hydra, for one run or a sweep of many."""
