"""Frugal: embedding tables larger than a GPU's memory, trained with the exact result of synchronous training.

    import frugal
    with frugal.Engine() as engine:
        users = engine.create_table("users", rows=1000, dim=16, optimizer=frugal.Adagrad(lr=0.1))
        trainer = engine.create_trainer()
        for step in range(100):
            batch = trainer.prefetch(step, users, keys)     # better some steps ahead
            with trainer.step(step):
                rows = trainer.lookup(batch)                # NumPy, (len(keys), 16)
                trainer.push_grad(batch, gradient(rows))

Arrays are NumPy's, or anything with the buffer protocol, DLPack or __cuda_array_interface__; their memory is used where
it lies. Keys are int64, uint64 (the same bits) or int32, which alone are widened into a new array. What a call means is
said once for all languages, in include/frugal.h.
"""

from . import config, errors
from ._buffers import Array
from ._engine import STALENESS_ASYNC, Engine
from ._lib import lib as _library
from ._ops import Op
from ._table import Memory, Table, TableInfo, memory_needed
from ._trainer import Batch, Trainer
from .config import *  # noqa: F403
from .errors import *  # noqa: F403

__version__: str = _library.frugal_version().decode()

__all__ = [
    "STALENESS_ASYNC",
    "Array",
    "Batch",
    "Engine",
    "Memory",
    "Op",
    "Table",
    "TableInfo",
    "Trainer",
    "__version__",
    "memory_needed",
    *config.__all__,
    *errors.__all__,
]
