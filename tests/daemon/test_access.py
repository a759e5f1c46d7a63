"""Users other than the daemon's, at daemons of every role: what each party is served."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from control_plane import Daemon, Site, daemon, sealaned, short_directory
from fabric_daemons import SECTION
from other_users import ALICE, BOB, GROUP, MALLORY, Job, answer_of, as_root
from sealane.daemon.runtime.local_calls import CALL_CLASSES, CallClass

pytestmark = as_root

READER = 54_324
BOTH = 54_325
"""A user who may run jobs and read."""
ROLES = ("broker", "target", "gateway", "fabric")
_SERVICES = {
    "broker": ("Policies", "AuditLog", "Operator", "DeviceRegistry", "Membership"),
    "target": ("Subsystems",),
    "gateway": ("Volumes", "Offload"),
    "fabric": ("Sessions",),
}
STREAMS = {
    "/sealane.v1.AuditLog/ExportAudit",
    "/sealane.v1.Operator/TakeSnapshot",
    "/sealane.v1.Volumes/WatchVolume",
    "/sealane.v1.Sessions/WatchSession",
    "/grpc.health.v1.Health/Watch",
}
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def access(run_dir: str, *, readers: str = f'"user:{READER}", "user:{BOTH}"') -> str:
    return (
        f'[access]\noperators = ["group:{GROUP}"]\njobs = ["user:{BOB}", "user:{BOTH}"]\n'
        f'readers = [{readers}]\nrun_dir = "{run_dir}"\n'
    )


@dataclass(frozen=True)
class Daemons:
    """A daemon of each role, all open to the same users."""

    site: Site
    of: dict[str, Daemon]

    def shared(self, role: str) -> str:
        return self.of[role].addresses["jobs_socket"]


@pytest.fixture(scope="module")
def daemons() -> Iterator[Daemons]:
    with short_directory() as root, contextlib.ExitStack() as stack:
        root.chmod(0o711)
        site = Site(root)
        site.write_policy({role: [role] for role in ROLES[1:]})
        config = site.broker_config()
        config.write_text(config.read_text() + access(f"{root}/b"))
        broker = stack.enter_context(daemon(config))
        started = {"broker": broker}

        def start(role: str, text: str) -> None:
            enrolment = site.enrolment(role, broker)
            written = site.write_config(role, enrolment + text + access(f"{root}/{role[0]}"))
            started[role] = stack.enter_context(daemon(written))

        start(
            "target",
            '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\nstore = "memory"\n'
            '[metrics]\nlisten = "127.0.0.1:0"\n',
        )
        start(
            "gateway",
            '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "target"\n'
            f'target_address = "{started["target"].addresses["target_control"]}"\n',
        )
        start("fabric", SECTION)
        yield Daemons(site, started)


def methods_of(role: str) -> list[str]:
    services = {f"sealane.v1.{name}" for name in ("Nodes", *_SERVICES[role])}
    own = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} | services
    return sorted(method for method in CALL_CLASSES if method.split("/")[1] in own)


CALLS = """
path, methods, streams, dialogue = arguments
answers = {}
async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
    for method in methods:
        if method == dialogue:
            call = conversation(channel.stream_stream(method))
        elif method in streams:
            call = first(channel.unary_stream(method)(b"", timeout=20))
        else:
            call = channel.unary_unary(method)(b"", timeout=20)
        answers[method] = await reason(call)
