# Replays op scripts (docs/bindings.md), one after the other, with the public interface of the
# package, and prints their hashes.
#   julia opscript.jl SCRIPT...
module OpScript

using Frugal

include("json.jl")

mutable struct Fnv
    value::UInt64
end
Fnv() = Fnv(UInt64(14695981039346656037))

function add(hash::Fnv, data::AbstractArray{UInt8})
    value = hash.value
    for byte in data
        value = (value ⊻ byte) * UInt64(1099511628211)
    end
    hash.value = value
end
add(hash::Fnv, data::AbstractArray) = add(hash, reinterpret(UInt8, vec(data)))
add(hash::Fnv, data::AbstractArray{Bool}) = add(hash, UInt8.(data))

mutable struct State
    engine::Union{Nothing,Engine}
    tables::Dict{Int,Table}
    trainers::Dict{Int,Trainer}
    batches::Dict{Int,Batch}
    outputs::Fnv
    hashes::Int
end
State() = State(nothing, Dict(), Dict(), Dict(), Fnv(), 0)

big(text) = parse(UInt64, text)
bigs(list) = UInt64[big(x) for x in list]
float(bits) = reinterpret(Float32, UInt32(bits))
floats(list) = Float32[float(x) for x in list]

# The existing fields of `object` as keyword arguments, each converted by its function.
fields(object; readers...) =
    (; (name => read(object[String(name)]) for (name, read) in pairs(readers) if haskey(object, String(name)))...)

const FLOATS = (
    :lr, :eps, :momentum, :dampening, :beta1, :beta2, :rho, :ftrl_lambda1, :ftrl_lambda2, :ftrl_beta,
    :initial_accumulator, :weight_decay_l2, :weight_decay, :clip_value, :clip_norm, :weight_bound, :grad_scale,
)

# All fields are given, so that Julia compiles one keyword call, not one for each set of fields.
function optimizer(object)
    value(name) = haskey(object, String(name)) ? float(object[String(name)]) : getfield(Optimizer(), name)
    options = NamedTuple{FLOATS}(Tuple(value(name) for name in FLOATS))
    return Optimizer(get(object, "kind", 0); options..., flags = get(object, "flags", 0))
end

# The ops of a line, with the gradients of a push, or with output `rows` (and `found`). All ops have
# all options, and there is one type of vector: Julia would compile each other combination.
function ops_of(s::State, line; grads = false, rows = false, found = false)
    ops = Op[]
    for object in line["ops"]
        table = s.tables[object["table"]]
        batch = haskey(object, "batch") ? s.batches[object["batch"]] : nothing
        part = get(object, "part", 0) + 1
        offsets = haskey(object, "offsets") ? UInt64.(object["offsets"]) : nothing
        count = haskey(object, "keys") ? length(object["keys"]) : batch.parts[part].count
        n = offsets === nothing ? count : length(offsets) - 1
        options = (
            pooling = get(object, "pooling", 0),
            offsets = offsets,
            weights = haskey(object, "weights") ? floats(object["weights"]) : nothing,
            weight_grads = get(object, "weight_grads", false) ? zeros(Float32, count) : nothing,
            rows = rows ? zeros(Float32, table.dim, n) : nothing,
            grads = grads ? reshape(floats(get(object, "grads", [])), table.dim, n) : nothing,
            found = found ? zeros(UInt8, count) : nothing,
            padding_key = haskey(object, "padding_key") ? big(object["padding_key"]) : nothing,
        )
        if haskey(object, "keys")
            keys = bigs(object["keys"])
            push!(ops, Op(table, keys; batch = batch, part = part, options...))
        else
            push!(ops, Op(batch, part; options...))
        end
    end
    return ops
end

function do_open(s, line)
    s.engine = Engine(;
        fields(
            line;
            world_size = identity,
            lookahead = identity,
            flush_threads = identity,
            flush_mode = identity,
            staleness = big,
            pending_bytes = big,
            seed = big,
        )...,
        service = get(ENV, "FRUGAL_SERVICE", nothing),
    )
end

function do_table(s, line)
    options = fields(
        line;
        key_space = identity,
        rows = big,
        dim = identity,
        init = identity,
        init_a = float,
        init_b = float,
        nan_policy = identity,
        optimizer = optimizer,
    )
    s.tables[line["table"]] =
        Table(s.engine, line["name"]; lazy = get(line, "flags", 0) & Frugal.ABI.TABLE_LAZY != 0, options...)
end

function do_trainer(s, line)
    s.trainers[line["rank"]] =
        Trainer(s.engine; rank = line["rank"], fields(line; cache_ratio = float)...)
end

do_set_optimizer(s, line) =
    set_optimizer(s.tables[line["table"]], big(line["first_step"]), optimizer(line["optimizer"]))

function do_prefetch(s, line)
    s.batches[line["batch"]] =
        prefetch(s.trainers[line["rank"]], big(line["step"]), ops_of(s, line))
