"""Waits in slices. Python runs its signal handlers between two slices, so Ctrl-C works."""

from __future__ import annotations

import math
from time import monotonic
from typing import Callable, Optional

from ._abi import FRUGAL_ERR_TIMEOUT
from .errors import last_error

SLICE_MS = 100
WORD_MS = 5000  # a wait this long gives a warning


def milliseconds(timeout: float) -> float:
    """Converts a time-out in seconds to whole milliseconds; math.inf stays."""
    if not timeout >= 0:
        raise ValueError(f"timeout is {timeout}, and must be a number of seconds, 0 or more")
    return timeout if timeout == math.inf else math.ceil(timeout * 1000)


def wait(call: Callable[[int], int], limit_ms: float, tell: Optional[Callable[[str], bool]] = None) -> None:
    """Repeats a call, which waits up to the given milliseconds, while it returns TIMEOUT and the limit is not reached.

    A call that returned TIMEOUT had no effect, so it can be made again. If the wait is long, `tell` gets the library's
    messages, which name what the call waits for, until `tell` returns True.
    """
    status = call(int(min(limit_ms, SLICE_MS)))
    if status == FRUGAL_ERR_TIMEOUT and limit_ms > SLICE_MS:
        begin = monotonic()
        end = begin + (limit_ms - SLICE_MS) / 1000
        while status == FRUGAL_ERR_TIMEOUT:
            now = monotonic()
            if now >= end:
                break
            if tell is not None and (now - begin) * 1000 >= WORD_MS - SLICE_MS and tell(last_error(status).message):
                tell = None
            status = call(math.ceil(min((end - now) * 1000, SLICE_MS)))
    if status:
        raise last_error(status)
