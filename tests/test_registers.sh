#!/usr/bin/env bash
# The registers of every CUDA kernel, from what ptxas said while the build in the folder $1 was made. Fails where a kernel
# spills registers, keeps anything in local memory, or has its wgmma serialised (notes C7500 to C7599).
set -euo pipefail
cd "$1"

mapfile -t reports < <(find . -name '*.cu.o.report' | sort)
if [[ ${#reports[@]} -eq 0 ]]; then
    echo "$1: no report of ptxas; is this a build with CUDA?" >&2
    exit 1
fi

# One line for each kernel and chip: chip, registers, spilled bytes, bytes of stack, kernel.
cat "${reports[@]}" | awk '
    /Compiling entry function/ { split($0, part, "\047"); kernel = part[2]; chip = part[4]; stack = spills = "?" }
    /bytes stack frame/ && kernel { stack = $1; spills = $5 + $9 }
    /Used [0-9]+ registers/ {
        match($0, /Used [0-9]+/)
        print chip, substr($0, RSTART + 5, RLENGTH - 5), spills, stack, kernel
        kernel = ""
    }' | c++filt -p | sed 's/void //' | sort -k1,1 -k5 >registers.txt

printf '%-8s %9s %7s %6s  %s\n' chip registers spilled stack kernel
while read -r chip registers spilled stack kernel; do
    printf '%-8s %9s %7s %6s  %s\n' "$chip" "$registers" "$spilled" "$stack" "$kernel"
done <registers.txt

failures=0
bad=$(awk '$3 != 0 || $4 != 0' registers.txt)
if [[ -n $bad ]]; then
    printf '\nspills or local memory (%d):\n%s\n' "$(wc -l <<<"$bad")" "$bad"
    failures=1
fi
if notes=$(grep -h 'C75[0-9][0-9]' "${reports[@]}"); then
    printf '\nserialised wgmma:\n%s\n' "$notes"
    failures=1
fi
printf '\n%d kernels, the most registers %d\n' "$(wc -l <registers.txt)" "$(sort -k2,2n registers.txt | tail -1 | cut -d' ' -f2)"
exit $failures
