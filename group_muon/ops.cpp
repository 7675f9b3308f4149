// The core as torch operators, the only functions the Python package calls. Layouts, groupings and options are
// passed as text, which can be saved, compared and printed directly.

#include <ATen/ATen.h>
#include <torch/library.h>

#include "group_muon/diagnostics.h"
#include "group_muon/optimizer.h"
#include "group_muon/orthogonalize.h"
#include "group_muon/roles.h"
#include "group_muon/sharing.h"

namespace group_muon {
namespace {

using at::Tensor;
using Floats = std::vector<double>;
using Ints = std::vector<int64_t>;
using Texts = std::vector<std::string>;
using IntLists = std::vector<Ints>;

StepOptions parse_step_options(const std::string& text) {
  return step_options(parse_options(text, Part::kStep));
}

OrthogonalizeOptions parse_orthogonalize_options(const std::string& text) {
  return step_options(parse_options(text, Part::kOrthogonalize)).orthogonalize;
}

Layout checked_layout(const Tensor& weight, const std::string& layout, const std::string& name) {
  return checked(parse_layout(layout), weight.sizes(), name);
}

std::vector<int64_t> sizes_of(const MatrixShape& shape) {
  if (shape.count == 1) return {shape.rows, shape.cols};
  return {shape.count, shape.rows, shape.cols};
}

std::optional<OwnedHeads> owned_heads_of(const std::string& text, const std::string& layout) {
  if (text.empty()) return {};
  auto owned = parse_owned_heads(text);
  const auto segments = parse_layout(layout).segments;
  const int64_t heads = owned.segment < segments.size() ? segments[owned.segment].num_heads() : 0;
  TORCH_CHECK_VALUE(
      std::is_sorted(owned.heads.begin(), owned.heads.end(), std::less_equal<>()) &&
          owned.heads.back() < heads,
      "group_muon: '", text, "' should list heads of the layout '", layout, "' in ascending order");
  return owned;
}

Floats spectra_fields(const Spectra& spectra) {
  Floats fields = {spectra.nuclear_norm};
  fields.insert(fields.end(), spectra.ranks.begin(), spectra.ranks.end());
  fields.insert(fields.end(), {spectra.stable_rank, spectra.effective_rank});
  fields.insert(fields.end(), spectra.quantiles.begin(), spectra.quantiles.end());
  return fields;
}

// One entry per part: numbers in the order of Whitening's fields, norms of its heads (before, then after), its name.
using MeasureResult = std::tuple<std::vector<Tensor>, std::vector<Tensor>, Texts>;

MeasureResult as_tensors(const std::vector<Whitening>& parts) {
  MeasureResult result;
  auto& [numbers, norms, segments] = result;
  for (const auto& part : parts) {
    Floats row = {
        static_cast<double>(part.rows),
        static_cast<double>(part.cols),
        static_cast<double>(part.blocks),
        part.first_order,
        part.squared_norm,
        part.step_squared_norm};
    const auto spectra = spectra_fields(part.of_blocks.value_or(no_spectra()));
    row.insert(row.end(), spectra.begin(), spectra.end());
    numbers.push_back(at::tensor(row, at::kDouble));
    norms.push_back(
        at::stack(
            {at::tensor(part.head_norms, at::kDouble),
             at::tensor(part.whitened_head_norms, at::kDouble)}));
    segments.push_back(part.segment);
  }
  return result;
}

Tensor spectra_op(const Tensor& blocks, bool exact) {
  const auto result = spectra(blocks, exact ? Accuracy::kExact : Accuracy::kEstimate);
  return at::tensor(spectra_fields(result), at::kDouble);
}

void check_floating(const Tensor& tensor, const std::string& name) {
  check_value(tensor, name, /*average=*/true);
}

void warn_of_software_bf16(
    const std::vector<Tensor>& weights, const OrthogonalizeOptions& options) {
  for (const auto& weight : weights) {
    if (has_bf16(weight.device()) || options.method == Method::kExact ||
        resolved(options, weight.device()).precision != at::kBFloat16) {
      continue;
    }
    TORCH_WARN_ONCE(
        "group_muon: this CPU has bfloat16 only in software, where a product takes ", bf16_cost(),
        "; set precision = \"float32\" to avoid this");
    return;
  }
}

void step_op(
    const std::vector<Tensor>& weights, const std::vector<Tensor>& grads,
    const std::vector<Tensor>& momentum_buffers, const Texts& layouts, const Texts& names,
    const Texts& partitions, const Ints& seen_steps, const Floats& lrs, const Floats& weight_decays,
    const Floats& lr_fractions, const Texts& owned, const std::string& options) {
  const auto count = weights.size();
  TORCH_CHECK_VALUE(
      grads.size() == count && momentum_buffers.size() == count && layouts.size() == count &&
          names.size() == count && partitions.size() == count && seen_steps.size() == count &&
          lrs.size() == count && weight_decays.size() == count && lr_fractions.size() == count &&
          owned.size() == count,
      "group_muon: step_ needs lists of equal length, with one entry for each of the ", count,
      " weights");
  const auto step_opts = parse_step_options(options);
  warn_of_software_bf16(weights, step_opts.orthogonalize);
  std::vector<Weight> list;
  list.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    check_value(weights[i], names[i], step_opts.average);
    check_grad(weights[i], grads[i], names[i]);
    check_momentum(weights[i], momentum_buffers[i], names[i]);
    const auto heads = owned_heads_of(owned[i], layouts[i]);
    const auto sizes = heads ? sizes_of(heads->whole) : weights[i].sizes().vec();
    list.push_back(
        {weights[i], grads[i], momentum_buffers[i],
         checked(parse_layout(layouts[i]), sizes, names[i]), names[i], partitions[i], seen_steps[i],
         lrs[i], weight_decays[i], lr_fractions[i], heads});
  }
  step(list, step_opts);
}

std::vector<Tensor> accumulate_parts_op(
    const std::vector<Tensor>& weights, const std::vector<Tensor>& grads,
    const std::vector<Tensor>& momentum_buffers, const Texts& layouts, const Texts& names,
    const std::string& options) {
  const auto step_opts = parse_step_options(options);
  warn_of_software_bf16(weights, step_opts.orthogonalize);
  std::vector<Weight> parts;
  for (size_t i = 0; i < weights.size(); ++i) {
    check_value(weights[i], names.at(i), step_opts.average);
    check_grad(weights[i], grads.at(i), names[i]);
    check_momentum(weights[i], momentum_buffers.at(i), names[i]);
    parts.push_back(
        {.value = weights[i],
         .grad = grads[i],
         .momentum = momentum_buffers[i],
         .layout = parse_layout(layouts.at(i)),
         .name = names[i],
         .partition = {}});
  }
  return accumulate_parts(parts, step_opts);
}

std::vector<Tensor> orthogonalize_parts_op(
    const std::vector<Tensor>& directions, const Texts& layouts, const Texts& names,
    const Texts& partitions, const Ints& seen_steps, const Floats& lr_fractions,
    const IntLists& sizes, const Texts& owned, const std::string& options) {
  std::vector<Weight> weights;
  for (size_t i = 0; i < directions.size(); ++i) {
    weights.push_back(
        {.value = directions[i],
         .grad = directions[i],
         .momentum = directions[i],
         .layout = checked(parse_layout(layouts.at(i)), sizes.at(i), names.at(i)),
         .name = names[i],
         .partition = partitions.at(i),
         .step = seen_steps.at(i),
         .lr_fraction = lr_fractions.at(i),
         .owned = owned_heads_of(owned.at(i), layouts[i])});
  }
  return orthogonalize_parts(weights, parse_step_options(options));
}

void apply_parts_op(
    const std::vector<Tensor>& weights, const std::vector<Tensor>& updates, const Texts& layouts,
    const Texts& names, const Texts& partitions, const Ints& seen_steps, const Floats& lrs,
    const Floats& weight_decays, const Floats& lr_fractions, const IntLists& sizes,
    const IntLists& runs, const std::string& options) {
  std::vector<Weight> parts;
  std::vector<HeldLines> lines;
  for (size_t i = 0; i < weights.size(); ++i) {
    parts.push_back(
        {.value = weights[i],
         .grad = weights[i],
         .momentum = weights[i],
         .layout = checked(parse_layout(layouts.at(i)), sizes.at(i), names.at(i)),
         .name = names[i],
         .partition = partitions.at(i),
         .step = seen_steps.at(i),
         .lr = lrs.at(i),
         .weight_decay = weight_decays.at(i),
         .lr_fraction = lr_fractions.at(i)});
    lines.push_back({sizes[i], runs.at(i)});
  }
  apply_parts(parts, lines, updates, parse_step_options(options));
}

// Matrices, rows and columns of a weight; then segment, heads, runs of lines and estimated work of its smallest pieces.
std::tuple<Ints, Ints, IntLists, IntLists, Floats> smallest_pieces_op(
    const std::string& layout, const Ints& sizes, const std::string& name, bool whole_segments) {
  SharedWeight weight{.name = name, .sizes = sizes, .whole_segments = whole_segments};
  weight.layout = checked(parse_layout(layout), sizes, name);
  const auto [count, rows, cols] = matrix_shape(sizes, weight.layout, name);
  Ints segments;
  IntLists heads, lines;
  Floats work;
  for (const auto& piece : smallest_pieces(weight)) {
    segments.push_back(static_cast<int64_t>(piece.segment));
    heads.push_back(piece.heads);
    lines.push_back(runs_of_lines(weight, piece));
    work.push_back(piece.work);
  }
  return {{count, rows, cols}, segments, heads, lines, work};
}

Weight weight_of(
    const Tensor& direction, const Tensor& gradient, const std::string& layout,
    const std::string& name, int64_t seen_steps, double lr_fraction) {
  check_floating(direction, name);
  Weight weight;
  weight.value = direction;
  weight.grad = gradient;
  weight.layout = parse_layout(layout);
  weight.name = weight.partition = name;
  weight.step = seen_steps;
  weight.lr_fraction = lr_fraction;
  return weight;
}

Tensor scaled_update_op(
    const Tensor& direction, const std::string& layout, const std::string& name, int64_t seen_steps,
    double lr_fraction, const std::string& options) {
  return group_muon::scaled_update(
      direction, weight_of(direction, direction, layout, name, seen_steps, lr_fraction),
      parse_step_options(options));
}

MeasureResult measure_op(
    const Tensor& direction, const Tensor& gradient, const std::string& layout,
    const std::string& heads, const std::string& name, int64_t seen_steps, double lr_fraction,
    bool exact, const std::string& options) {
  check_floating(gradient, name);
  return as_tensors(
      group_muon::measure(
          direction, weight_of(direction, gradient, layout, name, seen_steps, lr_fraction),
          parse_layout(heads), parse_step_options(options),
          exact ? Accuracy::kExact : Accuracy::kEstimate));
}

// Rejects what step_ would reject. Gradients may be missing.
void check_op(
    const std::vector<Tensor>& weights, const std::vector<std::optional<Tensor>>& grads,
    const Texts& names, const std::string& layout, const std::string& options) {
  const auto step_opts = step_options(parse_options(options, Part::kWeight));
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!weights[i].is_meta()) resolved(step_opts.orthogonalize, weights[i].device());
    check_value(weights[i], names.at(i), step_opts.average);
    checked_layout(weights[i], layout, names.at(i));
    const auto& grad = grads.at(i);
    if (grad.has_value()) check_grad(weights[i], *grad, names[i]);
  }
}

