#include "train/shapes.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <numeric>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "train/toml_file.h"

namespace train {
namespace {

using group_muon::SharedWeight;

// Products of any two of them, and the elements of a weight, fit in int64_t.
constexpr int64_t kMost = int64_t{1} << 24;
constexpr int64_t kMostLayers = 10000;
constexpr int64_t kMostHeads = 65536;
constexpr int64_t kMostWeights = 100000;
constexpr int64_t kMostHeadsInAll = int64_t{1} << 22;
constexpr double kMostElements = 1e18;  // of all weights

// A number in [least, most].
template <typename Number>
Number number_of(std::string_view text, std::string_view name, Number least, Number most) {
  Number value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = rest == text.data() + text.size();
  TORCH_CHECK_VALUE(
      error == std::errc() && whole && value >= least && value <= most, name, " should be a ",
      std::is_same_v<Number, int64_t> ? "whole " : "", "number from ", least, " to ", most,
      ", not '", text, "'");
  return value;
}

int64_t or_else(int64_t value, int64_t other) { return value == 0 ? other : value; }

// The sizes with every 0 that stands for another value replaced by it.
ModelSizes completed(ModelSizes sizes) {
  TORCH_CHECK_VALUE(
      sizes.head_dim > 0 || sizes.width % sizes.heads == 0, "width = ", sizes.width,
      " should be a multiple of heads = ", sizes.heads, "; or set head-dim");
  sizes.kv_heads = or_else(sizes.kv_heads, sizes.heads);
  sizes.head_dim = or_else(sizes.head_dim, sizes.width / sizes.heads);
  sizes.value_dim = or_else(sizes.value_dim, sizes.head_dim);
  sizes.mlp = or_else(sizes.mlp, 4 * sizes.width);
  sizes.expert_mlp = or_else(sizes.expert_mlp, sizes.mlp);
  TORCH_CHECK_VALUE(
      sizes.heads % sizes.kv_heads == 0, "kv-heads = ", sizes.kv_heads,
      " should divide heads = ", sizes.heads);
  TORCH_CHECK_VALUE(
      sizes.active_experts <= std::max<int64_t>(1, sizes.experts),
      "active-experts = ", sizes.active_experts, " should be at most experts = ", sizes.experts);
  TORCH_CHECK_VALUE(
      sizes.kv_rank > 0 || (sizes.q_rank == 0 && sizes.rope_dim == 0),
      "q-rank and rope-dim are sizes of latent attention, which kv-rank = 0 turns off");
  return sizes;
}

// Adds weights to a model.
class Builder {
 public:
  explicit Builder(PlannedModel& model) : model_(model) {}

  void muon(
      const std::string& name, std::vector<int64_t> shape, group_muon::Layout layout,
      double active = 1) {
    layout = group_muon::checked(std::move(layout), shape, name);
    for (const auto& segment : layout.segments) heads_ += segment.num_heads();
    TORCH_CHECK_VALUE(
        heads_ <= kMostHeadsInAll, "the model has more than ", kMostHeadsInAll,
        " heads, which are too many to plan with");
    add({.name = name, .sizes = std::move(shape), .layout = std::move(layout)}, active);
  }
  void adamw(const std::string& name, std::vector<int64_t> shape, double active = 1) {
    add({.name = name, .sizes = std::move(shape), .adamw = true}, active);
  }

 private:
  void add(SharedWeight weight, double active) {
    double elements = 1;
    for (const auto size : weight.sizes) elements *= static_cast<double>(size);
    elements_ += elements;
    TORCH_CHECK_VALUE(
        elements_ <= kMostElements, "the model has more than ", kMostElements,
        " weights, which is too large to plan with");
    TORCH_CHECK_VALUE(
        static_cast<int64_t>(model_.weights.size()) < kMostWeights, "the model has more than ",
        kMostWeights, " tensors; stack those of equal shape");
    model_.weights.push_back(std::move(weight));
    model_.active.push_back(active);
  }

