"""The definition of every scheme, in float64 and NumPy: slow and obviously right."""
