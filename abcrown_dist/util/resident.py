"""Resident memory of the process, as the system counts it."""

from __future__ import annotations

import resource
import sys


def peak_rss_bytes() -> int:
    """Largest resident set of this process since it began, in bytes.

    `VmHWM` of /proc/self/status, or `getrusage` where there is no such file.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
