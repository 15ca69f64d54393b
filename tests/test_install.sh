#!/bin/sh
# Installs the build in $1 to a scratch folder, moves it, and uses it as a stranger would: through find_package,
# through pkg-config, and as a program. Source folder: $2. Scratch folder: $3.
set -eu
build=$1 source=$2 scratch=$3

rm -rf "$scratch"
mkdir -p "$scratch"
cmake --install "$build" --prefix "$scratch/first" >"$scratch/install.log"
mv "$scratch/first" "$scratch/moved" # nothing installed may remember where it was
prefix=$scratch/moved

expect() { # expect <what> <wanted> <got>
    [ "$2" = "$3" ] || { printf '%s: wanted "%s", got "%s"\n' "$1" "$2" "$3" >&2; exit 1; }
}

for file in include/heed.h bin/heed share/man/man1/heed.1; do
    [ -s "$prefix/$file" ] || { echo "$file was not installed" >&2; exit 1; }
done
headers=heed.h
if [ -e "$build/mpi" ]; then headers="heed.h heed_mpi.h"; fi
expect "installed headers" "$headers" "$(ls "$prefix/include" | paste -sd' ')"

lib=$(dirname "$(find "$prefix" -name libheed.so)")
version=$(sed -n 's/^#define HEED_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' "$prefix/include/heed.h" | paste -sd.)
expect soname "libheed.so.${version%.*}" "$(objdump -p "$lib/libheed.so" | awk '$1 == "SONAME" { print $2 }')"

# The header and the symbol map name the same calls, and the library exports exactly those.
declared=$(sed -n 's/^HEED_API .*[ *]\(heed_[a-z_]*\)(.*/\1/p' "$prefix/include/heed.h" | sort)
exported=$(nm -D --defined-only "$lib/libheed.so" | awk '$2 == "T" { sub(/@.*/, "", $3); print $3 }' | sort)
expect "exported symbols" "$declared" "$exported"
# It has no way to print, to abort or to exit; nor, the CUDA runtime aside, to allocate or to write to a file.
surprises='[a-z]*printf(_chk)?|f?put(s|c|char)|perror|abort|_*exit|_Exit|quick_exit|__assert_fail|raise'
if ! "$prefix/bin/heed" info | grep -q forward_cuda_; then
    surprises="$surprises|malloc|calloc|realloc|reallocarray|free|aligned_alloc|memalign|posix_memalign|mmap|f?open|f?write"
fi
imported=$(nm -D --undefined-only "$lib/libheed.so" | awk '{ sub(/@.*/, "", $2); print $2 }')
echo "$imported" | grep -q vsnprintf # of messages: nm shows what there is
expect "imported symbols" "" "$(echo "$imported" | grep -vxE '_*v?snprintf(_chk)?' | grep -xE "_*($surprises)")"
if objdump -p "$lib/libheed.so" "$prefix/bin/heed" | grep 'NEEDED.*\(libstdc++\|libcuda\)' >&2; then
    echo "the library or the program needs these, and would not start where they are missing" >&2
    exit 1
fi
# OpenMP's threads wait in the library's companions: dlclose() must leave these where they are.
readelf -d "$lib/libheed.so" | grep -q NODELETE || { echo "libheed.so can be unloaded" >&2; exit 1; }
bytes=$(wc -c <"$lib/libheed.so") most=2000000
if "$prefix/bin/heed" info | grep -q forward_cuda_; then most=20000000; fi
[ "$bytes" -lt $most ] || { echo "the library has $bytes bytes; it must stay below $most" >&2; exit 1; }

cmake -G Ninja -S "$source/examples/c_find_package" -B "$scratch/find_package" -DCMAKE_PREFIX_PATH="$prefix" \
    -DCMAKE_BUILD_TYPE=Release >"$scratch/find_package.log"
cmake --build "$scratch/find_package" >>"$scratch/find_package.log"
expect "find_package example" "heed $version: 1.330238 2.203336" "$("$scratch/find_package/example")"

