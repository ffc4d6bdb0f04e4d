"""abcrown_dist: a complete neural-network verifier for one device or many."""

import os

__version__ = "0.1.0"

# onnxruntime reads this when it is imported, and would leave a database in the user's cache folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
