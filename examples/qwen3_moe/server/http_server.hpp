// SPDX-License-Identifier: Apache-2.0
/// \file
/// HTTP/1.1 without the names of the library that speaks it. The implementation is one translation unit.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace qwen3_moe {

struct http_limits {
  std::size_t header_bytes = 16 * 1024;              ///< request line and fields together; more is 431
  std::size_t header_fields = 100;                   ///< more is 431
  std::size_t body_bytes = 8 * 1024 * 1024;          ///< declared or chunked; more is 413
  std::size_t connections = 1024;                    ///< one more is told 503 and closed
  std::size_t unsent_bytes = 256 * 1024;             ///< a stream asks its source to wait above this
  std::chrono::milliseconds idle_timeout{60'000};    ///< between two requests of a connection
  std::chrono::milliseconds header_timeout{10'000};  ///< first byte to the end of the fields; then 408
  std::chrono::milliseconds body_timeout{30'000};    ///< end of the fields to the end of the body; then 408
  std::chrono::milliseconds write_stall{30'000};  ///< no byte taken by the client; then the connection is cut
  std::chrono::milliseconds keep_alive_every{
      15'000};  ///< a comment is sent on a stream that is silent so long
};

struct http_options {
  std::string host = "127.0.0.1";  ///< address or name to listen on
  std::uint16_t port = 8080;       ///< 0 takes any free one
  /// Names a Host or Origin field may hold besides localhost, `host` and IP addresses, in lower case.
  std::vector<std::string> allowed_hosts;
  http_limits limits;
};

struct http_request {
  std::string method;  ///< as sent: "GET", "POST", …
  std::string path;    ///< target without its query
  std::string body;
  std::vector<std::pair<std::string, std::string>> fields;  ///< names in lower case

  /// The first field of this lower-case name, or an empty text.
  std::string_view field(std::string_view name) const {
    for (const auto& [key, value] : fields)
      if (key == name) return value;
    return {};
  }
};

struct http_response {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> fields;  ///< never made from request values
};

/// One request and the way to answer it. Any thread may call; calls of one thread keep their order. Either
/// `send` once, or `start_stream`, `write`…, `end_stream`. An exchange dropped unanswered closes the
/// connection. After a disconnect nothing reaches the client for certain. An exchange must not outlive its
/// server.
class http_exchange {
 public:
  virtual ~http_exchange() = default;
  virtual const http_request& request() const = 0;

  virtual void send(http_response response) = 0;

  /// Sends status and fields; the body follows in pieces. With `keep_alive`, that text is sent whenever the
  /// stream has been silent for http_limits::keep_alive_every.
  virtual void start_stream(http_response head, std::string keep_alive) = 0;
  virtual void write(std::string piece) = 0;
  virtual void end_stream() = 0;

  /// True while more than http_limits::unsent_bytes wait for the client. `on_writable` is then called once it
  /// took enough, from the I/O thread.
  virtual bool congested() const = 0;
  virtual void on_writable(std::function<void()> call) = 0;

  /// The client closed (also half-closed) its side, broke off, stalled, or the server stops. `call` runs
  /// once, on the I/O thread, or at once in the caller's when it happened already; not after the answer is
  /// complete.
  virtual void on_disconnect(std::function<void()> call) = 0;
  virtual bool disconnected() const = 0;
};

/// Called on the I/O thread with each complete request; must hand the work to another thread.
using http_handler = std::function<void(std::shared_ptr<http_exchange>)>;

/// What the server itself answers, for bodies in the API's own shape.
using http_error_body = std::function<std::string(int status, std::string_view message)>;

class http_server {
 public:
  /// Binds and listens, so clients can connect from here on. Throws nibble::format_error in one sentence when
  /// the address cannot be had.
  http_server(http_options options, http_handler handler, http_error_body error_body);
  /// Stops.
  ~http_server();
  http_server(const http_server&) = delete;
  http_server& operator=(const http_server&) = delete;

  /// Starts the I/O thread.
  void start();
  /// Accepts no more connections; those there are go on, and are closed after their present answer.
  void close_listener();
  /// Cuts every connection and joins the I/O thread. Calling again does nothing.
  void stop();

  std::uint16_t port() const;
  std::size_t connections() const;

  struct impl;

 private:
  std::unique_ptr<impl> impl_;
};

/// The host part of a Host or Origin value ("[::1]:8080", "http://name:80"), lower case; empty when
/// malformed.
std::string host_of(std::string_view value);

}  // namespace qwen3_moe
