// SPDX-License-Identifier: Apache-2.0
/// \file
/// Experts that do not fit, put together: what a backend owns and what it calls between router and experts.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "nibble/core/device_memory.cuh"
#include "nibble/core/event.cuh"
#include "nibble/moe/expert_store.hpp"
#include "nibble/moe/fetch_beside.cuh"
#include "nibble/moe/fetch_engine.cuh"
#include "nibble/moe/fetch_engine_server.cuh"
#include "nibble/moe/fetch_launch.cuh"
#include "nibble/moe/fetch_server.cuh"
#include "nibble/moe/fetch_staged.cuh"
#include "nibble/moe/placement_file.hpp"
#include "nibble/moe/placement_host.cuh"
#include "nibble/moe/placement_server.cuh"
#include "nibble/moe/residency_device.cuh"
#include "nibble/moe/residency_launch.cuh"
#include "nibble/startup/kernel_table.hpp"

namespace nibble::moe {

/// Tables, slots and the way experts come. The slots' memory and the store belong to the caller and outlive
/// it. One stream at a time; any number of steps may be under way on it.
///
///     expert_offload<shape> offload(store, slots, 5000, 10240, worth, stream);
///     …  for each layer of a step, after the router:
///     status s = offload.bring(layer, ids, rows, place_mode::decode, options);   launches only; captured
///     …  with the step's last copies:
///     s = offload.read_counts(counts, stream);                                   and generation() is noted
///     …  once these have come:
///     if (const std::string what = offload.failure(*counts, generation, stream); !what.empty())
///       the requests of the step end with it
template <residency_shape Shape>
class expert_offload {
 public:
  /// Every kernel that bring(), bring_ahead() and add_host_share() may launch.
  using kernels = table_of<residency_family<Shape>, fetch_family, beside_fetch_family, staged_fetch_family,
                           engine_wait_family, host_question_family, host_experts_family>;

  /// Fills the slots with the worthiest experts; takes as long as the bytes over the link.
  /// \param slots memory of slot_count slots now, and at the same address of most_slots once it has grown
  /// \param worth of load_worth, may be empty  \param read an expert that is not page-locked, on host
  /// threads; null: from the store. Throws device_error, out_of_memory, error.
  expert_offload(const expert_store& store, std::byte* slots, int slot_count, int most_slots,
                 std::span<const std::uint32_t> worth, cudaStream_t stream, fetch_server::reader read = {})
      : store_(store), slots_(slots), tables_(Shape, most_slots, store.scales()) {
    if (store.count() != Shape.total())
      throw error("expert offload: the store has another number of experts");
    if (store.locked() < store.count()) {
      if (!read)
        read = [&store](int number, std::span<std::byte> out) {
          std::memcpy(out.data(), store.expert(number).data(), out.size());
        };
      server_ = std::make_unique<fetch_server>(store.slot_bytes(), std::move(read));
    }
    host_residency host(Shape, slot_count, most_slots);
    const std::vector<std::uint32_t> none(static_cast<std::size_t>(Shape.total()), worth_never);
    fill(host, host.warm(worth.empty() ? std::span<const std::uint32_t>(none) : worth), stream);
  }

  /// Rows that one call of bring() takes for sure; a larger step's experts are to be called in pieces.
  [[nodiscard]] int most_rows() const { return largest_placed_rows(Shape, open_slots_); }

  /// From now on decode steps of up to most_host_rows rows leave some of their misses to the CPU. Before
  /// anything is captured. \param fetch_of of split_misses
  void share_with_host(std::unique_ptr<host_experts_server> server, std::span<const std::int32_t> fetch_of) {
    if (fetch_of.size() != most_split_misses + 1)
      throw error("expert offload: the split of misses has another length");
    std::vector<std::int32_t> words(host_split_words, 0);
    std::copy(fetch_of.begin(), fetch_of.end(), words.begin());
    split_ = device_memory(4 * words.size());
    copy_to_device(split_.data(), words.data(), 4 * words.size());
    host_ = std::move(server);
  }
  [[nodiscard]] bool shares_with_host() const { return host_ != nullptr; }

