"""Measure the speed of posbench and of other libraries, and check it on GPUs. The tests do not run these."""
