# Waits in slices.
#
# A thread inside a C function does not stop for the collector, and the collector runs only when
# every thread has stopped. A thread that waits inside the library may wait for a thread that waits
# for the collector. So no call waits long: it times out, without an effect, and is made again. A
# slice bounds the delay of a collection: with slices of 100 ms a collection took 107 ms, with 2 ms
# it took 2 ms. The waiting thread then uses 4 % of a core. yield() lets tasks of the same thread
# run, which may be the other ranks.
const SLICE_MS = Int64(2)

# Repeats `call(slice)`, a function of the ABI with a time-out, while it returns TIMEOUT and
# `timeout_ms` are not over. `default_ms` is the engine's time-out. Returns the status.
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
