"""Waits in slices, so that Python runs its signal handlers meanwhile and Ctrl-C works."""

from __future__ import annotations

import math
from time import monotonic
from typing import Callable, Optional

from ._abi import FRUGAL_ERR_TIMEOUT
from .errors import last_error

SLICE_MS = 100
WORD_MS = 5000  # of a wait, until somebody is told of it


def milliseconds(timeout: float) -> float:
    """Whole milliseconds of a time-out in seconds; math.inf waits for ever."""
    if not timeout >= 0:
        raise ValueError(f"timeout is {timeout}, and must be a number of seconds, 0 or more")
    return timeout if timeout == math.inf else math.ceil(timeout * 1000)


def wait(call: Callable[[int], int], limit_ms: float, tell: Optional[Callable[[str], bool]] = None) -> None:
    """Makes a call that waits at most the milliseconds that it is given, until it answers or the limit is reached.

    A call that answers TIMEOUT took nothing and can be made again. tell: when the wait is long it gets the library's
    messages, which say what is waited for, until it returns True.
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
