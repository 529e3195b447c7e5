// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/rendezvous.hpp"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <thread>

#include "comm/exchange.hpp"
#include "core/check.hpp"
#include "layout/refusal.hpp"

namespace distmoe::tcp {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kLongestPoll = 1000;  // milliseconds
constexpr milliseconds kRetryPause{20};
/// After which the next address of rank 0's host is tried, and this one again later: a network may
/// drop what is sent to one of them without a word.
constexpr milliseconds kAddressPatience{2000};
/// Rank 0 answers at its own deadline, which may be a little later than that of a rank that waits.
constexpr milliseconds kAnswerGrace{1000};
/// Connections that have not said all of their words, beside those of the ranks: the oldest goes.
constexpr std::size_t kMaxStrangers = 256;

enum class Purpose : std::uint32_t { kLobby, kCalls, kControl };

/// The first bytes of every connection.
struct Hello {
  char magic[8] = {'d', 'i', 's', 't', 'm', 'o', 'e', '1'};
  Purpose purpose = Purpose::kLobby;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int32_t port = 0;  ///< at which the rank listens
  std::uint64_t job = 0;
};

/// Rank 0's answer in the lobby, which the table follows unless it refuses.
struct Welcome {
  char magic[8] = {'d', 'i', 's', 't', 'm', 'o', 'e', '1'};
  Refusal refusal;
};

std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (const char letter : text) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001B3U;
  }
  return hash;
}

template <typename Record>
std::span<const std::byte> bytes_of(const Record& record) {
  return std::as_bytes(std::span(&record, 1));
}

/// A connection that was accepted and has not said all of its words.
struct Stranger {
  Socket socket;
  Hello hello;
  std::size_t num_bytes = 0;
};

class Rendezvous {
 public:
  Rendezvous(const TcpGroup& group, milliseconds timeout)
      : group_(group),
        timeout_(timeout),
        deadline_(deadline_after(timeout)),
        job_(hash_of(group.job)),
        links_(static_cast<std::size_t>(group.size)),
        table_(static_cast<std::size_t>(group.size)) {}

  std::vector<Link> run() {
    listener_ = listen_on(group_.rank == 0 ? group_.port : 0);
    if (group_.rank == 0) {
      receive_guests();
    } else {
      visit_lobby();
    }
    for (int peer = 0; peer < group_.rank; ++peer) connect_to_peer(peer);
    accept_peers();
    return std::move(links_);
  }

 private:
  // --- the lobby ---

  /// Rank 0: waits for all, then tells them where the others are, or why there is no group.
  void receive_guests() {
    guests_.resize(links_.size());
    Refusal refusal;
    while (refusal.code == Refusal::kNone && !missing_guests().empty()) {
      if (!meet_strangers([&](Stranger& stranger) { return admit(stranger, refusal); })) {
        refuse(refusal, ErrorCode::kPeerLost,
               concat(name_ranks(missing_guests()), " did not come to rank 0 at port ", group_.port,
                      " within ", timeout_.count(), " ms"));
      }
    }
    Welcome welcome;
    welcome.refusal = refusal;
    for (const Socket& guest : guests_) {
      if (!guest.is_open() || !send_all(guest, bytes_of(welcome), deadline_)) continue;
      if (refusal.code == Refusal::kNone) {
        send_all(guest, std::as_bytes(std::span(table_)), deadline_);
      }
    }
    throw_if_refused(refusal);
  }

  std::vector<int> missing_guests() const {
    std::vector<int> missing;
    for (int rank = 1; rank < group_.size; ++rank) {
      if (!guests_[index_of(rank)].is_open()) missing.push_back(rank);
    }
    return missing;
  }

