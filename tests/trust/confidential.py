"""Policy and collateral for confidential machines of synthetic vendors."""

from sealane.crypto.evidence.chain import key_sha256
from sealane.crypto.evidence.collateral import Collateral, VendorRoots
from sealane.crypto.evidence.collateral_loader import load_collateral
from vendors.amd import amd
from vendors.authority import NOW
from vendors.intel import intel
from vendors.nvidia import nvidia


def policy(evidence_type: str, *, secondary: str = "[]") -> str:
    """Write a policy for gateway `n` that requires `secondary` evidence."""
    genoa = amd("Genoa")
    zeros48, zeros16 = "00" * 48, "00" * 16
    snp = f"""
[[hardware]]
id = "chip-id:{genoa.chip_id.hex()}"
nodes = ["n"]
roles = ["gateway"]
tenant = "t"
devices = ["key-sha256:{_device_id()}"]
[[reference]]
name = "node"
evidence = "snp"
product = "Genoa"
roles = ["gateway"]
measurements.measurement = ["{"aa" * 48}"]
measurements.host_data = ["{"bb" * 32}"]
measurements.id_key_digest = ["{zeros48}"]
measurements.author_key_digest = ["{zeros48}"]
measurements.family_id = ["{zeros16}"]
measurements.image_id = ["{zeros16}"]
measurements.launch_mit_vector = "any"
measurements.current_mit_vector = "any"
tcb = {{ bootloader = 4, tee = 2, snp = 23, microcode = 200, guest_svn = 7 }}
tcb_statuses = []
properties = {{ report_version = [3, 4, 5], vmpl = [0] }}
flags = {{ revocation_checked = false }}
secondary = []
"""
    tdx = f"""
[[hardware]]
id = "ppid:{bytes(range(16)).hex()}"
nodes = ["n"]
roles = ["gateway"]
tenant = "t"
[[reference]]
name = "node"
evidence = "tdx"
product = "TDX"
roles = ["gateway"]
measurements.mrtd = ["{"a1" * 48}"]
measurements.rtmr0 = "any"
measurements.rtmr1 = "any"
measurements.rtmr2 = "any"
measurements.rtmr3 = "any"
measurements.mrseam = "any"
measurements.mrsignerseam = "any"
measurements.mrconfigid = "any"
measurements.mrowner = "any"
measurements.mrownerconfig = "any"
measurements.xfam = "any"
measurements.fmspc = "any"
tcb = {{ tdx_module = 6, pce_svn = 13, qe_svn = 6, tcb_evaluation_data_number = 17 }}
tcb_statuses = ["UpToDate"]
properties = {{ quote_version = [4, 5] }}
flags = {{}}
secondary = []
"""
    device = """
[[reference]]
name = "gpu"
evidence = "nvidia"
product = "GH100"
roles = ["gateway"]
measurements.block_1 = "any"
measurements.block_2 = "any"
measurements.block_64 = "any"
measurements.fwid = "any"
measurements.driver_version = "any"
measurements.vbios_version = "any"
tcb = {}
tcb_statuses = []
properties = { feature_flag = [0] }
flags = { revocation_checked = false }
secondary = []
"""
    node = snp if evidence_type == "snp" else tdx
    common = 'advisories = []\ncertified_keys = []\naccepted_tier = "affirming"\n'
    node = node.replace("secondary = []\n", f"secondary = {secondary}\n{common}")
    device = device.replace("secondary = []\n", f"secondary = []\n{common}")
    return f"version = 1\n{node}{device}"


def _device_id() -> str:
    return key_sha256(nvidia().device.certificate).hex()


def known() -> Collateral:
    """Return the synthetic vendors' roots and collateral."""
    roots = VendorRoots(
        amd={"Genoa": amd("Genoa").ark.certificate},
        intel=intel().root.certificate,
        nvidia=nvidia().root.certificate,
    )
    bundle = {"bundle": intel().collateral()}
    return load_collateral(bundle, roots=roots, high_water={}, now=NOW).collateral
