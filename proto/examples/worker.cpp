// A warpfit worker in C++17: uploads a data set, scores two expressions, fits their parameters, and
// searches for a better one.
//
//   worker HOST:PORT                   does that against a running server
//   worker --check conformance.json    builds every request of the test vectors, byte for byte
//
// proto/README.md says how to build it. Numbers are sent as packed little-endian bytes, so this
// program needs a little-endian machine, as all usual ones are.

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>
#include <openssl/evp.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "warpfit/v1/evaluator.grpc.pb.h"

namespace pb = warpfit::v1;
using google::protobuf::Struct;
using google::protobuf::Value;

// --------------------------------------------------------------------------------- numbers

template <typename T>
std::string pack(const std::vector<T>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T)};
}

template <typename T>
std::vector<T> unpack(const std::string& bytes) {
  std::vector<T> numbers(bytes.size() / sizeof(T));
  std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(T));
  return numbers;
}

template <typename T>
void append(std::string& bytes, T number) {
  bytes.append(reinterpret_cast<const char*>(&number), sizeof(T));
}

// -------------------------------------------------------------------------------- programs

// Codes of the leaves, and of the operators that main() uses; GetServerInfo lists all of them.
enum Code : uint8_t { VARIABLE = 1, PARAMETER = 2, CONSTANT = 3, ADD = 16, MUL = 18, SIN = 32 };

struct Token {
  uint8_t code;
  double value;
};

// Postfix: operands stand before their operator.
struct Program {
  std::vector<Token> tokens;
  std::vector<std::vector<double>> parameters;  // K vectors
};

void encode(const std::vector<Program>& programs, pb::Programs* message) {
  std::vector<uint8_t> codes;
  std::vector<double> values, parameters;
  std::vector<uint32_t> lengths, counts;
  for (const auto& program : programs) {
    for (const auto& token : program.tokens) {
      codes.push_back(token.code);
      values.push_back(token.value);
    }
    for (const auto& vector : program.parameters)
      parameters.insert(parameters.end(), vector.begin(), vector.end());
    lengths.push_back(program.tokens.size());
    counts.push_back(program.parameters.empty() ? 0 : program.parameters[0].size());
  }
  message->set_codes(pack(codes));
  message->set_values(pack(values));
  message->set_lengths(pack(lengths));
  message->set_parameter_counts(pack(counts));
  message->set_parameters(pack(parameters));
  message->set_vectors(std::max<size_t>(1, programs[0].parameters.size()));
}

// ------------------------------------------------------------------------------- data sets

template <typename T>
struct Columns {
  std::vector<std::vector<T>> variables;  // each with one number for each row
  std::vector<T> target, weights;         // empty if there are none
  std::vector<std::string> names;         // one for each variable, or none

  std::string payload() const {
    std::string bytes;
    for (const auto& column : variables) bytes += pack(column);
    return bytes + pack(target) + pack(weights);
  }

  pb::DatasetLayout layout() const {
    pb::DatasetLayout layout;
    layout.set_dtype(sizeof(T) == 4 ? pb::DTYPE_FLOAT32 : pb::DTYPE_FLOAT64);
    layout.set_variables(variables.size());
    layout.set_rows(variables[0].size());
    layout.set_has_target(!target.empty());
    layout.set_has_weights(!weights.empty());
    for (const auto& name : names) layout.add_names(name);
    return layout;
  }

  // What the content id is the SHA-256 of; evaluator.proto gives the layout.
  std::string identity() const {
    std::string bytes = "warpfit.dataset.v1\n";
    append<uint8_t>(bytes, sizeof(T) == 4 ? 1 : 2);
    append<uint8_t>(bytes, !target.empty());
    append<uint8_t>(bytes, !weights.empty());
    append<uint64_t>(bytes, variables.size());
    append<uint64_t>(bytes, variables[0].size());
    append<uint32_t>(bytes, names.size());
    for (const auto& name : names) {
      append<uint32_t>(bytes, name.size());
      bytes += name;
    }
    return bytes + payload();
  }

  std::string content_id() const {
    const std::string bytes = identity();
    std::string digest(32, '\0');
    EVP_Digest(bytes.data(), bytes.size(), reinterpret_cast<unsigned char*>(digest.data()),
               nullptr, EVP_sha256(), nullptr);
    return digest;
  }

  // The stream of UploadVariables: a header, then the payload in pieces.
  std::vector<pb::UploadVariablesRequest> upload(size_t piece = 1 << 20) const {
    std::vector<pb::UploadVariablesRequest> messages(1);
    *messages[0].mutable_header()->mutable_layout() = layout();
    messages[0].mutable_header()->set_content_id(content_id());
    const std::string bytes = payload();
    for (size_t start = 0; start < bytes.size(); start += piece)
      messages.emplace_back().set_data(bytes.substr(start, piece));
    return messages;
  }
};

// ---------------------------------------------------------------------------------- worker

