"""Demonstrations of PushT: the published set's moments, our Pusher, and stable-worldmodel's WeakPolicy.

    python benchmarks/pusht_demonstrations.py

Prints a table (Markdown) and writes docs/images/pusht-demonstrations.png. A minute or two on two cores.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: see atlas_wm/cli.py

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
from shapely import shortest_line
from shapely.geometry import Point

from atlas_wm.cli.progress import Bar
from atlas_wm.data.collect import record_episode
from atlas_wm.data.moments import moments
from atlas_wm.tasks.pusher import AGENT_RADIUS, WINDOW, block_shape, move_shape
from atlas_wm.tasks.pusht import PushT

WINDOW_STEPS, EVERY = 50, 10
WALL = 7.0  # px from the border: where the walls begin
TOUCH = AGENT_RADIUS + 1.5  # px between the agent's centre and the block
WINDOWS = {"first ": "first 50 steps of each episode", "": "all windows of 50 steps"}
FIGURE = Path(__file__).parent.parent / "docs" / "images" / "pusht-demonstrations.png"


class WeakPushT(PushT):
    """The same episodes, demonstrated by stable-worldmodel's policy with its default settings."""

    def demonstrator(self, env: gym.Env, seed: int) -> Any:
        from stable_worldmodel.envs.pusht import WeakPolicy

        policy = WeakPolicy(seed=seed)
        # It only works on vectors of environments: this is one of one.
        space = gym.spaces.Box(-1.0, 1.0, (1, 2), np.float32)
        policy.set_env(SimpleNamespace(envs=[env], spec=env.spec, action_space=space))
        return SimpleNamespace(get_action=lambda info: policy.get_action(info)[0])


POLICIES = {"WeakPolicy": WeakPushT, "Pusher": PushT}


def measure(policy: str, seed: int, number: int) -> dict[str, np.ndarray]:
    """One episode: what every window, every push and every step did."""
    import torch

    torch.set_num_threads(1)
    task = POLICIES[policy]()
    env = task.make_env()
    episode = record_episode(task, env, seed, number, pixels=False)
    shape, mass = block_shape(env), np.array(env.unwrapped.block.center_of_gravity)
    env.close()
    pose, agent, action = episode["block_pose"], episode["state"][:, :2], episode["action"][:-1]
    cos, sin = np.cos(pose[:, 2]), np.sin(pose[:, 2])
    centre = pose[:, :2] + np.stack([cos * mass[0] - sin * mass[1], sin * mass[0] + cos * mass[1]], 1)
    blocks = [move_shape(shape, p) for p in pose]

    starts = np.arange(0, len(pose) - WINDOW_STEPS, EVERY)
    ends = starts + WINDOW_STEPS
    gap = np.array([b.distance(Point(a)) for b, a in zip(blocks, agent, strict=True)])
    pushes = []  # runs of steps in touch that moved the block: side, turn, steps
    for first, last in _runs(gap < TOUCH):
        before = max(first - 1, 0)
        turn = np.degrees(pose[last, 2] - pose[before, 2])
        if np.linalg.norm(centre[last] - centre[before]) > 2.0 or abs(turn) > 2.0:
            contact = np.array(shortest_line(blocks[first].exterior, Point(agent[first])).coords[0])
            side = np.arctan2(*(contact - centre[first])[::-1]) - pose[first, 2]
            pushes.append((side, turn, last - first + 1))
    bounds = np.array([b.bounds for b in blocks])
    windows = {
        "moved": np.linalg.norm(pose[ends, :2] - pose[starts, :2], axis=1),
        "centre moved": np.linalg.norm(centre[ends] - centre[starts], axis=1),
        "turned": np.degrees(pose[ends, 2] - pose[starts, 2]),
    }
    return {
        **windows,
        **{f"first {key}": values[:1] for key, values in windows.items()},
        "pushes": np.array(pushes).reshape(-1, 3),
        "touching": gap < TOUCH,
        "agent outside": ((agent < 0) | (agent > WINDOW)).any(1),
        "block at a wall": (bounds[:, :2].min(1) < WALL) | (bounds[:, 2:].max(1) > WINDOW - WALL),
        "action change": np.linalg.norm(np.diff(action, axis=0), axis=1),
        "rows": np.array([len(pose)]),
        "action": episode["action"],
        "state": episode["state"],
    }


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """First and last index of each run of True; a single False does not end a run."""
    closed = flags.copy()
    closed[1:-1] |= flags[:-2] & flags[2:]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], closed.astype(int), [0]])))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def run(policy: str, episodes: int, seed: int) -> dict[str, np.ndarray]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool, Bar(policy, "episodes") as bar:
        pending = [pool.submit(measure, policy, seed, number) for number in range(episodes)]
        results = []
        for job in pending:
            results.append(job.result())
            bar.update(len(results), episodes)
    return {key: np.concatenate([r[key] for r in results]) for key in results[0]}


