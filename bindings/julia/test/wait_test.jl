# Waits in slices: time-outs, tasks of one thread, Ctrl-C, closing.

# Two ranks, of which rank 1 has not begun step 0: rank 0 cannot begin step 1.
function with_waiting(f; engine = (;))
    Engine(; world_size = 2, engine...) do e
        trainer, other = Trainer(e), Trainer(e; rank = 1)
        step_begin(trainer, 0)
        step_end(trainer, 0)
        f(e, trainer, other)
    end
end

@testset Counts "time-outs" begin
    with_waiting() do engine, trainer, other
        for ms in (0, 1, 2, 30)
            start = time_ns()
            @test status_of(() -> step_begin(trainer, 1; timeout_ms = ms)) == Frugal.ERR_TIMEOUT
            @test time_ns() - start >= ms * 1_000_000
        end
        failure = try
            step_begin(trainer, 1; timeout_ms = 5)
        catch e
            e
        end
        @test occursin("rank 1", failure.message) # the message names what the call waited for
        @test status_of(() -> Frugal.read!(engine, Op[]; trainer = trainer, timeout_ms = 5)) == Frugal.ERR_TIMEOUT
    end
    # Without an argument the engine's time-out counts.
    with_waiting(; engine = (timeout_ms = 20,)) do engine, trainer, other
        @test status_of(() -> step_begin(trainer, 1)) == Frugal.ERR_TIMEOUT
    end
end

@testset Counts "tasks of one thread wait for each other" begin
    Engine(; world_size = 3) do engine
        table = Table(engine, "t"; rows = 10, dim = 2, optimizer = Optimizer(:sgd; lr = 1))
        @sync for rank = 0:2
            @async Trainer(engine; rank = rank) do trainer
                for step = 0:20
                    step_begin(trainer, step; timeout_ms = Frugal.TIMEOUT_INFINITE)
                    push_grad(trainer, table, [rank, 9], fill(-1.0f0, 2, 2))
                    step_end(trainer, step)
                end
            end
        end
        @test Frugal.get(table, [0, 1, 2, 9])[1] == Float32[21 21 21 63; 21 21 21 63]
    end
end

@testset Counts "closing while a task waits" begin
    for closed in (:engine, :trainer)
        with_waiting() do engine, trainer, other
            waiting = @async status_of(() -> step_begin(trainer, 1; timeout_ms = Frugal.TIMEOUT_INFINITE))
            yield()
            close(closed === :engine ? engine : trainer)
            # BAD_HANDLE if the engine was closed between two slices, CLOSED if in a slice.
            @test fetch(waiting) in (Frugal.ERR_CLOSED, Frugal.ERR_BAD_HANDLE)
        end
    end
end

@testset Counts "Ctrl-C in a wait" begin
    program = """
        using Frugal
        ccall(:jl_exit_on_sigint, Cvoid, (Cint,), 0)
        engine = Engine(; world_size = 2)
        trainer, other = Trainer(engine), Trainer(engine; rank = 1)
        step_begin(trainer, 0)
        step_end(trainer, 0)
        println("waiting")
        flush(stdout)
        try
            step_begin(trainer, 1; timeout_ms = Frugal.TIMEOUT_INFINITE)
        catch e
            print(typeof(e), " ")
        end
        # The call had no effect: the step can begin.
        step_begin(other, 0); step_end(other, 0)
        step_begin(trainer, 1)
        print("begun")
    """
    process = open(`$(Base.julia_cmd()) --startup-file=no --project=$PACKAGE -e $program`)
    @test readline(process) == "waiting"
    sleep(0.2)
    kill(process, Base.SIGINT)
    @test read(process, String) == "InterruptException begun"
    wait(process)
    @test process.exitcode == 0
end
