# Ops and batches, which calls on several tables take.

# The keys of one table in a declaration.
struct Part
    table::Table
    count::Int
end

"""
    Batch

Keys declared for one step by [`prefetch`](@ref), with one part for each op of the call.

The library releases a batch when its step ends or it is cancelled. After that a call with it throws
`ERR_BAD_HANDLE`. The object owns nothing: its collection does not take the declaration back.
Since 0.1.
"""
struct Batch{T}
    handle::ABI.Handle
    trainer::T
    parts::Vector{Part}
end

Base.show(io::IO, batch::Batch) =
    print(io, "Batch(", join((part.count for part in batch.parts), " + "), " keys)")

"""
    Op(table, keys; options...)
    Op(batch, part = 1; options...)

The keys of one table in a call, and the arrays of its rows and gradients. The second form has the
keys that the `part`-th op of a [`prefetch`](@ref) declared; it is the fast one.

Options, where `n` is the number of keys, or of bags if pooled:

- `pooling = :none`: a row for each key; `:sum` and `:mean`: a row for each bag
- `offsets` (pooled): `bags + 1` values of `UInt64` or `Int64`. The first is 0, the last is the
  number of keys. Bag `b`, from 1, has the keys `offsets[b] + 1` to `offsets[b + 1]`.
- `weights` (pooled sum): a `Float32` for each key
- `weight_grads` (push): an output, the gradient of each weight
- `rows` (lookup, read): an output, the rows, `(dim, n)`
- `grads` (push): the gradients, `(dim, n)`
- `found` (read): an output, a `Bool` or `UInt8` for each key
- `padding_key`: rows of this key read as zeros, take no gradient and are never created
- `batch` and `part` (first form): the keys are any keys of that part, in any order

Returns a value that refers to the arrays; a call takes their addresses when it is made. One op may
have `rows` and `grads` and serve the lookup and the push. Threads: any. Errors: `ArgumentError`,
`DimensionMismatch`, mostly from the call that uses it. Since 0.1.
"""
struct Op{B,K,O,W,G,R,D,F}
    table::Table
    batch::B # Nothing without a batch
    part::Int
    keys::K # Nothing: the declared keys
    pooling::Int32
    offsets::O
    weights::W
    weight_grads::G
    rows::R
    grads::D
    found::F
    padding_key::UInt64
    flags::UInt32
end

@inline function Op(
    table::Table,
    keys;
    batch::Union{Nothing,Batch} = nothing,
    part::Integer = 1,
    options...,
)
    return make_op(table, batch, Int(part), widened(keys); options...)
end

@inline Op(batch::Batch, part::Integer = 1; options...) =
    make_op(part_of(batch, Int(part)).table, batch, Int(part), nothing; options...)

@inline function part_of(batch::Batch, part::Int)
    checkbounds(Bool, batch.parts, part) || no_part(batch, part)
    return @inbounds batch.parts[part]
end
@noinline no_part(batch, part) =
    throw(ArgumentError("there is no part $part in a batch of $(length(batch.parts)) parts"))

@inline function make_op(
    table::Table,
    batch,
    part::Int,
    keys;
    pooling = :none,
    offsets = nothing,
    weights = nothing,
    weight_grads = nothing,
    rows = nothing,
    grads = nothing,
    found = nothing,
    padding_key::Union{Nothing,Integer} = nothing,
)
    part >= 1 || throw(ArgumentError("parts are counted from 1; got $part"))
    kind = code(ABI.POOLING, pooling, "pooling")
    if (kind == 0) != (offsets === nothing)
        throw(ArgumentError("offsets go with pooling = :sum or :mean, and these need offsets"))
    end
    return Op(
        table,
        batch,
        part,
        keys,
        kind,
        offsets,
        weights,
        weight_grads,
        rows,
        grads,
        found,
        padding_key === nothing ? UInt64(0) : padding_key % UInt64,
        padding_key === nothing ? UInt32(0) : ABI.OP_PADDING,
    )
end

