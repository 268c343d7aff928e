# Accepted and refused arrays: element types, shapes, strides, memory.

using Mmap

@testset Counts "keys" begin
    with_table() do engine, table, trainer
        expected = Frugal.get(table, UInt64[5, 6, 7])[1]
        Frugal.put(table, UInt64[5, 6, 7], Float32[k + 10i for k = 1:4, i = 1:3])
        rows, found = Frugal.get(table, UInt64[5, 6, 7])
        @test rows == Float32[k + 10i for k = 1:4, i = 1:3]
        @test found == [true, true, true]
        # Any vector in memory without gaps.
        for keys in (
            [5, 6, 7],
            Int32[5, 6, 7],
            UInt32[5, 6, 7],
            view([1, 5, 6, 7, 2], 2:4),
            reinterpret(UInt64, [5, 6, 7]),
            view(reinterpret(UInt64, [1, 5, 6, 7]), 2:4),
            reshape([5 6 7], 3),
            view(Int32[5, 0, 6, 0, 7], 1:2:5), # widening removes the gaps
        )
            @test Frugal.get(table, keys)[1] == rows
        end
        for keys in (
            5:7,
            [5.0, 6.0, 7.0],
            Float32[5, 6, 7],
            Int16[5, 6, 7],
            Any[5, 6, 7],
            Union{Int,Missing}[5, 6, 7],
            "567",
            (5, 6, 7),
            view([5, 0, 6, 0, 7], 1:2:5),
            view([7, 6, 5], 3:-1:1),
            [5 6 7],
            Int128[5, 6, 7],
            Bool[1, 0, 1],
        )
            @test_throws ArgumentError Frugal.get(table, keys)
        end
        @test_throws ArgumentError Frugal.get(table, reinterpret(Int64, view(zeros(UInt8, 25), 2:25)))
        # The same bits are a key that a dense table does not have.
        @test status_of(() -> Frugal.get(table, [-1])) == Frugal.ERR_KEY_OUT_OF_RANGE
        @test status_of(() -> Frugal.get(table, Int32[-1])) == Frugal.ERR_KEY_OUT_OF_RANGE
        # An empty vector of keys does not mean the declared keys.
        @test size(Frugal.get(table, UInt64[])[1]) == (4, 0)
    end
end

@testset Counts "a hashed table takes the bits of a negative key" begin
    Engine() do engine
        table = Table(engine, "t"; rows = 10, dim = 1, key_space = :hashed)
        Frugal.put(table, [-1, -2], Float32[1 2])
        @test Frugal.get(table, [typemax(UInt64), typemax(UInt64) - 1])[1] == Float32[1 2]
        @test Frugal.get(table, Int32[-1, -2])[1] == Float32[1 2]
        @test sort(keys(table)) == [typemax(UInt64) - 1, typemax(UInt64)]
    end
end

