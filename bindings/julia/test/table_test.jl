@testset Counts "optimizers" begin
    o = Optimizer(:adagrad; lr = 0.5, eps = 1e-6)
    @test (o.kind, o.lr, o.eps, o.beta1) == (2, 0.5f0, 1.0f-6, 0.9f0)
    p = Optimizer(o; lr = 0.25)
    @test (p.kind, p.lr, p.eps) == (2, 0.25f0, 1.0f-6)
    @test o.lr == 0.5f0
    @test Optimizer(:momentum; nesterov = true, mean_ranks = true).flags == 3
    @test Optimizer(:adam; bias_correction = false).flags == 4
    @test Optimizer(4) == Optimizer(:adam)
    @test_throws ArgumentError Optimizer(:adamw)
    @test_throws ArgumentError Optimizer(:sgd; learning_rate = 1)
    @test_throws ArgumentError Optimizer(o; kind = 3)
end

@testset Counts "tables" begin
    Engine() do engine
        uniform = (init = :uniform, init_a = 1, init_b = 2)
        table = Table(engine, "dense"; rows = 10, dim = 3, optimizer = Optimizer(:adam), uniform...)
        info = describe(table)
        @test (info.rows, info.capacity, info.dim, info.state_floats) == (10, 10, 3, 6)
        @test (table.dim, table.state_floats) == (3, 6)
        @test length(table) == 10
        @test keys(table) == 0:9
        rows, found = Frugal.get(table, keys(table))
        @test all(x -> 1 <= x < 2, rows) && all(found)
        @test table_find(engine, "dense").handle == table.handle
        @test status_of(() -> table_find(engine, "none")) == Frugal.ERR_NOT_FOUND
        @test status_of(() -> Table(engine, "dense"; rows = 10, dim = 3)) == Frugal.ERR_EXISTS
        @test status_of(() -> Table(engine, "x"; rows = 10, dim = 0)) == Frugal.ERR_INVALID_ARGUMENT
        @test status_of(() -> Table(engine, ""; rows = 10, dim = 1)) == Frugal.ERR_INVALID_ARGUMENT
        @test status_of(() -> Table(engine, "x"^256; rows = 10, dim = 1)) == Frugal.ERR_INVALID_ARGUMENT
        @test_throws ArgumentError Table(engine, "with\0zero"; rows = 10, dim = 1)
        @test_throws ArgumentError table_find(engine, "with\0zero")
        @test_throws ArgumentError Table(engine, "x"; rows = 10, dim = 1, key_space = :sparse)
        @test_throws UndefKeywordError Table(engine, "x"; rows = 10)
        @test_throws InexactError Table(engine, "x"; rows = -1, dim = 1)
        @test Table(engine, SubString("a name with ü", 3); rows = 1, dim = 1) isa Table
        @test table_names(engine) == ["dense", "name with ü"]

        # With and without optimizer state.
        Frugal.put(table, [4], Float32[1; 2; 3; 4; 5; 6; 7; 8; 9][:, :]; state = true)
        @test vec(Frugal.get(table, [4]; state = true)[1]) == 1:9
        @test vec(Frugal.get(table, [4])[1]) == 1:3
        Frugal.put(table, [4], Float32[1 2 3]'[:, :])
        @test vec(Frugal.get(table, [4]; state = true)[1]) == [1, 2, 3, 0, 0, 0, 0, 0, 0]
        @test_throws DimensionMismatch Frugal.put(table, [4], zeros(Float32, 3, 1); state = true)
        @test_throws DimensionMismatch Frugal.put(table, [4], zeros(Float32, 9, 1))
        @test Frugal.delete(table, [4, 4, 5]) == 2
        @test Frugal.get(table, [4])[1] == rows[:, 5:5]
        @test status_of(() -> Frugal.delete(table, [10])) == Frugal.ERR_KEY_OUT_OF_RANGE
        @test status_of(() -> Frugal.put(table, [10], zeros(Float32, 3, 1))) == Frugal.ERR_KEY_OUT_OF_RANGE

        drop(table)
        @test status_of(() -> drop(table)) == Frugal.ERR_BAD_HANDLE
        @test status_of(() -> describe(table)) == Frugal.ERR_BAD_HANDLE
        @test status_of(() -> table_find(engine, "dense")) == Frugal.ERR_NOT_FOUND

        hashed = Table(engine, "hashed"; rows = 100, dim = 2, key_space = :hashed)
        @test isempty(keys(hashed))
        many = rand(UInt64, 50)
        Frugal.put(hashed, many, zeros(Float32, 2, 50))
        @test sort(keys(hashed)) == sort(many)
        @test length(hashed) == 50
        @test status_of(() -> Frugal.put(hashed, rand(UInt64, 51), zeros(Float32, 2, 51))) == Frugal.ERR_TABLE_FULL
        # The column of a missing row does not change; in a new matrix it is zeros.
        missing_one = [many[1], many[2] ⊻ 1]
        values = fill(7.0f0, 2, 2)
        found = [false, true]
        Frugal.get!(hashed, missing_one, values, found)
        @test values == Float32[0 7; 0 7]
        @test found == [true, false]
        @test Frugal.get(hashed, missing_one) == (zeros(Float32, 2, 2), [true, false])
        @test Frugal.delete(hashed, [many[1], many[2] ⊻ 1]) == 1
        @test length(hashed) == 49
    end
end

@testset Counts "committed rows in a step" begin
    with_table(; dim = 2, table = (; optimizer = Optimizer(:adagrad; lr = 0.5))) do engine, table, trainer
        for step = 0:1
            step_begin(trainer, step)
            push_grad(trainer, table, [3], fill(2.0f0, 2, 1))
            rows = zeros(Float32, 4, 1)
            @test status_of(() -> Frugal.get!(table, [3], rows; state = true)) == Frugal.ERR_BUSY
            Frugal.get!(table, [3], rows; state = true, committed = true)
            @test rows[3:4] == fill(4.0f0 * step, 2)
            step_end(trainer, step)
        end
    end
end

@testset Counts "hyper-parameters of steps" begin
    with_table() do engine, table, trainer
        set_optimizer(table, 1, Optimizer(:sgd; lr = 0.5))
        ones_of = fill(1.0f0, 4, 1)
        for step = 0:2
            step_begin(trainer, step)
            push_grad(trainer, table, [3], ones_of)
            step_end(trainer, step)
        end
        @test Frugal.get(table, [3])[1] == fill(-2.0f0, 4, 1)
        @test status_of(() -> set_optimizer(table, 2, Optimizer(:sgd))) == Frugal.ERR_STEP_RANGE
        @test status_of(() -> set_optimizer(table, 9, Optimizer(:adam))) == Frugal.ERR_INVALID_ARGUMENT
        @test status_of(() -> set_optimizer(table, 9, Optimizer(:sgd; lr = NaN))) == Frugal.ERR_INVALID_ARGUMENT
    end
end
