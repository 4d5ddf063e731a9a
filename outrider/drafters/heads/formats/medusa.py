"""Medusa's files: ``config.json`` with ``medusa_num_heads``, and ``medusa_lm_head``.

    {i}.{j}.linear.weight, .bias    block j of head i, (H, H) and (H)
    {i}.{L}.weight                  its output layer, (V, H)

in ``medusa_lm_head.pt``, as the authors save, or ``medusa_lm_head.safetensors``, which TGI and
TensorRT-LLM read and which is written here. Whole models prefix the names with ``medusa_head.``.
The authors' configs may name fewer heads than a file has; all of them are read.

Heads with a reduced vocabulary hold the tables ``d2t`` and ``t2d`` besides, as EAGLE-3 heads do.
Only Outrider reads these.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.core.errors import InvalidParameterError, ModelLoadError
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.formats.fill import fill
from outrider.drafters.heads.formats.folder import read_config, read_tensors, write_folder
from outrider.drafters.heads.medusa import MedusaHead
from outrider.drafters.heads.medusa_network import MedusaConfig, MedusaNetwork
from outrider.runtime import HFModel

WEIGHTS = "medusa_lm_head.safetensors"
_PREFIX = "medusa_head."


def is_medusa(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of Medusa heads."""
    return "medusa_num_heads" in config


def load_medusa(folder: str | Path, target: HFModel) -> MedusaHead:
    """The heads in a folder, in float32.

    Args:
        folder: with ``config.json`` and weights.
        target: the target, whose last hidden state they read.

    Raises:
        ModelLoadError: files that are missing or do not fit each other.
    """
    name = f"head {folder}"
    raw = read_config(folder)
    if raw is None or not is_medusa(raw):
        raise ModelLoadError(f"{name}: there is no config.json with medusa_num_heads")
    tensors = {key.removeprefix(_PREFIX): value for key, value in read_tensors(folder).items()}
    tables = [tensors.pop(table, None) for table in ("d2t", "t2d")]
    num_layers = int(raw.get("medusa_num_layers", 1))
    numbers = {int(key.split(".")[0]) for key in tensors if key.split(".")[0].isdecimal()}
    num_heads = max(numbers, default=-1) + 1
    if num_heads < raw["medusa_num_heads"]:
        raise ModelLoadError(
            f"{name}: config.json says medusa_num_heads {raw['medusa_num_heads']}, and the weights "
            f"have {num_heads}: the folder is incomplete"
        )
    output = tensors.get(f"0.{num_layers}.weight")
    if output is None or output.ndim != 2:
        raise ModelLoadError(
            f"{name} has no tensor 0.{num_layers}.weight, the output layer of a head of "
            f"medusa_num_layers {num_layers}: the files belong to different heads"
        )
    size, hidden_size = output.shape
    num_tokens = size if tables[1] is None else len(tables[1])
    vocabulary = DraftVocabulary.from_tables(tables[0], tables[1], size, num_tokens, name)
    try:
        config = MedusaConfig(
            num_heads, num_layers, hidden_size, num_tokens, size, target.num_layers
        )
    except InvalidParameterError as error:
        raise ModelLoadError(f"{name}: {error}") from None
    network = MedusaNetwork(config).eval()
    fill(network, {_PREFIX + key: tensor for key, tensor in tensors.items()}, name)
    return MedusaHead(network, vocabulary, name)


def save_medusa(
    head: MedusaHead,
    folder: str | Path,
    target_name: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes heads as the authors' code does, in safetensors.

    Args:
        head: the heads.
        folder: made if it does not exist.
        target_name: folder or hub id of the target.
        dtype: of the weights.
    """
    named = head.network.named_parameters()
    tensors = {key.removeprefix(_PREFIX): weight.to(dtype) for key, weight in named}
    if not head.vocabulary.is_full:
        tensors["d2t"], tensors["t2d"] = head.vocabulary.d2t_D, head.vocabulary.t2d_V
    config = {
        "medusa_num_heads": head.config.num_heads,
        "medusa_num_layers": head.config.num_layers,
        "base_model_name_or_path": target_name,
        "dtype": str(dtype).removeprefix("torch."),
    }
    write_folder(Path(folder), config, tensors, WEIGHTS)
