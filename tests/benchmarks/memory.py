"""What a process of its own holds: the peak of a measured part above what was there before it."""

import re
from pathlib import Path


def resident(field: str) -> int:
    """Bytes of this process now (VmRSS), or at most so far (VmHWM).

    Not getrusage's ru_maxrss: Linux keeps that over exec, so a child begins with its parent's peak, and the
    difference that is measured would be zero under a test runner that once held more.
    """
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


def forget_peak() -> None:
    """VmHWM begins anew."""
    Path("/proc/self/clear_refs").write_text("5")
