// SPDX-License-Identifier: Apache-2.0
// The only translation unit that sees Boost.Beast and Asio, with its private http_connection.hpp. One I/O
// thread touches all connection state, so there is nothing to lock but the few members that an exchange
// shares with other threads.
#include "http_server.hpp"

#if defined(__SANITIZE_THREAD__) && defined(__GNUC__) && !defined(__clang__)
// Asio's fences are beyond the sanitizer's sight; what they order is ordered by its queue's mutex as well.
#pragma GCC diagnostic ignored "-Wtsan"
#endif

#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <mutex>
#include <sstream>
#include <thread>
#include <vector>

#include "http_connection.hpp"
#include "nibble/core/error.hpp"

namespace qwen3_moe {

using namespace http_detail;

struct http_server::impl : context {
  impl(http_options o, http_handler h, http_error_body e)
      : context(std::move(o), std::move(h), std::move(e)), acceptor(io), accept_retry(io) {}

  void listen();
  void accept();

  tcp::acceptor acceptor;
  net::steady_timer accept_retry;
  std::uint16_t port = 0;
  std::mutex stop_mutex;
  std::thread thread;
};

namespace {

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

}  // namespace

void http_detail::connection::dispatch() {
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

bool http_detail::context::host_allowed(std::string_view value) const {
  const auto host = host_of(value);
  if (host.empty()) return false;
  // A page that rebinds its own name to this machine sends that name; it cannot make a browser send an
  // address.
  return host == "localhost" || is_ip_literal(host) || host == lower(options.host) ||
         std::find(options.allowed_hosts.begin(), options.allowed_hosts.end(), host) !=
             options.allowed_hosts.end();
}

bool http_detail::context::origin_allowed(std::string_view origin, std::string_view host_value) const {
  const auto page = host_of(origin);
  if (page.empty()) return false;
  // An address proves nothing here: any page can be served from one.
  return page == host_of(host_value) || page == "localhost" || page == "127.0.0.1" || page == "[::1]" ||
         std::find(options.allowed_hosts.begin(), options.allowed_hosts.end(), page) !=
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
