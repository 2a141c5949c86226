"""Run folders with made-up numbers in the files' true formats, for the report to read."""

import base64
import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from atlas_wm.runs.results import PolicyResult
from atlas_wm.settings import to_dict
from made_up_results import episode, evaluation, policy

REPRESENTATIONS = ("L3", "L6", "L9", "patch", "cls", "z", "oracle")
QUALITY = {"atlas": 1.0, "wemreg": 0.75, "lewm+ood": 0.7, "lewm": 0.45}
OBJECTIVES = {
    "atlas": {"wemreg": 3.0, "sigreg": 0.0, "relational": 0.1},
    "wemreg": {"wemreg": 3.0, "sigreg": 0.0, "relational": 0.0},
    "lewm+ood": {"wemreg": 0.0, "sigreg": 0.09, "relational": 0.1},
    "lewm": {"wemreg": 0.0, "sigreg": 0.09, "relational": 0.0},
}
VERSIONS = {"python": "3.11.7", "atlas-wm": "0.1.0", "torch": "2.15.0"}


def write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, allow_nan=False))


def make_run(
    folder: Path,
    method: str,
    *,
    task: str = "tworoom",
    seed: int = 3072,
    data: str = "30b00272c8bbb44d",
    queries: str = "q1",
    seeds: tuple[int, ...] = (42, 43, 44, 45, 46),
) -> Path:
    """A trained, evaluated and diagnosed run."""
    rng, good = np.random.default_rng([seed, *method.encode()]), QUALITY.get(method, 0.6)
    run = {"name": folder.name, "task": task, "method": method, "recipe": "paper", "seed": seed, "data": data}
    write(folder / "config.json", _config(run))
    _write_metrics(folder / "metrics.csv", method, rng)
    for offset in (25, 50):
        write(
            folder / f"evaluation/all_offset{offset}_budget{offset + 25}.json",
            _evaluation(run, offset, good, seeds, rng),
        )
    for what, result in _results(good, rng).items():
        shared = queries if what in ("rollout", "relational", "regret") else None
        write(
            folder / f"diagnostics/{what}.json",
            {
                "what": what,
                "format": 1,
                "run": run,
                "settings": {"seed": 0, "evaluation": folder.name},
                "queries": shared,
                "result": result,
                "seconds": 12.5,
                "versions": VERSIONS,
            },
        )
    return folder


def change(path: Path, *keys: str, value: Any) -> None:
    """Set one value deep inside a JSON file."""
    data = json.loads(path.read_text())
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(data))


def _config(run: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": run["task"],
        "method": run["method"],
        "recipe": run["recipe"],
        "action_size": 2,
        "config": {
            "model": {"encoder": {"image_size": 224, "depth": 12}, "latent": 192, "frameskip": 5},
            "objective": {"prediction": 1.0, **OBJECTIVES.get(run["method"], {}), "directions": 1024},
            "train": {"seed": run["seed"], "steps": 8000, "batch": 128, "lr": 5e-5, "split": "clips"},
            "plan": {"candidates": 300, "iterations": 30, "horizon": 5},
        },
        "data": {
            "path": "data/tworoom.lance",
            "hash": run["data"],
            "episodes": 5000,
            "rows": 312157,
            "training_clips": 216525,
            "validation_clips": 24658,
        },
        "device": "cuda (NVIDIA H200)",
        "versions": VERSIONS,
        "format": 2,
        "atlas_wm": "0.1.0",
    }


