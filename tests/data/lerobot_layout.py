"""Small datasets in LeRobot's layout on disk, as its versions 2.1 and 3.0 write them."""

import json
import subprocess
from pathlib import Path

import numpy as np

FPS = 10
CODECS = {
    "h264": ["libx264", "-crf", "12", "-g", "2"],
    "av1": ["libaom-av1", "-crf", "12", "-g", "2", "-cpu-used", "8"],
}


def make_episodes(lengths: list[int], cameras: tuple[str, ...] = ("observation.images.top",), size=(48, 64)):
    """A square moves by the sum of all actions so far: the state. A bar at the bottom grows by a pixel every step.
    Each camera has its own background."""
    rng, episodes = np.random.default_rng(0), []
    for length in lengths:
        action = rng.uniform(-2, 2, (length, 2)).astype(np.float32)
        state = np.clip(20 + np.cumsum(np.r_[np.zeros((1, 2)), action[:-1]], axis=0), 6, 40).astype(np.float32)
        episode = {"action": action, "observation.state": state}
        for number, camera in enumerate(cameras):
            frames = np.full((length, *size, 3), 60 + 80 * number, np.uint8)
            for step, (frame, (x, y)) in enumerate(zip(frames, state.round().astype(int), strict=True)):
                frame[-8:, :step] = 255
                frame[y - 5 : y + 5, x - 5 : x + 5] = (250, 60, 20)
            episode[camera] = frames
        episodes.append(episode)
    return episodes


def write_lerobot(path: Path, episodes, version: str = "v2.1", codec: str = "h264", stored: str = "video") -> Path:
    """``stored``: video, or image for PNGs in the parquet files. v3.0 puts two episodes into each file."""
    cameras = [name for name in episodes[0] if name.startswith("observation.image")]
    features = {
        name: {"dtype": "float32", "shape": list(values.shape[1:]), "names": None}
        for name, values in episodes[0].items()
        if name not in cameras
    }
    shape = list(episodes[0][cameras[0]].shape[1:]) if cameras else []
    features |= {
        name: {"dtype": stored, "shape": shape, "names": ["height", "width", "channels"]} for name in cameras
    }
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    for name in ("frame_index", "episode_index", "index", "task_index"):
        features[name] = {"dtype": "int64", "shape": [1], "names": None}
    info = {"codebase_version": version, "fps": FPS, "chunks_size": 1000, "total_episodes": len(episodes)}
    (path / "meta").mkdir(parents=True)
    (path / "meta" / "info.json").write_text(json.dumps({**info, "features": features}))
    rows, first = [], 0
    for number, episode in enumerate(episodes):
        rows.append(_rows(episode, number, first, cameras if stored == "image" else []))
        first += len(episode["action"])
    (_write_v2 if version.startswith("v2") else _write_v3)(
        path, episodes, rows, cameras if stored == "video" else [], codec
    )
    return path


def _rows(episode, number: int, first: int, images: list[str]) -> dict[str, list]:
    length = len(episode["action"])
    columns = {name: list(v) for name, v in episode.items() if not name.startswith("observation.image")}
    columns |= {name: [{"bytes": _png(frame), "path": None} for frame in episode[name]] for name in images}
    columns |= {"timestamp": (np.arange(length) / FPS).astype(np.float32), "frame_index": np.arange(length)}
    return columns | {
        "episode_index": np.full(length, number),
        "index": first + np.arange(length),
        "task_index": np.zeros(length, np.int64),
    }


def _write_v2(path, episodes, rows, cameras, codec):
    lines = [
        json.dumps({"episode_index": n, "tasks": ["reach"], "length": len(e["action"])})
        for n, e in enumerate(episodes)
    ]
    (path / "meta" / "episodes.jsonl").write_text("\n".join(lines))
    for number, episode in enumerate(episodes):
        _parquet(path / f"data/chunk-000/episode_{number:06d}.parquet", rows[number])
        for camera in cameras:
            _video(path / f"videos/chunk-000/{camera}/episode_{number:06d}.mp4", episode[camera], codec)


def _write_v3(path, episodes, rows, cameras, codec):
    about = []
    for file, first in enumerate(range(0, len(episodes), 2)):
        together = rows[first : first + 2]
        merged = {name: [value for one in together for value in one[name]] for name in together[0]}
        _parquet(path / f"data/chunk-000/file-{file:03d}.parquet", merged)
        for camera in cameras:
            frames = np.concatenate([e[camera] for e in episodes[first : first + 2]])
            _video(path / f"videos/{camera}/chunk-000/file-{file:03d}.mp4", frames, codec)
        start = 0.0
        for number in range(first, min(first + 2, len(episodes))):
            seconds = len(episodes[number]["action"]) / FPS
            entry = {"episode_index": number, "length": len(episodes[number]["action"])}
            for camera in cameras:
                at = {
                    "chunk_index": 0,
                    "file_index": file,
                    "from_timestamp": start,
                    "to_timestamp": start + seconds,
                }
                entry |= {f"videos/{camera}/{key}": value for key, value in at.items()}
            about.append(entry)
            start += seconds
    _parquet(path / "meta/episodes/chunk-000/file-000.parquet", {k: [e[k] for e in about] for k in about[0]})


def _parquet(path: Path, columns: dict[str, list]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: pa.array(list(values)) for name, values in columns.items()}), path)


def _video(path: Path, frames: np.ndarray, codec: str) -> None:
    from imageio_ffmpeg import get_ffmpeg_exe

    path.parent.mkdir(parents=True, exist_ok=True)
    size = f"{frames.shape[2]}x{frames.shape[1]}"
    command = [
        get_ffmpeg_exe(),
        "-y",
        "-v",
        "error",
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-s",
        size,
        "-r",
        str(FPS),
    ]
    command += ["-i", "-", "-c:v", *CODECS[codec], "-pix_fmt", "yuv420p", str(path)]
    subprocess.run(command, input=frames.tobytes(), check=True, timeout=60)


def _png(frame: np.ndarray) -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return file.getvalue()
