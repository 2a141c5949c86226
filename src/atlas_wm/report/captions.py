"""Captions: what each figure shows, how to read it, and what the paper found."""

from collections.abc import Iterable
from dataclasses import dataclass

from atlas_wm.report import paper
from atlas_wm.report.naming import method_name


@dataclass(frozen=True)
class Caption:
    shows: str
    read: str
    paper: str = ""  # empty: the paper has no such figure


SEVERAL = (
    "With several runs, the bar is their mean and the line its 95 % interval for other training seeds, too: wide, "
    "because seeds are few."
)
STATE = Caption(
    "How much of the environment's state each representation of the frozen model holds. A small MLP learns to read "
    "a coordinate from the representation of training episodes. The bar is its R² on held-out episodes: the share "
    "of the coordinate's variance that it explains. The table adds a linear probe, and the error in the "
    "coordinate's unit.",
    "Longer is better. At 1 the coordinate can be read exactly, at 0 or below not at all; no bar is drawn below 0. "
    "The planner cannot see a coordinate that z does not hold. If mean patch or CLS hold it and z does not, the "
    "projection to z loses it. " + SEVERAL,
)
WAYS = Caption(
    "Success of the same models on the same episodes, for every way to plan that was evaluated: another cost, "
    "another start of the search, more frequent replanning.",
    "Longer is better. Lines are 95 % intervals over demonstrations. "
    + SEVERAL
    + " Plans share episodes, so compare them "
    "in the table, which pairs episodes.",
)
DIFFERENCES = Caption(
    "How many points of success one method has more than another, on the same episodes; and a tuned recipe more "
    "than the same one untuned. Runs with the same training seed are compared, episode by episode.",
    "Right of 0, the first of the two is better. The line is a 95 % interval: if it includes 0, chance may explain "
    "the difference. With several training seeds it is for other training seeds and other demonstrations, with one "
    "for these two runs on other demonstrations.",
)
MARGINAL = Caption(
    "The model encodes frames that random actions lead to; no demonstration contains them. Four statistics "
    "compare their latents with the standard Gaussian that training aims for: the norm of the mean (0 for a "
    "Gaussian), the distance of the covariance from the identity, the median Cramér–von Mises statistic over "
    "one-dimensional projections, and the same after whitening, which only measures the shape.",
    "Shorter is better. The dashed line is the value of a true Gaussian sample of the same size. " + SEVERAL,
    "Methods with WEMReg improve several of the four statistics, most clearly covariance and projections on "
    "TwoRoom, but not every statistic on every task.",
)
GEOMETRY = Caption(
    "Each point is a state of the dataset. Its position is the first two principal components of its planning "
    "latent. Its colour is the novelty of the true state, which does not depend on the model: blue is familiar, "
    "orange is unusual.",
    "If the latent preserves the relations between states, orange points lie apart from blue ones. Two "
    "components show only part of the latent. For numbers, use the rank correlation in the table and the failure "
    "probe.",
    "On PushT, ATLAS separates unusual states where LeWM mixes them. On TwoRoom and Cube the effect is weaker.",
)
ROLLOUT = Caption(
    "All models start from the same states and follow the same action sequences. The curve is the distance "
    "between the predicted latent and the latent of the frame that really follows, divided by ℓ, the model's "
    "typical distance between states. Lines are medians over start states (of the median over sequences), bands "
    "are 95 % bootstrap intervals; with several runs, of their mean and for other training seeds, too. One model "
    "step is several environment steps (the frameskip; 5 in the paper).",
    "Lower is better. At 1, the prediction is as far from the truth as a typical other state. The right end "
    "matters most: there the planner compares plans with the goal.",
    "ATLAS is below LeWM at every horizon on PushT and TwoRoom, and the gap tends to grow with the horizon.",
)
RELATIONAL = Caption(
    "For each start state, all candidate plans are executed in the environment. For each pair of final states, "
    "and for each final state and the goal, we compare the distance in the planning latent with the distance in "
    "the encoder's mean patch features. Both are standardised and divided by the mean distance in a bank of "
    "training frames. Bars show the root mean square, the 95th percentile and the maximum of the difference: "
    "medians over start states, with 95 % bootstrap intervals. " + SEVERAL,
    "Shorter is better. At 0, the latent has exactly the distances of the patch features. The maximum, the worst "
    "pair, enters the planning bound in the next section.",
    "OOD-recovery trains for low distortion and lowers it. A Gaussian regulariser alone does not train for it.",
)
REGRET = Caption(
    "Each point is one start state. Among the same candidate plans, the model chooses the one whose predicted "
    "end is nearest to the goal. Regret is how much farther from the goal the chosen plan really ends than the "
    "best plan, measured in the encoder's patch features. The bound, 2·ε_plan, is the largest regret that the "
    "theory allows.",
    "All points must lie on or above the dashed line. A point below it would mean an error in the code or the "
    "theory. Points far above it mean that the bound is loose. Points at the left edge have no regret: the model "
    "chose the best plan.",
    "The bound holds and is conservative. No start state had a margin wide enough to guarantee the choice, so "
    "the paper reads the bound as structural, not as a prediction of success.",
)
DECOMPOSITION = Caption(
    "The mean of ε_plan, which is half the bound, as the sum of three terms: prediction (the largest error of a "
    "predicted final latent), relations (the largest distortion of a distance) and scale (latent dimensions "
    "whose standard deviation is not one).",
    "Shorter is better. The longest part shows where the model can improve most.",
    "The paper reads it as a structural decomposition, not as a prediction of planning success.",
)
VARIATIONS = Caption(
    "The same episodes in changed environments, goal images included; plain is the environment of training. The "
    "image is the first frame of one episode. Coloured bars: episodes that reached the goal. Grey bars: plans with "
    "a novelty above the 99th percentile.",
    "A variation with a short coloured bar and a long grey one fails, and its plans say so. Two short bars are the "
    "dangerous case: failures without a warning. Two long bars: the plans work in a scene that was never tested. "
    "Lines are 95 % intervals, of success over demonstrations and of flagged plans over plans. " + SEVERAL,
)
CASES = Caption(
    "Each row shows one method on the same start and goal: frames from the environment, with the step above "
    "each, and the goal image at the right.",
    "The text at the left and the border of the goal image show the outcome: green if the goal was reached, red "
    "if not. Episodes on which the methods differ are shown first, so these are examples, not a random sample.",
    "In the TwoRoom episode that the paper shows, ATLAS goes through the door while LeWM stays behind the wall.",
)
IMAGINED = Caption(
    "What the model expects after each action chunk that it executes, above what the environment then shows. The "
    "model has no decoder: the upper row shows the training frame whose latent is nearest to the imagined one. The "
    "number above it is their distance, where 1 is the distance at which training frames have their nearest "
    "neighbour.",
    "The model is right where both rows show the same. Where the distance is large, the imagined latent is like no "
    "training frame, and the image says little. The longest failures and the longest successes are shown, so these "
    "are examples, not a random sample. Every plan starts from the real frame again.",
)
TUNING = Caption(
    "Every method was tried with the same factors of its recipe's weight: of WEMReg, of SIGReg, or of all terms of "
    "PLDM. A try is a run on a dataset that no other run trains on and no evaluation sees. Its planning score is "
    "that of its last validation, on episodes that it did not train on. The ring marks the best one: tuned runs "
    "have its weight.",
    "Higher is better. Lines that are flat near the ring mean that the weight hardly matters; a ring at the edge "
    "means that more tries in that direction may help. Each try is one training seed, so small differences may be "
    "chance.",
    "The paper has one weight for all tasks.",
)
SCORE = Caption(
    "Each point is a run: the planning score of its last validation, for which no environment is needed, and its "
    "success. Spearman's rank correlation is given from five runs on.",
    "If points rise to the right, the score can choose between runs. The score of a run whose split is by clips is "
    "measured on episodes that it also trained on: compare runs with the same split.",
)
TRAINING = Caption(
    "Loss terms without their weights, on a logarithmic scale. Lines are training batches, dots are held-out "
    "clips. There is one line per run; a method appears only if its objective has the term. The planning score "
    "asks, on held-out episodes, whether the recorded actions end nearer to the goal than others do.",
    "A finished run falls and then levels off. Dots that rise above the line mean overfitting. Do not compare "
    "the prediction error of different objectives directly: their latents may have different scales. The planning "
    "score can be compared: higher is better, and 0.5 is chance.",
    "The paper shows no training curves. Its weights are 3 for WEMReg and 0.1 for OOD-recovery.",
)


