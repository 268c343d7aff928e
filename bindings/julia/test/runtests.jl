# The package's tests. Environment: FRUGAL_LIBRARY (the library), FRUGAL_SPY (a library of bindings/spy that records what
# reaches the ABI; without it the proof of no copies is skipped). Ends with a line of counts.

using Frugal
using Test

include("counts.jl")
include("support.jl")

const COUNTS = Counts("Frugal")

Test.push_testset(COUNTS)
try
    include("json_test.jl")
    include("layout_test.jl")
    include("arrays_test.jl")
    include("engine_test.jl")
    include("table_test.jl")
    include("step_test.jl")
    include("pooled_test.jl")
    include("life_test.jl")
    include("wait_test.jl")
    include("threads_test.jl")
    include("spy_test.jl")
finally
    Test.pop_testset()
end

println(COUNTS.passed, " passed, ", COUNTS.failed, " failed, ", COUNTS.skipped, " skipped")
exit(COUNTS.failed == 0 ? 0 : 1)
