#!/usr/bin/env bash
# on_gpu.sh FOLDER [SECONDS]: what a build in FOLDER does on this machine's GPU. The same C tests as everywhere, over the
# rows of the table that are for CUDA, with the reference on the CPU as judge; compute-sanitizer's four tools on a
# sample; random problems for SECONDS (60); the command line. ./run test --gpu builds first and calls this.
#
# HEED_TEST_KERNEL  only rows whose name contains this, in place of "cuda"
# HEED_TEST_SEED    of the random problems; otherwise the clock's, and printed
# HEED_GPU_PARTS    some of "programs sanitize random cli"; default all
set -uo pipefail
build=$(cd "$1" && pwd) seconds=${2:-60}
export HEED_TEST_KERNEL=${HEED_TEST_KERNEL:-cuda}
export HEED_TEST_SEED=${HEED_TEST_SEED:-$(date +%s)}
logs=$(mktemp -d "${TMPDIR:-/tmp}/on_gpu.XXXXXX")
trap 'rm -rf "$logs"' EXIT
cores=$(getconf _NPROCESSORS_ONLN)
workers=$((cores / 2 + 1))
[[ $workers -le 8 ]] || workers=8
started=$SECONDS

# measure NAME COMMAND...: a line as soon as it is done and, where it failed, what it said. Also runs in the background,
# so that failures are counted by files.
measure() {
    local name=$1 log=$logs/$1.log began=$SECONDS verdict=pass
    shift
    "$@" >"$log" 2>&1 </dev/null
    case $? in
    0) ;;
    77) verdict=skip ;;
    *)
        verdict=FAIL
        touch "$logs/$name.failed"
        ;;
    esac
    {
        printf '%-5s %-40s %4d s  %s\n' "$verdict" "$name" $((SECONDS - began)) "$(tail -1 "$log" | cut -c1-100)"
        [[ $verdict != FAIL ]] || grep -vE '^\[ +(RUN|OK) |^$' "$log" | cut -c1-600 | head -30
    } >"$log.said"
    cat "$log.said"
}

# Most of a test's time is the reference's, on one core. So those that take minutes over all rows run for each family by
# itself, begin first, and as many at once as there are cores.
run_programs() {
    local program name family slow=(test_gradients test_determinism test_shapes test_masks test_accuracy test_random)
    for name in "${slow[@]}"; do
        for family in $(families); do
            while [[ $(jobs -rp | wc -l) -ge $cores ]]; do wait -n; done
            HEED_TEST_KERNEL=${family%_*}_ OMP_NUM_THREADS=1 measure "$name-${family%_*}" "$build/tests/$name" &
        done
    done
    for program in "$build"/tests/test_*; do
        name=${program##*/}
        [[ -f $program && -x $program && " ${slow[*]} test_gpu_sizes " != *" $name "* ]] || continue
        while [[ $(jobs -rp | wc -l) -ge $cores ]]; do wait -n; done
        measure "$name" "$program" &
    done
    wait
    measure test_gpu_sizes "$build/tests/test_gpu_sizes" # alone: it wants most of the memory
}

# The rows that run here, one for each family and pass: types share its code.
families() {
    "$build/heed" info | awk -v some="$HEED_TEST_KERNEL" '$NF == "yes" && index($1, "_cuda_") && index($1, some) {
        family = $1
        sub(/_[a-z0-9]*$/, "", family)
        if (!seen[family]++) print $1
    }'
}

# The command line's checks keep each tensor in an allocation of its own, and leave the workspace as it comes. A program
# for each row, so that a report names it; racecheck, which takes longest, first. It follows each access to shared memory,
# of which the portable backward has the most: there it gets two problems' worth, else it would take minutes. initcheck does
# not see what the copy engine adds to memory, and takes the sums of these three for never written.
run_sanitizer() {
    local tool row problem problems
    for tool in racecheck memcheck initcheck synccheck; do
        for row in $(families | tac); do
            [[ ! $tool-$row =~ ^initcheck-backward_cuda_sm90(fused|scores|split)_ ]] || continue
            problems=("")
            [[ $tool-$row != racecheck-backward_cuda_portable* ]] || problems=(everything "causal, more")
            for problem in "${problems[@]}"; do
                while [[ $(jobs -rp | wc -l) -ge $workers ]]; do wait -n; done
                measure "$tool-$row${problem:+-${problem%%,*}}" compute-sanitizer --tool "$tool" --error-exitcode 9 \
                    --print-limit 3 "$build/heed" check --quick --kernel "$row" --threads 1 --problem "$problem" &
            done
        done
    done
    wait
}

run_random() {
    local n first=$HEED_TEST_SEED
    echo "random problems for $seconds s, HEED_TEST_SEED=$first and every millionth after it"
    for ((n = 0; n < workers; n++)); do
        HEED_TEST_SEED=$((first + n * 1000000)) HEED_TEST_SECONDS=$seconds HEED_TEST_CASES=1 OMP_NUM_THREADS=1 \
            measure "random-$n" "$build/tests/test_random" &
    done
    wait
    cat "$logs"/random-*.log | awk '/problems in/ { sum += $1 } END { print sum + 0, "problems" }'
}

run_cli() {
    measure demo "$build/heed" demo
    measure check "$build/heed" check --kernel "$HEED_TEST_KERNEL"
    measure bench "$build/heed" bench --backend cuda --shape 4,16,1024,64 --shape 2,16,2048,128 --min-time 0.1
    sed -n '/threads\{0,1\}$/,$p' "$logs/demo.log"
    cat "$logs/check.log" "$logs/bench.log"
}

"$build/heed" info | sed -n '/^cuda/,/^$/p'
if "$build/heed" info | grep -q 'no CUDA device'; then
    echo "There is no GPU here, or $build was built without CUDA" >&2
    exit 1
fi
for part in ${HEED_GPU_PARTS:-programs sanitize random cli}; do
    echo "== $part"
    case $part in
    programs) run_programs ;;
    sanitize) run_sanitizer ;;
    random) run_random ;;
    cli) run_cli ;;
    *) echo "no part '$part'" >&2; exit 2 ;;
    esac
done
failures=$(find "$logs" -name '*.failed' | wc -l)
echo "$failures failed, $((SECONDS - started)) s"
[[ $failures -eq 0 ]]