  /// Takes the connection of a rank that came to the lobby.
  bool admit(Stranger& stranger, Refusal& refusal) {
    const Hello& hello = stranger.hello;
    if (hello.purpose != Purpose::kLobby) return false;
    Socket& guest = guests_.at(index_of(std::clamp(hello.rank, 0, group_.size - 1)));
    if (hello.size != group_.size) {
      refuse(
          refusal, ErrorCode::kPeerMismatch,
          concat("rank 0 expects ", group_.size, " ranks, but rank ", hello.rank, " ", hello.size));
    } else if (hello.rank < 1 || hello.rank >= group_.size || is_alive(guest)) {
      refuse(refusal, ErrorCode::kPeerMismatch,
             concat("more than one process says that it is rank ", hello.rank, " of ", hello.size));
    } else {
      table_[index_of(hello.rank)] = peer_of(stranger.socket, hello.port);
      guest = std::move(stranger.socket);
      return true;
    }
    // It gets the refusal too.
    guests_.push_back(std::move(stranger.socket));
    return true;
  }

  /// Whether the other end of a guest's connection still waits: it sends nothing.
  static bool is_alive(const Socket& guest) {
    std::byte nothing{};
    return guest.is_open() && !receive_some(guest, std::span(&nothing, 1)).is_closed;
  }

  /// Every other rank: goes to rank 0 until it has an answer.
  void visit_lobby() {
    const Hello hello = make_hello(Purpose::kLobby, port_of(listener_));
    while (steady_clock::now() < deadline_) {
      for (const Endpoint& endpoint : resolve(group_.host, group_.port)) {
        const Socket lobby =
            connect_to(endpoint, std::min(deadline_, deadline_after(kAddressPatience)));
        if (lobby.is_open() && send_all(lobby, bytes_of(hello), deadline_) && is_welcome(lobby)) {
          table_[0] = endpoint;
          find_neighbours_of_rank_zero();
          return;
        }
      }
      // NOTE: rank 0 may not be there yet, or still close the port of an earlier group.
      std::this_thread::sleep_for(kRetryPause);
    }
    throw_error(ErrorCode::kPeerLost,
                concat("rank ", group_.rank, " of ", group_.size, ": rank 0 did not answer at ",
                       group_.host, ":", group_.port, " within ", timeout_.count(), " ms"));
  }

  /// NOTE: a rank on the machine of rank 0 may come over the loopback device (a host's own name
  /// often stands for 127.0.1.1), whose address is another machine to everybody else.
  void find_neighbours_of_rank_zero() {
    if (is_loopback(table_[0])) return;
    for (Endpoint& endpoint : table_) {
      if (is_loopback(endpoint)) endpoint = at_port_of(table_[0], endpoint);
    }
  }

  bool is_welcome(const Socket& lobby) {
    Welcome welcome;
    const Welcome expected;
    const Deadline deadline = deadline_ + kAnswerGrace;
    if (!receive_all(lobby, std::as_writable_bytes(std::span(&welcome, 1)), deadline) ||
        std::memcmp(welcome.magic, expected.magic, sizeof(expected.magic)) != 0) {
      return false;
    }
    welcome.refusal.message[Refusal::kMaxMessage - 1] = '\0';
    throw_if_refused(welcome.refusal);
    return receive_all(lobby, std::as_writable_bytes(std::span(table_)), deadline);
  }

  // --- pairs ---

  void connect_to_peer(int peer) {
    for (const Purpose purpose : {Purpose::kCalls, Purpose::kControl}) {
      Socket connection = connect_to(table_[index_of(peer)], deadline_);
      DISTMOE_CHECK(
          connection.is_open() && send_all(connection, bytes_of(make_hello(purpose, 0)), deadline_),
          kPeerLost, "rank ", group_.rank, " of ", group_.size, ": rank ", peer,
          " went away while the group was made");
      place_of(peer, purpose) = std::move(connection);
    }
  }

  /// The connections of all higher ranks.
  void accept_peers() {
    while (!missing_peers().empty()) {
      const bool is_in_time = meet_strangers([&](Stranger& stranger) {
        const Hello& hello = stranger.hello;
        if (hello.purpose == Purpose::kLobby || hello.size != group_.size) return false;
        if (hello.rank <= group_.rank || hello.rank >= group_.size) return false;
        Socket& place = place_of(hello.rank, hello.purpose);
        if (place.is_open()) return false;
        place = std::move(stranger.socket);
        return true;
      });
      DISTMOE_CHECK(is_in_time, kPeerLost, "rank ", group_.rank, " of ", group_.size, ": ",
                    name_ranks(missing_peers()), " did not connect within ", timeout_.count(),
                    " ms");
    }
  }

