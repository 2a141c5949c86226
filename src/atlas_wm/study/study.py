"""What a study compares: a named one, or a TOML file of your own (docs/guides/study.md)."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from atlas_wm.errors import UserError, reason, unknown
from atlas_wm.methods import get_method
from atlas_wm.recipes import recipe_config, untuned
from atlas_wm.runs.results import Protocol
from atlas_wm.settings import check_types, from_dict, require
from atlas_wm.task_table import TASKS

FIRST_SEED = 3072  # of training, as in LeWM
MOST_RUNS = 10_000
Flags = dict[str, bool | int | float | str]  # of `atlas train`, by name


@dataclass(frozen=True)
class Dataset:
    """Demonstrations of one task, collected unless ``path`` names a dataset that exists."""

    path: str | None = None
    episodes: int = 2000
    pixels: bool = True
    demonstrator: tuple[str, ...] = ()
    """NAME=VALUE, as `atlas collect --demonstrator` takes them."""
    format: Literal["lance", "h5"] = "lance"
    try_path: str | None = None
    """With ``path``, for recipes that are tuned: another dataset, which only the tries use."""
    eval_episodes: int = 0
    """Record as many others, with another seed, and evaluate on them instead of held-out episodes of these."""
    eval_demonstrator: tuple[str, ...] = ()
    """NAME=VALUE for those: noise in the training data need not be in the goals."""
    eval_path: str | None = None
    """Or evaluate on this dataset, which exists."""

    def __post_init__(self) -> None:
        check_types("", self)
        require(self.episodes >= 1, "episodes must be at least 1")
        require(self.eval_episodes >= 0, "eval_episodes must be at least 1, or 0 for held-out episodes")
        require(
            self.eval_path is None or not self.eval_episodes,
            "eval_path names a dataset that exists, eval_episodes collects one: give one of them",
        )
        require(
            bool(self.eval_episodes) or not self.eval_demonstrator,
            "eval_demonstrator is for the episodes of eval_episodes, which is 0",
        )
        require(self.try_path is None or self.path is not None, "try_path needs path: both exist, or neither")
        require(
            not _same(self.try_path, self.path),
            f"try_path must not be path, {self.path}: tries would choose on episodes that are evaluated",
        )
        require(
            not _same(self.eval_path, self.path) and not _same(self.eval_path, self.try_path),
            f"eval_path must not be {self.eval_path}, which models are trained on",
        )

    @property
    def paths(self) -> list[str]:
        """Of datasets that exist."""
        return [path for path in (self.path, self.try_path, self.eval_path) if path is not None]

    @property
    def evaluated_apart(self) -> bool:
        return self.eval_path is not None or self.eval_episodes > 0


@dataclass(frozen=True)
class Evaluation:
    """One call of `atlas eval` for every run."""

    offset: int = 50
    budget: int | None = None
    """Default offset + 25."""
    episodes: int = 200
    seeds: tuple[int, ...] = (42, 43, 44, 45, 46)
    flags: tuple[str, ...] = ()
    """Others of `atlas eval`, such as ["--cost", "nearest", "--replan-every", "1"]."""

    def __post_init__(self) -> None:
        check_types("", self)
        Protocol(self.offset, self.budget, self.episodes, self.seeds)  # checks them
        words = (part for flag in self.flags for part in (flag.split("=", 1) if flag.startswith("--") else [flag]))
        object.__setattr__(self, "flags", tuple(words))


@dataclass(frozen=True)
class Study:
    """Every task × method × recipe × training seed is one run; every run has every evaluation."""

    tasks: tuple[str, ...] = ("tworoom",)
    methods: tuple[str, ...] = ("atlas", "lewm")
    recipes: tuple[str, ...] = ("paper",)
    """`small`, or `small+tuned`: with the weight of the method's regulariser that has the best planning score."""
    seeds: int = 1
    """Number of training seeds."""
    settings: Flags = field(default_factory=dict)
    """Flags of `atlas train` for all runs: {"train.steps": 2000}."""
    method_settings: dict[str, Flags] = field(default_factory=dict)
    """By method: flags of `atlas train` for its runs alone, after ``settings``."""
    tries: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0)
    """For recipes that are tuned: factors of the recipe's weight, the same for every method."""
    try_settings: Flags = field(default_factory=dict)
    """Flags of `atlas train` for the tries, after ``settings``."""
    datasets: dict[str, Dataset] = field(default_factory=dict)
    """By task."""
    evaluations: tuple[Evaluation, ...] = (Evaluation(25), Evaluation(50))
    part: Literal["heldout", "all"] = "heldout"
    """Evaluate on episodes that training never saw, or on `all` of the training data, as the paper does."""
    head: tuple[str, ...] = ()
    """Flags of `atlas head`, which fits the head for evaluations with --cost temporal."""
    diagnostics: tuple[str, ...] = ("all",)
    left_out: dict[str, str] = field(default_factory=dict)
    """Methods that are not run, and why: rows of the report's table. Those whose weights are missing are added."""
    mark: float | None = None
    """Success in % that a run has to reach in every evaluation; the summary says which runs do."""

    def __post_init__(self) -> None:
        check_types("", self)
        for name in ("tasks", "methods", "recipes"):
            values = getattr(self, name)
            require(len(values) > 0, f"{name} must name at least one")
            require(len(set(values)) == len(values), f"{name} names one twice: {', '.join(values)}")
        for task in self.tasks:
            if task not in TASKS and ":" not in task:
                raise unknown("task", task, TASKS)
        for name in ("settings", "try_settings"):
            object.__setattr__(self, name, _as_flags(name, getattr(self, name)))
        for method in self.method_settings:
            require(
                method in self.methods,
                f"method_settings names {method}, which is none of the methods {', '.join(self.methods)}",
            )
        both = sorted({*self.left_out} & {*self.methods})
        require(not both, f"left_out names {', '.join(both)}, which methods names too: keep one of them")
        given = {m: _as_flags(f"method_settings.{m}", flags) for m, flags in self.method_settings.items()}
        object.__setattr__(self, "method_settings", given)
        require(self.mark is None or 0 < self.mark <= 100, "mark is a success rate in %, above 0 and at most 100")
        require(self.seeds >= 1, "seeds is the number of training seeds, at least 1")
        count = len(self.tasks) * len(self.methods) * len(self.recipes) * self.seeds
        require(count <= MOST_RUNS, f"a study has at most {MOST_RUNS:,} runs, not {count:,}")
        for method in self.methods:
            get_method(method)
            for recipe, task in product(self.recipes, self.tasks):
                self._check(recipe, method, task)
        require(all(factor > 0 for factor in self.tries), "tries are factors above 0")
        require(len(set(self.tries)) == len(self.tries) > 0, "tries must be one or more different factors")
        for task in self.datasets:
            require(
                task in self.tasks, f"datasets names {task}, which is none of the tasks {', '.join(self.tasks)}"
            )

    def _check(self, recipe: str, method: str, task: str) -> None:
        objective = recipe_config(recipe, method, task).objective
        if recipe == untuned(recipe):
            return
        require(
            bool(get_method(method).regulariser_of(objective)),
            f"{method} has no regulariser to tune: leave it or {recipe} out, or name terms in Method.regulariser",
        )
        dataset = self.dataset(task)
        require(
            dataset.path is None or dataset.try_path is not None,
            f"{recipe} needs another dataset for the tries: name it as try_path beside path = {dataset.path!r}",
        )

    @property
    def training_seeds(self) -> range:
        return range(FIRST_SEED, FIRST_SEED + self.seeds)

    def settings_of(self, method: str) -> Flags:
        return self.settings | self.method_settings.get(method, {})

    def dataset(self, task: str) -> Dataset:
        return self.datasets.get(task, DATASETS.get(task, Dataset()))