_JOINED = (
    "At each side it is the root of two squared distances: of the t interval over training seeds (n − 1 degrees of "
    "freedom) and of a bootstrap over demonstrations."
)
INTERVAL = (
    "Brackets: 95 % interval of the mean over n runs, for other training seeds and other demonstrations. " + _JOINED
)
DEVIATION = (
    "±: standard deviation over the evaluation seeds of one run, divided by their number as in the paper; it says "
    "nothing about other training seeds."
)
DIFFERENCES_NOTE = (
    "Brackets: 95 % interval, with several training seeds for others and for other demonstrations. "
    + _JOINED
    + " With one training seed it is of the bootstrap alone, as “these runs alone” is. Won: episodes that only the "
    "first solves; lost: that only the second does. By training seed: from the lowest to the highest."
)


def spreads(rates: Iterable[tuple[float | None, ...]]) -> str:
    """What the brackets and the ± behind these means are: (mean, low, high, standard deviation)."""
    found = list(rates)
    intervals, deviations = any(rate[1] is not None for rate in found), any(rate[3] is not None for rate in found)
    return " ".join([INTERVAL] * intervals + [DEVIATION] * deviations)


def success(task_names: dict[str, str]) -> Caption:
    """With the paper's numbers for these tasks."""
    return Caption(
        "Percentage of episodes in which the planner reached the goal within the step budget. Start and goal are "
        "two frames of one demonstration, “offset” steps apart. The episodes are split at the median novelty of "
        "their demonstration, computed from true states without any model. The ID half (solid bars) stays close "
        "to the training data, the OOD half (hatched bars) goes where training data are sparse.",
        "Longer is better. The line on a bar is the 95 % interval for other training seeds and demonstrations, or "
        "with one training seed ± the standard deviation over evaluation seeds. Grey bars need no model: random "
        "actions are the floor, replaying the demonstration's actions is the ceiling. Compare methods within a "
        "half: one half may be harder for another reason than novelty, such as more goals behind a wall.",
        "ATLAS beats LeWM on both halves of all three tasks, by most on the OOD half of TwoRoom. DINO-WM, whose "
        "encoder was pretrained on other images, is best on TwoRoom."
        + _quoted("ID / OOD success in % at offset 50", paper.ID_OOD, task_names, "{:.1f} / {:.1f}"),
    )


