"""Which model a name means, and whether its weights are the same as before."""

from pathlib import Path

from outrider.lab.model_files import fingerprint, same_model


def model_in(folder: Path, weights: bytes = b"weights") -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


def test_two_names_of_a_model(tmp_path: Path) -> None:
    big = model_in(tmp_path / "big")
    assert same_model(big, f"{big}/")
    assert same_model("someone/model", "someone/model")
    assert not same_model("someone/model", "someone/other")
    assert not same_model(big, str(tmp_path))
    assert same_model(None, None)
    assert not same_model(big, None)


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    """Also where only a few bytes of a large file differ in every megabyte, as after training."""
    first = model_in(tmp_path / "first")
    same = model_in(tmp_path / "same")
    other = model_in(tmp_path / "other", b"Weights")
    assert fingerprint(first, "target") == fingerprint(same, "target")
    assert fingerprint(first, "target") != fingerprint(other, "target")
    trained = bytearray(3 << 20)
    large = model_in(tmp_path / "large", bytes(trained))
    trained[::1000] = b"\1" * len(trained[::1000])
    changed = model_in(tmp_path / "changed", bytes(trained))
    assert fingerprint(large, "draft") != fingerprint(changed, "draft")
    assert fingerprint("someone/model", "target") == "hub:someone/model"
    assert fingerprint("embedded", "target") != fingerprint("embedded", "draft")


def test_a_head_that_is_unknown_has_no_files() -> None:
    """Loading it says which heads there are."""
    assert fingerprint("embedded:nonsense", "draft") == "hub:embedded:nonsense"
