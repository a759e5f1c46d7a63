"""Jobs of several users at real fabrics: what is one's, no other has, sees, ends or stands in."""

import contextlib
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from control_plane import Daemon, sealanectl, short_directory
from fabric_daemons import fabric_daemons
from other_users import ALICE, BOB, GROUP, MALLORY, Job, answer_of, as_root
from session_pairs import RATE, REGION

pytestmark = as_root

LISTEN = f"""
async with connect(arguments[0]) as client:
    say("connected")
    async with client.listen_session(arguments[1], region_bytes={REGION}) as session:
        say(session.session.name)
        receiving = await session.post_receive(offset=0, length=5)
        await receiving
        say(bytes(session.region[:5]).decode())
        heard()
"""
OPEN = f"""
async with connect(arguments[0]) as client:
    async with client.open_session(
        arguments[1],
        region_bytes={REGION},
        peer_node=arguments[2],
        peer_address=arguments[3],
        rate_bits_per_second={RATE},
        wait_seconds=PATIENCE_SECONDS,
    ) as session:
        say(session.session.name)
        session.region[:5] = b"hello"
        await session.send(offset=0, length=5)
        heard()
"""
WAIT = f"""
async with connect(arguments[0]) as client:
    token = await grants.introduce(client.sessions, str(Path(arguments[0]).parent))
    request = sessions_pb2.ListenSessionRequest(
        job_token=token, display_name=arguments[1], region_bytes={REGION}
    )
    waiting = asyncio.ensure_future(reason(client.sessions.ListenSession(request)))
    own = []
    while not own and not waiting.done():
        page = await client.sessions.ListSessions(sessions_pb2.ListSessionsRequest())
        own = [each.name for each in page.sessions if each.display_name == arguments[1]]
        await asyncio.sleep(0.01)
    say([own[0] if own else "", token.hex(), waiting.result() if waiting.done() else ""])
    await asyncio.get_running_loop().run_in_executor(None, heard)
    say(waiting.result() if waiting.done() else "waiting")
"""


@dataclass(frozen=True)
class Site:
    """Two fabrics whose jobs may be Alice, Bob and the members of a group."""

    near: Daemon
    far: Daemon

    @property
    def address(self) -> str:
        return self.far.addresses["fabric_control"]


def jobs_socket(fabric: Daemon) -> str:
    return fabric.addresses["jobs_socket"]


@contextlib.contextmanager
def site(*, more: str = "") -> Iterator[Site]:
    """Start both; `more` has lines for the section [fabric.jobs]."""
    with short_directory() as root:
        root.chmod(0o711)
        section = f'[fabric.jobs]\nuids = [{ALICE}, {BOB}]\ngroups = [{GROUP}]\nrun_dir = "{root}/'
        metrics = '[metrics]\nlisten = "127.0.0.1:0"\n'
        with fabric_daemons(each_more=lambda name: f'{section}{name}"\n{more}{metrics}') as daemons:
            yield Site(*daemons.fabrics)


@pytest.fixture(scope="module")
def shared() -> Iterator[Site]:
    with site() as made:
        yield made


def sessions_of(fabric: Daemon) -> list[dict[str, Any]]:
    listed = sealanectl("--socket", fabric.socket, "--output", "json", "session", "list")
    assert listed.returncode == 0, listed.stderr
    found: list[dict[str, Any]] = json.loads(listed.stdout)
    return found


def test_a_message_between_jobs_of_two_users(shared: Site) -> None:
    with (
        Job(BOB, LISTEN, jobs_socket(shared.far), "data") as listening,
        Job(ALICE, OPEN, jobs_socket(shared.near), "data", "b", shared.address) as opening,
    ):
        assert listening.said() == "connected"
        name = opening.said()
        assert listening.said() != name
        assert listening.said() == "hello"
        (shown,) = [each for each in sessions_of(shared.near) if each["name"] == name]
        assert shown["uid"] == ALICE


