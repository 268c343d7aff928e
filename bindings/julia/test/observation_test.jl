# Observation of an engine: metrics and traces. Also: services.

function observed_training(engine, steps)
    table = Table(engine, "users"; rows = 100, dim = 4)
    Trainer(engine) do trainer
        for step = 0:steps-1
            batch = prefetch(trainer, step, table, collect(0:39))
            step_begin(trainer, step)
            push_grad(trainer, batch, lookup(trainer, batch))
            step_end(trainer, step)
        end
    end
    flush(engine)
end

@testset Counts "traces" begin
    mktempdir() do folder
        path = joinpath(folder, "trace.json")
        Engine() do engine
            @test trace(engine, path) do
                observed_training(engine, 10)
                7
            end == 7
            @test filemode(path) & 0o777 == 0o600
            told = JSON.parse(Base.read(path, String))
            @test told["otherData"]["clock"] == "CLOCK_MONOTONIC"
            @test told["otherData"]["dropped"] == 0
            events = [e for e in told["traceEvents"] if e["ph"] == "X"]
            for name in ("prefetch", "step_begin", "gate", "lookup", "push", "step_end")
                @test [e["args"]["step"] for e in events if e["name"] == name] == collect(0:9)
            end
            @test all(e["args"]["keys"] == 40 for e in events if e["name"] == "lookup")
            applied = [e["args"] for e in events if e["name"] == "apply"]
            @test sum(a["rows"] for a in applied) == 400
            @test all(a["table"] == "users" for a in applied)
            names = [e["args"]["name"] for e in told["traceEvents"] if e["name"] == "thread_name"]
            @test "rank 0" in names

            # Calls that must fail.
            @test status_of(() -> trace_stop(engine, nothing)) == Frugal.ERR_NOT_FOUND
            @test status_of(() -> trace_start(engine; events = 0)) == Frugal.ERR_INVALID_ARGUMENT
            @test trace_start(engine; events = 1) === nothing
            @test status_of(() -> trace_start(engine)) == Frugal.ERR_EXISTS
            @test status_of(() -> trace_stop(engine, joinpath(folder, "none", "t"))) == Frugal.ERR_INVALID_ARGUMENT
            @test trace_stop(engine, nothing) === nothing
            @test_throws ErrorException trace(() -> error("in the block"), engine, path)
            @test status_of(() -> trace(() -> 1, engine, folder)) == Frugal.ERR_INVALID_ARGUMENT
            @test status_of(() -> trace_stop(engine, nothing)) == Frugal.ERR_NOT_FOUND
            @test_throws ArgumentError trace_stop(engine, "a\0b")
            @test readdir(folder) == ["trace.json"]
        end
    end
end

@testset Counts "metrics" begin
    Engine() do engine
        observed_training(engine, 10)
        text = metrics(engine)
        counters = stats(engine)
        @test endswith(text, "\n")
        samples, family = Dict{String,String}(), ""
        for line in split(chomp(text), "\n")
            if startswith(line, "# HELP ")
                family = split(line)[3]
                @test occursin(r"^# HELP frugal_[a-z_]+ .+$", line)
            elseif startswith(line, "# TYPE ")
                @test line == "# TYPE $family $(endswith(family, "_total") ? "counter" : "gauge")"
            else
                sample = match(r"^((frugal_[a-z_]+)({[a-z]+=\"[^\"\\]+\"})?) ([0-9.]+)$", line)
                @test sample !== nothing && sample[2] == family && !haskey(samples, sample[1])
                samples[sample[1]] = sample[4]
            end
        end
        for name in fieldnames(Frugal.Stats)[2:end]
            s, value = String(name), getfield(counters, name)
            if endswith(s, "_ns")
                @test parse(Float64, samples["frugal_$(s[1:end-3])_seconds_total"]) ≈ value / 1e9
            elseif startswith(s, "pending_") || s == "active_rows"
                @test samples["frugal_$s"] == string(value)
            else
                @test samples["frugal_$(s)_total"] == string(value)
            end
        end
        @test samples["frugal_committed_step"] == "9"
        @test samples["frugal_health"] == "0"
        @test samples["frugal_table_rows{table=\"users\"}"] == "100"
        # The text is larger than the first buffer.
        for i = 1:200
            Table(engine, "$i " * "x"^200; rows = 1, dim = 1)
        end
        @test length(collect(eachmatch(r"frugal_table_rows{", metrics(engine)))) == 201
    end
    engine = Engine()
    close(engine)
    for call in (metrics, trace_start, e -> trace_stop(e, nothing), e -> serve(e, "/tmp/none"))
        @test status_of(() -> call(engine)) == Frugal.ERR_BAD_HANDLE
    end
end

@testset Counts "services" begin
    failure = try
        Engine(; service = "/tmp/no such service", timeout_ms = 100)
    catch e
        e
    end
    @test failure isa FrugalError && failure.status in (Frugal.ERR_PEER_LOST, Frugal.ERR_UNSUPPORTED)
    @test occursin("/tmp/no such service", failure.message)
    # Other tasks run meanwhile, also those of the same thread.
    ran = false
    waiting = @async try
        Engine(; service = "/tmp/no such service", timeout_ms = 500)
    catch e
        e.status
    end
    @async (ran = true)
    @test fetch(waiting) == failure.status
    @test ran
    @test_throws ArgumentError Engine(; service = "a\0b")
    @test_throws ArgumentError Engine(; service = 5)
    @test Frugal.status_name(Frugal.ERR_PEER_LOST) == "FRUGAL_ERR_PEER_LOST"
    Engine(; backing = :shm, service = nothing) do engine
        @test status_of(() -> serve(engine, "/no such folder/service")) != Frugal.OK
        @test_throws ArgumentError serve(engine, "a\0b")
        @test status_of(() -> Trainer(engine; replace = true)) == Frugal.ERR_UNSUPPORTED
        observed_training(engine, 1)
        @test committed_step(engine) == 0
    end
    # An exception gives the rank up: the other ranks wait for a new trainer. close() leaves it.
    mktempdir() do folder
        Engine(; backing = :shm, world_size = 2) do host
            address = joinpath(folder, "socket")
            status_of(() -> serve(host, address)) == Frugal.ERR_UNSUPPORTED && return
            attached = Engine(; service = address, world_size = 2)
            here = Trainer(host)
            step(n) = (step_begin(here, n; timeout_ms = 200); step_end(here, n))
            @test_throws ErrorException Trainer(attached; rank = 1) do other
                step_begin(other, 0)
                step_end(other, 0)
                step(0)
                error("on purpose")
            end
            @test status_of(() -> step(1)) == Frugal.ERR_PEER_LOST
            @test status_of(() -> step(1)) == Frugal.ERR_TIMEOUT
            abandon(Trainer(attached; rank = 1))
            @test status_of(() -> step(1)) == Frugal.ERR_PEER_LOST
            Trainer(identity, attached; rank = 1)
            step(1)
            step(2)
            @test committed_step(host) == 2
            close(attached)
        end
    end
end
