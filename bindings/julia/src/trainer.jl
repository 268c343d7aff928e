const TRAINER_OPTIONS =
    (rank = Integer, device = AbstractString, cache_bytes = Integer, cache_ratio = Real, replace = Bool)

"""
    Trainer(engine; rank = 0, device = "cpu", cache_bytes = 0, cache_ratio = 0.0, replace = false)
    Trainer(f, engine; options...)

Joins the engine as a rank. The second form calls `f(trainer)` and then leaves, or after an
exception abandons the rank: see [`abandon`](@ref). No step commits until every rank has joined
once.

- `rank` is one of `0:world_size-1`.
- `device` is `"cpu"`, or `"cuda:N"` in a library with CUDA.
- `cache_bytes` is the size of a private cache over all tables. `cache_ratio` is the same as a share
  of each table's rows; the larger of the two counts.
- `replace` takes the rank over from an unresponsive trainer process. It needs a service.

Returns a `Trainer`, or what `f` returns. Ownership: leave with [`close`](@ref close(::Trainer)) or
the `do` block. A forgotten trainer keeps its rank until its engine is closed: engine and trainer
keep each other from the collector, which closes both when the program refers to neither. Threads:
any may create one. One task at a time may use a trainer, on any thread. Errors: `FrugalError` with
`ERR_INVALID_ARGUMENT`, `ERR_EXISTS` (the rank has a trainer), `ERR_BUSY`, `ERR_DEVICE`,
`ERR_OUT_OF_MEMORY`, `ERR_TIMEOUT`, `ERR_UNSUPPORTED` (`replace` without a service). Since 0.1.

With a GPU, arrays of an op may be in that device's memory. This package has no type for GPU arrays.
Wrap their addresses with `unsafe_wrap(Array, Ptr{Float32}(address), (dim, n))`, and let only the
library access the result.
"""
mutable struct Trainer
    handle::ABI.Handle
    engine::Engine
    rank::Int
    host::Bool # outputs are in host memory
    in_call::Threads.Atomic{Bool}
    lent::Threads.Atomic{Int} # as in Engine

    function Trainer(engine::Engine; device::AbstractString = "cpu", replace::Bool = false, options...)
        check_options("Trainer", TRAINER_OPTIONS, options)
        text = Base.cconvert(Cstring, String(device))
        out = Ref{ABI.Handle}(C_NULL)
        GC.@preserve engine text begin
            bytes = Ptr{UInt8}(Base.unsafe_convert(Cstring, text))
            flags = replace ? ABI.TRAINER_REPLACE : UInt32(0)
            config = Ref(ABI.TrainerConfig(; device = bytes, flags = flags, options...))
            check(
                ccall(
                    ABI.frugal_trainer_create[],
                    Int32,
                    (ABI.Handle, Ref{ABI.TrainerConfig}, Ref{ABI.Handle}),
                    engine.handle,
                    config,
                    out,
                ),
            )
        end
        trainer = new(
            out[],
            engine,
            config[].rank,
            device == "cpu",
            Threads.Atomic{Bool}(false),
            Threads.Atomic{Int}(0),
        )
        finalizer(trainer) do t
            # A closed engine has closed its trainers.
            Threads.atomic_cas!(t.lent, 0, CLOSED) == 0 &&
                t.engine.lent[] != CLOSED &&
                ccall(ABI.frugal_trainer_close[], Int32, (ABI.Handle,), t.handle)
        end
        lock(() -> push!(engine.trainers, trainer), TRAINERS)
        return trainer
    end
end

function Trainer(f::Function, engine::Engine; options...)
    trainer = Trainer(engine; options...)
    result = try
        f(trainer)
    catch
        abandon_quietly(trainer)
        rethrow()
    end
    close(trainer)
    return result
end

# Makes a call of a trainer, `call()`, and checks the status that it returns. The library allows one
# call at a time and does not check that. Two at once would damage the trainer, so the second one is
# refused.
@inline function exclusive(call::F, trainer::Trainer) where {F}
    Threads.atomic_cas!(trainer.in_call, false, true) && two_at_once(trainer)
    status = OK
    try
        status = call()
    finally
        trainer.in_call[] = false
    end
    check(status)
    return nothing
