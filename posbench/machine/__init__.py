"""What runs are made on: the device and its memory, files, locks, signals, and what makers state of speed."""
