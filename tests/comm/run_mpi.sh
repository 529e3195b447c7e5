#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# run_mpi.sh MPIRUN RANKS SURVIVORS PROGRAM FILTER [MPIRUN-OPTION...]
# Runs cases of mpi_engine_program and wants SURVIVORS ranks to record that they passed and none
# that it failed. Where every rank survives without --enable-recovery, mpirun must also exit 0.
set -u
mpirun=$1 ranks=$2 survivors=$3 program=$4 filter=$5
shift 5

records=$(mktemp -d)
trap 'rm -rf "$records"' EXIT
export DISTMOE_TEST_RECORDS=$records OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

start=$SECONDS
timeout --kill-after=5 100 "$mpirun" --oversubscribe --bind-to none "$@" \
  -n "$ranks" "$program" "--gtest_filter=$filter" --gtest_brief=1 </dev/null
status=$?
passed=$(cat "$records"/* 2>/dev/null | grep -o passed | wc -l)
failed=$(cat "$records"/* 2>/dev/null | grep -o failed | wc -l)
echo "mpirun exited with $status after $((SECONDS - start)) s; $passed ranks passed, $failed failed"

[ "$passed" -eq "$survivors" ] && [ "$failed" -eq 0 ] || exit 1
[ "$status" -ne 124 ] && [ "$status" -ne 137 ] || exit 1
case " $* " in
  *" --enable-recovery "*) ;;
  *) [ "$status" -eq 0 ] || exit 1 ;;
esac
