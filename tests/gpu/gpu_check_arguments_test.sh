#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Invariant: scripts/gpu_check refuses what it does not understand: exit code 2, the words that say
# what is wrong, its usage, and nothing configured, built or run.
# usage: gpu_check_arguments_test.sh GPU_CHECK
set -euo pipefail
gpu_check=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for program in cmake nvidia-smi; do
  printf '#!/bin/sh\ntouch "%s/was_run"\nexit 1\n' "$folder" >"$folder/$program"
  chmod +x "$folder/$program"
done

failures=0
expect_refused() { # expect_refused WORDS ARGUMENT...
  local words=$1 code=0
  shift
  PATH="$folder:$PATH" "$gpu_check" "$@" >"$folder/out" 2>"$folder/err" || code=$?
  if [ "$code" = 2 ] && grep -qF -- "$words" "$folder/err" && grep -q '^usage: ' "$folder/err" &&
    ! [ -e "$folder/was_run" ]; then
    return
  fi
  echo "gpu_check $*: exit code $code, expected 2 and '$words'" >&2
  cat "$folder/out" "$folder/err" >&2
  rm -f "$folder/was_run"
  failures=$((failures + 1))
}

expect_refused "unknown option '--no-time'" --no-time
expect_refused "unknown option '-h'" 8192 -h
expect_refused "--built needs a folder" --built
expect_refused "'$folder/none' is no folder" --built "$folder/none"
expect_refused "got '8k'" 8k
expect_refused "got '0'" --no-times 0
expect_refused "got ''" ""
exit $((failures > 0))
