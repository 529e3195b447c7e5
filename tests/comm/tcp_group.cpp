// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp_group.hpp"

#include <thread>

#include "comm/tcp/socket.hpp"

namespace distmoe {

int free_port() { return tcp::port_of(tcp::listen_on(0)); }

TcpGroup local_group(int rank, int size, int port) {
  return {.rank = rank, .size = size, .host = "127.0.0.1", .port = port, .job = "test"};
}

std::vector<std::shared_ptr<Communicator>> make_tcp_group(int size) {
  const int port = free_port();
  std::vector<std::shared_ptr<Communicator>> group(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  threads.reserve(group.size());
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&group, rank, size, port] {
      group[static_cast<std::size_t>(rank)] =
          make_tcp_communicator(local_group(rank, size, port), std::chrono::seconds(30));
    });
  }
  for (std::thread& thread : threads) thread.join();
  return group;
}

}  // namespace distmoe
