#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# arm64_test.sh SOURCE_DIR
# Invariant: the library, the command and the Python extension build for ARM64, and the command gives
# its references there (scripts/arm64-check). Skips (77) where the cross compiler or QEMU is missing:
# the script would install them.
set -eu
for program in aarch64-linux-gnu-g++ qemu-aarch64-static; do
  if ! command -v $program >/dev/null; then
    echo "SKIP arm64_test: $program is not installed; scripts/arm64-check installs it"
    exit 77
  fi
done
exec "$1/scripts/arm64-check"
