# Trainers on allocating threads of Julia: collections, waits and the engine at the same time. The
# tables are bit for bit those of the same trainers driven one after the other by one task.

const RANKS = 4
const STEPS = 60
const AHEAD = 3

mutable struct Garbage
    next::Union{Nothing,Garbage}
    bytes::Vector{UInt8}
end

# Allocates many small and large objects, with pointers for the collector to follow. The result
# depends on them.
function litter(n)
    chain = nothing
    for i = 1:n
        chain = Garbage(i % 64 == 0 ? nothing : chain, zeros(UInt8, i % 97 == 0 ? 100_000 : 64))
    end
    return length(chain.bytes)
end

# The keys of a rank's step, some common to all ranks and some its own, and their gradients.
step_keys(rank, step) = [mod(hash((i % 3 == 0 ? 0 : rank, step, i)), 500) for i = 1:64]
step_grads(rank, step) =
    Float32[sin(Float32(mod(hash((rank, step, i, c)), 1000))) for c = 1:8, i = 1:64]

function declare(trainer, tables, rank, step)
    all = step_keys(rank, step)
    return prefetch(trainer, step, (Op(tables[1], all), Op(tables[2], all)))
end

# Makes a step of a rank. Returns the sum of the rows that it looked up.
function train_step(trainer, tables, rank, step, batch)
    rows = (zeros(Float32, 8, 64), zeros(Float32, 8, 16))
    grads = (step_grads(rank, step), step_grads(rank, step)[:, 1:16])
    offsets = collect(0:4:64)
    ops = (
        Op(batch, 1; rows = rows[1], grads = grads[1]),
        Op(batch, 2; pooling = :sum, offsets = offsets, rows = rows[2], grads = grads[2]),
    )
    lookup!(trainer, ops)
    push_grad(trainer, ops)
    return hash(reinterpret(UInt32, vec(rows[1])), hash(reinterpret(UInt32, vec(rows[2]))))
end

function train(drive; cache_ratio)
    Engine(; world_size = RANKS, lookahead = AHEAD, seed = 7) do engine
        options = (rows = 500, dim = 8, init = :normal, init_b = 0.1)
        tables = (
            Table(engine, "a"; optimizer = Optimizer(:adagrad; lr = 0.1), options...),
            Table(engine, "b"; optimizer = Optimizer(:adam), key_space = :hashed, options...),
        )
        trainers = [Trainer(engine; rank = rank, cache_ratio = cache_ratio) for rank = 0:RANKS-1]
        seen = zeros(UInt64, STEPS, RANKS)
        drive(trainers, tables, seen)
        foreach(close, trainers)
        return seen, map(contents, tables), stats(engine).steps_committed
    end
end

function in_turn(trainers, tables, seen)
    batches = [Dict(s => declare(trainers[r], tables, r, s) for s = 1:AHEAD) for r = 1:RANKS]
    for step = 1:STEPS, phase = 1:2, r = 1:RANKS
        if phase == 1
            step + AHEAD <= STEPS && (batches[r][step+AHEAD] = declare(trainers[r], tables, r, step + AHEAD))
            step_begin(trainers[r], step)
            seen[step, r] = train_step(trainers[r], tables, r, step, batches[r][step])
        else
            step_end(trainers[r], step)
        end
    end
end

function at_once(trainers, tables, seen)
    @sync for r = 1:RANKS
        Threads.@spawn begin
            batches = Dict(s => declare(trainers[r], tables, r, s) for s = 1:AHEAD)
            for step = 1:STEPS
                step + AHEAD <= STEPS && (batches[step+AHEAD] = declare(trainers[r], tables, r, step + AHEAD))
                # One rank at a time allocates while the others wait for it in step_begin.
                litter(step % RANKS + 1 == r ? 20_000 : 200)
                step_begin(trainers[r], step; timeout_ms = Frugal.TIMEOUT_INFINITE)
                seen[step, r] = train_step(trainers[r], tables, r, step, batches[step])
                litter(200)
                step_end(trainers[r], step)
            end
        end
    end
end

@testset Counts "four allocating trainers on $(Threads.nthreads()) threads" begin
    for cache_ratio in (0.0, 0.2)
        expected = train(in_turn; cache_ratio = cache_ratio)
        @test expected[3] == STEPS
        for _ = 1:2
            collections = Base.gc_num().pause
            found = train(at_once; cache_ratio = cache_ratio)
            @test Base.gc_num().pause > collections # there were some
            @test found[1] == expected[1]
            @test found[2] == expected[2]
            @test found[3] == STEPS
        end
    end
end

@testset Counts "one engine, many threads" begin
    Engine() do engine
        table = Table(engine, "t"; rows = 1000, dim = 4, key_space = :hashed)
        errors = Threads.Atomic{Int}(0)
        @sync for task = 1:8
            Threads.@spawn for i = 1:50
                mine = collect(100task .+ (0:9))
                Frugal.put(table, mine, fill(Float32(i), 4, 10))
                Frugal.get(table, mine)[1] == fill(Float32(i), 4, 10) || Threads.atomic_add!(errors, 1)
                litter(200)
                # Each thread gets the message of its own failure.
                failure = try
                    table_find(engine, "task $task")
                catch e
                    e
                end
                occursin("task $task", failure.message) || Threads.atomic_add!(errors, 1)
            end
        end
        @test errors[] == 0
        @test length(table) == 80
    end
end

@testset Counts "a trainer that two tasks use" begin
    # While one task waits between slices another task is refused.
    Engine(; world_size = 2) do engine
        table = Table(engine, "t"; rows = 10, dim = 2)
        trainer, other = Trainer(engine), Trainer(engine; rank = 1)
        step_begin(trainer, 0)
        step_end(trainer, 0)
        waiting = @async step_begin(trainer, 1; timeout_ms = Frugal.TIMEOUT_INFINITE)
        yield()
        for call in (
            () -> step_begin(trainer, 1),
            () -> prefetch(trainer, 2, table, [1]),
            () -> lookup(trainer, table, [1]),
            () -> push_grad(trainer, table, [1], zeros(Float32, 2, 1)),
            () -> step_end(trainer, 1),
            () -> step_abort(trainer),
            () -> Frugal.unsafe_borrow(trainer, 2, 1),
            () -> push_borrowed(identity, trainer, table, [1]),
            () -> Frugal.read(engine, table, [1]; trainer = trainer),
        )
            @test_throws ErrorException call()
        end
        step_begin(other, 0)
        step_end(other, 0)
        wait(waiting)
        @test size(lookup(trainer, table, [1])) == (2, 1) # the trainer works as before
        step_end(trainer, 1)
    end
    # Threads that use one table without synchronization.
    with_table() do engine, table, trainer
        step_begin(trainer, 0)
        taken, refused = Threads.Atomic{Int}(0), Threads.Atomic{Int}(0)
        @sync for _ = 1:4
            Threads.@spawn for _ = 1:500
                try
                    push_grad(trainer, table, [1, 2, 3], fill(-1.0f0, 4, 3))
                    Threads.atomic_add!(taken, 1)
                catch failure
                    failure isa ErrorException || rethrow()
                    Threads.atomic_add!(refused, 1)
                end
            end
        end
        step_end(trainer, 0)
        @test taken[] + refused[] == 2000
        @test Frugal.get(table, [1, 2, 3])[1] == fill(Float32(taken[]), 4, 3)
    end
end
