"""Which offline score ranks models as their planning success does? Reads what tools/score_models.py wrote.

    PYTHONPATH=src python3 tools/score_table.py DIR --csv docs/results/score.csv     # scores, some minutes
    PYTHONPATH=src python3 tools/score_table.py --csv docs/results/score.csv --figure docs/images/score.svg

The candidates need latents and actions of recorded episodes, no environment. A seeded half of the models of DIR,
drawn within each task, is to choose on, the other half to report; models of further folders are reported apart. The
table of docs/notes/score.md is printed from the CSV file.
"""

import argparse
import csv
import json
import multiprocessing
import tarfile
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from safetensors.torch import load
from scipy.stats import spearmanr
from score_models import ModelSetup
from torch import Tensor

from atlas_wm.models.geometry import effective_rank
from atlas_wm.models.probes import explained, mlp_probe, ridge_probe
from atlas_wm.models.score import Episodes, planning_score
from atlas_wm.models.world_model import WorldModel
from atlas_wm.rng import make_rng

HORIZON, WINDOWS, OTHERS = 5, 256, 16
WORDS = ("model", "task", "regulariser", "part")
SETUP = ("task", "method", "weights", "steps", "seed", "recipe")
COLOURS = {"wemreg": "#1f5fa8", "sigreg": "#c8641a", "std": "#6b7280"}


def distance_by_gap(e: Episodes, most: int) -> Tensor:
    """Mean latent distance of frames 1..most chunks apart: (most,)."""
    return torch.stack(
        [(e.z[(w := e.windows(gap)) + gap] - e.z[w]).norm(dim=1).mean() for gap in range(1, most + 1)]
    )


def between_episodes(e: Episodes) -> Tensor:
    """Distances of frames of different episodes."""
    pairs = torch.cdist(e.z, e.z)
    return pairs[e.episode[:, None] != e.episode]


def time_scores(e: Episodes) -> dict[str, float]:
    found = {}
    for most in (5, 10, 25):
        each, progress = [], []
        for number in e.episode.unique():
            z = e.z[e.episode == number]
            pairs = torch.cdist(z, z)
            i, j = torch.triu_indices(len(z), len(z), 1)
            near = j - i <= most
            if near.sum() > 3 and len(z) > 3:
                each.append(spearmanr((j - i)[near], pairs[i[near], j[near]]).statistic)
            # towards a goal g: is the later of two frames i < j < g the nearer one?
            steps = torch.arange(len(z))
            i, j, g = torch.meshgrid(steps, steps, steps, indexing="ij")
            triple = (i < j) & (j < g) & (g - i <= most)
            if triple.any():
                progress.append((pairs[j[triple], g[triple]] < pairs[i[triple], g[triple]]).float().mean())
        found[f"time_rank_{most}"] = float(np.nanmean(each))
        found[f"progress_{most}"] = float(torch.stack(progress).mean())
    far = between_episodes(e)
    typical = far.mean()
    by_gap = distance_by_gap(e, 10) / typical
    for gap in (1, 2, 5, 10):
        found[f"distance_{gap}"] = float(by_gap[gap - 1])
    found["slope_5_1"] = float(by_gap[4] / by_gap[0])
    found["slope_10_5"] = float(by_gap[9] / by_gap[4])
    saturated = (by_gap >= 0.9).nonzero()
    found["saturation_gap"] = float(saturated[0, 0] + 1) if len(saturated) else 11.0
    sample = far[torch.randperm(len(far), generator=make_rng(0))[:20_000]].sort().values
    for gap in (1, 5, 10):
        w = e.windows(gap)
        near = (e.z[w + gap] - e.z[w]).norm(dim=1)
        found[f"near_auroc_{gap}"] = 1 - float(torch.searchsorted(sample, near).float().mean() / len(sample))
    return found


def rank_scores(e: Episodes) -> dict[str, float]:
    centred = (e.z - e.z.mean(dim=0)).double()
    return {"rank": effective_rank(torch.linalg.eigvalsh(centred.T @ centred / len(centred)))}


def prediction_scores(model: WorldModel, e: Episodes) -> dict[str, float]:
    found, typical = {}, between_episodes(e).mean()
    for chunks in (1, 5, 10):
        w = e.windows(chunks)
        actions = torch.stack([e.actions[w + i] for i in range(chunks)], dim=1)
        error = (model.terminal(e.z[w], actions[:, None])[:, 0] - e.z[w + chunks]).norm(dim=1).mean()
        moved = (e.z[w + chunks] - e.z[w]).norm(dim=1).mean()
        found[f"error_{chunks}_by_typical"] = float(error / typical)
        found[f"error_{chunks}_by_moved"] = float(error / moved)
    return found


