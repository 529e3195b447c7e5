// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/socket.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "core/check.hpp"

namespace distmoe::tcp {
namespace {

constexpr int kLongestPoll = 1000;  // milliseconds

std::string reason_of(int error) { return std::strerror(error); }

/// Small messages leave at once, and a host that vanished is noticed some day.
void configure(const Socket& socket) {
  const int yes = 1;
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
  setsockopt(socket.fd(), SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof(yes));
}

/// NOTE: a group takes two descriptors a peer, and a process has 1024 where nobody says more.
Socket own(int fd) {
  DISTMOE_CHECK(fd >= 0 || (errno != EMFILE && errno != ENFILE), kUnsupported,
                "the tcp engine cannot open another connection: ", reason_of(errno),
                "; it needs two for every other rank (ulimit -n)");
  return Socket(fd);
}

Socket open_socket(int family) {
  return own(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
}

/// Not open, with errno, where this family has no such port.
Socket listen_in(int family, int port) {
  Socket listener = open_socket(family);
  if (!listener.is_open()) return listener;
  const int yes = 1;
  const int no = 0;
  setsockopt(listener.fd(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  sockaddr_storage address{};
  socklen_t length = sizeof(sockaddr_in);
  const auto network_port = htons(static_cast<std::uint16_t>(port));
  if (family == AF_INET6) {
    setsockopt(listener.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no));
    auto& any = reinterpret_cast<sockaddr_in6&>(address);
    any.sin6_family = AF_INET6;
    any.sin6_addr = in6addr_any;
    any.sin6_port = network_port;
    length = sizeof(sockaddr_in6);
  } else {
    auto& any = reinterpret_cast<sockaddr_in&>(address);
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(INADDR_ANY);
    any.sin_port = network_port;
  }
  if (bind(listener.fd(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(listener.fd(), SOMAXCONN) != 0) {
    const int error = errno;
    listener.reset();
    errno = error;
  }
  return listener;
}

/// False where the deadline passed first.
bool await(const Socket& socket, short events, Deadline deadline) {
  for (;;) {
    pollfd waiting{socket.fd(), events, 0};
    const int count = poll(&waiting, 1, poll_timeout(deadline, kLongestPoll));
    if (count > 0) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
  }
}

/// NOTE: a port that the system also gives to outgoing connections may be given to the one that
/// asks for it: where nobody listens there yet, the two ends of a connection are then one socket.
bool is_connected_to_itself(const Socket& socket) {
  sockaddr_storage own{};
  sockaddr_storage peer{};
  socklen_t own_length = sizeof(own);
  socklen_t peer_length = sizeof(peer);
  return getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&own), &own_length) == 0 &&
         getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&peer), &peer_length) == 0 &&
         own_length == peer_length && std::memcmp(&own, &peer, own_length) == 0;
}

/// Without the minute in which a closed connection keeps its port from a listener.
void give_port_back(Socket& socket) {
  const linger at_once{1, 0};
  setsockopt(socket.fd(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  socket.reset();
}

bool is_only_not_ready(int error) {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

void Socket::reset() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

std::vector<Endpoint> resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  std::vector<Endpoint> endpoints;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_addrlen > sizeof(sockaddr_storage)) continue;
    Endpoint& endpoint = endpoints.emplace_back();
    std::memcpy(&endpoint.address, entry->ai_addr, entry->ai_addrlen);
    endpoint.length = entry->ai_addrlen;
  }
  return endpoints;
}

Socket listen_on(int port) {
  Socket listener = listen_in(AF_INET6, port);
  // NOTE: a machine may have no IPv6 at all.
  if (!listener.is_open() && errno != EADDRINUSE) listener = listen_in(AF_INET, port);
  DISTMOE_CHECK(listener.is_open(), kUnsupported, "the tcp engine cannot listen at port ", port,
                ": ", reason_of(errno));
  return listener;
}

int port_of(const Socket& listener) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  DISTMOE_CHECK(getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address), &length) == 0,
                kInternal, "a listening socket has no address: ", reason_of(errno));
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

Endpoint peer_of(const Socket& socket, int port) {
  Endpoint peer;
  socklen_t length = sizeof(peer.address);
  if (getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&peer.address), &length) != 0) return {};
  const auto network_port = htons(static_cast<std::uint16_t>(port));
  auto& address6 = reinterpret_cast<sockaddr_in6&>(peer.address);
  if (peer.address.ss_family != AF_INET6) {
    reinterpret_cast<sockaddr_in&>(peer.address).sin_port = network_port;
  } else if (!IN6_IS_ADDR_V4MAPPED(&address6.sin6_addr)) {
    address6.sin6_port = network_port;
  } else {
    // A rank whose machine has no IPv6 must be able to use it.
    sockaddr_in address4{};
    address4.sin_family = AF_INET;
    address4.sin_port = network_port;
    std::memcpy(&address4.sin_addr, address6.sin6_addr.s6_addr + 12, sizeof(address4.sin_addr));
    peer.address = {};
    std::memcpy(&peer.address, &address4, sizeof(address4));
    length = sizeof(address4);
  }
  peer.length = length;
  return peer;
}