def moments_table(results: dict[str, dict[str, np.ndarray]]) -> str:
    found = {policy: moments(PushT(), r["rows"], r["action"], r["state"]) for policy, r in results.items()}
    lines = [f"| | published | {' | '.join(found)} |", "|---|---|" + "---|" * len(found)]
    for name, values in PushT.published_moments.items():
        digits = 2 if values[0] < 10 else 0
        columns = [values, *(policy[name].here for policy in found.values())]
        cells = [", ".join(f"{v:.{digits}f}" for v in column) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |".replace("|action|", "\\|action\\|"))
    return "\n".join(lines)


def table(results: dict[str, dict[str, np.ndarray]]) -> str:
    lines = [f"| | {' | '.join(results)} |", "|---|" + "---|" * len(results)]

    def add(label: str, cell: Any) -> None:
        lines.append(f"| {label} | {' | '.join(cell(r) for r in results.values())} |")

    def spread(values: np.ndarray) -> str:
        low, median, high, top = np.percentile(values, [25, 50, 75, 90])
        return f"**{median:.0f}** ({low:.0f} – {high:.0f}; {top:.0f}; {values.mean():.0f})"

    def sides(r: dict[str, np.ndarray]) -> str:
        octant = np.floor(r["pushes"][:, 0] / (np.pi / 4)).astype(int) % 8
        return " ".join(f"{share:.0f}" for share in 100 * np.bincount(octant, minlength=8) / len(octant))

    for prefix, label in WINDOWS.items():
        add(f"**{label}**: block moves, px", lambda r, p=prefix: spread(r[p + "moved"]))
        add("its centre of mass moves, px", lambda r, p=prefix: spread(r[p + "centre moved"]))
        add("block turns, degrees", lambda r, p=prefix: spread(np.abs(r[p + "turned"])))
        add("block moves more than 5 px", lambda r, p=prefix: f"{(r[p + 'moved'] > 5).mean():.1%}")
    add("pushes an episode", lambda r: f"{len(r['pushes']) / len(r['rows']):.1f}")
    add("steps a push lasts, mean", lambda r: f"{r['pushes'][:, 2].mean():.1f}")
    add("pushes by side, % for each octant around the block", sides)
    add(
        "pushes that turn it > 2° clockwise / anticlockwise",
        lambda r: f"{(r['pushes'][:, 1] > 2).mean():.0%} / {(r['pushes'][:, 1] < -2).mean():.0%}",
    )
    add("steps in touch with the block", lambda r: f"{r['touching'].mean():.0%}")
    add(
        "change of the action from step to step, mean (actions are in [−1, 1]²)",
        lambda r: f"{r['action change'].mean():.2f}",
    )
    add("steps with the agent outside the image", lambda r: f"{r['agent outside'].mean():.1%}")
    add("steps with the block at or past a wall", lambda r: f"{r['block at a wall'].mean():.1%}")
    return "\n".join(lines)


def draw(results: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(2, 2, figsize=(9, 6), sharex="col")
    for (left, right), (prefix, label) in zip(rows, WINDOWS.items(), strict=True):
        for (policy, r), colour in zip(results.items(), ("#d98c3f", "#3a6fb0"), strict=True):
            turned = np.abs(r[prefix + "turned"])
            panels = ((left, r[prefix + "moved"], np.arange(0, 421, 20)), (right, turned, np.arange(0, 181, 10)))
            for axis, values, bins in panels:
                style = {"bins": bins, "weights": np.full(len(values), 100 / len(values)), "color": colour}
                axis.hist(np.clip(values, 0, bins[-1] - 1e-6), alpha=0.35, label=policy, **style)
                axis.hist(np.clip(values, 0, bins[-1] - 1e-6), histtype="step", linewidth=1.4, **style)
                axis.axvline(np.median(values), color=colour, linestyle="--", linewidth=1.2)
        left.set_ylabel("share [%]")
        left.set_title(label, fontsize=9, loc="left")
    rows[0, 0].legend(frameon=False)
    rows[0, 1].set_title("dashed: medians; the last bin holds all beyond", fontsize=9, loc="left")
    rows[1, 0].set_xlabel("block moves in 50 steps [px]")
    rows[1, 1].set_xlabel("block turns in 50 steps [degrees]")
    for axis in rows.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    arguments = parser.parse_args()
    results = {policy: run(policy, arguments.episodes, arguments.seed) for policy in POLICIES}
    print(moments_table(results))
    print()
    print(table(results))
    draw(results, arguments.figure)
    print(f"figure: {arguments.figure.name}")


if __name__ == "__main__":
    main()