end
@noinline two_at_once(trainer) =
    error("the trainer of rank $(trainer.rank) is in a call of another task; a trainer is used by one at a time")

# The same for calls in slices. An exception can leave such a call between two slices.
function exclusive_in_slices(call::F, trainer::Trainer, timeout_ms::Integer) where {F}
    limit = Int64(timeout_ms)
    Threads.atomic_cas!(trainer.in_call, false, true) && two_at_once(trainer)
    status = OK
    try
        status = in_slices(call, limit, trainer.engine.timeout_ms)
    finally
        trainer.in_call[] = false
    end
    check(status)
    return nothing
end

Base.deepcopy_internal(trainer::Trainer, ::IdDict) = trainer

Base.show(io::IO, trainer::Trainer) = print(io, "Trainer(rank = ", trainer.rank, ")")

"""
    close(trainer::Trainer)

Leaves the rank: from now on no rank waits for it.

Its declarations are cancelled. A step that it is inside of is aborted on all ranks. Returns
`nothing`; closing twice is no error. Threads: any one; a waiting call of the trainer throws
`ERR_CLOSED`. Errors: `ErrorException` inside [`push_borrowed`](@ref). Since 0.1.
"""
Base.close(trainer::Trainer) = end_trainer(trainer, ABI.frugal_trainer_close[])

"""
    abandon(trainer)

Gives a trainer up, for a program that fails: as if its process had ended.

With a service every uncommitted step is undone, and the calls of the other ranks throw
`ERR_PEER_LOST`. Their next step waits until a trainer joins as this rank. Without a service it is
[`close`](@ref close(::Trainer)). Returns `nothing`. Threads: as `close`. Errors: as `close`.
Since 0.1.
"""
abandon(trainer::Trainer) = end_trainer(trainer, ABI.frugal_trainer_abandon[])

function end_trainer(trainer::Trainer, call)
    may_close(trainer.lent, "trainer") || return nothing
    check_closed(
        GC.@preserve(trainer, ccall(call, Int32, (ABI.Handle,), trainer.handle)),
        trainer.lent,
    )
    lock(() -> filter!(t -> t !== trainer, trainer.engine.trainers), TRAINERS)
    return nothing
end

# Abandons a trainer after an exception, which is reported instead of an error here.
function abandon_quietly(trainer::Trainer)
    try
        abandon(trainer)
    catch error
        error isa FrugalError || rethrow()
    end
    return nothing
end

"""
    set_stream(trainer, stream)

Names the stream, a `cudaStream_t` as `Ptr{Cvoid}`, in which this trainer's calls do their GPU work
from now on. `C_NULL` is the device's default stream.

Returns `nothing`. Ownership: the caller keeps the stream, which must live until the step is
committed. Threads: one at a time for a trainer. Errors: `FrugalError` with `ERR_UNSUPPORTED` (the
cpu device has no streams), `ERR_DEVICE`. Since 0.1.
"""
function set_stream(trainer::Trainer, stream::Ptr)
    GC.@preserve trainer exclusive(trainer) do
        ccall(ABI.frugal_set_stream[], Int32, (ABI.Handle, Ptr{Cvoid}), trainer.handle, stream)
    end
    return nothing
end

"""
    prefetch(trainer, step, table, keys; padding_key = nothing)
    prefetch(trainer, step, ops)

Declares keys of a step that this trainer has not begun. It uses table, keys and padding of each op
(a tuple or vector of [`Op`](@ref)).

The call does not wait. Several declarations for one step add up. Returns a [`Batch`](@ref), which
names the declaration until its step ends. Ownership: the library copies the keys. Threads: one at a
time for a trainer. Errors: `FrugalError` with `ERR_KEY_OUT_OF_RANGE`, `ERR_STEP_RANGE` (the step
has begun, or lies beyond the lookahead), `ERR_STEP_ABORTED`; then nothing is declared. Since 0.1.
"""
prefetch(trainer::Trainer, step::Integer, table::Table, keys; padding_key = nothing) =
    prefetch(trainer, step, (Op(table, keys; padding_key = padding_key),))

