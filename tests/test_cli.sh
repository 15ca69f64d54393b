#!/bin/sh
# The command line from outside: test_cli.sh path/to/heed [path/to/spoiler]. What only NumPy can tell is in
# test_cli_numpy.py, which runs where HEED_PYTHON (or python3) has NumPy. The spoiler is a library that makes results wrong.
set -u
heed=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
spoiler=${2:+$(cd "$(dirname "$2")" && pwd)/$(basename "$2")}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/test_cli.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
failures=0 checks=0
unset HEED_KERNEL

fail() {
    failures=$((failures + 1))
    echo "FAILED: $*"
    echo "  exit code $code"
    sed 's/^/  stdout: /' out
    sed 's/^/  stderr: /' err
}

# expect CODE arguments...: runs heed, leaving its output in the files out and err.
expect() {
    want=$1
    shift
    checks=$((checks + 1))
    "$heed" "$@" >out 2>err </dev/null
    code=$?
    [ "$code" -eq "$want" ] || fail "heed $*: exit code $code, expected $want"
}

# says FILE TEXT: the last run wrote this.
says() {
    checks=$((checks + 1))
    grep -qF -e "$2" "$1" || fail "std$1 does not say '$2'"
}

silent() {
    checks=$((checks + 1))
    [ ! -s "$1" ] || fail "std$1 is not empty"
}

# npy FILE DESCR SHAPE BYTES: a .npy file; BYTES is a format for printf.
npy() {
    header="{'descr': '$2', 'fortran_order': False, 'shape': $3, }"
    {
        printf '\223NUMPY\001\000'
        # shellcheck disable=SC2059
        printf "\\$(printf %03o ${#header})\\000"
        printf '%s' "$header"
        # shellcheck disable=SC2059
        printf "$4"
    } >"$1"
}

floats() { # the data of a small fp32 file, one number a line
    tail -c "$((4 * $2))" "$1" | od -An -v -tf4 -w4 | tr -d ' '
}

# ---- Help, version, usage ------------------------------------------------------------------------------------------

expect 0 --version; says out "heed "; silent err
expect 0 --help; says out "Exit codes"; silent err
expect 2; says err "Usage: heed COMMAND"; silent out
expect 2 frobnicate; says err "no command 'frobnicate'"; says err "heed --help"
expect 2 --frobnicate; says err "no option '--frobnicate'"
for command in demo run check bench explain info; do
    expect 0 --help; says out "$command"
    expect 0 $command --help; says out "Usage: heed $command"; says out Examples; silent err
    expect 2 $command --frobnicate; says err "heed $command: unknown or ambiguous option '--frobnicate'"
    says err "heed $command --help"; silent out
    expect 2 $command -Z; says err "unknown option '-Z'"
    expect 2 $command stray; says err "unexpected 'stray'"
done
expect 2 bench --dtype; says err "--dtype: needs a value"
expect 2 bench --causal=3; says err "--causal: takes no value"
expect 2 bench --help=3; says err "--help: takes no value"
expect 2 bench --dtype fp8; says err "'fp8' is not fp32, fp16, bf16 or fp64"
expect 2 bench --shape 1,2,3; says err "'1,2,3' is not B,H,S,D"
expect 2 bench --shape 1,2,3,4x; says err "is not B,H,S,D"
expect 2 bench --shape 0,2,3,4; says err "is not B,H,S,D"
expect 2 bench --sq 7; says err "need a --shape"
expect 2 bench --window 3; says err "LEFT,RIGHT"
expect 2 bench --stride 0; says err "whole number from 1 up"
expect 2 bench --csv --json; says err "contradict"
expect 2 bench --pass sideways; says err "forward, backward or both"
expect 2 bench --min-time 0; says err "above 0"
expect 2 bench --threads -1; says err "from 0 up"
expect 2 run --scale nan; says err "is not a number"
expect 2 run --seed -1; says err "2^64"
expect 2 run --align middle; says err "top-left or bottom-right"
expect 2 run --layout dsbh; says err "bhsd or bshd"
expect 2 run --backend tpu; says err "cpu, cuda or reference"
expect 2 explain --shape 1,1,1,1 --with glue; says err "a list of mask"

