"""Files of strangers: nothing in them is run, no memory is taken on their word, nothing is written elsewhere."""

import json
import shutil
import sys
import time
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from atlas_wm.cli.app import main
from atlas_wm.convert.lewm import read_checkpoint
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.models.temporal_head import TemporalHead
from atlas_wm.report import page
from atlas_wm.report.ablation import ablation_section
from atlas_wm.report.films import cases_section
from atlas_wm.rng import make_rng
from atlas_wm.runs.files import MOST_SETTINGS, read_json
from atlas_wm.runs.folder import BANK, DEMONSTRATIONS, TEMPORAL_HEAD, WEIGHTS, read_run, writable_folder
from atlas_wm.runs.model import load_model, save_temporal_head
from atlas_wm.tasks import get_task_of
from atlas_wm.tasks.tworoom import TwoRoom

sys.path.append(str(Path(__file__).parent / "report"))
from made_up import make_run

EVIL = "from pathlib import Path\nPath('was_run').touch()\nclass Task: pass\n"


class Own(TwoRoom):
    """A task of this module, which is imported."""


@pytest.fixture
def run(run_folder, tmp_path, monkeypatch) -> Path:
    """A run folder to spoil, in the working directory, beside a module that must not run."""
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield Path(shutil.copytree(run_folder, "run", ignore=shutil.ignore_patterns("evaluation")))
    sys.modules.pop("evil", None)


def change(run: Path, *keys: str, value: object) -> None:
    config = json.loads((run / "config.json").read_text())
    place = config
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    (run / "config.json").write_text(json.dumps(config))


def refusal(*arguments: object) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    said = str(stopped.value.code)
    assert said.startswith("atlas: ") and "\n" not in said and len(said) < 800
    return said


@pytest.mark.parametrize("command", ["eval", "diagnose", "bank"])
def test_a_task_that_only_a_file_names_is_not_imported(run, command):
    change(run, "task", value="evil:Task")
    said = refusal(command, run)
    assert "a run folder does not decide which code runs" in said and "--task 'evil:Task'" in said
    assert "evil" not in sys.modules and not Path("was_run").exists()


def test_a_task_that_the_command_line_names_is_imported(run):
    change(run, "task", value="evil:Task")
    assert "is not a subclass of atlas_wm.tasks.Task" in refusal("eval", run, "--task", "evil:Task")
    assert Path("was_run").exists()


def test_a_task_of_an_imported_module_is_used_and_nothing_else_is_called(run):
    change(run, "task", value=f"{__name__}:Own")
    assert type(get_task_of(read_run(run)[0])) is Own
    for name in ("os:abort", "sys:exit", f"{__name__}:change", f"{__name__}:nothing", ":", "evil.x:y"):
        change(run, "task", value=name)
        with pytest.raises(UserError, match=r"is not a subclass|does not decide"):
            get_task_of(read_run(run)[0])


def test_methods_and_terms_in_a_file_are_not_imported_to_load_a_model(run):
    change(run, "method", value="evil:METHOD")
    change(run, "config", "objective", "extra", value={"evil:term": 1.0})
    assert load_model(run).run.method == "evil:METHOD"
    assert "evil" not in sys.modules


ENCODER, PREDICTOR = ("config", "model", "encoder"), ("config", "model", "predictor")


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        ((*ENCODER, "width"), 10**9, "encoder.width must lie between 1 and 65536"),
        ((*ENCODER, "width"), 65532, "does not fit its config.json"),  # petabytes, as far as the limits know
        ((*ENCODER, "patch_size"), 0, "encoder.patch_size must lie between"),
        ((*ENCODER, "heads"), 0, "encoder.heads must lie between"),
        ((*ENCODER, "depth"), -1, "encoder.depth must lie between"),
        ((*ENCODER, "depth"), 128, "does not fit its config.json"),
        ((*ENCODER, "mlp_ratio"), 1e300, "encoder.mlp_ratio must lie between"),
        ((*ENCODER, "pixel_mean"), [0.5] * 100_000, "must be tuple"),
        ((*PREDICTOR, "head_dim"), 0, "predictor.head_dim must lie between"),
        ((*PREDICTOR, "mlp"), 60_000, "does not fit its config.json"),
        (("config", "model", "frameskip"), 10**9, "model.frameskip must lie between"),
        (("config", "model", "hidden"), 10**6, "does not fit its config.json"),
        (("config", "plan", "candidates"), 10**12, "plan.candidates must lie between"),
        (("config", "train", "split_seed"), -1, "train.split_seed must lie between"),
        (("config", "train", "lr"), 10**400, "train.lr must be float"),
        (("action_size",), 10**9, "action_size must lie between"),
        (("action_size",), 2.5, "action_size must be int"),
        (("data",), {"path": "x"}, "data lacks hash"),
    ],
)
def test_sizes_that_no_model_has_are_refused_at_once(run, keys, value, said):
    change(run, *keys, value=value)
    started = time.monotonic()
    with pytest.raises(UserError, match=said) as caught:
        load_model(run)
    assert time.monotonic() - started < 10 and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 10**6, "nested too deeply"),
        ('{"format": NaN}', "NaN is not valid JSON"),
        ('{"format": 1' + "0" * 10**5 + "}", "cannot be read"),
        (" " * (MOST_SETTINGS + 1), "is larger than"),
        ("\xff\xfe", "cannot be read"),
    ],
    ids=["deep", "nan", "digits", "large", "encoding"],
)
def test_json_that_would_hurt_is_refused(run, text, said):
    (run / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=said):
        read_run(run)


