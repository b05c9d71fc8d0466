"""`omnistage`, and `python -m omnistage` where its script is not on the path."""

from __future__ import annotations

import signal


def main(prog_name: str | None = None) -> None:
    """Run the command line. Ctrl-C during its imports ends the process at once: Python would print where they were."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from omnistage.cli import app

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app(prog_name=prog_name)


if __name__ == "__main__":
    main("python -m omnistage")
