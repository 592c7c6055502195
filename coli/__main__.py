"""`python -m coli` is the same as `coli`."""

from coli.cli.entry import main

if __name__ == "__main__":
    main()
