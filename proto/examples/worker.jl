# A warpfit worker in Julia: the outline of what worker.cpp does. It follows the documented
# interfaces of ProtoBuf.jl 1.2 and gRPCClient.jl 1.0 (streams need Julia 1.12) and has not been run.
#
#   using Pkg; Pkg.add(["ProtoBuf", "gRPCClient", "SHA"])
#   julia worker.jl HOST PORT          from the folder of this file
#
# Numbers are sent as packed little-endian bytes, as reinterpret returns them on usual machines.

using SHA
using ProtoBuf
using gRPCClient  # before protojl, which then writes the client stubs too

const GENERATED = joinpath(@__DIR__, "generated")
mkpath(GENERATED)
protojl("warpfit/v1/evaluator.proto", joinpath(@__DIR__, ".."), GENERATED;
        add_kwarg_constructors = true)
include(joinpath(GENERATED, "warpfit", "warpfit.jl"))
using .warpfit.v1

pack(numbers) = collect(reinterpret(UInt8, vec(collect(numbers))))
unpack(::Type{T}, bytes) where {T} = collect(reinterpret(T, bytes))

# ------------------------------------------------------------------------------- expressions

# Codes of the leaves and of the operators used below; GetServerInfo lists all operators.
const VARIABLE, PARAMETER, CONSTANT = 0x01, 0x02, 0x03
const BINARY = Dict(:+ => 0x10, :- => 0x11, :* => 0x12, :/ => 0x13, :^ => 0x14)
const UNARY = Dict(:- => 0x15, :abs => 0x16, :log => 0x17, :exp => 0x18, :sqrt => 0x19,
                   :sin => 0x20, :cos => 0x21)

# Postfix tokens of a Julia expression over x1, x2, ... and p1, p2, ...: :(p1 * x1 + sin(x2)).
# A tree of DynamicExpressions.jl is converted likewise: degree 0 is a leaf, other nodes have node.op.
tokens(value::Real) = [(CONSTANT, Float64(value))]
function tokens(name::Symbol)
    text = string(name)
    code = startswith(text, "x") ? VARIABLE : PARAMETER
    return [(code, parse(Float64, text[2:end]) - 1)]
end
function tokens(expression::Expr)
    name, operands = expression.args[1], expression.args[2:end]
    length(operands) == 1 && return [tokens(operands[1]); (UNARY[name], 0.0)]
    result = tokens(operands[1])
    for operand in operands[2:end]  # Julia joins a + b + c into one call
        result = [result; tokens(operand); (BINARY[name], 0.0)]
    end
    return result
end

function programs(expressions, parameters)
    lists = tokens.(expressions)
    flat = reduce(vcat, lists)
    return Programs(
        codes = pack(UInt8[code for (code, _) in flat]),
        values = pack(Float64[value for (_, value) in flat]),
        lengths = pack(UInt32.(length.(lists))),
        parameter_counts = pack(UInt32.(length.(parameters))),
        parameters = pack(reduce(vcat, parameters; init = Float64[])),
        vectors = UInt32(1),
    )
end

# --------------------------------------------------------------------------------- data sets

# X is [rows, variables], column-major as Julia keeps it: the payload is its memory, then y.
function upload(host, port, X::Matrix{Float64}, y::Vector{Float64})
    rows, variables = size(X)
    payload = [pack(X); pack(y)]
    identity = [Vector{UInt8}("warpfit.dataset.v1\n"); 0x02; 0x01; 0x00;
                pack(UInt64[variables, rows]); pack(UInt32[0]); payload]
    layout = DatasetLayout(dtype = DType.DTYPE_FLOAT64, variables = UInt64(variables),
                           rows = UInt64(rows), has_target = true, has_weights = false,
                           names = String[])
    content_id = sha256(identity)
    header = UploadHeader(layout = layout, content_id = content_id)
    requests = Channel{UploadVariablesRequest}(4)
    client = Evaluator_UploadVariables_Client(host, port)
    call = grpc_async_request(client, requests)
    put!(requests, UploadVariablesRequest(part = OneOf(:header, header)))
    for start in 1:(1 << 20):length(payload)
        piece = payload[start:min(start + (1 << 20) - 1, end)]
        put!(requests, UploadVariablesRequest(part = OneOf(:data, piece)))
    end
    close(requests)
    grpc_async_await(client, call)
    return content_id
end

# ------------------------------------------------------------------------------- evaluations

function problem(content_id, expressions, parameters)
    return EvaluateRequest(
        content_id = content_id, rows = nothing, programs = programs(expressions, parameters),
        precision = Precision.PRECISION_PRECISE, values = false, loss = Loss.LOSS_MSE,
        tier = Tier.TIER_AUTO, loss_function = nothing, gradient = false, jacobian = false,
        variable_gradient = false, reductions = false, linear_scaling = false,
        correlation = false,
    )
end

# The messages of the answer to one request in a call that could carry several.
function answers_to_one(client, request, ::Type{T}) where {T}
    requests, messages = Channel{typeof(request)}(1), Channel{T}(16)
    call = grpc_async_request(client, requests, messages)
    put!(requests, request)
    close(requests)
    collected = collect(messages)
    grpc_async_await(call)
    return collected
end

function main(host, port)
    X = randn(1000, 2)
    y = 2.5 .* X[:, 1] .+ sin.(X[:, 2])
    content_id = upload(host, port, X, y)
    request = problem(content_id, [:(p1 * x1 + sin(x2)), :(x1 + p1)], [[1.0], [1.0]])
    client = Evaluator_Evaluate_Client(host, port)
    losses = unpack(Float64, last(answers_to_one(client, request, EvaluateResponse)).losses)
    println("mean squared errors: ", losses)

    search = OptimizeRequest(
        problem = request, method = Method.METHOD_AUTO, max_iterations = UInt32(50),
        gradient_tolerance = 1e-8, step_tolerance = 1e-8, loss_tolerance = 1e-8,
        lower = UInt8[], upper = UInt8[], fixed = UInt8[], all_starts = false,
        standard_errors = false, covariance = false, partial = false, progress = false,
    )
    client = Evaluator_Optimize_Client(host, port)
    result = last(answers_to_one(client, search, OptimizeResponse)).result
    println("fitted parameters: ", unpack(Float64, result.parameters))
end

main(ARGS[1], parse(Int, ARGS[2]))
