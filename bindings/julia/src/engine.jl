"""
    Engine(; options...)
    Engine(f; options...)

Opens an engine and starts its threads. The second form calls `f(engine)` and then closes the
engine, also after an exception. After an exception it first abandons the engine's trainers, see
[`abandon`](@ref).

Options; `frugal_config` in `frugal.h` defines them:

- `world_size = 1`, the number of ranks
- `lookahead = 10`, the number of future steps that may be declared, up to 40
- `flush_threads = 1`
- `flush_mode = :auto`, or `:at_once`, `:deferred`, `:write_through`, `:tree_heap`
- `staleness = 0`, in steps, or `Frugal.STALENESS_ASYNC`
- `pending_bytes = 2^30`
- `host_bytes = typemax(UInt64)`
- `timeout_ms = 1_800_000`
- `backing = :private`, or `:shm`
- `seed = 0`
- `service = nothing`, or the address of a controller to attach to, as in [`serve`](@ref); the other
  options must equal those of its engine

Returns an `Engine`, or what `f` returns. Ownership: close it with [`close`](@ref close(::Engine))
or the `do` block. The collector closes a forgotten engine; that writes the pending updates on the
collecting thread, so prefer to close it. Threads: any; any number of threads may use an engine.
Errors: `FrugalError` with `ERR_INVALID_ARGUMENT`, `ERR_OUT_OF_MEMORY`, `ERR_UNSUPPORTED` (this
build cannot attach), `ERR_PEER_LOST` (no controller serves that address). Since 0.1.
"""
mutable struct Engine
    handle::ABI.Handle
    timeout_ms::Int64
    lent::Threads.Atomic{Int} # uses of memory that the engine lent; CLOSED at the end
    trainers::Vector{Any} # the open trainers, which the engine keeps from the collector

    function Engine(; options...)
        config = Ref(engine_config(; options...))
        # The address needs to live only during the call.
        service = Base.get(options, :service, nothing)
        address = service === nothing ? nothing : Base.cconvert(Cstring, String(service))
        out = Ref{ABI.Handle}(C_NULL)
        GC.@preserve address begin
            if address !== nothing
                config[] = with_service(config[], Ptr{UInt8}(Base.unsafe_convert(Cstring, address)))
                await_controller(config[])
            end
            check(ccall(ABI.frugal_open[], Int32, (Ref{ABI.Config}, Ref{ABI.Handle}), config, out))
        end
        engine = new(out[], config[].timeout_ms, Threads.Atomic{Int}(0), [])
        # A finalizer may run on any thread at any allocation, even between a failed call and
        # frugal_last_error. So it makes only this call, and none for a closed engine: a failed call
        # would replace the last error.
        finalizer(engine) do e
            Threads.atomic_cas!(e.lent, 0, CLOSED) == 0 && ccall(ABI.frugal_close[], Int32, (ABI.Handle,), e.handle)
        end
        return engine
    end
end

const ENGINE_OPTIONS = (
    world_size = Integer,
    lookahead = Integer,
    flush_threads = Integer,
    flush_mode = Name,
    staleness = Integer,
    pending_bytes = Integer,
    host_bytes = Integer,
    timeout_ms = Integer,
    backing = Name,
    seed = Integer,
    service = Union{AbstractString,Nothing},
)

function engine_config(; options...)
    check_options("Engine", ENGINE_OPTIONS, options)
    return named_config(; options...)
end

# Waits until a controller listens at the address. Between slices other tasks, the collector and
# Ctrl-C have effect.
function await_controller(config::ABI.Config)
    probe = Ref(with_service(ABI.Config(; flags = ABI.OBSERVE, timeout_ms = 0), config.service))
    out = Ref{ABI.Handle}(C_NULL)
    start, pause = time_ns(), 0.001
    while true
        status = ccall(ABI.frugal_open[], Int32, (Ref{ABI.Config}, Ref{ABI.Handle}), probe, out)
        if status == OK
            check(ccall(ABI.frugal_close[], Int32, (ABI.Handle,), out[]))
            return nothing
        end
        status == ERR_PEER_LOST || return nothing # the caller's frugal_open reports other errors
        code = last_system_code()
        code in (Libc.ENOENT, Libc.ECONNREFUSED, Libc.ECONNRESET, Libc.EAGAIN) || return nothing
        if config.timeout_ms != TIMEOUT_INFINITE && (time_ns() - start) ÷ 1_000_000 >= config.timeout_ms
            text = "no controller at $(unsafe_string(config.service)) within $(config.timeout_ms) ms " *
                   "($(Libc.strerror(code)))"
            throw(FrugalError(status, status_name(status), text, code, 0))
        end
        sleep(pause)
        pause = min(2 * pause, 0.05)
    end
