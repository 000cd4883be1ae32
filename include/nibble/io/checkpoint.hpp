// SPDX-License-Identifier: Apache-2.0
/// \file
/// A checkpoint folder: one safetensors file, or shards with an index, as one set of tensors.
#pragma once

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "nibble/core/checked.hpp"
#include "nibble/core/error.hpp"
#include "nibble/io/safetensors.hpp"
#include "nibble/io/shard_index.hpp"

namespace nibble::io {

/// A tensor, or a contiguous part of one, and the file it is in.
struct tensor_slice {
  safetensors_file* source = nullptr;
  const tensor_entry* tensor = nullptr;
  std::string name;         ///< of the whole tensor
  tensor_shape shape;       ///< of the slice
  std::uint64_t begin = 0;  ///< first byte inside the tensor
  std::uint64_t bytes = 0;

  [[nodiscard]] dtype type() const { return tensor->type; }
  /// Copies bytes [offset, offset + out.size()) of the slice.
  void read(std::uint64_t offset, std::span<std::byte> out) const {
    source->read(*tensor, begin + offset, out);
  }
  /// The slice's bytes in the file's mapping, aligned to nothing.
  [[nodiscard]] std::span<const std::byte> map() const { return source->map(*tensor).subspan(begin, bytes); }
};

/// Opens every shard and checks index and headers against each other before a tensor is read:
/// each shard listed is there and inside the folder, each tensor is in the shard the index names, the total
/// agrees, and no tensor is in two shards unless the index says which one counts.
class checkpoint {
 public:
  static constexpr std::uint64_t index_limit_bytes = 100'000'000;

  explicit checkpoint(const std::filesystem::path& folder) : folder_(folder) {
    std::error_code unreadable;
    if (!std::filesystem::is_directory(folder, unreadable))
      throw format_error(folder.string() + ": not a folder" +
                         (unreadable ? ": " + unreadable.message() : ""));
    const auto index_path = folder / "model.safetensors.index.json";
    const auto single_path = folder / "model.safetensors";
    if (file::listed(index_path))
      open_shards(index_path);
    else if (file::listed(single_path))
      open_single(single_path);
    else
      throw format_error(
          folder.string() +
          ": holds neither model.safetensors nor model.safetensors.index.json; give the folder of a "
          "Hugging Face checkpoint in safetensors form");
  }

  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  /// Names in order.
  [[nodiscard]] const std::map<std::string, std::size_t, std::less<>>& names() const { return file_of_; }
  /// What is odd but harmless, one sentence each.
  [[nodiscard]] const std::vector<std::string>& warnings() const { return warnings_; }

  [[nodiscard]] std::optional<tensor_slice> find(std::string_view name) {
    const auto it = file_of_.find(name);
    if (it == file_of_.end()) return std::nullopt;
    safetensors_file& source = *files_[it->second];
    const tensor_entry* tensor = source.find(name);
    return tensor_slice{&source, tensor, it->first, tensor->shape, 0, tensor->bytes};
  }

  /// The shard the index names for a tensor that the shard does not hold, or nothing.
  [[nodiscard]] const std::string* promised_shard(std::string_view name) const {
    const auto it = absent_.find(name);
    return it == absent_.end() ? nullptr : &it->second;
  }

  /// Item `i` of a tensor stacked along its first dimension.
  [[nodiscard]] static std::optional<tensor_slice> item(const tensor_slice& stack, std::uint64_t i) {
    if (stack.shape.empty() || i >= stack.shape[0]) return std::nullopt;
    tensor_slice slice = stack;
    slice.shape.erase(slice.shape.begin());
    slice.bytes = stack.bytes / stack.shape[0];
    slice.begin = stack.begin + i * slice.bytes;
    return slice;
  }

  /// Rows [first, first + count) of a tensor; nothing when it has not that many.
  [[nodiscard]] static std::optional<tensor_slice> rows(const tensor_slice& whole, std::uint64_t first,
                                                        std::uint64_t count) {
    if (whole.shape.empty() || first > whole.shape[0] || count > whole.shape[0] - first) return std::nullopt;
    tensor_slice slice = whole;
    const std::uint64_t row_bytes = whole.shape[0] == 0 ? 0 : whole.bytes / whole.shape[0];
    slice.shape[0] = count;
    slice.begin = whole.begin + first * row_bytes;
    slice.bytes = count * row_bytes;
    return slice;
  }

