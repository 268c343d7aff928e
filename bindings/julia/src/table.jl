"""
    Optimizer(kind; nesterov = false, mean_ranks = false, bias_correction = true, options...)
    Optimizer(optimizer; options...)

An optimizer's hyper-parameters. The second form copies an optimizer and changes some of them.

Kinds: `:sgd`, `:momentum`, `:adagrad`, `:rowwise_adagrad`, `:adam`, `:rmsprop`, `:ftrl`. Options,
all `Float32`, have the names and defaults of `frugal_optimizer` in `frugal.h`: `lr`, `eps`,
`momentum`, `dampening`, `beta1`, `beta2`, `rho`, `ftrl_lambda1`, `ftrl_lambda2`, `ftrl_beta`,
`initial_accumulator`, `weight_decay_l2`, `weight_decay`, `clip_value`, `clip_norm`, `weight_bound`,
`grad_scale`. `nesterov` is Nesterov's form of momentum. With `mean_ranks` the sum of gradients over
ranks is divided by `world_size`. Without `bias_correction` Adam uses `lr` as given: the caller
counts steps and includes the corrections in `lr`.

Returns an immutable value, which can be kept and shared. Threads: any. Errors: `ArgumentError` for
an unknown kind or option. The call that uses an optimizer checks the values. Since 0.1.
"""
function ABI.Optimizer(
    kind::Union{Symbol,Integer};
    nesterov::Bool = false,
    mean_ranks::Bool = false,
    bias_correction::Bool = true,
    flags::Integer = 0,
    options...,
)
    flags |=
        (nesterov ? ABI.OPT_NESTEROV : 0) |
        (mean_ranks ? ABI.OPT_MEAN_RANKS : 0) |
        (bias_correction ? 0 : ABI.OPT_NO_BIAS_CORRECTION)
    return Optimizer(Optimizer(kind = code(ABI.OPTIMIZER_KIND, kind, "kind")); flags = flags, options...)
end

function ABI.Optimizer(optimizer::Optimizer; options...)
    for name in keys(options)
        name in fieldnames(Optimizer)[3:end] ||
            throw(ArgumentError("Optimizer has no option $name; there are $(fieldnames(Optimizer)[3:end])"))
    end
    changed(name) = haskey(options, name) ? options[name] : getfield(optimizer, name)
    return Optimizer((changed(name) for name in fieldnames(Optimizer))...)
end

"""
    Table(engine, name; rows, dim, options...)

Creates a table of `rows` rows of `dim` floats.

`name` has 1 to 255 bytes. It is unique in the engine, and part of the seed of initial values.
Options; `frugal_table_config` in `frugal.h` defines them:

- `key_space = :dense`: ids `0:rows-1`, every row exists. `:hashed`: any 64-bit key; a row is
  created on its first use in training, at most `rows`.
- `optimizer = Optimizer()`
- `init = :constant`, or `:uniform`, `:normal`, `:truncated_normal`, `:xavier`, with `init_a = 0`
  and `init_b = 0`
- `nan_policy = :reject`, or `:skip`, `:accept`
- `lazy = false`; with `true` a row of a dense table gets its memory on its first use

Returns a `Table`. Ownership: the engine owns the table. [`drop`](@ref) drops it, the end of the
object does not. The object keeps its engine from the collector. Threads: any. Errors: `FrugalError`
with `ERR_INVALID_ARGUMENT`, `ERR_EXISTS`, `ERR_OUT_OF_MEMORY`, `ERR_BUSY` (a rank is inside a
step). Since 0.1.
"""
struct Table
    handle::ABI.Handle
    engine::Engine
    dim::Int

    # The table of a handle that the library returned.
    function Table(engine::Engine, handle::ABI.Handle)
        return new(handle, engine, describe_handle(handle).dim)
    end
end

