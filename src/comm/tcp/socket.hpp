// SPDX-License-Identifier: Apache-2.0
//
// The few operations on TCP sockets that the engine needs. Every socket is non-blocking: whoever
// waits does so in poll(), with a deadline. Running out of file descriptors throws unsupported.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace distmoe::tcp {

using Deadline = std::chrono::steady_clock::time_point;

/// Owns a file descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { reset(); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;

  int fd() const noexcept { return fd_; }
  bool is_open() const noexcept { return fd_ >= 0; }
  void reset() noexcept;

 private:
  int fd_ = -1;
};

/// Where a socket can be reached; travels between ranks.
struct Endpoint {
  sockaddr_storage address{};
  std::uint32_t length = 0;
};

/// What host and port stand for, in the order in which to try; empty where the name is unknown.
std::vector<Endpoint> resolve(const std::string& host, int port);

/// Listens on all of this machine's addresses; port 0 takes any. Throws unsupported where the port
/// cannot be had.
Socket listen_on(int port);
int port_of(const Socket& listener);
/// The other end of `socket`, with `port` in place of its own.
Endpoint peer_of(const Socket& socket, int port);
/// Whether only the machine itself reaches it.
bool is_loopback(const Endpoint& endpoint);
/// The machine of `host` at the port of `other`.
Endpoint at_port_of(Endpoint host, const Endpoint& other);
/// The next connection that waits at `listener`; not open where there is none.
Socket accept_from(const Socket& listener);

/// Not open where nobody listens there yet, or the deadline passed; never connected to itself.
Socket connect_to(const Endpoint& endpoint, Deadline deadline);

struct Transfer {
  std::size_t bytes = 0;
  bool is_closed = false;  ///< the other end closed, or the connection broke
};

/// Moves what can be moved without waiting.
Transfer send_some(const Socket& socket, std::span<const std::byte> bytes);
Transfer receive_some(const Socket& socket, std::span<std::byte> bytes);

/// Moves all of it, waiting; false where the connection closed or the deadline passed before.
bool send_all(const Socket& socket, std::span<const std::byte> bytes, Deadline deadline);
bool receive_all(const Socket& socket, std::span<std::byte> bytes, Deadline deadline);

/// Milliseconds for poll() until `deadline`, rounded up, at most `longest`.
int poll_timeout(Deadline deadline, int longest);

}  // namespace distmoe::tcp
