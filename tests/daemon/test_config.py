"""Configuration: every kind of mistake gives one exact message."""

import os
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from control_plane import sealaned
from sealane.daemon.broker.policy import parse_policy
from sealane.daemon.check import check_names
from sealane.daemon.config import load_config
from sealane.daemon.runtime.config_types import Section
from sealane.daemon.runtime.parties import Members, Party
from sealane.daemon.runtime.sections import parse_toml
from sealane.errors import UsageError

NODE = '[node]\nname = "n"\n'
BROKER = '[broker]\npolicy_file = "/p"\nkey_file = "/k"\nallow_unsigned_policy = true\n'
ENROLMENT = (
    '[enrolment]\nbroker_address = "h:1"\nattestation_address = "h:2"\n'
    'trust_anchor = "/t"\nevidence = "software"\nkey_file = "/k"\n'
)

FABRIC = NODE + ENROLMENT + "[fabric]\nrate_max_bits_per_second = 1000000\n"

MISTAKES = {
    "jobs of nobody": (
        FABRIC + "jobs = {}\n",
        (
            "fabric.jobs: names nobody; allowed: at least one number in uids or groups, or an "
            "entry in access.jobs [config.value]"
        ),
    ),
    "nobody has access": (
        NODE + BROKER + "[access]\n",
        (
            "access: found {}; allowed: at least one entry in operators, jobs or readers "
            "[config.value]"
        ),
    ),
    "access of a user without a word for it": (
        NODE + BROKER + '[access]\njobs = ["1000"]\n',
        (
            'access.jobs.0: found "1000"; allowed: "user:" or "group:" and a name or number '
            "[config.value]"
        ),
    ),
    "access of everybody unmapped": (
        NODE + BROKER + '[access]\noperators = ["user:65534"]\n',
        (
            'access.operators.0: found "user:65534"; allowed: other numbers than 65534, which '
            "stands for every user or group that isn't mapped here [config.value]"
        ),
    ),
    "two directories of shared sockets": (
        FABRIC + 'jobs = { uids = [1], run_dir = "/r" }\n[access]\nreaders = ["user:2"]\n',
        ("fabric.jobs.run_dir: with a section [access] its run_dir is used instead [config.value]"),
    ),
    "user twice": (
        FABRIC + "jobs.uids = [1, 1]\n",
        "fabric.jobs.uids: found [1, 1]; allowed: numbers without duplicates [config.value]",
    ),
    "user that stands for every unmapped one": (
        FABRIC + "jobs.uids = [65534]\n",
        (
            "fabric.jobs.uids: found [65534]; allowed: other numbers than 65534, which stands for "
            "every user or group that isn't mapped here [config.value]"
        ),
    ),
    "group that stands for every unmapped one": (
        FABRIC + "jobs.groups = [65534]\n",
        (
            "fabric.jobs.groups: found [65534]; allowed: other numbers than 65534, which stands "
            "for every user or group that isn't mapped here [config.value]"
        ),
    ),
    "user by name": (
        FABRIC + 'jobs.uids = ["alice"]\n',
        'fabric.jobs.uids.0: found "alice"; allowed: an integer [config.type]',
    ),
    "sessions of a user": (
        FABRIC + "jobs = { uids = [1], limits.sessions = 0 }\n",
        "fabric.jobs.limits.sessions: found 0; allowed: 1…1024 [config.range]",
    ),
    "unknown key": (
        NODE + BROKER + 'listne = "127.0.0.1:1"\n',
        (
            "broker.listne: unknown key; did you mean 'listen'? allowed: allow_unsigned_policy, "
            "attestation_listen, audit_forward, audit_keep_bytes, audit_keep_days, "
            "audit_segment_bytes, audit_segment_hours, card_roots, collateral_dir, "
            "counter_index, counters, device_init, etcd, head_seconds, hsm, instance, key_file, "
            "listen, next_key, policy_file, policy_owner_key, policy_owners, store, tpm_roots "
            "[config.key.unknown]"
        ),
    ),
    "unknown section": (
        NODE + BROKER + "[gatway]\n",
        (
            "gatway: unknown key; did you mean 'gateway'? allowed: access, broker, enrolment, "
            "fabric, gateway, metrics, node, target, tpm, traces [config.key.unknown]"
        ),
    ),
    "unknown key without likeness": (
        NODE + "zzz = 1\n" + BROKER,
        (
            "node.zzz: unknown key; allowed: lock_memory, log_level, name, run_dir, "
            "space_warning_percent, state_dir "
            "[config.key.unknown]"
        ),
    ),
    "string for integer": (
        NODE + BROKER + 'instance = "1"\n',
        'broker.instance: found "1"; allowed: an integer [config.type]',
    ),
    "boolean for integer": (
        NODE + BROKER + "instance = true\n",
        "broker.instance: found true; allowed: an integer [config.type]",
    ),
    "integer for string": (
        "[node]\nname = 7\n" + BROKER,
        "node.name: found 7; allowed: a string [config.type]",
    ),
    "value for section": (
        "broker = 1\n" + NODE,
        "broker: found 1; allowed: a section [config.type]",
    ),
    "too small": (
        NODE + BROKER + "instance = 0\n",
        "broker.instance: found 0; allowed: 1…65535 [config.range]",
    ),
    "too large": (
        NODE + BROKER + "instance = 65536\n",
        "broker.instance: found 65536; allowed: 1…65535 [config.range]",
    ),
    "not one of": (
        '[node]\nname = "n"\nlog_level = "loud"\n' + BROKER,
        (
            "node.log_level: found \"loud\"; allowed: 'debug', 'info', 'warning' or 'error' "
            "[config.value]"
        ),
    ),
    "no address": (
        NODE + BROKER + 'listen = "7440"\n',
        'broker.listen: found "7440"; allowed: host:port, port 0…65535 [config.value]',
    ),
    "port too large": (
        NODE + BROKER + 'listen = "127.0.0.1:65536"\n',
        'broker.listen: found "127.0.0.1:65536"; allowed: host:port, port 0…65535 [config.value]',
    ),
    "listen on a name": (
        NODE + BROKER + 'listen = "host:1"\n',
        (
            'broker.listen: found "host:1"; allowed: address:port to listen on, an IP address and '
            "a port 0…65535 [config.value]"
        ),
    ),
    "plain front end open to the network": (
        NODE
        + ENROLMENT
        + '[gateway]\nlisten = "0.0.0.0:1"\ntarget_node = "t"\ntarget_address = "h:1"\n',
        (
            'gateway.listen: found "0.0.0.0:1"; allowed: a loopback address:port, because its '
            "data is not encrypted [config.value]"
        ),
    ),
    "gateway without a target": (
        NODE + ENROLMENT + '[gateway]\ntarget_node = "t"\n',
        (
            'gateway: found {"target_node": "t"}; allowed: either target_node and target_address, '
            "or [[gateway.targets]] [config.value]"
        ),
    ),
    "both forms of targets": (
        NODE
        + ENROLMENT
        + '[gateway]\ntarget_node = "t"\ntarget_address = "h:1"\n'
        + '[[gateway.targets]]\nnode = "u"\naddress = "h:2"\n',
        (
            'gateway: found {"target_node": "t", "target_address": "h:1", "targets": [{"node": '
            '"u", "addr…; allowed: either target_node and target_address, or [[gateway.targets]] '
            "[config.value]"
        ),
    ),
    "a target twice": (
        NODE
        + ENROLMENT
        + '[[gateway.targets]]\nnode = "u"\naddress = "h:2"\n'
        + '[[gateway.targets]]\nnode = "u"\naddress = "h:3"\n',
        (
            'gateway.targets: found [{"node": "u", "address": "h:2"}, {"node": "u", '
            '"address": "h:3"}]; allowed: nodes and addresses without duplicates [config.value]'
        ),
    ),
    "an address of two targets": (
        NODE
        + ENROLMENT
        + '[[gateway.targets]]\nnode = "u"\naddress = "h:2"\n'
        + '[[gateway.targets]]\nnode = "v"\naddress = "h:2"\n',
        (
            'gateway.targets: found [{"node": "u", "address": "h:2"}, {"node": "v", '
            '"address": "h:2"}]; allowed: nodes and addresses without duplicates [config.value]'
        ),
    ),
    "plain subsystem open to the network": (
        NODE
        + ENROLMENT
        + '[target]\nlisten = "192.0.2.1:1"\n'
        + '[[target.subsystems]]\nnqn = "nqn.2026-11.x:a"\nallow_any_host = true\n',
        (
            'target: found {"listen": "192.0.2.1:1", "subsystems": [{"nqn": "nqn.2026-11.x:a", '
            '"allow_an…; allowed: plain subsystems with a loopback target.listen only, unless '
            "allow_plain_network = true permits their data on the network in the clear "
            "[config.value]"
        ),
    ),
    "nvme store without namespaces": (
        NODE + ENROLMENT + '[target]\nstore = "nvme"\n',
        (
            'target: found {"store": "nvme"}; allowed: namespaces if store is "nvme", and only '
            "then [config.value]"
        ),
    ),
    "one namespace twice": (
        NODE
        + ENROLMENT
        + '[target]\nstore = "nvme"\n'
        + 'namespaces = ["/dev/ng0n1", "/dev/ng0n1"]\n',
        (
            'target: found {"store": "nvme", "namespaces": ["/dev/ng0n1", "/dev/ng0n1"]}; allowed: '
            "namespaces without duplicates [config.value]"
        ),
    ),
    "namespaces of a file store": (
        NODE + ENROLMENT + '[target]\nnamespaces = ["/dev/ng0n1"]\n',
        (
            'target: found {"namespaces": ["/dev/ng0n1"]}; allowed: namespaces if store is '
            '"nvme", and only then [config.value]'
        ),
    ),
    "emulated store without a drive": (
        NODE + ENROLMENT + '[target]\nstore = "emulated"\n',
        (
            'target: found {"store": "emulated"}; allowed: drive if store is "emulated", and only '
            "then [config.value]"
        ),
    ),
    "two subsystems of one name": (
        NODE
        + ENROLMENT
        + "[target]\n"
        + '[[target.subsystems]]\nnqn = "nqn.2026-11.x:a"\nallow_any_host = true\n' * 2,
        (
            'target.subsystems: found [{"nqn": "nqn.2026-11.x:a", "allow_any_host": true}, '
            '{"nqn": "nqn.2026-11.x:a…; allowed: subsystems without duplicate nqns [config.value]'
        ),
    ),
    "namespace without a size": (
        NODE
        + ENROLMENT
        + "[target]\n"
        + '[[target.subsystems]]\nnqn = "nqn.2026-11.x:a"\nallow_any_host = true\n'
        + '[[target.subsystems.namespaces]]\nnsid = 1\nstore = "memory"\n',
        "target.subsystems.0.namespaces.0.size_bytes: missing; it has no default [config.missing]",
    ),
    "relative path": (
        NODE + '[broker]\npolicy_file = "p"\nkey_file = "/k"\n',
        'broker.policy_file: found "p"; allowed: an absolute path [config.value]',
    ),
    "bad node name": (
        '[node]\nname = "N 1"\n' + BROKER,
        (
            'node.name: found "N 1"; allowed: 1…63 of a to z, 0 to 9 and '
            "'-', no '-' at either end "
            "[config.value]"
        ),
    ),
    "missing key": (
        NODE + '[broker]\nkey_file = "/k"\n',
        "broker.policy_file: missing; it has no default [config.missing]",
    ),
    "no key encryption key": (
        NODE + '[broker]\npolicy_file = "/p"\n',
        'broker: found {"policy_file": "/p"}; allowed: either key_file or hsm [config.value]',
    ),
    "next key without a place": (
        NODE + BROKER + "[broker.next_key]\n",
        "broker.next_key: found {}; allowed: either key_file or hsm [config.value]",
    ),
    "key file with evidence that has none": (
        NODE + ENROLMENT.replace("software", "tpm2") + "[target]\n",
        (
            'enrolment: found {"broker_address": "h:1", "attestation_address": "h:2", '
            '"trust_anchor": "/t",…; allowed: key_file if evidence is "software", and '
            "only then [config.value]"
        ),
    ),
    "store without its cluster": (
        NODE + BROKER.replace("[broker]\n", '[broker]\nstore = "etcd"\n'),
        (
            'broker: found {"store": "etcd", "policy_file": "/p", "key_file": "/k", '
            '"allow_unsigned_poli…; allowed: the section '
            'etcd if store is "etcd", and only then [config.value]'
        ),
    ),
    "cluster in the clear": (
        NODE + BROKER + '[broker.etcd]\nendpoints = ["127.0.0.1:2379", "etcd.example:2379"]\n',
        (
            'broker.etcd: found {"endpoints": ["127.0.0.1:2379", "etcd.example:2379"]}; allowed: '
            "only loopback endpoints without ca_file (mutual TLS) [config.value]"
        ),
    ),
    "audit log in the clear": (
        NODE + BROKER + '[broker.audit_forward]\naddress = "collector.example:6514"\n',
        (
            'broker.audit_forward: found {"address": "collector.example:6514"}; allowed: only a '
            "loopback address without ca_file (TLS) [config.value]"
        ),
    ),
    "authority of a socket": (
        NODE + BROKER + '[broker.audit_forward]\naddress = "/dev/log"\nca_file = "/ca"\n',
        (
            'broker.audit_forward: found {"address": "/dev/log", "ca_file": "/ca"}; allowed: no '
            "ca_file, because the address is one without TLS [config.value]"
        ),
    ),
    "OTLP in the clear": (
        NODE + BROKER + '[broker.audit_forward]\naddress = "http://192.0.2.1:4317"\n',
        (
            'broker.audit_forward.address: found "http://192.0.2.1:4317"; allowed: a loopback '
            "address:port after http://, because that is not encrypted [config.value]"
        ),
    ),
    "half of mutual TLS": (
        NODE + BROKER + '[broker.etcd]\nendpoints = ["h:1"]\nca_file = "/ca"\n',
        (
            'broker.etcd: found {"endpoints": ["h:1"], "ca_file": "/ca"}; allowed: all of ca_file, '
            "certificate_file and key_file, or none of them [config.value]"
        ),
    ),
    "spans in the clear": (
        NODE + BROKER + '[traces]\nendpoint = "http://192.0.2.1:4317"\n',
        (
            'traces.endpoint: found "http://192.0.2.1:4317"; allowed: a loopback address:port '
            "after http://, because that is not encrypted [config.value]"
        ),
    ),
    "collector without a scheme": (
        NODE + BROKER + '[traces]\nendpoint = "127.0.0.1:4317"\n',
        (
            'traces.endpoint: found "127.0.0.1:4317"; allowed: https://host:port, or http:// and a '
            "loopback address:port [config.value]"
        ),
    ),
    "certificates for no TLS": (
        NODE + BROKER + '[traces]\nendpoint = "http://127.0.0.1:4317"\nca_file = "/ca"\n',
        (
            'traces.ca_file: found "/ca"; allowed: nothing, because the endpoint is without TLS '
            "(http:) [config.value]"
        ),
    ),
    "cluster without members": (
        NODE + BROKER + "[broker.etcd]\nendpoints = []\n",
        (
            "broker.etcd.endpoints: found []; allowed: one or more host:port, without duplicates "
            "[config.value]"
        ),
    ),
    "register that no TPM has": (
        NODE
        + ENROLMENT.replace("software", "tpm2").replace('key_file = "/k"\n', "")
        + "[enrolment.tpm2]\npcrs = [24]\n[target]\n",
        (
            "enrolment.tpm2.pcrs: found [24]; allowed: one or more of 0…23, without duplicates "
            "[config.value]"
        ),
    ),
    "missing section": (BROKER, "node: missing; it has no default [config.missing]"),
    "no role": (
        NODE,
        (
            "no role; allowed: one or more of the sections [broker], [target], "
            "[gateway], [fabric] "
            "[config.role]"
        ),
    ),
    "role without enrolment": (
        NODE + "[target]\n",
        "enrolment: missing; the target role needs the section [enrolment] [config.missing]",
    ),
    "near beyond far": (
        FABRIC + "near_rtt_micros = 200\nfar_rtt_micros = 100\n",
        "fabric.far_rtt_micros: found 100; allowed: at least near_rtt_micros, 200 [config.value]",
    ),
    "marks that nobody makes": (
        FABRIC + 'congestion = "dctcp"\nmarking = "none"\n',
        (
            'fabric.marking: found "none"; allowed: "queue" or "phantom", '
            'because congestion is "dctcp" [config.value]'
        ),
    ),
    "a controller without its network": (
        FABRIC + 'congestion = "uno"\nline_bits_per_second = 1000000000\n',
        (
            "fabric.near_rtt_micros: found null; allowed: a number, "
            'because congestion is "uno" [config.value]'
        ),
    ),
    "marks that nobody makes, for a session": (
        FABRIC + 'congestion_allowed = ["dctcp"]\nmarking = "none"\n',
        (
            'fabric.marking: found "none"; allowed: "queue" or "phantom", '
            'because congestion_allowed has "dctcp" [config.value]'
        ),
    ),
    "a session's controller without its network": (
        FABRIC + 'congestion_allowed = ["rate", "uno"]\n',
        (
            "fabric.line_bits_per_second: found null; allowed: a number, "
            'because congestion_allowed has "uno" [config.value]'
        ),
    ),
    "an unknown controller for a session": (
        FABRIC + 'congestion_allowed = ["rate", "bbr"]\n',
        (
            'fabric.congestion_allowed.1: found "bbr"; '
            "allowed: 'rate', 'uno', 'gemini' or 'dctcp' [config.value]"
        ),
    ),
    "a controller for a session that is no list": (
        FABRIC + 'congestion_allowed = "rate"\n',
        'fabric.congestion_allowed: found "rate"; allowed: an array [config.type]',
    ),
    "an unknown controller": (
        FABRIC + 'congestion = "bbr"\n',
        (
            "fabric.congestion: found \"bbr\"; allowed: 'rate', 'uno', 'gemini' or 'dctcp' "
            "[config.value]"
        ),
    ),
    **{
        f"wires {wires}": (
            FABRIC + f"wires = {wires}\n",
            (
                f'fabric.wires: found {wires}; allowed: ["udp"], ["verbs"] or ["udp", "verbs"] '
                "[config.value]"
            ),
        )
        for wires in ("[]", '"udp"', '["tcp"]', '["udp", "udp"]', "[[]]", "[1]", "[{}]")
    },
    "too many paths over two wires": (
        FABRIC + 'paths = 17\nwires = ["udp", "verbs"]\n',
        (
            'fabric.wires: found ["udp", "verbs"]; allowed: 32 paths in all: data_listen times '
            "paths times wires [config.value]"
        ),
    ),
    "path threads for verbs": (
        FABRIC + 'path_threads = 1\nwires = ["verbs"]\n',
        (
            'fabric.wires: found ["verbs"]; allowed: "udp" only, because path_threads is above 0 '
            "[config.value]"
        ),
    ),
    "bad data address": (
        FABRIC + 'data_listen = "x"\n',
        'fabric.data_listen: found "x"; allowed: an IP address, or a list of them [config.value]',
    ),
    "too many paths": (
        NODE + ENROLMENT + "[fabric]\nrate_max_bits_per_second = 1000000\n"
        'data_listen = ["127.0.0.1", "::1"]\npaths = 17\n',
        (
            "fabric.paths: found 17; allowed: 1…16 for each address of data_listen, "
            "32 in all [config.value]"
        ),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_gives_one_exact_line(mistake: str, tmp_path: Path) -> None:
    text, line = MISTAKES[mistake]
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}: {line}"


@pytest.mark.parametrize(
    ("owners", "is_valid"),
    [
        ('policy_owners = { keys = ["/a", "/b"], threshold = 2 }', True),
        ('policy_owner_key = "/a"', True),
        ('policy_owners = { keys = ["/a", "/b"], threshold = 3 }', False),
        ('policy_owners = { keys = ["/a"], threshold = 0 }', False),
        ("policy_owners = { keys = [], threshold = 1 }", False),
        ('policy_owners = { keys = ["/a"] }', False),
        ('policy_owner_key = "/a"\npolicy_owners = { keys = ["/a"], threshold = 1 }', False),
        (
            'allow_unsigned_policy = true\npolicy_owners = { keys = ["/a"], threshold = 1 }',
            False,
        ),
        ("", False),
    ],
)
def test_owners_of_the_policy_are_named_in_one_way(
    owners: str, is_valid: bool, tmp_path: Path
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(NODE + BROKER.replace("allow_unsigned_policy = true", owners))
    if is_valid:
        assert load_config(path).broker is not None
        return
    with pytest.raises(UsageError) as caught:
        load_config(path)
    assert caught.value.reason.startswith("config.")


class Nested(Section):
    figures: dict[str, Annotated[int, Field(ge=1, le=9)]]
    numbers: list[Annotated[int, Field(ge=1, le=9)]]
    depth: Annotated[int, Field(ge=3, le=4)] = 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("figures.a = 0\nnumbers = []\n", "figures.a: found 0; allowed: at least 1"),
        ("figures.a = 10\nnumbers = []\n", "figures.a: found 10; allowed: at most 9"),
        ("figures = {}\nnumbers = [1, 10]\n", "found 10; allowed: at most 9"),
        # A key with the name of a field of the enclosing section isn't that field.
        ("figures.depth = 0\nnumbers = []\n", "allowed: at least 1"),
        ("figures = {}\nnumbers = []\ndepth = 0\n", "allowed: 3…4"),
    ],
)
def test_bounds_inside_tables_and_arrays_are_said(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_toml(Nested, text.encode(), source="c")
    assert caught.value.reason == "config.range"
    assert said in str(caught.value)


def test_command_prints_the_line_and_exits_2(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(NODE + BROKER + "instance = 0\n")
    ended = sealaned("--config", path, "--check")
    assert ended.returncode == 2
    assert ended.stderr == (
        f"sealaned: {path}: broker.instance: found 0; allowed: 1…65535 [config.range]\n"
    )
    assert ended.stdout == ""


@pytest.mark.parametrize("content", [None, b"[node", b"\xff", b"x" * (1 << 20) + b"y"])
def test_unreadable_file_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_configuration_is_frozen_and_has_the_roles_of_its_sections(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(NODE + BROKER + ENROLMENT + "[target]\n")
    config = load_config(path)
    assert config.roles == ("broker", "target")
    assert config.target_directory == "/var/lib/sealane/volumes"
    with pytest.raises(ValueError, match="frozen"):
        config.node.name = "other"  # type: ignore[misc]


GATEWAY = NODE + ENROLMENT + '[gateway]\ntarget_node = "t"\ntarget_address = "h:1"\n'


def test_accelerators_are_one_label_or_different_ones(tmp_path: Path) -> None:
    def accelerators(given: str) -> list[str]:
        path = tmp_path / "c.toml"
        path.write_text(f"{GATEWAY}{given}\n")
        gateway = load_config(path).gateway
        assert gateway is not None
        return gateway.accelerator

    assert accelerators("") == []
    assert accelerators('accelerator = "card0"') == ["card0"]
    assert accelerators('accelerator = ["card1", "card0"]') == ["card1", "card0"]
    for wrong in ('["card0", "card0"]', '["Card"]', "1", str([f"c{n}" for n in range(9)])):
        with pytest.raises(UsageError, match=r"gateway\.accelerator"):
            accelerators(f"accelerator = {wrong}")


def test_shipped_example_is_valid() -> None:
    example = Path(__file__).parents[2] / "systemd" / "sealaned.toml"
    assert load_config(example).roles == ("broker", "target", "gateway", "fabric")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "version: missing"),
        (
            "version = 1\n[software]\nalowed = true\n",
            "software.alowed: unknown key; did you mean 'allowed'?",
        ),
        ("version = 1\n[software]\n[[software.key]]\n", "software.key.0.fingerprint: missing"),
        (
            (
                'version = 1\n[software]\n[[software.key]]\nfingerprint="x"\nnodes=["a"]\n'
                'roles=["gateway"]\ntenant="t"\n'
            ),
            "software.key.0.fingerprint: found",
        ),
        (
            (
                f'version = 1\n[software]\n[[software.key]]\nfingerprint="sha256:{"0" * 64}"\n'
                'nodes=["a"]\nroles=["broker"]\ntenant="t"\n'
            ),
            "software.key.0.roles.0: found \"broker\"; allowed: 'target', 'gateway' or 'fabric'",
        ),
    ],
)
def test_policy_mistakes_are_refused(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        parse_policy(path.read_bytes(), source=str(path))
    assert str(caught.value).startswith(f"{path}: {expected}")


def test_policy_allows_software_only_if_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("version = 1\n[software]\n")
    assert not parse_policy(path.read_bytes(), source=str(path)).software_allowed


_PARTY = (
    '[[gateway.third_party]]\nname = "{name}"\naddress = "h:4420"\n'
    'subsystem_nqn = "nqn.2026-11.dev.sealane:disks"\nnamespace_id = {nsid}\n'
)


@pytest.mark.parametrize(
    ("parties", "is_valid"),
    [
        ([("a", 1), ("b", 2)], True),
        ([("a", 1), ("a", 2)], False),
        ([("a", 1), ("b", 1)], False),
    ],
)
def test_every_third_party_has_its_own_name_and_namespace(
    parties: list[tuple[str, int]], is_valid: bool, tmp_path: Path
) -> None:
    example = Path(__file__).parents[2] / "systemd" / "sealaned.toml"
    path = tmp_path / "c.toml"
    more = "".join(_PARTY.format(name=name, nsid=nsid) for name, nsid in parties)
    path.write_text(f"{example.read_text()}\n{more}")
    if is_valid:
        gateway = load_config(path).gateway
        assert gateway is not None
        assert [party.name for party in gateway.third_party] == ["a", "b"]
    else:
        with pytest.raises(UsageError, match="names and namespaces without duplicates"):
            load_config(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('target_node = "t"\ntarget_address = "h:1"\n', {"t": "h:1"}),
        (
            (
                '[[gateway.targets]]\nnode = "t"\naddress = "h:1"\n'
                '[[gateway.targets]]\nnode = "a"\naddress = "h:2"\n'
            ),
            {"t": "h:1", "a": "h:2"},
        ),
    ],
)
def test_the_targets_of_a_gateway_have_a_short_form(
    text: str, expected: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"{NODE}{ENROLMENT}[gateway]\n{text}")
    gateway = load_config(path).gateway
    assert gateway is not None
    assert [*gateway.addresses.items()] == [*expected.items()]


