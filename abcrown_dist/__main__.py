"""The program as a process: console script, `python -m abcrown_dist`, launcher for torchrun."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from abcrown_dist.cli import INTERNAL_ERROR, main


def console() -> NoReturn:
    """Run the program and end the process with its exit code.

    The process ends without tearing the interpreter down. All files are closed by now, and unloading
    torch takes half a second or more, which counts where verification is timed from outside. Those
    who embed the program call `cli.main`, which returns.
    """
    code = main()
    os._exit(code if _flush() else code or INTERNAL_ERROR)


def _flush() -> bool:
    """Hand over what standard output and standard error still hold; whether that worked."""
    done = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # full disk, reader gone; closed
            done = False
    return done


if __name__ == "__main__":
    console()
