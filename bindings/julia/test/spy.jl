# No copies: the ABI gets the addresses of the caller's arrays. FRUGAL_LIBRARY is the spy of
# bindings/spy, FRUGAL_SPY_REAL the library that it calls. The last line of output has the counts.

using Frugal
using Libdl
using Test

include("counts.jl")
include("support.jl")

const OPS = 16

struct Note
    func::NTuple{32,UInt8}
    op_count::UInt64
    ops::NTuple{OPS,Frugal.ABI.Op}
end

const SPY = Libdl.dlopen(Frugal.loaded_path())
const LAST, CALLS = Libdl.dlsym(SPY, :spy_last), Libdl.dlsym(SPY, :spy_calls)

name_of(note) = String(collect(Iterators.takewhile(!=(0x00), note.func)))
calls() = ccall(CALLS, UInt64, ())
function last_note()
    note = Ref{Note}()
    ccall(LAST, Cvoid, (Ref{Note},), note)
    return note[]
end

address(::Nothing) = UInt(0)
address(x) = UInt(pointer(x))

# Makes a call. It must make one call of the ABI, with these addresses and this stride.
function spied(
    f,
    name;
    keys = nothing,
    offsets = nothing,
    weights = nothing,
    weight_grads = nothing,
    rows = nothing,
    grads = nothing,
    found = nothing,
    stride,
)
    before = calls()
    f()
    @test calls() == before + 1
    note = last_note()
    @test name_of(note) == name
    op = note.ops[1]
    got = (op.keys, op.offsets, op.weights, op.weight_grads_out, op.rows_out, op.grads, op.found_out)
    @test UInt.(got) == address.((keys, offsets, weights, weight_grads, rows, grads, found))
    @test op.row_stride == stride
    return op
end

const COUNTS = @testset Counts "no copies" begin

@testset Counts "addresses" begin
    with_table(; rows = 100) do engine, table, trainer
        step_begin(trainer, 0)
        for keys in (
                [1, 2, 3],
                UInt64[1, 2, 3],
                view([0, 1, 2, 3], 2:4),
                reinterpret(UInt64, [1, 2, 3]),
                reshape([1 2 3], 3),
            ),
            (rows, stride) in (
                (zeros(Float32, 4, 3), 16),
                (view(zeros(Float32, 4, 9), :, 4:6), 16),
                (view(zeros(Float32, 9, 3), 3:6, :), 36),
                (view(zeros(Float32, 9, 9), 3:6, 1:2:5), 72),
                (reshape(zeros(Float32, 12), 4, 3), 16),
                (reinterpret(Float32, zeros(UInt32, 4, 3)), 16),
            )

            look() = lookup!(trainer, table, keys, rows)
            push() = push_grad(trainer, table, keys, rows)
            op = spied(look, "frugal_lookup"; keys = keys, rows = rows, stride = stride)
            @test (op.count, op.bags, op.pooling, op.flags) == (3, 0, 0, 0)
            spied(push, "frugal_push_grad"; keys = keys, grads = rows, stride = stride)
        end
        keys, out = [1, 2, 3, 4], zeros(Float32, 4, 2)
        offsets, weights = UInt64[0, 1, 4], view(ones(Float32, 9), 3:6)
        weight_grads = view(ones(Float32, 9), 2:5)
        options = (pooling = :sum, offsets = offsets, weights = weights)
        op = spied(
            () -> lookup!(trainer, table, keys, out; options..., padding_key = -1),
            "frugal_lookup";
            keys = keys,
            offsets = offsets,
            weights = weights,
            rows = out,
            stride = 16,
        )
        @test (op.count, op.bags, op.pooling, op.flags, op.padding_key) == (4, 2, 1, 1, typemax(UInt64))
        spied(
            () -> push_grad(trainer, table, keys, out; options..., weight_grads = weight_grads),
            "frugal_push_grad";
            keys = keys,
            offsets = offsets,
            weights = weights,
            weight_grads = weight_grads,
            grads = out,
            stride = 16,
        )
        # The batch names declared keys.
        batch = Ref{Batch}()
        spied(() -> (batch[] = prefetch(trainer, 1, table, keys)), "frugal_prefetch"; keys = keys, stride = 0)
        step_end(trainer, 0)
        step_begin(trainer, 1)
        rows = zeros(Float32, 4, 4)
        op = spied(() -> lookup!(trainer, batch[], rows), "frugal_lookup"; rows = rows, stride = 16)
        @test (op.batch, op.part) == (batch[].handle, 0)
        grads = Frugal.unsafe_borrow(trainer, 4, 4)
        grads .= 0
        spied(() -> push_grad(trainer, batch[], grads), "frugal_push_grad"; grads = grads, stride = 16)
        step_end(trainer, 1)

        keys, found = [5, 6], zeros(Bool, 2)
        rows = view(zeros(Float32, 6, 2), 2:5, :)
        get() = Frugal.get!(table, keys, rows, found)
        spied(get, "frugal_get"; keys = keys, rows = rows, found = found, stride = 24)
        spied(() -> Frugal.put(table, keys, rows), "frugal_put"; keys = keys, grads = rows, stride = 24)
        spied(() -> Frugal.delete(table, keys), "frugal_delete"; keys = keys, stride = 0)
        op = Op(table, keys; rows = rows, found = found)
        read() = Frugal.read!(engine, (op,))
        spied(read, "frugal_read"; keys = keys, rows = rows, found = found, stride = 24)
    end
end

@testset Counts "memory" begin
    # A call with 64 k rows of 64 floats (16 MiB) allocates no more than a call with one row.
    with_table(; rows = 65536, dim = 64) do engine, table, trainer
        n = 65536
        keys, rows = collect(0:n-1), zeros(Float32, 64, n)
        batch = prefetch(trainer, 0, table, keys)
        step_begin(trainer, 0)
        step() = (lookup!(trainer, batch, rows); push_grad(trainer, table, keys, rows); nothing)
        step()
        @test (@allocated step()) < 1024
        step_end(trainer, 0)
    end
end

end

println(COUNTS.passed, " passed, ", COUNTS.failed, " failed, ", COUNTS.skipped, " skipped")
exit(COUNTS.failed == 0 ? 0 : 1)