  std::vector<int> missing_peers() const {
    std::vector<int> missing;
    for (int peer = group_.rank + 1; peer < group_.size; ++peer) {
      const Link& link = links_[index_of(peer)];
      if (!link.calls.is_open() || !link.control.is_open()) missing.push_back(peer);
    }
    return missing;
  }

  // --- connections that come in ---

  /// Waits for something to happen at the listener and hands every connection that said hello to
  /// `take`, which moves it or leaves it to be closed. False where the deadline passed.
  template <typename Take>
  bool meet_strangers(const Take& take) {
    if (steady_clock::now() >= deadline_) return false;
    std::vector<pollfd> waiting{{listener_.fd(), POLLIN, 0}};
    for (const Stranger& stranger : strangers_)
      waiting.push_back({stranger.socket.fd(), POLLIN, 0});
    poll(waiting.data(), waiting.size(), poll_timeout(deadline_, kLongestPoll));
    for (;;) {
      Socket connection = accept_from(listener_);
      if (!connection.is_open()) break;
      if (strangers_.size() == kMaxStrangers + 2 * links_.size())
        strangers_.erase(strangers_.begin());
      strangers_.push_back({std::move(connection), {}, 0});
    }
    std::erase_if(strangers_, [&](Stranger& stranger) {
      if (!listen_to(stranger)) return true;
      if (stranger.num_bytes < sizeof(Hello)) return false;
      if (is_known(stranger.hello)) take(stranger);
      return true;
    });
    return true;
  }

  /// False where the connection is of no more use.
  static bool listen_to(Stranger& stranger) {
    const auto words = std::as_writable_bytes(std::span(&stranger.hello, 1));
    const Transfer heard = receive_some(stranger.socket, words.subspan(stranger.num_bytes));
    stranger.num_bytes += heard.bytes;
    return stranger.num_bytes == sizeof(Hello) || !heard.is_closed;
  }

  bool is_known(const Hello& hello) const {
    const Hello expected;
    return std::memcmp(hello.magic, expected.magic, sizeof(expected.magic)) == 0 &&
           hello.job == job_ && hello.purpose <= Purpose::kControl && hello.port >= 0 &&
           hello.port <= 65535;
  }

  // --- small things ---

  Hello make_hello(Purpose purpose, int port) const {
    Hello hello;
    hello.purpose = purpose;
    hello.rank = group_.rank;
    hello.size = group_.size;
    hello.port = port;
    hello.job = job_;
    return hello;
  }

  Socket& place_of(int peer, Purpose purpose) {
    Link& link = links_[index_of(peer)];
    return purpose == Purpose::kCalls ? link.calls : link.control;
  }

  static std::size_t index_of(int rank) { return static_cast<std::size_t>(rank); }

  static void refuse(Refusal& refusal, ErrorCode code, const std::string& reason) {
    refusal.code = static_cast<std::int32_t>(code);
    std::strncpy(refusal.message, reason.c_str(), Refusal::kMaxMessage - 1);
  }

  void throw_if_refused(const Refusal& refusal) const {
    if (refusal.code == Refusal::kNone) return;
    const bool is_mismatch = refusal.code == static_cast<std::int32_t>(ErrorCode::kPeerMismatch);
    throw_error(is_mismatch ? ErrorCode::kPeerMismatch : ErrorCode::kPeerLost,
                concat("rank ", group_.rank, " of ", group_.size, ": ", refusal.message));
  }

  const TcpGroup& group_;
  milliseconds timeout_;
  Deadline deadline_;
  std::uint64_t job_;
  Socket listener_;
  std::vector<Link> links_;
  std::vector<Endpoint> table_;
  std::vector<Socket> guests_;  ///< rank 0: by rank, then those that get a refusal only
  std::vector<Stranger> strangers_;
};

}  // namespace

std::vector<Link> connect_ranks(const TcpGroup& group, milliseconds timeout) {
  return Rendezvous(group, timeout).run();
}

}  // namespace distmoe::tcp