def _same(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and Path(one).resolve() == Path(other).resolve()


def _as_flags(where: str, given: Flags) -> Flags:
    """The settings, named as `atlas train` names its flags."""
    for name in given:
        require(
            name.startswith(("train.", "model.", "objective.", "plan.")),
            f"{where} are train., model., objective. and plan. settings of `atlas train`, not {name}",
        )
        require(name != "train.seed", f"{where} cannot set train.seed: seeds is the number of training seeds")
    return {name if ":" in name else name.replace("_", "-"): value for name, value in given.items()}


def file_name(text: str) -> str:
    """``module:Class`` without its module."""
    return text.rpartition(":")[-1]


DATASETS = {  # where a study says nothing
    "tworoom": Dataset(episodes=5000, pixels=False),
    "pusht": Dataset(episodes=2500, demonstrator=("white_noise=0.4",), eval_episodes=300),
    "cube": Dataset(
        episodes=1000,
        demonstrator=("targets=many", "action_noise=0.3", "shadow_size=1024"),
        eval_episodes=100,  # one target each, the harness' rule
    ),
}
WAYS = (  # to plan: the paper's first
    ("--cost", "terminal", "--replan-every", "5", "--start", "zero"),
    ("--cost", "nearest", "--replan-every", "1", "--start", "zero"),
    ("--cost", "nearest", "--replan-every", "1", "--start", "retrieval"),
    ("--cost", "temporal", "--replan-every", "1", "--start", "zero"),
    ("--cost", "temporal", "--replan-every", "1", "--start", "retrieval"),
)
ARMS = ("lewm", "lewm+ood", "wemreg", "atlas")
STUDIES = {
    "demo": Study(
        methods=("lewm", "atlas"),
        recipes=("demo",),
        evaluations=(
            Evaluation(25, 50, 100, (42,)),
            Evaluation(50, 75, 100, (42,)),
            Evaluation(100, 125, 100, (42,)),
            Evaluation(100, 125, 100, (42,), ("--start", "retrieval")),
        ),
    ),
    "ablation": Study(methods=ARMS, recipes=("paper",)),
    "paper": Study(("tworoom", "pusht", "cube"), (*ARMS, "pldm", "dino-wm", "fast-wm"), seeds=3, part="all"),
    "fair": Study(  # the paper's weights beside those that five tries chose for each method
        ("tworoom", "pusht", "cube"),
        ("atlas", "wemreg", "lewm+ood", "lewm", "pldm", "fast-wm"),
        ("paper", "paper+tuned"),
        seeds=3,
        try_settings={"train.steps": 2000},
        diagnostics=(),
    ),
    "planning": Study(  # the same models and episodes, every way to plan; floor and ceiling with the first
        ("tworoom", "pusht", "cube"),
        ("atlas",),
        ("tuned",),
        # Few demonstrations are longer than 100 rows: 5,000 hold out too few of them for 200 start rows.
        datasets={"tworoom": Dataset(episodes=10_000, pixels=False)},
        evaluations=tuple(
            Evaluation(offset, flags=(*way, *(() if way is WAYS[0] else ("--policy", "model"))))
            for offset, way in product((25, 50, 100), WAYS)
        ),
        diagnostics=(),
    ),
    "speedrun": Study(  # the least time from nothing to a model that plans
        methods=("atlas",),
        recipes=("demo",),
        datasets={"tworoom": Dataset(episodes=2000, pixels=False, format="h5")},
        evaluations=(Evaluation(50, 75, 200, (42,), ("--cost", "nearest", "--replan-every", "1")),),
        diagnostics=(),
        mark=95.0,
    ),
}


def read_study(name: str) -> Study:
    """A named study, or a TOML file."""
    if not name.endswith(".toml"):
        if name not in STUDIES:
            raise unknown("study", name, [*STUDIES, "FILE.toml"])
        return STUDIES[name]
    try:
        data: dict[str, Any] = tomllib.loads(Path(name).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{name} cannot be read as TOML: {reason(error)}") from error
    for key in ("settings", "try_settings"):
        if key in data:
            data[key] = _dotted(data[key])
    if isinstance(of_methods := data.get("method_settings"), dict):
        data["method_settings"] = {method: _dotted(settings) for method, settings in of_methods.items()}
    return from_dict(Study, data, name)


def _dotted(table: Any) -> Any:
    """TOML reads train.steps = 5 without quotes as {"train": {"steps": 5}}; a setting is {"train.steps": 5}."""
    if not isinstance(table, dict):
        return table
    flags: Flags = {}
    for name, value in table.items():
        inner = _dotted(value)
        flags |= {f"{name}.{rest}": v for rest, v in inner.items()} if isinstance(inner, dict) else {name: inner}
    return flags


def with_weights(study: Study, given: Sequence[str] | None) -> Study:
    """Pretrained weights of encoders, written as METHOD=FILE."""
    settings = dict(study.method_settings)
    for text in given or ():
        method, equals, file = text.partition("=")
        if not equals or method not in study.methods:
            known = ", ".join(study.methods)
            raise UserError(f"--encoder-weights takes METHOD=FILE for one of the methods {known}, not {text}")
        settings[method] = settings.get(method, {}) | {"model.encoder.weights": file}
    return replace(study, method_settings=settings)


def leave_out(study: Study, methods: Mapping[str, str]) -> Study:
    """The study without these methods, and why."""
    rest = tuple(method for method in study.methods if method not in methods)
    if not rest:
        raise UserError("the study has no method that can be trained: name the weights, or other --methods")
    return changed(study, methods=rest, left_out={**study.left_out, **methods})


def changed(study: Study, **given: Any) -> Study:
    """The study with the settings that are given; datasets of tasks and settings of methods that are left out go
    with them. A method that is given is no longer left out."""
    given = {name: value for name, value in given.items() if value is not None}
    tasks, methods = given.get("tasks", study.tasks), given.get("methods", study.methods)
    datasets = {task: dataset for task, dataset in study.datasets.items() if task in tasks}
    settings = {method: flags for method, flags in study.method_settings.items() if method in methods}
    left_out = given.pop("left_out", {m: why for m, why in study.left_out.items() if m not in methods})
    return replace(study, **given, datasets=datasets, method_settings=settings, left_out=left_out)
