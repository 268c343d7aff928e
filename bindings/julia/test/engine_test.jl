@testset Counts "engines" begin
    engine = Engine()
    @test isopen(engine)
    @test health(engine) == Frugal.OK
    @test committed_step(engine) === nothing
    @test stats(engine).steps_committed == 0
    @test flush(engine) === nothing
    @test occursin("open", repr(engine))
    close(engine)
    @test !isopen(engine)
    @test close(engine) === nothing
    @test occursin("closed", repr(engine))
    @test health(engine) == Frugal.ERR_BAD_HANDLE

    @test Engine(identity; world_size = 3, flush_mode = :deferred, backing = :shm) isa Engine
    # A do block closes also after an exception, which passes through.
    kept = Ref{Engine}()
    @test_throws ErrorException Engine() do e
        kept[] = e
        error("thrown in the block")
    end
    @test !isopen(kept[])

    @test_throws ArgumentError Engine(; flush_mode = :never)
    @test_throws ArgumentError Engine(; backing = :disk)
    # Fields of the ABI that are not options of the package, and a value that is not a number.
    for option in ((no_such_option = 1,), (log = Ptr{Cvoid}(1),), (struct_size = 8,), (flags = 1,), (seed = "1",))
        @test_throws ArgumentError Engine(; option...)
        @test_throws ArgumentError memory_needed(; rows = 1, dim = 1, engine = option)
    end
    failure = try
        Engine(; log = Ptr{Cvoid}(1))
    catch e
        e
    end
    @test occursin("`log`", failure.msg) && occursin("world_size", failure.msg)
    Engine() do e
        for option in ((name = Ptr{UInt8}(1),), (struct_size = 8,), (dtype = 1,), (optimizer = :sgd,), (dim = 1.0,))
            @test_throws ArgumentError Table(e, "t"; merge((rows = 1, dim = 1), option)...)
        end
        for option in ((struct_size = 8,), (flags = 1,), (rank = "0",), (cache_ratio = nothing,))
            @test_throws ArgumentError Trainer(e; option...)
        end
    end
    @test_throws InexactError Engine(; world_size = -1)
    @test status_of(() -> Engine(; world_size = 0)) == Frugal.ERR_INVALID_ARGUMENT
    @test status_of(() -> Engine(; lookahead = 41)) == Frugal.ERR_INVALID_ARGUMENT
    @test status_of(() -> Engine(; flush_mode = 9)) == Frugal.ERR_INVALID_ARGUMENT
    @test status_of(() -> Engine(; timeout_ms = -7)) == Frugal.ERR_INVALID_ARGUMENT
end

@testset Counts "errors" begin
    failure = try
        Engine(; world_size = 0)
    catch e
        e
    end
    @test failure isa FrugalError
    @test failure.name == "FRUGAL_ERR_INVALID_ARGUMENT"
    @test failure.status == Frugal.ERR_INVALID_ARGUMENT == -1
    @test occursin("world_size", failure.message)
    @test (failure.system_code, failure.device_code) == (0, 0)
    text = sprint(showerror, failure)
    @test occursin("FRUGAL_ERR_INVALID_ARGUMENT", text) && occursin("world_size", text)
    @test Frugal.status_name(Frugal.ERR_TIMEOUT) == "FRUGAL_ERR_TIMEOUT"
    @test Frugal.status_name(5) == "FRUGAL_UNKNOWN"
    @test (Frugal.version().major, Frugal.version().minor) == (0, 1)
    @test isfile(Frugal.loaded_path())
    codes = sprint(showerror, FrugalError(-22, "FRUGAL_ERR_DEVICE", "gone", 5, 700))
    @test occursin("errno 5", codes) && occursin("CUDA error 700", codes)
end

@testset Counts "the library is found when the package is loaded" begin
    loaded = "using Frugal; print(Frugal.loaded_path())"
    code, text = child(loaded)
    @test code == 0 && text == Frugal.loaded_path()
    code, text = child(loaded; environment = ("FRUGAL_LIBRARY" => "/nonexistent/libfrugal.so",))
    @test code != 0
    @test occursin("FRUGAL_LIBRARY", text) && occursin("/nonexistent/libfrugal.so", text)
    # FRUGAL_LIBRARY names another library.
    code, text = child(loaded; environment = ("FRUGAL_LIBRARY" => "libm.so.6",))
    @test code != 0
    @test occursin("frugal_status_name", text)
end

@testset Counts "memory_needed" begin
    needed = memory_needed(; rows = 1000, dim = 8, optimizer = Optimizer(:adam), engine = (flush_mode = :at_once,))
    @test needed.values >= 1000 * 8 * 4
    @test needed.state >= 1000 * 16 * 4
    @test needed.total == needed.values + needed.state + needed.index + needed.window + needed.cache
    @test memory_needed(; rows = 1000, dim = 8, cache_rows = 10).cache > 0
    @test_throws UndefKeywordError memory_needed(; rows = 1000)
    @test status_of(() -> memory_needed(; rows = 0, dim = 8)) == Frugal.ERR_INVALID_ARGUMENT
end
