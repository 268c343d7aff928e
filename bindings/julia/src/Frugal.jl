"""
Frugal trains embedding tables that are larger than a GPU's memory, with the exact result of
synchronous training.

The package is a thin layer over the C ABI of `frugal.h`, which defines each call. Functions have
the names of the C functions without their prefix. A function with a `!` writes arrays of the
caller.

    using Frugal

    Engine() do engine
        adagrad = Optimizer(:adagrad; lr = 0.1)
        start = (init = :normal, init_b = 0.1)
        users = Table(engine, "users"; rows = 1000, dim = 16, optimizer = adagrad, start...)
        Trainer(engine) do trainer
            for step = 0:9
                keys = rand(UInt64(0):UInt64(999), 256)
                batch = prefetch(trainer, step, users, keys)
                step_begin(trainer, step)
                rows = lookup(trainer, batch)      # (16, 256): a column is a row of the table
                push_grad(trainer, batch, rows)    # the gradient of sum(abs2, rows) / 2
                step_end(trainer, step)
            end
        end
    end

# Rules for all functions

- **Matrices** are `(dim, n)`: column `i` is the row of the `i`-th key or bag. The library gets
  their address, also that of a view with contiguous columns (`view(x, :, 3:8)`,
  `view(x, 1:16, :)`). Any other array is an `ArgumentError` or a `DimensionMismatch`; the package
  neither converts nor copies it.
- **Keys** are vectors of `UInt64` or `Int64` (the same bits), which the library gets by address.
  The ABI has no `Int32` and `UInt32` keys: these are widened into a new vector, the only copy that
  the package makes. Ids of dense tables start at 0.
- **Errors** of the library are a [`FrugalError`](@ref), which has the status and the message.
- **Life.** `do` blocks and `close` close an engine or a trainer at a known time; the collector
  closes forgotten ones. Closing twice is no error. A call on a closed object throws a
  `FrugalError`.
- **Threads.** One task at a time may use a `Trainer`, any number of tasks all other objects.
- **Waits.** `step_begin`, `flush` and `read!` wait in short slices. Between them the collector and
  other tasks run. The collector cannot stop a thread inside a C function; a long wait there would
  hold up all threads.
- **Logs.** There is no log hook: threads of the library would call it, and these must not run Julia
  code.
- **Time-outs** are in milliseconds. `Frugal.TIMEOUT_DEFAULT` is the engine's time-out, 0 polls, and
  `Frugal.TIMEOUT_INFINITE` waits for ever.
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