# ---- demo ----------------------------------------------------------------------------------------------------------

# The numbers of the documentation, computed in fp64; fp32 may differ by a few units in the last place shown.
cat >expected <<'END'
Q 0.680375 0.823295 -0.444451
K -0.211234 -0.604897 0.10794
V 0.566198 -0.329554 -0.0452059
O 0.016065 -0.0290427 -0.027025
O 0.011394 -0.00482534 -0.03082
O 0.0286616 -0.0218805 -0.0718517
dQ 0.00946975 0.00569055 0.000785498
dQ -0.00670553 -0.00763953 -0.0156887
dQ -0.00887811 0.0160615 0.0198677
dK 0.00480869 -0.00776059 -0.00402077
dK 0.0102126 0.0126519 0.0243553
dK 0.00513837 0.0136316 0.0141893
dV -0.0712795 -0.00727661 -0.00910686
dV -0.0345493 -0.0283635 0.00945967
dV -0.0471181 0.000656001 -0.015904
END
backends='cpu reference'
"$heed" demo --backend cuda >out 2>err </dev/null && backends="$backends cuda" # where there is a GPU
for backend in $backends; do
    expect 0 demo --threads 1 --backend $backend; says out "forward "; says out "backward "; says out "both "
    says out "largest difference from the fp64 reference"
    checks=$((checks + 1))
    awk 'function far(a, b) { return (a - b) * (a - b) > (2e-7 + 1e-6 * (b < 0 ? -b : b)) ^ 2 }
        NR == FNR { n[$1]++; want[$1, n[$1]] = $2 " " $3 " " $4; next }
        NF == 4 && $1 in n { name = $1; row = 0; $1 = ""; $0 = $0 }
        NF == 3 && name { row++
            if ((name, row) in want) { split(want[name, row], w, " "); seen++
                if (far($1, w[1]) || far($2, w[2]) || far($3, w[3])) {
                    print name, row, $0, "expected", want[name, row]; bad = 1 } } }
        END { exit bad || seen != 15 }' expected out || fail "demo --backend $backend: other numbers than documented"
done

# ---- info and explain ----------------------------------------------------------------------------------------------

expect 0 info; says out "forward_reference_f64"; says out "hardware threads"
expect 0 info --json; says out '"kernels": ['
OMP_NUM_THREADS=1; export OMP_NUM_THREADS
expect 0 info; says out " 1 used by default"
expect 0 explain --shape 2,8,512,64; says out ": taken, 1 thread,"
if ldd "$heed" | grep -q 'lib[gi]*omp'; then
    OMP_NUM_THREADS=3
    expect 0 info; says out " 3 used by default"
    expect 0 explain --shape 2,8,512,64; says out ": taken, 3 threads,"
    expect 0 explain --shape 2,8,512,64 --threads 2; says out ": taken, 2 threads,"
fi
unset OMP_NUM_THREADS
expect 0 explain --shape 2,8,512,64; says out ": taken"
expect 0 explain --shape 2,8,512,64 --backward --causal --with mask,bias,alibi,sink,views --dtype bf16
says out ": taken"
expect 0 explain --shape 2,8,512,64 --with ragged --json; says out '"kernel": "forward_'
expect 0 explain --shape 2,8,512,64 --with pages,padding; says out ": taken"
expect 0 explain --shape 1,8,512,64 --dtype fp64; says out "forward_reference_f64: taken"
expect 0 explain --shape 1,8,512,64 --device avx2; says out ": taken"
expect 0 explain --device list; says out h200; says out avx2
expect 2 explain; says err "one --shape"
expect 2 explain --shape 1,8,512,64 --heads-k 3; says err "heads"
most=9223372036854775807
expect 2 explain --shape 1,1,$most,64 --with pages; says err "block_table_columns: is 144115188075855872"
expect 2 explain --shape $most,1,1,8 --sk 100 --with pages; says err "q: shape $most x 1 x 1 x 8 is more bytes"
expect 2 explain --shape 4611686018427387905,1,1,1 --sk 256 --dtype fp16 --with pages; says err "is more bytes than 63 bits"
expect 2 explain --shape $most,$most,$most,$most --with views; says err "is more bytes than 63 bits count"
expect 2 explain --shape 1,8,512,9999; says err "head_dim"

