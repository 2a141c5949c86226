"""LeRobot datasets on disk, versions 2 and 3. Only pyarrow is needed, not the lerobot package.

meta/info.json                                version and features (columns)
v2  data/chunk-000/episode_000000.parquet     one file per episode
    videos/chunk-000/CAMERA/episode_000000.mp4
v3  data/chunk-000/file-000.parquet           several episodes per file
    videos/CAMERA/chunk-000/file-000.mp4
    meta/episodes/chunk-000/file-000.parquet  where each episode starts in its video

A camera of dtype ``image`` has no video: its frames are PNG or JPEG in the parquet files.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_wm.data.pixels import PixelReader, RowPixels, VideoPixels
from atlas_wm.errors import UserError, short
from atlas_wm.runs.files import MOST_SETTINGS, read_json

INFO = Path("meta", "info.json")
NUMBERS = ("bool", "int", "uint", "float")  # how the dtypes of numeric features begin


def is_lerobot(path: Path) -> bool:
    return (path / INFO).is_file()


class LeRobotTable:
    """The columns under their LeRobot names, such as ``observation.state``. If there is only one camera, it is also
    called ``pixels``."""

    def __init__(self, path: Path):
        info = read_json(path / INFO, MOST_SETTINGS)
        try:
            self.version, features = str(info["codebase_version"]), dict(info["features"])
            self.dtypes = {str(name): str(feature["dtype"]) for name, feature in features.items()}
            self.fps, self.chunk_size = float(info["fps"]), int(info.get("chunks_size", 1000))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path / INFO} does not describe a LeRobot dataset ({error!r})") from error
        if not self.version.startswith(("v2.", "v3.")) or self.fps <= 0 or self.chunk_size < 1:
            raise UserError(
                f"{path} is a LeRobot dataset of version {short(self.version)}: convert it to v2.1 or v3.0"
            )
        self.path = path
        self.cameras = [name for name, dtype in self.dtypes.items() if dtype in ("video", "image")]
        if any("/" in name or name.startswith("..") for name in self.cameras):
            raise UserError(f"{path / INFO} names a camera {short(self.cameras)} that is not a folder name")
        numeric = [name for name, dtype in self.dtypes.items() if dtype.startswith(NUMBERS)]
        self.column_names = [*numeric, *self.cameras, *(["pixels"] if len(self.cameras) == 1 else [])]
        self.files = sorted(path.glob("data/*/*.parquet"))
        if not self.files:
            raise UserError(f"{path} has no data/*/*.parquet: download the whole dataset")
        episode, step = (self.get_col_data(name)[:, 0] for name in ("episode_index", "frame_index"))
        first = np.flatnonzero(np.diff(episode, prepend=-1) != 0)  # row in which each episode starts
        self.offsets, self.lengths = first, np.diff(first, append=len(episode))
        self.episodes = episode[first]
        if (
            len(np.unique(self.episodes)) < len(first)
            or (step != np.arange(len(step)) - np.repeat(first, self.lengths)).any()
        ):
            raise UserError(f"{path}: the rows of an episode are not consecutive: write the dataset again")

    def get_col_data(self, name: str) -> np.ndarray:
        """(R, n)"""
        parts = [_numbers(_read(file, name)) for file in self.files]
        return np.concatenate(parts)

    def load_chunk(self, episodes: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> list[dict[str, Any]]:
        """Rows start to end of episodes, of all numeric columns."""
        names = [name for name in self.column_names if self.dtypes.get(name, "video").startswith(NUMBERS)]
        columns = {name: self.get_col_data(name) for name in names}
        first, last = self.offsets[episodes] + starts, self.offsets[episodes] + ends
        return [{name: v[a:b] for name, v in columns.items()} for a, b in zip(first, last, strict=True)]

    def pixel_reader(self, name: str) -> PixelReader:
        camera = name if name in self.cameras else self.cameras[0]
        if self.dtypes[camera] == "image":
            return ParquetPixels(self.files, self.offsets, camera)
        files, first = self._videos_v2(camera) if self.version.startswith("v2.") else self._videos_v3(camera)
        missing = next((file for file in files if not file.is_file()), None)
        if missing is not None:
            raise UserError(f"{missing} is missing: download the videos of the dataset too")
        return VideoPixels(files, first)

    def _videos_v2(self, camera: str) -> tuple[list[Path], np.ndarray]:
        files = [
            self.path / "videos" / f"chunk-{episode // self.chunk_size:03d}" / camera / f"episode_{episode:06d}.mp4"
            for episode in self.episodes.tolist()
        ]
        return files, np.zeros(len(files), np.int64)

    def _videos_v3(self, camera: str) -> tuple[list[Path], np.ndarray]:
        tables = sorted(self.path.glob("meta/episodes/*/*.parquet"))
        names = (
            "episode_index",
            *(f"videos/{camera}/{key}" for key in ("chunk_index", "file_index", "from_timestamp")),
        )
        read = np.concatenate(
            [np.concatenate([_numbers(_read(table, name)) for name in names], axis=1) for table in tables]
        )
        rows = {int(row[0]): row[1:].tolist() for row in read}
        chosen = [rows[episode] for episode in self.episodes.tolist()]
        folder = self.path / "videos" / camera
        files = [folder / f"chunk-{int(chunk):03d}" / f"file-{int(file):03d}.mp4" for chunk, file, _ in chosen]
        return files, np.array([round(start * self.fps) for *_, start in chosen], np.int64)


class ParquetPixels(RowPixels):
    """Encoded images in the parquet files."""

    def __init__(self, files: list[Path], offsets: np.ndarray, column: str):
        from pyarrow.parquet import read_metadata

        super().__init__(files[0], offsets, column)
        stored = {file: read_metadata(file) for file in files}
        self.groups = [(file, group) for file in files for group in range(stored[file].num_row_groups)]
        self.ends = np.cumsum([stored[file].row_group(group).num_rows for file, group in self.groups])

    def _open(self) -> Any:
        return self.groups

    def _read_rows(self, rows: np.ndarray) -> Tensor:
        from torchvision.io import ImageReadMode, decode_image

        distinct, inverse = np.unique(rows, return_inverse=True)
        which, blobs = np.searchsorted(self.ends, distinct, side="right"), list[bytes]()
        for number in np.unique(which):
            begin = self.ends[number - 1] if number else 0
            file, group = self.groups[number]
            images = _read(file, self.column, group).take(distinct[which == number] - begin)
            blobs += [image["bytes"] for image in images.to_pylist()]
        encoded = [torch.frombuffer(bytearray(blob), dtype=torch.uint8) for blob in blobs]
        return torch.stack([decode_image(encoded[i], mode=ImageReadMode.RGB) for i in inverse.tolist()])


def _read(file: Path, column: str, group: int | None = None) -> Any:
    """A column of the file, or of one of its row groups."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as opened:
        groups = range(opened.num_row_groups) if group is None else [group]
        return opened.read_row_groups(groups, columns=[column])[column]


def _numbers(column: Any) -> np.ndarray:
    """A pyarrow column of numbers or (nested) lists of equally many → (rows, n)"""
    rows, values = len(column), column.combine_chunks()
    while hasattr(values, "flatten") and hasattr(values.type, "value_type"):
        values = values.flatten()
    return values.to_numpy(zero_copy_only=False).reshape(rows, -1)