 private:
  void open_single(const std::filesystem::path& path) {
    files_.push_back(std::make_unique<safetensors_file>(path));
    for (const auto& [name, entry] : files_.back()->tensors()) file_of_.emplace(name, 0);
    if (file_of_.empty()) throw format_error(path.string() + ": holds no tensors");
  }

  void open_shards(const std::filesystem::path& index_path) {
    const std::string what = index_path.string();
    const shard_index index = parse_shard_index(file::read_text(index_path, index_limit_bytes), what);
    std::map<std::string, std::size_t> opened;
    std::string missing;
    std::size_t missing_shards = 0;
    for (const auto& [name, shard] : index.shard_of) opened.emplace(shard, 0);
    for (const auto& [shard, unused] : opened) {
      std::error_code failure;
      const auto type = std::filesystem::status(folder_ / shard, failure).type();
      if (type != std::filesystem::file_type::not_found) continue;
      if (++missing_shards <= 8) missing += (missing.empty() ? "" : ", ") + shard;
    }
    if (missing_shards > 8) missing += " and " + std::to_string(missing_shards - 8) + " more";
    if (missing_shards > 0)
      throw format_error(what + ": lists shards that are not in the folder: " + missing + "; download them");
    const auto real_folder = canonical(folder_);
    for (auto& [shard, position] : opened) {
      check_inside(real_folder, shard);
      position = files_.size();
      files_.push_back(std::make_unique<safetensors_file>(folder_ / shard));
    }
    std::uint64_t total = 0;
    for (const auto& [name, shard] : index.shard_of) {
      const std::size_t position = opened[shard];
      const tensor_entry* tensor = files_[position]->find(name);
      if (tensor == nullptr) {
        absent_.emplace(name, shard);
        continue;
      }
      total += tensor->bytes;
      file_of_.emplace(name, position);
    }
    for (const auto& [name, shard] : absent_)
      warnings_.push_back("the index puts " + name + " into " + shard + ", which does not hold it");
    report_unlisted(index, opened);
    if (index.total_bytes && *index.total_bytes != total && absent_.empty())
      throw format_error(what + ": metadata.total_size is " + std::to_string(*index.total_bytes) +
                         ", the tensors listed add up to " + std::to_string(total));
    if (file_of_.empty() && !absent_.empty())
      throw format_error(what + ": none of its " + std::to_string(absent_.size()) +
                         " tensors is in the shard it names, the first being " + absent_.begin()->first +
                         " in " + absent_.begin()->second + "; do index and shards belong together?");
    if (file_of_.empty()) throw format_error(what + ": lists no tensors");
  }

  static std::filesystem::path canonical(const std::filesystem::path& path) {
    std::error_code failure;
    auto real = std::filesystem::canonical(path, failure);
    if (failure) throw format_error(path.string() + ": cannot be opened: " + failure.message());
    return real;
  }

  /// A link inside the folder is fine where it stays inside; the hub's own cache links into ../../blobs.
  void check_inside(const std::filesystem::path& real_folder, const std::string& shard) const {
    const auto real = canonical(folder_ / shard);
    const auto blobs = real_folder.parent_path().parent_path() / "blobs";
    if (real.parent_path() != real_folder && real.parent_path() != blobs)
      throw format_error((folder_ / shard).string() + ": is a link to " + real.string() +
                         ", outside the checkpoint; copy the file into the folder");
  }

  void report_unlisted(const shard_index& index, const std::map<std::string, std::size_t>& opened) {
    for (const auto& [shard, position] : opened)
      for (const auto& [name, entry] : files_[position]->tensors())
        if (!index.shard_of.contains(name))
          warnings_.push_back(shard + " holds " + name + ", which the index does not list; it is not used");
    std::error_code failure;  // a folder that may be entered but not listed has nothing to report
    for (std::filesystem::directory_iterator entry(folder_, failure), end; !failure && entry != end;
         entry.increment(failure)) {
      const std::string name = entry->path().filename().string();
      if (name.ends_with(".safetensors") && !opened.contains(name))
        warnings_.push_back(name +
                            " is in the folder, but the index does not list it; its tensors are not used");
    }
    std::sort(warnings_.begin(), warnings_.end());
  }

  std::filesystem::path folder_;
  std::vector<std::unique_ptr<safetensors_file>> files_;
  std::map<std::string, std::size_t, std::less<>> file_of_;
  std::map<std::string, std::string, std::less<>> absent_;
  std::vector<std::string> warnings_;
};

}  // namespace nibble::io