OTHERS = """
async with connect(arguments[0]) as client:
    name, token, calls = arguments[1], bytes.fromhex(arguments[2]), client.sessions
    page = await calls.ListSessions(sessions_pb2.ListSessionsRequest())
    fabric = await calls.GetFabric(sessions_pb2.GetFabricRequest())
    own = await grants.introduce(calls, str(Path(arguments[0]).parent))

    async def watch():
        async for _ in calls.WatchSession(sessions_pb2.WatchSessionRequest(name=name)):
            pass

    say(
        {
            "listed": [each.name for each in page.sessions if each.uid != uid or each.name == name],
            "jobs": [each.name for each in fabric.jobs],
            "sessions": fabric.sessions,
            "get": await reason(calls.GetSession(sessions_pb2.GetSessionRequest(name=name))),
            "close": await reason(calls.CloseSession(sessions_pb2.CloseSessionRequest(name=name))),
            "watch": await reason(watch()),
            "listen": await reason(
                calls.ListenSession(
                    sessions_pb2.ListenSessionRequest(
                        job_token=token, display_name="as another", region_bytes=4096
                    )
                )
            ),
            "share": await reason(
                calls.ListenSession(
                    sessions_pb2.ListenSessionRequest(
                        job_token=own, display_name="as another", region_of=name
                    )
                )
            ),
            "open": await reason(
                calls.OpenSession(
                    sessions_pb2.OpenSessionRequest(
                        job_token=token,
                        display_name="as another",
                        region_bytes=4096,
                        peer_node="b",
                        peer_address="127.0.0.1:1",
                        rate_bits_per_second=1_000_000,
                    )
                )
            ),
        }
    )
"""


def test_what_is_one_users_another_neither_sees_nor_ends_nor_names(shared: Site) -> None:
    path = jobs_socket(shared.near)
    with Job(ALICE, WAIT, path, "private") as alice:
        name, token, failed = alice.said()
        assert not failed
        absent = "session.name.not_found"
        assert answer_of(BOB, OTHERS, path, name, token) == {
            "listed": [],
            "jobs": [],
            "sessions": 0,
            "get": absent,
            "close": absent,
            "watch": absent,
            "listen": "session.job.unknown",
            "share": "session.region.absent",
            "open": "session.job.unknown",
        }
        # The same name is no other's, and taken twice only by one user.
        with Job(BOB, WAIT, path, "private") as bob:
            assert bob.said()[2] == ""
        with Job(ALICE, WAIT, path, "private") as again:
            assert again.said()[2] == "session.listener.exists"
        alice.tell("enough")
        assert alice.said() == "waiting"


OPERATORS = """
async with connect(arguments[0]) as client:
    calls = {
        "drain": client.sessions.DrainFabric(sessions_pb2.DrainFabricRequest()),
        "volumes": client.volumes.create(size_bytes=4096, display_name="x"),
        "delete": client.volumes.delete("volumes/x"),
        "drain node": client.nodes.DrainNode(nodes_pb2.DrainNodeRequest()),
        "undrain node": client.nodes.UndrainNode(nodes_pb2.UndrainNodeRequest()),
    }
    async with grpc.aio.insecure_channel(f"unix:{arguments[0]}") as channel:
        reflect = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        )
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        calls |= {"reflection": conversation(reflect), "health": health(b"")}
        answers = {name: await reason(call) for name, call in calls.items()}
    node = await client.node()
    say([answers, list(node.addresses), list(node.roles)])
"""


@pytest.mark.slow
def test_jobs_make_no_call_of_an_operator(shared: Site) -> None:
    answers, addresses, roles = answer_of(ALICE, OPERATORS, jobs_socket(shared.near))
    unserved = {answers.pop(name) for name in ("volumes", "delete")}
    assert unserved == {"peer.unimplemented"}
    readers = {name: answers.pop(name) for name in ("reflection", "health")}
    assert set(readers.values()) == {"call.party.refused"}, readers
    assert set(answers.values()) == {"call.operator.refused"}, answers
    assert (addresses, roles) == (["fabric_control"], ["fabric"])
    drained = sealanectl("--socket", shared.near.socket, "--output", "json", "session", "limits")
    assert drained.returncode == 0