Tensor look_ahead_op(
    const Tensor& grad, const Tensor& momentum_buffer, const std::string& options) {
  check_floating(grad, "");
  check_momentum(grad, momentum_buffer, "");
  Weight weight;
  weight.grad = grad;
  weight.momentum = momentum_buffer;
  return look_ahead(weight, parse_step_options(options));
}

std::tuple<std::string, double> break_even_op(
    double grouped_first_order, double grouped_squares, double full_first_order,
    double full_squares, double lr) {
  Whitening grouped, full;
  grouped.first_order = grouped_first_order;
  grouped.step_squared_norm = grouped_squares;
  full.first_order = full_first_order;
  full.step_squared_norm = full_squares;
  const auto result = compare(grouped, full, lr).break_even;
  return {to_string(result.pays), result.beta};
}

Tensor orthogonalize_op(const Tensor& blocks, const std::string& options) {
  return orthogonalize(blocks, parse_orthogonalize_options(options));
}

// A step only writes data, which meta tensors do not have: drops its arguments and does nothing.
void step_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
}

Tensor orthogonalize_meta(const Tensor& blocks, const std::string& text) {
  // A meta tensor has no real device, so `auto` is resolved as on the CPU.
  const auto options = parse_orthogonalize_options(text);
  const auto dtype = options.precision == kAutoPrecision ? resolved(options, at::kCPU).precision
                                                         : options.precision;
  return at::empty_like(blocks, blocks.options().dtype(dtype), at::MemoryFormat::Contiguous);
}

