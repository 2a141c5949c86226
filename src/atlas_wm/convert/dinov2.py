"""Load the weights of the frozen DINOv2 encoder from a local file or the hub."""

from pathlib import Path
from zipfile import ZipFile, is_zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor

from atlas_wm.config import EncoderConfig
from atlas_wm.errors import UserError, reason
from atlas_wm.models.encoders import Encoder, ViTEncoder

HUB_REPO, HUB_FILE = "timm/vit_small_patch14_dinov2.lvd142m", "model.safetensors"
REMEDY = (
    f"download {HUB_FILE} of {HUB_REPO} from the Hugging Face hub, or the original dinov2_vits14_pretrain.pth, "
    f"and pass it with --model.encoder.weights FILE (in a study: --encoder-weights METHOD=FILE)"
)


def weights_name(weights: str | None) -> str:
    return Path(weights).name if weights else f"{HUB_FILE} of {HUB_REPO}"


def weights_obstacle(config: EncoderConfig) -> str:
    """Why the weights of a frozen encoder cannot be loaded, tried as training does it; "" if they can."""
    try:
        load_dinov2(ViTEncoder(config), config.weights)
    except UserError as error:
        return str(error)
    return ""


def load_dinov2(encoder: Encoder, weights: str | None) -> None:
    """Load weights into the encoder. weights: a file with timm's or the original names; None: timm's, from the hub.

    Position embeddings of another grid (the published ones are for 518×518 pixels) are resampled.
    """
    assert isinstance(encoder, ViTEncoder)  # kind dinov2
    path = _from_hub() if weights is None else Path(weights)
    given = _read(path)
    try:
        encoder.vit.load_state_dict(checkpoint_filter_fn(given, encoder.vit))
    except (RuntimeError, IndexError) as error:  # of torch, or of timm, which resamples positions
        first = str(error).split("\n")[:2][-1].strip()
        raise UserError(f"{path} does not hold the weights of this encoder ({first}): {REMEDY}") from error


def _from_hub() -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(HUB_REPO, HUB_FILE))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"the DINOv2 weights cannot be downloaded from the hub ({type(error).__name__}): {REMEDY}"
        ) from None


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"there is no file {path}: {REMEDY}")
    try:
        state = load_file(path) if path.suffix == ".safetensors" else read_tensors(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as weights ({reason(error)}): {REMEDY}") from error
    if state is None:
        raise UserError(f"{path} cannot be read as weights; it is damaged or holds something else: {REMEDY}")
    return state


def read_tensors(path: Path) -> dict[str, Tensor] | None:
    """The named tensors of a .pt file; None if it is damaged or holds anything else. Runs no code from the file.

    A file that claims more data than it holds (compressed zeros, one number expanded to a giant tensor) is refused.
    """
    size = path.stat().st_size
    try:
        if is_zipfile(path):
            with ZipFile(path) as archive:
                if sum(part.file_size for part in archive.infolist()) > size:
                    return None
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # a damaged or hostile file may raise anything; torch's message advises to trust it
        return None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        return None
    if any(t.layout != torch.strided or t.device.type != "cpu" for t in state.values()):
        return None
    return state if sum(t.numel() * t.element_size() for t in state.values()) <= size else None
