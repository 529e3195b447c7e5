#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# fits_its_limit_test.sh SOURCE_DIR PACKAGE
# Invariant: a package whose oneDNN holds matrix products alone takes 30 MiB at most. Skips (77) where
# the source of oneDNN could not be had: Debian's whole library alone is larger.
set -eu
package=$2

skip() {
  echo "SKIP fits_its_limit_test: $1"
  exit 77
}
[ -e "$package/.distmoe-package" ] || skip "runs_on_a_bare_machine made no package"
grep -q '^lib/libdnnl.so.2: oneDNN ' "$package/share/doc/distmoe/bundled" ||
  skip "the source of oneDNN is not to be had here (scripts/package says how)"
bytes=$(du -sb "$package" | cut -f1)
echo "$package has $bytes bytes"
[ "$bytes" -le $((30 << 20)) ]
