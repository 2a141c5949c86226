"""Imagined futures above real ones, for episodes that reached the goal and for others."""

from typing import Any

from atlas_wm.report import captions
from atlas_wm.report.films import MOST_FRAMES, Strip, read_image, strips_panel
from atlas_wm.report.naming import file_name, task_name
from atlas_wm.report.runs import Study
from atlas_wm.report.section import Section, diagnostic_notices
from atlas_wm.report.style import Figure, Panel

MOST_EPISODES = 4  # of a task with one method; of more methods, 2 each


def imagined_section(study: Study) -> Section:
    section = Section("imagined", "Imagined futures", "Does the model expect what then happens?")
    section.blocks += diagnostic_notices(study, "imagined")
    for task in study.tasks:
        groups, panels = study.of_task(task), list[Panel]()
        for group in groups:
            run = next((run for run in group.runs if "imagined" in run.diagnostics), None)  # seeds look alike
            if run is not None:
                each = MOST_EPISODES // 2 if len(groups) == 1 else 1
                for episode in _some(run.diagnostics["imagined"]["result"]["episodes"], each):
                    title = f"{group.label}, {task_name(task)}, start row {episode['row']}"
                    panels.append(strips_panel(title, _strips(episode)))
        if panels:
            name = "imagined" if len(study.tasks) == 1 else f"imagined-{file_name(task)}"
            title = f"{task_name(task)}: imagined and real"
            section.blocks.append(Figure(name, title, panels, captions.IMAGINED, 1))
    return section


def _some(episodes: list[dict[str, Any]], each: int) -> list[dict[str, Any]]:
    """Failures and successes, as many of each."""
    return [e for success in (False, True) for e in [e for e in episodes if bool(e["success"]) == success][:each]]


def _strips(episode: dict[str, Any]) -> list[Strip]:
    success, steps, shown = bool(episode["success"]), episode["steps"], episode["shown_steps"][:MOST_FRAMES]
    goal = read_image(episode["goal"])
    imagined, real = ([read_image(f) for f in episode[key][:MOST_FRAMES]] for key in ("imagined", "real"))
    distances = [f"distance {distance:.1f}" for distance in episode["distances"][:MOST_FRAMES]]
    return [
        Strip("imagined", success, steps, shown, imagined, goal, distances),
        Strip("real", success, steps, shown, real, goal),
    ]
