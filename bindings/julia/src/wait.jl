# Waits in slices.
#
# A thread inside a C function does not stop for the collector, and the collector does not run before every
# thread has stopped. Whatever a thread waits for inside the library may need a thread that waits for the
# collector, so nothing waits long in there: a time-out takes nothing, and the call is made again. A slice is how
# long a collection may be held up: with 100 ms each one took 107 ms, with 2 ms 2 ms, for 4 % of a core of the waiting
# thread. yield() lets tasks of the same thread run, which may be the other ranks.
const SLICE_MS = Int64(2)

# Calls `call(slice)`, a function of the ABI with a time-out, until it answers something else than TIMEOUT or
# `timeout_ms` are over. `default_ms` is the engine's. Returns the status.
@inline function in_slices(call::F, timeout_ms::Int64, default_ms::Int64) where {F}
    limit = timeout_ms == TIMEOUT_DEFAULT ? default_ms : timeout_ms
    if TIMEOUT_INFINITE != limit <= SLICE_MS
        return call(limit)
    end
    status = call(SLICE_MS)
    status == ERR_TIMEOUT || return status
    return slices(call, limit)
end

@noinline function slices(call::F, limit::Int64) where {F}
    start = time_ns()
    while true
        GC.safepoint()
        yield()
        slice = SLICE_MS
        if limit != TIMEOUT_INFINITE
            passed = Int64((time_ns() - start) ÷ 1_000_000) + SLICE_MS
            slice = clamp(limit - passed, 0, SLICE_MS)
        end
        status = call(slice)
        status == ERR_TIMEOUT && slice == SLICE_MS && continue
        return status
    end
end