# ---- run -----------------------------------------------------------------------------------------------------------

# q = 0 weighs all keys alike: o is the mean of v's rows 1 and 3, and lse is log 2.
zeros='\000\000\000\000'
npy q.npy '<f4' '(1, 2)' "$zeros$zeros"
npy k.npy '<f4' '(2, 2)' "$zeros$zeros$zeros$zeros"
npy v.npy '<f4' '(2, 1)' '\000\000\200\077\000\000\100\100'
qkv='-q q.npy -k k.npy -v v.npy'
expect 0 run $qkv -o o.npy --lse lse.npy; silent out; silent err
[ "$(floats o.npy 1)" = 2 ] || fail "o is $(floats o.npy 1), expected 2"
case $(floats lse.npy 1) in 0.693147*) ;; *) fail "lse is $(floats lse.npy 1), expected 0.693147" ;; esac

# A stride of 2 leaves the first key, a window of nothing but the position the last.
expect 0 run $qkv -o o.npy --stride 2
[ "$(floats o.npy 1)" = 1 ] || fail "o is $(floats o.npy 1), expected 1 with stride 2"
expect 0 run $qkv -o o.npy --window 0,0
[ "$(floats o.npy 1)" = 3 ] || fail "o is $(floats o.npy 1), expected 3 in the window"
expect 0 run $qkv -o o.npy --causal --align top-left
[ "$(floats o.npy 1)" = 1 ] || fail "o is $(floats o.npy 1), expected 1, top left"

# Numbers too small for a float are not the 0 that stands for a default. All weigh alike: the key with a product is no more.
npy one.npy '<f4' '(1, 2)' '\000\000\200\077\000\000\200\077'
npy keys.npy '<f4' '(2, 2)' "$zeros$zeros"'\000\000\200\077\000\000\200\077'
for tiny in '--scale 1e-60' '--softcap 1e-60'; do
    # shellcheck disable=SC2086
    expect 0 run -q one.npy -k keys.npy -v v.npy -o o.npy $tiny
    case $(floats o.npy 1) in 2 | 2.000000* | 1.999999*) ;; *) fail "o is $(floats o.npy 1), expected 2 with $tiny" ;; esac
done

