#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# run_mpi.sh MPIRUN RANKS SURVIVORS PROGRAM FILTER [MPIRUN-OPTION...]
# Runs cases of PROGRAM and wants SURVIVORS ranks to record that they passed and none
# that it failed; a rank records last of all, when it has left MPI. Without --enable-recovery mpirun
# must exit 0 as well. With it, mpirun is ended once all survivors have left: Open MPI 4.1 goes on
# waiting for ranks of other hosts that left without MPI_Finalize.
set -u
mpirun=$1 ranks=$2 survivors=$3 program=$4 filter=$5
shift 5
is_recovering=0
case " $* " in *" --enable-recovery "*) is_recovering=1 ;; esac

records=$(mktemp -d)
trap 'rm -rf "$records"' EXIT
export DISTMOE_TEST_RECORDS=$records OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

count() { cat "$records"/* 2>/dev/null | grep -o "$1" | wc -l; }

start=$SECONDS
timeout --kill-after=5 60 "$mpirun" --oversubscribe --bind-to none "$@" \
  -n "$ranks" "$program" "--gtest_filter=$filter" --gtest_brief=1 </dev/null &
launcher=$!
while [ "$is_recovering" -eq 1 ] && kill -0 "$launcher" 2>/dev/null; do
  if [ "$(($(count passed) + $(count failed)))" -ge "$survivors" ]; then
    sleep 1
    kill "$launcher" 2>/dev/null
    break
  fi
  sleep 0.1
done
wait "$launcher"
status=$?
passed=$(count passed) failed=$(count failed)
echo "mpirun exited with $status after $((SECONDS - start)) s; $passed ranks passed, $failed failed"

[ "$passed" -eq "$survivors" ] && [ "$failed" -eq 0 ] || exit 1
[ "$is_recovering" -eq 1 ] || [ "$status" -eq 0 ] || exit 1