def probe(task_names: dict[str, str]) -> Caption:
    return Caption(
        "Each episode of the first evaluation seed gets a novelty score: the mean distance of its last three "
        "frames to their nearest neighbours in a bank of training frames. The score is computed in several "
        "representations of the frozen model, from shallow to deep, and in the true state. The bar is the AUROC: "
        "the probability that a failed episode has a higher score than a successful one. The planner is unchanged.",
        "The grey bar and the dashed line (oracle) show how well the novelty of the true state predicts failure. "
        "The planning latent z should agree with the oracle; a longer bar is not always better. If z is far "
        "below the oracle, the model does not notice unfamiliar states. 0.5 is chance. Lines on bars are 95 % "
        "bootstrap intervals. " + SEVERAL,
        "In LeWM, patch features and CLS carry the signal, but z loses it. In ATLAS, z keeps it."
        + _quoted("AUROC of z / oracle", paper.PROBE, task_names, "{:.2f} / {:.2f}"),
    )


def ablation(task: str) -> str:
    known = paper.ABLATION.get(task)
    return (
        "Over all episodes, in the conditions that most of the four methods have; the highest is bold. "
        "Compare the rows for the effect of WEMReg and the columns for that of OOD-recovery. In the paper, "
        "the full objective has the highest mean on all three tasks, but is only slightly better than the better "
        "single term."
        + (
            f" The paper's success in % at offset 50, without / with OOD-recovery: SIGReg {known['lewm']:.1f} / "
            f"{known['lewm+ood']:.1f}, WEMReg {known['wemreg']:.1f} / {known['atlas']:.1f}."
            if known
            else ""
        )
    )


def _quoted(
    what: str, numbers: dict[str, dict[str, tuple[float, float]]], task_names: dict[str, str], form: str
) -> str:
    tasks = [
        f"{name}: "
        + ", ".join(f"{method_name(method)} {form.format(*pair)}" for method, pair in numbers[task].items())
        for task, name in task_names.items()
        if task in numbers
    ]
    return f" {what}, on the paper's own data: {'; '.join(tasks)}." if tasks else ""
