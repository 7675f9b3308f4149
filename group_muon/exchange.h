#pragma once
// What processes send each other for a shared step: gradients to their owners, new values to all. Works with any backend
// of torch's process groups that has all_to_all: Gloo on CPUs, NCCL on GPUs.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "group_muon/sharing.h"

namespace group_muon {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

/// One process's side of the steps that all processes of a group share. All of them must call the same collective
/// functions in the same order.
class Exchange {
  // Data on its way.
  struct Transfer {
    at::Tensor sent = {};
    at::Tensor received = {};
    c10::intrusive_ptr<c10d::Work> work = {};
  };

 public:
  /// Plans the shares. Collective: compares the plans and `options` (a text) of all processes, and names one that differs.
  /// `device` is that of the weights.
  Exchange(
      ProcessGroup group, std::vector<SharedWeight> weights, std::string_view options,
      c10::Device device = c10::kCPU);

  const ProcessGroup& group() const { return group_; }
  const std::vector<SharedWeight>& weights() const { return weights_; }
  /// The pieces of all processes.
  const std::vector<Piece>& pieces() const { return pieces_; }
  /// Indices of this process's pieces, in the order of rounds.
  std::vector<size_t> own_pieces() const;
  int rank() const { return group_->getRank(); }
  int processes() const { return group_->getSize(); }
  /// Bytes sent to other processes so far.
  int64_t bytes_sent() const { return bytes_sent_; }

  /// Collective. Which weights have a gradient on at least one process. An undefined tensor is no gradient. With
  /// `on_all`, a weight that has one on some processes only is an error. So is a process with other `options` (a text)
  /// for the step, such as another learning rate; comparing them costs nothing.
  std::vector<bool> with_gradient(
      const std::vector<at::Tensor>& grads, bool on_all = false, std::string_view options = {});

  /// Collective. The largest entry of any process, one by one.
  std::vector<int64_t> largest(const std::vector<int64_t>& own);

  /// A step. Parts are exchanged in rounds: while one is computed, others are on their way.
  class Step {
   public:
    /// Takes piece in the step of the weights in `active`, whose values are `params`. If `grads` is not empty, starts to
    /// send every gradient to its owner; a missing one counts as zero.
    Step(
        Exchange& exchange, std::vector<at::Tensor> params, std::vector<bool> active,
        const std::vector<at::Tensor>& grads = {});

    int64_t rounds() const { return static_cast<int64_t>(exchange_.rounds_.size()); }
    /// This process's pieces in a round, as indices into pieces().
    std::vector<size_t> own_pieces(int64_t round) const;
    /// Waits for their gradients: sums over all processes, or means. They are added in pairs of neighbours, those in pairs
    /// and so on, so that each half of an even number of processes is summed by itself. Shaped as take_piece() returns
    /// them.
    std::vector<at::Tensor> sum_grads(int64_t round);
    std::vector<at::Tensor> mean_grads(int64_t round);
    /// Starts to send their new values to all.
    void send_values(int64_t round, const std::vector<at::Tensor>& values);
    /// Waits for the values of other processes and writes them to the weights.
    void receive_values();

   private:
    std::vector<at::Tensor> reduced_grads(int64_t round, bool mean);

    Exchange& exchange_;
    std::vector<at::Tensor> params_;
    std::vector<bool> active_;
    std::vector<Transfer> grads_, values_;
  };

  /// Collective. Tensors of this process's pieces, in the order of own_pieces(), assembled to tensors of whole weights on
  /// the process `root`, on all if it is -1; elsewhere undefined. `which` chooses the weights.
  std::vector<at::Tensor> assemble(
      const std::vector<at::Tensor>& own, const std::vector<bool>& which, int root = -1);

 private:
  void check_agreement(std::string_view options);
  void check_options(const at::Tensor& keys) const;
  void make_rounds();
  /// One row for each process.
  at::Tensor gather_integers(const std::vector<int64_t>& own);
  /// Parts of the active weights in a round, of one owner, and their elements.
  std::vector<size_t> pieces_of(size_t round, int owner, const std::vector<bool>& active) const;
  int64_t elements_of(const std::vector<size_t>& pieces) const;
  /// A buffer with these tensors one after the other.
  at::Tensor flat(size_t round, const std::vector<at::Tensor>& tensors) const;
  Transfer start(
      at::Tensor sent, std::vector<int64_t> send_counts, std::vector<int64_t> receive_counts);
  void wait(const Transfer& transfer, const char* what) const;

  ProcessGroup group_;
  c10::Device device_;
  std::vector<SharedWeight> weights_;
  std::vector<Piece> pieces_;
  std::vector<std::vector<size_t>> rounds_;  // indices of pieces; one dtype in each
  int64_t bytes_sent_ = 0;
};

}  // namespace group_muon
