// SPDX-License-Identifier: Apache-2.0
/// \file
/// Private to http_server.cpp: one client's connection, a state machine on the I/O thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <deque>
#include <iterator>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "http_exchange_state.hpp"
#include "http_server.hpp"

namespace qwen3_moe::http_detail {

namespace net = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;
using net::ip::tcp;
using std::chrono::milliseconds;

inline constexpr std::size_t read_ahead_bytes = 64 * 1024;          // pipelined requests that may wait
inline constexpr std::size_t total_body_bytes = 256 * 1024 * 1024;  // all request bodies in memory together
inline constexpr std::size_t linger_bytes = 64 * 1024 * 1024;  // read and forgotten after an early refusal
inline constexpr milliseconds linger_time{2'000};

inline std::string lower(std::string_view text) {
  std::string result(text);
  for (auto& c : result)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return result;
}

inline bool is_ip_literal(const std::string& host) {
  error_code ec;
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  net::ip::make_address(bracketed ? host.substr(1, host.size() - 2) : host, ec);
  return !ec;
}

class connection;

// What all connections of a server share. All but `io` belongs to the I/O thread.
struct context {
  context(http_options o, http_handler h, http_error_body e)
      : options(std::move(o)), handler(std::move(h)), error_body(std::move(e)) {}
  bool host_allowed(std::string_view host_value) const;
  /// A web page may call when it comes from this machine, from the host it calls, or from an allowed name.
  bool origin_allowed(std::string_view origin, std::string_view host_value) const;

  http_options options;
  http_handler handler;
  http_error_body error_body;
  // Connections leave this set when `io` drops its last handlers, so it outlives `io`.
  std::unordered_set<connection*> open;
  std::atomic<std::size_t> open_count{0};
  std::size_t body_bytes = 0;
  bool closing = false;
  net::io_context io{1};
};

class connection : public std::enable_shared_from_this<connection> {
 public:
  connection(context& server, tcp::socket socket)
      : server_(server),
        socket_(std::move(socket)),
        read_deadline_(server.io),
        write_deadline_(server.io),
        ping_(server.io) {
    server_.open.insert(this);
    server_.open_count = server_.open.size();
  }
  ~connection() {
    server_.body_bytes -= body_bytes_;
    server_.open.erase(this);
    server_.open_count = server_.open.size();
  }

  void start() {
    error_code ec;
    socket_.set_option(tcp::no_delay(true), ec);
    next_request();
  }

  // Too many connections: one sentence, then close.
  void refuse(int status, std::string_view message) {
    phase_ = phase::answering;
    respond_and_close(status, message);
  }

  const http_limits& limits() const { return server_.options.limits; }
  net::io_context& io() { return server_.io; }

  void send_piece(const std::shared_ptr<exchange_state>& state, std::string bytes) {
    if (state != state_ || phase_ != phase::answering) return;
    queue(std::move(bytes));
  }
  void begin_pings(const std::shared_ptr<exchange_state>& state, std::string ping) {
    if (state != state_) return;
    ping_text_ = std::move(ping);
    arm_ping();
  }
  void complete(const std::shared_ptr<exchange_state>& state, bool keep_alive) {
    if (state != state_ || phase_ != phase::answering) return;
    if (!keep_alive) close_after_ = true;
    ping_.cancel();
    ping_text_.clear();
    answer_complete_ = true;
    if (out_.empty()) answered();
  }
  void abandon(const std::shared_ptr<exchange_state>& state) {
    if (state == state_ && phase_ == phase::answering && !answer_complete_) close();
  }

  void close() {
    if (phase_ == phase::closed) return;
    phase_ = phase::closed;
    error_code ec;
    socket_.close(ec);
    read_deadline_.cancel();
    write_deadline_.cancel();
    ping_.cancel();
    out_.clear();
    if (state_) state_->disconnect();
  }
  void close_when_answered() {
    close_after_ = true;
    if (phase_ == phase::reading && !started_) close();
  }

 private:
  enum class phase { reading, answering, lingering, closed };

  void next_request() {
    phase_ = phase::reading;
    parser_.emplace();
    parser_->header_limit(static_cast<std::uint32_t>(limits().header_bytes));
    parser_->body_limit(limits().body_bytes);
    parser_->eager(false);
    header_done_ = started_ = answer_complete_ = false;
    state_.reset();
    server_.body_bytes -= std::exchange(body_bytes_, 0);
    arm_read_deadline(first_ ? limits().header_timeout : limits().idle_timeout);
    first_ = false;
    if (buffer_.size() > 0) feed();
    read_some();
  }

  void read_some() {
    if (reading_ || phase_ == phase::closed || saw_eof_) return;
    if (phase_ == phase::answering && buffer_.size() >= read_ahead_bytes) return;
    reading_ = true;
    socket_.async_read_some(
        buffer_.prepare(read_ahead_bytes),
        [self = shared_from_this()](error_code ec, std::size_t bytes) { self->on_read(ec, bytes); });
  }

  void on_read(error_code ec, std::size_t bytes) {
    reading_ = false;
    if (phase_ == phase::closed) return;
    if (ec) {
      saw_eof_ = true;
      if (phase_ != phase::answering || ec != net::error::eof) return close();
      // A client that shuts its side down cannot be told from one that left: what it asked for is cancelled,
      // and an answer that is ready anyway is still sent.
      close_after_ = true;
      if (state_) state_->disconnect();
      return;
    }
    if (phase_ == phase::lingering) {
      lingered_ += bytes;
      if (lingered_ > linger_bytes) return close();
      return read_some();
    }
    buffer_.commit(bytes);
    if (phase_ == phase::reading) feed();
    read_some();
  }

  void feed() {
    if (!started_ && buffer_.size() > 0) {
      started_ = true;
      arm_read_deadline(limits().header_timeout);
    }
    while (phase_ == phase::reading && buffer_.size() > 0) {
      error_code ec;
      const auto used = parser_->put(buffer_.data(), ec);
      buffer_.consume(used);
      if (ec == http::error::need_more) ec = {};
      if (ec) return refuse_parse(ec);
      if (parser_->is_header_done() && !header_done_ && !on_header()) return;
      account_body();
      if (phase_ != phase::reading) return;
      if (parser_->is_done()) return dispatch();
      if (used == 0) break;
    }
    // The parser's own limits leave out what stands between the parts of a chunked body, and it takes nothing
    // of that before it is whole.
    if (phase_ == phase::reading && buffer_.size() > limits().header_bytes)
      respond_and_close(400, "malformed HTTP: a chunk's size line or the trailer is longer than " +
                                 std::to_string(limits().header_bytes) + " bytes");
  }

  // False when the request was refused.
  bool on_header() {
    header_done_ = true;
    const auto& message = parser_->get();
    if (static_cast<std::size_t>(std::distance(message.begin(), message.end())) > limits().header_fields)
      return refuse_false(
          431, "the request has more than " + std::to_string(limits().header_fields) + " header fields");
    if (message.version() != 11 && message.version() != 10)
      return refuse_false(505, "only HTTP/1.1 and HTTP/1.0 are spoken here");
    if (message.count(http::field::transfer_encoding) && !parser_->chunked())
      return refuse_false(501, "the only transfer coding understood is chunked");
    if (message.count(http::field::content_encoding) && message[http::field::content_encoding] != "identity")
      return refuse_false(415, "compressed request bodies are not accepted; send the JSON as it is");
    const auto hosts = message.count(http::field::host);
    if (hosts > 1 || (hosts == 0 && message.version() == 11))
      return refuse_false(400, "the request needs exactly one Host header field");
    if (hosts == 1 && !server_.host_allowed(message[http::field::host]))
      return refuse_false(403,
                          "this Host is not served; use localhost or an IP address, or start the server with "
                          "--allow-host NAME");
    if (message.count(http::field::origin) &&
        !server_.origin_allowed(message[http::field::origin], message[http::field::host]))
      return refuse_false(403,
                          "requests from web pages of other origins are refused; start the server with "
                          "--allow-host NAME to allow one");
    if (const auto expect = message[http::field::expect]; !expect.empty()) {
      if (lower({expect.data(), expect.size()}) != "100-continue")
        return refuse_false(417, "unknown expectation");
      if (message.version() == 11 && !parser_->is_done() && buffer_.size() == 0)
        queue("HTTP/1.1 100 Continue\r\n\r\n");
    }
    parser_->eager(true);
    arm_read_deadline(limits().body_timeout);
    return true;
  }

  void account_body() {
    const auto now = parser_->get().body().size();
    server_.body_bytes += now - body_bytes_;
    body_bytes_ = now;
    if (server_.body_bytes > total_body_bytes)
      respond_and_close(503, "too many large requests at once; try again later");
  }

  bool refuse_false(int status, std::string_view message) {
    respond_and_close(status, message);
    return false;
  }

  void refuse_parse(error_code ec) {
    if (ec == http::error::header_limit)
      return respond_and_close(
          431, "the request header is longer than " + std::to_string(limits().header_bytes) + " bytes");
    if (ec == http::error::body_limit)
      return respond_and_close(
          413, "the request body is longer than " + std::to_string(limits().body_bytes) + " bytes");
    respond_and_close(400, "malformed HTTP: " + ec.message());
  }

  void dispatch();

  void respond_and_close(int status, std::string_view message);

  void queue(std::string bytes) {
    if (phase_ == phase::closed || bytes.empty()) return;
    out_.push_back(std::move(bytes));
    write_some();
  }

  void write_some() {
    if (writing_ || out_.empty() || phase_ == phase::closed) return;
    writing_ = true;
    write_deadline_.expires_after(limits().write_stall);
    write_deadline_.async_wait([weak = weak_from_this()](error_code ec) {
      const auto self = weak.lock();
      if (!ec && self && self->writing_ &&
          self->write_deadline_.expiry() <= net::steady_timer::clock_type::now())
        self->close();
    });
    const auto& front = out_.front();
    socket_.async_write_some(
        net::buffer(front.data() + out_offset_, front.size() - out_offset_),
        [self = shared_from_this()](error_code ec, std::size_t bytes) { self->on_written(ec, bytes); });
  }

  void on_written(error_code ec, std::size_t bytes) {
    writing_ = false;
    write_deadline_.cancel();
    if (phase_ == phase::closed) return;
    if (ec) return close();
    out_offset_ += bytes;
    if (out_offset_ == out_.front().size()) {
      out_.pop_front();
      out_offset_ = 0;
    }
    if (state_) {
      auto& unsent = state_->unsent;
      unsent -= std::min(bytes, unsent.load());
      if (unsent <= limits().unsent_bytes / 2) state_->writable();
    }
    if (!ping_text_.empty()) arm_ping();
    if (!out_.empty()) return write_some();
    if (answer_complete_) answered();
  }

  void answered() {
    if (phase_ == phase::closed || phase_ == phase::lingering) return;
    if (close_after_ || server_.closing) return linger();
    next_request();
  }

  // Closing with unread input would reset the connection and take the answer with it.
  void linger() {
    phase_ = phase::lingering;
    error_code ec;
    socket_.shutdown(tcp::socket::shutdown_send, ec);
    if (ec || saw_eof_) return close();
    buffer_.consume(buffer_.size());
    arm_read_deadline(linger_time);
    read_some();
  }

  void arm_read_deadline(milliseconds limit) {
    read_deadline_.expires_after(limit);
    read_deadline_.async_wait([weak = weak_from_this()](error_code ec) {
      const auto self = weak.lock();
      if (ec || !self || self->read_deadline_.expiry() > net::steady_timer::clock_type::now()) return;
      if (self->phase_ == phase::lingering) return self->close();
      if (self->phase_ != phase::reading) return;
      if (!self->started_) return self->close();
      self->respond_and_close(408, "the request took too long to arrive");
    });
  }

  void arm_ping() {
    ping_.expires_after(limits().keep_alive_every);
    ping_.async_wait([weak = weak_from_this()](error_code ec) {
      const auto self = weak.lock();
      if (ec || !self || self->ping_text_.empty() ||
          self->ping_.expiry() > net::steady_timer::clock_type::now())
        return;
      if (self->out_.empty()) self->queue(self->ping_text_);
      self->arm_ping();
    });
  }

  context& server_;
  tcp::socket socket_;
  net::steady_timer read_deadline_;
  net::steady_timer write_deadline_;
  net::steady_timer ping_;
  boost::beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  std::deque<std::string> out_;
  std::size_t out_offset_ = 0;
  std::shared_ptr<exchange_state> state_;
  std::string ping_text_;
  std::size_t body_bytes_ = 0;
  std::size_t lingered_ = 0;
  phase phase_ = phase::reading;
  bool first_ = true;
  bool started_ = false;
  bool header_done_ = false;
  bool reading_ = false;
  bool writing_ = false;
  bool saw_eof_ = false;
  bool close_after_ = false;
  bool answer_complete_ = false;
};

inline void connection::respond_and_close(int status, std::string_view message) {
  phase_ = phase::answering;
  read_deadline_.cancel();
  http::response<http::string_body> response;
  response.version(11);
  response.result(static_cast<unsigned>(status));
  response.set(http::field::content_type, "application/json");
  response.keep_alive(false);
  response.body() = server_.error_body(status, message);
  response.prepare_payload();
  std::ostringstream text;
  text << response.base();
  close_after_ = answer_complete_ = true;
  queue(text.str() + response.body());
}

}  // namespace qwen3_moe::http_detail