  PlannedModel& model_;
  double elements_ = 0;
  int64_t heads_ = 0;
};

void add_attention(Builder& builder, const std::string& layer, const ModelSizes& sizes) {
  const int64_t heads = sizes.heads, head_dim = sizes.head_dim, value_dim = sizes.value_dim;
  if (sizes.kv_rank == 0) {
    builder.muon(
        layer + "qkv",
        {(heads + sizes.kv_heads) * head_dim + sizes.kv_heads * value_dim, sizes.width},
        group_muon::packed_qkv(
            {.heads = heads,
             .head_dim = head_dim,
             .kv_heads = sizes.kv_heads,
             .value_dim = value_dim}));
  } else {
    const auto plain = group_muon::plain();
    if (sizes.q_rank > 0) builder.muon(layer + "q_a", {sizes.q_rank, sizes.width}, plain);
    const int64_t rows = heads * (head_dim + sizes.rope_dim);
    builder.muon(
        layer + "q_b", {rows, or_else(sizes.q_rank, sizes.width)},
        sizes.rope_dim == 0 ? group_muon::separate(heads, head_dim, {{}}, "q")
                            : group_muon::mla_query(heads, head_dim, sizes.rope_dim));
    builder.muon(layer + "kv_a", {sizes.kv_rank + sizes.rope_dim, sizes.width}, plain);
    builder.muon(
        layer + "kv_b", {heads * (head_dim + value_dim), sizes.kv_rank},
        group_muon::mla_key_value(heads, head_dim, value_dim));
  }
  builder.muon(layer + "o", {sizes.width, heads * value_dim}, group_muon::plain());
}

void add_mlp(
    Builder& builder, const std::string& name, int64_t hidden, const ModelSizes& sizes,
    int64_t experts = 0, double active = 1) {
  const auto add = [&](const char* part, int64_t rows, int64_t cols) {
    const auto shape = experts == 0 ? std::vector{rows, cols} : std::vector{experts, rows, cols};
    builder.muon(name + part, shape, group_muon::plain(), active);
  };
  if (sizes.gated != 0) add("gate", hidden, sizes.width);
  add("up", hidden, sizes.width);
  add("down", sizes.width, hidden);
}

double attention_flops(const ModelSizes& sizes) {
  const auto dims =
      static_cast<double>(sizes.head_dim + sizes.rope_dim + sizes.value_dim);  // QKᵀ and PV
  return 3 * static_cast<double>(sizes.layers) * static_cast<double>(sizes.heads) * dims *
         static_cast<double>(sizes.context);
}

// A file's [[weight]].
void add_weights(Builder& builder, const toml::array& list) {
  for (const auto& node : list) {
    const auto* table = node.as_table();
    TORCH_CHECK_VALUE(table != nullptr, "each weight should be a table, [[weight]]");
    std::string name = "weight", layout = "rows", copies = "1", active = "1";
    std::vector<int64_t> shape;
    for (const auto& [key, value] : *table) {
      const std::string_view word = key.str();
      if (word == "shape") {
        TORCH_CHECK_VALUE(value.is_array(), "shape should be a list, such as [768, 768]");
        for (const auto& size : *value.as_array()) {
          shape.push_back(number_of<int64_t>(text_of(size, "a size"), "a size", 1, kMost));
        }
        continue;
      }
      std::string* text = word == "name"     ? &name
                          : word == "layout" ? &layout
                          : word == "copies" ? &copies
                          : word == "active" ? &active
                                             : nullptr;
      TORCH_CHECK_VALUE(
          text != nullptr, "[[weight]] has no key '", word,
          "': use name, shape, layout, copies and active");
      *text = text_of(value, std::string(word));
    }
    TORCH_CHECK_VALUE(!shape.empty(), "weight '", name, "' has no shape");
    const auto number = number_of<int64_t>(copies, "copies", 1, kMostWeights);
    const auto fraction = number_of<double>(active, "active", 0, 1);
    for (int64_t i = 0; i < number; ++i) {
      const std::string own = number == 1 ? name : c10::str(name, ".", i);
      if (layout == "adamw") {
        builder.adamw(own, shape, fraction);
      } else {
        builder.muon(own, shape, group_muon::parse_layout(layout), fraction);
      }
    }
  }
}

const SizeKey& find_size(std::string_view name) {
  std::vector<std::string> names;
  for (const auto& key : size_keys()) {
    if (key.name == name) return key;
    names.emplace_back(key.name);
  }
  const auto near = nearest(name, names);
  TORCH_CHECK_VALUE(
      false, "there is no size '", name, "'",
      near.empty() ? "" : c10::str("; did you mean ", near, "?"));
}

void change(ModelSizes& sizes, const Options& changes) {
  for (const auto& [name, text] : changes) set(sizes, find_size(name), text);
}

ModelSizes sizes_of(const Config& config) {
  return {
      .layers = config.layers,
      .width = config.width,
      .heads = config.heads,
      .kv_heads = config.kv_heads,
      .vocabulary = or_else(config.vocabulary, 50257),
      .context = config.context};
}

ModelSizes read_sizes(const toml::node& node) {
  const auto* table = node.as_table();
  TORCH_CHECK_VALUE(table != nullptr, "sizes should be a section, [sizes]");
  Options options;
  for (const auto& [key, value] : *table) {
    const std::string name(key.str());
    options.emplace_back(name, text_of(value, name));
  }
  ModelSizes sizes;
  change(sizes, options);
  return sizes;
}

PlannedModel read_model(const std::string& path, const Options& changes) {
  PlannedModel model;
  ModelSizes sizes;
  bool is_config = false;
  read_toml(path, [&](const toml::table& table) {
    const auto* list = table.get("weight");
    const auto* own = table.get("sizes");
    TORCH_CHECK_VALUE(
        table.size() == 1 || (list == nullptr && own == nullptr),
        "a file with [sizes] or [[weight]] should have nothing else");
    if (list != nullptr) {
      TORCH_CHECK_VALUE(
          list->is_array() && !list->as_array()->empty(),
          "weight should be a list of tables, [[weight]]");
      TORCH_CHECK_VALUE(
          changes.empty(), "a list of weights has no ", changes.empty() ? "" : changes[0].first);
      Builder builder(model);
      add_weights(builder, *list->as_array());
    } else if (own != nullptr) {
      sizes = read_sizes(*own);
    } else {
      is_config = true;
    }
  });
  if (is_config) sizes = sizes_of(configure(read_options(path)));
  if (model.weights.empty()) {
    change(sizes, changes);
    model = planned_model(sizes);
  }
  model.source = path;
  return model;
}

group_muon::Layout grouped(group_muon::Layout layout, const HeadGroups& groups) {
  for (auto& segment : layout.segments) {
    const bool query = segment.name == "q" || segment.name == "nope" || segment.name == "rope";
    if (query) segment.schedule = groups.q;
    if (segment.name == "k") segment.schedule = groups.k;
    if (segment.name == "v") segment.schedule = groups.v;
  }
  return groups.packed ? group_muon::as_one_block(std::move(layout)) : layout;
}

}  // namespace

const std::vector<SizeKey>& size_keys() {
  using S = ModelSizes;
  static const std::vector<SizeKey> keys = {
      {"layers", &S::layers, "Number of layers", 1, kMostLayers},
      {"width", &S::width, "Size of the residual stream", 1, kMost},
      {"heads", &S::heads, "Number of query heads", 1, kMostHeads},
      {"kv-heads", &S::kv_heads, "Number of key and value heads; 0: as heads", 0, kMostHeads},
      {"head-dim", &S::head_dim, "Size of a query or key head; 0: width / heads", 0, 65536},
      {"value-dim", &S::value_dim, "Size of a value head; 0: as head-dim", 0, 65536},
      {"q-rank", &S::q_rank, "Latent attention: rank of the queries; 0: no factors", 0, kMost},
      {"kv-rank", &S::kv_rank, "Rank of latent attention (MLA); 0: none", 0, kMost},
      {"rope-dim", &S::rope_dim, "Latent attention: rotary part of a head, beside head-dim", 0,
       65536},
      {"mlp", &S::mlp, "Hidden size of the MLP; 0: 4 times the width", 0, kMost},
      {"gated", &S::gated, "Whether the MLP has a gate, so three matrices", 0, 1},
      {"experts", &S::experts, "Number of experts; 0: none", 0, 65536},
      {"active-experts", &S::active_experts, "Experts that a token uses", 1, 65536},
      {"shared-experts", &S::shared_experts, "Experts that every token uses, as well", 0, 1024},
      {"expert-mlp", &S::expert_mlp, "Hidden size of an expert; 0: as mlp", 0, kMost},
      {"dense-layers", &S::dense_layers, "Number of layers without experts", 0, kMostLayers},
      {"vocabulary", &S::vocabulary, "Vocabulary size", 1, kMost},
      {"tied", &S::tied, "Whether the embedding is the output head", 0, 1},
      {"context", &S::context, "Sequence length in tokens, for the model's own FLOPs", 1,
       int64_t{1} << 31},
  };
  return keys;
}

void set(ModelSizes& sizes, const SizeKey& key, const std::string& text) {
  int64_t value = 0;
  if (key.most == 1) {
    TORCH_CHECK_VALUE(
        text == "true" || text == "false", key.name, " should be true or false, not '", text, "'");
    value = text == "true" ? 1 : 0;
  } else {
    value = number_of<int64_t>(text, key.name, key.least, key.most);
  }
  sizes.*key.member = value;
}

const std::vector<NamedModel>& named_models() {
  static const char* const paper = "the paper's GPT: rotary positions, no biases";
  static const ModelSizes latent = {
      .layers = 61,
      .width = 7168,
      .head_dim = 128,
      .q_rank = 1536,
      .kv_rank = 512,
      .rope_dim = 64,
      .mlp = 18432,
      .gated = 1,
      .active_experts = 8,
      .shared_experts = 1,
      .expert_mlp = 2048,
      .tied = 0,
      .context = 4096};
  static const ModelSizes llama = {
      .kv_heads = 8, .gated = 1, .vocabulary = 128256, .tied = 0, .context = 8192};
  const auto with = [](ModelSizes sizes, auto&& change) {
    change(sizes);
    return sizes;
  };
  const auto gpt2 = [&](int64_t layers, int64_t width, int64_t heads) {
    return ModelSizes{.layers = layers, .width = width, .heads = heads};
  };
  const auto llama3 = [&](int64_t layers, int64_t width, int64_t heads, int64_t mlp) {
    return with(llama, [&](ModelSizes& s) {
      std::tie(s.layers, s.width, s.heads, s.mlp) = std::tie(layers, width, heads, mlp);
    });
  };
  const auto qwen3 = [&](int64_t layers, int64_t width, int64_t heads, int64_t expert) {
    return ModelSizes{
        .layers = layers,
        .width = width,
        .heads = heads,
        .kv_heads = 4,
        .head_dim = 128,
        .gated = 1,
        .experts = 128,
        .active_experts = 8,
        .expert_mlp = expert,
        .vocabulary = 151936,
        .tied = 0,
        .context = 4096};
  };
  const auto deepseek = [&](int64_t heads, int64_t experts, int64_t dense, int64_t vocabulary) {
    return with(latent, [&](ModelSizes& s) {
      std::tie(s.heads, s.experts, s.dense_layers, s.vocabulary) =
          std::tie(heads, experts, dense, vocabulary);
    });
  };
  static const std::vector<NamedModel> models = {
      {"gpt2-small", paper, gpt2(12, 768, 12)},
      {"gpt2-medium", paper, gpt2(24, 1024, 16)},
      {"gpt2-large", paper, gpt2(36, 1280, 20)},
      {"gpt2-xl", paper, gpt2(48, 1600, 25)},
      {"llama-3.1-8b", "config.json of Llama-3.1-8B", llama3(32, 4096, 32, 14336)},
      {"llama-3.1-70b", "config.json of Llama-3.1-70B", llama3(80, 8192, 64, 28672)},
      {"llama-3.1-405b", "config.json of Llama-3.1-405B", llama3(126, 16384, 128, 53248)},
      {"mixtral-8x7b", "config.json of Mixtral-8x7B-v0.1",
       with(
           llama3(32, 4096, 32, 14336),
           [](ModelSizes& s) { s.experts = 8, s.active_experts = 2, s.vocabulary = 32000; })},
      {"qwen3-30b-a3b", "config.json of Qwen3-30B-A3B", qwen3(48, 2048, 32, 768)},
      {"qwen3-235b-a22b", "config.json of Qwen3-235B-A22B", qwen3(94, 4096, 64, 1536)},
      {"deepseek-v3", "config.json of DeepSeek-V3, without its extra prediction layer",
       deepseek(128, 256, 3, 129280)},
      {"kimi-k2", "config.json of Kimi-K2-Base", deepseek(64, 384, 1, 163840)},
  };
  return models;
}

PlannedModel planned_model(const ModelSizes& given) {
  const ModelSizes sizes = completed(given);
  PlannedModel model{.name = "model", .sizes = given};
  Builder builder(model);
  builder.adamw("embedding", {sizes.vocabulary, sizes.width}, sizes.tied != 0 ? 1 : 0);
  for (int64_t i = 0; i < sizes.layers; ++i) {
    const std::string layer = c10::str("layers.", i, ".");
    add_attention(builder, layer, sizes);
    if (sizes.experts == 0 || i < sizes.dense_layers) {
      add_mlp(builder, layer + "mlp.", sizes.mlp, sizes);
      continue;
    }
    builder.muon(layer + "router", {sizes.experts, sizes.width}, group_muon::plain());
    const double active =
        static_cast<double>(sizes.active_experts) / static_cast<double>(sizes.experts);
    add_mlp(builder, layer + "experts.", sizes.expert_mlp, sizes, sizes.experts, active);
    if (sizes.shared_experts > 0) {
      add_mlp(builder, layer + "shared.", sizes.shared_experts * sizes.expert_mlp, sizes);
    }
  }
  if (sizes.tied == 0) builder.adamw("head", {sizes.vocabulary, sizes.width});
  model.attention_flops = attention_flops(sizes);
  return model;
}

PlannedModel find_model(const std::string& name_or_file, const Options& changes) {
  std::vector<std::string> names;
  for (const auto& named : named_models()) {
    names.emplace_back(named.name);
    if (named.name != name_or_file) continue;
    ModelSizes sizes = named.sizes;
    change(sizes, changes);
    PlannedModel model = planned_model(sizes);
    model.name = name_or_file;
    model.source = named.source;
    return model;
  }
  const auto near = nearest(name_or_file, names);
  TORCH_CHECK_VALUE(
      near.empty() || std::filesystem::exists(name_or_file), "there is no model '", name_or_file,
      "' and no such file; did you mean ", near, "?");
  PlannedModel model = read_model(name_or_file, changes);
  model.name = std::filesystem::path(name_or_file).stem().string();
  return model;
}

double training_flops_per_token(const PlannedModel& model) {
  double weights = 0;
  for (size_t i = 0; i < model.weights.size(); ++i) {
    double elements = model.active[i];
    for (const auto size : model.weights[i].sizes) elements *= static_cast<double>(size);
    weights += elements;
  }
  return 6 * weights + model.attention_flops;
}

std::vector<SharedWeight> with_groups(
    const PlannedModel& model, const std::optional<HeadGroups>& groups) {
  auto weights = model.weights;
  if (!groups) return weights;
  for (auto& weight : weights) {
    if (weight.adamw || weight.layout.segments.empty()) continue;
    weight.layout =
        group_muon::checked(grouped(std::move(weight.layout), *groups), weight.sizes, weight.name);
  }
  return weights;
}

std::vector<SharedWeight> with_adamw(const PlannedModel& model) {
  auto weights = model.weights;
  for (auto& weight : weights) weight.adamw = true;
  return weights;
}

int64_t usual_group_size(const PlannedModel& model) {
  int64_t divisor = 0;  // of the heads of all segments
  for (const auto& weight : model.weights) {
    for (const auto& segment : weight.layout.segments) {
      divisor = std::gcd(divisor, segment.num_heads());
    }
  }
  int64_t size = 6;
  while (divisor % size != 0) --size;
  return size;
}

}  // namespace train