function Table(engine::Engine, name::AbstractString; options...)
    # The name with a terminating zero; other zeros in it are an error.
    text = Base.cconvert(Cstring, String(name))
    config = Ref(table_config(; options...))
    out = Ref{ABI.Handle}(C_NULL)
    GC.@preserve engine text begin
        bytes = Ptr{UInt8}(Base.unsafe_convert(Cstring, text))
        config[] = with_name(config[], bytes)
        check(
            ccall(
                ABI.frugal_table_create[],
                Int32,
                (ABI.Handle, Ref{ABI.TableConfig}, Ref{ABI.Handle}),
                engine.handle,
                config,
                out,
            ),
        )
        return Table(engine, out[])
    end
end

const TABLE_OPTIONS = (
    rows = Integer,
    dim = Integer,
    key_space = Name,
    optimizer = Optimizer,
    init = Name,
    init_a = Real,
    init_b = Real,
    nan_policy = Name,
    lazy = Bool,
)

function table_config(; options...)
    check_options("Table", TABLE_OPTIONS, options)
    return named_table_config(; options...)
end

function named_table_config(;
    rows,
    dim,
    key_space = :dense,
    init = :constant,
    nan_policy = :reject,
    lazy = false,
    options...,
)
    return ABI.TableConfig(;
        rows = rows,
        dim = dim,
        key_space = code(ABI.KEY_SPACE, key_space, "key_space"),
        init = code(ABI.INIT, init, "init"),
        nan_policy = code(ABI.NAN_POLICY, nan_policy, "nan_policy"),
        flags = lazy ? ABI.TABLE_LAZY : UInt32(0),
        options...,
    )
end

with_name(c::ABI.TableConfig, name::Ptr{UInt8}) =
    ABI.TableConfig(c.struct_size, name, (getfield(c, i) for i = 3:fieldcount(ABI.TableConfig))...)

Base.show(io::IO, table::Table) = print(io, "Table(dim = ", table.dim, ")")

"""
    table_find(engine, name)

Finds a table by its name.

Returns a `Table`. Threads: any. Errors: `FrugalError` with `ERR_NOT_FOUND`. Since 0.1.
"""
function table_find(engine::Engine, name::AbstractString)
    out = Ref{ABI.Handle}(C_NULL)
    GC.@preserve engine begin
        check(
            ccall(
                ABI.frugal_table_find[],
                Int32,
                (ABI.Handle, Cstring, Ref{ABI.Handle}),
                engine.handle,
                name,
                out,
            ),
        )
        return Table(engine, out[])
    end
end

"""
    table_names(engine)

The names of all tables in the order of their creation, including those of other processes and
languages (`frugal_table_next`).

Returns a `Vector{String}`. Threads: any. Since 0.1.
"""
function table_names(engine::Engine)
    names, name = String[], Vector{UInt8}(undef, 256)
    cursor, size = Ref(UInt64(0)), Ref{Csize_t}(0)
    while true
        GC.@preserve engine check(
            ccall(
                ABI.frugal_table_next[],
                Int32,
                (ABI.Handle, Ref{UInt64}, Ptr{UInt8}, Csize_t, Ref{Csize_t}),
                engine.handle,
                cursor,
                name,
                length(name),
                size,
            ),
        )
        size[] == 0 && return names
        push!(names, String(name[1:size[]-1]))
    end
end

"""
    drop(table)

Drops a table and frees its memory. Declared batches lose their parts of this table.

Returns `nothing`. Threads: any. Errors: `FrugalError` with `ERR_BUSY`, `ERR_TIMEOUT`, after which
the table is unchanged, and `ERR_BAD_HANDLE` if it was dropped before. Since 0.1.
"""
drop(table::Table) =
    GC.@preserve table check(ccall(ABI.frugal_table_drop[], Int32, (ABI.Handle,), table.handle))

"""
    describe(table)

Describes a table.

Returns a struct with the fields of `frugal_table_info` by name: `rows` that exist now, `capacity`,
`value_bytes` and `state_floats` of a row, `memory_bytes` held now, `dim`, `key_space`, `optimizer`,
`page_bytes`. Threads: any. Errors: `FrugalError` with `ERR_BAD_HANDLE`. Since 0.1.
"""
describe(table::Table) = GC.@preserve table describe_handle(table.handle)