@inline count_of(op::Op) = length(op.keys)::Int
@inline count_of(op::Op{<:Batch,Nothing}) = part_of(op.batch, op.part).count

@inline bags_of(op::Op) = max(length(op.offsets)::Int - 1, 0)
@inline bags_of(op::Op{B,K,Nothing}) where {B,K} = 0

# The number of rows that a call reads or writes.
@inline rows_of(op::Op) = op.pooling == 0 ? count_of(op) : bags_of(op)

@inline handle_of(::Nothing) = C_NULL
@inline handle_of(batch::Batch) = batch.handle

@noinline missing_array(what) = throw(ArgumentError("the op has no `$what`, which this call needs"))

# An op of the ABI. `rows_out` and `grads` are the addresses of rows and gradients; a call uses one
# of them.
@inline function abi_op(op::Op, rows_out, grads, stride, weight_grads_out, found_out)
    n = count_of(op)
    keys = op.keys === nothing ? Ptr{UInt64}(C_NULL) : key_address(op.keys)
    offsets = Ptr{UInt64}(C_NULL)
    if op.offsets !== nothing
        offsets = vector_address(UInt64, Key, op.offsets, length(op.offsets)::Int, "offsets")
        length(op.offsets) > 0 || bad_length("offsets", op.offsets, "at least 1")
    end
    weights = Ptr{Float32}(C_NULL)
    if op.weights !== nothing
        weights = vector_address(Float32, Float32, op.weights, n, "weights")
    end
    return ABI.Op(
        sizeof(ABI.Op),
        op.table.handle,
        handle_of(op.batch),
        (op.part - 1) % UInt32,
        op.pooling,
        keys,
        n,
        offsets,
        bags_of(op),
        weights,
        weight_grads_out,
        rows_out,
        grads,
        stride,
        found_out,
        op.padding_key,
        op.flags,
        0,
    )
end

# The op of the ABI for each kind of call. `host`: the outputs are in host memory.
@inline declare_op(op::Op, host::Bool) = abi_op(op, C_NULL, C_NULL, 0, C_NULL, C_NULL)

@inline function lookup_op(op::Op, host::Bool)
    op.rows === nothing && missing_array("rows")
    p, stride = matrix_address(op.rows, op.table.dim, rows_of(op), "rows")
    host && probe(p, op.rows)
    return abi_op(op, p, C_NULL, stride, C_NULL, C_NULL)
end

@inline function push_op(op::Op, host::Bool)
    op.grads === nothing && missing_array("grads")
    p, stride = matrix_address(op.grads, op.table.dim, rows_of(op), "grads")
    weight_grads = Ptr{Float32}(C_NULL)
    if op.weight_grads !== nothing
        weight_grads = vector_address(Float32, Float32, op.weight_grads, count_of(op), "weight_grads")
        host && probe(weight_grads, op.weight_grads)
    end
    return abi_op(op, C_NULL, p, stride, weight_grads, C_NULL)
end

@inline function read_op(op::Op, host::Bool)
    op.rows === nothing && missing_array("rows")
    p, stride = matrix_address(op.rows, op.table.dim, rows_of(op), "rows")
    host && probe(p, op.rows)
    return abi_op(op, p, C_NULL, stride, C_NULL, found_address(op.found, count_of(op), true))
end

const Ops = Union{Tuple{Vararg{Op}},AbstractVector{<:Op}}

# The ops of a call as stable objects. A lazy vector creates its elements only once here: their
# arrays must live until the call has returned.
@inline settled(ops::Union{Tuple,Vector}) = ops
function settled(ops::AbstractVector)
    list = Op[]
    for op in ops
        push!(list, op)
    end
    return list
end

# The ops of a call in the memory layout of the ABI.
@inline abi_ops(make::F, ops::Tuple, host::Bool) where {F} = Ref(map(op -> make(op, host), ops))
abi_ops(make::F, ops::Vector, host::Bool) where {F} = ABI.Op[make(op, host) for op in ops]