end

with_service(config::ABI.Config, service::Ptr{UInt8}) =
    ABI.Config((name === :service ? service : getfield(config, name) for name in fieldnames(ABI.Config))...)

# The configuration without the service, whose memory the caller keeps.
named_config(; flush_mode = :auto, backing = :private, service = nothing, options...) = ABI.Config(;
    flush_mode = code(ABI.FLUSH_MODE, flush_mode, "flush_mode"),
    backing = code(ABI.BACKING, backing, "backing"),
    options...,
)

function Engine(f::Function; options...)
    engine = Engine(; options...)
    try
        return f(engine)
    catch
        for trainer in lock(() -> copy(engine.trainers), TRAINERS)
            abandon_quietly(trainer)
        end
        rethrow()
    finally
        close(engine)
    end
end

# A copy would be a second owner of the handle.
Base.deepcopy_internal(engine::Engine, ::IdDict) = engine

Base.show(io::IO, engine::Engine) =
    print(io, "Engine(", isopen(engine) ? "open" : "closed", ")")

# The count in `lent` of a closed engine or trainer.
const CLOSED = -1

# Whether the caller is the first to close. While memory is lent, closing is an error: it would free
# that memory.
function may_close(lent::Threads.Atomic{Int}, what)
    before = Threads.atomic_cas!(lent, 0, CLOSED)
    before > 0 && error("the $what cannot be closed inside of push_borrowed")
    return before == 0
end

# Closing returns BAD_HANDLE if the engine, or a copy of the object, was closed before.
function check_closed(status::Int32, lent::Threads.Atomic{Int})
    if status != OK && status != ERR_BAD_HANDLE
        lent[] = 0 # it is still open
        check(status)
    end
    return nothing
end

# Guards the lists of open trainers. Finalizers do not take it.
const TRAINERS = ReentrantLock()

"""
    close(engine::Engine)

Stops the engine's threads, writes the pending updates and frees all memory, also the tables.

Returns `nothing`; closing twice is no error. Trainers, tables and batches of the engine become
closed handles. A step that a rank is inside of is lost. Waiting calls of other threads throw
`ERR_CLOSED`. Threads: any. Errors: `ErrorException` inside [`push_borrowed`](@ref). Since 0.1.
"""
function Base.close(engine::Engine)
    may_close(engine.lent, "engine") || return nothing
    check_closed(
        GC.@preserve(engine, ccall(ABI.frugal_close[], Int32, (ABI.Handle,), engine.handle)),
        engine.lent,
    )
    lock(() -> empty!(engine.trainers), TRAINERS)
    return nothing
end

"""
    isopen(engine::Engine)

Returns whether the engine is open, a `Bool`. Threads: any. Since 0.1.
"""
Base.isopen(engine::Engine) = health(engine) != ERR_BAD_HANDLE

"""
    health(engine)

The health of the engine. A failure stays.

Returns the status as `Int32`: `Frugal.OK`, or the status of the first background failure, after
which every call throws `ERR_UNHEALTHY`. If the engine was closed it is `Frugal.ERR_BAD_HANDLE`.
Throws nothing. Threads: any. Since 0.1.
"""
health(engine::Engine) =
    GC.@preserve engine ccall(ABI.frugal_health[], Int32, (ABI.Handle,), engine.handle)

"""
    flush(engine::Engine; timeout_ms = Frugal.TIMEOUT_DEFAULT)

Waits until every update of every committed step is in the host rows.

Returns `nothing`. Threads: any; the calling thread helps. Errors: `FrugalError` with `ERR_TIMEOUT`,
`ERR_UNHEALTHY`. Since 0.1.
"""
function Base.flush(engine::Engine; timeout_ms::Integer = TIMEOUT_DEFAULT)
    GC.@preserve engine check(
        in_slices(Int64(timeout_ms), engine.timeout_ms) do slice
            ccall(ABI.frugal_flush[], Int32, (ABI.Handle, Int64), engine.handle, slice)
        end,
    )
    return nothing
end

"""
    committed_step(engine)

The last step that all ranks have ended.

Returns a `UInt64`, or `nothing` if there is none yet. Threads: any. Since 0.1.
"""
function committed_step(engine::Engine)
    out = Ref(NO_STEP)
    GC.@preserve engine check(
        ccall(ABI.frugal_committed_step[], Int32, (ABI.Handle, Ref{UInt64}), engine.handle, out),
    )
    return out[] == NO_STEP ? nothing : out[]
end

