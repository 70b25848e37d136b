#!/usr/bin/env bash
# GCC 12.2 (Debian's cpp-12), __builtin_prefetch, by which kernels ask for the weights of their next rows. GCC documents that it gives
# no code where a target has no such instruction; on x86-64 one would expect a loop of prefetches to stay where it was written, in a
# function of its own, too. GCC gives prefetching no effect when it looks for pure functions: one that does nothing else is const,
# and from -O1 on all calls of it are deleted without a warning. Where the function is inlined before that, the
# prefetches stay; whether it is depends on its size, so the same kernel may have them for one format and lack them for another. Seen
# as products of quantised rows that were 15 to 20 % slower out of memory. `always_inline` keeps them. Exits non-zero if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pool=http://deb.debian.org/debian/pool/main
fetch() { # its place and its hash
  curl -sSfo "$folder/package.deb" "$pool/$1"
  echo "$2  $folder/package.deb" | sha256sum -c --quiet
  dpkg-deb -x "$folder/package.deb" "$folder/root"
}
fetch g/gcc-12/cpp-12_12.2.0-14+deb12u1_amd64.deb fedbb98e877adde83c983c6071537ea25ac52b277ac6e4637d85025949ca1454
fetch i/isl/libisl23_0.25-1.1_amd64.deb ebff0b2f8b220c74224197523019366e97ee4770d464bebc48e4865114e4da0e
fetch m/mpclib3/libmpc3_1.3.1-1_amd64.deb d7f79544790e44f9b0c8cb9034a18c58d37f8702a15f32539050718679e52f80
fetch m/mpfr4/libmpfr6_4.2.0-1_amd64.deb 37b7a2b4e78890b6a074777f27b96c84f58e81558ba08410c2b6c0ca4a4ad77b
fetch g/gmp/libgmp10_6.2.1+dfsg1-1.1_amd64.deb 187aedef2ed763f425c1e523753b9719677633c7eede660401739e9c893482bd
cat > "$folder/apart.c" <<'C'
FETCHES void ask_for(const char *lines, long count) {
  for (long line = 0; line < count; ++line) __builtin_prefetch(lines + 64 * line);
}

long sum(const char *row, const char *next, long count) {
  ask_for(next, count / 64);
  long result = 0;
  for (long i = 0; i < count; ++i) result += row[i];
  return result;
}
C
prefetches() { # by level of optimisation and kind of function: instructions in sum
  LD_LIBRARY_PATH="$folder/root/usr/lib/x86_64-linux-gnu" "$folder/root/usr/lib/gcc/x86_64-linux-gnu/12/cc1" -quiet "-O$1" \
    "-DFETCHES=$2" "$folder/apart.c" -o "$folder/apart.s"
  sed -n '/^sum:/,/\.cfi_endproc/p' "$folder/apart.s" | grep -Ec 'prefetch|call\s+ask_for' || true
}
apart='static __attribute__((noinline))' inlined='static inline __attribute__((always_inline))'
seen="apart $(prefetches 0 "$apart") $(prefetches 1 "$apart") $(prefetches 2 "$apart") $(prefetches 3 "$apart")"
seen="$seen, inlined $(prefetches 1 "$inlined") $(prefetches 2 "$inlined") $(prefetches 3 "$inlined")"
echo "prefetches or calls of what prefetches, at -O0 to -O3 and -O1 to -O3: $seen"
[ "$seen" = "apart 1 0 0 0, inlined 1 1 1" ]