bool is_loopback(const Endpoint& endpoint) {
  if (endpoint.address.ss_family == AF_INET6) {
    const auto& address = reinterpret_cast<const sockaddr_in6&>(endpoint.address);
    return IN6_IS_ADDR_LOOPBACK(&address.sin6_addr);
  }
  constexpr std::uint32_t kLoopbackNet = 127;
  const auto& address = reinterpret_cast<const sockaddr_in&>(endpoint.address);
  return endpoint.address.ss_family == AF_INET &&
         ntohl(address.sin_addr.s_addr) >> 24 == kLoopbackNet;
}

Endpoint at_port_of(Endpoint host, const Endpoint& other) {
  const auto port_in = [](const Endpoint& endpoint) {
    return endpoint.address.ss_family == AF_INET6
               ? reinterpret_cast<const sockaddr_in6&>(endpoint.address).sin6_port
               : reinterpret_cast<const sockaddr_in&>(endpoint.address).sin_port;
  };
  const in_port_t port = port_in(other);
  if (host.address.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(host.address).sin6_port = port;
  } else {
    reinterpret_cast<sockaddr_in&>(host.address).sin_port = port;
  }
  return host;
}

Socket accept_from(const Socket& listener) {
  Socket connection = own(accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (connection.is_open()) configure(connection);
  return connection;
}

Socket connect_to(const Endpoint& endpoint, Deadline deadline) {
  const auto* address = reinterpret_cast<const sockaddr*>(&endpoint.address);
  if (endpoint.length == 0 || endpoint.length > sizeof(endpoint.address)) return {};
  Socket connection = open_socket(address->sa_family);
  if (!connection.is_open()) return connection;
  if (connect(connection.fd(), address, endpoint.length) != 0) {
    int error = errno;
    socklen_t length = sizeof(error);
    if (error != EINPROGRESS || !await(connection, POLLOUT, deadline) ||
        getsockopt(connection.fd(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) {
      return {};
    }
  }
  if (is_connected_to_itself(connection)) {
    give_port_back(connection);
    return connection;
  }
  configure(connection);
  return connection;
}

Transfer send_some(const Socket& socket, std::span<const std::byte> bytes) {
  Transfer transfer;
  while (transfer.bytes < bytes.size()) {
    const auto rest = bytes.subspan(transfer.bytes);
    const ssize_t count = ::send(socket.fd(), rest.data(), rest.size(), MSG_NOSIGNAL);
    if (count >= 0) {
      transfer.bytes += static_cast<std::size_t>(count);
    } else if (errno != EINTR) {
      transfer.is_closed = !is_only_not_ready(errno);
      break;
    }
  }
  return transfer;
}

Transfer receive_some(const Socket& socket, std::span<std::byte> bytes) {
  Transfer transfer;
  while (transfer.bytes < bytes.size()) {
    const auto rest = bytes.subspan(transfer.bytes);
    const ssize_t count = ::recv(socket.fd(), rest.data(), rest.size(), 0);
    if (count > 0) {
      transfer.bytes += static_cast<std::size_t>(count);
    } else if (count == 0 || errno != EINTR) {
      transfer.is_closed = count == 0 || !is_only_not_ready(errno);
      break;
    }
  }
  return transfer;
}

bool send_all(const Socket& socket, std::span<const std::byte> bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const Transfer sent = send_some(socket, bytes);
    bytes = bytes.subspan(sent.bytes);
    if (bytes.empty()) break;
    if (sent.is_closed || !await(socket, POLLOUT, deadline)) return false;
  }
  return true;
}

bool receive_all(const Socket& socket, std::span<std::byte> bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const Transfer received = receive_some(socket, bytes);
    bytes = bytes.subspan(received.bytes);
    if (bytes.empty()) break;
    if (received.is_closed || !await(socket, POLLIN, deadline)) return false;
  }
  return true;
}

int poll_timeout(Deadline deadline, int longest) {
  using std::chrono::milliseconds;
  const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<std::chrono::milliseconds::rep>(left.count(), 0, longest));
}

}  // namespace distmoe::tcp