class Worker {
 public:
  explicit Worker(const std::string& address)
      : stub_(pb::Evaluator::NewStub(
            grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))) {}

  template <typename T>
  std::string upload(const Columns<T>& columns) {
    grpc::ClientContext context;
    pb::DatasetInfo info;
    auto writer = stub_->UploadVariables(&context, &info);
    // The server may answer early if the data set is resident; then a write fails, which is no error.
    for (const auto& message : columns.upload())
      if (!writer->Write(message)) break;
    writer->WritesDone();
    check(writer->Finish());
    return info.content_id();
  }

  // Requests follow one another in a call that stays open. The server may have ended it while it
  // waited; then the request goes into a new one.
  std::vector<double> losses(const pb::EvaluateRequest& request) {
    pb::EvaluateResponse message;
    if (!(evaluations_ && ask(request, &message))) {
      evaluations_.reset();  // a call goes before its context
      context_ = std::make_unique<grpc::ClientContext>();
      evaluations_ = stub_->Evaluate(context_.get());
      if (!ask(request, &message)) {
        const auto status = evaluations_->Finish();
        evaluations_.reset();
        check(status);
        throw std::runtime_error("the call ended without an answer");
      }
    }
    return unpack<double>(message.losses());
  }

  // Calls `report` with each message of the answer, about one a second; returns the last one.
  template <typename Report>
  pb::SearchResponse search(const pb::SearchRequest& request, Report report) {
    grpc::ClientContext context;
    auto call = stub_->Search(&context, request);
    pb::SearchResponse message;
    while (call->Read(&message)) report(message);
    check(call->Finish());
    return message;
  }

  pb::FitResult fit(const pb::OptimizeRequest& request) {
    grpc::ClientContext context;
    auto call = stub_->Optimize(&context);
    call->Write(request);  // if it fails, the status says why
    call->WritesDone();
    pb::OptimizeResponse message;
    pb::FitResult result;
    while (call->Read(&message))
      if (message.has_result()) result = message.result();
    check(call->Finish());
    return result;
  }

 private:
  // Without values, Jacobian and arrays above 64 KiB an answer is one message.
  bool ask(const pb::EvaluateRequest& request, pb::EvaluateResponse* message) {
    return evaluations_->Write(request) && evaluations_->Read(message);
  }

  static void check(const grpc::Status& status) {
    if (!status.ok()) throw std::runtime_error(status.error_message());
  }

  std::unique_ptr<pb::Evaluator::Stub> stub_;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::ClientReaderWriter<pb::EvaluateRequest, pb::EvaluateResponse>> evaluations_;
};

void work(const std::string& address) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  Columns<double> data;
  data.variables.resize(2);
  for (int row = 0; row < 1000; ++row) {
    const double a = normal(random), b = normal(random);
    data.variables[0].push_back(a);
    data.variables[1].push_back(b);
    data.target.push_back(2.5 * a + std::sin(b));
  }

  Worker worker(address);
  pb::EvaluateRequest problem;
  problem.set_content_id(worker.upload(data));
  problem.set_loss(pb::LOSS_MSE);
  // p1*x1 + sin(x2), and x1 + p1
  encode({{{{VARIABLE, 0}, {PARAMETER, 0}, {MUL, 0}, {VARIABLE, 1}, {SIN, 0}, {ADD, 0}}, {{1.0}}},
          {{{VARIABLE, 0}, {PARAMETER, 0}, {ADD, 0}}, {{1.0}}}},
         problem.mutable_programs());
  const auto before = worker.losses(problem);

  pb::OptimizeRequest fit;
  *fit.mutable_problem() = problem;
  fit.set_max_iterations(50);
  const auto result = worker.fit(fit);
  const auto after = unpack<double>(result.losses());
  const auto parameters = unpack<double>(result.parameters());
  for (size_t index = 0; index < before.size(); ++index)
    std::printf("expression %zu: mse %.6g, fitted %.6g with p1 = %.6f\n", index, before[index],
                after[index], parameters[index]);

  pb::SearchRequest search;  // a data set and a budget are enough
  search.set_content_id(problem.content_id());
  search.set_max_seconds(3.0);
  const auto found = worker.search(search, [](const pb::SearchResponse& progress) {
    std::printf("%.1f s: %llu formulas\n", progress.seconds(),
                static_cast<unsigned long long>(progress.formulas()));
  });
  const auto sizes = unpack<uint32_t>(found.front().sizes());
  const auto losses = unpack<double>(found.front().losses());
  for (size_t index = 0; index < sizes.size(); ++index)
    std::printf("size %u: mse %.6g\n", sizes[index], losses[index]);
}

// ----------------------------------------------------------------------------- conformance

const Value& at(const Struct& object, const char* key) { return object.fields().at(key); }

double number(const Value& value) {
  if (value.kind_case() == Value::kNumberValue) return value.number_value();
  const auto& text = value.string_value();
  const double infinity = std::numeric_limits<double>::infinity();
  return text == "inf" ? infinity : text == "-inf" ? -infinity : std::nan("");
}

template <typename T>
std::vector<T> numbers(const Value& value) {
  std::vector<T> result;
  for (const auto& entry : value.list_value().values()) result.push_back(number(entry));
  return result;
}

template <typename T>
std::vector<std::vector<T>> table(const Value& value) {
  std::vector<std::vector<T>> result;
  for (const auto& entry : value.list_value().values()) result.push_back(numbers<T>(entry));
  return result;
}