function prefetch(trainer::Trainer, step::Integer, ops::Ops)
    list = settled(ops)
    for op in list
        op.keys === nothing && throw(ArgumentError("an op without keys declares none"))
    end
    parts = Part[Part(op.table, count_of(op)) for op in list]
    out = Ref{ABI.Handle}(C_NULL)
    number = UInt64(step)
    GC.@preserve trainer list begin
        array = abi_ops(declare_op, list, trainer.host)
        exclusive(trainer) do
            ccall(
                ABI.frugal_prefetch[],
                Int32,
                (ABI.Handle, UInt64, Ptr{Cvoid}, Csize_t, Ref{ABI.Handle}),
                trainer.handle,
                number,
                array,
                length(list),
                out,
            )
        end
    end
    return Batch(out[], trainer, parts)
end

"""
    cancel(trainer, batch)

Takes a declaration back before its step begins (`frugal_prefetch_cancel`).

Returns `nothing`. Threads: one at a time for the trainer that declared it. Errors: `FrugalError`
with `ERR_BAD_HANDLE`, `ERR_STEP_RANGE`, `ERR_STEP_ABORTED`, `ERR_INVALID_ARGUMENT` (another rank
declared it). Since 0.1.
"""
function cancel(trainer::Trainer, batch::Batch)
    GC.@preserve trainer exclusive(trainer) do
        ccall(
            ABI.frugal_prefetch_cancel[],
            Int32,
            (ABI.Handle, ABI.Handle),
            trainer.handle,
            batch.handle,
        )
    end
    return nothing
end

"""
    step_begin(trainer, step; timeout_ms = Frugal.TIMEOUT_DEFAULT)

Begins a step on this rank; this is the gate. It waits for each earlier update that a declared row
of the step must see.

The first step is any number up to 2^64 - 66, the same on all ranks. Each later one is the number
after it. Returns `nothing`. The call waits in slices. Between them the collector, other tasks of
this thread and Ctrl-C have effect. Threads: one at a time for a trainer. Errors: `FrugalError` with
`ERR_STEP_ORDER`, `ERR_TIMEOUT` (the message names what the call waited for; call again),
`ERR_STEP_ABORTED` (the message names the step to begin), `ERR_CLOSED`, `ERR_UNHEALTHY`. Since 0.1.
"""
function step_begin(trainer::Trainer, step::Integer; timeout_ms::Integer = TIMEOUT_DEFAULT)
    number = UInt64(step)
    GC.@preserve trainer exclusive_in_slices(trainer, timeout_ms) do slice
        ccall(
            ABI.frugal_step_begin[],
            Int32,
            (ABI.Handle, UInt64, Int64),
            trainer.handle,
            number,
            slice,
        )
    end
    return nothing
end

"""
    lookup!(trainer, batch, rows; options...)
    lookup!(trainer, table, keys, rows; options...)
    lookup!(trainer, ops)

Reads rows in a step, and creates rows of hashed tables. It takes a declared batch of one table, any
keys, or ops with their `rows`.

`rows` is a `(dim, n)` matrix of `Float32` or a view of one with contiguous columns; `n` is the
number of keys, or of bags if pooled. The options are those of [`Op`](@ref). Returns `rows`, or
`nothing`. Ownership: the call writes `rows` only until it returns; after an error they are
undefined. Threads: one at a time for a trainer. Errors: `FrugalError` with `ERR_NOT_IN_STEP`,
`ERR_KEY_OUT_OF_RANGE`, `ERR_TABLE_FULL`, `ERR_OUT_OF_MEMORY`, `ERR_TIMEOUT` (keys that were not
declared), `ERR_STEP_ABORTED`. Since 0.1.
"""
function lookup!(trainer::Trainer, ops::Ops)
    list = settled(ops)
    GC.@preserve trainer list begin
        array = abi_ops(lookup_op, list, trainer.host)
        exclusive(trainer) do
            ccall(
                ABI.frugal_lookup[],
                Int32,
                (ABI.Handle, Ptr{Cvoid}, Csize_t),
                trainer.handle,
                array,
                length(list),
            )
        end
    end
    return nothing
