"""Launcher for torchrun. The import below finds the package: in one folder, it goes before a module."""

import sys

from abcrown_dist.cli import main

if __name__ == "__main__":
    sys.exit(main())
