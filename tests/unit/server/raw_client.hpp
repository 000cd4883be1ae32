// SPDX-License-Identifier: Apache-2.0
/// \file
/// A plain TCP client for tests: sends any bytes, understands just enough HTTP to read answers.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <boost/json/parse.hpp>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace qwen3_moe::testing {

struct raw_response {
  int status = 0;  ///< 0: the connection ended before a status line
  std::map<std::string, std::string> fields;
  std::string body;
  bool complete = false;  ///< the body came to its declared end

  boost::json::value json() const { return boost::json::parse(body); }
  /// error.message, error.param, … of an error body; "null" for null.
  std::string error(std::string_view key) const {
    const auto parsed = json();
    const auto& value = parsed.at("error").at(boost::json::string_view(key.data(), key.size()));
    return value.is_string() ? std::string(value.get_string()) : std::string("null");
  }
};

/// Splits a server-sent event stream into the data of its events; comments are kept apart.
struct event_stream {
  std::vector<std::string> data;
  std::vector<std::string> comments;

  explicit event_stream(std::string_view body) {
    while (!body.empty()) {
      const auto end = body.find("\n\n");
      if (end == std::string_view::npos) throw std::runtime_error("an event without its end");
      const auto event = body.substr(0, end);
      body.remove_prefix(end + 2);
      if (event.substr(0, 6) == "data: ")
        data.emplace_back(event.substr(6));
      else if (!event.empty() && event[0] == ':')
        comments.emplace_back(event);
      else
        throw std::runtime_error("a line that is neither data nor comment");
      if (event.find('\n') != std::string_view::npos) throw std::runtime_error("an event of several lines");
    }
  }
};

class raw_client {
 public:
  explicit raw_client(std::uint16_t port, int receive_seconds = 20)
      : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    timeval limit{receive_seconds, 0};
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ::setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
      throw std::runtime_error("cannot connect");
  }
  ~raw_client() { close(); }
  raw_client(const raw_client&) = delete;
  raw_client& operator=(const raw_client&) = delete;

  /// False when the server closed first.
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const auto sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }

  bool get(const std::string& path, const std::string& fields = {}) {
    return send("GET " + path + " HTTP/1.1\r\nHost: localhost\r\n" + fields + "\r\n");
  }
  bool post(const std::string& path, const std::string& body, const std::string& fields = {}) {
    return send("POST " + path +
                " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: " +
                std::to_string(body.size()) + "\r\n" + fields + "\r\n" + body);
  }

  /// One more piece of input; false at the end or after the time limit.
  bool receive() {
    char block[1 << 14];
    const auto got = ::recv(socket_, block, sizeof block, 0);
    if (got <= 0) return false;
    input_.append(block, static_cast<std::size_t>(got));
    return true;
  }

  /// Reads until `text` is in the input, which stays there.
  bool wait_for(std::string_view text) {
    while (input_.find(text) == std::string::npos)
      if (!receive()) return false;
    return true;
  }
  const std::string& input() const { return input_; }

  raw_response response(bool head = false) {
    raw_response result;
    do {
      while (input_.find("\r\n\r\n") == std::string::npos)
        if (!receive()) return result;
      result = {};
      const auto end = input_.find("\r\n\r\n");
      const auto header = input_.substr(0, end + 2);
      input_.erase(0, end + 4);
      if (header.rfind("HTTP/1.", 0) != 0) throw std::runtime_error("no status line: " + header);
      result.status = std::stoi(header.substr(9, 3));
      for (std::size_t at = header.find("\r\n") + 2; at < header.size();) {
        const auto stop = header.find("\r\n", at);
        const auto colon = header.find(": ", at);
        auto name = header.substr(at, colon - at);
        for (auto& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
        result.fields[name] = header.substr(colon + 2, stop - colon - 2);
        at = stop + 2;
      }
    } while (result.status == 100);
    if (head || result.status == 204) {
      result.complete = true;
    } else if (result.fields.count("content-length")) {
      const auto size = std::stoul(result.fields["content-length"]);
      while (input_.size() < size)
        if (!receive()) return result;
      result.body = input_.substr(0, size);
      input_.erase(0, size);
      result.complete = true;
    } else if (result.fields.count("transfer-encoding") && result.fields["transfer-encoding"] == "chunked") {
      read_chunks(result);
    } else {
      while (receive()) {
      }
      result.body.swap(input_);
      result.complete = true;
    }
    return result;
  }

  /// Reads to the end of the connection. True when the server ended it before the time limit.
  bool closed() {
    char block[1 << 14];
    for (;;) {
      const auto got = ::recv(socket_, block, sizeof block, 0);
      if (got == 0) return true;
      if (got < 0) return errno != EAGAIN && errno != EWOULDBLOCK;
    }
  }

  void half_close() { ::shutdown(socket_, SHUT_WR); }
  void reset() {
    const linger now{1, 0};
    ::setsockopt(socket_, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    close();
  }
  void close() {
    if (socket_ >= 0) ::close(socket_);
    socket_ = -1;
  }

 private:
  void read_chunks(raw_response& result) {
    for (;;) {
      std::size_t line;
      while ((line = input_.find("\r\n")) == std::string::npos)
        if (!receive()) return;
      const auto size = std::stoul(input_.substr(0, line), nullptr, 16);
      while (input_.size() < line + 2 + size + 2)
        if (!receive()) return;
      result.body += input_.substr(line + 2, size);
      input_.erase(0, line + 2 + size + 2);
      if (size == 0) {
        result.complete = true;
        return;
      }
    }
  }

  int socket_;
  std::string input_;
};

}  // namespace qwen3_moe::testing