  /// From now on the copy engine brings what is missing. Before anything is captured. \param engine for this
  /// store and these slots
  void fetch_by_engine(std::unique_ptr<copy_engine> engine) {
    if (server_ != nullptr) throw error("expert offload: the copy engine needs page-locked experts");
    engine_ = std::move(engine);
  }
  /// Whether it does: then nothing is fetched on a second stream, and no multiprocessor is taken.
  [[nodiscard]] bool fetches_by_engine() const { return engine_ != nullptr; }

  /// What the CPU needs of a layer's rows to take a share of their misses, and where it goes.
  struct host_share {
    const float* weights = nullptr;  ///< [rows][top_k]
    const void* x = nullptr;         ///< bf16, rows ldx apart; see host_experts_params
    int ldx = 0;
    void* y = nullptr;  ///< bf16, rows ldy apart
    int ldy = 0;
  };

  /// Makes the experts that `ids` name resident: afterwards the layer's experts may be launched with
  /// tables(). \param ids [rows][top_k], may come from the kernel before \param launch how a family is
  /// launched: launch(std::type_identity<Family>{}, params) → status \param share where the CPU may take
  /// misses, if it shares: they stay missing, and add_host_share() follows behind the layer's experts
  template <class Launch>
  [[nodiscard]] status bring(int layer, const std::int32_t* ids, int rows, place_mode mode, Launch&& launch,
                             const host_share* share = nullptr) const {
    const place_params p = placement(layer, ids, rows, mode);
    if (const status s = place(p, rows, share, launch); !s.ok()) return s;
    if (engine_ != nullptr) return launch(std::type_identity<engine_wait_family>{}, arrival(p));
    const fetch_params f = fetch(p.list, p.state);
    if (server_ == nullptr) return launch(std::type_identity<fetch_family>{}, f);
    return launch(std::type_identity<staged_fetch_family>{},
                  server_->params(f, store_.locked(), &p.state.counts->failed));
  }
  /// What the next layer is likely to ask for.
  struct look_ahead {
    /// [rows][top_k], likeliest first, ready when the layer's own ids are. Not read for the last layer.
    const std::int32_t* ids = nullptr;
    int limit = 0;                ///< most guesses, looks_ahead(rows, limit)
    cudaStream_t side = nullptr;  ///< idle before layer 0; joined again by the last layer
  };
  /// Whether bring_ahead() may be used: experts are page-locked and guesses find room.
  [[nodiscard]] bool looks_ahead(int rows, int limit) const { return rows <= rows_ahead(limit); }
  /// The most rows of a step for which that holds; 0: none.
  [[nodiscard]] int rows_ahead(int limit) const {
    if (server_ != nullptr || limit < 1 || limit > most_ahead) return 0;
    int rows = most_ahead_rows;
    while (rows > 0 && open_slots_ < slots_to_look_ahead(Shape, rows, limit)) --rows;
    return rows;
  }
  /// Whether bring_ahead() leaves two kernels to wait for, this layer's demand and its guesses: a kernel
  /// behind two others cannot start early behind one of them.
  [[nodiscard]] bool joins(int layer) const { return layer > 0 && engine_ == nullptr; }
  /// bring() that has up to `ahead.limit` likely experts of the next layer come (on a second stream, where a
  /// kernel fetches) while this layer computes. For every layer in order, layer 0 first; may be captured. The
  /// link brings what is demanded first, then guesses, with whose rest the next layer's demand shares it.
  /// Wrong guesses stay resident until something better takes their slots, so what a layer computes with
  /// never depends on them. What follows on the stream is behind two kernels (joins), so it must be launched
  /// plainly. \param launch launch(std::type_identity<Family>{}, params, launch_options) → status
  template <class Launch>
  [[nodiscard]] status bring_ahead(int layer, const std::int32_t* ids, int rows, place_mode mode,
                                   const look_ahead& ahead, const launch_options& options, Launch&& launch,
                                   const host_share* share = nullptr) const {
    const bool guesses = layer + 1 < Shape.layers;
    place_params p = placement(layer, ids, rows, mode);
    // Guesses for this layer may still be coming: their slots are not to be filled by anything else.
    if (layer > 0) p.guesses = p.state.ahead_list(Shape, layer), p.recent = p.guesses;
    if (guesses) {
      p.ahead_list = p.state.ahead_list(Shape, layer + 1), p.ahead_ids = ahead.ids;
      p.ahead_assignments = rows * Shape.top_k, p.ahead_row = Shape.top_k, p.ahead_limit = ahead.limit;
    }
    const auto chained = [&]<class Family>(std::type_identity<Family> family, const auto& params) {
      return launch(family, params, options);
    };
    if (const status s = place(p, rows, share, chained); !s.ok()) return s;
    if (engine_ != nullptr) return chained(std::type_identity<engine_wait_family>{}, arrival(p));
    if (const status s = chained(std::type_identity<fetch_family>{}, fetch(p.list, p.state)); !s.ok())
      return s;
    // The link is never idle between a guess and the next demand: what waits for both is the layer's product.
    if (joins(layer))
      if (const status s = wait(ahead.side, arrived_.get(), options.stream); !s.ok()) return s;
    const launch_options beside{ahead.side, launch_chain::plain};
    if (!guesses) return status::success();
    if (const status s = wait(options.stream, placed_.get(), ahead.side); !s.ok()) return s;
    return launch(std::type_identity<beside_fetch_family>{}, fetch(p.ahead_list, p.state), beside);
  }
  /// Behind every layer of a step that is launched, not captured: the copy engine must not be kept waiting by
  /// a full queue of launches, so the host waits where it is too far before the device.
  [[nodiscard]] status pace(cudaStream_t stream) const {
    return engine_ != nullptr ? engine_->pace(stream) : status::success();
  }
  /// Adds the CPU's share to y, once the layer's other experts have written it. The arguments are those of
  /// bring().
  template <class Launch>
  [[nodiscard]] status add_host_share(int layer, const std::int32_t* ids, int rows, place_mode mode,
                                      Launch&& launch, const host_share& share) const {
    if (!takes_share(rows, mode)) return status::success();
    return launch(std::type_identity<host_experts_family>{}, host_params(layer, ids, rows, share));
  }
  /// bring() with launch_options.
  [[nodiscard]] status bring(int layer, const std::int32_t* ids, int rows, place_mode mode,
                             const launch_options& options) const {
    return bring(layer, ids, rows, mode, [&options]<class Family>(std::type_identity<Family>, const auto& p) {
      return Family::launch(p, options);
    });
  }
  /// bring() for a prefill step that asks for many experts: while a layer computes, those of the next one
  /// that are missing come on a second stream. Call it for every layer in order, layer 0 first; not captured.
  /// Up to two layers' missing experts take the least valuable slots, so there must be twice a layer's.
  /// \param side a stream of the caller, idle before layer 0, which the copy engine does without  \param next
  /// [rows][top_k], what the next layer is likely to ask for; null: all of it, for steps of so many tokens
  /// that nearly every expert is asked for (streams_layers)
  [[nodiscard]] status bring_streaming(int layer, const std::int32_t* ids, int rows,
                                       const launch_options& options, cudaStream_t side,
                                       const std::int32_t* next = nullptr) const {
    if (server_ != nullptr)
      return bring(layer, ids, rows, place_mode::streaming, options);  // one ring, one stream
    const bool guessed = layer > 0, guesses = layer + 1 < Shape.layers;
    const launch_options after{options.stream, launch_chain::plain}, beside{side, launch_chain::plain};
    // The guesses for this layer have come, all of them.
    if (guessed && engine_ == nullptr)
      if (const status s = wait(side, arrived_.get(), options.stream); !s.ok()) return s;
    place_params p = placement(layer, ids, rows, place_mode::streaming);
    if (guessed) p.guesses = p.state.ahead_list(Shape, layer);
    if (guesses) {
      p.ahead_list = p.state.ahead_list(Shape, layer + 1), p.ahead_ids = next;
      p.ahead_assignments = rows * Shape.top_k, p.ahead_row = Shape.top_k;
      p.ahead_limit = std::max(Shape.experts, most_guess_candidates + 1);
    }
    if (const status s = residency_family<Shape>::launch(p, engine_ == nullptr ? after : options); !s.ok())
      return s;
    if (engine_ != nullptr) return engine_wait_family::launch(arrival(p), options);
    if (guesses) {
      if (const status s = wait(options.stream, placed_.get(), side); !s.ok()) return s;
      if (const status s = beside_fetch_family::launch(fetch(p.ahead_list, p.state), beside); !s.ok())
        return s;
    }
    return fetch_family::launch(fetch(p.list, p.state), guesses ? after : options);
  }
  /// Whether bring_streaming may be used for a prefill step with what the next layer is likely to ask for.
  [[nodiscard]] bool streams_ahead() const { return server_ == nullptr && open_slots_ >= 2 * Shape.experts; }
  /// Whether a prefill step should use bring_streaming without: 95 of 100 experts of a layer would be asked
  /// for by uniform routing, and two layers fit beside each other.
  [[nodiscard]] bool streams_layers(int rows) const {
    return rows * Shape.top_k >= 3 * Shape.experts && open_slots_ >= 2 * Shape.experts;
  }

