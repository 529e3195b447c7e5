#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# mpi_netns_test.sh MPIRUN PROGRAM
# Runs the laws of the MPI engine, and two of its faults, on four ranks of which two live in
# another network namespace: all that the two sides share is a TCP link, as between hosts. The
# launcher reaches the far side through a stand-in for ssh. Skips (77) where the machine cannot.
set -u
mpirun=$1 program=$2
here=$(cd "$(dirname "$0")" && pwd)

# shellcheck source=tests/comm/two_hosts.sh
. "$here/two_hosts.sh"
command -v unshare >/dev/null || skip "no unshare command (Debian package util-linux)"
[ -x "$mpirun" ] || skip "no mpirun (Debian package openmpi-bin)"
make_two_hosts m 10.77.13
ip netns exec "$near" ping -c 1 -W 5 10.77.13.2 >/dev/null 2>&1 || true  # settles ARP

# Called as: agent HOST COMMAND...; HOST is the far address. A host name of its own keeps Open MPI
# from taking both sides for one host.
cat >"$folder/agent" <<AGENT
#!/bin/sh
shift
exec ip netns exec $far unshare --uts sh -c 'hostname distmoe-far; exec sh -c "\$0"' "\$*"
AGENT
chmod +x "$folder/agent"

# run RANKS SURVIVORS FILTER [OPTION...]
run() {
  local ranks=$1 survivors=$2 filter=$3
  shift 3
  # shellcheck disable=SC2016  # the inner shell expands its own arguments
  ip netns exec "$near" unshare --uts sh -c 'hostname distmoe-near; exec "$0" "$@"' \
    "$here/run_mpi.sh" "$mpirun" "$ranks" "$survivors" "$program" "$filter" \
    --host 10.77.13.1:2,10.77.13.2:2 --map-by slot -x DISTMOE_TEST_RECORDS \
    --mca plm_rsh_agent "$folder/agent" --mca btl tcp,self \
    --mca btl_tcp_if_include 10.77.13.0/24 --mca oob_tcp_if_include 10.77.13.0/24 "$@"
}

run 4 4 'MpiEngineLaws.*' || exit 1
sent=$(ip -n "$far" -s -j link show dev veth-f | grep -o '"tx":{"bytes":[0-9]*' | grep -o '[0-9]*$')
echo "the far side sent $sent bytes over the link"
[ "$sent" -gt 5000000 ] || exit 1
run 4 4 'MpiEngineFaults.AnAbortIsReported' --enable-recovery || exit 1
run 4 3 'MpiEngineFaults.AStoppedRankIsReported' --enable-recovery || exit 1
