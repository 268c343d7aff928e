"""A base class for the owners of a library handle: each is one object of one process."""

from __future__ import annotations

from typing import Any, NoReturn


class Single:
    """Refuses copy.copy, copy.deepcopy and pickling: a second object would use, and close, the first one's handle."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"a frugal.{type(self).__name__} cannot be copied or pickled: it is a handle of this process")
