"""What the figures show, how to read them, and what the paper found: words only."""

from dataclasses import dataclass

from atlas_wm.report import paper
from atlas_wm.report.naming import NAMES


@dataclass(frozen=True)
class Caption:
    shows: str
    read: str
    paper: str


MARGINAL = Caption(
    "Frames of uniformly random actions, which no demonstration shows, are encoded and their latents "
    "compared with the standard Gaussian that training asks for: the length of their mean (should be 0), "
    "the distance of their covariance from the identity, the median Cramér–von Mises discrepancy of "
    "one-dimensional projections, and the same after whitening, which leaves only the shape.",
    "Shorter is better. The dashed line is what a true Gaussian sample of that size gives. The line on a "
    "bar spans the runs where there are several.",
    "Arms with WEMReg improve several of the four, covariance and projections on TwoRoom most clearly; not "
    "every statistic of every task.",
)
GEOMETRY = Caption(
    "Each point is a state of the dataset, placed by the first two principal components of its planning "
    "latent and coloured by how unusual the true state is, which no model has a say in: blue is usual, "
    "orange unusual.",
    "If the latent keeps relations between states, orange lies apart from blue. Two components are a shadow"
    " of many: look here for an impression, at the rank correlation and at the failure probe for numbers.",
    "On PushT ATLAS puts unusual states apart where LeWM mixes them; on TwoRoom and Cube the effect is weaker.",
)
ROLLOUT = Caption(
    "From the same starts and along the same action sequences, the distance between the latent a model "
    "imagines and the latent of the frame that really follows, over ℓ, the model's own typical distance "
    "between states. Lines are medians over starts (of the median over sequences), bands 95 % bootstrap "
    "intervals; of several runs the line is their mean and the band spans them. One model step is several "
    "environment steps (the frameskip, five in the paper).",
    "Lower is better. 1 would mean that the imagined state is as far off as any other state. What counts "
    "for planning is the right end, where plans are judged.",
    "ATLAS is below LeWM at every horizon on PushT and TwoRoom, and the gap tends to grow with the horizon.",
)
RELATIONAL = Caption(
    "Among the ends that the candidate plans of one start really have, and its goal: the difference between"
    " each pair's distance in the planning latent and in the encoder's mean patch features, both "
    "standardised and over their mean distance in a bank of training frames; summed up as root mean square,"
    " 95th percentile and maximum. Bars are medians over starts, lines 95 % bootstrap intervals (of several"
    " runs, their span).",
    "Shorter is better: at 0 the latent has exactly the distances of the patch features. The maximum is the"
    " worst pair; it is the one that enters the bound below.",
    "OOD-recovery, which asks for exactly this, lowers the distortion; a Gaussian marginal alone does not "
    "ask for it.",
)
REGRET = Caption(
    "Each point is one start. Among the same candidate plans the model picks the one it thinks ends nearest"
    " to the goal; its regret is how much farther from the goal, by the encoder's patch features, that plan"
    " really ends than the best one. The bound, 2·ε_plan, is what the theory promises at most.",
    "Every point must lie on or above the dashed line of equality; one below it would refute the code or "
    "the theory. Points far above say that the bound is cautious. Points at the left had no regret: the "
    "best plan was chosen.",
    "The bound holds and is conservative; no start had a margin wide enough for a guaranteed choice, so the"
    " paper takes it as structure and not as a forecast of success.",
)
DECOMPOSITION = Caption(
    "The mean of ε_plan, half the bound, as the sum of its three terms: prediction (the worst error of an "
    "imagined end), relations (the worst distortion of a distance) and scale (latent coordinates whose "
    "spread is not one).",
    "Shorter is better. The longest part is where a model has most to gain.",
    "The paper reads it as a structural decomposition, not as a predictor of planning success.",
)
CASES = Caption(
    "The same start and the same goal for each method, one above the other: frames of the real environment "
    "at the steps written above them, the goal image at the right.",
    "The words beside a strip and the frame around its goal say how it ended: green, reached; red, not "
    "reached. Episodes on which the methods differ are chosen first: these are illustrations, not a sample.",
    "In its selected TwoRoom episode ATLAS goes through the door while LeWM stays behind the wall.",
)
TRAINING = Caption(
    "The loss terms, unweighted, on a logarithmic scale: lines are training, dots are held-out clips. A "
    "line for each run; a method appears only where its objective has the term.",
    "Falling and then flat is a finished run; dots that leave the line upwards are overfitting. Different "
    "objectives are different games: prediction error may be compared only with the scale of the latents in"
    " mind.",
    "The paper shows no curves; its objective weights are 3 for WEMReg and 0.1 for OOD-recovery.",
)