  /// slot_of, slot_scales and slot_count for the experts' kernels.
  [[nodiscard]] residency_view tables() const { return tables_.view(); }

  /// Slots that are open, and that can ever be.
  [[nodiscard]] int slot_count() const { return open_slots_; }
  [[nodiscard]] int most_slots() const { return tables_.slot_count(); }
  /// Whether some experts come through host threads because their memory is not page-locked.
  [[nodiscard]] bool staged() const { return server_ != nullptr; }

  /// Copies the counts behind what the stream has; never waits. \param to page-locked
  [[nodiscard]] status read_counts(residency_counts* to, cudaStream_t stream) const {
    return runtime_status(
        cudaMemcpyAsync(to, tables_.view().counts, sizeof *to, cudaMemcpyDeviceToHost, stream), where,
        "the counts could not be read");
  }
  /// How often failures were repaired. To be noted when a step is launched.
  [[nodiscard]] std::uint64_t generation() const { return generation_; }
  /// Why a step is to be failed, "" for a good one. After a failure nothing is resident but all works again.
  /// Every step that was launched before the repair fails too: it may have used an expert that never came.
  /// Waits for the stream where there is something to repair. Throws where the device itself has failed.
  /// \param after the step's read_counts  \param launched_in generation() when it was launched
  [[nodiscard]] std::string failure(const residency_counts& after, std::uint64_t launched_in,
                                    cudaStream_t stream) {
    if (after.good()) return {};
    if (launched_in == generation_) {
      finish(stream);  // a step behind may still be asking the server
      host_residency host = tables_.get(stream);
      repair(host);
      tables_.set(host, stream);
    }
    std::string text = "the step's experts could not all be had:";
    if (after.failed > 0)
      text +=
          " " + std::to_string(after.failed) + " could not be read" + (why_.empty() ? "" : " (" + why_ + ")");
    if (after.unplaced > 0)
      text += " " + std::to_string(after.unplaced) +
              " found no slot: the step has more tokens than the slots can serve";
    if (after.bad_ids > 0) text += " " + std::to_string(after.bad_ids) + " ids were out of range";
    return text;
  }

