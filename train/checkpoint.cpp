#include "train/checkpoint.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string_view>

#include "train/errors.h"
#include "train/files.h"
#include "train/json.h"
#include "train/run_files.h"
#include "train/safetensors.h"

namespace train {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;
using Json = nlohmann::json;
using torch::Tensor;
using torch::optim::AdamWParamState;

constexpr int kVersion = 2;  // of state.json
constexpr const char* kOwnChecksum = "crc32c";
constexpr const char* kStepName = "step";  // in the metadata of safetensors files
constexpr const char* kTiedHead = "lm_head.weight";
constexpr const char* kEmbedding = "transformer.wte.weight";

// The head is the embedding. Both names are written, for programs that load strictly.
NamedTensors weights_of(const gpt::Model& model) {
  NamedTensors weights;
  for (const auto& item : model.named_parameters()) weights.emplace_back(item.key(), item.value());
  weights.emplace_back(kTiedHead, model.named_parameters()[kEmbedding]);
  return weights;
}

// Calls visit(name of the tensor in the file, tensor) for all `states` of the model's weights. Creates missing ones.
template <typename Visit>
void for_each_buffer(
    const gpt::Model& model, group_muon::GroupMuon& optimizer, group_muon::ParamStates& states,
    Visit&& visit) {
  const auto fresh = [](const Tensor& parameter) { return at::zeros_like(parameter); };
  std::set<void*> by_adamw;
  for (auto& group : optimizer.param_groups()) {
    if (group_muon::adamw_options(group) == nullptr) continue;
    for (const auto& weight : group.params()) by_adamw.insert(weight.unsafeGetTensorImpl());
  }
  for (const auto& item : model.named_parameters()) {
    const auto& [name, parameter] = item.pair();
    void* identity = parameter.unsafeGetTensorImpl();
    auto& slot = states[identity];
    if (by_adamw.count(identity) > 0) {
      if (!slot) {
        auto state = std::make_unique<AdamWParamState>();
        state->step(0);
        state->exp_avg(fresh(parameter));
        state->exp_avg_sq(fresh(parameter));
        slot = std::move(state);
      }
      auto& state = static_cast<AdamWParamState&>(*slot);
      visit("adamw.exp_avg." + name, state.exp_avg());
      visit("adamw.exp_avg_sq." + name, state.exp_avg_sq());
    } else {
      if (!slot) {
        auto state = std::make_unique<group_muon::GroupMuonParamState>();
        state->momentum_buffer(fresh(parameter));
        slot = std::move(state);
      }
      visit(
          "muon.momentum." + name,
          static_cast<group_muon::GroupMuonParamState&>(*slot).momentum_buffer());
    }
  }
}

void copy_into(
    const Tensor& to, const std::map<std::string, Tensor>& from, const std::string& name,
    const std::string& path) {
  const auto found = from.find(name);
  TORCH_CHECK_VALUE(found != from.end(), "'", path, "' has no ", name);
  TORCH_CHECK_VALUE(
      found->second.sizes() == to.sizes(), "'", path, "': ", name, " should have the shape ",
      to.sizes(), ", not ", found->second.sizes());
  const torch::NoGradGuard no_grad;
  to.copy_(found->second);
}

void copy_weights(
    const std::map<std::string, Tensor>& tensors, const std::string& path, gpt::Model& model) {
  for (const auto& item : model.named_parameters()) {
    copy_into(item.value(), tensors, item.key(), path);
  }
}

// Tensors that the model does not have mean that the file is of another model.
void require_only(
    const std::map<std::string, Tensor>& tensors, const std::string& path,
    const gpt::Model& model) {
  const auto known = model.named_parameters();
  std::string others;
  int64_t count = 0;
  for (const auto& [name, tensor] : tensors) {
    if (known.contains(name) || name == kTiedHead) continue;
    if (++count <= 3) others += (others.empty() ? "" : ", ") + name;
  }
  TORCH_CHECK_VALUE(
      count == 0, "'", path, "' is of another model: this one has no ", others,
      count > 3 ? c10::str(" and ", count - 3, " more") : "");
}

// Values that no trained weight has come from damage, and would only show as a bad loss.
void require_sane(const std::string& name, const Tensor& tensor, const std::string& path) {
  constexpr double kLargest = 1e4;
  TORCH_CHECK_VALUE(
      tensor.is_floating_point(), "'", path, "': ", name, " has the type ", tensor.scalar_type());
  const double largest = tensor.numel() == 0 ? 0 : tensor.abs().max().item<double>();
  TORCH_CHECK_VALUE(
      largest <= kLargest, "'", path, "': ", name, " contains ",
      std::isnan(largest) ? "nan" : c10::str("a value of size ", largest),
      "; the file is damaged or not a trained model");
}

ordered_json shape_json(const gpt::ModelShape& shape) {
  return {{"layers", shape.layers},  {"heads", shape.heads},     {"kv_heads", shape.key_heads()},
          {"width", shape.width},    {"context", shape.context}, {"vocabulary", shape.vocabulary},
          {"qk_norm", shape.qk_norm}};
}

// Checksum of what state.json says, without the checksum itself. The order of its entries does not matter.
uint32_t own_checksum(Json state) {
  state.erase(kOwnChecksum);
  const std::string text = state.dump();
  return crc32c(0, text.data(), text.size());
}

// A whole number of state.json.
int64_t number_in(const Json& json, const char* name, int64_t most = INT64_MAX) {
  const auto number = whole_number(json.at(name), 0, most);
  TORCH_CHECK_VALUE(number, "state.json says ", name, " ", json.at(name).dump());
  return *number;
}

// state.json of a checkpoint. That of version 1 has no checksum of its own.
Json read_state_file(const std::string& checkpoint) {
  const auto json = read_json(checkpoint + kStateFile);
  const int64_t version = json.contains("version") ? number_in(json, "version") : 0;
  TORCH_CHECK_VALUE(
      version <= kVersion, "'", checkpoint, "' was written by a newer version of group-muon");
  TORCH_CHECK_VALUE(
      version == 1 ? !json.contains(kOwnChecksum)
                   : json.value(kOwnChecksum, Json()) == own_checksum(json),
      "state.json has the wrong checksum");
  return json;
}

// Why a file of a checkpoint is not the one that state.json describes, or "".
std::string damage_of_file(const std::string& checkpoint, const Json& state, const char* name) {
  const std::string path = checkpoint + name, file = name + 1;
  const auto facts = state.at("files").value(file, Json());
  if (!facts.is_object()) return "state.json has no checksum of " + file;
  if (!fs::exists(path)) return file + " is missing";
  if (fs::file_size(path) != static_cast<uint64_t>(number_in(facts, "bytes")))
    return file + " has the wrong size";
  if (crc32c_of_file(path) != number_in(facts, "crc32c", UINT32_MAX)) {
    return file + " has the wrong checksum";
  }
  const auto metadata = load_metadata(path);
  const auto step = metadata.find(kStepName);
  const std::string wanted = state.at("step").dump();
  if (step == metadata.end() || step->second != wanted) {
    return c10::str(
        "state.json says step ", wanted, ", but ", file, " says ",
        step == metadata.end() ? "none" : step->second);
  }
  return "";
}

// Creates a folder, but not its parents: a run whose folder is gone should not come back in part.
void make_within(const std::string& path) {
  std::error_code error;
  fs::create_directory(path, error);
  TORCH_CHECK(!error, "'", path, "' cannot be created: ", error.message());
}

// Checks more than tensor shapes: the same shape can mean different heads.
void require_same_model(const std::string& checkpoint, const gpt::ModelShape& shape) {
  const auto json = read_state_file(checkpoint);
  if (!json.contains("model")) return;  // from a version that did not record the model
  const auto& found = json["model"];
  const nlohmann::json wanted = shape_json(shape);
  for (const auto& [name, value] : wanted.items()) {
    if (!found.is_object() || !found.contains(name)) continue;
    TORCH_CHECK_VALUE(
        found[name] == value, "checkpoint '", checkpoint, "' is from a different model: ", name,
        " = ", found[name].dump(), ", not ", value.dump());
  }
}

// Weights of a model with norms of queries and keys have the same shapes as those of one without.
void require_same_norms(const std::string& file, const gpt::ModelShape& shape) {
  const auto folder = fs::path(file).parent_path().string();
  if (fs::path(file).filename() != kModelFile + 1 || !fs::exists(folder + kStateFile)) return;
  const auto found = read_state_file(folder).value("model", Json::object());
  const bool there = found.is_object() && found.value("qk_norm", Json(false)) == Json(true);
  TORCH_CHECK_VALUE(
      there == shape.qk_norm, "'", file, "' was trained with qk-norm = ", there ? "true" : "false",
      ", so it cannot begin a run with qk-norm = ", shape.qk_norm ? "true" : "false");
}

// The safetensors file that --init means. That of a checkpoint must be intact.
std::string file_of_weights(const std::string& given) {
  const bool is_folder = fs::is_directory(given);
  const std::string folder =
      is_folder ? normal_path(given) : fs::path(given).parent_path().string();
  const bool of_checkpoint = fs::exists(folder + kStateFile) || step_of(folder) >= 0;
  const bool named = fs::path(given).filename() == kModelFile + 1;
  if (of_checkpoint && (is_folder || named)) {
    const auto run = fs::absolute(folder).parent_path().parent_path().string();
    require_whole(folder, list_checkpoints(run), /*weights_only=*/true, "--init ");
    return folder + kModelFile;
  }
  if (!is_folder) return given;
  if (fs::exists(folder + kModelFile)) return folder + kModelFile;
  const auto all = list_checkpoints(folder);
  TORCH_CHECK_VALUE(
      !all.empty(), "'", given, "' has no weights: it is neither a checkpoint nor a run with one");
  require_whole(all.back(), all, /*weights_only=*/true, "--init ");
  return all.back() + kModelFile;
}

}  // namespace