FETCH = """
async with connect(arguments[0]) as client:
    answers = []
    for token in arguments[1:]:
        grant = sessions_pb2.SessionGrant(ring_socket="ring.sock", ring_token=bytes.fromhex(token))
        try:
            await grants.fetch_ring(grant, str(Path(arguments[0]).parent))
            answers.append("served")
        except Error as error:
            answers.append(error.reason)
    say(answers)
"""
HELD = f"""
async with connect(arguments[0]) as client:
    directory = str(Path(arguments[0]).parent)
    request = sessions_pb2.OpenSessionRequest(
        job_token=await grants.introduce(client.sessions, directory),
        display_name=arguments[1],
        region_bytes={REGION},
        peer_node=arguments[2],
        peer_address=arguments[3],
        rate_bits_per_second={RATE},
    )
    while True:
        try:
            with translated():
                grant = await client.sessions.OpenSession(request)
            break
        except Error as error:
            if error.reason != "session.listener.absent":
                raise
    say(grant.ring_token.hex())
    heard()
    await grants.fetch_ring(grant, directory)
    say("served")
"""


def test_rings_are_handed_to_no_other_user_and_a_thief_does_not_use_them_up(shared: Site) -> None:
    path = jobs_socket(shared.near)
    with (
        Job(BOB, LISTEN, jobs_socket(shared.far), "rings"),
        Job(ALICE, HELD, path, "rings", "b", shared.address) as alice,
    ):
        token = alice.said()
        assert answer_of(BOB, FETCH, path, token, "00" * 15 + "01") == 2 * ["session.ring.refused"]
        alice.tell("go on")
        assert alice.said() == "served"


CONNECT = "say([await refused(path) for path in arguments])"


def test_users_and_groups_of_the_configuration_are_admitted_and_nobody_else(shared: Site) -> None:
    path = jobs_socket(shared.near)
    ring = Path(path).with_name("ring.sock")
    refused_by_ring = f"""
with contextlib.closing(socket.socket(socket.AF_UNIX)) as caller:
    caller.connect("{ring}")
    error = refusal_of(caller.recv(512))
    say(error and error.reason)
"""
    many = [100_000 + index for index in range(300)]
    for uid, gid, groups, expected in (
        (ALICE, ALICE, [], "served"),
        (MALLORY, GROUP, [], "served"),
        (MALLORY, MALLORY, [GROUP], "served"),
        (MALLORY, MALLORY, [*many, GROUP], "served"),
        (MALLORY, MALLORY, many, "door.user.refused"),
        (MALLORY, ALICE, [ALICE, BOB], "door.user.refused"),
        (0, 0, [], "door.user.refused"),
        (65_534, GROUP, [GROUP], "door.user.unmapped"),
    ):
        assert answer_of(uid, CONNECT, path, gid=gid, groups=groups) == [expected], uid
    assert answer_of(MALLORY, refused_by_ring) == "door.user.refused"
    lines = [each for each in shared.near.log_lines() if each["event"] == "job_caller_refused"]
    assert {each["uid"] for each in lines} == {MALLORY, 0, 65_534}
    metrics = urllib.request.urlopen(f"http://{shared.near.addresses['metrics']}/metrics").read()
    assert b'sealane_job_callers_refused_total{reason="door.user.unmapped"} 1.0' in metrics


REACH = """
pid, paths = arguments[0], arguments[1:]
found = {}


def attempt(name, act):
    try:
        act()
        found[name] = "done"
    except OSError as error:
        found[name] = errno.errorcode[error.errno]


libc = ctypes.CDLL(None, use_errno=True)


def trace():
    if libc.ptrace(0x4206, pid, 0, 0):  # PTRACE_SEIZE
        raise OSError(ctypes.get_errno(), "ptrace")


for path in paths:
    attempt(path, lambda: os.listdir(path) if os.path.isdir(path) else open(path, "rb").close())
for name in ("mem", "maps", "environ", "fd"):
    path = f"/proc/{pid}/{name}"
    attempt(name, lambda: os.listdir(path) if name == "fd" else open(path, "rb").close())
attempt("kill", lambda: os.kill(pid, signal.SIGTERM))
attempt("trace", trace)
attempt("replace", lambda: os.unlink(arguments[-1] + "/jobs.sock"))
attempt("bind", lambda: socket.socket(socket.AF_UNIX).bind(arguments[-1] + "/other.sock"))
say(found | {"operator": await refused(arguments[1] + "/sealaned.sock")})
"""


