"""The size of a sector is said once in Python and once in Rust, alike."""

import re
from pathlib import Path

from sealane.protocol.sector import METADATA_BYTES, SECTOR_BYTES

ROOT = Path(__file__).parents[2]
HOME = ROOT / "protocol" / "sector.py"
DEFINITION = re.compile(
    r"^_?(?:SECTOR|BLOCK|DATA)_BYTES\b[^=\n]*= (?:4096|4_096|1 << 12)$", re.MULTILINE
)


def test_python_and_rust_agree() -> None:
    source = (ROOT / "native" / "proto" / "src" / "sector.rs").read_text()
    (data,) = re.findall(r"^pub const DATA_BYTES: usize = (\d+);", source, re.MULTILINE)
    (metadata,) = re.findall(r"^pub const METADATA_BYTES: usize = (\d+);", source, re.MULTILINE)
    assert (int(data), int(metadata)) == (SECTOR_BYTES, METADATA_BYTES)


def test_python_defines_it_once() -> None:
    packages = [p.readlink().name for p in (ROOT / "src" / "sealane").iterdir() if p.is_symlink()]
    files = [path for name in packages for path in (ROOT / name).rglob("*.py")]
    assert [path for path in files if DEFINITION.search(path.read_text())] == [HOME]
