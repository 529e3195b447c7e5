# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Two network namespaces that share a link and nothing else, as two hosts do; sourced by tests.
# make_two_hosts NAME SUBNET sets near and far (namespaces with the addresses SUBNET.1 and .2) and
# folder (temporary); all of it, and every process in the namespaces, goes when the test ends.

# skip WHY: the test cannot run on this machine.
skip() {
  echo "SKIP $(basename "$0" .sh): $1"
  exit 77
}

remove_two_hosts() {
  ip netns pids "$near" 2>/dev/null | xargs -r kill -9 2>/dev/null
  ip netns pids "$far" 2>/dev/null | xargs -r kill -9 2>/dev/null
  ip netns del "$near" 2>/dev/null
  ip netns del "$far" 2>/dev/null
  rm -rf "$folder"
}

make_two_hosts() {
  [ "$(id -u)" -eq 0 ] || skip "network namespaces need root"
  command -v ip >/dev/null || skip "no ip command (Debian package iproute2)"
  near=dmoe-$1n$$ far=dmoe-$1f$$
  folder=$(mktemp -d)
  trap remove_two_hosts EXIT
  trap 'exit 1' INT TERM
  local name
  for name in "$near" "$far"; do
    ip netns add "$name" 2>/dev/null || skip "ip netns add failed"
  done
  ip -n "$near" link add veth-n type veth peer name veth-f netns "$far" 2>/dev/null ||
    skip "no veth devices"
  ip -n "$near" addr add "$2.1/24" dev veth-n
  ip -n "$far" addr add "$2.2/24" dev veth-f
  for name in lo veth-n; do ip -n "$near" link set "$name" up; done
  for name in lo veth-f; do ip -n "$far" link set "$name" up; done
}
