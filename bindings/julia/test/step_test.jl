@testset Counts "steps" begin
    with_table(; table = (key_space = :hashed,)) do engine, table, trainer
        keys_of(step) = [step, step + 1, step]
        model = Dict{Int,Float32}()
        for step = 10:29
            keys = keys_of(step)
            batch = prefetch(trainer, step, table, keys)
            @test repr(batch) == "Batch(3 keys)"
            step_begin(trainer, step)
            rows = lookup(trainer, batch)
            @test rows == Float32[get(model, k, 0) for _ = 1:4, k in keys]
            @test lookup(trainer, table, keys) == rows
            @test lookup!(trainer, batch, similar(rows)) == rows
            push_grad(trainer, batch, fill(-1.0f0, 4, 3))
            push_grad(trainer, table, [step], fill(-1.0f0, 4, 1))
            step_end(trainer, step)
            model[step] = get(model, step, 0) + 3
            model[step+1] = get(model, step + 1, 0) + 1
            @test committed_step(engine) == step
        end
        all, found = Frugal.get(table, collect(10:30))
        @test found == trues(21)
        @test all == Float32[model[k] for _ = 1:4, k = 10:30]
        rows, found = Frugal.read(engine, table, [29, 9]; trainer = trainer)
        @test rows == Float32[model[29] 0; model[29] 0; model[29] 0; model[29] 0]
        @test found == [true, false]
        @test stats(engine).steps_committed == 20
    end
end

@testset Counts "what is not a step" begin
    with_table() do engine, table, trainer
        rows = zeros(Float32, 4, 1)
        @test status_of(() -> lookup!(trainer, table, [1], rows)) == Frugal.ERR_NOT_IN_STEP
        @test status_of(() -> push_grad(trainer, table, [1], rows)) == Frugal.ERR_NOT_IN_STEP
        @test status_of(() -> step_end(trainer, 0)) == Frugal.ERR_NOT_IN_STEP
        @test status_of(() -> step_abort(trainer)) == Frugal.ERR_NOT_IN_STEP
        @test status_of(() -> Frugal.unsafe_borrow(trainer, 4, 1)) == Frugal.ERR_NOT_IN_STEP
        batch = prefetch(trainer, 7, table, [1])
        step_begin(trainer, 7)
        @test status_of(() -> step_begin(trainer, 8)) == Frugal.ERR_STEP_ORDER
        @test status_of(() -> step_end(trainer, 8)) == Frugal.ERR_STEP_ORDER
        @test status_of(() -> prefetch(trainer, 7, table, [1])) == Frugal.ERR_STEP_RANGE
        @test status_of(() -> prefetch(trainer, 70, table, [1])) == Frugal.ERR_STEP_RANGE
        @test status_of(() -> prefetch(trainer, 8, table, [1, 100])) == Frugal.ERR_KEY_OUT_OF_RANGE
        @test status_of(() -> cancel(trainer, batch)) == Frugal.ERR_STEP_RANGE
        @test status_of(() -> Frugal.get(table, [1])) == Frugal.ERR_BUSY
        @test status_of(() -> lookup!(trainer, table, [100], rows)) == Frugal.ERR_KEY_OUT_OF_RANGE
        @test status_of(() -> push_grad(trainer, table, [1], fill(NaN32, 4, 1))) == Frugal.ERR_NAN
        @test status_of(() -> Trainer(engine)) == Frugal.ERR_EXISTS
        @test status_of(() -> Trainer(engine; rank = 1)) == Frugal.ERR_INVALID_ARGUMENT
        @test status_of(() -> Trainer(engine; rank = 0, device = "tpu:0")) == Frugal.ERR_INVALID_ARGUMENT
        @test status_of(() -> set_stream(trainer, C_NULL)) == Frugal.ERR_UNSUPPORTED
        push_grad(trainer, table, [1], ones(Float32, 4, 1))
        step_abort(trainer)
        @test Frugal.get(table, [1])[1] == rows
        step_begin(trainer, 7)
        @test lookup(trainer, batch) == rows # declarations stay
        push_grad(trainer, batch, ones(Float32, 4, 1))
        step_end(trainer, 7; skip = true)
        @test Frugal.get(table, [1])[1] == rows
        @test status_of(() -> lookup(trainer, batch)) == Frugal.ERR_NOT_IN_STEP
        step_begin(trainer, 8)
        @test status_of(() -> lookup(trainer, batch)) == Frugal.ERR_BAD_HANDLE # its step has ended
        step_end(trainer, 8)
        taken_back = prefetch(trainer, 9, table, [1])
        cancel(trainer, taken_back)
        @test status_of(() -> cancel(trainer, taken_back)) == Frugal.ERR_BAD_HANDLE
        @test_throws InexactError step_begin(trainer, -1)
        @test_throws ArgumentError prefetch(trainer, 9, (Op(batch),))
        @test_throws MethodError step_begin(trainer, 9.5)
        @test status_of(() -> step_begin(trainer, 9; timeout_ms = -3)) == Frugal.ERR_INVALID_ARGUMENT
    end
