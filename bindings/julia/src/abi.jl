# The ABI of frugal.h for Julia: structs with the defaults of the header's INIT macros, the numbers
# of its enumerations, and the addresses of its functions. test/layout_test.jl compares all of them
# with what a C compiler makes of the header.
module ABI

using Libdl

const SONAME = "libfrugal.so.0"
const VERSION = v"0.1"

const Handle = Ptr{Cvoid}

Base.@kwdef struct Config
    struct_size::Csize_t = sizeof(Config)
    world_size::UInt32 = 1
    lookahead::UInt32 = 10
    flush_threads::UInt32 = 1
    flush_mode::Int32 = 0
    staleness::UInt64 = 0
    pending_bytes::UInt64 = UInt64(1) << 30
    host_bytes::UInt64 = typemax(UInt64)
    timeout_ms::Int64 = 1_800_000
    backing::Int32 = 0
    flags::UInt32 = 0
    seed::UInt64 = 0
    log::Ptr{Cvoid} = C_NULL
    log_context::Ptr{Cvoid} = C_NULL
    service::Ptr{UInt8} = C_NULL
end

Base.@kwdef struct Optimizer
    struct_size::Csize_t = sizeof(Optimizer)
    kind::Int32 = 0
    lr::Float32 = 0.01f0
    eps::Float32 = 1.0f-8
    momentum::Float32 = 0.9f0
    dampening::Float32 = 0
    beta1::Float32 = 0.9f0
    beta2::Float32 = 0.999f0
    rho::Float32 = 0.99f0
    ftrl_lambda1::Float32 = 0
    ftrl_lambda2::Float32 = 0
    ftrl_beta::Float32 = 1
    initial_accumulator::Float32 = 0
    weight_decay_l2::Float32 = 0
    weight_decay::Float32 = 0
    clip_value::Float32 = 0
    clip_norm::Float32 = 0
    weight_bound::Float32 = 0
    grad_scale::Float32 = 1
    flags::UInt32 = 0
end

Base.@kwdef struct TableConfig
    struct_size::Csize_t = sizeof(TableConfig)
    name::Ptr{UInt8} = C_NULL
    key_space::Int32 = 0
    dtype::Int32 = 0
    rows::UInt64 = 0
    dim::UInt32 = 0
    init::Int32 = 0
    init_a::Float32 = 0
    init_b::Float32 = 0
    nan_policy::Int32 = 0
    flags::UInt32 = 0
    optimizer::Optimizer = Optimizer()
end

Base.@kwdef struct TableInfo
    struct_size::Csize_t = sizeof(TableInfo)
    rows::UInt64 = 0
    capacity::UInt64 = 0
    value_bytes::UInt64 = 0
    state_floats::UInt64 = 0
    memory_bytes::UInt64 = 0
    dim::UInt32 = 0
    key_space::Int32 = 0
    optimizer::Int32 = 0
    page_bytes::UInt32 = 0
end

Base.@kwdef struct Memory
    values::UInt64 = 0
    state::UInt64 = 0
    index::UInt64 = 0
    window::UInt64 = 0
    cache::UInt64 = 0
    total::UInt64 = 0
end

Base.@kwdef struct TrainerConfig
    struct_size::Csize_t = sizeof(TrainerConfig)
    rank::UInt32 = 0
    flags::UInt32 = 0
    device::Ptr{UInt8} = C_NULL
    cache_bytes::UInt64 = 0
    cache_ratio::Float64 = 0
end

Base.@kwdef struct Op
    struct_size::Csize_t = sizeof(Op)
    table::Handle = C_NULL
    batch::Handle = C_NULL
    part::UInt32 = 0
    pooling::Int32 = 0
    keys::Ptr{UInt64} = C_NULL
    count::Csize_t = 0
    offsets::Ptr{UInt64} = C_NULL
    bags::Csize_t = 0
    weights::Ptr{Float32} = C_NULL
    weight_grads_out::Ptr{Float32} = C_NULL
    rows_out::Ptr{Float32} = C_NULL
    grads::Ptr{Float32} = C_NULL
    row_stride::Csize_t = 0
    found_out::Ptr{UInt8} = C_NULL
    padding_key::UInt64 = 0
    flags::UInt32 = 0
    reserved::UInt32 = 0
