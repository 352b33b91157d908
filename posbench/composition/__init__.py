"""From the words of the command line to checked configurations, by Hydra: one run, or a sweep of many."""