say(answers)
"""


def refused_of(
    uid: int, daemons: Daemons, role: str, methods: list[str], **who: Any
) -> dict[str, str]:
    """Return the methods that are refused to a user, each with the reason."""
    answers = answer_of(
        uid, CALLS, daemons.shared(role), methods, sorted(STREAMS), REFLECTION, **who
    )
    refusals = {"call.operator.refused", "call.party.refused"}
    assert set(answers) == set(methods)
    return {method: each for method, each in answers.items() if each in refusals}


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_jobs_and_readers_are_refused_what_is_not_theirs_at_every_role(
    daemons: Daemons, role: str
) -> None:
    methods = methods_of(role)
    for uid, allowed in (
        (BOB, {CallClass.USE, CallClass.OWN}),
        (READER, {CallClass.READ, CallClass.OWN}),
    ):
        expected = {
            method: "call.operator.refused"
            if CALL_CLASSES[method] is CallClass.OPERATE
            else "call.party.refused"
            for method in methods
            if CALL_CLASSES[method] not in allowed
        }
        assert refused_of(uid, daemons, role, methods) == expected, uid
    lines = [each for each in daemons.of[role].log_lines() if each["event"] == "call_refused"]
    # Few of them are written, so the job's may leave no room for the reader's.
    assert BOB in {each.get("uid") for each in lines}


@pytest.mark.parametrize("role", ROLES)
def test_an_operator_by_a_supplementary_group_is_served_everything(
    daemons: Daemons, role: str
) -> None:
    # Those that change something are left out, except for those that an empty request can't do.
    harmless = {
        "/sealane.v1.Policies/ApplyPolicy",
        "/sealane.v1.DeviceRegistry/MoveDevice",
        "/sealane.v1.Membership/RevokeNode",
        "/sealane.v1.Volumes/DeleteVolume",
        "/sealane.v1.Volumes/AttachVolume",
        "/sealane.v1.Offload/DrainAccelerator",
        "/sealane.v1.Sessions/OpenSession",
        "/sealane.v1.Nodes/UndrainNode",
    }
    methods = [
        method
        for method in methods_of(role)
        if CALL_CLASSES[method] is not CallClass.OPERATE or method in harmless
    ]
    assert refused_of(ALICE, daemons, role, methods, groups=[GROUP]) == {}


@pytest.mark.parametrize("role", ROLES)
def test_whoever_is_not_listed_is_refused_at_the_door(daemons: Daemons, role: str) -> None:
    connect = "say([await refused(path) for path in arguments])"
    path = daemons.shared(role)
    assert answer_of(MALLORY, connect, path) == ["door.user.refused"]
    assert answer_of(0, connect, path) == ["door.user.refused"]
    assert answer_of(65_534, connect, path, groups=[GROUP]) == ["door.user.unmapped"]
    assert answer_of(ALICE, connect, daemons.of[role].socket, groups=[GROUP]) == ["daemon.refused"]
    lines = [each for each in daemons.of[role].log_lines() if each["event"] == "job_caller_refused"]
    # At the fabric another test's reader may have been refused a ring.
    assert {each["uid"] for each in lines} - {READER} == {MALLORY, 0, 65_534}


SEEN = """
async with connect(arguments[0]) as client:
    node = await client.node()
    say([sorted(node.addresses), list(node.roles), node.HasField("drain")])
"""


def test_jobs_see_less_of_a_node_than_readers(daemons: Daemons) -> None:
    path = daemons.shared("fabric")
    assert answer_of(BOB, SEEN, path) == [["fabric_control"], ["fabric"], False]
    addresses, roles, has_drain = answer_of(READER, SEEN, path)
    assert {"socket", "jobs_socket", "fabric_control"} <= set(addresses)
    assert (roles, has_drain) == (["fabric"], True)
    assert answer_of(BOB, SEEN, daemons.shared("gateway")) == [[], [], False]


HELD = """
async with connect(arguments[0]) as client:
    token = await grants.introduce(client.sessions, str(Path(arguments[0]).parent))
    request = sessions_pb2.ListenSessionRequest(
        job_token=token, display_name="held", region_bytes=4096
    )
    waiting = asyncio.ensure_future(reason(client.sessions.ListenSession(request)))
    own = []
    while not own:
        page = await client.sessions.ListSessions(sessions_pb2.ListSessionsRequest())
        own = [each.name for each in page.sessions]
        await asyncio.sleep(0.01)
    say(own)
    await asyncio.get_running_loop().run_in_executor(None, heard)