if [ -e "$build/mpi" ]; then
    cmake -G Ninja -S "$source/examples/c_mpi" -B "$scratch/mpi" -DCMAKE_PREFIX_PATH="$prefix" \
        -DCMAKE_BUILD_TYPE=Release >"$scratch/mpi.log"
    cmake --build "$scratch/mpi" >>"$scratch/mpi.log"
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_plm=isolated \
        OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none OMP_NUM_THREADS=1 \
        mpirun -n 3 "$scratch/mpi/example" >"$scratch/mpi.out"
    expect "MPI example" "row 1000 of 3000, on rank 2: 500.00" "$(cat "$scratch/mpi.out")"
    flags=$(PKG_CONFIG_PATH=$lib/pkgconfig pkg-config --cflags --libs heed_mpi)
    # shellcheck disable=SC2086 # words, not one name
    mpicc "$source/examples/c_mpi/example.c" -o "$scratch/mpi/by_pkg_config" $flags
    if objdump -p "$lib/libheed.so" | grep 'NEEDED.*mpi' >&2; then
        echo "libheed is linked with MPI" >&2
        exit 1
    fi
fi

cp -r "$source/examples/c_pkg_config" "$scratch/pkg_config"
PKG_CONFIG_PATH=$lib/pkgconfig make -s -C "$scratch/pkg_config"
LD_LIBRARY_PATH=$lib "$scratch/pkg_config/example" >"$scratch/pkg_config.out"
expect "pkg-config version" "$version" "$(PKG_CONFIG_PATH=$lib/pkgconfig pkg-config --modversion heed)"
grep -q "^heed $version on .*threads$" "$scratch/pkg_config.out"
grep -q '^  forward_cpu_plain_f32, ' "$scratch/pkg_config.out"

cp -r "$source/examples/flash_demo" "$scratch/flash_demo"
PKG_CONFIG_PATH=$lib/pkgconfig make -s -C "$scratch/flash_demo" demo
LD_LIBRARY_PATH=$lib "$scratch/flash_demo/demo" >"$scratch/flash_demo.out"
grep -q '^O  *0\.016065  *-0\.0290427  *-0\.027025$' "$scratch/flash_demo.out"

# As a part of another project: that keeps its build type, and of its flags those that would change what the kernels
# compute do not reach them.
mkdir "$scratch/parent"
echo 'int main(void) { return 0; }' >"$scratch/parent/main.c"
cat >"$scratch/parent/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(parent LANGUAGES C)
add_subdirectory(${HEED} heed)
add_executable(main main.c)
target_link_libraries(main PRIVATE heed::heed)
END
cmake -G Ninja -S "$scratch/parent" -B "$scratch/parent/build" -DHEED="$source" -DHEED_CUDA=OFF -DCMAKE_BUILD_TYPE= \
    -DCMAKE_C_FLAGS="-ffast-math -march=native" >"$scratch/parent.log"
commands=$(ninja -C "$scratch/parent/build" -t commands main)
expect "parent's own flags" "-ffast-math -march=native" \
    "$(echo "$commands" | sed -n 's/ *-MD .* -c .*parent\/main.c$//p' | grep -o -e '-ffast-math.*')"
kernels=$(echo "$commands" | grep -e '-c .*kernels.c$')
[ "$kernels" ]
expect "kernels with the parent's -ffast-math" "" "$(echo "$kernels" | grep -v -e '-ffast-math.* -fno-fast-math .*-O3')"
if [ "$(uname -m)" = x86_64 ]; then
    expect "kernels with the parent's -march" "" "$(echo "$kernels" | grep -v -e '-march=native.* -march=x86-64 ')"
fi

# The program finds its library beside it, without help.
expect "heed --version" "heed $version" "$(env -u LD_LIBRARY_PATH "$prefix/bin/heed" --version | head -n 1)"
