#include "group_muon/exchange.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace group_muon {
namespace {

using at::Tensor;

// Elements that a round has at least, over all processes: smaller messages would cost more in latency than they hide.
constexpr int64_t kRoundElements = int64_t{1} << 22;
constexpr int64_t kMostRounds = 4;

// The value that most processes have; of several such the one of the first process that has it.
int64_t most_common(const Tensor& values) {
  std::map<int64_t, int64_t> counts;
  for (int64_t i = 0; i < values.numel(); ++i) ++counts[values[i].item<int64_t>()];
  int64_t best = values[0].item<int64_t>();
  for (int64_t i = 0; i < values.numel(); ++i) {
    const auto value = values[i].item<int64_t>();
    if (counts[value] > counts[best]) best = value;
  }
  return best;
}

// The first process whose value is not that of most, or -1.
int64_t odd_one(const Tensor& values) {
  const auto common = most_common(values);
  for (int64_t i = 0; i < values.numel(); ++i) {
    if (values[i].item<int64_t>() != common) return i;
  }
  return -1;
}

// The sum of all rows, in fp32 or better: the first half of them, plus the others.
Tensor sum_of_rows(const Tensor& rows) {
  const int64_t count = rows.size(0), half = (count + 1) / 2;
  if (count == 1) {
    const auto dtype = rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    return rows[0].to(dtype, /*non_blocking=*/false, /*copy=*/true);
  }
  const Tensor others = rows.narrow(0, half, count - half);
  return sum_of_rows(rows.narrow(0, 0, half))
      .add_(others.size(0) == 1 ? others[0] : sum_of_rows(others));
}

}  // namespace

Exchange::Exchange(
    ProcessGroup group, std::vector<SharedWeight> weights, std::string_view options,
    c10::Device device)
    : group_(std::move(group)),
      device_(device),
      weights_(std::move(weights)),
      pieces_(share_weights(weights_, group_->getSize())) {
  check_agreement(options);
  make_rounds();
}

void Exchange::check_agreement(std::string_view options) {
  const auto own = fingerprints(weights_, pieces_);
  const auto all = gather_integers(
      {static_cast<int64_t>(own.size()), static_cast<int64_t>(parameter_key(options))});
  if (const auto odd = odd_one(all.select(1, 0)); odd >= 0) {
    TORCH_CHECK_VALUE(
        false, "group_muon: process ", odd, " of ", processes(), " has ",
        all[odd][0].item<int64_t>(), " weights, but others have ", most_common(all.select(1, 0)),
        "; every process should have the same model");
  }
  check_options(all.select(1, 1));
  const auto weights = gather_integers(own);
  for (size_t i = 0; i < own.size(); ++i) {
    const auto odd = odd_one(weights.select(1, static_cast<int64_t>(i)));
    TORCH_CHECK_VALUE(
        odd < 0, "group_muon: process ", odd, " of ", processes(), " differs in weight ", i, ", '",
        weights_[i].name, "' here: its name, shape, type or layout is not that of the others");
  }
}

// `keys` has one number for each process.
void Exchange::check_options(const Tensor& keys) const {
  const auto odd = odd_one(keys);
  TORCH_CHECK_VALUE(
      odd < 0, "group_muon: process ", odd, " of ", processes(),
      " has other options than the others; every process should have the same options, learning "
      "rates, seed and version of Group Muon");
}

void Exchange::make_rounds() {
  std::map<c10::ScalarType, int64_t> elements;
  for (const auto& piece : pieces_) elements[weights_[piece.weight].dtype] += piece.elements;
  for (const auto& [dtype, total] : elements) {
    const auto count = std::clamp<int64_t>(total / kRoundElements, 1, kMostRounds);
    std::vector<std::vector<size_t>> rounds(count);
    for (int owner = 0; owner < processes(); ++owner) {
      // Each owner's pieces in equal shares, the most expensive first: its computation hides the most.
      std::vector<size_t> own;
      int64_t owned = 0;
      for (size_t i = 0; i < pieces_.size(); ++i) {
        if (pieces_[i].owner != owner || weights_[pieces_[i].weight].dtype != dtype) continue;
        own.push_back(i);
        owned += pieces_[i].elements;
      }
      std::stable_sort(own.begin(), own.end(), [&](size_t a, size_t b) {
        return pieces_[a].work > pieces_[b].work;
      });
      int64_t before = 0;
      for (const auto i : own) {
        rounds[std::min(count - 1, before * count / std::max<int64_t>(1, owned))].push_back(i);
        before += pieces_[i].elements;
      }
    }
    // Few large pieces may leave rounds without any.
    std::erase_if(rounds, [](const auto& round) { return round.empty(); });
    std::move(rounds.begin(), rounds.end(), std::back_inserter(rounds_));
  }
}