def action_scores(model: WorldModel, fitted: Episodes, judged: Episodes) -> dict[str, float]:
    """ATM: R² of the action chunk decoded from real (r) and predicted (p) transitions; fitted on → judged on.

    ``sum``: of its sum over the chunk, which noise on single actions hides less."""
    found = {}
    x, queries = transitions(model, fitted), transitions(model, judged)
    chunks = [e.actions[e.windows(1)] for e in (fitted, judged)]
    sums = [c.unflatten(1, (-1, model.action_size)).sum(dim=1) for c in chunks]
    for kind, probe, (y, truth) in (
        ("atm", ridge_probe, chunks),
        ("atm_sum", ridge_probe, sums),
        ("atm_mlp", mlp_probe, sums),
    ):
        for source, pairs in x.items():
            answers = probe(pairs, y, torch.cat(list(queries.values()))).chunk(2)
            for target, answer in zip(queries, answers, strict=True):
                found[f"{kind}_{source}{target}"] = explained(answer, truth)
        four = [found[f"{kind}_{cell}"] for cell in ("rr", "pp", "rp", "pr")]
        found[f"{kind}_mean"], found[f"{kind}_least"] = float(np.mean(four)), min(four)
    return found


def transitions(model: WorldModel, e: Episodes) -> dict[str, Tensor]:
    """(z_t, z_{t+1}) and (z_t, ẑ_{t+1}), predicted from as many real latents as the model takes: (n, 2d) each."""
    w = e.windows(1)
    ahead = torch.empty(len(w), e.z.shape[1])
    first = torch.searchsorted(e.episode, e.episode[w])  # of the episode
    lengths = (w - first + 1).clamp_max(model.config.history)
    for length in lengths.unique().tolist():
        which = (lengths == length).nonzero()[:, 0]
        steps = w[which, None] + torch.arange(1 - length, 1)
        ahead[which] = model.predict(e.z[steps], e.actions[steps])[:, -1]
    return {"r": torch.cat([e.z[w], e.z[w + 1]], 1), "p": torch.cat([e.z[w], ahead], 1)}


def plan_scores(model: WorldModel, e: Episodes) -> dict[str, float]:
    """Do the recorded actions end nearer to the goal than others? Share of the others that end farther away.

    Goal: the frame ``gap`` chunks later. Compared after ``chunks`` chunks with pieces of other episodes (data) and
    with Gaussian noise (noise). ``margin``: mean log of the ratio of the median distance of the others and that of
    the recorded actions."""
    found = {"planning_score": planning_score(model, e, HORIZON, make_rng(0))}
    for gap, chunks in ((2, 2), (HORIZON, HORIZON), (2 * HORIZON, HORIZON), (HORIZON, 1)):
        rng = make_rng(1, gap, chunks)
        w, pool = e.windows(gap), e.windows(chunks)
        w = w[torch.randperm(len(w), generator=rng)[:WINDOWS]]
        steps = torch.arange(chunks)
        own = e.actions[w[:, None] + steps][:, None]  # (Q, 1, H, a)
        drawn = pool[torch.randint(len(pool), (len(w), OTHERS), generator=rng)]
        noise = torch.randn(len(w), OTHERS, chunks, own.shape[-1], generator=rng)
        goal = e.z[w + gap][:, None]
        mine = model.distance(model.terminal(e.z[w], own), goal)
        for kind, actions in {"data": e.actions[drawn[..., None] + steps], "noise": noise}.items():
            theirs = model.distance(model.terminal(e.z[w], actions), goal)
            farther = (theirs > mine).double() + 0.5 * (theirs == mine).double()
            found[f"plan_{kind}_{chunks}_of_{gap}"] = float(farther.mean())
            ratio = theirs.median(dim=1).values / mine[:, 0].clamp_min(1e-12)
            found[f"margin_{kind}_{chunks}_of_{gap}"] = float(ratio.log().mean())
    return found


def state_scores(fitted: Episodes, judged: Episodes, states: list[Tensor]) -> dict[str, float]:
    """R² of a linear probe of the standardised state; it needs states, as no other score does."""
    mean, std = states[0].mean(dim=0), states[0].std(dim=0)
    y, truth = ((part - mean) / std for part in states)
    return {"probe": explained(ridge_probe(fitted.z, y, judged.z), truth)}


def candidates(model: WorldModel, fitted: Episodes, e: Episodes, states: list[Tensor]) -> dict[str, float]:
    with torch.no_grad():
        return {
            **time_scores(e),
            **rank_scores(e),
            **state_scores(fitted, e, states),
            **prediction_scores(model, e),
            **action_scores(model, fitted, e),
            **plan_scores(model, e),
        }


# The models


def episodes_of(model: WorldModel, stored: dict[str, np.ndarray], held_out: bool) -> Episodes:
    rows = stored["held_out"] == held_out
    frames, actions, episode = (torch.from_numpy(stored[key][rows]) for key in ("frames", "actions", "episode"))
    with torch.no_grad():
        z = torch.cat([model.encode(part) for part in frames.split(250)])
    return Episodes(z, actions, episode)


