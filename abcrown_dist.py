"""Launcher for torchrun. The import below finds the package: in one folder, it goes before a module."""

from abcrown_dist.__main__ import console

if __name__ == "__main__":
    console()
