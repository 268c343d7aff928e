# Frugal in one page of Julia: open an engine, train two rows for ten steps, read them.
#   julia --project=bindings/julia examples/hello.jl
# The same program in other languages: hello.c, hello.cpp, hello.py, hello.rs.

using Frugal
using Printf

# An engine with all defaults: one rank, keys declared up to ten steps ahead.
Engine() do engine
    # A table of 1000 rows of 4 floats, all zeros, trained by SGD.
    table = Table(engine, "items"; rows = 1000, dim = 4, optimizer = Optimizer(:sgd; lr = 0.1))

    Trainer(engine) do trainer
        # Rows 7 and 42 learn to be ones. Key 7 comes twice: its gradients are summed.
        keys = [7, 42, 7]
        rows = Matrix{Float32}(undef, 4, length(keys)) # a column for each key
        batch = prefetch(trainer, 0, table, keys)

        for step = 0:9
            # What the next step needs is brought up to date while this one computes.
            next = prefetch(trainer, step + 1, table, keys)
            step_begin(trainer, step)
            lookup!(trainer, batch, rows) # exactly the declared keys

            # Half the squared distance from one, whose gradient is row - 1.
            grads = rows .- 1.0f0
            loss = 0.0
            for gradient in grads
                loss += 0.5 * gradient * gradient
            end
            push_grad(trainer, batch, grads)
            step_end(trainer, step)
            @printf("step %d: loss %.6f\n", step, loss)
            batch = next
        end
    end

    # Outside steps rows are read by their keys.
    keys = [7, 42]
    rows, found = Frugal.get(table, keys)
    for (i, key) in enumerate(keys)
        println("row $key:", (@sprintf(" %.6f", x) for x in rows[:, i])...)
    end
end