// One row for each option: name, type, default, part and help.
std::vector<Texts> options_op() {
  std::vector<Texts> rows;
  for (const auto& option : option_list()) {
    rows.push_back({option.name, option.type, option.initial, to_string(option.part), option.help});
  }
  return rows;
}

std::string packed_qkv_op(
    int64_t heads, int64_t head_dim, int64_t kv_heads, int64_t value_dim, const std::string& q,
    const std::string& k, const std::string& v, bool share_qk) {
  return to_string(packed_qkv(
      {heads, head_dim, kv_heads, value_dim},
      {parse_schedule(q), parse_schedule(k), parse_schedule(v), share_qk}));
}

std::string interleaved_qkv_op(
    int64_t heads, int64_t head_dim, int64_t kv_heads, int64_t value_dim, const std::string& q,
    const std::string& k, const std::string& v, bool share_qk) {
  return to_string(interleaved_qkv(
      {heads, head_dim, kv_heads, value_dim},
      {parse_schedule(q), parse_schedule(k), parse_schedule(v), share_qk}));
}

std::string separate_op(
    int64_t heads, int64_t head_dim, const std::string& grouping, const std::string& name) {
  return to_string(separate(heads, head_dim, parse_schedule(grouping), name));
}

std::string mla_query_op(
    int64_t heads, int64_t nope_dim, int64_t rope_dim, const std::string& grouping) {
  return to_string(mla_query(heads, nope_dim, rope_dim, parse_schedule(grouping)));
}

