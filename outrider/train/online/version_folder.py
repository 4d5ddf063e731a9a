"""The folder of an adaptation: weights by version, and the record of the versions that served."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from outrider.core.errors import IncompatibleError
from outrider.train.online.files import load_weights, remove_partial, save_json, save_weights
from outrider.train.online.learner import newest_version, version_path
from outrider.train.online.versions import Version

VERSIONS = "versions.json"


class VersionFolder:
    """Reads and writes a folder; removes what a killed process left half written.

    Args:
        path: the folder; it need not exist.
        identity: what two runs in the folder must have in common, by name.
    """

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        self.path = path
        self._identity = dict(identity)
        remove_partial(path)

    def served(self) -> tuple[Version, ...]:
        """The versions that have served, the last one in service; none in a new folder.

        Raises:
            IncompatibleError: the folder is of another draft model.
        """
        record = self.path / VERSIONS
        if not record.exists():
            return ()
        document = json.loads(record.read_text())
        self._check(document["identity"])
        return tuple(map(Version.of, document["versions"]))

    def weights(self, version: Version) -> dict[str, Tensor]:
        """The weights of a version. Raises IncompatibleError if their file is gone."""
        path = self.weights_path(version)
        if not path.exists():
            raise IncompatibleError(
                f"{self.path / VERSIONS} says that version {version.number} serves, but there "
                f"is no {path}: put it back, or begin anew in another folder"
            )
        return load_weights(path)

    def weights_path(self, version: Version) -> Path:
        """The file of a version's weights."""
        return version_path(self.path, version.number)

    def save_weights(self, version: Version, weights: Mapping[str, Tensor]) -> None:
        """Saves the weights of a version. Raises SavingError."""
        save_weights(self.weights_path(version), weights)

    def save(self, versions: Sequence[Version], needed: Collection[Path]) -> None:
        """Saves the record, and deletes weights that no version will serve with again.

        Args:
            versions: as of :meth:`served`.
            needed: files of weights to keep. The newest two are kept, too.

        Raises:
            OSError: the disk is full, say.
        """
        document = {
            "identity": self._identity,
            "versions": [version.document() for version in versions],
        }
        save_json(self.path / VERSIONS, document)
        newest = newest_version(self.path)
        for file in (self.path / "versions").glob("[0-9]*.safetensors"):
            if file not in needed and int(file.stem) < newest - 1:
                file.unlink(missing_ok=True)

    def _check(self, identity: Mapping[str, str]) -> None:
        """Raises IncompatibleError unless the folder is of this draft model."""
        for name, value in self._identity.items():
            if identity.get(name) != value:
                raise IncompatibleError(
                    f"{self.path} holds an adaptation with {name} {identity.get(name)!r}, not "
                    f"{value!r}: give that one, or another folder"
                )
