// SPDX-License-Identifier: Apache-2.0
// The only translation unit that sees Boost.Beast and Asio. One I/O thread touches all connection state, so
// there is nothing to lock but the few members that an exchange shares with other threads.
#include "http_server.hpp"

#if defined(__SANITIZE_THREAD__) && defined(__GNUC__) && !defined(__clang__)
// Asio's fences are beyond the sanitizer's sight; what they order is ordered by its queue's mutex as well.
#pragma GCC diagnostic ignored "-Wtsan"
#endif

#include <algorithm>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <deque>
#include <iterator>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <unordered_set>

#include "nibble/core/error.hpp"

namespace qwen3_moe {
namespace {

namespace net = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;
using net::ip::tcp;
using std::chrono::milliseconds;

constexpr std::size_t read_ahead_bytes = 64 * 1024;          // pipelined requests that may wait
constexpr std::size_t total_body_bytes = 256 * 1024 * 1024;  // all request bodies in memory together
constexpr std::size_t linger_bytes = 64 * 1024 * 1024;       // read and forgotten after an early refusal
constexpr milliseconds linger_time{2'000};

std::string lower(std::string_view text) {
  std::string result(text);
  for (auto& c : result)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return result;
}

bool is_ip_literal(const std::string& host) {
  error_code ec;
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  net::ip::make_address(bracketed ? host.substr(1, host.size() - 2) : host, ec);
  return !ec;
}

class connection;

}  // namespace

struct http_server::impl {
  impl(http_options o, http_handler h, http_error_body e)
      : options(std::move(o)),
        handler(std::move(h)),
        error_body(std::move(e)),
        acceptor(io),
        accept_retry(io) {}

  void listen();
  void accept();
  bool host_allowed(std::string_view host_value) const;

  http_options options;
  http_handler handler;
  http_error_body error_body;
  // Connections leave this set when `io` drops its last handlers, so it outlives `io`.
  std::unordered_set<connection*> open;
  std::atomic<std::size_t> open_count{0};
  std::size_t body_bytes = 0;
  bool closing = false;  // I/O thread
  net::io_context io{1};
  tcp::acceptor acceptor;
  net::steady_timer accept_retry;
  std::uint16_t port = 0;
  std::mutex stop_mutex;
  std::thread thread;
};

namespace {

// What an exchange and its connection share.
struct exchange_state {
  std::atomic<bool> gone{false};
  std::atomic<bool> complete{false};
  std::atomic<std::size_t> unsent{0};
  std::mutex mutex;
  std::function<void()> on_disconnect;
  std::function<void()> on_writable;

  // What the calls hold is let go of after the lock.
  void disconnect() {
    std::function<void()> call, unused;
    {
      const std::lock_guard lock(mutex);
      if (complete || gone.exchange(true)) return;
      call.swap(on_disconnect);
      unused.swap(on_writable);
    }
    if (call) call();
  }
  void finish() {
    std::function<void()> unused, unused_too;
    const std::lock_guard lock(mutex);
    complete = true;
    unused.swap(on_disconnect);
    unused_too.swap(on_writable);
  }
  void writable() {
    std::function<void()> call;
    {
      const std::lock_guard lock(mutex);
      call.swap(on_writable);
    }
    if (call) call();
  }
};

class connection : public std::enable_shared_from_this<connection> {
 public:
  connection(http_server::impl& server, tcp::socket socket)
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
      if (used == 0) return;
    }
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
    if (message.count(http::field::origin) && !server_.host_allowed(message[http::field::origin]))
      return refuse_false(403, "requests from web pages of other origins are refused");
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

  http_server::impl& server_;
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

class exchange final : public http_exchange {
 public:
  exchange(std::shared_ptr<connection> owner, std::shared_ptr<exchange_state> state, http_request request,
           unsigned version, bool keep_alive)
      : connection_(std::move(owner)),
        state_(std::move(state)),
        request_(std::move(request)),
        version_(version),
        keep_alive_(keep_alive) {}

  ~exchange() override {
    // The last hold on a connection is given up on the I/O thread, which owns its state.
    auto& io = connection_->io();
    net::post(io, [owner = std::move(connection_), state = state_] { owner->abandon(state); });
  }