# What is wrong is named, the exit code says whose fault it is, and an old result stays as it was.
cp o.npy old.npy
refused() { # CODE TEXT arguments...
    want_code=$1 text=$2
    shift 2
    expect "$want_code" run "$@"
    says err "$text"
    says err "heed run: "
    silent out
    checks=$((checks + 1))
    cmp -s o.npy old.npy || fail "o.npy changed"
    [ "$(find . -name 'o.npy?*' | wc -l)" -eq 0 ] || fail "a temporary file is left"
}
npy short.npy '<f4' '(1, 2)' "$zeros"
npy bomb.npy '<f4' '(4294967296, 4294967296)' ''
npy long.npy '<f4' '(1, 2)' "$zeros$zeros$zeros"
npy object.npy '|O' '(1, 2)' "$zeros$zeros"
npy int.npy '<i4' '(1, 2)' "$zeros$zeros"
npy half.npy '<f2' '(2, 2)' "$zeros$zeros"
npy flat.npy '<f4' '(2,)' "$zeros$zeros"
npy wide.npy '<f4' '(2, 3)' "$zeros$zeros$zeros$zeros$zeros$zeros"
npy cube.npy '<f4' '(1, 1, 2)' "$zeros$zeros"
npy vast.npy '<f4' '(0, 1000000000000)' ''
npy none.npy '<f4' '(0, 2)' ''
npy do.npy '<f4' '(1, 1)' "$zeros"
npy deep.npy '<f4' '(1, 1, 1, 1)' "$zeros"
npy pair.npy '<f4' '(2,)' "$zeros$zeros"
echo hello >text.npy
refused 2 'missing.npy: No such file' -q missing.npy -k k.npy -v v.npy -o o.npy
refused 2 'text.npy: is not a .npy file' -q text.npy -k k.npy -v v.npy -o o.npy
refused 2 'short.npy: is cut short' -q short.npy -k k.npy -v v.npy -o o.npy
refused 2 'bomb.npy: shape has more elements' -q bomb.npy -k k.npy -v v.npy -o o.npy
refused 2 'long.npy: has 4 bytes after the array' -q long.npy -k k.npy -v v.npy -o o.npy
refused 2 'Python objects' -q object.npy -k k.npy -v v.npy -o o.npy
refused 2 "int.npy: dtype is '<i4'" -q int.npy -k k.npy -v v.npy -o o.npy
refused 2 'half.npy: dtype is fp16, q.npy has fp32' -q q.npy -k half.npy -v v.npy -o o.npy
refused 2 'flat.npy: has 1 dimensions' -q flat.npy -k k.npy -v v.npy -o o.npy
refused 2 'cube.npy: has 3 dimensions, q.npy has 2' -q q.npy -k cube.npy -v v.npy -o o.npy
refused 2 'head_dim' -q q.npy -k wide.npy -v v.npy -o o.npy
refused 2 'head_dim' -q q.npy -k none.npy -v vast.npy -o o.npy
refused 2 'q.npy: dtype is fp32; expected bool' $qkv --mask q.npy -o o.npy
refused 2 'bias' $qkv --bias wide.npy -o o.npy
refused 2 'dropout' $qkv --dropout 1.5 -o o.npy
refused 2 '-q, -k and -v' -q q.npy -o o.npy
refused 2 'no result is asked for' $qkv
refused 2 'needs --do' $qkv -o o.npy --dq dq.npy
refused 2 'no gradient is asked for' $qkv -o o.npy --do v.npy
refused 2 '--dbias needs --bias' $qkv -o o.npy --do v.npy --dbias d.npy
refused 2 '--dsink needs --sink' $qkv -o o.npy --do do.npy --dsink d.npy
refused 2 'o.npy: is named for two results' $qkv -o o.npy --lse o.npy
refused 2 './o.npy: is named for two results' $qkv -o o.npy --lse ./o.npy
refused 2 '/new.npy: is named for two results' $qkv -o new.npy --lse "$PWD/new.npy"
ln -s o.npy other.npy
refused 2 'other.npy: is named for two results' $qkv -o o.npy --lse other.npy
refused 2 '--dlse is given, but no gradient' $qkv -o o.npy --dlse flat.npy
refused 2 'deep.npy: has 4 dimensions; expected 1 to 3' $qkv --do do.npy --dlse deep.npy --dq dq.npy
refused 2 'd_lse: rows is 2, q has 1' $qkv --do do.npy --dlse pair.npy --dq dq.npy
refused 2 'no_such_kernel' $qkv -o o.npy --kernel no_such_kernel
refused 1 'nowhere/lse.npy: No such file' $qkv -o o.npy --lse nowhere/lse.npy
refused 1 'full: No space left' $qkv -o o.npy --lse /dev/full

# Through a symbolic link to the file it names, which keeps its mode.
cp o.npy target.npy; chmod 600 target.npy; ln -s target.npy link.npy
expect 0 run $qkv -o link.npy
[ -L link.npy ] && [ "$(floats target.npy 1)" = 2 ] || fail "the link's target was not written"
[ "$(stat -c %a target.npy)" = 600 ] || fail "the mode changed"

