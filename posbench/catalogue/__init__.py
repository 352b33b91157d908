"""Find what names stand for: choices of conf/, classes of posbench and of packages, and files of the user's own."""