end

@inline function lookup!(trainer::Trainer, batch::Batch, rows; options...)
    lookup!(trainer, (Op(single(batch); rows = rows, options...),))
    return rows
end

@inline function lookup!(trainer::Trainer, table::Table, keys, rows; options...)
    lookup!(trainer, (Op(table, keys; rows = rows, options...),))
    return rows
end

# Checks that a batch has one part, which a call without ops needs.
@inline function single(batch::Batch)
    length(batch.parts) == 1 || several(batch)
    return batch
end
@noinline several(batch) = throw(
    ArgumentError("the batch has $(length(batch.parts)) parts: give ops, Op(batch, part; …) of each"),
)

"""
    lookup(trainer, batch; options...)
    lookup(trainer, table, keys; options...)

Reads rows in a step into a new `(dim, n)` matrix and returns it. Otherwise as [`lookup!`](@ref).
Since 0.1.
"""
lookup(trainer::Trainer, batch::Batch; options...) = lookup_new(trainer, Op(single(batch); options...))
lookup(trainer::Trainer, table::Table, keys; options...) = lookup_new(trainer, Op(table, keys; options...))

with_rows(op::Op, rows, found) = with_data(op, rows, op.grads, found)
with_grads(op::Op, grads) = with_data(op, op.rows, grads, op.found)
with_data(op::Op, rows, grads, found) = Op(
    op.table,
    op.batch,
    op.part,
    op.keys,
    op.pooling,
    op.offsets,
    op.weights,
    op.weight_grads,
    rows,
    grads,
    found,
    op.padding_key,
    op.flags,
)

function lookup_new(trainer::Trainer, op::Op)
    rows = Matrix{Float32}(undef, op.table.dim, rows_of(op))
    lookup!(trainer, (with_rows(op, rows, nothing),))
    return rows
end

"""
    push_grad(trainer, batch, grads; options...)
    push_grad(trainer, table, keys, grads; options...)
    push_grad(trainer, ops)

Submits gradients of the step: of a declared batch of one table, of any keys, or the `grads` of ops.

A row's gradients are summed over positions, pushes and ranks. The optimizer is applied once, when
the step has ended on all ranks. `grads` is a `(dim, n)` matrix of `Float32` or a view of one with
contiguous columns. The options are those of [`Op`](@ref). Returns `nothing`. Ownership: the call
reads `grads` only until it returns; then they may be overwritten. Threads: one at a time for a
trainer. The call never waits for another rank. Errors: `FrugalError` with `ERR_NOT_IN_STEP`,
`ERR_KEY_OUT_OF_RANGE`, `ERR_TABLE_FULL`, `ERR_OUT_OF_MEMORY`, `ERR_NAN`, `ERR_STEP_ABORTED`,
`ERR_TIMEOUT`; then nothing is taken. Since 0.1.
"""
function push_grad(trainer::Trainer, ops::Ops)
    list = settled(ops)
    GC.@preserve trainer list begin
        array = abi_ops(push_op, list, trainer.host)
        exclusive(trainer) do
            ccall(
                ABI.frugal_push_grad[],
                Int32,
                (ABI.Handle, Ptr{Cvoid}, Csize_t),
                trainer.handle,
                array,
                length(list),
            )
        end
    end
    return nothing
end

@inline push_grad(trainer::Trainer, batch::Batch, grads; options...) =
    push_grad(trainer, (Op(single(batch); grads = grads, options...),))

@inline push_grad(trainer::Trainer, table::Table, keys, grads; options...) =
    push_grad(trainer, (Op(table, keys; grads = grads, options...),))

