"""abcrown_dist: a complete neural-network verifier for one device or many."""

import os

__version__ = "0.1.0"

# Both are read when a library is loaded, and the user's own setting stands.
# Threads that spin while they wait for each other make branching 20 times slower as soon as something else
# wants the processor; asleep they cost nothing that a measurement shows.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# onnxruntime would otherwise leave a database in the user's cache folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
