#pragma once
// Models that exist only as shapes, to plan with: public ones by name, a training configuration, or a file of shapes.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "group_muon/cost.h"
#include "train/config.h"

namespace train {

/// Sizes of a transformer. 0 stands for what the comment says.
struct ModelSizes {
  int64_t layers = 12;
  int64_t width = 768;
  int64_t heads = 12;
  int64_t kv_heads = 0;   // as many as heads
  int64_t head_dim = 0;   // width / heads; with kv_rank without the rotary part
  int64_t value_dim = 0;  // head_dim
  int64_t q_rank = 0;     // with kv_rank: queries are projected in one step
  int64_t kv_rank = 0;    // no latent attention (MLA)
  int64_t rope_dim = 0;   // none apart from head_dim
  int64_t mlp = 0;        // 4·width
  int64_t gated = 0;      // two matrices in an MLP, not three
  int64_t experts = 0;    // every layer is dense
  int64_t active_experts = 1;
  int64_t shared_experts = 0;
  int64_t expert_mlp = 0;    // mlp
  int64_t dense_layers = 0;  // every layer has experts
  int64_t vocabulary = 50257;
  int64_t tied = 1;  // the embedding is the output head; 0: the head is a weight of its own
  int64_t context = 1024;

  bool operator==(const ModelSizes&) const = default;
};

/// A size as a flag and as a key of a file.
struct SizeKey {
  const char* name;
  int64_t ModelSizes::* member;
  const char* help;
  int64_t least;
  int64_t most;  // 1: a switch
};
const std::vector<SizeKey>& size_keys();

/// Sets a size from text. Errors name the key.
void set(ModelSizes& sizes, const SizeKey& key, const std::string& text);

/// A model to plan with. Its layouts have no groups yet, unless a file of weights says so.
struct PlannedModel {
  std::string name = {};
  std::string source = {};  // where its sizes are from
  std::vector<group_muon::SharedWeight> weights = {};
  std::vector<double> active = {};       // of each weight: the fraction that a token uses
  double attention_flops = 0;            // forward and backward, per token
  std::optional<ModelSizes> sizes = {};  // none: a file of weights
};

/// A public model that has a name.
struct NamedModel {
  const char* name;
  const char* source;
  ModelSizes sizes;
};
const std::vector<NamedModel>& named_models();

/// The weights of a transformer without biases and gains: attention, MLPs or experts, embedding, head.
PlannedModel planned_model(const ModelSizes& sizes);

/// A model by name, or from a TOML file: a training configuration, sizes in [sizes], or a list of [[weight]] with name,
/// shape, layout ("adamw" for AdamW), and optionally copies and active. `changes` are sizes by key and win.
PlannedModel find_model(const std::string& name_or_file, const Options& changes = {});

/// FLOPs of training on one token: forward and backward, causal attention counts half.
double training_flops_per_token(const PlannedModel& model);

/// How attention weights are grouped.
struct HeadGroups {
  bool packed = false;  // Q, K and V are one block
  group_muon::GroupingSchedule q = {{}}, k = {{}}, v = {{}};
};

/// The model's weights with these groups of heads; without any, as they are. Errors name the weight.
std::vector<group_muon::SharedWeight> with_groups(
    const PlannedModel& model, const std::optional<HeadGroups>& groups);
/// All weights stepped by AdamW.
std::vector<group_muon::SharedWeight> with_adamw(const PlannedModel& model);

/// The largest group size up to 6 that divides the heads of all segments of attention.
int64_t usual_group_size(const PlannedModel& model);

}  // namespace train
