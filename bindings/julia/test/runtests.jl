# The package's tests. spy.jl in this folder has the tests that need another library. The
# environment variable FRUGAL_LIBRARY names the library if the system's loader does not find it.
# The last line of output has the counts.

using Frugal
using Test

include("counts.jl")
include("support.jl")

const COUNTS = @testset Counts "Frugal" begin
    include("docs_test.jl")
    include("json_test.jl")
    include("layout_test.jl")
    include("arrays_test.jl")
    include("engine_test.jl")
    include("table_test.jl")
    include("step_test.jl")
    include("pooled_test.jl")
    include("life_test.jl")
    include("wait_test.jl")
    include("observation_test.jl")
    include("threads_test.jl")
end

println(COUNTS.passed, " passed, ", COUNTS.failed, " failed, ", COUNTS.skipped, " skipped")
exit(COUNTS.failed == 0 ? 0 : 1)