end

Base.@kwdef struct Stats
    struct_size::Csize_t = sizeof(Stats)
    steps_committed::UInt64 = 0
    steps_aborted::UInt64 = 0
    keys_declared::UInt64 = 0
    keys_looked_up::UInt64 = 0
    keys_undeclared::UInt64 = 0
    keys_pushed::UInt64 = 0
    rows_created::UInt64 = 0
    rows_updated::UInt64 = 0
    rows_deferred::UInt64 = 0
    gate_waits::UInt64 = 0
    gate_wait_ns::UInt64 = 0
    gate_in_flight::UInt64 = 0
    lookup_waits::UInt64 = 0
    priority_rises::UInt64 = 0
    priority_falls::UInt64 = 0
    enqueued::UInt64 = 0
    dequeued::UInt64 = 0
    back_pressure::UInt64 = 0
    ranks_apart::UInt64 = 0
    stale_reads::UInt64 = 0
    cache_hits::UInt64 = 0
    cache_misses::UInt64 = 0
    cache_admitted::UInt64 = 0
    cache_evicted::UInt64 = 0
    cache_evicted_dirty::UInt64 = 0
    pending_bytes::UInt64 = 0
    pending_bytes_peak::UInt64 = 0
    pending_rows::UInt64 = 0
    active_rows::UInt64 = 0
    modes_at_once::UInt64 = 0
    modes_deferred::UInt64 = 0
    lookup_ns::UInt64 = 0
    push_ns::UInt64 = 0
    step_begin_ns::UInt64 = 0
    step_end_ns::UInt64 = 0
    prefetch_ns::UInt64 = 0
    entry_ns::UInt64 = 0
    apply_ns::UInt64 = 0
    cache_refreshes::UInt64 = 0
    cache_planned::UInt64 = 0
    checkpoints::UInt64 = 0
    checkpoints_failed::UInt64 = 0
    checkpoint_rows::UInt64 = 0
    checkpoint_bytes::UInt64 = 0
    checkpoint_copies::UInt64 = 0
    checkpoint_waits::UInt64 = 0
end

Base.@kwdef struct Error
    status::Int32 = 0
    system_code::Int32 = 0
    device_code::Int32 = 0
    reserved::Int32 = 0
    message::Ptr{UInt8} = C_NULL
end

# Enumerations, by the names that users write.
const FLUSH_MODE = (auto = 0, at_once = 1, deferred = 2, write_through = 3, tree_heap = 4)
const BACKING = (private = 0, shm = 1)
const OPTIMIZER_KIND =
    (sgd = 0, momentum = 1, adagrad = 2, rowwise_adagrad = 3, adam = 4, rmsprop = 5, ftrl = 6)
const KEY_SPACE = (dense = 0, hashed = 1)
const INIT = (constant = 0, uniform = 1, normal = 2, truncated_normal = 3, xavier = 4)
const NAN_POLICY = (reject = 0, skip = 1, accept = 2)
const POOLING = (none = 0, sum = 1, mean = 2)