def test_a_file_without_end_is_not_read_to_its_end():
    with pytest.raises(UserError, match="is larger than"):
        read_json(Path("/dev/zero"), 1000)


@pytest.mark.parametrize("file", [WEIGHTS, BANK, DEMONSTRATIONS, TEMPORAL_HEAD])
def test_weights_and_banks_that_are_not_finite_are_refused(run, file):
    save_temporal_head(TemporalHead.initial(load_file(run / BANK)["points"], make_rng(0)), run)
    tensors = load_file(run / file)
    next(t for t in tensors.values() if t.is_floating_point()).view(-1)[3] = torch.nan
    save_file(tensors, run / file)
    with pytest.raises(UserError, match=rf"{file}.* not finite"):
        load_model(run)


class Payload:
    def __reduce__(self):
        return Path.touch, (Path("was_run"),)


def test_a_checkpoint_runs_nothing_and_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"weights": Payload()}, "pickle.pt")
    torch.save({"giant": torch.zeros(1).expand(10**6, 10**6)}, "expanded.pt")  # 4 bytes that claim 4 terabytes
    torch.save({"zeros": torch.zeros(10**6)}, "plain.pt")
    with zipfile.ZipFile("plain.pt") as plain, zipfile.ZipFile("packed.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert list(read_checkpoint(Path("plain.pt"))) == ["zeros"]
    for name in ("pickle.pt", "expanded.pt", "packed.pt"):
        with pytest.raises(UserError, match="is refused"):
            read_checkpoint(Path(name))
    assert not Path("was_run").exists()


def test_a_report_stays_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "SECTIONS", [ablation_section, cases_section])  # whose files are named after tasks
    arms = ("atlas", "lewm", "wemreg", "lewm+ood")
    runs = [make_run(tmp_path / "runs" / m, m, task="x:../../../escaped") for m in arms]
    runs.append(make_run(tmp_path / "runs/other", "atlas", task="x:/../../escaped"))
    before = set(tmp_path.rglob("*"))
    page.write_report(runs, tmp_path / "out" / "report")
    new = set(tmp_path.rglob("*")) - before
    assert {"ablation", "cases"} <= {p.name.split("-")[0] for p in new}
    assert all(p.is_relative_to(tmp_path / "out") for p in new)


def test_results_are_not_written_through_a_link(run, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / "evaluation").symlink_to(elsewhere)
    few = ("--offset", 10, "--episodes", 2, "--seeds", 1)
    assert "is a link out of the run folder" in refusal("eval", run, *few)
    with pytest.raises(UserError, match="is a link out"):
        writable_folder(run, "evaluation")
    assert not list(elsewhere.iterdir())


def stored(path: Path, **columns: object) -> Path:
    usual = {
        "ep_len": np.array([30, 30]),
        "ep_offset": np.array([0, 30]),
        "action": np.ones((60, 2), np.float32),
        "state": np.ones((60, 2), np.float32),
    }
    with h5py.File(path, "w") as file:
        for name, values in (usual | columns).items():
            if callable(values):
                values(file, name)
            else:
                file[name] = values
    return path


def claimed(file: h5py.File, name: str) -> None:
    file.create_dataset(name, (10**12, 2), np.float32, chunks=(1000, 2))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"action": claimed}, "claims 8,000,000,000,000 bytes and holds 0"),
        ({"ep_len": np.array([10**11, 30])}, "cannot be read"),
        ({"ep_len": np.array([10**9, 30])}, "the file is incomplete"),
        ({"ep_len": np.array([-30, 30])}, "must be non-negative and equally many"),
        ({"ep_offset": np.array([0, -5])}, "must be non-negative and equally many"),
        ({"ep_offset": np.array([0])}, "must be non-negative and equally many"),
        ({"state": h5py.ExternalLink("other.h5", "/state")}, "is a link: store the data itself"),
        (
            {"state": lambda f, n: f.create_dataset(n, (60, 2), "u1", external=[("/etc/passwd", 0, 120)])},
            "stores its data in another file",
        ),
        ({"state": h5py.Empty("f")}, "cannot be read"),
    ],
    ids=["claims", "huge", "long", "negative", "before", "few", "link", "external", "empty"],
)
def test_a_dataset_is_not_believed(columns, said, tmp_path, task):
    with pytest.raises(UserError, match=said):
        EpisodeData(stored(tmp_path / "x.h5", **columns), task, 32, 5)


def test_a_flipped_byte_is_noticed_by_the_card(dataset_path, tmp_path):
    shutil.copy(dataset_path, tmp_path / "x.h5")
    card = dataset_path.with_name(dataset_path.name + ".card.json")
    shutil.copy(card, tmp_path / "x.h5.card.json")
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file["action"][100, 1] = np.nextafter(file["action"][100, 1], np.float32(9))
    train = ("train", "tworoom", "--recipe", "demo", "--device", "cpu", "--out", tmp_path / "run")
    assert "x.h5 does not match its card x.h5.card.json" in refusal(*train, "--data", tmp_path / "x.h5")