def success(task_names: dict[str, str]) -> Caption:
    """With the paper's numbers for these tasks."""
    return Caption(
        "Share of episodes in which the planner brought the real environment to the goal within the budget. The "
        "start and the goal are two moments of one demonstration, “offset” steps apart. Episodes are split at the "
        "median novelty of their demonstration, measured on true states without any model: the ID half (full bars) "
        "stays near what training saw, the OOD half (hatched) goes where data are thin.",
        "Longer is better. The line on a bar is ± one standard deviation. Grey is what the same "
        "episodes give without a model: the floor, uniformly random actions, and the ceiling, the actions of the "
        "demonstration, replayed. A method that keeps its OOD bar close to its ID bar is robust to novelty.",
        "ATLAS is ahead of LeWM on both halves of all three tasks, most of all on TwoRoom's OOD half; DINO-WM, "
        "whose encoder was trained on outside images, leads on TwoRoom."
        + _quoted("ID / OOD success in % at offset 50", paper.ID_OOD, task_names, "{:.1f} / {:.1f}"),
    )


def probe(task_names: dict[str, str]) -> Caption:
    return Caption(
        "Each evaluated episode gets a novelty score: how far its last three frames lie from a bank of training "
        "frames (mean distance to the nearest neighbours), measured in one representation of the frozen model at a "
        "time, from shallow to deep, and once on the true state. The bar is the AUROC: the chance that a failed "
        "episode scores higher than one that succeeded. The planner is not touched.",
        "The oracle (grey, dashed line) says how much the failures really have to do with novelty. The aim is not "
        "the longest bar: z, the latent that plans, should agree with the oracle. A z far below it does not notice "
        "that it is lost; 0.5 is chance. Lines on bars are 95 % bootstrap intervals; of several runs, their span.",
        "LeWM's signal is there in patches and CLS and washed out in z; with ATLAS z keeps it."
        + _quoted("AUROC of z / oracle", paper.PROBE, task_names, "{:.2f} / {:.2f}"),
    )


def ablation(task: str) -> str:
    known = paper.ABLATION.get(task)
    return (
        "Success over all episodes; ± is one standard deviation over runs, or over evaluation seeds where there is "
        "one run. Read down a column for the effect of WEMReg, along a row for that of OOD-recovery. In the "
        "paper the full objective has the highest mean on all three tasks, by little over the better single "
        "term: the gains overlap."
        + (
            f" The paper's cells at offset 50, in the same order: {known['lewm']:.1f} and {known['lewm+ood']:.1f}; "
            f"{known['wemreg']:.1f} and {known['atlas']:.1f} %."
            if known
            else ""
        )
    )


def _quoted(
    what: str, numbers: dict[str, dict[str, tuple[float, float]]], task_names: dict[str, str], form: str
) -> str:
    tasks = [
        f"{name}: " + ", ".join(f"{NAMES[method]} {form.format(*pair)}" for method, pair in numbers[task].items())
        for task, name in task_names.items()
        if task in numbers
    ]
    return f" {what}, on its own data and training: {'; '.join(tasks)}." if tasks else ""
