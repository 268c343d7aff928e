# The documentation of every public function has its effect, its result, its threads and its first
# version.

const PUBLIC = union(
    names(Frugal),
    (:get, :get!, :put, :delete, :read, :read!, :unsafe_borrow, :version, :loaded_path, :status_name),
)

documentation(object) = string(Base.Docs.doc(object))

@testset Counts "documentation" begin
    for name in PUBLIC
        text = documentation(getfield(Frugal, name))
        @test !occursin("No documentation found", text)
        if !(name in (:Frugal, :FrugalError, :Batch))
            for part in ("Returns", "Threads:")
                # A function that only returns a value says so in its first sentence.
                name in (:version, :loaded_path) && part == "Returns" && continue
                @test occursin(part, text) || occursin("otherwise as", lowercase(text))
            end
        end
        name === :Frugal || @test occursin("Since 0.1", text)
    end
    of_engines, of_tables = (close, flush, isopen), (keys, length)
    for (f, type) in (((f, Engine) for f in of_engines)..., ((f, Table) for f in of_tables)..., (close, Trainer))
        @test occursin("Since 0.1", string(Base.Docs.doc(f, Tuple{type})))
    end
end
