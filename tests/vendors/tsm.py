"""configfs-tsm emulated by ordinary files, with selectable hardware."""

from collections.abc import Callable
from pathlib import Path

from sealane.daemon.node.evidence.tsm import ReportTree


class ImitationTree(ReportTree):
    """Files that behave like configfs: created, filled and emptied with the report."""

    def __init__(
        self,
        root: Path,
        provider: str,
        *,
        sign: Callable[[bytes], bytes] = lambda data: b"signed:" + data,
        table: bytes = b"certificates",
    ) -> None:
        super().__init__(root)
        self.provider = provider
        self.sign = sign
        self.table = table
        self.strangers = 0  # pending writes by other processes
        self.signed: list[bytes] = []

    def create(self) -> Path:
        directory = super().create()
        (directory / "provider").write_text(f"{self.provider}\n")
        (directory / "generation").write_text("7\n")
        return directory

    def remove(self, directory: Path) -> None:
        for path in directory.iterdir():
            path.unlink()
        super().remove(directory)

    def write(self, path: Path, content: bytes) -> None:
        super().write(path, content)
        assert path.name == "inblob"
        assert len(content) == 64
        self.signed.append(content)
        writes = 1
        if self.strangers:
            self.strangers -= 1
            content, writes = bytes(64), 2
        (path.parent / "generation").write_text(f"{7 + writes}\n")
        (path.parent / "outblob").write_bytes(self.sign(content))
        (path.parent / "auxblob").write_bytes(self.table)
