# Biased matrix factorization: rating = mean + user bias + item bias + user row . item row.
#   julia --project=bindings/julia examples/movielens.jl [FILE]
#       lines of FILE: user TAB item TAB rating TAB anything, as in MovieLens' u.data
# Without a file it makes ratings from planted rows and noise, so that the best possible error is
# known. README.md says exactly what is computed; the other languages print the same numbers.

using Frugal
using Printf

const DIM, BATCH, EPOCHS, AHEAD = 4, 256, 10, 4
const USERS, ITEMS, RATINGS = 400, 300, 50_000 # of the planted set

struct Rating
    user::UInt64
    item::UInt64
    value::Float32
    noise::Float64 # planted: what no model can know
end

# --- Data ---

mutable struct SplitMix64
    state::UInt64
end

function next!(random::SplitMix64)
    z = random.state += 0x9e3779b97f4a7c15
    z = (z ⊻ (z >> 30)) * 0xbf58476d1ce4e5b9
    z = (z ⊻ (z >> 27)) * 0x94d049bb133111eb
    return z ⊻ (z >> 31)
end

# Nearly normal, with mean 0 and deviation 1: exact, so that every language has the same bits.
normal!(random) = sum((next!(random) >> 40) / 16777216 for _ = 1:12) - 6

function plant()
    random = SplitMix64(1)
    user_bias = [0.4 * normal!(random) for _ = 1:USERS]
    item_bias = [0.4 * normal!(random) for _ = 1:ITEMS]
    users = [0.6 * normal!(random) for _ = 1:DIM, _ = 1:USERS]
    items = [0.6 * normal!(random) for _ = 1:DIM, _ = 1:ITEMS]
    return map(1:RATINGS) do _
        user = next!(random) % USERS
        item = next!(random) % ITEMS
        noise = 0.3 * normal!(random)
        u, i = Int(user) + 1, Int(item) + 1
        value = 3.5 + user_bias[u] + item_bias[i]
        for c = 1:DIM
            value += users[c, u] * items[c, i]
        end
        Rating(user, item, Float32(value + noise), noise)
    end
end

# What a line is parsed to; nothing if it is not of the form.
function rating(fields)
    length(fields) >= 3 && all(isascii, fields[1:3]) || return nothing
    all(field -> occursin(r"^[0-9]+$", field), fields[1:2]) || return nothing
    occursin(r"^[+-]?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?$", fields[3]) || return nothing
    user, item = tryparse(UInt64, fields[1]), tryparse(UInt64, fields[2])
    # Julia's own parse refuses numbers that are rounded to 0 or to infinity.
    value = Float32(ccall(:strtod, Cdouble, (Cstring, Ptr{Cvoid}), String(fields[3]), C_NULL))
    (user === nothing || item === nothing || !isfinite(value)) && return nothing
    return Rating(user, item, value, 0.0)
end

function load(path)
    ratings = Rating[]
    for (number, line) in enumerate(eachline(path))
        fields = split(line, [' ', '\t', '\r']; limit = 4, keepempty = false)
        isempty(fields) && continue
        one = rating(fields)
        one === nothing && error("$path: line $number is not of the form user, item, rating")
        push!(ratings, one)
    end
    length(ratings) < 10 && error("$path: $(length(ratings)) ratings, at least 10 are needed")
    return ratings
end

# --- Model: users, items, user biases, item biases ---

# Room for a batch; a batch is the first columns of it.
struct Buffers
    rows::NTuple{4,Matrix{Float32}}
    grads::NTuple{4,Matrix{Float32}}
    errors::Vector{Float32}
end

matrices() = map(dim -> Matrix{Float32}(undef, dim, BATCH), (DIM, DIM, 1, 1))
Buffers() = Buffers(matrices(), matrices(), Vector{Float32}(undef, BATCH))

# The keys of the four tables.
function keys_of(ratings)
    users = [rating.user for rating in ratings]
    items = [rating.item for rating in ratings]
    return (users, items, users, items)
end

