# Freed handles, the collector, copies, other processes.

using Serialization

is_closed(handle) = ccall(Frugal.ABI.frugal_health[], Int32, (Ptr{Cvoid},), handle) == Frugal.ERR_BAD_HANDLE

# Collects until `done()`. It may take several calls: compiled code may still refer to objects.
function collected(done)
    for _ = 1:100
        GC.gc()
        done() && return true
    end
    return done()
end

@testset Counts "freed handles" begin
    engine = Engine()
    table = Table(engine, "t"; rows = 10, dim = 2)
    trainer = Trainer(engine)
    batch = prefetch(trainer, 0, table, [1])
    rows = zeros(Float32, 2, 1)
    close(trainer)
    close(trainer)
    for call in (
        () -> prefetch(trainer, 0, table, [1]),
        () -> cancel(trainer, batch),
        () -> step_begin(trainer, 0),
        () -> lookup!(trainer, table, [1], rows),
        () -> lookup!(trainer, batch, rows),
        () -> push_grad(trainer, table, [1], rows),
        () -> Frugal.unsafe_borrow(trainer, 2, 1),
        () -> push_borrowed(identity, trainer, table, [1]),
        () -> step_end(trainer, 0),
        () -> step_abort(trainer),
        () -> Frugal.read(engine, table, [1]; trainer = trainer),
        () -> set_stream(trainer, C_NULL),
    )
        @test status_of(call) == Frugal.ERR_BAD_HANDLE
    end
    other = Trainer(engine) # the rank is free
    @test status_of(() -> (step_begin(other, 0); lookup!(other, batch, rows))) == Frugal.ERR_BAD_HANDLE
    close(engine)
    close(engine)
    close(other)
    for call in (
        () -> step_end(other, 0),
        () -> Table(engine, "u"; rows = 1, dim = 1),
        () -> table_find(engine, "t"),
        () -> table_names(engine),
        () -> Trainer(engine),
        () -> flush(engine),
        () -> committed_step(engine),
        () -> stats(engine),
        () -> Frugal.read(engine, table, [1]),
        () -> describe(table),
        () -> length(table),
        () -> keys(table),
        () -> set_optimizer(table, 0, Optimizer(:sgd)),
        () -> Frugal.get(table, [1]),
        () -> Frugal.put(table, [1], rows),
        () -> Frugal.delete(table, [1]),
        () -> drop(table),
    )
        @test status_of(call) == Frugal.ERR_BAD_HANDLE
    end
    finalize(trainer) # in any order, and twice
    finalize(engine)
    finalize(other)
    finalize(engine)
    @test !isopen(engine)
end

@noinline forget_engine() = (engine = Engine(); Table(engine, "t"; rows = 10, dim = 2); engine.handle)
@noinline function forget_trainer(engine, table)
    trainer = Trainer(engine)
    prefetch(trainer, 0, table, [1])
    step_begin(trainer, 0)
    push_grad(trainer, table, [1], ones(Float32, 2, 1))
    return nothing # the trainer is inside a step
end
@noinline only_table() = Table(Engine(), "t"; rows = 10, dim = 2)
@noinline only_trainer() = Trainer(Engine())

@testset Counts "the collector closes what was forgotten" begin
    handles = [forget_engine() for _ = 1:20]
    @test collected(() -> all(is_closed, handles[1:19])) # the last may still be on the stack
    Engine() do engine
        table = Table(engine, "t"; rows = 10, dim = 2)
        forget_trainer(engine, table)
        for _ = 1:5
            GC.gc()
        end
        # The engine keeps the trainer: no rank leaves because of the collector.
        @test status_of(() -> Trainer(engine)) == Frugal.ERR_EXISTS
        foreach(close, copy(engine.trainers))
        @test isempty(engine.trainers)
        close(Trainer(engine))
        @test Frugal.get(table, [1])[1] == zeros(Float32, 2, 1) # the step was undone
    end
    # The collector collects an engine and its trainer together.
    handles = [(trainer = only_trainer(); trainer.engine.handle) for _ = 1:20]
    @test collected(() -> count(is_closed, handles) >= 19)
    # A table or a trainer keeps its engine.
    table, trainer = only_table(), only_trainer()
    for _ = 1:5
        GC.gc()
    end
    @test length(table) == 10
    @test step_begin(trainer, 0) === nothing
    close(table.engine)
    close(trainer.engine)
end

# A vector that creates its ops, and garbage, when an element is read. Only the op refers to its
# arrays.
struct LazyOps{F} <: AbstractVector{Op}
    make::F
    count::Int
end
Base.size(ops::LazyOps) = (ops.count,)
function Base.getindex(ops::LazyOps, i::Int)
    GC.gc()
    foreach(_ -> fill(UInt64(12345678), 50), 1:20)
    return ops.make(i)
end

