// SPDX-License-Identifier: Apache-2.0
/// \file
/// Experts into host memory, and what is kept of them between starts: their packed form, and which were in
/// use. Whatever is wrong with a file is a note, never an error.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/expert_keeping.hpp"
#include "nibble/io/fingerprint.hpp"
#include "nibble/moe/expert_file.hpp"
#include "nibble/moe/expert_store.hpp"
#include "nibble/moe/placement_file.hpp"

namespace qwen3_moe {

/// Packs one expert, numbered over all layers, into the form of its slot. Thread-safe.
using expert_packer = std::function<void(int number, std::span<std::uint8_t> slot)>;

class expert_files {
 public:
  using note_taker = std::function<void(std::string_view)>;

  /// Reads headers of the checkpoint where files are wanted.
  expert_files(expert_keeping keeping, int count, std::size_t slot_bytes, note_taker notes)
      : keeping_(std::move(keeping)), count_(count), slot_bytes_(slot_bytes), note_(std::move(notes)) {
    if (keeping_.checkpoint.empty() || (!keeping_.cache_file && !keeping_.remember)) return;
    try {
      of_.add(std::string_view("qwen3-moe experts in slots, version 1"));
      of_.add(static_cast<std::uint64_t>(count_));
      of_.add(static_cast<std::uint64_t>(slot_bytes_));
      of_.add_checkpoint(keeping_.checkpoint);
    } catch (const std::exception& problem) {
      note("nothing is kept of the experts: " + std::string(problem.what()));
      return;
    }
    if (keeping_.cache_file)
      cache_ =
          keeping_.cache_file->empty() ? keeping_.checkpoint / "nibble-experts.bin" : *keeping_.cache_file;
    if (keeping_.remember)
      worth_ = cache_.empty() ? state_path() : std::filesystem::path(cache_.string() + ".worth");
  }

  /// Fills the store: from the cache file where it fits, otherwise by `pack`, and then the file is written.
  /// Single experts that are damaged in the file are packed. Throws what `pack` throws.
  void fill(nibble::moe::expert_store& store, const expert_packer& pack,
            std::span<const nibble::moe::expert_scales> scales) {
    const auto begin = std::chrono::steady_clock::now();
    std::string why;
    std::optional<nibble::moe::expert_file> file;
    if (!cache_.empty()) file = nibble::moe::expert_file::open(cache_, of_, count_, slot_bytes_, why);
    std::atomic<int> packed = 0;
    std::mutex guard;
    store.fill([&](int number, std::span<std::byte> slot, nibble::moe::expert_scales& to) {
      to = scales[static_cast<std::size_t>(number)];
      if (file) try {
          return file->read(number, slot);
        } catch (const nibble::format_error& problem) {
          const std::lock_guard hold(guard);
          if (why.empty()) why = problem.what();
        }
      pack(number, {reinterpret_cast<std::uint8_t*>(slot.data()), slot.size()});
      ++packed;
    });
    packed_ = packed;
    note("experts: " + megabytes() + " in host memory after " + seconds_since(begin) + ", " +
         (packed == 0       ? "from " + cache_.string()
          : packed < count_ ? std::to_string(count_ - packed) + " from " + cache_.string() + ", " +
                                  std::to_string(packed) + " packed from the checkpoint"
                            : std::string("packed from the checkpoint")));
    if (cache_.empty() || packed == 0) return;
    if (why != "there is none") note("expert cache not used as it was: " + why);
    write(store);
  }
  /// Experts that the last fill() packed.
  [[nodiscard]] int packed() const { return packed_; }

  /// What experts were worth at the end of the last run; nothing where that is not known.
  [[nodiscard]] std::vector<std::uint32_t> load_worth() const {
    if (worth_.empty()) return {};
    std::string why;
    auto worth = nibble::moe::load_worth(worth_, of_, static_cast<std::size_t>(count_), why);
    if (!worth.empty())
      note("experts in use at the end of the last run are loaded first, as " + worth_.string() + " has them");
    else if (why != "there is none")
      note("experts in use at the end of the last run are not known: " + why);
    return worth;
  }
  /// \param worth of worth_at_start
  void save_worth(std::span<const std::uint32_t> worth) const {
    if (worth_.empty()) return;
    try {
      if (worth_.has_parent_path()) std::filesystem::create_directories(worth_.parent_path());
      nibble::moe::save_worth(worth_, of_, worth);
    } catch (const std::exception& problem) {
      note("which experts are in use was not saved: " + std::string(problem.what()));
    }
  }
  /// Whether save_worth() does anything.
  [[nodiscard]] bool remembers() const { return !worth_.empty(); }

 private:
  void note(const std::string& line) const {
    if (note_) note_(line);
  }
  void write(const nibble::moe::expert_store& store) const {
    const auto begin = std::chrono::steady_clock::now();
    try {
      nibble::moe::expert_file::write(cache_, of_, store);
      note("expert cache: " + cache_.string() + " written in " + seconds_since(begin));
    } catch (const std::exception& problem) {
      note("expert cache not written: " + std::string(problem.what()));
    }
  }
  /// In the folder for what programs remember, under a name of the checkpoint.
  [[nodiscard]] std::filesystem::path state_path() const {
    const auto variable = [](const char* name) -> std::filesystem::path {
      const char* value = std::getenv(name);
      return value != nullptr && value[0] == '/' ? value : "";
    };
    std::filesystem::path folder = variable("XDG_STATE_HOME");
    if (folder.empty())
      if (const auto home = variable("HOME"); !home.empty()) folder = home / ".local/state";
    if (folder.empty()) {
      note("which experts are in use is not saved: neither XDG_STATE_HOME nor HOME is set");
      return {};
    }
    char name[64];
    std::snprintf(name, sizeof name, "%016llx%016llx.worth", static_cast<unsigned long long>(of_.value()[0]),
                  static_cast<unsigned long long>(of_.value()[1]));
    return folder / "nibble" / name;
  }
  [[nodiscard]] std::string megabytes() const {
    return std::to_string(static_cast<std::uint64_t>(count_) * slot_bytes_ / 1'000'000) + " MB";
  }
  [[nodiscard]] static std::string seconds_since(std::chrono::steady_clock::time_point begin) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2f s",
                  std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    return text;
  }

  expert_keeping keeping_;
  int count_;
  std::size_t slot_bytes_;
  note_taker note_;
  nibble::io::fingerprint of_;
  std::filesystem::path cache_, worth_;
  int packed_ = 0;
};

}  // namespace qwen3_moe
