# Helpers of several tests.

const PACKAGE = dirname(@__DIR__)
const ROOT = dirname(dirname(PACKAGE))

# The status with which `f()` fails, or `nothing` if it does not fail.
function status_of(f)
    try
        f()
    catch failure
        failure isa FrugalError || rethrow()
        return failure.status
    end
    return nothing
end

# Runs a Julia program in another process with `threads` threads. Returns its exit code and output.
function child(program; environment = (), threads = 1, input = devnull)
    command = `$(Base.julia_cmd()) --startup-file=no --threads=$threads --project=$PACKAGE -e $program`
    command = setenv(command, merge(Dict(ENV), Dict(environment)))
    out = IOBuffer()
    process = run(pipeline(ignorestatus(command); stdin = input, stdout = out, stderr = out))
    return process.exitcode, String(take!(out))
end

# Calls f(engine, table, trainer) with a dense table that uses SGD.
function with_table(f; dim = 4, rows = 100, lr = 1.0, table = (;), engine = (;))
    Engine(; engine...) do e
        t = Table(e, "t"; rows = rows, dim = dim, optimizer = Optimizer(:sgd; lr = lr), table...)
        Trainer(trainer -> f(e, t, trainer), e)
    end
end

# All keys of a table, sorted, and their rows with state.
function contents(table)
    all = sort!(keys(table))
    rows, found = Frugal.get(table, all; state = true)
    return all, reinterpret(UInt32, rows)
end
