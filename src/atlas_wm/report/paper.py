"""Numbers from the paper, quoted in captions and never mixed with measured ones."""

# Success in percent at goal offset 50, mean over five evaluation seeds.
ID_OOD: dict[str, dict[str, tuple[float, float]]] = {
    "pusht": {
        "atlas": (54.0, 47.6),
        "lewm": (48.2, 42.0),
        "dino-wm": (51.0, 34.4),
        "fast-wm": (40.4, 34.6),
        "pldm": (28.8, 24.2),
    },
    "tworoom": {
        "atlas": (87.0, 61.0),
        "lewm": (74.8, 41.2),
        "dino-wm": (97.8, 98.2),
        "fast-wm": (77.0, 47.2),
        "pldm": (85.6, 72.4),
    },
    "cube": {
        "atlas": (58.4, 43.0),
        "lewm": (55.8, 40.4),
        "dino-wm": (59.4, 41.6),
        "fast-wm": (61.6, 43.6),
        "pldm": (53.8, 36.2),
    },
}
ABLATION = {
    "pusht": {"lewm": 45.1, "lewm+ood": 50.3, "wemreg": 47.0, "atlas": 50.8},
    "tworoom": {"lewm": 58.0, "lewm+ood": 71.8, "wemreg": 73.9, "atlas": 74.0},
    "cube": {"lewm": 48.1, "lewm+ood": 50.5, "wemreg": 46.9, "atlas": 50.7},
}
# AUROC of the planning latent and of the true state.
PROBE: dict[str, dict[str, tuple[float, float]]] = {
    "pusht": {"lewm": (0.44, 0.88), "atlas": (0.75, 0.82)},
    "tworoom": {"lewm": (0.55, 0.69), "atlas": (0.64, 0.59)},
    "cube": {"lewm": (0.49, 0.76), "atlas": (0.69, 0.70)},
}
