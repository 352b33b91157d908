"""Names to entries and classes: choices of conf/, classes of posbench and of packages, and files of the user's own."""
