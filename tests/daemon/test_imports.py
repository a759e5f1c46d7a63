"""A daemon imports the roles that it serves, and no others: imports are most of a start's work."""

import subprocess
import sys

import pytest

ROLES = ("broker", "fabric", "gateway", "target")
IMPORTED = (
    "import sys; {imports}; "
    "print(*sorted({{name.split('.')[2] for name in sys.modules if name.count('.') > 2 "
    "and name.startswith('sealane.daemon.')}} & {roles!r}))"
)


def imported_roles(imports: str) -> list[str]:
    """Return the roles of which a fresh interpreter has modules after `imports`."""
    code = IMPORTED.format(imports=imports, roles=set(ROLES))
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.split()


def test_no_role_is_imported_before_it_starts() -> None:
    assert imported_roles("import sealane.daemon.main") == []


@pytest.mark.parametrize(
    ("role", "also"), [("broker", []), ("fabric", []), ("gateway", ["target"]), ("target", [])]
)
def test_a_role_imports_no_other(role: str, also: list[str]) -> None:
    """A gateway serves third parties' namespaces to itself with a target's data path."""
    assert imported_roles(f"import sealane.daemon.{role}.role") == sorted([role, *also])
