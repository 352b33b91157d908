"""`python -m posbench`, from a checkout as it is."""

from posbench.cli import main

if __name__ == "__main__":
    main()
