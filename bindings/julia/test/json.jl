# A small JSON parser for the op scripts: Julia's standard library has none.
module JSON

# Reads `text` from byte `at` on. Objects become Dict, arrays Vector{Any}, null becomes nothing.
# Numbers without fraction and exponent are Int64.
mutable struct Reader
    text::String
    at::Int
end

struct ParseError <: Exception
    what::String
    at::Int
end
Base.showerror(io::IO, e::ParseError) = print(io, "JSON: ", e.what, " at byte ", e.at)

fail(r::Reader, what) = throw(ParseError(what, r.at))
peek(r::Reader) = r.at <= ncodeunits(r.text) ? codeunit(r.text, r.at) : 0x00

function blanks(r::Reader)
    while peek(r) in (UInt8(' '), UInt8('\t'), UInt8('\n'), UInt8('\r'))
        r.at += 1
    end
end

function expect(r::Reader, word::String)
    for byte in codeunits(word)
        peek(r) == byte || fail(r, "expected $word")
        r.at += 1
    end
end

"The value of a text that holds one and nothing else."
function parse(text::AbstractString)
    r = Reader(String(text), 1)
    x = value(r)
    r.at > ncodeunits(r.text) || fail(r, "more after the value")
    return x
end

function value(r::Reader)
    blanks(r)
    c = Char(peek(r))
    x = if c == '{'
        object(r)
    elseif c == '['
        array(r)
    elseif c == '"'
        string(r)
    elseif c == 't'
        expect(r, "true")
        true
    elseif c == 'f'
        expect(r, "false")
        false
    elseif c == 'n'
        expect(r, "null")
        nothing
    else
        number(r)
    end
    blanks(r)
    return x
end

function object(r::Reader)
    all = Dict{String,Any}()
    r.at += 1
    blanks(r)
    if peek(r) == UInt8('}')
        r.at += 1
        return all
    end
    while true
        blanks(r)
        peek(r) == UInt8('"') || fail(r, "expected a name")
        name = string(r)
        blanks(r)
        expect(r, ":")
        all[name] = value(r)
        if peek(r) == UInt8(',')
            r.at += 1
        else
            expect(r, "}")
            return all
        end
    end
end

function array(r::Reader)
    all = Any[]
    r.at += 1
    blanks(r)
    if peek(r) == UInt8(']')
        r.at += 1
        return all
    end
    while true
        push!(all, value(r))
        if peek(r) == UInt8(',')
            r.at += 1
        else
            expect(r, "]")
            return all
        end
    end
end

const ESCAPES = Dict(zip("\"\\/bfnrt", "\"\\/\b\f\n\r\t"))

function hex4(r::Reader)
    last = r.at + 3
    last <= ncodeunits(r.text) || fail(r, "a cut \\u")
    code = tryparse(UInt32, String(codeunits(r.text)[r.at:last]); base = 16)
    code === nothing && fail(r, "a bad \\u")
    r.at = last + 1
    return code
end

function string(r::Reader)
    out = IOBuffer()
    r.at += 1
    while true
        byte = peek(r)
        byte < 0x20 && fail(r, "a string that does not end")
        r.at += 1
        byte == UInt8('"') && return String(take!(out))
        if byte != UInt8('\\')
            write(out, byte)
            continue
        end
        c = Char(peek(r))
        r.at += 1
        if c == 'u'
            code = hex4(r)
            if 0xd800 <= code < 0xdc00 # the first half of a pair
                expect(r, "\\u")
                low = hex4(r)
                0xdc00 <= low < 0xe000 || fail(r, "half a pair")
                code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00)
            end
            print(out, Char(code))
        else
            haskey(ESCAPES, c) || fail(r, "an unknown escape")
            print(out, ESCAPES[c])
        end
    end
end

function number(r::Reader)
    first = r.at
    while Char(peek(r)) in "+-.eE0123456789"
        r.at += 1
    end
    text = String(codeunits(r.text)[first:r.at-1])
    x = tryparse(Int64, text)
    x === nothing && (x = tryparse(Float64, text))
    x === nothing && fail(r, "expected a value")
    return x
end

end # module