end

@testset Counts "several tables in a call" begin
    Engine() do engine
        a = Table(engine, "a"; rows = 10, dim = 2, optimizer = Optimizer(:sgd; lr = 1))
        b = Table(engine, "b"; rows = 10, dim = 3, optimizer = Optimizer(:sgd; lr = 1))
        Trainer(engine) do trainer
            # Tuples and vectors of ops; a table may occur twice.
            for (step, wrap) in enumerate((identity, collect, ops -> Op[ops...]))
                batch = prefetch(trainer, step, wrap((Op(a, [1, 2]), Op(b, [3]), Op(a, [1]))))
                @test repr(batch) == "Batch(2 + 1 + 1 keys)"
                rows = (zeros(Float32, 2, 2), zeros(Float32, 3, 1), zeros(Float32, 2, 1))
                grads = map(x -> fill(-1.0f0, size(x)), rows)
                ops = wrap(ntuple(i -> Op(batch, i; rows = rows[i], grads = grads[i]), 3))
                step_begin(trainer, step)
                @test lookup!(trainer, ops) === nothing
                before = Float32(step - 1)
                @test rows == (Float32[2 1; 2 1] .* before, fill(before, 3, 1), fill(2before, 2, 1))
                @test push_grad(trainer, ops) === nothing
                @test_throws ArgumentError lookup(trainer, batch)
                @test_throws ArgumentError push_grad(trainer, batch, rows[1])
                @test_throws ArgumentError Op(batch, 0)
                @test_throws ArgumentError Op(batch, 4)
                @test_throws ArgumentError Op(a, [1]; batch = batch, part = 0)
                # Any keys of a part, in any order.
                some = Op(a, [2, 1, 2]; batch = batch, part = 1, rows = zeros(Float32, 2, 3))
                lookup!(trainer, (some,))
                @test some.rows[:, [2, 1]] == rows[1]
                wrong = Op(b, [1]; batch = batch, part = 1, rows = zeros(Float32, 3, 1))
                @test status_of(() -> lookup!(trainer, (wrong,))) == Frugal.ERR_INVALID_ARGUMENT
                step_end(trainer, step)
            end
            @test Frugal.get(a, [1, 2])[1] == Float32[6 3; 6 3]
        end
    end
end

@testset Counts "memory that the engine lends" begin
    with_table() do engine, table, trainer
        for step = 0:3
            step_begin(trainer, step)
            grads = Frugal.unsafe_borrow(trainer, 4, 2)
            @test grads isa Matrix{Float32} && size(grads) == (4, 2)
            @test UInt(pointer(grads)) % 64 == 0
            grads .= -1
            push_grad(trainer, table, [1, 2], grads)
            @test size(Frugal.unsafe_borrow(trainer, 4, 0)) == (4, 0)
            @test_throws OverflowError Frugal.unsafe_borrow(trainer, typemax(Int), 4)
            @test_throws InexactError Frugal.unsafe_borrow(trainer, 4, -1)
            step_end(trainer, step)
        end
        @test Frugal.get(table, [1, 2])[1] == fill(4.0f0, 4, 2)
    end
end

@testset Counts "gradients in memory that the engine lends" begin
    with_table() do engine, table, trainer
        batch = prefetch(trainer, 0, table, [1, 2])
        @test status_of(() -> push_borrowed(identity, trainer, table, [1])) == Frugal.ERR_NOT_IN_STEP
        step_begin(trainer, 0)
        @test push_borrowed(trainer, batch) do grads
            @test size(grads) == (4, 2)
            grads .= -1
            # Calls that would free the memory are refused, and so are calls of the trainer.
            @test_throws ErrorException close(engine)
            @test_throws ErrorException close(trainer)
            @test_throws ErrorException step_end(trainer, 0)
            @test_throws ErrorException push_borrowed(identity, trainer, batch)
            finalize(engine)
            finalize(trainer)
            GC.gc()
            @test sum(grads) == -8
        end === nothing
        push_borrowed(grads -> fill!(grads, -1), trainer, table, [1, 2, 3]; pooling = :sum, offsets = [0, 2, 3])
        @test_throws KeyError push_borrowed(grads -> throw(KeyError(1)), trainer, batch) # pushes nothing
        step_end(trainer, 0)
        @test Frugal.get(table, [1, 2, 3])[1] == Float32[2 2 1; 2 2 1; 2 2 1; 2 2 1]
        @test (engine.lent[], trainer.lent[]) == (0, 0)
        close(trainer)
        close(engine)
        @test status_of(() -> push_borrowed(identity, trainer, batch)) == Frugal.ERR_BAD_HANDLE
    end
end