end

do_cancel(s, line) = cancel(s.trainers[line["rank"]], s.batches[line["batch"]])

do_begin(s, line) =
    step_begin(s.trainers[line["rank"]], big(line["step"]); fields(line; timeout_ms = identity)...)

function do_lookup(s, line)
    ops = ops_of(s, line; rows = true)
    lookup!(s.trainers[line["rank"]], ops)
    for op in ops
        add(s.outputs, op.rows)
    end
end

function do_push(s, line)
    ops = ops_of(s, line; grads = true)
    push_grad(s.trainers[line["rank"]], ops)
    for op in ops
        op.weight_grads === nothing || add(s.outputs, op.weight_grads)
    end
end

function do_read(s, line)
    ops = ops_of(s, line; rows = true, found = true)
    trainer = haskey(line, "rank") ? s.trainers[line["rank"]] : nothing
    Frugal.read!(s.engine, ops; trainer = trainer)
    for op in ops
        add(s.outputs, op.found)
        add(s.outputs, op.rows)
    end
end

do_end(s, line) =
    step_end(s.trainers[line["rank"]], big(line["step"]); fields(line; flags = identity)...)

do_abort(s, line) = step_abort(s.trainers[line["rank"]])

with_state(line) = get(line, "flags", 0) == 1

function do_get(s, line)
    table = s.tables[line["table"]]
    rows, found = Frugal.get(table, bigs(line["keys"]); state = with_state(line))
    add(s.outputs, found)
    for i in eachindex(found)
        found[i] && add(s.outputs, rows[:, i])
    end
end

function do_put(s, line)
    table = s.tables[line["table"]]
    keys = bigs(line["keys"])
    rows = floats(line["rows"])
    dim = with_state(line) ? table.dim + table.state_floats : table.dim
    Frugal.put(table, keys, reshape(rows, dim, length(keys)); state = with_state(line))
end

do_delete(s, line) = Frugal.delete(s.tables[line["table"]], bigs(line["keys"]))

do_flush(s, line) = flush(s.engine)

function do_hash(s, line)
    all = Fnv()
    for number in sort!(collect(keys(s.tables)))
        table = s.tables[number]
        keys_now = sort!(keys(table))
        rows, found = Frugal.get(table, keys_now; state = true)
        count = UInt64(length(table))
        length(keys_now) == count || error("table $number has $(length(keys_now)) keys and counts $count")
        add(all, [count])
        for i in eachindex(keys_now)
            add(all, keys_now[i:i])
            add(all, rows[:, i])
        end
    end
    hex(x) = string(x; base = 16, pad = 16)
    println("hash ", s.hashes, " ", hex(s.outputs.value), " ", hex(all.value))
    s.hashes += 1
end

do_close_trainer(s, line) = close(s.trainers[line["rank"]])
do_close(s, line) = close(s.engine)

const CALLS = Dict(
    "open" => do_open,
    "table" => do_table,
    "trainer" => do_trainer,
    "set_optimizer" => do_set_optimizer,
    "prefetch" => do_prefetch,
    "cancel" => do_cancel,
    "begin" => do_begin,
    "lookup" => do_lookup,
    "push" => do_push,
    "read" => do_read,
    "end" => do_end,
    "abort" => do_abort,
    "get" => do_get,
    "put" => do_put,
    "delete" => do_delete,
    "flush" => do_flush,
    "hash" => do_hash,
    "close_trainer" => do_close_trainer,
    "close" => do_close,
)

# Returns nothing if the line's call had the expected status, else a message.
function replay(s::State, line)
    name = get(line, "do", "")
    haskey(CALLS, name) || return "\"$name\" is nothing to do"
    expected = get(line, "status", "FRUGAL_OK")
    answer, message = "FRUGAL_OK", ""
    try
        CALLS[name](s, line)
    catch failure
        if failure isa FrugalError
            answer, message = failure.name, ": " * failure.message
        else
            return sprint(showerror, failure, catch_backtrace())
        end
    end
    return answer == expected ? nothing : "$name returned $answer, expected $expected$message"
end

function replay_all(path)
    s = State()
    for (number, text) in enumerate(eachline(path))
        wrong = try
            replay(s, JSON.parse(text))
        catch failure
            sprint(showerror, failure)
        end
        if wrong !== nothing
            println(stderr, "$path, line $number: $wrong")
            return false
        end
        if haskey(ENV, "FRUGAL_TURNS")
            println("done")
            flush(stdout)
        end
    end
    return true
end

function main(arguments)
    if isempty(arguments)
        println(stderr, "usage: julia opscript.jl SCRIPT...")
        return 2
    end
    return all(replay_all, arguments) ? 0 : 1
end

end # module

if abspath(PROGRAM_FILE) == @__FILE__
    exit(OpScript.main(ARGS))
end
