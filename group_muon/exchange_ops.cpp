// Exchange as a torch class, for Python: torch.classes.group_muon.Exchange.

#include <torch/custom_class.h>

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "group_muon/exchange.h"

namespace group_muon {
namespace {

using at::Tensor;
using Ints = std::vector<int64_t>;

std::vector<Tensor> as_tensors(const std::vector<std::optional<Tensor>>& tensors) {
  std::vector<Tensor> result;
  for (const auto& tensor : tensors) result.push_back(tensor.value_or(Tensor()));
  return result;
}

// Lists of bool are not supported by torch classes.
std::vector<bool> as_bools(const Ints& flags) { return {flags.begin(), flags.end()}; }

// Pieces are numbers; their tensors have the sizes that take() returns.
class ExchangeClass : public torch::CustomClassHolder {
 public:
  ExchangeClass(
      const std::string& group, const std::vector<std::string>& names,
      const std::vector<Tensor>& weights, const std::vector<std::string>& layouts,
      const Ints& whole_segments, const std::string& options)
      : exchange_(
            c10d::resolve_process_group(group), described(names, weights, layouts, whole_segments),
            options, weights.empty() ? c10::Device(c10::kCPU) : weights.front().device()) {}

  // Of this process, in the order of rounds.
  Ints own_pieces() const {
    const auto own = exchange_.own_pieces();
    return {own.begin(), own.end()};
  }
  // Weight, owner, elements and estimated work of every piece.
  std::vector<std::tuple<int64_t, int64_t, int64_t, double>> pieces() const {
    std::vector<std::tuple<int64_t, int64_t, int64_t, double>> all;
    for (const auto& piece : exchange_.pieces()) {
      all.emplace_back(static_cast<int64_t>(piece.weight), piece.owner, piece.elements, piece.work);
    }
    return all;
  }
  int64_t weight_of(int64_t piece) const { return static_cast<int64_t>(at(piece).weight); }
  std::string owned_heads_of(int64_t piece) const {
    const auto owned = owned_heads(exchange_.weights()[at(piece).weight], at(piece));
    return owned ? to_string(*owned) : "";
  }
  Tensor take(int64_t piece, const Tensor& tensor) const {
    return take_piece(tensor, exchange_.weights()[at(piece).weight], at(piece));
  }
  void put(int64_t piece, const Tensor& tensor, const Tensor& values) const {
    put_piece(tensor, exchange_.weights()[at(piece).weight], at(piece), values);
  }

  Ints with_gradient(
      const std::vector<std::optional<Tensor>>& grads, bool on_all, const std::string& options) {
    const auto active = exchange_.with_gradient(as_tensors(grads), on_all, options);
    return {active.begin(), active.end()};
  }
  // Begins a step; returns the number of rounds. Without `grads` none are exchanged.
  int64_t begin(
      const std::vector<Tensor>& weights, const Ints& active,
      const std::vector<std::optional<Tensor>>& grads) {
    step_ =
        std::make_unique<Exchange::Step>(exchange_, weights, as_bools(active), as_tensors(grads));
    return step_->rounds();
  }
  Ints pieces_of_round(int64_t round) const {
    const auto own = step_->own_pieces(round);
    return {own.begin(), own.end()};
  }
  std::vector<Tensor> mean_grads(int64_t round) { return step_->mean_grads(round); }
  void send_values(int64_t round, const std::vector<Tensor>& values) {
    step_->send_values(round, values);
  }
  void end() {
    step_->receive_values();
    step_.reset();
  }

  Ints largest(const Ints& own) { return exchange_.largest(own); }
  std::vector<std::optional<Tensor>> assemble(
      const std::vector<std::optional<Tensor>>& own, const Ints& which, int64_t root) {
    std::vector<std::optional<Tensor>> whole;
    for (auto& tensor :
         exchange_.assemble(as_tensors(own), as_bools(which), static_cast<int>(root))) {
      whole.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
    }
    return whole;
  }
  int64_t bytes_sent() const { return exchange_.bytes_sent(); }

 private:
  static std::vector<SharedWeight> described(
      const std::vector<std::string>& names, const std::vector<Tensor>& weights,
      const std::vector<std::string>& layouts, const Ints& whole_segments) {
    std::vector<SharedWeight> result;
    for (size_t i = 0; i < weights.size(); ++i) {
      SharedWeight weight{
          .name = names.at(i),
          .sizes = weights[i].sizes().vec(),
          .dtype = weights[i].scalar_type(),
          .adamw = layouts.at(i) == "adamw",
          .whole_segments = whole_segments.at(i) != 0};
      if (!weight.adamw) {
        weight.layout = checked(parse_layout(layouts[i]), weight.sizes, weight.name);
      }
      result.push_back(std::move(weight));
    }
    return result;
  }
  const Piece& at(int64_t piece) const { return exchange_.pieces().at(piece); }

  Exchange exchange_;
  std::unique_ptr<Exchange::Step> step_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(group_muon, m) {
  m.class_<ExchangeClass>("Exchange")
      .def(
          torch::init<
              const std::string&, const std::vector<std::string>&, const std::vector<Tensor>&,
              const std::vector<std::string>&, const Ints&, const std::string&>())
      .def("own_pieces", &ExchangeClass::own_pieces)
      .def("pieces", &ExchangeClass::pieces)
      .def("weight_of", &ExchangeClass::weight_of)
      .def("owned_heads_of", &ExchangeClass::owned_heads_of)
      .def("take", &ExchangeClass::take)
      .def("put", &ExchangeClass::put)
      .def("with_gradient", &ExchangeClass::with_gradient)
      .def("begin", &ExchangeClass::begin)
      .def("pieces_of_round", &ExchangeClass::pieces_of_round)
      .def("mean_grads", &ExchangeClass::mean_grads)
      .def("send_values", &ExchangeClass::send_values)
      .def("end", &ExchangeClass::end)
      .def("largest", &ExchangeClass::largest)
      .def("assemble", &ExchangeClass::assemble)
      .def("bytes_sent", &ExchangeClass::bytes_sent);
}

}  // namespace group_muon