@testset Counts "ops that are made when they are asked for" begin
    with_table() do engine, table, trainer
        keys_of(i) = fill(UInt64(i), 50)
        declared = LazyOps(i -> Op(table, keys_of(i)), 20)
        batch = prefetch(trainer, 0, declared)
        @test [part.count for part in batch.parts] == fill(50, 20)
        step_begin(trainer, 0)
        push_grad(trainer, LazyOps(i -> Op(table, keys_of(i); grads = fill(-1.0f0, 4, 50)), 20))
        @test lookup!(trainer, LazyOps(i -> Op(table, keys_of(i); rows = zeros(Float32, 4, 50)), 20)) === nothing
        step_end(trainer, 0)
        found = [zeros(Float32, 4, 50) for _ = 1:20]
        @test Frugal.read!(engine, LazyOps(i -> Op(table, keys_of(i); rows = found[i]), 20)) === nothing
        @test found == fill(fill(50.0f0, 4, 50), 20)
        @test Frugal.get(table, collect(1:20))[1] == fill(50.0f0, 4, 20)
    end
end

@testset Counts "finalizers that fail" begin
    engine = Engine()
    trainer = Trainer(engine)
    close(trainer)
    close(engine)
    other = Engine()
    try
        @test status_of(() -> table_find(other, "nobody")) == Frugal.ERR_NOT_FOUND
        # The finalizer makes no call, so the last error does not change.
        finalize(trainer)
        finalize(engine)
        close(engine)
        failure = try
            Frugal.throw_last_error(Frugal.ERR_NOT_FOUND)
        catch e
            e
        end
        @test occursin("nobody", failure.message)
        # The package does not use the message of another call.
        failure = try
            Frugal.throw_last_error(Frugal.ERR_TIMEOUT)
        catch e
            e
        end
        @test failure.status == Frugal.ERR_TIMEOUT && failure.name == "FRUGAL_ERR_TIMEOUT"
        @test !occursin("nobody", failure.message)
    finally
        close(other)
    end
end

@testset Counts "an exception that leaves a call" begin
    with_table() do engine, table, trainer
        @test_throws ErrorException Frugal.exclusive(() -> error("thrown"), trainer)
        @test step_begin(trainer, 0) === nothing
    end
end

@testset Counts "a collection in the middle of calls" begin
    # Only the call refers to the arrays, while other threads collect.
    with_table(; rows = 1000, dim = 32) do engine, table, trainer
        stop = Ref(false)
        collector = Threads.@spawn while !stop[]
            GC.gc(false)
            yield()
        end
        for step = 0:40
            step_begin(trainer, step)
            for _ = 1:5
                push_grad(trainer, table, collect(0:999), fill(-1.0f0, 32, 1000))
                lookup!(trainer, (Op(table, collect(Int32, 0:999); rows = Matrix{Float32}(undef, 32, 1000)),))
                yield()
            end
            step_end(trainer, step)
        end
        stop[] = true
        wait(collector)
        @test Frugal.get(table, collect(0:999))[1] == fill(205.0f0, 32, 1000)
    end
end

@testset Counts "an op reads its arrays when it is used" begin
    with_table() do engine, table, trainer
        keys = [1, 2]
        op = Op(table, keys; rows = zeros(Float32, 4, 2))
        append!(keys, 1:1000) # moves to other memory
        GC.gc()
        step_begin(trainer, 0)
        @test_throws DimensionMismatch lookup!(trainer, (op,))
        resize!(keys, 2)
        @test lookup!(trainer, (op,)) === nothing
        step_end(trainer, 0)
    end
end

@testset Counts "copies" begin
    engine = Engine()
    @test deepcopy(engine) === engine
    trainer = Trainer(engine)
    @test deepcopy(trainer) === trainer
    io = IOBuffer()
    serialize(io, engine)
    seekstart(io)
    copied = deserialize(io)
    @test status_of(() -> flush(copied)) == Frugal.ERR_BAD_HANDLE
    finalize(copied)
    @test isopen(engine)
    close(engine)
end

@testset Counts "other processes" begin
    # An engine that was sent to another process is not valid there, even if that process has one.
    Engine() do engine
        path, io = mktemp()
        serialize(io, (engine, Trainer(engine)))
        close(io)
        code, text = child("""
            using Frugal, Serialization
            mine = Engine()
            engine, trainer = deserialize($(repr(path)))
            for call in (() -> flush(engine), () -> step_begin(trainer, 0))
                try call(); print("no error") catch e; print(e.name, " ") end
            end
            close(trainer); close(engine)
            print(isopen(mine))
        """)
        @test (code, text) == (0, "FRUGAL_ERR_BAD_HANDLE FRUGAL_ERR_BAD_HANDLE true")
        @test isopen(engine)
        rm(path)
    end
    # A process ends with all objects open, inside a step, while a thread waits.
    code, text = child("""
        using Frugal
        engine = Engine(; world_size = 2)
        table = Table(engine, "t"; rows = 10, dim = 2)
        trainer, other = Trainer(engine), Trainer(engine; rank = 1)
        step_begin(trainer, 0)
        push_grad(trainer, table, [1], ones(Float32, 2, 1))
        step_end(trainer, 0)
        Threads.@spawn step_begin(trainer, 1; timeout_ms = Frugal.TIMEOUT_INFINITE)
        sleep(0.1)
        print("end")
    """; threads = 2)
    @test (code, text) == (0, "end")
end
