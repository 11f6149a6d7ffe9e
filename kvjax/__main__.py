"""Lets `python -m kvjax` do what the command `kvjax` does."""

from kvjax import cli

if __name__ == "__main__":
    cli.main()