"""
    push_borrowed(f, trainer, batch; options...)
    push_borrowed(f, trainer, table, keys; options...)

Calls `f(grads)` with memory for gradients that the engine lends, and pushes the gradients that `f`
wrote there. The engine takes them without a copy where that is faster.

`grads` is a `(dim, n)` `Matrix{Float32}`, undefined at first, that the collector does not own. It
is valid only inside `f`, so keep no reference to it. Inside `f` the trainer's calls are refused,
and so is closing the trainer or its engine. The options are those of [`Op`](@ref) for
[`push_grad`](@ref). Returns `nothing`; if `f` throws, nothing is pushed. Threads: one at a time for
a trainer. Errors: those of `push_grad` and of `f`. Since 0.1.

    push_borrowed(trainer, batch) do grads
        grads .= 2 .* rows
    end
"""
push_borrowed(f, trainer::Trainer, batch::Batch; options...) =
    push_lent(f, trainer, Op(single(batch); options...))
push_borrowed(f, trainer::Trainer, table::Table, keys; options...) =
    push_lent(f, trainer, Op(table, keys; options...))

function push_lent(f, trainer::Trainer, op::Op)
    GC.@preserve trainer lending(trainer.engine.lent, "engine") do
        lending(trainer.lent, "trainer") do
            grads = unsafe_borrow(trainer, op.table.dim, rows_of(op))
            Threads.atomic_cas!(trainer.in_call, false, true) && two_at_once(trainer)
            try
                f(grads)
            finally
                trainer.in_call[] = false
            end
            push_grad(trainer, (with_grads(op, grads),))
        end
    end
    return nothing
end

# Calls `f()`. Meanwhile the object with this count cannot be closed.
function lending(f, lent::Threads.Atomic{Int}, what)
    while true
        before = lent[]
        before == CLOSED &&
            throw(FrugalError(ERR_BAD_HANDLE, status_name(ERR_BAD_HANDLE), "the $what is closed", 0, 0))
        Threads.atomic_cas!(lent, before, before + 1) == before && break
    end
    try
        return f()
    finally
        Threads.atomic_sub!(lent, 1)
    end
end

"""
    Frugal.unsafe_borrow(trainer, dim, n)

Memory for gradients that the engine lends. A push from it takes them without a copy where that is
faster.

Returns a `(dim, n)` `Matrix{Float32}` that the collector does not own, undefined at first.
Ownership: the engine. Write the matrix between [`step_begin`](@ref) and the push. After the push
neither read nor write it. Call this function again for each step. Closing the trainer or the engine
takes the memory back; the collector closes them if nothing refers to them. After that the matrix is
a dangling pointer, as with any `unsafe_wrap`. [`push_borrowed`](@ref) ensures all of this. Threads:
one at a time for a trainer. Errors: `FrugalError` with `ERR_NOT_IN_STEP`, `ERR_STEP_ABORTED`,
`ERR_OUT_OF_MEMORY`. Since 0.1.
"""
function unsafe_borrow(trainer::Trainer, dim::Integer, n::Integer)
    out = Ref{Ptr{Cvoid}}(C_NULL)
    bytes = Csize_t(Base.checked_mul(Base.checked_mul(Int(dim), Int(n)), sizeof(Float32)))
    GC.@preserve trainer exclusive(trainer) do
        ccall(
            ABI.frugal_borrow[],
            Int32,
            (ABI.Handle, Csize_t, Ref{Ptr{Cvoid}}),
            trainer.handle,
            bytes,
            out,
        )
    end
    bytes == 0 && return Matrix{Float32}(undef, dim, n)
    return unsafe_wrap(Array, Ptr{Float32}(out[]), (Int(dim), Int(n)))
end