  const http_request& request() const override { return request_; }

  void send(http_response response) override {
    auto head = header(response);
    head.content_length(response.body.size());
    auto bytes = text_of(head);
    if (request_.method != "HEAD") bytes += response.body;
    push(std::move(bytes));
    end();
  }

  void start_stream(http_response response, std::string keep_alive) override {
    auto head = header(response);
    chunked_ = version_ == 11;
    if (chunked_)
      head.chunked(true);
    else
      keep_alive_ = false;
    head.keep_alive(keep_alive_);
    push(text_of(head));
    if (keep_alive.empty()) return;
    net::post(connection_->io(),
              [owner = connection_, state = state_, ping = frame(std::move(keep_alive))]() mutable {
                owner->begin_pings(state, std::move(ping));
              });
  }

  void write(std::string piece) override {
    if (!piece.empty()) push(frame(std::move(piece)));
  }

  void end_stream() override {
    if (chunked_) push("0\r\n\r\n");
    end();
  }

  bool congested() const override {
    return !disconnected() && state_->unsent > connection_->limits().unsent_bytes;
  }

  void on_writable(std::function<void()> call) override {
    {
      const std::lock_guard lock(state_->mutex);
      if (state_->gone || state_->complete) return;
      state_->on_writable = std::move(call);
    }
    if (!congested()) net::post(connection_->io(), [state = state_] { state->writable(); });
  }

  void on_disconnect(std::function<void()> call) override {
    {
      const std::lock_guard lock(state_->mutex);
      if (state_->complete) return;
      if (!state_->gone) {
        state_->on_disconnect = std::move(call);
        return;
      }
    }
    call();
  }

  bool disconnected() const override { return state_->gone; }

 private:
  using head_type = http::response<http::empty_body>;

  head_type header(const http_response& response) const {
    head_type head;
    head.version(version_);
    head.result(static_cast<unsigned>(response.status));
    if (!response.content_type.empty()) head.set(http::field::content_type, response.content_type);
    for (const auto& [name, value] : response.fields) head.set(name, value);
    head.keep_alive(keep_alive_);
    return head;
  }

  static std::string text_of(const head_type& head) {
    std::ostringstream out;
    out << head.base();
    return std::move(out).str();
  }

  std::string frame(std::string piece) const {
    if (!chunked_) return piece;
    std::ostringstream size;
    size << std::hex << piece.size();
    return size.str() + "\r\n" + piece + "\r\n";
  }

  void push(std::string bytes) {
    if (state_->complete) return;
    state_->unsent += bytes.size();
    net::post(connection_->io(), [owner = connection_, state = state_, bytes = std::move(bytes)]() mutable {
      owner->send_piece(state, std::move(bytes));
    });
  }

  void end() {
    state_->finish();
    net::post(connection_->io(),
              [owner = connection_, state = state_, keep = keep_alive_] { owner->complete(state, keep); });
  }

