# Steps that write and check $device pass after pass, and note how long each fault kept an I/O.

PASS="--size=6M --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite --bsrange=4k-64k
    --fdatasync=16 --verify=crc32c --verify_fatal=1 --verify_state_save=0 --eta=never"

# passes_begin: each pass leaves what fio measured in /out/pass-N.json
passes_begin() {
    dmesg -C
    passes_forever &
    passes=$!
    passes_done 1
}

passes_forever() {
    local status number=0
    until [ -e /tmp/passes-end ]; do
        status=0
        # shellcheck disable=SC2086
        fio --name=pass --filename="$device" $PASS --output-format=json \
            --output=/tmp/pass 2>/tmp/pass-errors || status=$?
        # As in files.sh: fio 3.33 now and then aborts by itself.
        if [ "$status" -gt 128 ] && ! grep -E 'verify:|err= *[1-9]' /tmp/pass /tmp/pass-errors; then
            echo "lab: fio crashed by itself, status $status"
        elif [ "$status" -ne 0 ]; then
            fail "fio found a fault: $(head -c 600 /tmp/pass-errors) $(head -c 300 /tmp/pass)"
            return
        else
            number=$((number + 1))
            mv /tmp/pass "/out/pass-$number.json"
            echo "$number" >/tmp/passes-number
        fi
    done
}

pass_number() {
    cat /tmp/passes-number 2>/dev/null || echo 0
}

# passes_done COUNT: that many more passes have ended
passes_done() {
    local wanted=$(($(pass_number) + $1)) tries=1200
    until [ "$(pass_number)" -ge "$wanted" ]; do
        kill -0 "$passes" || fail "the load has ended"
        [ $((tries -= 1)) -gt 0 ] || fail "no pass has ended for two minutes"
        sleep 0.1
    done
}

# fault WORD: the test's fault, during a pass; the pass that it fell into and the next one end
fault() {
    local before
    before=$(pass_number)
    call "$1"
    passes_done 2
    echo "$1 $before $(pass_number)" >>/out/faults.txt
    if dmesg | grep -E 'I/O error|Buffer I/O'; then
        fail "the host has seen errors"
    fi
}

passes_end() {
    touch /tmp/passes-end
    wait "$passes" || fail "the load in the background failed"
    echo "passes: $(pass_number) verified"
}
