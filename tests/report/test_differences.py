"""Which runs are compared with which: methods of one recipe with ATLAS, tuned recipes with untuned ones."""

import shutil

from made_up import change, make_run

from atlas_wm.report.differences import differences_section
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import read_study
from atlas_wm.runs.results import Protocol
from made_up_results import episode, evaluation, policy


def test_methods_of_one_recipe_and_recipes_of_one_method(tmp_path):
    runs = []
    for method in ("lewm", "atlas"):
        for recipe in ("demo", "demo+tuned"):
            for seed in (3072, 3073):
                run = make_run(tmp_path / f"{method}-{recipe}-{seed}", method, seed=seed, seeds=(42,))
                change(run / "config.json", "recipe", value=recipe)
                runs.append(run)
    (table,) = (b for b in differences_section(read_study(runs)).blocks if isinstance(b, Table))
    compared = {record["compared"] for record in table.data}
    assert compared == {
        "ATLAS against LeWM, demo",
        "ATLAS against LeWM, demo+tuned",
        "LeWM, demo+tuned against demo",
        "ATLAS, demo+tuned against demo",
    }
    assert len(table.rows) == 2 * len(compared)  # two offsets
    assert all(len(record["by_run"].split()) == 2 for record in table.data)  # a pair for each training seed
    for row, record in zip(table.rows, table.data, strict=True):
        shown = dict(zip(table.header, row, strict=True))
        assert shown["Points of success"] == "{points:+.1f} [{seeds_low:+.1f}, {seeds_high:+.1f}]".format(**record)
    # all made-up episodes succeed, and are of one demonstration
    assert "These runs alone: -79.3 to +79.3. Training seeds: 2." in table.note
    one_seed = differences_section(read_study([run for run in runs if run.name.endswith("3072")])).blocks
    (table,) = (b for b in one_seed if isinstance(b, Table))
    assert "Training seeds: 1." in table.note and "These runs alone: –." in table.note
    assert table.data[0]["seeds_low"] is None


def test_episodes_solved_at_the_start_count_unless_the_protocol_leaves_them_out(tmp_path):
    """Of ten, six are solved at the start; of the others one method reaches two, the other none."""
    runs = []
    for method, reached in (("atlas", (6, 7)), ("lewm", ())):
        runs.append(make_run(tmp_path / method, method, seeds=(42,)))
        shutil.rmtree(runs[-1] / "evaluation")
        episodes = [episode(k, k < 6 or k in reached, episode=k, solved_at_start=k < 6) for k in range(10)]
        for left_out in (False, True):
            protocol = Protocol(50, 75, 10, (42,), leave_out_solved=left_out)
            result = evaluation(policy({42: episodes}), data="30b00272c8bbb44d", method=method, protocol=protocol)
            result.write(runs[-1] / "evaluation", {})
    (table,) = (b for b in differences_section(read_study(runs)).blocks if isinstance(b, Table))
    assert [(record["points"], record["won"], record["lost"]) for record in table.data] == [(20, 2, 0), (50, 2, 0)]


def test_nothing_to_compare_no_section(tmp_path):
    assert differences_section(read_study([make_run(tmp_path / "run", "atlas", seeds=(42,))])).blocks == []