# Each good matrix is (4, 3), readable and writable. The bad ones come with the error of each.
good_matrices() = (
    zeros(Float32, 4, 3),
    view(zeros(Float32, 4, 9), :, 3:5),
    view(zeros(Float32, 9, 3), 2:5, :),
    view(zeros(Float32, 9, 9), 2:5, 2:3:8),
    reshape(zeros(Float32, 12), 4, 3),
    reinterpret(Float32, zeros(UInt32, 4, 3)),
    view(reinterpret(Float32, zeros(UInt32, 4, 9)), :, 1:2:5),
)
bad_matrices() = (
    (zeros(Float64, 4, 3), ArgumentError),
    (zeros(Int32, 4, 3), ArgumentError),
    (zeros(Float16, 4, 3), ArgumentError),
    (zeros(Float32, 12), ArgumentError),
    (zeros(Float32, 4, 3, 1), ArgumentError),
    (zeros(Float32, 3, 4)', ArgumentError),
    (PermutedDimsArray(zeros(Float32, 3, 4), (2, 1)), ArgumentError),
    (view(zeros(Float32, 4, 9), :, [1, 3, 4]), ArgumentError),
    (view(zeros(Float32, 8, 3), 1:2:8, :), ArgumentError),
    (view(zeros(Float32, 4, 3), 4:-1:1, :), ArgumentError),
    (view(zeros(Float32, 4, 3), :, 3:-1:1), ArgumentError),
    (view(reinterpret(Float32, view(zeros(UInt8, 50), 2:49)), :), ArgumentError),
    (reshape(reinterpret(Float32, view(zeros(UInt8, 50), 2:49)), 4, 3), ArgumentError),
    (zeros(Float32, 4, 4), DimensionMismatch),
    (zeros(Float32, 4, 2), DimensionMismatch),
    (zeros(Float32, 3, 3), DimensionMismatch),
    (zeros(Float32, 5, 3), DimensionMismatch),
    (zeros(Float32, 3, 4), DimensionMismatch),
    (nothing, ArgumentError),
    ("rows", ArgumentError),
)

@testset Counts "matrices" begin
    with_table(; rows = 10) do engine, table, trainer
        keys = [1, 2, 3]
        values = Float32[10i + k for k = 1:4, i = 1:3]
        Frugal.put(table, keys, values)
        step = 0
        prefetch(trainer, 0, table, keys)
        for rows in good_matrices()
            @test Frugal.get!(table, keys, rows) === rows
            @test rows == values
            rows .= 0
            Frugal.read!(engine, (Op(table, keys; rows = rows),))
            @test rows == values
            rows .= 0
            step_begin(trainer, step)
            @test lookup!(trainer, table, keys, rows) === rows
            @test rows == values
            rows .= -1 # a learning rate of 1 subtracts the gradients
            push_grad(trainer, table, keys, rows)
            step_end(trainer, step)
            step += 1
            values .+= 1
            @test Frugal.get(table, keys)[1] == values
            rows .= values
            Frugal.put(table, keys, rows)
            @test Frugal.get(table, keys)[1] == values
        end
        step_begin(trainer, step)
        for (rows, type) in bad_matrices()
            @test_throws type lookup!(trainer, table, keys, rows)
            @test_throws type push_grad(trainer, table, keys, rows)
        end
        step_end(trainer, step)
        for (rows, type) in bad_matrices()
            @test_throws type Frugal.get!(table, keys, rows)
            @test_throws type Frugal.put(table, keys, rows)
            @test_throws type Frugal.read!(engine, (Op(table, keys; rows = rows),))
        end
        @test Frugal.get(table, keys)[1] == values
    end
end

@testset Counts "rows of one element" begin
    with_table(; dim = 1) do engine, table, trainer
        x = reshape(Float32.(1:12), 4, 3)
        Frugal.put(table, [1, 2, 3], view(x, 2:2, :)) # a row of a matrix has contiguous columns
        @test Frugal.get(table, [1, 2, 3])[1] == Float32[2 6 10]
    end
end

@testset Counts "vectors" begin
    with_table() do engine, table, trainer
        keys = [1, 2, 3]
        rows = zeros(Float32, 4, 3)
        for found in (zeros(Bool, 3), zeros(UInt8, 3), view(zeros(UInt8, 5), 2:4))
            Frugal.get!(table, keys, rows, found)
            @test found == [1, 1, 1]
        end
        for (found, type) in (
            (zeros(Bool, 4), DimensionMismatch),
            (falses(3), ArgumentError),
            (zeros(Int, 3), ArgumentError),
            (view(zeros(UInt8, 5), 1:2:5), ArgumentError),
        )
            @test_throws type Frugal.get!(table, keys, rows, found)
        end
        step_begin(trainer, 0)
        out = zeros(Float32, 4, 2)
        pooled(; options...) = lookup!(trainer, table, keys, out; pooling = :sum, options...)
        for offsets in ([0, 1, 3], UInt64[0, 1, 3], view([9, 0, 1, 3], 2:4))
            @test pooled(; offsets = offsets) === out
        end
        for (offsets, type) in (
            (Int32[0, 1, 3], ArgumentError),
            ([0.0, 1.0, 3.0], ArgumentError),
            (0:2, ArgumentError),
            (view([0, 0, 1, 0, 3], 1:2:5), ArgumentError),
            (Int[], DimensionMismatch),
            ([0, 3], DimensionMismatch), # one bag, and rows for two
            (nothing, ArgumentError),
        )
            @test_throws type pooled(; offsets = offsets)
        end
        for offsets in ([1, 1, 3], [0, 2, 1], [0, 1, 2], [0, -1, 3], [0, 1, 4])
            @test status_of(() -> pooled(; offsets = offsets)) == Frugal.ERR_INVALID_ARGUMENT
        end
        for (weights, type) in (
            (Float64[1, 2, 3], ArgumentError),
            (Float32[1, 2], DimensionMismatch),
            (view(ones(Float32, 5), 1:2:5), ArgumentError),
        )
            @test_throws type pooled(; offsets = [0, 1, 3], weights = weights)
        end
        @test_throws ArgumentError lookup!(trainer, table, keys, rows; offsets = [0, 1, 3])
        @test_throws ArgumentError lookup!(trainer, table, keys, rows; pooling = :max)
        @test_throws ArgumentError lookup!(trainer, (Op(table, keys),))
        @test_throws ArgumentError push_grad(trainer, (Op(table, keys; rows = rows),))
        @test status_of(() -> lookup!(trainer, table, keys, rows; pooling = 7, offsets = [0, 1, 2, 3])) ==
              Frugal.ERR_INVALID_ARGUMENT
        step_end(trainer, 0)
    end
end

@testset Counts "an output that cannot be written" begin
    with_table() do engine, table, trainer
        mktempdir() do folder
            path = joinpath(folder, "rows")
            write(path, zeros(Float32, 4, 1024, 2))
            rows = open(file -> Mmap.mmap(file, Matrix{Float32}, (4, 3)), path)
            found = open(file -> Mmap.mmap(file, Vector{UInt8}, 3), path)
            keys = [1, 2, 3]
            @test_throws ReadOnlyMemoryError Frugal.get!(table, keys, rows)
            @test_throws ReadOnlyMemoryError Frugal.get!(table, keys, zeros(Float32, 4, 3), found)
            @test_throws ReadOnlyMemoryError Frugal.read!(engine, (Op(table, keys; rows = rows),))
            step_begin(trainer, 0)
            @test_throws ReadOnlyMemoryError lookup!(trainer, table, keys, rows)
            @test_throws ReadOnlyMemoryError lookup!(trainer, table, keys, view(rows, :, :))
            push_grad(trainer, table, keys, rows) # a push only reads its rows
            step_end(trainer, 0)
            Frugal.put(table, keys, rows)
        end
    end
end
