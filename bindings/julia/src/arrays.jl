# Addresses of Julia's arrays. Only `widened` copies. Callers use an address while GC.@preserve
# holds the array.

@noinline bad_memory(what, x, needs) =
    throw(ArgumentError("$what must be $needs that lies in memory without gaps; got $(summary(x))"))
@noinline bad_stride(what, x, needs) =
    throw(ArgumentError("$what must be $needs; got $(summary(x)) with strides $(strides(x))"))
@noinline bad_address(what, x, type) =
    throw(ArgumentError("$what lies at an address that is not aligned for $type; got $(summary(x))"))
@noinline bad_device(what, x) =
    throw(ArgumentError("$what must lie in the memory of this process; got $(summary(x))"))
@noinline bad_length(what, x, n) =
    throw(DimensionMismatch("$what has $(length(x)) elements and needs $n"))
@noinline bad_size(what, x, dim, n) =
    throw(DimensionMismatch("$what is $(size(x)) and must be (dim, n) = $((dim, n))"))

@inline function address(::Type{T}, x, what) where {T}
    p = pointer(x)
    p isa Ptr || bad_device(what, x)
    q = Ptr{T}(p)
    # Views of reinterpreted bytes may begin anywhere.
    UInt(q) % sizeof(T) == 0 || bad_address(what, x, T)
    return q
end

# The address of `n` elements without gaps. `Stored` are the element types with the bits of `T`.
@inline function vector_address(::Type{T}, ::Type{Stored}, x, n::Int, what) where {T,Stored}
    x isa StridedVector{<:Stored} || bad_memory(what, x, "a vector of $Stored")
    length(x) == n || bad_length(what, x, n)
    n < 2 || stride(x, 1) == 1 || bad_stride(what, x, "a vector without gaps")
    return address(T, x, what)
end

# The address of a (dim, n) matrix, and the bytes from one column to the next.
@inline function matrix_address(x, dim::Int, n::Int, what)
    x isa StridedMatrix{Float32} || bad_memory(what, x, "a (dim, n) matrix of Float32")
    size(x) == (dim, n) || bad_size(what, x, dim, n)
    dim < 2 || stride(x, 1) == 1 || bad_stride(what, x, "a (dim, n) matrix with contiguous columns")
    columns = dim
    if n > 1
        columns = stride(x, 2)
        columns >= dim || bad_stride(what, x, "a (dim, n) matrix with columns in ascending order")
    end
    return address(Float32, x, what), Csize_t(columns * sizeof(Float32))
end

# Finds outputs in memory that is not writable, such as a file mapped for reading. On a fault Julia
# throws an exception. Thrown through the library it would leave the library's locks locked, and the
# engine unusable. Such memory is uniform, so writing the first and the last column is a sufficient
# test.
@inline function probe(p::Ptr, x)
    if length(x) > 0
        touch(Ptr{UInt8}(p))
        touch(Ptr{UInt8}(p + strides(x)[end] * (size(x)[end] - 1) * sizeof(eltype(x))))
    end
    return nothing
end
@inline touch(p::Ptr{UInt8}) = store(p, unsafe_load(p))
# Not inlined: a compiler that sees the load and the store drops the store.
@noinline function store(p::Ptr{UInt8}, byte::UInt8)
    unsafe_store!(p, byte)
    return nothing
end

const Key = Union{UInt64,Int64}

# 32-bit keys, which the ABI does not have, in a new vector. Signed ones are sign-extended, as Int64
# keys.
widened(keys) = keys
widened(keys::AbstractVector{Int32}) = convert(Vector{Int64}, keys)
widened(keys::AbstractVector{UInt32}) = convert(Vector{UInt64}, keys)

@inline function key_address(keys)
    p = vector_address(UInt64, Key, keys, length(keys)::Int, "keys")
    # NULL would mean the declared keys.
    return p == C_NULL ? Ptr{UInt64}(sizeof(UInt64)) : p
end

# The address of `n` flags to write, or NULL.
@inline found_address(::Nothing, n::Int, host::Bool) = Ptr{UInt8}(C_NULL)
@inline function found_address(found, n::Int, host::Bool)
    p = vector_address(UInt8, Union{Bool,UInt8}, found, n, "found")
    host && probe(p, found)
    return p
end