# Sets the errors of the guesses that the rows make, and returns the sum of their squares.
function compare!(buffers, mean, ratings)
    users, items, user_bias, item_bias = buffers.rows
    squares = 0.0
    for (k, rating) in enumerate(ratings)
        guess = mean + user_bias[1, k] + item_bias[1, k]
        for c = 1:DIM
            guess += users[c, k] * items[c, k]
        end
        error = rating.value - guess
        buffers.errors[k] = error
        squares += Float64(error) * error
    end
    return squares
end

# The gradients of half the squared error.
function gradients!(buffers, n)
    users, items = buffers.rows
    for k = 1:n
        error = buffers.errors[k]
        for c = 1:DIM
            buffers.grads[1][c, k] = -error * items[c, k]
            buffers.grads[2][c, k] = -error * users[c, k]
        end
        buffers.grads[3][1, k] = buffers.grads[4][1, k] = -error
    end
end

part(matrix, n) = view(matrix, :, 1:n) # no copy: its columns are contiguous

function train_epoch!(trainer, tables, buffers, mean, ratings, first_step)
    batches = collect(Iterators.partition(ratings, BATCH))
    declared = Batch[]
    squares = 0.0
    for (b, batch) in enumerate(batches)
        step = first_step + b - 1
        while length(declared) < min(b + AHEAD, length(batches))
            next = length(declared) + 1
            ops = map(Op, tables, keys_of(batches[next]))
            push!(declared, prefetch(trainer, first_step + next - 1, ops))
        end
        n = length(batch)
        ops = ntuple(4) do t
            Op(declared[b], t; rows = part(buffers.rows[t], n), grads = part(buffers.grads[t], n))
        end
        step_begin(trainer, step)
        lookup!(trainer, ops)
        squares += compare!(buffers, mean, batch)
        gradients!(buffers, n)
        push_grad(trainer, ops)
        step_end(trainer, step)
    end
    return squares, first_step + length(batches)
end

function test(engine, tables, buffers, mean, ratings)
    squares = 0.0
    for batch in Iterators.partition(ratings, BATCH)
        rows = map(matrix -> part(matrix, length(batch)), buffers.rows)
        ops = map((table, keys, rows) -> Op(table, keys; rows = rows), tables, keys_of(batch), rows)
        Frugal.read!(engine, ops) # rows that are missing read as zeros
        squares += compare!(buffers, mean, batch)
    end
    return squares
end

function main(arguments)
    ratings = isempty(arguments) ? plant() : load(arguments[1])
    train = [rating for (n, rating) in enumerate(ratings) if n % 10 != 0]
    held = [rating for (n, rating) in enumerate(ratings) if n % 10 == 0]
    mean = Float32(foldl((sum, rating) -> sum + rating.value, train; init = 0.0) / length(train))
    @printf("%d ratings to train, %d to test, mean %.4f\n", length(train), length(held), mean)

    Engine() do engine
        # Any id will do in a hashed table; rows come with their first use.
        create(name, dim; options...) = Table(
            engine,
            name;
            rows = length(train),
            dim = dim,
            key_space = :hashed,
            optimizer = Optimizer(:adagrad; lr = 0.1, weight_decay_l2 = 0.02),
            options...,
        )
        tables = (
            create("users", DIM; init = :normal, init_b = 0.1),
            create("items", DIM; init = :normal, init_b = 0.1),
            create("user biases", 1),
            create("item biases", 1),
        )
        buffers = Buffers()
        random = SplitMix64(2)
        step = 0
        Trainer(engine) do trainer
            for epoch = 1:EPOCHS
                for n = length(train):-1:2 # Fisher and Yates
                    other = Int(next!(random) % n) + 1
                    train[n], train[other] = train[other], train[n]
                end
                train_squares, step = train_epoch!(trainer, tables, buffers, mean, train, step)
                test_squares = test(engine, tables, buffers, mean, held)
                @printf(
                    "epoch %2d: train RMSE %.4f, test RMSE %.4f\n",
                    epoch,
                    sqrt(train_squares / length(train)),
                    sqrt(test_squares / length(held)),
                )
            end
        end
    end
    if isempty(arguments)
        noise = foldl((sum, rating) -> sum + rating.noise * rating.noise, held; init = 0.0)
        @printf("known optimum: test RMSE %.4f\n", sqrt(noise / length(held)))
    end
end

main(ARGS)
