"""Frugal trains embedding tables that are larger than a GPU's memory, with the exact result of synchronous training.

    import frugal
    with frugal.Engine() as engine:
        users = engine.create_table("users", rows=1000, dim=16, optimizer=frugal.Adagrad(lr=0.1))
        trainer = engine.create_trainer()
        for step in range(100):
            batch = trainer.prefetch(step, users, keys)     # better some steps ahead
            with trainer.step(step):
                rows = trainer.lookup(batch)                # NumPy, (len(keys), 16)
                trainer.push_grad(batch, gradient(rows))

Arrays are NumPy arrays, or objects with the buffer protocol, DLPack or __cuda_array_interface__. The engine uses their
memory in place. Keys are int64, uint64 (the same bits) or int32. The package copies only int32 keys, to widen them.
include/frugal.h defines each call, for all languages.
"""

from . import config, errors
from ._buffers import Array
from ._checkpoint import Checkpoint, CheckpointInfo, checkpoints, copy_checkpoint, read_blob
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
    "Checkpoint",
    "CheckpointInfo",
    "Engine",
    "Memory",
    "Op",
    "Table",
    "TableInfo",
    "Trainer",
    "__version__",
    "checkpoints",
    "copy_checkpoint",
    "memory_needed",
    "read_blob",
    *config.__all__,
    *errors.__all__,
]