  /// After a step that could not be launched to its end: tables may name experts whose fetch was never
  /// launched. Nothing is resident any more; steps that were launched before are as good as they were. Waits
  /// for the stream. Throws where the device has failed. \pre nothing is under way on another stream
  void abandon(cudaStream_t stream) {
    finish(stream);
    host_residency host = tables_.get(stream);
    repair(host);
    tables_.set(host, stream);
  }

  /// Waits for the stream, and for guesses that the copy engine is still bringing.
  void finish(cudaStream_t stream) const {
    require(runtime_status(cudaStreamSynchronize(stream), where, "work on the stream failed"));
    if (engine_ != nullptr) engine_->drain();
  }
  /// Opens or closes slots. Closing comes before their memory goes, opening after it has come. Graphs that
  /// were captured stay valid. Waits for the stream; counts begin at zero.
  void resize(int slot_count, cudaStream_t stream) {
    finish(stream);
    const bool good = tables_.counts(stream).good();
    host_residency host = tables_.get(stream);
    // A step that nobody has asked about yet left experts that never came.
    if (!good) repair(host);
    host.resize(slot_count);
    tables_.set(host, stream);
    open_slots_ = slot_count;
  }
  /// What to save_worth() for the next start.
  [[nodiscard]] std::vector<std::uint32_t> worth(cudaStream_t stream) const {
    const host_residency host = tables_.get(stream);
    return worth_at_start(host.worth(), host.clock());
  }

