# Pooled lookups and pushes on small integers, where every order of additions is exact.

@testset Counts "bags" begin
    with_table(; rows = 20) do engine, table, trainer
        all = Float32[4k + i for i = 1:4, k = 0:19]
        Frugal.put(table, collect(0:19), all)
        keys = [3, 5, 5, 7, 0, 9]
        offsets = [0, 2, 2, 6] # the second bag is empty
        bags = (1:2, 3:2, 3:6)
        weights = Float32[2, -1, 3, 0, 1, 4]
        row(k) = all[:, k+1]
        total(f, bag) = isempty(bag) ? zeros(Float32, 4) : sum(f, bag)
        batch = prefetch(trainer, 0, table, keys)
        step_begin(trainer, 0)
        for op in ((batch,), (table, keys))
            pooled(; options...) = lookup(trainer, op...; offsets = offsets, options...)
            sums = hcat((total(i -> row(keys[i]), bag) for bag in bags)...)
            @test pooled(; pooling = :sum) == sums
            @test pooled(; pooling = :mean) == sums ./ Float32[2 1 4]
            @test pooled(; pooling = :sum, weights = weights) ==
                  hcat((total(i -> weights[i] * row(keys[i]), bag) for bag in bags)...)
        end
        # Rows of the padding key do not count.
        without = hcat((total(i -> keys[i] == 5 ? zeros(Float32, 4) : row(keys[i]), bag) for bag in bags)...)
        @test lookup(trainer, table, keys; pooling = :sum, offsets = offsets, padding_key = 5) == without
        @test lookup(trainer, table, keys; pooling = :mean, offsets = offsets, padding_key = 5) ==
              without ./ Float32[1 1 3]
        @test lookup(trainer, table, keys; padding_key = 5)[:, 2:3] == zeros(Float32, 4, 2)
        @test status_of(() -> lookup(trainer, table, keys; pooling = :mean, offsets = offsets, weights = weights)) ==
              Frugal.ERR_INVALID_ARGUMENT

        # The gradient of a key is its bag's gradient times its weight. The gradient of a weight is
        # the product of its bag's gradient and its row.
        grads = Float32[1 10 100; 2 20 200; 3 30 300; 4 40 400]
        weight_grads = zeros(Float32, 6)
        push_grad(
            trainer,
            batch,
            grads;
            pooling = :sum,
            offsets = offsets,
            weights = weights,
            weight_grads = weight_grads,
        )
        bag_of = [1, 1, 3, 3, 3, 3]
        @test weight_grads == [sum(row(keys[i]) .* grads[:, bag_of[i]]) for i = 1:6]
        short = (offsets = offsets, weights = weights, weight_grads = zeros(Float32, 5))
        @test_throws DimensionMismatch push_grad(trainer, batch, grads; pooling = :sum, short...)
        step_end(trainer, 0)
        expected = copy(all)
        for i = 1:6
            expected[:, keys[i]+1] .-= weights[i] .* grads[:, bag_of[i]]
        end
        @test Frugal.get(table, collect(0:19))[1] == expected
        rows, found = Frugal.read(engine, table, keys; pooling = :sum, offsets = offsets)
        @test rows == hcat((total(i -> expected[:, keys[i]+1], bag) for bag in bags)...)
        @test length(found) == 6
    end
end
