"""What half an hour on a GPU is spent on: is it right, is it fast, the reference table; see `__main__`."""