 private:
  static constexpr const char* where = "nibble::moe::expert_offload";

  void fill(const host_residency& host, std::span<const fetch_entry> entries, cudaStream_t stream) {
    require(bring_experts(store_, entries, slots_, stream));
    tables_.set(host, stream);
    open_slots_ = host.slot_count();
  }
  /// No one knows which slots hold what. \pre nothing is under way
  void repair(host_residency& host) {
    why_ = server_ != nullptr ? server_->take_failure() : "";
    if (why_.empty() && host_ != nullptr) why_ = host_->take_failure();
    if (why_.empty() && engine_ != nullptr) why_ = engine_->take_failure();
    if (server_ != nullptr) server_->reset();
    if (engine_ != nullptr) engine_->reset();
    if (host_ != nullptr) host_->reset();
    host.forget_all();
    ++generation_;
  }

  /// What `to` gets from here on waits for all that `from` has.
  [[nodiscard]] static status wait(cudaStream_t from, cudaEvent_t event, cudaStream_t to) {
    if (const cudaError_t e = cudaEventRecord(event, from); e != cudaSuccess)
      return runtime_status(e, where, "an event could not be recorded");
    return runtime_status(cudaStreamWaitEvent(to, event), where, "a stream could not wait");
  }
  [[nodiscard]] bool takes_share(int rows, place_mode mode) const {
    return host_ != nullptr && mode == place_mode::decode && rows <= most_host_rows;
  }
  /// The placement and, where the CPU takes a share, the question to it.
  template <class Launch>
  [[nodiscard]] status place(place_params p, int rows, const host_share* share, Launch&& launch) const {
    const bool shared = share != nullptr && takes_share(rows, p.mode);
    if (shared) p.fetch_of = split_.template as<std::int32_t>(), p.host_list = host_list();
    const status s = launch(std::type_identity<residency_family<Shape>>{}, p);
    if (!s.ok() || !shared) return s;
    return launch(std::type_identity<host_question_family>{}, host_params(p.layer, p.ids, rows, *share));
  }
  [[nodiscard]] std::int32_t* host_list() const {
    return split_.template as<std::int32_t>() + host_list_word;
  }
  [[nodiscard]] host_experts_params host_params(int layer, const std::int32_t* ids, int rows,
                                                const host_share& share) const {
    host_experts_params p;
    host_->set(p);
    p.host_list = host_list();
    p.layer = layer, p.rows = rows, p.ids = ids, p.weights = share.weights;
    p.x = share.x, p.ldx = share.ldx, p.y = share.y, p.ldy = share.ldy;
    p.failures = &tables_.view().counts->failed;
    return p;
  }

  [[nodiscard]] place_params placement(int layer, const std::int32_t* ids, int rows, place_mode mode) const {
    place_params p;
    p.state = tables_.view();
    p.layer = layer, p.ids = ids, p.assignments = rows * Shape.top_k;
    p.mode = mode, p.new_step = mode == place_mode::decode && layer == 0;
    p.list = p.state.demand_list(Shape, layer);
    if (engine_ != nullptr) p.engine = engine_->link();
    return p;
  }
  [[nodiscard]] engine_wait_params arrival(const place_params& p) const {
    return engine_->wait_params(fetch(p.list, p.state), &p.state.counts->failed);
  }
  [[nodiscard]] fetch_params fetch(const std::int32_t* list, const residency_view& state) const {
    fetch_params f = whole_experts(store_, slots_, state.slot_count);
    f.list = list;
    return f;
  }

  const expert_store& store_;
  std::byte* slots_;
  device_residency tables_;
  std::unique_ptr<fetch_server> server_;
  std::unique_ptr<copy_engine> engine_;
  std::unique_ptr<host_experts_server> host_;
  device_memory split_;  ///< fetch_of, then the list of misses that the CPU takes
  event placed_, arrived_;
  int open_slots_ = 0;
  std::uint64_t generation_ = 0;
  std::string why_;  ///< what the last repair was about
};

}  // namespace nibble::moe