std::string mla_key_value_op(
    int64_t heads, int64_t nope_dim, int64_t value_dim, const std::string& k,
    const std::string& v) {
  return to_string(mla_key_value(heads, nope_dim, value_dim, parse_schedule(k), parse_schedule(v)));
}

std::string output_projection_op(int64_t heads, int64_t value_dim, const std::string& grouping) {
  return to_string(output_projection(heads, value_dim, parse_schedule(grouping)));
}

std::string with_grouping_op(
    const std::string& layout, const std::string& grouping, const std::string& segment) {
  return to_string(with_grouping(parse_layout(layout), parse_schedule(grouping), segment));
}

Ints head_order_op(
    int64_t num_heads, const std::string& grouping, int64_t seed, int64_t step, double lr_fraction,
    const std::string& parameter, int64_t stream) {
  const auto schedule = checked(parse_schedule(grouping), num_heads, "group_muon: ");
  return head_order(
      num_heads, grouping_at(schedule, step, lr_fraction),
      {static_cast<uint64_t>(seed), step, parameter_key(parameter), stream});
}

}  // namespace

TORCH_LIBRARY(group_muon, m) {
  m.def("options() -> str[][]", options_op);
  m.def(
      "step_(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] momentum_buffers, str[] layouts, "
      "str[] names, str[] partitions, int[] seen_steps, float[] lrs, float[] weight_decays, "
      "float[] lr_fractions, str[] owned, str options) -> ()");
  m.def(
      "accumulate_parts(Tensor[] weights, Tensor[] grads, Tensor(a!)[] momentum_buffers, str[] "
      "layouts, str[] names, str options) -> Tensor[]",
      accumulate_parts_op);
  m.def(
      "orthogonalize_parts(Tensor(a!)[] directions, str[] layouts, str[] names, str[] partitions, "
      "int[] seen_steps, float[] lr_fractions, int[][] sizes, str[] owned, str options) -> "
      "Tensor[]",
      orthogonalize_parts_op);
  m.def(
      "apply_parts(Tensor(a!)[] weights, Tensor[] updates, str[] layouts, str[] names, str[] "
      "partitions, int[] seen_steps, float[] lrs, float[] weight_decays, float[] lr_fractions, "
      "int[][] "
      "sizes, int[][] lines, str options) -> ()",
      apply_parts_op);
  m.def(
      "smallest_pieces(str layout, int[] sizes, str name, bool whole_segments) -> (int[], int[], "
      "int[][], int[][], "
      "float[])",
      smallest_pieces_op);
  m.def("orthogonalize(Tensor blocks, str options) -> Tensor");
  m.def(
      "check(Tensor[] weights, Tensor?[] grads, str[] names, str layout, str options) -> ()",
      check_op);
  m.def(
      "measure(Tensor direction, Tensor gradient, str layout, str heads, str name, int seen_steps, "
      "float lr_fraction, bool exact, str options) -> (Tensor[], Tensor[], str[])",
      measure_op);
  m.def(
      "scaled_update(Tensor direction, str layout, str name, int seen_steps, float lr_fraction, "
      "str options) -> Tensor",
      scaled_update_op);
  m.def("spectra(Tensor blocks, bool exact) -> Tensor", spectra_op);
  m.def("imbalance(float[] norms) -> float", [](const Floats& norms) { return imbalance(norms); });
  m.def(
      "guaranteed_decrease(float first_order, float squares, float lr, float beta) -> float",
      [](double first_order, double squares, double lr, double beta) {
        Whitening update;
        update.first_order = first_order;
        update.step_squared_norm = squares;
        return guaranteed_decrease(update, lr, beta);
      });
  m.def("as_one_block(str layout) -> str", [](const std::string& layout) {
    return to_string(as_one_block(parse_layout(layout)));
  });
  m.def("look_ahead(Tensor grad, Tensor momentum_buffer, str options) -> Tensor", look_ahead_op);
  m.def(
      "break_even(float grouped_first_order, float grouped_squares, float full_first_order, float "
      "full_squares, float lr) -> (str, float)",
      break_even_op);
  m.def(
      "packed_qkv(int heads, int head_dim, int kv_heads, int value_dim, str q, str k, str v, "
      "bool share_qk) -> str",
      packed_qkv_op);
  m.def(
      "interleaved_qkv(int heads, int head_dim, int kv_heads, int value_dim, str q, str k, str v, "
      "bool share_qk) -> str",
      interleaved_qkv_op);
  m.def("separate(int heads, int head_dim, str grouping, str name) -> str", separate_op);
  m.def("mla_query(int heads, int nope_dim, int rope_dim, str grouping) -> str", mla_query_op);
  m.def(
      "mla_key_value(int heads, int nope_dim, int value_dim, str k, str v) -> str",
      mla_key_value_op);
  m.def("output_projection(int heads, int value_dim, str grouping) -> str", output_projection_op);
  m.def("engines() -> str[]", [] {
    Texts names;
    for (const auto engine : engines_here()) names.emplace_back(to_string(engine));
    return names;
  });
  // Resolves "auto": returns precision, engine and method.
  m.def(
      "resolved(str method, str precision, str engine, Device device) -> (str, str, str)",
      [](const std::string& method, const std::string& precision, const std::string& engine,
         c10::Device device) {
        OrthogonalizeOptions options;
        options.method = parse_method(method);
        options.precision = parse_precision(precision);
        options.engine = parse_engine(engine);
        const auto here = resolved(options, device);
        return std::tuple{
            std::string(precision_name(here.precision)), std::string(to_string(here.engine)),
            std::string(method_name(here.method))};
      });
  m.def("head_by_name(str module) -> str", [](const std::string& module) {
    return head_by_name(module);
  });
  m.def("role_by_name(str parameter) -> str", [](const std::string& parameter) {
    return role_by_name(parameter);
  });
  m.def("is_embedding_name(str module) -> bool", [](const std::string& module) {
    return is_embedding_name(module);
  });
  m.def("plain() -> str", [] { return to_string(plain()); });
  m.def("convolution() -> str", [] { return to_string(convolution()); });
  m.def(
      "check_layout(Tensor weight, str layout, str name) -> ()",
      [](const Tensor& weight, const std::string& layout, const std::string& name) {
        checked_layout(weight, layout, name);
      });
  m.def("transposed(str layout) -> str", [](const std::string& layout) {
    return to_string(transposed(parse_layout(layout)));
  });
  m.def("stacked(str layout) -> str", [](const std::string& layout) {
    return to_string(stacked(parse_layout(layout)));
  });
  m.def(
      "has_segment(str layout, str segment) -> bool",
      [](const std::string& layout, const std::string& segment) {
        return has_segment(parse_layout(layout), segment);
      });
  m.def("with_grouping(str layout, str grouping, str segment) -> str", with_grouping_op);
  m.def(
      "head_order(int num_heads, str grouping, int seed, int step, float lr_fraction, str "
      "parameter, int stream) -> int[]",
      head_order_op);
}

TORCH_LIBRARY_IMPL(group_muon, CompositeExplicitAutograd, m) {
  m.impl("step_", step_op);
  m.impl("orthogonalize", orthogonalize_op);
}

TORCH_LIBRARY_IMPL(group_muon, Meta, m) {
  m.impl("step_", torch::CppFunction::makeFromBoxedFunction<&step_meta>());
  m.impl("orthogonalize", orthogonalize_meta);
}

}  // namespace group_muon