std::string save_checkpoint(
    const std::string& run, const gpt::Model& model, group_muon::GroupMuon& optimizer,
    const TrainerState& state, group_muon::ParamStates* gathered) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%06lld", static_cast<long long>(state.step));
  const std::string folder = run + kCheckpointsFolder;
  const std::string path = folder + "/" + name, temporary = folder + "/writing-" + name;
  if (!fs::exists(folder)) {
    make_within(folder);
    sync_folder(run);
  }
  fs::remove_all(temporary);
  try {
    make_within(temporary);
    ordered_json files;
    const auto write = [&](const char* file_name, const NamedTensors& tensors) {
      OutputFile file(temporary + file_name);
      save_tensors(file, tensors, {{"format", "pt"}, {kStepName, std::to_string(state.step)}});
      file.sync();
      files[file_name + 1] = {{"bytes", file.bytes()}, {"crc32c", file.crc()}};
    };
    write(kModelFile, weights_of(model));
    NamedTensors buffers;
    auto& states = gathered != nullptr ? *gathered : optimizer.state();
    for_each_buffer(model, optimizer, states, [&](const std::string& buffer, const Tensor& tensor) {
      buffers.emplace_back(buffer, tensor);
    });
    write(kOptimizerFile, buffers);
    ordered_json json = {
        {"version", kVersion},
        {"step", state.step},
        {"seconds", state.seconds},
        {"validation_loss", nullptr},
        {"training_tokens", state.training_tokens},
        {"data_crc32c", state.data_crc},
        {"model", shape_json(model.shape())},
        {"config", ordered_json::object()},
        {"files", files}};
    if (state.validation_loss) json["validation_loss"] = *state.validation_loss;
    for (const auto& [key, value] : state.config) json["config"][key] = value;
    json[kOwnChecksum] = own_checksum(json);
    replace_file(temporary + kStateFile, json.dump(2) + "\n");
    sync_folder(temporary);
    replace_folder(temporary, path);
    sync_folder(folder);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    throw;
  }
  return path;
}

