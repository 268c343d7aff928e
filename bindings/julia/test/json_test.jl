include("json.jl")

@testset Counts "the reader of JSON" begin
    @test JSON.parse("{}") == Dict()
    @test JSON.parse(" [ 1 , -2.5e1, true, false, null, \"a\" ] ") == Any[1, -25.0, true, false, nothing, "a"]
    @test JSON.parse("[1]")[1] isa Int64
    @test JSON.parse("9223372036854775807") == typemax(Int64)
    @test JSON.parse("{\"a\":{\"b\":[{}]}}") == Dict("a" => Dict("b" => [Dict()]))
    @test JSON.parse("\"\\u00e9 \\ud83d\\ude00 é \\n\\\"\\\\\"") == "é 😀 é \n\"\\"
    bad = ("", "[", "[1,]", "{\"a\"}", "{\"a\":1,}", "\"a", "tru", "1 2", "--1", "\"\\x\"", "\"\\ud800\"", "\"\\u00\"")
    for text in bad
        @test_throws JSON.ParseError JSON.parse(text)
    end
end
