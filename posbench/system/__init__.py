"""The machine that runs are made on: device, files, locks, signals, the terminal, and faults of compilers."""
