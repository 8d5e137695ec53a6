"""`python -m flowprefill.cli` is `flowprefill`."""

from flowprefill.cli import main

if __name__ == "__main__":
    main()