"""
    stats(engine)

Counters since the engine was opened.

Returns a struct with the fields of `frugal_stats` by name, all `UInt64`. Times are in nanoseconds.
In `gate_waits` each slice of a wait counts. Threads: any. Since 0.1.
"""
function stats(engine::Engine)
    out = Ref(Stats())
    GC.@preserve engine check(
        ccall(ABI.frugal_get_stats[], Int32, (ABI.Handle, Ref{Stats}), engine.handle, out),
    )
    return out[]
end

"""
    metrics(engine)

The text of a Prometheus scrape, in text exposition format 0.0.4: the counters of [`stats`](@ref),
the pending updates, health, the last committed step, rows and bytes of each table, and the step of
each rank.

Returns a `String`. Threads: any. Since 0.1.
"""
function metrics(engine::Engine)
    text, size = Vector{UInt8}(undef, 16384), Ref{Csize_t}(0)
    while true
        status = GC.@preserve engine ccall(
            ABI.frugal_metrics[],
            Int32,
            (ABI.Handle, Ptr{UInt8}, Csize_t, Ref{Csize_t}),
            engine.handle,
            text,
            length(text),
            size,
        )
        if status != ERR_OVERFLOW
            check(status)
            return String(resize!(text, size[] - 1)) # without the 0 at its end
        end
        resize!(text, size[] + 1024) # the text may grow between two calls
    end
end

"""
    trace(f, engine, path; events = 131072)

Records time spans of the engine's work while `f()` runs. Then, also after an exception, it writes
them to the file `path`: see [`trace_start`](@ref) and [`trace_stop`](@ref).

Returns what `f` returns. Threads: any. Errors: `FrugalError` with `ERR_EXISTS` (a trace is already
running), `ERR_INVALID_ARGUMENT` (the file cannot be written: `system_code` is the cause; the
recording is discarded). Since 0.1.
"""
function trace(f::Function, engine::Engine, path::AbstractString; events::Integer = 131072)
    trace_start(engine; events = events)
    try
        return f()
    finally
        try
            trace_stop(engine, path)
        catch
            GC.@preserve engine ccall(
                ABI.frugal_trace_stop[],
                Int32,
                (ABI.Handle, Ptr{UInt8}),
                engine.handle,
                C_NULL,
            )
            rethrow()
        end
    end
end

"""
    trace_start(engine; events = 131072)

Starts to record time spans of the engine's work. It keeps the newest `events` spans, 64 bytes each.

Returns `nothing`. Threads: any. Errors: `FrugalError` with `ERR_EXISTS` (a trace is already
running), `ERR_INVALID_ARGUMENT`, `ERR_OUT_OF_MEMORY`. Since 0.1.
"""
function trace_start(engine::Engine; events::Integer = 131072)
    GC.@preserve engine check(
        ccall(ABI.frugal_trace_start[], Int32, (ABI.Handle, Csize_t), engine.handle, events),
    )
    return nothing
end

"""
    trace_stop(engine, path)

Ends the recording and writes it to the file `path` in Chrome's trace event format, for
chrome://tracing and Perfetto. The path `nothing` discards the recording.

Returns `nothing`. Threads: any. Errors: `FrugalError` with `ERR_NOT_FOUND` (no trace was started),
`ERR_INVALID_ARGUMENT` (the file cannot be written: `system_code` is the cause; the events are kept
for another call). Since 0.1.
"""
function trace_stop(engine::Engine, path::Union{AbstractString,Nothing})
    text = path === nothing ? nothing : Base.cconvert(Cstring, String(path))
    GC.@preserve engine text begin
        address = text === nothing ? Ptr{UInt8}(C_NULL) : Ptr{UInt8}(Base.unsafe_convert(Cstring, text))
        check(ccall(ABI.frugal_trace_stop[], Int32, (ABI.Handle, Ptr{UInt8}), engine.handle, address))
    end
    return nothing
end

"""
    serve(engine, address)

Lets other processes of this user attach to this engine, with `Engine(service = address)`, until it
is closed. `address` is the path of the socket that this call creates. The engine must have
`backing = :shm`.

Returns `nothing`. Threads: any. Errors: `FrugalError` with `ERR_INVALID_ARGUMENT`, `ERR_EXISTS` (a
living process serves that address, or this engine is served), `ERR_UNSUPPORTED` (this build cannot
serve). Since 0.1.
"""
function serve(engine::Engine, address::AbstractString)
    GC.@preserve engine check(
        ccall(ABI.frugal_serve[], Int32, (ABI.Handle, Cstring), engine.handle, String(address)),
    )
    return nothing
end
