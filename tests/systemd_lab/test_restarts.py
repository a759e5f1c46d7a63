"""Restarts under a host's load: a pause, no error, and every acknowledged write is there."""

import contextlib
import json
import re
import time

import pytest

from systemd_lab.machine import PYTHON, Machine
from systemd_lab.test_instances import PAGE

pytestmark = pytest.mark.lab_systemd

PAUSE_SECONDS_MAX = 8.0
"""On a machine that is busy with other work; decision 92 has the figures."""
SETTLED_SECONDS = 3.0
"""Between restarts, so that each pause is seen alone."""

# Writes numbers in turn to 64 sectors, reads each back, and flushes after every eighth. It prints
# when each round ended until it is told to stop; then it reads all of them once more. Its argument
# is the gateway's socket.
LOAD = """
import json, os, sys, time
from sealane.client import sync

SECTORS, SECTOR = 64, 4096
nqn = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555"
with sync.connect(sys.argv[1]) as client:
    (volume,) = client.volumes.list()
    attached = client.volumes.attach(volume.name, host_nqn=nqn)
    with client.open(attached) as disk:
        written, ended, number = {}, [], 0
        print("begun", flush=True)
        while not os.path.exists("/run/stop"):
            number += 1
            place = number % SECTORS
            content = number.to_bytes(8, "little") * (SECTOR // 8)
            disk.write(place * SECTOR, content)
            written[place] = content
            if disk.read(place * SECTOR, SECTOR) != content:
                sys.exit(f"sector {place} is not what was written")
            if number % 8 == 0:
                disk.flush()
            ended.append(time.monotonic())
        for place, content in written.items():
            if disk.read(place * SECTOR, SECTOR) != content:
                sys.exit(f"sector {place} is not what was written, at the end")
pauses = [(b, b - a) for a, b in zip(ended, ended[1:])]
print(json.dumps({"rounds": number, "pauses": [p for p in pauses if p[1] > 0.05]}), flush=True)
"""

# Connects to a port until it is told to stop, and has each connection initialised (ICReq, ICResp).
CONNECTING = """
import collections, json, os, socket, sys, time

request = bytes([0, 0, 128, 0, 128]) + bytes(123)
ended, longest, gap, since = collections.Counter(), 0.0, 0.0, None
while not os.path.exists("/run/stop"):
    began = time.monotonic()
    try:
        with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 30) as host:
            host.sendall(request)
            ended["served" if host.recv(128, socket.MSG_WAITALL) else "closed"] += 1
            since = None
    except OSError as error:
        ended[type(error).__name__] += 1
        since = since or began
        gap = max(gap, time.monotonic() - since)
    longest = max(longest, time.monotonic() - began)
    time.sleep(0.01)
print(json.dumps({"longest": longest, "gap": gap, **ended}))
"""
PORTS = {"gateway": 4421, "target": 4420}
SOCKET = "/run/sealane-gateway/sealaned.sock"


@pytest.fixture
def roles(machine: Machine) -> Machine:
    """Return a machine with an instance of each role and a volume."""
    for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL):
        machine.shell(block)
    return machine


def restart(machine: Machine, what: str) -> None:
    """Restart what a row of the test names."""
    verb, _, role = what.partition(" ")
    if verb == "kill":
        # Until systemd has seen the death, the unit is still active.
        started = f"$(systemctl show --value -p InvocationID sealaned@{role})"
        machine.shell(
            f'before="{started}"; systemctl kill --signal=SIGKILL sealaned@{role}\n'
            f'until [ "{started}" != "$before" ] && systemctl is-active -q sealaned@{role}\n'
            "do sleep 0.1; done"
        )
    else:
        machine.run("systemctl", "restart", f"sealaned@{role}")


def test_a_host_sees_a_pause_and_no_error(roles: Machine) -> None:
    machine = roles
    events = (
        *("restart gateway", "restart target", "restart broker"),
        *("kill gateway", "kill target", "kill broker"),
    )
    began: dict[str, float] = {}
    with machine.start(PYTHON, "-c", LOAD, SOCKET) as load:
        assert load.stdout is not None
        assert load.stdout.readline() == "begun\n"
        for event in events:
            time.sleep(SETTLED_SECONDS)
            began[event] = time.monotonic()
            restart(machine, event)
        time.sleep(SETTLED_SECONDS)
        began["restart all"] = time.monotonic()
        machine.run("systemctl", "restart", "sealane.target")
        time.sleep(SETTLED_SECONDS)
        machine.run("touch", "/run/stop")
        said, complaints = load.communicate(timeout=60)
    assert load.returncode == 0, complaints + machine.journal()
    seen = json.loads(said)
    ends = [*list(began.values())[1:], time.monotonic()]
    longest = {
        event: max((p for at, p in seen["pauses"] if start <= at < end), default=0.0)
        for (event, start), end in zip(began.items(), ends, strict=True)
    }
    print(seen["rounds"], {event: round(pause, 2) for event, pause in longest.items()})
    assert max(longest.values()) < PAUSE_SECONDS_MAX, f"{longest}\n{machine.journal()}"


def test_a_restart_refuses_no_host(roles: Machine) -> None:
    machine = roles
    events = [f"{verb} {role}" for verb in ("restart", "kill") for role in PORTS]
    with contextlib.ExitStack() as stack:
        hosts = {
            role: stack.enter_context(machine.start(PYTHON, "-c", CONNECTING, str(port)))
            for role, port in PORTS.items()
        }
        for event in events:
            time.sleep(SETTLED_SECONDS)
            restart(machine, event)
        time.sleep(SETTLED_SECONDS)
        machine.run("systemctl", "restart", "sealane.target")
        time.sleep(SETTLED_SECONDS)
        for role in PORTS:
            assert machine.property(f"sealaned@{role}", "NFileDescriptorStore") == "1"
        machine.run("touch", "/run/stop")
        seen = {role: json.loads(host.communicate(timeout=60)[0]) for role, host in hosts.items()}
    print(seen)
    for role, ended in seen.items():
        assert ended["served"] > 0, seen
        assert "ConnectionRefusedError" not in ended, f"{role}: {seen}\n{machine.journal()}"
    # A stop is the end of the listener, too.
    machine.run("systemctl", "stop", "sealaned@gateway")
    assert machine.property("sealaned@gateway", "NFileDescriptorStore") == "0"
    connect = f"import socket; socket.create_connection(('127.0.0.1', {PORTS['gateway']}))"
    assert "ConnectionRefusedError" in machine.attempt(PYTHON, "-c", connect).stderr
