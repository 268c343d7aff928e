"""
Frugal trains embedding tables that are larger than a GPU's memory, with the exact result of synchronous training.

The package is a thin layer over the C ABI of `frugal.h`, which says what each call means. Functions have the names
of the C functions without their prefix. A `!` says that arrays of the caller are written.

    using Frugal

    Engine() do engine
        adagrad = Optimizer(:adagrad; lr = 0.1)
        users = Table(engine, "users"; rows = 1000, dim = 16, optimizer = adagrad, init = :normal, init_b = 0.1)
        Trainer(engine) do trainer
            for step = 0:9
                keys = rand(UInt64(0):UInt64(999), 256)
                batch = prefetch(trainer, step, users, keys)
                step_begin(trainer, step)
                rows = lookup(trainer, batch)      # a (16, 256) matrix: a column is a row of the table
                push_grad(trainer, batch, rows)    # the gradient of sum(abs2, rows) / 2
                step_end(trainer, step)
            end
        end
    end

# What holds for all functions

- **Matrices** are `(dim, n)`: column `i` is the row of the `i`-th key or bag. They go to the library by address,
  and so does a view whose columns are contiguous (`view(x, :, 3:8)`, `view(x, 1:16, :)`). Anything else is an
  `ArgumentError` or a `DimensionMismatch`; nothing is converted or copied.
- **Keys** are vectors of `UInt64` or `Int64` (the same bits) that go by address. `Int32` and `UInt32`, which the
  ABI does not have, are widened into a new vector; that is the one copy that the package makes. Ids of dense tables
  start at 0.
- **Errors** of the library are a [`FrugalError`](@ref), which has the status and the message.
- **Life.** `do` blocks and `close` close an engine or a trainer at a known time; the collector closes what was
  forgotten. Closing twice is no error, and a call on what was closed is a `FrugalError`.
- **Threads.** A `Trainer` is used by one task at a time, everything else by any number.
- **Waits.** `step_begin`, `flush` and `read!` wait in short slices. Between them the collector and other tasks run:
  a thread that is inside a C function would keep the collector from stopping it, and with it all other threads.
- **Logs.** There is no log hook: it would be called by threads of the library, which must not run Julia code.
- **Time-outs** are in milliseconds; `Frugal.TIMEOUT_DEFAULT` is the engine's, 0 polls, `Frugal.TIMEOUT_INFINITE`
  waits for ever.
"""
module Frugal

include("abi.jl")
using .ABI:
    Memory,
    NO_STEP,
    Optimizer,
    STALENESS_ASYNC,
    STEP_SKIP,
    Stats,
    TIMEOUT_DEFAULT,
    TIMEOUT_INFINITE,
    TableInfo

export Batch, Engine, FrugalError, Op, Optimizer, Table, Trainer
export abandon, cancel, committed_step, describe, drop, health, lookup, lookup!, memory_needed, prefetch
export metrics, push_borrowed, push_grad, serve, set_optimizer, set_stream, stats, step_abort, step_begin, step_end
export table_find, table_names, trace, trace_start, trace_stop

include("errors.jl")
include("arrays.jl")
include("wait.jl")
include("engine.jl")
include("table.jl")
include("ops.jl")
include("trainer.jl")

end # module