"""
LISTED = """
async with connect(arguments[0]) as client:
    page = await client.sessions.ListSessions(sessions_pb2.ListSessionsRequest())
    fabric = await client.sessions.GetFabric(sessions_pb2.GetFabricRequest())
    try:
        token = await grants.introduce(client.sessions, str(Path(arguments[0]).parent))
        introduced = "served"
    except Error as error:
        introduced = error.reason
    close = sessions_pb2.CloseSessionRequest(name=arguments[1])
    closed = await reason(client.sessions.CloseSession(close))
    say([[each.name for each in page.sessions], len(fabric.jobs), introduced, closed])
"""


def test_sessions_of_a_job_are_seen_by_readers_and_touched_by_its_user_and_operators(
    daemons: Daemons,
) -> None:
    path = daemons.shared("fabric")
    with Job(BOB, HELD, path) as job:
        (name,) = job.said()
        assert answer_of(READER, LISTED, path, name) == [
            [name],
            1,
            "session.job.refused",
            "call.party.refused",
        ]
        listed, _, introduced, closed = answer_of(BOTH, LISTED, path, name)
        assert (listed, introduced, closed) == ([name], "served", "session.name.not_found")
        listed, _, introduced, closed = answer_of(ALICE, LISTED, path, name, groups=[GROUP])
        assert (listed, introduced, closed) == ([name], "served", "served")


WATCH = """
async with grpc.aio.insecure_channel(f"unix:{arguments[0]}") as channel:
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
    check = channel.unary_unary("/grpc.health.v1.Health/Check")

    async def follow():
        async for _ in watch(b""):
            say("watching")

    following = asyncio.ensure_future(reason(follow()))
    await asyncio.get_running_loop().run_in_executor(None, heard)
    say(await reason(check(b"")))
    say(await following)
"""


@pytest.mark.slow
def test_a_reload_takes_a_right_from_who_is_connected_and_from_what_it_watches(
    daemons: Daemons,
) -> None:
    config = daemons.site.root / "target.toml"
    text = config.read_text()
    with Job(READER, WATCH, daemons.shared("target")) as job:
        assert job.said() == "watching"
        config.write_text(text.replace(f'"user:{READER}", ', ""))
        ended = sealaned("--config", config, "--reload")
        assert ended.returncode == 0, ended.stderr
        job.tell("go on")
        # The connection has ended, and another one is refused at the door.
        assert job.said() != "served"
        assert job.said() != "served"
        connect = "say(await refused(arguments[0]))"
        assert answer_of(READER, connect, daemons.shared("target")) == "door.user.refused"
    # The sockets themselves don't come or go while the daemon runs.
    config.write_text(text.partition("[access]")[0])
    ended = sealaned("--config", config, "--reload")
    assert (ended.returncode, "[reload.access]" in ended.stderr) == (2, True), ended.stderr
    config.write_text(text)
    assert sealaned("--config", config, "--reload").returncode == 0


FAULTY = """
[[target.subsystems]]
nqn = "nqn.2026-01.io.sealane.test:faulty"
hosts = [{nqn = "nqn.2026-01.io.sealane.test:host"}]

[[target.subsystems.namespaces]]
nsid = 1
store = "file"
path = "/proc/no-such-place/store"
size_bytes = 1048576
"""


def test_a_right_is_withdrawn_although_another_part_of_the_reload_fails(daemons: Daemons) -> None:
    config = daemons.site.root / "target.toml"
    text = config.read_text()
    connect = "say(await refused(arguments[0]))"
    path = daemons.shared("target")
    assert answer_of(READER, connect, path) == "served"
    try:
        config.write_text(text.replace(f'"user:{READER}", ', "") + FAULTY)
        failed = sealaned("--config", config, "--reload")
        assert (failed.returncode != 0, "config." in failed.stderr) == (True, False), failed.stderr
        assert answer_of(READER, connect, path) == "door.user.refused"
    finally:
        config.write_text(text)
        assert sealaned("--config", config, "--reload").returncode == 0
