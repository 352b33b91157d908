"""Every scheme compiled for an H200 on a machine that has none; see `__main__`."""
