#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# runs_on_a_bare_machine_test.sh SOURCE_DIR PACKAGE [ONEDNN_SOURCE]
# Invariant: what scripts/package makes needs glibc and nothing else, wherever it lies. It is moved into
# an empty root that holds glibc's loader and libraries, /proc and a checkpoint, and gives there the bits
# of the command that was built. Makes PACKAGE. Skips (77) where the machine cannot.
set -eu
source=$1 package=$2 onednn=${3:-}
PATH=$PATH:/usr/sbin:/sbin

skip() {
  echo "SKIP runs_on_a_bare_machine_test: $1"
  exit 77
}
fail() {
  echo "FAILED: $1" >&2
  exit 1
}
[ "$(id -u)" -eq 0 ] || skip "chroot needs root"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
root=$work/root
mkdir -p "$root"/{proc,tmp,lib64,lib/x86_64-linux-gnu,opt}
unshare --mount mount -t proc proc "$root/proc" 2>/dev/null || skip "no mount namespaces here"

# --- the script ---

mkdir "$work/foreign"
echo mine >"$work/foreign/file"
status=0
"$source/scripts/package" "$work/foreign" || status=$?
[ $status -eq 2 ] || fail "a folder of somebody else's gave exit code $status, not 2"
[ "$(cat "$work"/foreign/*)" = mine ] || fail "a folder of somebody else's was changed"

# A package above the limit (3) is complete; its size is the other test's subject.
for pass in once again; do
  status=0
  "$source/scripts/package" ${onednn:+--onednn-source "$onednn"} "$package" || status=$?
  [ $status -eq 0 ] || [ $status -eq 3 ] || fail "scripts/package ended with $status"
  find "$package" -printf '%P %s\n' | sort >"$work/$pass"
done
cmp "$work/once" "$work/again" || fail "the second package differs from the first"

# --- the files ---

for file in bin/distmoe lib/libdistmoe.so lib/libdistmoe_mpi.so include/distmoe/distmoe.hpp \
  lib/cmake/distmoe/distmoeConfig.cmake share/doc/distmoe/{LICENSE,bundled,licences/libstdc++6}; do
  [ -e "$package/$file" ] || fail "there is no $file"
done
for file in "$package"/bin/* "$package"/lib/*.so*; do
  places=$(readelf -d "$file" | sed -nE 's/.*\((RPATH|RUNPATH)\).*\[(.*)\]$/<\2>/p')
  [[ -z $places || $places =~ ^"<"[$]ORIGIN(/[^:]*)?">"$ ]] || fail "$file looks for libraries in $places"
  if readelf -SW "$file" | grep -E '\.(symtab|debug_)'; then fail "$file is not stripped"; fi
done
if grep -rlF -e "$source/" "$package/lib/cmake"; then fail "these files name $source"; fi

# --- in the empty root ---

cp -a "$package" "$root/opt/elsewhere"
mkdir "$root/testdata"
cp -a "$source/testdata/gptoss" "$root/testdata/"
cp /lib64/ld-linux-x86-64.so.2 "$root/lib64/"
for name in c.so.6 m.so.6 dl.so.2 pthread.so.0 rt.so.1; do
  cp "/lib/x86_64-linux-gnu/lib$name" "$root/lib/x86_64-linux-gnu/"
done

# bare ARGUMENT...: the moved command, its output in $work/out and $work/err, its exit code in $status.
bare() {
  status=0
  # shellcheck disable=SC2016  # the inner shell expands its own arguments
  env -i PATH="$PATH" unshare --mount sh -c 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"' \
    "$root" /opt/elsewhere/bin/distmoe "$@" >"$work/out" 2>"$work/err" || status=$?
  cat "$work/out" "$work/err"
}
run=(run --layer 0 --ranks 2 --json)

bare info
[ $status -eq 0 ] || fail "info ended with $status"
grep -q '^  cpu: runs here' "$work/out" || fail "info says nothing of the CPU backend"
grep -q '^  mpi: does not run here (.*libmpi' "$work/out" || fail "info does not say that MPI is missing"

bare "${run[@]}" --checkpoint /testdata/gptoss --output /tmp/y.safetensors
[ $status -eq 0 ] || fail "run ended with $status"
grep -qE '"rel_l2":0\.00[0-7]' "$work/out" || fail "no relative L2 distance under the tolerance"
"$source/build/bin/distmoe" "${run[@]}" --checkpoint "$source/testdata/gptoss" --output "$work/y.safetensors"
cmp "$work/y.safetensors" "$root/tmp/y.safetensors" || fail "the package gives other bits than the build"

bare run --engine mpi --checkpoint /testdata/gptoss --layer 0
[ $status -eq 3 ] || fail "run --engine mpi ended with $status, not 3"
grep -q 'unsupported: the MPI engine cannot be loaded: .*libmpi' "$work/err" || fail "the reason is not told"
echo "the package runs on a bare machine"