def test_the_daemon_and_its_files_are_out_of_jobs_reach(shared: Site) -> None:
    near = shared.near
    run = near.run_dir
    state = run.with_name("a")
    jobs = Path(jobs_socket(near)).parent
    closed = [run, state, state.with_name("a.pem"), *state.iterdir(), jobs]
    found = answer_of(ALICE, REACH, near.process.pid, *map(str, closed))
    assert found.pop("operator") == "daemon.refused"
    assert found.pop("kill") == found.pop("trace") == "EPERM"
    assert set(found.values()) == {"EACCES"}, found
    assert near.process.poll() is None


HOLD = """
held = []
for _ in range(arguments[1]):
    one = socket.socket(socket.AF_UNIX)
    one.setblocking(False)
    while True:
        try:
            one.connect(arguments[0])
            break
        except BlockingIOError:  # the queue of those that wait to be accepted is full
            await asyncio.sleep(0.01)
    held.append(one)
say("holding")
heard()
"""


def test_a_user_that_holds_connections_takes_those_of_no_other(shared: Site) -> None:
    path = jobs_socket(shared.near)
    with contextlib.ExitStack() as stack:
        with_session = stack.enter_context(Job(BOB, WAIT, path, "kept"))
        assert with_session.said()[2] == ""
        holding = [stack.enter_context(Job(ALICE, HOLD, path, 100)) for _ in range(3)]
        assert [each.said() for each in holding] == 3 * ["holding"]
        assert answer_of(BOB, CONNECT, path) == ["served"]
        with_session.tell("still?")
        assert with_session.said() == "waiting"


@pytest.mark.slow
def test_limits_of_a_user_are_over_all_its_processes_and_touch_no_other() -> None:
    with site(more="limits = { sessions = 2, rate_share = 0.5 }\n") as made:
        path = jobs_socket(made.near)
        with contextlib.ExitStack() as stack:

            def listens(uid: int, name: str) -> str:
                failed: str = stack.enter_context(Job(uid, WAIT, path, name)).said()[2]
                return failed

            assert [listens(ALICE, name) for name in ("x", "y", "z")] == [
                *("", ""),
                "session.limit.sessions",
            ]
            assert [listens(BOB, name) for name in ("x", "y")] == ["", ""]
            shown = sealanectl("--socket", made.near.socket, "session", "limits")
            assert "(each user)" in shown.stdout, shown.stdout


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare(1) is not installed")
def test_a_container_reaches_the_fabric_by_the_directory_that_is_mounted_in_it(
    shared: Site,
) -> None:
    outside = Path(jobs_socket(shared.near)).parent
    with short_directory() as root:
        root.chmod(0o755)
        inside = root / "in"
        inside.mkdir()
        mount = f'mount --bind "{outside}" "{inside}" && exec "$@"'
        prefix = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", mount, "sh"]
        probe = subprocess.run([*prefix, "true"], capture_output=True, check=False)
        if probe.returncode:
            pytest.skip(f"namespaces can't be made here: {probe.stderr.decode()}")
        path = str(inside / "jobs.sock")
        with (
            Job(BOB, LISTEN, jobs_socket(shared.far), "contained") as listening,
            Job(ALICE, OPEN, path, "contained", "b", shared.address, prefix=prefix) as opening,
        ):
            name = opening.said()
            assert [listening.said() for _ in range(3)][2] == "hello"
            (shown,) = [each for each in sessions_of(shared.near) if each["name"] == name]
            assert shown["uid"] == ALICE


NAMESPACED = """
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: its files in /proc are its user's again
if libc.unshare(0x10000000):  # CLONE_NEWUSER
    say("none")
    return
for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
    Path("/proc/self", name).write_text(line)
assert os.geteuid() == 0
say(await refused(arguments[0]))
"""


def test_root_of_a_users_own_namespace_is_that_user(shared: Site) -> None:
    path = jobs_socket(shared.near)
    for uid, expected in ((ALICE, "served"), (MALLORY, "door.user.refused")):
        found = answer_of(uid, NAMESPACED, path)
        if found == "none":
            pytest.skip("a user can't make a namespace here")
        assert found == expected
