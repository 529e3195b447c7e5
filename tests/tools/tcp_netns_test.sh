#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# tcp_netns_test.sh COMMAND CHECKPOINT
# Runs the command over TCP on four ranks of which two live in another network namespace: all that
# the two sides share is a link, as between hosts. Once rank 1 comes to rank 0 over the loopback
# device, as where a host's name stands for 127.0.1.1. Then the link goes down in the middle of a
# run. Then the name of rank 0's host has a first address that never answers. At last rank 1 waits for
# rank 0 at a port that outgoing connections are given too.
# Skips (77) where the machine cannot.
set -u
distmoe=$1 checkpoint=$2

# shellcheck source=tests/comm/two_hosts.sh
. "$(dirname "$0")/../comm/two_hosts.sh"
make_two_hosts t 10.77.14

# start MORE...: ranks 0 and 1 here, 2 and 3 there
master_here=10.77.14.1
start() {
  ranks=()
  local rank side master
  for rank in 0 1 2 3; do
    side=$near master=$master_here
    [ "$rank" -lt 2 ] || side=$far master=10.77.14.1
    ip netns exec "$side" env RANK=$rank WORLD_SIZE=4 MASTER_ADDR=$master MASTER_PORT=29500 \
      "$distmoe" run --engine tcp --checkpoint "$checkpoint" --layer 0 "$@" \
      >"$folder/out$rank" 2>"$folder/err$rank" &
    ranks+=($!)
  done
}

# finish CODE: all ranks exit with it
finish() {
  local rank code
  for rank in 0 1 2 3; do
    wait "${ranks[$rank]}"
    code=$?
    if [ "$code" -ne "$1" ]; then
      echo "rank $rank exited with $code, not $1: $(cat "$folder/err$rank")"
      exit 1
    fi
  done
}

start --output "$folder/tcp"
finish 0
"$distmoe" run --checkpoint "$checkpoint" --layer 0 --output "$folder/threads" >/dev/null || exit 1
cmp "$folder/tcp" "$folder/threads" || exit 1
sent=$(ip -n "$far" -s -j link show dev veth-f | grep -o '"tx":{"bytes":[0-9]*' | grep -o '[0-9]*$')
echo "the far side sent $sent bytes over the link"
[ "$sent" -gt 300000 ] || exit 1

master_here=127.0.1.1
start --timeout 20 --output "$folder/loopback"
finish 0
cmp "$folder/loopback" "$folder/threads" || exit 1
master_here=10.77.14.1

start --timeout 2 --repeat 10000 --output "$folder/lost"
sleep 2
begin=$SECONDS
ip -n "$near" link set veth-n down
finish 3
echo "the ranks ended $((SECONDS - begin)) s after the link: $(cat "$folder/err0")"
[ $((SECONDS - begin)) -le 6 ] || exit 1
grep -q "peer_lost.*rank" "$folder/err0" || exit 1
[ ! -e "$folder/lost" ] || exit 1

# pair HOST PORT RANKS: ranks 0 and 1, both here, the first of RANKS a second before the other
pair() {
  local rank
  ranks=()
  for rank in $3; do
    # shellcheck disable=SC2016 # the inner shell expands them
    ip netns exec "$near" env RANK="$rank" WORLD_SIZE=2 MASTER_ADDR="$1" MASTER_PORT="$2" \
      HOSTS="$folder/hosts" unshare -m sh -c 'mount --bind "$HOSTS" /etc/hosts && exec "$0" "$@"' \
      "$distmoe" run --engine tcp --checkpoint "$checkpoint" --layer 0 --timeout 8 \
      >"$folder/out$rank" 2>"$folder/err$rank" &
    ranks[rank]=$!
    [ "${#ranks[@]}" -eq 2 ] || sleep 1
  done
  for rank in 0 1; do
    wait "${ranks[$rank]}" && continue
    echo "rank $rank, at $1:$2: $(cat "$folder/err$rank")"
    exit 1
  done
}

# Addresses of IPv6 come first, where the machine has any.
ip -n "$near" link set veth-n up
if ip -n "$near" addr add 2001:db8::1/64 dev veth-n nodad 2>/dev/null; then
  ip -n "$near" neigh add 2001:db8::99 lladdr 02:00:00:00:00:99 dev veth-n nud permanent || exit 1
fi
printf '127.0.0.1 localhost\n2001:db8::99 head\n10.77.14.1 head\n' >"$folder/hosts"
pair head 29500 "0 1"

# With so few ports a rank that asks again and again is soon given the one that it asks for.
ip netns exec "$near" sh -c 'echo 40000 40015 >/proc/sys/net/ipv4/ip_local_port_range' || exit 1
pair 127.0.0.1 40003 "1 0"