std::vector<size_t> Exchange::own_pieces() const {
  std::vector<size_t> own;
  for (size_t round = 0; round < rounds_.size(); ++round) {
    const auto pieces = pieces_of(round, rank(), std::vector<bool>(weights_.size(), true));
    own.insert(own.end(), pieces.begin(), pieces.end());
  }
  return own;
}

std::vector<size_t> Exchange::pieces_of(
    size_t round, int owner, const std::vector<bool>& active) const {
  std::vector<size_t> pieces;
  for (const auto i : rounds_[round]) {
    if (pieces_[i].owner == owner && active[pieces_[i].weight]) pieces.push_back(i);
  }
  return pieces;
}

int64_t Exchange::elements_of(const std::vector<size_t>& pieces) const {
  return std::accumulate(pieces.begin(), pieces.end(), int64_t{0}, [&](int64_t sum, size_t i) {
    return sum + pieces_[i].elements;
  });
}

Tensor Exchange::flat(size_t round, const std::vector<Tensor>& tensors) const {
  std::vector<Tensor> vectors;
  for (const auto& tensor : tensors) vectors.push_back(tensor.reshape({-1}));
  const auto dtype = weights_[pieces_[rounds_[round].front()].weight].dtype;
  if (vectors.empty()) return at::empty({0}, at::device(device_).dtype(dtype));
  return at::cat(vectors).to(dtype);
}

Exchange::Transfer Exchange::start(
    Tensor sent, std::vector<int64_t> send_counts, std::vector<int64_t> receive_counts) {
  if (processes() == 1) return {sent, sent, {}};
  const auto total = std::accumulate(receive_counts.begin(), receive_counts.end(), int64_t{0});
  Tensor received = at::empty({total}, sent.options());
  bytes_sent_ += (sent.numel() - send_counts[rank()]) * sent.element_size();
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // the new name is not in torch 2.12
  auto work = group_->alltoall_base(received, sent, receive_counts, send_counts);
#pragma GCC diagnostic pop
  return {std::move(sent), std::move(received), std::move(work)};
}

void Exchange::wait(const Transfer& transfer, const char* what) const {
  if (!transfer.work) return;
  try {
    transfer.work->wait();
  } catch (const std::exception& error) {
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            "group_muon: process ", rank(), " of ", processes(), " could not exchange ", what,
            ": another process ended or did not answer in time (", error.what(), ")"));
  }
}

Tensor Exchange::gather_integers(const std::vector<int64_t>& own) {
  const auto count = static_cast<int64_t>(own.size());
  const Tensor sent = at::tensor(own, at::kLong).repeat({processes()}).to(device_);
  const std::vector<int64_t> counts(processes(), count);
  const auto transfer = start(sent, counts, counts);
  wait(transfer, "a comparison");
  return transfer.received.cpu().view({processes(), count});
}

std::vector<int64_t> Exchange::largest(const std::vector<int64_t>& own) {
  const Tensor most = gather_integers(own).amax(0);
  return {most.data_ptr<int64_t>(), most.data_ptr<int64_t>() + most.numel()};
}

std::vector<bool> Exchange::with_gradient(
    const std::vector<Tensor>& grads, bool on_all, std::string_view options) {
  // A flag takes one bit of a number; the others hold the key of the options.
  const auto key = static_cast<int64_t>(parameter_key(options) >> 2) << 1;
  std::vector<int64_t> flags;
  for (const auto& grad : grads) flags.push_back(key | (grad.defined() ? 1 : 0));
  if (flags.empty()) return {};
  const Tensor numbers = gather_integers(flags);
  check_options(numbers.select(1, 0).bitwise_right_shift(1));
  const Tensor all = numbers.bitwise_and(1);
  std::vector<bool> active;
  for (size_t i = 0; i < flags.size(); ++i) {
    const Tensor there = all.select(1, static_cast<int64_t>(i));
    active.push_back(there.any().item<bool>());
    if (!on_all || there.all().item<bool>() == active.back()) continue;
    TORCH_CHECK_VALUE(
        false, "group_muon: process ", there.argmin().item<int64_t>(), " of ", processes(),
        " has no gradient of '", weights_[i].name,
        "', but others have; averaged gradients should be the same on all");
  }
  return active;
}

