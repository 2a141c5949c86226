"""The result of an evaluation: one file in ``RUN/evaluation``. Only this module reads and writes it."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from atlas_wm.config import MOST_SEED, PlanConfig
from atlas_wm.errors import UserError, short
from atlas_wm.runs.files import read_json, write_atomically, write_json, writing
from atlas_wm.runs.films import films_path
from atlas_wm.settings import check_types, from_dict, to_dict, within

FORMAT = 2  # the oldest files have no number: see _from_unnumbered
FOLDER = "evaluation"
MOST_COUNT, MOST_BUDGET = 2**53, 1_000_000  # rows and plans; steps of an episode
PolicyName = Literal["model", "random", "replay", "oracle"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
USUAL_POLICIES: tuple[PolicyName, ...] = ("model", "random", "replay")
Half = Literal["", "id", "ood"]  # "": all episodes


@dataclass(frozen=True)
class Protocol:
    """One condition. Start and goal are two rows of one demonstration, ``offset`` apart."""

    offset: int = 50
    budget: int | None = None
    """Environment steps an episode may take; default offset + 25."""
    episodes: int = 200
    """Episodes for each seed."""
    seeds: tuple[int, ...] = (42, 43, 44, 45, 46)
    part: Literal["all", "heldout"] = "all"
    """Draw from all episodes, as the paper does, or only from those that training never saw."""
    leave_out_solved: bool = False
    """Leave episodes that are solved at the start out of the success rates (their records stay)."""

    def __post_init__(self) -> None:
        check_types("protocol.", self)
        if self.offset < 1 or self.episodes < 1 or not self.seeds or (self.budget is not None and self.budget < 1):
            raise UserError("--offset, --budget and --episodes must be at least 1, and --seeds not empty")
        if self.steps > MOST_BUDGET:
            raise UserError(f"an episode may take at most {MOST_BUDGET:,} steps, not {short(self.steps)}")
        if len(set(self.seeds)) < len(self.seeds) or not all(0 <= seed <= MOST_SEED for seed in self.seeds):
            raise UserError(f"--seeds must be different numbers from 0 on, not {short(list(self.seeds))}")

    @property
    def steps(self) -> int:
        return self.offset + 25 if self.budget is None else self.budget

    @property
    def name(self) -> str:
        unsolved = "_unsolved" if self.leave_out_solved else ""
        return f"{self.part}_offset{self.offset}_budget{self.steps}{unsolved}"


@dataclass(frozen=True)
class EpisodeRecord:
    """The outcome of one episode."""

    row: int  # dataset row of the start; the goal is ``offset`` rows later
    episode: int  # dataset episode
    start: int  # row within that episode
    solved_at_start: bool
    success: bool
    steps: int  # to success, or the whole budget; to the error, if there was one
    final_distance: float | None  # None after an error
    last_states: list[list[float]]  # after the last steps, the latest last; none after an error
    plans: int  # 0 for a policy that does not plan
    error: str | None  # what the environment raised, or how its process ended; such an episode failed
    # What the first plan said, as in Plan; None: not recorded
    remaining: float | None = field(default=None, kw_only=True)
    strayed: float | None = field(default=None, kw_only=True)
    crossed: float | None = field(default=None, kw_only=True)
    risk: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        within("", self, 0, MOST_COUNT, "row", "episode", "start", "steps", "plans")
        if len({len(state) for state in self.last_states}) > 1:
            raise UserError(f"the last states of the episode from row {self.row} have different sizes")


@dataclass(frozen=True)
class EpisodeResult(EpisodeRecord):
    """The outcome of one episode, and its novelty."""

    novelty: float  # of its demonstration
    ood: bool  # in the more novel half of its condition and seed


class Rates(NamedTuple):
    """Success in percent; None if no episode counts."""

    mean: float | None  # over the seeds
    std: float | None
    by_seed: dict[str, float | None]


@dataclass(frozen=True)
class PolicyResult:
    """All episodes of one policy: success in percent, in total and by ID/OOD half."""

    success_mean: float | None
    success_std: float | None
    success_by_seed: dict[str, float | None]
    success_id_mean: float | None
    success_id_std: float | None
    success_id_by_seed: dict[str, float | None]
    success_ood_mean: float | None
    success_ood_std: float | None
    success_ood_by_seed: dict[str, float | None]
    solved_at_start: float
    success_without_solved: float | None
    plans: int
    errors: int
    wall_seconds: float  # acting and planning, summed over processes
    episodes: dict[str, list[EpisodeResult]]  # by evaluation seed
    # Only for a policy that plans:
    planning_seconds: float | None = None  # summed over processes
    seconds_per_plan: float | None = None
    peak_memory: int | None = None  # bytes

    def __post_init__(self) -> None:
        within("", self, 0, MOST_COUNT, "plans", "errors", "wall_seconds")

    def rates(self, half: Half = "") -> Rates:
        key = f"success_{half}" if half else "success"
        return Rates(*(getattr(self, f"{key}_{what}") for what in Rates._fields))

    @property
    def count(self) -> int:
        return sum(len(episodes) for episodes in self.episodes.values())

    @property
    def steps(self) -> float:
        """Mean environment steps of an episode; a failure counts as the whole budget."""
        return float(np.mean([e.steps for episodes in self.episodes.values() for e in episodes]))

    def share_of(self, ceiling: "PolicyResult", leave_out_solved: bool) -> float | None:
        """Successes in percent of the ceiling's, over its episodes; None if one is missing here or it has none."""
        mine = {(seed, e.row): e for seed, episodes in self.episodes.items() for e in episodes}
        theirs = {(seed, e.row): e for seed, episodes in ceiling.episodes.items() for e in episodes}
        counted = {key for key, e in theirs.items() if not (leave_out_solved and e.solved_at_start)}
        reachable = sum(theirs[key].success for key in counted)
        if not reachable or not counted <= mine.keys():
            return None
        return 100 * sum(mine[key].success for key in counted) / reachable