# ---- check and bench -----------------------------------------------------------------------------------------------

expect 0 check --quick --threads 2; says out "backward_reference_f32"; says out " ok"; silent err
expect 0 check --quick --kernel backward_reference_f16 --json --seed 5; says out '"failures": 0'; silent err
# a problem whose gradients of the sink one nudge hardly moves: judged by several
expect 0 check --quick --kernel backward_reference_f16 --problem random --seed 1794978113; says out " ok"; silent err
expect 2 check --kernel no_such_kernel; says err "no_such_kernel"
expect 0 check --quick --kernel forward_reference_f32 --problem "large heads"; says out " 1        0 "; silent err
expect 0 check --quick --kernel cpu_plain --problem paged; says out backward_cpu_plain_f32 # which has none
expect 2 check --quick --kernel backward_cpu_plain --problem paged; says err "no problem for these kernels has 'paged'"
expect 2 check --quick --kernel forward_reference_f32 --problem frobnicate; says err "no problem for these kernels has 'frobnicate'"
expect 0 bench --shape 1,2,64,32 --min-time 0.01 --csv --causal; silent err
[ "$(wc -l <out)" -eq 3 ] || fail "bench --csv has not a head and two rows"
expect 0 bench --shape 1,4,64,32 --heads-k 2 --sq 1 --pass forward --min-time 0.01 --dtype fp32,bf16; says out "GB/s"
[ "$(grep -c forward_ out)" -eq 2 ] || fail "bench has not a row for each dtype"
expect 0 bench --shape 1,2,40,32 --min-time 0.01 --json --stride 2 --window 9,3 --pass backward
says out '"pass": "backward"'
expect 0 bench --shape 1,2,40,32 --min-time 0.01 --kernel forward_reference_f32
says out forward_reference_f32; says out backward_reference_f32
for shape in 4294967296,4294967296,1,1 1,1,9223372036854775807,9223372036854775807; do
    expect 1 bench --shape $shape; says err "no memory for B "
done
expect 0 bench --shape 1,2,40,32 --min-time 0.01 --dtype fp64; says out backward_reference_f64
expect 0 bench --shape 2,2,40,32 --min-time 0.01 --dtype fp32,fp16,bf16 --window 0,0; says out backward # which cancels
expect 0 bench --shape 2,2,40,32 --min-time 0.01 --dtype fp32,fp16,bf16 --stride 50; says out backward
expect 0 bench --shape 1,2,300,128 --sq 500 --sk 1 --min-time 0.01 --pass backward; says out backward
expect 0 bench --shape 2,2,40,32 --min-time 0.01 --dtype fp32,fp16,bf16 --scale 40; says out backward # P with errors of 1e-4
# flops ALIGN SQ SK FLOP: what bench counts for one causal head of 32
flops() {
    expect 0 bench --shape 1,1,64,32 --sq $2 --sk $3 --causal --align $1 --min-time 0.01 --pass forward --csv
    awk -F, -v want=$4 'NR == 2 { got = 1000 * $14 * $15; seen = got > 0.98 * want && got < 1.02 * want } END { exit !seen }' out ||
        fail "bench counts another number of FLOP than $4"
}
flops bottom-right 256 256 4194304 # 128 (256 256 / 2)
flops bottom-right 256 1024 29360128 # 128 (256 768 + 256 256 / 2)
flops bottom-right 1024 256 4194304
flops top-left 256 1024 4194304
flops top-left 1024 256 29360128
expect 1 bench --shape 1,2,40,32 --kernel forward_reference_f32 --dtype fp16; says err "this is the forward in fp16"
HEED_KERNEL=backward_cpu_plain_f32; export HEED_KERNEL
expect 0 bench --shape 1,2,40,32 --min-time 0.01 --pass backward; says out backward_cpu_plain_f32
expect 0 demo --threads 1
unset HEED_KERNEL
expect 2 bench --shape 1,2,40,32 --kernel no_such_kernel --pass forward; says err no_such_kernel
"$heed" info >/dev/full 2>err; code=$?
[ $code -eq 1 ] || fail "a full disk is not an error"

