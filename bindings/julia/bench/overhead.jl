# The time that the package adds to the ABI: the same calls through the package, and by ccall with
# structs made before, alternating in one process. Prints ratios, and for calls with one row
# nanoseconds and allocated bytes.
#   FRUGAL_LIBRARY=… julia --project=bindings/julia bindings/julia/bench/overhead.jl

using Frugal
using Printf

const ABI = Frugal.ABI

median(x) = sort(x)[(length(x)+1)÷2]

raw(f, trainer, op) = ccall(f, Int32, (Ptr{Cvoid}, Ref{ABI.Op}, Csize_t), trainer.handle, op, 1)
raw_lookup(trainer, op) = raw(ABI.frugal_lookup[], trainer, op) == 0 || error("lookup")
raw_push(trainer, op) = raw(ABI.frugal_push_grad[], trainer, op) == 0 || error("push_grad")

function abi_op(table, keys, rows, grads; batch = C_NULL)
    return Ref(
        ABI.Op(
            table = table.handle,
            batch = batch,
            keys = batch == C_NULL ? pointer(keys) : C_NULL,
            count = length(keys),
            rows_out = pointer(rows),
            grads = pointer(grads),
            row_stride = 4 * size(rows, 1),
        ),
    )
end

# Lookup and push of `n` declared rows: the ratio of the medians over alternating steps.
function many(n, dim, steps)
    Engine() do engine
        table = Table(engine, "t"; rows = 4n, dim = dim, optimizer = Optimizer(:adagrad; lr = 0.01))
        Trainer(engine) do trainer
            keys = [mod(hash(i), 4n) for i = 1:n]
            rows, grads = zeros(Float32, dim, n), fill(1.0f-3, dim, n)
            seconds = (Float64[], Float64[])
            GC.@preserve keys rows grads for step = 0:steps
                batch = prefetch(trainer, step, table, keys)
                step_begin(trainer, step)
                op = abi_op(table, keys, rows, grads; batch = batch.handle)
                if isodd(step)
                    time = @elapsed begin
                        lookup!(trainer, batch, rows)
                        push_grad(trainer, batch, grads)
                    end
                else
                    time = @elapsed begin
                        raw_lookup(trainer, op)
                        raw_push(trainer, op)
                    end
                end
                step_end(trainer, step)
                flush(engine) # no step does the work of the one before
                step > 9 && push!(seconds[isodd(step)+1], time)
            end
            c, package = median(seconds[1]), median(seconds[2])
            @printf(
                "lookup + push of %d rows of %d: ccall %.3f ms, package %.3f ms, ratio %.3f\n",
                n,
                dim,
                1e3c,
                1e3package,
                package / c,
            )
        end
    end
end

# Calls `f` `n` times. Returns the nanoseconds and allocated bytes of each call.
function each(f::F, n) where {F}
    f()
    bytes = @allocated f()
    start = time_ns()
    for _ = 1:n
        f()
    end
    return (time_ns() - start) / n, bytes
end

function one(dim, rounds)
    Engine() do engine
        table = Table(engine, "t"; rows = 1000, dim = dim, optimizer = Optimizer(:sgd; lr = 0.01))
        Trainer(engine) do trainer
            keys, rows, grads = [7], zeros(Float32, dim, 1), zeros(Float32, dim, 1)
            op = abi_op(table, keys, rows, grads)
            results = Dict{String,Vector{Tuple{Float64,Int}}}()
            measure(name, f, n) = push!(Base.get!(() -> [], results, name), each(f, n))
            GC.@preserve keys rows grads for step = 0:rounds
                batch = prefetch(trainer, step, table, keys)
                step_begin(trainer, step)
                declared = abi_op(table, keys, rows, grads; batch = batch.handle)
                measure("lookup of 1 declared row, ccall", () -> raw_lookup(trainer, declared), 2000)
                measure("lookup of 1 declared row, package", () -> lookup!(trainer, batch, rows), 2000)
                measure("lookup of 1 row by key, ccall", () -> raw_lookup(trainer, op), 2000)
                measure("lookup of 1 row by key, package", () -> lookup!(trainer, table, keys, rows), 2000)
                measure("push of 1 declared row, ccall", () -> raw_push(trainer, declared), 200)
                measure("push of 1 declared row, package", () -> push_grad(trainer, batch, grads), 200)
                step_end(trainer, step)
            end
            for name in sort!(collect(Base.keys(results)))
                @printf("%-34s %7.0f ns %5d bytes\n", name, median(first.(results[name])), last(results[name][end]))
            end
        end
    end
end

many(65536, 32, 60)
one(32, 60)