std::string hex(const std::string& bytes) {
  static const char* digits = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : bytes) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

std::string unhex(const std::string& text) {
  std::string bytes;
  for (size_t place = 0; place < text.size(); place += 2)
    bytes += static_cast<char>(std::stoi(text.substr(place, 2), nullptr, 16));
  return bytes;
}

std::vector<Program> programs_of(const Value& list) {
  std::vector<Program> programs;
  for (const auto& entry : list.list_value().values()) {
    Program program;
    for (const auto& token : table<double>(at(entry.struct_value(), "tokens")))
      program.tokens.push_back({static_cast<uint8_t>(token[0]), token[1]});
    program.parameters = table<double>(at(entry.struct_value(), "parameters"));
    programs.push_back(program);
  }
  return programs;
}

template <typename T>
bool same_upload(const Struct& dataset) {
  Columns<T> columns;
  columns.variables = table<T>(at(dataset, "variables"));
  columns.target = numbers<T>(at(dataset, "target"));
  columns.weights = numbers<T>(at(dataset, "weights"));
  for (const auto& name : at(dataset, "names").list_value().values())
    columns.names.push_back(name.string_value());
  const auto messages = columns.upload();
  const auto& wanted = at(dataset, "upload").list_value().values();
  bool same = hex(columns.content_id()) == at(dataset, "content_id").string_value() &&
              static_cast<int>(messages.size()) == wanted.size();
  for (int index = 0; same && index < wanted.size(); ++index)
    same = hex(messages[index].SerializeAsString()) == wanted[index].string_value();
  return same;
}

bool same_request(const Struct& evaluation, const std::string& content_id) {
  pb::EvaluateRequest request;
  request.set_content_id(content_id);
  encode(programs_of(at(evaluation, "programs")), request.mutable_programs());
  const auto rows = numbers<uint64_t>(at(evaluation, "rows"));
  if (!rows.empty()) {
    request.mutable_rows()->set_start(rows[0]);
    request.mutable_rows()->set_stop(rows[1]);
  }
  pb::Loss loss = pb::LOSS_NONE;
  std::string name = "LOSS_" + at(evaluation, "loss").string_value();
  for (char& letter : name) letter = std::toupper(letter);
  pb::Loss_Parse(name, &loss);
  request.set_loss(loss);
  request.set_values(at(evaluation, "values").bool_value());
  if (at(evaluation, "precision").string_value() == "fast")
    request.set_precision(pb::PRECISION_FAST);
  return hex(request.SerializeAsString()) == at(evaluation, "request").string_value();
}

// Protobuf promises no order of maps unless it is asked for one.
std::string serialized(const google::protobuf::Message& message) {
  std::string bytes;
  google::protobuf::io::StringOutputStream stream(&bytes);
  {
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    message.SerializeToCodedStream(&coded);
  }
  return bytes;
}

bool same_search(const Struct& search, const std::string& content_id) {
  std::string settings;
  pb::SearchRequest request;
  (void)google::protobuf::util::MessageToJsonString(at(search, "settings").struct_value(), &settings);
  if (!google::protobuf::util::JsonStringToMessage(settings, &request).ok()) return false;
  request.set_content_id(content_id);
  return hex(serialized(request)) == at(search, "request").string_value();
}

int check(const char* path) {
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  Struct vectors;
  if (!google::protobuf::util::JsonStringToMessage(text, &vectors).ok())
    throw std::runtime_error(std::string(path) + " is not readable JSON");
  std::map<std::string, std::string> content_ids;
  int failed = 0, passed = 0;
  const auto report = [&](const Struct& entry, bool same) {
    ++(same ? passed : failed);
    if (!same) std::cout << "differs: " << at(entry, "name").string_value() << "\n";
  };
  for (const auto& value : at(vectors, "datasets").list_value().values()) {
    const auto& dataset = value.struct_value();
    content_ids[at(dataset, "name").string_value()] =
        unhex(at(dataset, "content_id").string_value());
    const bool narrow = at(dataset, "dtype").string_value() == "float32";
    report(dataset, narrow ? same_upload<float>(dataset) : same_upload<double>(dataset));
  }
  for (const auto& value : at(vectors, "evaluations").list_value().values()) {
    const auto& evaluation = value.struct_value();
    report(evaluation, same_request(evaluation, content_ids[at(evaluation, "dataset").string_value()]));
  }
  for (const auto& value : at(vectors, "searches").list_value().values()) {
    const auto& search = value.struct_value();
    report(search, same_search(search, content_ids[at(search, "dataset").string_value()]));
  }
  std::cout << passed << " of " << passed + failed << " agree\n";
  return failed ? 1 : 0;
}

int main(int count, char** arguments) {
  try {
    const std::string first = count > 1 ? arguments[1] : "";
    if (first == "--check" && count == 3) return check(arguments[2]);
    if (count != 2 || first.rfind("--", 0) == 0) {
      std::cerr << "usage: worker HOST:PORT | worker --check conformance.json\n";
      return 2;
    }
    work(first);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
}