int64_t step_of(const std::string& path) {
  constexpr std::string_view kPrefix = "step-";
  const std::string name = fs::path(path).filename().string();
  if (name.rfind(kPrefix, 0) != 0 || name.size() < kPrefix.size() + 6) return -1;
  int64_t step = -1;
  const char* end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  return error == std::errc() && rest == end && step >= 0 ? step : -1;
}

std::vector<std::string> list_checkpoints(const std::string& run) {
  std::vector<std::pair<int64_t, std::string>> found;
  const std::string folder = run + kCheckpointsFolder;
  for (const auto& name : names_in(folder)) {
    std::string path = folder;
    path.append("/").append(name);
    const int64_t step = step_of(path);
    if (step >= 0 && fs::is_directory(path)) found.emplace_back(step, std::move(path));
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> paths;
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

std::string best_checkpoint(const std::vector<std::string>& checkpoints) {
  std::string best;
  double lowest = INFINITY;
  for (const auto& path : checkpoints) {
    try {
      const auto loss = read_state(path).validation_loss;
      if (!loss || *loss >= lowest) continue;
      lowest = *loss;
      best = path;
    } catch (const std::exception&) {
      continue;  // skip a damaged one
    }
  }
  return best;
}

void prune_checkpoints(const std::string& run, int64_t keep) {
  const auto all = list_checkpoints(run);
  const std::string best = best_checkpoint(all);
  for (size_t i = 0; i + static_cast<size_t>(keep) < all.size(); ++i) {
    if (all[i] != best) delete_folder(all[i]);
  }
  const std::string folder = run + kCheckpointsFolder;
  for (const auto& name : names_in(folder)) {
    const bool unfinished = name.starts_with("writing-") || name.starts_with("deleting-");
    if (unfinished) fs::remove_all(fs::path(folder) / name);  // left by a killed process
  }
}

void set_aside_later(const std::string& run, int64_t step) {
  for (const auto& path : list_checkpoints(run)) {
    if (step_of(path) <= step) continue;
    const fs::path place(path);
    const auto aside = place.parent_path() / ("set-aside-" + place.filename().string());
    fs::remove_all(aside);
    fs::rename(place, aside);
  }
}

std::string newest_whole(const std::vector<std::string>& checkpoints, bool weights_only) {
  const auto found = std::find_if(
      checkpoints.rbegin(), checkpoints.rend(),
      [&](const std::string& path) { return damage(path, weights_only).empty(); });
  return found == checkpoints.rend() ? "" : *found;
}

void require_whole(
    const std::string& checkpoint, const std::vector<std::string>& others, bool weights_only,
    const char* offer) {
  const std::string why = damage(checkpoint, weights_only);
  if (why.empty()) return;
  const std::string whole = newest_whole(others, weights_only);
  TORCH_CHECK_VALUE(
      false, "checkpoint '", checkpoint, "' is damaged (", why, "); ",
      whole.empty() ? "no other is intact" : c10::str("another is intact: ", offer, whole));
}

std::string damage(const std::string& checkpoint, bool weights_only) {
  try {
    const auto step = read_state(checkpoint).step, named = step_of(checkpoint);
    // A copy may have any name.
    if (named >= 0 && named != step) return c10::str("state.json says step ", step);
    const auto json = read_state_file(checkpoint);
    const std::string why = damage_of_file(checkpoint, json, kModelFile);
    return !why.empty() || weights_only ? why : damage_of_file(checkpoint, json, kOptimizerFile);
  } catch (const Json::exception&) {
    return "state.json lacks an entry or has a wrong one";
  } catch (const std::exception& error) {
    return message_of(error);
  }
}

TrainerState read_state(const std::string& checkpoint) {
  const auto json = read_state_file(checkpoint);
  TrainerState state;
  state.step = number_in(json, "step");
  json.at("seconds").get_to(state.seconds);
  if (!json.at("validation_loss").is_null()) {
    state.validation_loss = json.at("validation_loss").get<double>();
  }
  state.training_tokens = number_in(json, "training_tokens");
  state.data_crc = static_cast<uint32_t>(number_in(json, "data_crc32c", UINT32_MAX));
  const auto config = json.value("config", Json::object());
  for (const auto& [key, value] : config.items()) {
    state.config.emplace_back(key, value.get<std::string>());
  }
  return state;
}

void load_weights(const std::string& path, gpt::Model& model) {
  const std::string file = fs::is_directory(path) ? path + kModelFile : path;
  copy_weights(load_tensors(file), file, model);
}

void load_initial_weights(const std::string& path, gpt::Model& model) {
  const std::string file = file_of_weights(path);
  const auto tensors = load_tensors(file);
  require_same_norms(file, model.shape());
  require_only(tensors, file, model);
  for (const auto& [name, tensor] : tensors) require_sane(name, tensor, file);
  copy_weights(tensors, file, model);
  const auto head = tensors.find(kTiedHead);
  TORCH_CHECK_VALUE(
      head == tensors.end() || head->second.equal(tensors.at(kEmbedding)), "'", file,
      "': ", kTiedHead, " differs from ", kEmbedding,
      ", but in this model the head is the embedding");
}

TrainerState load_checkpoint(
    const std::string& checkpoint, gpt::Model& model, group_muon::GroupMuon& optimizer) {
  const auto state = read_state(checkpoint);
  require_same_model(checkpoint, model.shape());
  load_weights(checkpoint, model);
  const auto tensors = load_tensors(checkpoint + kOptimizerFile);
  auto& states = optimizer.state();
  for_each_buffer(model, optimizer, states, [&](const std::string& name, const Tensor& tensor) {
    copy_into(tensor, tensors, name, checkpoint + kOptimizerFile);
  });
  set_steps(optimizer, state.step);
  return state;
}

std::vector<Tensor> tensors_of_state(const gpt::Model& model, group_muon::GroupMuon& optimizer) {
  std::vector<Tensor> tensors;
  for_each_buffer(
      model, optimizer, optimizer.state(),
      [&](const std::string&, const Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

void set_steps(group_muon::GroupMuon& optimizer, int64_t step) {
  for (auto& [identity, state] : optimizer.state()) {
    if (auto* adamw = dynamic_cast<AdamWParamState*>(state.get())) {
      adamw->step(step);
    } else {
      static_cast<group_muon::GroupMuonParamState&>(*state).step(step);
    }
  }
}

}  // namespace train
