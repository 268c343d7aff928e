# A test set that counts: its numbers are the last line of the run. A nested set adds its numbers to
# the outer one.

mutable struct Counts <: Test.AbstractTestSet
    description::String
    passed::Int
    failed::Int
    skipped::Int
end

Counts(description::AbstractString; options...) = Counts(description, 0, 0, 0)

Test.record(set::Counts, ::Test.Pass) = (set.passed += 1)

function Test.record(set::Counts, result::Union{Test.Fail,Test.Error})
    set.failed += 1
    println(set.description, ":")
    println(result)
    return result
end

function Test.record(set::Counts, result::Test.Broken)
    set.skipped += 1
    println(set.description, ": skipped: ", result.orig_expr)
    return result
end

function Test.record(set::Counts, inner::Counts)
    set.passed += inner.passed
    set.failed += inner.failed
    set.skipped += inner.skipped
    return inner
end

function Test.finish(set::Counts)
    if Test.get_testset_depth() > 0
        Test.record(Test.get_testset(), set)
        println(rpad(set.description, 60), set.failed == 0 ? "ok " : "FAILED ", set.passed)
        flush(stdout)
    end
    return set
end