function describe_handle(handle::ABI.Handle)
    out = Ref(TableInfo())
    check(ccall(ABI.frugal_table_describe[], Int32, (ABI.Handle, Ref{TableInfo}), handle, out))
    return out[]
end

"""
    length(table::Table)

Counts the rows that exist (`frugal_table_count`).

Returns an `Int`. Threads: any. Errors: `FrugalError` with `ERR_BUSY`, `ERR_TIMEOUT`. Since 0.1.
"""
function Base.length(table::Table)
    out = Ref(UInt64(0))
    GC.@preserve table check(
        ccall(ABI.frugal_table_count[], Int32, (ABI.Handle, Ref{UInt64}), table.handle, out),
    )
    return Int(out[])
end

"""
    keys(table::Table)

The keys of all rows that exist, in the rows' internal order.

Returns a `Vector{UInt64}`. Threads: any. Errors: `FrugalError` with `ERR_BUSY`, `ERR_TIMEOUT`.
Since 0.1.
"""
function Base.keys(table::Table)
    all = Vector{UInt64}(undef, length(table))
    cursor = Ref(UInt64(0))
    written = Ref{Csize_t}(0)
    done = 0
    while done < length(all)
        GC.@preserve table all check(
            ccall(
                ABI.frugal_table_keys[],
                Int32,
                (ABI.Handle, Ref{UInt64}, Ptr{UInt64}, Csize_t, Ref{Csize_t}),
                table.handle,
                cursor,
                pointer(all, done + 1),
                length(all) - done,
                written,
            ),
        )
        written[] == 0 && break
        done += Int(written[])
    end
    return resize!(all, done)
end

"""
    set_optimizer(table, first_step, optimizer)

Sets the hyper-parameters from step `first_step` on, until a later change.

The kind and `initial_accumulator` must be the table's. They may differ only between steps, before
the table's first update and before rows are put with state; then all rows get the state of new
rows. Returns `nothing`. Threads: any. Errors: `FrugalError` with `ERR_INVALID_ARGUMENT`,
`ERR_STEP_RANGE` (`first_step` is committed), `ERR_BUSY`, `ERR_TIMEOUT`, `ERR_OUT_OF_MEMORY`.
Since 0.1.
"""
function set_optimizer(table::Table, first_step::Integer, optimizer::Optimizer)
    GC.@preserve table check(
        ccall(
            ABI.frugal_table_set_optimizer[],
            Int32,
            (ABI.Handle, UInt64, Ref{Optimizer}),
            table.handle,
            first_step,
            optimizer,
        ),
    )
    return nothing
end

"""
    memory_needed(; engine = NamedTuple(), cache_rows = 0, rows, dim, options...)

The most bytes that a table would take. The call opens and reserves nothing.

`rows`, `dim` and the options are those of [`Table`](@ref). `engine` has options of
[`Engine`](@ref), for example `(world_size = 4,)`. `cache_rows` is the number of rows that one
trainer's cache would hold. Returns a struct with `values`, `state`, `index`, `window`, `cache` and
`total`, in bytes. Threads: any. Errors: `FrugalError` with `ERR_INVALID_ARGUMENT`. Since 0.1.
"""
function memory_needed(; engine::NamedTuple = NamedTuple(), cache_rows::Integer = 0, options...)
    out = Ref(Memory())
    check(
        ccall(
            ABI.frugal_memory_needed[],
            Int32,
            (Ref{ABI.Config}, Ref{ABI.TableConfig}, UInt64, Ref{Memory}),
            engine_config(; engine...),
            table_config(; options...),
            cache_rows,
            out,
        ),
    )
    return out[]
end

# Floats of a row with or without its optimizer state.
height(table::Table, state::Bool) = state ? table.dim + table.state_floats : table.dim

# Not a field: the state of a row changes with the kind of optimizer.
Base.getproperty(table::Table, name::Symbol) =
    name === :state_floats ? Int(describe_handle(getfield(table, :handle)).state_floats) : getfield(table, name)
Base.propertynames(::Table) = (fieldnames(Table)..., :state_floats)

