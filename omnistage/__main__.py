"""`python -m omnistage`: the command line where its script is not on the path."""

from omnistage.cli import app

if __name__ == "__main__":
    app(prog_name="python -m omnistage")