# Results that are wrong are noticed, whoever asks.
if [ -n "$spoiler" ]; then
    sound=$heed heed=$work/spoiled
    printf '#!/bin/sh\nLD_PRELOAD="%s" exec "%s" "$@"\n' "$spoiler" "$sound" >"$heed"
    chmod +x "$heed"
    expect 1 demo --threads 1; says err "heed demo: the results are wrong: "; says err "less than 1e-6 is fair"
    expect 1 check --quick --kernel forward_cpu_plain --problem plain; says err "heed check: 3 of 3 kernels failed"
    says out FAILED; says out "first: plain: o is off by "
    expect 1 check --quick --kernel forward_cpu_plain_f32 --problem causal --json; says out '"first_failure": "causal: o is'
    expect 0 check --quick --kernel forward_reference_f32 --problem plain; says out " ok"
    expect 1 bench --shape 1,2,64,32 --min-time 0.01 --pass forward; says err ": wrong result, not timed; see heed check"
    heed=$sound
fi

# At a terminal there are a bar and colours, unless NO_COLOR is set; above, in a pipe, neither.
if command -v script >/dev/null; then
    seen() { TERM=xterm script -qec "$1 '$heed' check --quick --kernel forward_reference_f32" /dev/null >out 2>err </dev/null; code=$?; }
    escape=$(printf '\033[') escape_pattern=$(printf '\033\\[K')
    seen "env -u NO_COLOR"; says out "[###"; says out "${escape}32m"
    seen "env NO_COLOR=1"; says out "[###"
    seen "stty cols 20; env NO_COLOR=1"; says out "[#####.] "
    checks=$((checks + 1))
    tr '\r' '\n' <out | sed "s/$escape_pattern//g" | grep '^\[.*%' | grep -q '.\{20\}' && fail "a bar longer than the line"
    seen "env NO_COLOR=1"
    checks=$((checks + 1))
    if grep -qF "${escape}32m" out; then fail "colours in spite of NO_COLOR"; fi
fi

# ---- A GPU, where there is one -------------------------------------------------------------------------------------

case $backends in
*cuda*)
    expect 0 demo; says out "by CUDA events"
    expect 0 info; says out "multiprocessors"
    expect 0 explain --shape 2,8,512,64 --backend cuda --dtype bf16; says out "forward_cuda_"
    expect 0 check --quick --kernel cuda; says out "forward_cuda_portable_f32"; says out " ok"
    expect 0 bench --backend cuda --shape 1,2,64,32 --min-time 0.01; says out "backward_cuda_"
    expect 0 run $qkv -o o.npy --backend cuda
    [ "$(floats o.npy 1)" = 2 ] || fail "o is $(floats o.npy 1), expected 2 from the GPU"
    ;;
*)
    for command in "demo" "bench --shape 1,2,64,32" "run $qkv -o nothing.npy" "explain --shape 1,2,64,32"; do
        # shellcheck disable=SC2086
        expect 1 $command --backend cuda; says err "no device: "; silent out
    done
    expect 0 demo; says out "no CUDA device"
    ;;
esac
expect 2 check --kernel cuda_tpu; says err "no kernel that runs here"

# ---- NumPy ---------------------------------------------------------------------------------------------------------

python=${HEED_PYTHON:-python3}
if "$python" -c 'import numpy' 2>/dev/null; then
    checks=$((checks + 1))
    "$python" "$here/test_cli_numpy.py" "$heed" || failures=$((failures + 1))
else
    echo "skipped: test_cli_numpy.py, as $python has no NumPy"
fi

echo "$checks checks, $failures failures"
[ $failures -eq 0 ]
