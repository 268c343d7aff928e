# Exceptions for statuses of the ABI, and numbers for names.

for (name, value) in pairs(ABI.STATUS)
    @eval const $name = Int32($value)
end

"""
    FrugalError <: Exception

A failed call of the library.

Fields: `status`, one of `Frugal.ERR_TIMEOUT`, `Frugal.ERR_BUSY`, … (the numbers of `frugal.h`,
which never change); `name`, the status's name, for example `"FRUGAL_ERR_TIMEOUT"`; `message`, what
was wrong and what to do; `system_code`, the errno of the system call that failed, or 0;
`device_code`, the CUDA error that caused it, or 0. Since 0.1.
"""
struct FrugalError <: Exception
    status::Int32
    name::String
    message::String
    system_code::Int32
    device_code::Int32
end

function Base.showerror(io::IO, e::FrugalError)
    print(io, "FrugalError: ", e.name, " (", e.status, "): ", e.message)
    e.system_code == 0 || print(io, " [errno ", e.system_code, "]")
    e.device_code == 0 || print(io, " [CUDA error ", e.device_code, "]")
    return nothing
end

"""
    Frugal.status_name(status)

The name of a status, for example `"FRUGAL_ERR_TIMEOUT"`.

Returns a `String`, `"FRUGAL_UNKNOWN"` for other values. Threads: any. Since 0.1.
"""
status_name(status::Integer) =
    unsafe_string(ccall(ABI.frugal_status_name[], Cstring, (Int32,), status))

# The library keeps a message for each thread. A task changes its thread only at a task switch, and
# there is none between the failed call and this function. A finalizer of any package may run at an
# allocation and fail in a call of the library. Then the message describes that call, and is left
# out.
@noinline function throw_last_error(status::Int32)
    e, text = without_finalizers() do
        error = Ref(ABI.Error())
        ccall(ABI.frugal_last_error[], Cvoid, (Ref{ABI.Error},), error)
        error[], error[].message == C_NULL ? "" : unsafe_string(error[].message)
    end
    name = status_name(status)
    e.status == status || throw(FrugalError(status, name, "(its message was lost)", 0, 0))
    throw(FrugalError(status, name, text, e.system_code, e.device_code))
end

function last_system_code()
    error = Ref(ABI.Error())
    without_finalizers(() -> ccall(ABI.frugal_last_error[], Cvoid, (Ref{ABI.Error},), error))
    return error[].system_code
end

# Calls `f()`. No finalizer runs on this thread meanwhile.
@inline function without_finalizers(f::F) where {F}
    enable_finalizers(false)
    try
        return f()
    finally
        enable_finalizers(true)
    end
end

# Versions of Julia have three forms of this.
@static if isdefined(Base.GC, :disable_finalizers)
    enable_finalizers(on::Bool) = on ? GC.enable_finalizers() : GC.disable_finalizers()
elseif isdefined(Base.GC, :enable_finalizers)
    enable_finalizers(on::Bool) = GC.enable_finalizers(on)
else
    enable_finalizers(on::Bool) = ccall(
        :jl_gc_enable_finalizers,
        Cvoid,
        (Ptr{Cvoid}, Int32),
        ccall(:jl_get_ptls_states, Ptr{Cvoid}, ()),
        on,
    )
end

@inline function check(status::Int32)
    status == OK || throw_last_error(status)
    return nothing
end

@noinline unknown(what, names, value) =
    throw(ArgumentError("$what: :$value is none of $(join((":$name" for name in names), ", "))"))

# Checks options, which become fields of the same name in structs of the ABI: only documented
# options are allowed.
function check_options(what, types::NamedTuple, options)
    for (name, value) in pairs(options)
        haskey(types, name) || no_option(what, types, name)
        value isa types[name] || wrong_option(what, types[name], name, value)
    end
    return nothing
end
@noinline no_option(what, types, name) =
    throw(ArgumentError("$what has no option `$name`; there are $(join(keys(types), ", "))"))
@noinline wrong_option(what, type, name, value) =
    throw(ArgumentError("$what: `$name` is a $type, not $(repr(value))"))

# A name of an enumeration, or its number.
const Name = Union{Symbol,Integer}

# The number of an enumeration's name. A number is passed unchanged: the library checks it.
code(::NamedTuple, number::Integer, what) = Int32(number)
@inline code(names::NamedTuple, name::Symbol, what) =
    haskey(names, name) ? Int32(names[name]) : unknown(what, keys(names), name)

"""
    Frugal.version()

The version of the loaded library, a `VersionNumber`. Threads: any. Since 0.1.
"""
version() = VersionNumber(unsafe_string(ccall(ABI.frugal_version[], Cstring, ())))

"""
    Frugal.loaded_path()

The path of the loaded library, a `String`.

If the environment variable `FRUGAL_LIBRARY` was set when the package was loaded, it named this
path. Otherwise the system's loader found it as `libfrugal.so.0`. Threads: any. Since 0.1.
"""
loaded_path() = ABI.loaded_path[]