@dataclass(frozen=True)
class EvaluatedData:
    path: str
    hash: str


@dataclass(frozen=True)
class NoveltyBank:
    """The states that define the novelty of an episode, and so the ID and OOD halves."""

    states: int
    neighbours: int
    seed: int
    source: Literal["training data", "evaluated data"]
    data: str  # hash of the dataset they are from


@dataclass(frozen=True)
class EvaluationResult:
    """The evaluation of one condition."""

    task: str  # of the evaluation
    trained_task: str  # of the run
    method: str
    recipe: str
    protocol: Protocol  # with its budget filled in
    plan: PlanConfig
    precision: Literal["bf16", "float32", "mixed"] | None  # that the planner used; None: not recorded
    plain: bool | None  # whether the planner ran without the fast path
    data: EvaluatedData
    novelty_bank: NoveltyBank
    device: str
    environments: str | None  # local: in the processes that plan; remote: in an env pool
    workers: int | None
    processes: int | None
    film_every: int  # steps between two frames of a film
    written: str  # UTC, ISO 8601; empty: not recorded
    model: PolicyResult
    random: PolicyResult | None = None  # the floor: uniformly random actions
    replay: PolicyResult | None = None  # the ceiling of the environment: the actions of the demonstration
    oracle: PolicyResult | None = None  # the ceiling of the planner: its search in the true environment
    oracle_plan: PlanConfig | None = None  # how the oracle searched
    share_of_oracle: float | None = None  # the model's successes in percent of the oracle's, over its episodes
    versions: dict[str, str] = field(default_factory=dict)
    weights: str | None = None  # of the run: best, step-2000; None: the final ones
    variation: dict[str, tuple[float, ...]] = field(default_factory=dict)  # of the environment; empty: its defaults
    novel_plans: int | None = None  # the model's plans that novelty flags; None: not measured
    remaining_auroc: float | None = None  # with which it predicts failure; None: too few failures or successes
    risk_auroc: float | None = None  # the same for the risk
    temporal_head: str | None = None  # hash of its file, if the plans used it; None in older results, too
    demonstrations: str | None = None  # the same, if the searches started from them
    command: tuple[str, ...] = ()  # arguments of atlas; empty: it was not called from the command line
    format: int = FORMAT

    def __post_init__(self) -> None:
        within("", self, 1, MOST_BUDGET, "film_every")
        if self.weights is not None and not re.fullmatch(r"best|step-\d{1,18}", self.weights):
            raise UserError(f"weights must be best or step-NUMBER, not {short(self.weights)}")
        for name, result in self.policies.items():
            found = {seed: len(episodes) for seed, episodes in result.episodes.items()}
            wanted = {str(seed): self.protocol.episodes for seed in self.protocol.seeds}
            if name == "oracle":  # it may have fewer
                found = {seed: max(count, wanted.get(seed, 0)) for seed, count in found.items()}
            if found != wanted:
                raise UserError(f"the episodes of {name} are not those of its protocol")

    @property
    def policies(self) -> dict[PolicyName, PolicyResult]:
        """Those that were evaluated."""
        return {name: result for name in POLICIES if (result := getattr(self, name)) is not None}

    @property
    def condition(self) -> str:
        text = re.sub(r"[^A-Za-z0-9.=-]+", "_", self.variation_text)
        short_text = text if len(text) <= 80 else hashlib.sha256(text.encode()).hexdigest()[:8]
        varied = f"_vary_{short_text}" if text else ""
        return self.protocol.name + self.plan.replanning + (f"_{self.weights}" if self.weights else "") + varied

    @property
    def variation_text(self) -> str:
        """As --vary takes it."""
        return " ".join(f"{name}={','.join(f'{v:g}' for v in values)}" for name, values in self.variation.items())

    @property
    def novel_share(self) -> float | None:
        """The model's plans that novelty flags, in percent."""
        return (
            None if self.novel_plans is None or not self.model.plans else 100 * self.novel_plans / self.model.plans
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What the user asked for: two evaluations of a run may differ in these."""
        names = ("weights", "variation", "temporal_head", "demonstrations")  # not in the digests of older files
        optional: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.oracle and self.oracle_plan:
            optional |= {"oracle": asdict(self.oracle_plan), "oracle_episodes": self.oracle.count}
        return {
            "task": self.task,
            "protocol": asdict(self.protocol),
            "plan": asdict(self.plan),
            "precision": self.precision,
            "plain": self.plain,
            "data": self.data.hash,
            "novelty_bank": asdict(self.novelty_bank),
            "policies": list(self.policies),
        } | {name: value for name, value in optional.items() if value}

    @property
    def name(self) -> str:
        """File name: the condition and a digest of all settings."""
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()
        return f"{self.condition}-{digest[:8]}"

    @property
    def summary(self) -> str:
        """A short text of the settings in which evaluations of one condition usually differ."""
        seeds, plan = self.protocol.seeds, self.plan
        return (
            f"{self.protocol.episodes} episodes for {len(seeds)} seed{'s' if len(seeds) > 1 else ''}, "
            f"{plan.solver.upper() if plan.solver == 'cem' else plan.solver} "
            f"{plan.candidates}×{plan.iterations}×{plan.horizon} with {plan.elites} elites"
            + (f", {self.precision}" if self.precision else "")
            + (", plain" if self.plain else "")
        )

    def condition_suffix(self, training_data: str | None) -> str:
        """What distinguishes the condition apart from offset, budget and part: ``, cost x, task y``, or nothing;
        also a dataset other than the training data, whose hash is given."""
        plan, parts = self.plan, [f"weights {self.weights}"] if self.weights else []
        if self.protocol.leave_out_solved:
            parts.append("without episodes solved at the start")
        if plan.cost != "terminal":
            parts.append(f"cost {plan.cost}")
        if plan.start != "zero":
            parts.append(f"start {plan.start}")
        if plan.solver != "cem":
            parts.append(f"solver {plan.solver}")
        if plan.execute != plan.horizon:
            parts.append(f"replanned every {plan.execute}")
        if self.variation:
            parts.append(f"vary {self.variation_text}")
        if self.task != self.trained_task:
            parts.append(f"task {self.task}")
        return "".join(f", {part}" for part in parts) + self.data_suffix(training_data)

    def data_suffix(self, training_data: str | None) -> str:
        """The part for a dataset other than the training data."""
        return "" if self.data.hash == training_data else f", data {Path(self.data.path).name} ({self.data.hash})"

    def write(self, folder: Path, films: Mapping[int, np.ndarray]) -> Path:
        """Write the file and ``NAME.films.npz``. Only a result with the same settings is replaced.

        films: by start row, (frames, H, W, 3) uint8, the goal last.
        """
        path = folder / f"{self.name}.json"
        with writing(folder):
            films_path(path).unlink(missing_ok=True)  # of the replaced result
            if films:
                with write_atomically(films_path(path)) as temporary, temporary.open("wb") as out:
                    np.savez_compressed(out, **{f"row{row}": film for row, film in films.items()})  # type: ignore[arg-type]
            write_json(path, to_dict(self))
        return path

    @classmethod
    def read(cls, path: Path) -> "EvaluationResult":
        return cls.parse(read_json(path), path)

    @classmethod
    def parse(cls, data: Any, path: Path) -> "EvaluationResult":
        """Check and convert the content of a file. ``path`` is for error messages."""
        found = data.get("format") if isinstance(data, dict) else None
        if found == 1:
            data = {"environments" if key == "stages" else key: value for key, value in data.items()}
            data |= {"plan": _with_cost(data.get("plan")), "format": FORMAT}
        elif found is not None and found != FORMAT:
            raise UserError(
                f"{path} has format {short(found)}, but this version reads {FORMAT}: run `atlas eval` again, or "
                f"install the version that wrote it"
            )
        try:
            return from_dict(cls, _from_unnumbered(data) if found is None else data, "the evaluation")
        except (UserError, LookupError, TypeError, AttributeError) as error:
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__} {short(str(error))}"
            raise UserError(f"{path} is damaged ({why}): delete it and run `atlas eval` again") from error


def _with_cost(plan: Any) -> Any:
    """The planning cost was called rule before format 2."""
    if not isinstance(plan, dict):
        return plan
    return {"cost" if key == "rule" else key: value for key, value in plan.items()}


def _from_unnumbered(data: Any) -> dict[str, Any]:
    """Convert a file from before format numbers. Fields that were not recorded become None.

    These files always split the ID and OOD halves by novelty against the evaluated data.
    """
    new = {key: value for key, value in data.items() if key in {f.name for f in fields(EvaluationResult)}}
    bank = {"states": 0, "neighbours": 0, "seed": 0} | data.get("novelty_bank", {})
    new |= {
        "trained_task": data["task"],
        "novelty_bank": bank | {"source": "evaluated data", "data": data["data"]["hash"]},
        "plan": {"clip_actions": False} | _with_cost(data["plan"]),  # no plan was clipped then
        "film_every": 5,
        "written": "",
        "format": FORMAT,
    }
    for name in ("precision", "plain", "environments", "workers", "processes"):
        new.setdefault(name, None)
    for policy in ("model", "random"):
        if policy in data:
            new[policy] = {k: v for k, v in data[policy].items() if k != "seconds"}
            new[policy]["wall_seconds"] = data[policy]["seconds"]
    return new


def read_results(run: Path) -> dict[str, EvaluationResult]:
    """All evaluations of a run, by file name."""
    return {path.stem: EvaluationResult.read(path) for path in sorted((run / FOLDER).glob("*.json"))}


class SelectedEvaluation(NamedTuple):
    """The most complete evaluation of one condition."""

    name: str  # file name without .json
    result: EvaluationResult
    others: tuple[str, ...]  # file names of the other evaluations


def most_complete(results: Mapping[str, EvaluationResult]) -> list[SelectedEvaluation]:
    """For each condition, task and dataset: most episodes first, then most policies, then the newest."""

    def weight(name: str) -> tuple[int, int, str, str]:
        result = results[name]
        return result.model.count, len(result.policies), result.written, name

    by_condition: dict[tuple[str, str, str], list[str]] = {}
    for name, result in results.items():
        by_condition.setdefault((result.condition, result.task, result.data.hash), []).append(name)
    selected = []
    for names in by_condition.values():
        best, *others = sorted(names, key=weight, reverse=True)
        selected.append(SelectedEvaluation(best, results[best], tuple(others)))
    return selected
