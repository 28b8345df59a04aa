"""`python -m modicum`: the command line, also where its script is not on the path."""

from modicum.cli import main

if __name__ == "__main__":
    main()
