"""Which runs are compared with which: methods of one recipe with ATLAS, tuned recipes with untuned ones."""

from made_up import change, make_run

from atlas_wm.report.differences import differences_section
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import read_study


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


def test_nothing_to_compare_no_section(tmp_path):
    assert differences_section(read_study([make_run(tmp_path / "run", "atlas", seeds=(42,))])).blocks == []