"""
    step_end(trainer, step; skip = false)

Ends the step on this rank. The step commits when the last rank has ended it.

With `skip` (an overflow was found) the step commits without any update; one rank that gives it is
enough. Returns `nothing`. Threads: one at a time for a trainer. The call never waits for another
rank. Errors: `FrugalError` with `ERR_NOT_IN_STEP`, `ERR_STEP_ORDER`, `ERR_STEP_ABORTED`,
`ERR_OUT_OF_MEMORY` (call again); on a GPU `ERR_NAN`, `ERR_DEVICE`, `ERR_TIMEOUT`,
`ERR_INVALID_ARGUMENT`. Since 0.1.
"""
function step_end(trainer::Trainer, step::Integer; skip::Bool = false, flags::Integer = 0)
    number = UInt64(step)
    bits = UInt32(flags) | (skip ? STEP_SKIP : UInt32(0))
    GC.@preserve trainer exclusive(trainer) do
        ccall(
            ABI.frugal_step_end[],
            Int32,
            (ABI.Handle, UInt64, UInt32),
            trainer.handle,
            number,
            bits,
        )
    end
    return nothing
end

"""
    step_abort(trainer)

Undoes every uncommitted step on all ranks. Then all ranks begin the step after the last committed
one again.

Returns `nothing`. Threads: one at a time for a trainer. Errors: `FrugalError` with
`ERR_NOT_IN_STEP`, `ERR_STEP_ABORTED` (another rank aborted first). Since 0.1.
"""
function step_abort(trainer::Trainer)
    GC.@preserve trainer exclusive(trainer) do
        ccall(ABI.frugal_step_abort[], Int32, (ABI.Handle,), trainer.handle)
    end
    return nothing
end

"""
    Frugal.read!(engine, ops; trainer = nothing, timeout_ms = Frugal.TIMEOUT_DEFAULT)

Reads rows by their keys, for evaluation or serving, into the `rows` and `found` of ops. It creates
no row and declares nothing.

Missing keys read as zeros, and `found` marks the keys that have rows. With a trainer inside a step
the call sees what [`lookup!`](@ref) sees. With a trainer between steps it waits, like the next
step's gate, for the other ranks. Without a trainer it does not wait for a rank's step, but throws
`ERR_BUSY`. Returns `nothing`. The call waits in slices. Threads: any (a trainer: one at a time).
Errors: `FrugalError` with `ERR_KEY_OUT_OF_RANGE`, `ERR_BUSY`, `ERR_TIMEOUT`, `ERR_STEP_ABORTED`,
`ERR_INVALID_ARGUMENT` (an op with a batch). Since 0.1.
"""
function read!(
    engine::Engine,
    ops::Ops;
    trainer::Union{Nothing,Trainer} = nothing,
    timeout_ms::Integer = TIMEOUT_DEFAULT,
)
    list = settled(ops)
    GC.@preserve engine trainer list begin
        rank = trainer === nothing ? C_NULL : trainer.handle
        array = abi_ops(read_op, list, trainer === nothing || trainer.host)
        n = length(list)
        call(slice) = ccall(
            ABI.frugal_read[],
            Int32,
            (ABI.Handle, ABI.Handle, Ptr{Cvoid}, Csize_t, Int64),
            engine.handle,
            rank,
            array,
            n,
            slice,
        )
        if trainer === nothing
            check(in_slices(call, Int64(timeout_ms), engine.timeout_ms))
        else
            exclusive_in_slices(call, trainer, timeout_ms)
        end
    end
    return nothing
end

"""
    Frugal.read(engine, table, keys; trainer = nothing, timeout_ms = Frugal.TIMEOUT_DEFAULT, options...)

Reads rows of one table, for evaluation or serving. The options are those of [`Op`](@ref).

Returns `(rows, found)`: a new `(dim, n)` matrix, and a `Vector{Bool}` with a flag for each key.
Otherwise as [`Frugal.read!`](@ref). Since 0.1.
"""
function read(
    engine::Engine,
    table::Table,
    keys;
    trainer::Union{Nothing,Trainer} = nothing,
    timeout_ms::Integer = TIMEOUT_DEFAULT,
    options...,
)
    op = Op(table, keys; options...)
    rows = Matrix{Float32}(undef, table.dim, rows_of(op))
    found = Vector{Bool}(undef, count_of(op))
    read!(engine, (with_rows(op, rows, found),); trainer = trainer, timeout_ms = timeout_ms)
    return rows, found
end
