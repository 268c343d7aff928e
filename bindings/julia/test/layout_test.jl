# Compares structs, numbers and functions of src/abi.jl with the header, as a C compiler reads it.

const ABI = Frugal.ABI
const HEADER = joinpath(ROOT, "include", "frugal.h")

const STRUCTS = (
    ("frugal_config", ABI.Config, "FRUGAL_CONFIG_INIT"),
    ("frugal_optimizer", ABI.Optimizer, "FRUGAL_OPTIMIZER_INIT"),
    ("frugal_table_config", ABI.TableConfig, "FRUGAL_TABLE_CONFIG_INIT"),
    ("frugal_table_info", ABI.TableInfo, ""),
    ("frugal_memory", ABI.Memory, ""),
    ("frugal_trainer_config", ABI.TrainerConfig, "FRUGAL_TRAINER_CONFIG_INIT"),
    ("frugal_op", ABI.Op, "FRUGAL_OP_INIT"),
    ("frugal_stats", ABI.Stats, ""),
    ("frugal_error", ABI.Error, ""),
)

# The C names of the numbers of an enumeration.
c_names(prefix, names) = Dict("FRUGAL_" * prefix * uppercase(String(k)) => v for (k, v) in pairs(names))

const NUMBERS = merge(
    c_names("FLUSH_", ABI.FLUSH_MODE),
    c_names("BACKING_", ABI.BACKING),
    c_names("", ABI.OPTIMIZER_KIND),
    c_names("", ABI.KEY_SPACE),
    c_names("INIT_", ABI.INIT),
    c_names("NAN_", ABI.NAN_POLICY),
    c_names("POOL_", ABI.POOLING),
    c_names("", ABI.STATUS),
    Dict(
        "FRUGAL_OPT_NESTEROV" => ABI.OPT_NESTEROV,
        "FRUGAL_OPT_MEAN_RANKS" => ABI.OPT_MEAN_RANKS,
        "FRUGAL_OPT_NO_BIAS_CORRECTION" => ABI.OPT_NO_BIAS_CORRECTION,
        "FRUGAL_OPT_NEW_STATE" => ABI.OPT_NEW_STATE,
        "FRUGAL_TABLE_LAZY" => ABI.TABLE_LAZY,
        "FRUGAL_WITH_STATE" => ABI.WITH_STATE,
        "FRUGAL_COMMITTED" => ABI.COMMITTED,
        "FRUGAL_TRAINER_REPLACE" => ABI.TRAINER_REPLACE,
        "FRUGAL_OBSERVE" => ABI.OBSERVE,
        "FRUGAL_OP_PADDING" => ABI.OP_PADDING,
        "FRUGAL_STEP_SKIP" => ABI.STEP_SKIP,
        "FRUGAL_TIMEOUT_DEFAULT" => ABI.TIMEOUT_DEFAULT,
        "FRUGAL_TIMEOUT_INFINITE" => ABI.TIMEOUT_INFINITE,
        "FRUGAL_STALENESS_ASYNC" => ABI.STALENESS_ASYNC,
        "FRUGAL_NO_STEP" => ABI.NO_STEP,
        "FRUGAL_VERSION_MAJOR" => ABI.VERSION.major,
        "FRUGAL_VERSION_MINOR" => ABI.VERSION.minor,
        "FRUGAL_F32" => 0, # the element type of every table
    ),
)

# The program prints a line for each fact: its name, then numbers.
function c_program()
    io = IOBuffer()
    println(io, "#include <stdio.h>\n#include <frugal.h>\nint main(void) {")
    for (name, type, init) in STRUCTS
        println(io, "  printf(\"size $name %zu\\n\", sizeof($name));")
        isempty(init) || println(io, "  { static const $name x = $init; const unsigned char *p = (const void *)&x;")
        for field in fieldnames(type)
            at, size = "offsetof($name, $field)", "sizeof((($name *)0)->$field)"
            println(io, "  printf(\"field $name.$field %zu %zu\", $at, $size);")
            isempty(init) ||
                println(io, "  for (size_t i = 0; i < $size; ++i) printf(\" %u\", p[$at + i]);")
            println(io, "  printf(\"\\n\");")
        end
        isempty(init) || println(io, "  }")
    end
    for name in sort!(collect(keys(NUMBERS)))
        println(io, "  printf(\"number $name %lld\\n\", (long long)($name));")
    end
    println(io, "  return 0;\n}")
    return String(take!(io))
end

function c_facts()
    mktempdir() do folder
        source, program = joinpath(folder, "layout.c"), joinpath(folder, "layout")
        write(source, c_program())
        compiler = Base.get(ENV, "CC", "cc")
        run(`$compiler -std=c99 -I $(dirname(HEADER)) $source -o $program`)
        facts = Dict{String,Vector{Int}}()
        for line in eachline(`$program`)
            words = split(line)
            facts[join(words[1:2], " ")] = parse.(Int, words[3:end])
        end
        return facts
    end
end

bytes_of(x) = collect(reinterpret(UInt8, [x]))

@testset Counts "layout" begin
    facts = c_facts()
    for (name, type, init) in STRUCTS
        @test isbitstype(type)
        @test facts["size $name"] == [sizeof(type)]
        defaults = type()
        for (i, field) in enumerate(fieldnames(type))
            fact = facts["field $name.$field"]
            @test fact[1:2] == [fieldoffset(type, i), sizeof(fieldtype(type, i))]
            isempty(init) || @test fact[3:end] == bytes_of(getfield(defaults, field))
        end
    end
    for (name, value) in NUMBERS
        @test facts["number $name"] == [value % Int64]
    end
end

@testset Counts "nothing of the header is missing" begin
    header = read(HEADER, String)
    functions = Set(m[1] for m in eachmatch(r"FRUGAL_API[^;(]*?(frugal_\w+)\("s, header))
    # The package sets the defaults itself.
    defaults = Set("frugal_$(x)_init" for x in ("config", "optimizer", "table_config", "trainer_config", "op"))
    # It has no checkpoints yet.
    checkpoints = Set(f for f in functions if occursin(r"^frugal_(folder|checkpoint|restore)", f))
    @test functions == union(Set(String.(ABI.SYMBOLS)), defaults, checkpoints)

    # Every number that the header names, except those that the package does not use.
    code = replace(header, r"/\*.*?\*/"s => "")
    numbers = Set(m[1] for m in eachmatch(r"\b(FRUGAL_[A-Z0-9_]+) = -?\d+"s, code))
    union!(numbers, (m[1] for m in eachmatch(r"#define (FRUGAL_[A-Z0-9_]+) [(\w]", code)))
    unused = Set(("FRUGAL_MAX_LOOKAHEAD", "FRUGAL_VERSION_PATCH", "FRUGAL_API"))
    @test isempty(setdiff(numbers, unused, keys(NUMBERS)))
    @test isempty(setdiff(keys(NUMBERS), numbers))
end
