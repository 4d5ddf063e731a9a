"""The command that a result names."""

import subprocess
import sys
from pathlib import Path

PROGRAM = "from outrider.lab.metadata import command_line\nprint(command_line())\n"


def test_a_command_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    """A script is called by its name, a module by ``python -m``; arguments are quoted."""
    (tmp_path / "script.py").write_text(PROGRAM)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(PROGRAM)
    (tmp_path / "package" / "part.py").write_text(PROGRAM)
    for arguments, expected in (
        ([str(tmp_path / "script.py"), "--limit", "3"], "script.py --limit 3"),
        (["-m", "package", "a b"], "python -m package 'a b'"),
        (["-m", "package.part"], "python -m package.part"),
    ):
        printed = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert printed.stdout.strip() == expected
