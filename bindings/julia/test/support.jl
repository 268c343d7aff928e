# What several tests use.

const PACKAGE = dirname(@__DIR__)
const ROOT = dirname(dirname(PACKAGE))

# The status with which `f()` fails, `nothing` if it does not.
function status_of(f)
    try
        f()
    catch failure
        failure isa FrugalError || rethrow()
        return failure.status
    end
    return nothing
end

# Runs a program of Julia in a process of its own; returns its exit code and output. `threads` of its own.
function child(program; environment = (), threads = 1, input = devnull)
    command = `$(Base.julia_cmd()) --startup-file=no --threads=$threads --project=$PACKAGE -e $program`
    command = setenv(command, merge(Dict(ENV), Dict(environment)))
    out = IOBuffer()
    process = run(pipeline(ignorestatus(command); stdin = input, stdout = out, stderr = out))
    return process.exitcode, String(take!(out))
end

# Calls f(engine, table, trainer) with a dense table of SGD.
function with_table(f; dim = 4, rows = 100, lr = 1.0, table = (;), engine = (;))
    Engine(; engine...) do e
        t = Table(e, "t"; rows = rows, dim = dim, optimizer = Optimizer(:sgd; lr = lr), table...)
        Trainer(trainer -> f(e, t, trainer), e)
    end
end

# All keys and rows with state of a table, in the order of keys.
function contents(table)
    all = sort!(keys(table))
    rows, found = Frugal.get(table, all; state = true)
    return all, reinterpret(UInt32, rows)
end