def score_models(folder: Path, workers: int) -> list[dict[str, Any]]:
    """A row for each model that did not fail: what it is, its success, its scores."""
    weights: dict[str, dict[str, Tensor]] = {}
    for path in sorted(folder.glob("weights-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                weights[member.name.removesuffix(".safetensors")] = load(file.read())
    stored = {path.stem.split("-")[1]: dict(np.load(path)) for path in folder.glob("episodes-*.npz")}
    jobs = []
    for line in map(json.loads, (folder / "models.jsonl").read_text().splitlines()):
        if "failed" in line or line["name"] not in weights:
            print(f"left out: {line['name']} ({line.get('failed', 'no weights')})")
        else:
            jobs.append((line, weights[line["name"]], stored[line["task"]]))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return pool.starmap(scored, jobs, chunksize=1)


def scored(line: dict[str, Any], weights: dict[str, Tensor], stored: dict[str, np.ndarray]) -> dict[str, Any]:
    torch.set_num_threads(1)
    started = time.monotonic()
    config = ModelSetup(**{name: line[name] for name in SETUP}).config
    model = WorldModel(config.model, stored["actions"].shape[1] // config.model.frameskip)
    model.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in weights.items()})
    parts = [episodes_of(model.eval(), stored, held_out) for held_out in (False, True)]
    states = [torch.from_numpy(stored["states"][stored["held_out"] == held_out]) for held_out in (False, True)]
    scores = candidates(model, *parts, states)
    scores |= {f"minus_{name}": -line["losses"][f"val_{name}"] for name in ("total", "prediction")}
    print(f"{line['name']}: {time.monotonic() - started:.1f} s", flush=True)
    kind = next(name for name in COLOURS if getattr(config.objective, name) > 0)
    facts = {"model": line["name"], "task": line["task"], "regulariser": kind, "part": "more"}
    return {**facts, "success": line["success"], "episodes": line["episodes"], **scores}


def halve(rows: list[dict[str, Any]], seed: int = 0) -> None:
    """Mark two halves of the models of each task: to choose on, to report."""
    rng = np.random.default_rng(seed)
    for task in sorted({row["task"] for row in rows}):
        mine = rng.permutation([i for i, row in enumerate(rows) if row["task"] == task]).tolist()
        for order, i in enumerate(mine):
            rows[i]["part"] = "choose" if order < len(mine) // 2 else "report"


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})


def read_csv(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        return [{k: v if k in WORDS else float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def correlation(rows: list[dict[str, Any]], name: str, part: str, task: str) -> float:
    mine = [row for row in rows if row["part"] == part and row["task"] == task]
    return float(spearmanr([row[name] for row in mine], [row["success"] for row in mine]).statistic)


def table(rows: list[dict[str, Any]]) -> str:
    """Spearman's rank correlation of each score with success, by part and task; the best choice first."""
    names = [name for name in rows[0] if name not in (*WORDS, "success", "episodes")]
    halves = [(part, task) for part in ("choose", "report") for task in ("tworoom", "pusht")]
    groups = [*halves, ("more", "tworoom")]
    found = {name: [correlation(rows, name, *group) for group in groups] for name in names}
    order = sorted(names, key=lambda name: -abs(sum(found[name][:2])))
    counts = [sum((row["part"], row["task"]) == group for row in rows) for group in groups]
    heads = [f"{part} {task}, {n}" for (part, task), n in zip(groups, counts, strict=True)]
    lines = [f"| score | {' | '.join(heads)} | mean of report |", "|---" * (len(heads) + 2) + "|"]
    for name in order:
        cells = [f"{value:.2f}" for value in (*found[name], sum(found[name][2:4]) / 2)]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines).replace("nan", "–") + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Success against the planning score, for the models that did not choose it."""
    tasks = {"tworoom": "TwoRoom, goals 50 steps away", "pusht": "PushT, goals 25 steps away"}
    figure, panels = plt.subplots(1, len(tasks), figsize=(7.2, 2.9), layout="constrained")
    for axes, (task, title) in zip(panels, tasks.items(), strict=True):
        for kind, label in (("wemreg", "WEMReg"), ("sigreg", "SIGReg"), ("std", "PLDM")):
            mine = [r for r in rows if r["part"] == "report" and r["task"] == task and r["regulariser"] == kind]
            x, y = [row["planning_score"] for row in mine], [100 * row["success"] for row in mine]
            axes.plot(x, y, "o", color=COLOURS[kind], ms=5, alpha=0.85, label=label if mine else None)
        rho = correlation(rows, "planning_score", "report", task)
        axes.set(title=f"{title}\nSpearman {rho:.2f}", xlabel="planning score", ylabel="success, %")
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    if given.folders:
        parts = [score_models(folder, given.workers) for folder in given.folders]
        halve(parts[0])
        write_csv([row for part in parts for row in part], given.csv)
    rows = read_csv(given.csv)
    if given.figure:
        draw(rows, given.figure)
    print(table(rows))


if __name__ == "__main__":
    main()