  std::shared_ptr<connection> connection_;
  std::shared_ptr<exchange_state> state_;
  http_request request_;
  unsigned version_;
  bool keep_alive_;
  bool chunked_ = false;
};

void connection::dispatch() {
  phase_ = phase::answering;
  read_deadline_.cancel();
  auto message = parser_->release();
  http_request request;
  request.method = std::string(message.method_string());
  request.path = std::string(message.target().substr(0, message.target().find('?')));
  for (const auto& item : message)
    request.fields.emplace_back(lower({item.name_string().data(), item.name_string().size()}),
                                std::string(item.value()));
  request.body = std::move(message.body());
  if (request.path.empty() || request.path.front() != '/')
    return respond_and_close(400, "the request target must be a path");
  state_ = std::make_shared<exchange_state>();
  server_.handler(std::make_shared<exchange>(shared_from_this(), state_, std::move(request),
                                             message.version(), message.keep_alive() && !close_after_));
}

void connection::respond_and_close(int status, std::string_view message) {
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

}  // namespace

void http_server::impl::listen() {
  const auto where = options.host + " port " + std::to_string(options.port);
  tcp::resolver resolver(io);
  error_code ec;
  auto host = options.host;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const auto found = resolver.resolve(host, std::to_string(options.port), tcp::resolver::passive, ec);
  if (ec || found.empty()) throw nibble::format_error("cannot listen on " + where + ": " + ec.message());
  const tcp::endpoint endpoint = *found.begin();
  acceptor.open(endpoint.protocol(), ec);
  if (!ec) acceptor.set_option(tcp::acceptor::reuse_address(true), ec);
  if (!ec) acceptor.bind(endpoint, ec);
  if (!ec) acceptor.listen(net::socket_base::max_listen_connections, ec);
  if (ec == net::error::address_in_use)
    throw nibble::format_error("cannot listen on " + where +
                               ": another program uses it; choose another with --port");
  if (ec) throw nibble::format_error("cannot listen on " + where + ": " + ec.message());
  port = acceptor.local_endpoint().port();
}

void http_server::impl::accept() {
  acceptor.async_accept([this](error_code ec, tcp::socket socket) {
    if (ec == net::error::operation_aborted || closing) return;
    if (ec) {
      // Out of file descriptors, most often: those who are here may leave in a moment.
      accept_retry.expires_after(milliseconds(100));
      accept_retry.async_wait([this](error_code stopped) {
        if (!stopped && !closing) accept();
      });
      return;
    }
    const bool full = open.size() >= options.limits.connections;
    const auto client = std::make_shared<connection>(*this, std::move(socket));
    if (full)
      client->refuse(503, "too many connections; try again later");
    else
      client->start();
    accept();
  });
}

bool http_server::impl::host_allowed(std::string_view value) const {
  const auto host = host_of(value);
  if (host.empty()) return false;
  // A page that rebinds its own name to this machine sends that name; it cannot make a browser send an
  // address.
  return host == "localhost" || is_ip_literal(host) || host == lower(options.host) ||
         std::find(options.allowed_hosts.begin(), options.allowed_hosts.end(), host) !=
             options.allowed_hosts.end();
}

http_server::http_server(http_options options, http_handler handler, http_error_body error_body)
    : impl_(std::make_unique<impl>(std::move(options), std::move(handler), std::move(error_body))) {
  impl_->listen();
}

http_server::~http_server() { stop(); }

void http_server::start() {
  impl_->accept();
  impl_->thread = std::thread([this] {
    const auto work = net::make_work_guard(impl_->io);
    impl_->io.run();
  });
}

void http_server::close_listener() {
  net::post(impl_->io, [this] {
    impl_->closing = true;
    error_code ec;
    impl_->acceptor.close(ec);
    const std::vector<connection*> all(impl_->open.begin(), impl_->open.end());
    for (auto* client : all) client->shared_from_this()->close_when_answered();
  });
}

void http_server::stop() {
  const std::lock_guard lock(impl_->stop_mutex);
  if (!impl_->thread.joinable()) return;
  net::post(impl_->io, [this] {
    impl_->closing = true;
    error_code ec;
    impl_->acceptor.close(ec);
    impl_->accept_retry.cancel();
    std::vector<std::shared_ptr<connection>> all;
    for (auto* client : impl_->open) all.push_back(client->shared_from_this());
    for (const auto& client : all) client->close();
    net::post(impl_->io, [this] { impl_->io.stop(); });
  });
  impl_->thread.join();
}

std::uint16_t http_server::port() const { return impl_->port; }
std::size_t http_server::connections() const { return impl_->open_count; }

std::string host_of(std::string_view value) {
  if (const auto scheme = value.find("://"); scheme != std::string_view::npos)
    value.remove_prefix(scheme + 3);
  if (value.empty() || value.find_first_of("/@ \t") != std::string_view::npos) return {};
  std::string_view host = value;
  std::string_view rest;
  if (value.front() == '[') {
    const auto end = value.find(']');
    if (end == std::string_view::npos) return {};
    host = value.substr(0, end + 1);
    rest = value.substr(end + 1);
  } else if (const auto colon = value.find(':'); colon != std::string_view::npos) {
    host = value.substr(0, colon);
    rest = value.substr(colon);
  }
  if (!rest.empty() &&
      (rest.front() != ':' || rest.find_first_not_of("0123456789", 1) != std::string_view::npos))
    return {};
  return lower(host);
}

}  // namespace qwen3_moe