def test_a_name_that_this_machine_lacks_admits_nobody_and_only_check_refuses_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.toml"
    lists = 'operators = ["user:no-such-user", "user:7"]\njobs = ["group:no-such-group"]\n'
    path.write_text(FABRIC + "jobs.limits.sessions = 4\n[access]\n" + lists)
    config = load_config(path)
    assert config.members == {Party.OPERATOR: Members(uids=frozenset({7}))}
    assert config.is_shared
    assert config.access is not None
    assert config.access.unknown == ["user:no-such-user", "group:no-such-group"]
    with pytest.raises(UsageError, match="this machine has no user no-such-user"):
        check_names(config)
    path.write_text(NODE + BROKER + '[access]\noperators = ["user:7"]\n')
    check_names(load_config(path))


def test_who_may_be_a_job_is_not_for_everybody_to_say(tmp_path: Path) -> None:
    path = tmp_path / "sealaned.toml"
    path.write_text(FABRIC)
    path.chmod(0o666)
    assert load_config(path).fabric is not None
    path.write_text(FABRIC + "jobs.uids = [1]\n")
    for mode in (0o664, 0o646):
        path.chmod(mode)
        with pytest.raises(UsageError) as writable:
            load_config(path)
        assert writable.value.reason == "config.writable"
    path.chmod(0o644)
    assert load_config(path).fabric is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_does_not_say_who_may_be_a_job(tmp_path: Path) -> None:
    path = tmp_path / "sealaned.toml"
    path.write_text(FABRIC + "jobs.uids = [1]\n")
    path.chmod(0o600)
    os.chown(path, 54_321, 54_321)
    with pytest.raises(UsageError) as foreign:
        load_config(path)
    assert foreign.value.reason == "config.writable"


def test_listeners_that_are_kept_over_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    target = '[target]\nstore = "memory"\nlisten = "127.0.0.1:1"\n'
    file.write_text(NODE + ENROLMENT + target)
    assert load_config(file).kept_listeners == {"target.listen": "127.0.0.1:1"}
    file.write_text(
        NODE
        + ENROLMENT
        + target
        + 'discovery_listen = "127.0.0.1:2"\n[gateway]\nlisten = "127.0.0.1:3"\n'
        + 'target_node = "t"\ntarget_address = "h:3"\n'
        + '[metrics]\nlisten = "127.0.0.1:4"\n'
    )
    assert load_config(file).kept_listeners == {
        "target.listen": "127.0.0.1:1",
        "target.discovery_listen": "127.0.0.1:2",
        "gateway.listen": "127.0.0.1:3",
        "metrics.listen": "127.0.0.1:4",
    }


def test_a_fabric_without_a_controller_may_know_the_near_round_trip_alone(tmp_path: Path) -> None:
    path = tmp_path / "sealane.toml"
    path.write_text(FABRIC + "near_rtt_micros = 14\n")
    fabric = load_config(path).fabric
    assert fabric is not None
    assert (fabric.near_rtt_micros, fabric.far_rtt_micros) == (14, None)