"""
    Frugal.get!(table, keys, rows, found = nothing; state = false, committed = false)

Reads rows between steps into `rows`.

`rows` is a `(dim, n)` matrix, with `state` a `(dim + state_floats, n)` matrix. The column of a
missing row does not change. `found`, a vector of `n` `Bool` or `UInt8`, is an output that marks the
rows that exist. The call creates nothing and sees every committed step. With `committed` it reads
the rows as of the last committed step, also while ranks are inside steps. Returns `rows`. Threads:
any. Errors: `FrugalError` with `ERR_KEY_OUT_OF_RANGE`, `ERR_BUSY` (a rank is inside a step, or
ranks have ended different steps), `ERR_TIMEOUT`. Since 0.1.
"""
function get!(table::Table, keys, rows, found = nothing; state::Bool = false, committed::Bool = false)
    wide = widened(keys)
    n = length(wide)
    GC.@preserve table wide rows found begin
        p, stride = matrix_address(rows, height(table, state), n, "rows")
        probe(p, rows)
        f = found_address(found, n, true)
        check(
            ccall(
                ABI.frugal_get[],
                Int32,
                (ABI.Handle, Ptr{UInt64}, Csize_t, UInt32, Ptr{Float32}, Csize_t, Ptr{UInt8}),
                table.handle,
                key_address(wide),
                n,
                (state ? ABI.WITH_STATE : UInt32(0)) | (committed ? ABI.COMMITTED : UInt32(0)),
                p,
                stride,
                f,
            ),
        )
    end
    return rows
end

"""
    Frugal.get(table, keys; state = false)

Reads rows between steps.

Returns `(rows, found)`: a new matrix, in which missing rows are zeros, and a `Vector{Bool}`. The
matrix is `(dim, n)`, with `state` `(dim + state_floats, n)`. Otherwise as [`Frugal.get!`](@ref).
Since 0.1.
"""
function get(table::Table, keys; state::Bool = false)
    wide = widened(keys)
    rows = zeros(Float32, height(table, state), length(wide))
    found = Vector{Bool}(undef, length(wide))
    get!(table, wide, rows, found; state = state)
    return rows, found
end

"""
    Frugal.put(table, keys, rows; state = false)

Writes rows between steps, and creates the missing ones.

`rows` is a `(dim, n)` matrix, with `state` a `(dim + state_floats, n)` matrix. Without `state` a
row gets the optimizer state of a new row. If a key comes twice, its last row counts. Returns
`nothing`. Ownership: the call reads `rows` only until it returns. Threads: any. Errors:
`FrugalError` with `ERR_KEY_OUT_OF_RANGE`, `ERR_TABLE_FULL` or `ERR_OUT_OF_MEMORY` (nothing is
written), `ERR_BUSY`, `ERR_TIMEOUT`. Since 0.1.
"""
function put(table::Table, keys, rows; state::Bool = false)
    wide = widened(keys)
    n = length(wide)
    GC.@preserve table wide rows begin
        p, stride = matrix_address(rows, height(table, state), n, "rows")
        check(
            ccall(
                ABI.frugal_put[],
                Int32,
                (ABI.Handle, Ptr{UInt64}, Csize_t, UInt32, Ptr{Float32}, Csize_t),
                table.handle,
                key_address(wide),
                n,
                state ? ABI.WITH_STATE : UInt32(0),
                p,
                stride,
            ),
        )
    end
    return nothing
end

"""
    Frugal.delete(table, keys)

Deletes rows between steps. Rows of a dense table return to their initial values and state.

Returns the number of rows that existed, an `Int`; missing keys are ignored. Threads: any. Errors:
`FrugalError` with `ERR_KEY_OUT_OF_RANGE`, `ERR_BUSY`, `ERR_TIMEOUT`. Since 0.1.
"""
function delete(table::Table, keys)
    wide = widened(keys)
    out = Ref(UInt64(0))
    GC.@preserve table wide check(
        ccall(
            ABI.frugal_delete[],
            Int32,
            (ABI.Handle, Ptr{UInt64}, Csize_t, Ref{UInt64}),
            table.handle,
            key_address(wide),
            length(wide),
            out,
        ),
    )
    return Int(out[])
end