const STATUS = (
    OK = 0,
    ERR_INVALID_ARGUMENT = -1,
    ERR_BAD_HANDLE = -2,
    ERR_STRUCT_SIZE = -3,
    ERR_OUT_OF_MEMORY = -4,
    ERR_KEY_OUT_OF_RANGE = -5,
    ERR_TABLE_FULL = -6,
    ERR_EXISTS = -7,
    ERR_STEP_ORDER = -8,
    ERR_STEP_RANGE = -9,
    ERR_NOT_IN_STEP = -10,
    ERR_STEP_ABORTED = -11,
    ERR_BUSY = -12,
    ERR_TIMEOUT = -13,
    ERR_NAN = -14,
    ERR_FORKED = -15,
    ERR_UNSUPPORTED = -16,
    ERR_NOT_FOUND = -17,
    ERR_UNHEALTHY = -18,
    ERR_CLOSED = -19,
    ERR_OVERFLOW = -20,
    ERR_INTERNAL = -21,
    ERR_DEVICE = -22,
    ERR_PEER_LOST = -23,
    ERR_NO_SPACE = -24,
    ERR_IO = -25,
    ERR_DAMAGED = -26,
    ERR_TOO_NEW = -27,
)

const OPT_NESTEROV = UInt32(1)
const OPT_MEAN_RANKS = UInt32(2)
const OPT_NO_BIAS_CORRECTION = UInt32(4)
const OPT_NEW_STATE = UInt32(8)
const TABLE_LAZY = UInt32(1)
const WITH_STATE = UInt32(1)
const COMMITTED = UInt32(2)
const TRAINER_REPLACE = UInt32(1)
const OBSERVE = UInt32(1)
const OP_PADDING = UInt32(1)
const STEP_SKIP = UInt32(1)
const TIMEOUT_DEFAULT = Int64(-1)
const TIMEOUT_INFINITE = Int64(-2)
const STALENESS_ASYNC = typemax(UInt64)
const NO_STEP = typemax(UInt64)

# The functions' addresses. They are resolved when the package is loaded, not when it is compiled:
# compiled code may run on another machine and with another library. A call through a resolved
# address costs as much as a call in C.
const SYMBOLS = (
    :frugal_status_name,
    :frugal_last_error,
    :frugal_version,
    :frugal_open,
    :frugal_close,
    :frugal_health,
    :frugal_flush,
    :frugal_committed_step,
    :frugal_serve,
    :frugal_table_create,
    :frugal_table_drop,
    :frugal_table_find,
    :frugal_table_next,
    :frugal_table_describe,
    :frugal_table_count,
    :frugal_table_keys,
    :frugal_table_set_optimizer,
    :frugal_memory_needed,
    :frugal_get,
    :frugal_put,
    :frugal_delete,
    :frugal_trainer_create,
    :frugal_trainer_close,
    :frugal_trainer_abandon,
    :frugal_set_stream,
    :frugal_prefetch,
    :frugal_prefetch_cancel,
    :frugal_step_begin,
    :frugal_lookup,
    :frugal_push_grad,
    :frugal_borrow,
    :frugal_step_end,
    :frugal_step_abort,
    :frugal_read,
    :frugal_get_stats,
    :frugal_metrics,
    :frugal_trace_start,
    :frugal_trace_stop,
)
for symbol in SYMBOLS
    @eval const $symbol = Ref{Ptr{Cvoid}}(C_NULL)
end

# The path of the loaded library.
const loaded_path = Ref("")

function __init__()
    asked = get(ENV, "FRUGAL_LIBRARY", "")
    name = isempty(asked) ? SONAME : asked
    library = try
        Libdl.dlopen(name)
    catch failure
        error(
            "Frugal: cannot load $name: set the environment variable FRUGAL_LIBRARY to the path of ",
            "$SONAME, or install it where the system's loader looks (LD_LIBRARY_PATH, ldconfig). ",
            sprint(showerror, failure),
        )
    end
    for symbol in SYMBOLS
        address = Libdl.dlsym_e(library, symbol)
        address == C_NULL && error("Frugal: $name has no function $symbol: it is of another version")
        getfield(ABI, symbol)[] = address
    end
    version = VersionNumber(unsafe_string(ccall(frugal_version[], Cstring, ())))
    if (version.major, version.minor) != (VERSION.major, VERSION.minor)
        error("Frugal: $name is version $version, and this package is written for $VERSION")
    end
    loaded_path[] = Libdl.dlpath(library)
    return nothing
end

end # module
