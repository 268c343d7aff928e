// Replays an op script (docs/bindings.md) on frugal.hpp alone and prints its hashes.
//   run_cpp SCRIPT
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "frugal.hpp"

namespace {

using Json = nlohmann::json;

class Fnv {
 public:
  void Add(const void* data, size_t bytes) {
    const unsigned char* p = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) hash_ = (hash_ ^ p[i]) * UINT64_C(1099511628211);
  }
  template <typename T>
  void Add(const std::vector<T>& x) {
    Add(x.data(), x.size() * sizeof(T));
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = UINT64_C(14695981039346656037);
};

// --- JSON: a field that is left out leaves the default as it is ----------------------------------

uint64_t Big(const Json& value) { return std::stoull(value.get_ref<const std::string&>()); }

float Float(const Json& value) {
  const uint32_t bits = value.get<uint32_t>();
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

template <typename T>
void Number(const Json& object, const char* name, T* out) {
  if (object.contains(name)) *out = object[name].get<T>();
}
void Big(const Json& object, const char* name, uint64_t* out) {
  if (object.contains(name)) *out = Big(object[name]);
}
void Float(const Json& object, const char* name, float* out) {
  if (object.contains(name)) *out = Float(object[name]);
}

std::vector<uint64_t> Bigs(const Json& list) {
  std::vector<uint64_t> result;
  for (const Json& value : list) result.push_back(Big(value));
  return result;
}

std::vector<float> Floats(const Json& list) {
  std::vector<float> result;
  for (const Json& value : list) result.push_back(Float(value));
  return result;
}

frugal_optimizer ToOptimizer(const Json& json) {
  frugal_optimizer o = frugal::Optimizer(json.at("kind").get<int32_t>());
  Float(json, "lr", &o.lr);
  Float(json, "eps", &o.eps);
  Float(json, "momentum", &o.momentum);
  Float(json, "dampening", &o.dampening);
  Float(json, "beta1", &o.beta1);
  Float(json, "beta2", &o.beta2);
  Float(json, "rho", &o.rho);
  Float(json, "ftrl_lambda1", &o.ftrl_lambda1);
  Float(json, "ftrl_lambda2", &o.ftrl_lambda2);
  Float(json, "ftrl_beta", &o.ftrl_beta);
  Float(json, "initial_accumulator", &o.initial_accumulator);
  Float(json, "weight_decay_l2", &o.weight_decay_l2);
  Float(json, "weight_decay", &o.weight_decay);
  Float(json, "clip_value", &o.clip_value);
  Float(json, "clip_norm", &o.clip_norm);
  Float(json, "weight_bound", &o.weight_bound);
  Float(json, "grad_scale", &o.grad_scale);
  Number(json, "flags", &o.flags);
  return o;
}

// --- The script ----------------------------------------------------------------------------------

// An op with the memory that it points to.
struct OwnedOp {
  std::vector<uint64_t> keys, offsets;
  std::vector<float> weights, weight_grads, grads, rows;
  std::vector<uint8_t> found;
  size_t key_count = 0;
};

struct OwnedOps {
  std::vector<OwnedOp> memory;
  std::vector<frugal_op> ops;
};

struct Declaration {
  frugal::Batch batch;
  std::vector<size_t> part_keys;  // for ops that do not repeat the keys
};

class Runner {
 public:
  void Run(const Json& line) {
    const std::string what = line.at("do");
    if (what == "open") {
      Open(line);
    } else if (what == "table") {
      CreateTable(line);
    } else if (what == "trainer") {
      CreateTrainer(line);
    } else if (what == "set_optimizer") {
      TableOf(line).SetOptimizer(Big(line.at("first_step")), ToOptimizer(line.at("optimizer")));
    } else if (what == "prefetch") {
      Prefetch(line);
    } else if (what == "cancel") {
      TrainerOf(line).Cancel(std::move(declarations_.at(line.at("batch").get<int>()).batch));
    } else if (what == "begin") {
      int64_t timeout_ms = FRUGAL_TIMEOUT_DEFAULT;
      Number(line, "timeout_ms", &timeout_ms);
      TrainerOf(line).StepBegin(Big(line.at("step")), timeout_ms);
    } else if (what == "lookup") {
      OwnedOps ops = ToOps(line, /*found=*/false);
      TrainerOf(line).Lookup(ops.ops);
      AddRows(ops);
    } else if (what == "push") {
      OwnedOps ops = ToOps(line, /*found=*/false);
      TrainerOf(line).PushGrad(ops.ops);
      for (const OwnedOp& op : ops.memory) outputs_.Add(op.weight_grads);
    } else if (what == "read") {
      OwnedOps ops = ToOps(line, /*found=*/true);
      engine_->Read(line.contains("rank") ? &TrainerOf(line) : nullptr, ops.ops);
      AddRows(ops);
    } else if (what == "end") {
      uint32_t flags = 0;
      Number(line, "flags", &flags);
      TrainerOf(line).StepEnd(Big(line.at("step")), flags);
    } else if (what == "abort") {
      TrainerOf(line).StepAbort();
    } else if (what == "get") {
      Get(line);
    } else if (what == "put") {
      uint32_t flags = 0;
      Number(line, "flags", &flags);
      TableOf(line).Put(Bigs(line.at("keys")), Floats(line.at("rows")), flags);
    } else if (what == "delete") {
      TableOf(line).Delete(Bigs(line.at("keys")));
    } else if (what == "flush") {
      engine_->Flush();
    } else if (what == "hash") {
      Hash();
    } else if (what == "resume") {
      Resume(line);
    } else if (what == "close_trainer") {
      TrainerOf(line).Close();
    } else if (what == "close") {
      engine_->Close();
    } else {
      throw std::runtime_error(what + " is nothing to do");
    }
  }

 private:
  frugal::Table& TableOf(const Json& json) { return tables_.at(json.at("table").get<size_t>()); }
  frugal::Trainer& TrainerOf(const Json& json) {
    return trainers_.at(json.at("rank").get<uint32_t>());
  }

  void Open(const Json& line) {
    frugal_config config = frugal::Config();
    Number(line, "world_size", &config.world_size);
    Number(line, "lookahead", &config.lookahead);
    Number(line, "flush_threads", &config.flush_threads);
    Number(line, "flush_mode", &config.flush_mode);
    Big(line, "staleness", &config.staleness);
    Big(line, "pending_bytes", &config.pending_bytes);
    Big(line, "seed", &config.seed);
    config.service = std::getenv("FRUGAL_SERVICE");
    engine_.emplace(config);
  }

  // Another engine goes on from a checkpoint of this one.
  void Resume(const Json& line) {
    const char* const folder = std::getenv("FRUGAL_FOLDER");
    if (folder == nullptr) throw std::runtime_error("FRUGAL_FOLDER is not set");
    if (!has_folder_) engine_->OpenFolder(folder);
    engine_->AwaitCheckpoint(engine_->BeginCheckpoint());
    const std::vector<std::string> names = engine_->TableNames();
    engine_->Close();
    Open(line);
    engine_->OpenFolder(folder);
    has_folder_ = true;
    engine_->Restore();
    for (size_t i = 0; i < names.size(); ++i) tables_.at(i) = engine_->FindTable(names[i].c_str());
  }

  void CreateTable(const Json& line) {
    const std::string name = line.at("name");
    frugal_table_config config =
        frugal::TableConfig(name.c_str(), Big(line.at("rows")), line.at("dim").get<uint32_t>());
    Number(line, "key_space", &config.key_space);
    Number(line, "init", &config.init);
    Float(line, "init_a", &config.init_a);
    Float(line, "init_b", &config.init_b);
    Number(line, "nan_policy", &config.nan_policy);
    Number(line, "flags", &config.flags);
    config.optimizer = ToOptimizer(line.at("optimizer"));
    frugal::Table table = engine_->CreateTable(config);
    if (line.at("table") != tables_.size()) throw std::runtime_error("tables come in order");
    tables_.push_back(std::move(table));
  }

  void CreateTrainer(const Json& line) {
    frugal_trainer_config config = frugal::TrainerConfig(line.at("rank").get<uint32_t>());
    float ratio = 0;
    Float(line, "cache_ratio", &ratio);
    config.cache_ratio = ratio;
    frugal::Trainer trainer = engine_->CreateTrainer(config);
    trainers_[config.rank] = std::move(trainer);
  }

  OwnedOps ToOps(const Json& line, bool found) {
    OwnedOps result;
    const Json& list = line.at("ops");
    result.memory.resize(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      result.ops.push_back(ToOp(list[i], found, &result.memory[i]));
    }
    return result;
  }

  frugal_op ToOp(const Json& json, bool found, OwnedOp* memory) {
    const frugal::Table& table = TableOf(json);
    const Declaration* declared = nullptr;
    frugal_op op = frugal::Op();
    uint32_t part = 0;
    Number(json, "part", &part);
    if (json.contains("batch")) declared = &declarations_.at(json["batch"].get<int>());
    if (json.contains("keys")) {
      memory->keys = Bigs(json["keys"]);
      memory->key_count = memory->keys.size();
      op = frugal::Op(table, memory->keys);
      if (declared != nullptr) {
        op.batch = declared->batch.get();
        op.part = part;
      }
    } else {
      if (declared == nullptr) throw std::runtime_error("an op has neither keys nor a batch");
      op = frugal::Op(table, declared->batch, part);
      memory->key_count = declared->part_keys.at(part);
    }
    size_t rows = memory->key_count;
    if (json.contains("offsets")) {
      memory->offsets = Numbers(json["offsets"]);
      if (json.contains("weights")) memory->weights = Floats(json["weights"]);
      frugal::SetBags(&op, json.at("pooling").get<int32_t>(), memory->offsets, memory->weights);
      rows = op.bags;
    }
    if (json.value("weight_grads", false)) {
      memory->weight_grads.resize(memory->key_count);
      op.weight_grads_out = memory->weight_grads.data();
    }
    if (json.contains("padding_key")) frugal::SetPadding(&op, Big(json["padding_key"]));
    if (json.contains("grads")) {
      memory->grads = Floats(json["grads"]);
      op.grads = memory->grads.data();
    } else {
      memory->rows.resize(rows * table.dim());
      op.rows_out = memory->rows.data();
    }
    if (found) {
      memory->found.resize(memory->key_count);
      op.found_out = memory->found.data();
    }
    return op;
  }

  static std::vector<uint64_t> Numbers(const Json& list) {
    std::vector<uint64_t> result;
    for (const Json& value : list) result.push_back(value.get<uint64_t>());
    return result;
  }

  void AddRows(const OwnedOps& ops) {
    for (const OwnedOp& op : ops.memory) {
      outputs_.Add(op.found);
      outputs_.Add(op.rows);
    }
  }

  void Prefetch(const Json& line) {
    OwnedOps ops = ToOps(line, /*found=*/false);
    Declaration declaration;
    declaration.batch = TrainerOf(line).Prefetch(Big(line.at("step")), ops.ops);
    for (const OwnedOp& op : ops.memory) declaration.part_keys.push_back(op.key_count);
    declarations_[line.at("batch").get<int>()] = std::move(declaration);
  }

  void Get(const Json& line) {
    const frugal::Table& table = TableOf(line);
    const std::vector<uint64_t> keys = Bigs(line.at("keys"));
    uint32_t flags = 0;
    Number(line, "flags", &flags);
    const size_t width = table.RowFloats(flags);
    std::vector<float> rows(keys.size() * width);
    std::vector<uint8_t> found(keys.size());
    table.Get(keys, rows, found, flags);
    outputs_.Add(found);
    for (size_t i = 0; i < keys.size(); ++i) {
      if (found[i]) outputs_.Add(&rows[i * width], width * sizeof(float));
    }
  }

  void Hash() {
    Fnv all;
    for (const frugal::Table& table : tables_) {
      std::vector<uint64_t> keys = table.Keys();
      std::sort(keys.begin(), keys.end());
      const size_t width = table.RowFloats(FRUGAL_WITH_STATE);
      std::vector<float> rows(keys.size() * width);
      table.Get(keys, rows, {}, FRUGAL_WITH_STATE);
      const uint64_t count = table.Count();
      all.Add(&count, sizeof(count));
      for (size_t i = 0; i < keys.size(); ++i) {
        all.Add(&keys[i], sizeof(keys[i]));
        all.Add(&rows[i * width], width * sizeof(float));
      }
    }
    std::printf("hash %u %016" PRIx64 " %016" PRIx64 "\n", hashes_++, outputs_.value(),
                all.value());
  }

  std::optional<frugal::Engine> engine_;
  bool has_folder_ = false;
  std::vector<frugal::Table> tables_;
  std::map<uint32_t, frugal::Trainer> trainers_;
  std::map<int, Declaration> declarations_;
  Fnv outputs_;
  unsigned hashes_ = 0;
};

// The name of the status that the line's call returned, and the message if it is an error.
std::pair<std::string, std::string> Try(Runner* runner, const Json& line) {
  try {
    runner->Run(line);
    return {frugal_status_name(FRUGAL_OK), ""};
  } catch (const frugal::Error& error) {
    return {frugal_status_name(error.status()), error.what()};
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: " << argv[0] << " SCRIPT\n";
    return 2;
  }
  std::ifstream script(argv[1]);
  if (!script) {
    std::cerr << argv[1] << ": cannot be read\n";
    return 2;
  }
  Runner runner;
  size_t number = 0;
  for (std::string text; std::getline(script, text);) {
    ++number;
    try {
      const Json line = Json::parse(text);
      const std::string expected = line.value("status", "FRUGAL_OK");
      const auto [status, message] = Try(&runner, line);
      if (status != expected) {
        std::cerr << "line " << number << ": " << line.at("do").get<std::string>() << " returned "
                  << status << ", expected " << expected << (message.empty() ? "" : ": ") << message
                  << '\n';
        return 1;
      }
      if (std::getenv("FRUGAL_TURNS") != nullptr) {
        std::puts("done");
        std::fflush(stdout);
      }
    } catch (const std::exception& error) {
      std::cerr << "line " << number << ": " << error.what() << '\n';
      return 1;
    }
  }
  return 0;
}
