"""The program as a process: console script, `python -m abcrown_dist`, launcher for torchrun."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from abcrown_dist.cli import main
from abcrown_dist.util.errors import exit_code


def console() -> NoReturn:
    """Run the program and end the process with its exit code.

    The process ends without tearing the interpreter down. All files are closed by now, and unloading
    torch takes half a second or more, which counts where verification is timed from outside. Those
    who embed the program call `cli.main`, which returns.
    """
    code = main()
    lost = _flush()
    os._exit(code if lost is None else code or exit_code(lost))


def _flush() -> Exception | None:
    """Hand over what standard output and standard error still hold; what went wrong, if anything did."""
    lost: Exception | None = None
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # as under pythonw
                stream.flush()
        except (OSError, ValueError) as error:  # full disk, reader gone; closed
            lost = error
    return lost


if __name__ == "__main__":
    console()
