"""`python -m abcrown_dist`."""

import sys

from abcrown_dist.cli import main

sys.exit(main())