def _write_metrics(path: Path, method: str, rng: np.random.Generator) -> None:
    terms = ["prediction", *(name for name, weight in OBJECTIVES.get(method, {}).items() if weight)]
    columns = ["step", "total", *terms, "clips_per_second", *(f"val_{t}" for t in terms), "val_score"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for step in range(100, 8001, 100):
            values = {
                t: (i + 1) * (0.05 + np.exp(-step / 1500)) * rng.uniform(0.95, 1.05) for i, t in enumerate(terms)
            }
            row: dict[str, Any] = {"step": step, "total": sum(values.values()), "clips_per_second": 1300, **values}
            if step % 1000 == 0:
                row |= {f"val_{t}": 1.1 * v for t, v in values.items()} | {"val_score": 0.9 - np.exp(-step / 1500)}
            writer.writerow(row)


def _evaluation(
    run: dict[str, Any], offset: int, good: float, seeds: tuple[int, ...], rng: np.random.Generator
) -> dict[str, Any]:
    def outcome(share_id: float, share_ood: float, planned: bool = False) -> PolicyResult:
        halves = {"id": share_id, "ood": share_ood}
        rates: dict[str, dict[int, float]] = {
            h: {s: float(np.clip(round(p + rng.normal(0, 2.5)), 0, 100)) for s in seeds} for h, p in halves.items()
        }
        rates[""] = {s: (rates["id"][s] + rates["ood"][s]) / 2 for s in seeds}
        return policy({s: [episode()] * 4 for s in seeds}, rates, planned, solved_at_start=3.0)

    far = (offset - 25) / 25
    result = evaluation(
        outcome(100 - (28 * far + 6) * (1.6 - good), 97 - (55 * far + 8) * (1.6 - good), planned=True),
        outcome(34 - 24 * far, 31 - 26 * far),
        outcome(100, 100),
        offset=offset,
        data=run["data"],
        task=run["task"],
        trained_task=run["task"],
        method=run["method"],
    )
    return to_dict(result)


def _results(good: float, rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    def spread(value: float, width: float = 0.06) -> dict[str, float]:
        return {"low": value - width, "high": value + width}

    aurocs = {name: float(rng.uniform(0.55, 0.8)) for name in REPRESENTATIONS} | {
        "z": 0.4 + 0.35 * good,
        "oracle": 0.78,
    }
    horizons, queries = list(range(1, 11)), 100
    median = [0.04 * h ** (1.5 - 0.5 * good) for h in horizons]
    regret = rng.exponential(0.05, queries) * (rng.random(queries) < 0.7)
    terms = {"prediction": 0.25 - 0.08 * good, "relational": 0.6 - 0.35 * good, "scale": 0.03 + 0.05 * (1 - good)}
    bound = 2 * sum(terms.values()) + rng.normal(0, 0.08, queries)
    points = rng.normal(size=(400, 2)) * [1.5, 1.0]
    percentile = (
        100 * np.argsort(np.argsort(np.linalg.norm(points, axis=1) * good + rng.normal(size=400) * 0.5)) / 400
    )
    return {
        "probe": {
            "representations": {
                n: {"auroc": a, **spread(a), "scores": rng.random(200).tolist()} for n, a in aurocs.items()
            },
            "failed": (rng.random(200) < 0.4).tolist(),
            "episodes": 200,
            "failures": 81,
            "bank": 1500,
            "neighbours": 50,
        },
        "state": {
            "coordinates": [{"name": "agent", "unit": "px"}],
            "representations": {
                name: {
                    "linear": {"agent": {"r2": r2 - 0.11, "error": 30 * (1 - good) + 9.5}},
                    "mlp": {"agent": {"r2": r2, "error": 30 * (1 - good) + 4.25}},
                }
                for name, r2 in (("patch", 0.97), ("cls", 0.93), ("z", 0.5 + 0.4 * good))
            },
            "fitted": 5000,
            "judged": 1000,
        },
        "marginal": {
            "frames": 1000,
            "mean_norm": 2.2 - 1.2 * good,
            "covariance_error": 0.9 - 0.4 * good,
            "cvm": 0.02 - 0.012 * good,
            "cvm_whitened": 0.006 - 0.002 * good,
            "cvm_null": 0.0002,
            "effective_rank": 61.5,
        },
        "rollout": {
            "horizons": horizons,
            "median": median,
            "low": [0.9 * m for m in median],
            "high": [1.12 * m for m in median],
            "per_query": [median] * queries,
            "scale": 13.2,
        },
        "relational": {
            key: {"median": (m := base * (1.3 - good)), **spread(m, 0.04 * base), "per_query": [m] * queries}
            for key, base in (("rmse", 0.3), ("percentile_95", 0.7), ("maximum", 1.5))
        },
        "regret": {
            "bound": bound.tolist(),
            "regret": regret.tolist(),
            "margin": [0.1] * queries,
            "means": terms,
            **{name: [value] * queries for name, value in terms.items()},
            "guaranteed": 0,
            "eta": 0.05,
            "ell": 13.2,
        },
        "geometry": {
            "points": points.tolist(),
            "novelty_percentile": percentile.tolist(),
            "explained": [0.31, 0.22],
            "rank_correlation": 0.2 + 0.5 * good,
        },
        "cases": {"episodes": [_case(row, good > 0.6 or row == 977, rng) for row in (311, 977)]},
        "imagined": {"episodes": [_imagined(row, row == 977, rng) for row in (311, 977)]},
    }


def _case(row: int, success: bool, rng: np.random.Generator) -> dict[str, Any]:
    steps = 48 if success else 75
    shown = np.linspace(0, steps, 7).round().astype(int).tolist()
    return {
        "row": row,
        "success": success,
        "steps": steps,
        "novelty": 0.41,
        "shown_steps": shown,
        "frames": [_png(rng, place / 8) for place in range(8)],
    }


def _imagined(row: int, success: bool, rng: np.random.Generator) -> dict[str, Any]:
    shown = list(range(5, 5 * (5 if success else 11), 5))
    return {
        "row": row,
        "success": success,
        "steps": shown[-1],
        "shown_steps": shown,
        "distances": [0.5 + step / 20 for step in shown],
        **{key: [_png(rng, step / 80) for step in shown] for key in ("imagined", "real")},
        "goal": _png(rng, 0.9),
    }


def _png(rng: np.random.Generator, place: float) -> str:
    """Two rooms and a dot."""
    frame = np.full((64, 64, 3), 245, np.uint8)
    frame[:, 31:33], frame[24:34, 31:33] = 40, 245
    x = int(6 + 48 * place)
    frame[26:32, x : x + 6] = (200, 40, 40)
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