std::vector<Tensor> Exchange::assemble(
    const std::vector<Tensor>& own, const std::vector<bool>& which, int root) {
  std::map<size_t, Tensor> tensors;
  const auto order = own_pieces();
  for (size_t i = 0; i < order.size(); ++i) tensors[order[i]] = own.at(i);
  std::vector<Tensor> whole(weights_.size());
  const auto receives = [&](int process) { return root < 0 || process == root; };
  for (size_t round = 0; round < rounds_.size(); ++round) {
    std::vector<Tensor> sent;
    const auto mine = pieces_of(round, rank(), which);
    for (int process = 0; process < processes(); ++process) {
      if (!receives(process)) continue;
      for (const auto i : mine) sent.push_back(tensors.at(i));
    }
    std::vector<int64_t> send_counts, receive_counts;
    for (int process = 0; process < processes(); ++process) {
      send_counts.push_back(receives(process) ? elements_of(mine) : 0);
      receive_counts.push_back(
          receives(rank()) ? elements_of(pieces_of(round, process, which)) : 0);
    }
    const auto transfer = start(flat(round, sent), send_counts, receive_counts);
    wait(transfer, "states");
    if (!receives(rank())) continue;
    int64_t first = 0;
    for (int owner = 0; owner < processes(); ++owner) {
      for (const auto i : pieces_of(round, owner, which)) {
        const auto& weight = weights_[pieces_[i].weight];
        Tensor& target = whole[pieces_[i].weight];
        if (!target.defined()) target = at::empty(weight.sizes, transfer.received.options());
        put_piece(
            target, weight, pieces_[i], transfer.received.narrow(0, first, pieces_[i].elements));
        first += pieces_[i].elements;
      }
    }
  }
  return whole;
}

Exchange::Step::Step(
    Exchange& exchange, std::vector<Tensor> params, std::vector<bool> active,
    const std::vector<Tensor>& grads)
    : exchange_(exchange), params_(std::move(params)), active_(std::move(active)) {
  if (grads.empty()) return;
  for (size_t round = 0; round < exchange_.rounds_.size(); ++round) {
    std::vector<Tensor> sent;
    std::vector<int64_t> send_counts;
    for (int owner = 0; owner < exchange_.processes(); ++owner) {
      const auto pieces = exchange_.pieces_of(round, owner, active_);
      for (const auto i : pieces) {
        const auto& piece = exchange_.pieces_[i];
        const auto& grad = grads.at(piece.weight);
        sent.push_back(
            grad.defined() ? take_piece(grad, exchange_.weights_[piece.weight], piece)
                           : at::zeros({piece.elements}, params_.at(piece.weight).options()));
      }
      send_counts.push_back(exchange_.elements_of(pieces));
    }
    const std::vector<int64_t> receive_counts(exchange_.processes(), send_counts[exchange_.rank()]);
    grads_.push_back(exchange_.start(exchange_.flat(round, sent), send_counts, receive_counts));
  }
}

std::vector<size_t> Exchange::Step::own_pieces(int64_t round) const {
  return exchange_.pieces_of(round, exchange_.rank(), active_);
}

std::vector<Tensor> Exchange::Step::sum_grads(int64_t round) {
  return reduced_grads(round, /*mean=*/false);
}

std::vector<Tensor> Exchange::Step::mean_grads(int64_t round) {
  return reduced_grads(round, /*mean=*/true);
}

std::vector<Tensor> Exchange::Step::reduced_grads(int64_t round, bool mean) {
  const auto transfer = std::move(grads_.at(round));
  exchange_.wait(transfer, "gradients");
  Tensor sum = sum_of_rows(transfer.received.view({exchange_.processes(), -1}));
  if (mean) sum.div_(exchange_.processes());
  const Tensor reduced = sum.to(transfer.received.scalar_type());
  std::vector<Tensor> grads;
  int64_t first = 0;
  for (const auto i : own_pieces(round)) {
    const auto& piece = exchange_.pieces_[i];
    grads.push_back(reduced.narrow(0, first, piece.elements)
                        .view(piece_sizes(exchange_.weights_[piece.weight], piece)));
    first += piece.elements;
  }
  return grads;
}

void Exchange::Step::send_values(int64_t round, const std::vector<Tensor>& values) {
  const Tensor own = exchange_.flat(round, values);
  const int processes = exchange_.processes();
  std::vector<int64_t> receive_counts;
  for (int owner = 0; owner < processes; ++owner) {
    receive_counts.push_back(
        owner == exchange_.rank()
            ? 0
            : exchange_.elements_of(exchange_.pieces_of(round, owner, active_)));
  }
  std::vector<int64_t> send_counts(processes, own.numel());
  send_counts[exchange_.rank()] = 0;
  values_.push_back(exchange_.start(own.repeat({processes - 1}), send_counts, receive_counts));
}

void Exchange::Step::receive_values() {
  for (size_t round = 0; round < values_.size(); ++round) {
    exchange_.wait(values_[round], "new weights");
    int64_t first = 0;
    for (int owner = 0; owner < exchange_.processes(); ++owner) {
      if (owner == exchange_.rank()) continue;
      for (const auto i : exchange_.pieces_of(round, owner, active_)) {
        const auto& piece = exchange_.pieces_[i];
        put_piece(
            params_.at(piece.weight), exchange_.weights_[piece.weight], piece,
            values_[round].received.narrow(0, first, piece.elements));
        first += piece.elements;
      }
    }
  }
}

}  // namespace group_muon
