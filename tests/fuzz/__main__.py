"""Fuzz every reader of others' files for long: ``python tests/fuzz --cases 2000 [--pages 40] [--seed 0]``.

A finding is anything but success or one UserError: another exception, more than 5 seconds, or more than 2 GiB. With
``--atheris SECONDS`` the readers of JSON are also fuzzed guided by coverage, where atheris is installed.
"""

import argparse
import os
import random
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "report"), str(HERE.parent)]
warnings.simplefilter("ignore")
SECONDS, MEMORY = 5.0, 2 << 30


def fuzz(folder: Path, name: str, cases: int, seed: int, seconds: float) -> Counter[str]:
    from targets import SLOW, TARGETS, attempt

    target = (TARGETS | SLOW)[name]
    valid, counts = (folder / target.file).read_bytes(), Counter[str]()
    assert attempt(folder, target, valid) is None
    slowest = 0.0
    for number in range(cases):
        content = target.mutate(valid, random.Random(f"{seed} {name} {number}"))
        started = time.process_time()  # the machine may be busy with something else
        try:
            counts["accepted" if attempt(folder, target, content) is None else "refused"] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            counts["findings"] += 1
            kind = f"{type(error).__name__}: {str(error)[:150]}"
            if counts[kind] == 0:
                print(f"--- {name}, case {number}\n{traceback.format_exc()[-1500:]}", flush=True)
            counts[kind] += 1
        took = time.process_time() - started
        slowest = max(slowest, took)
        if took > seconds:
            counts["findings"] += 1
            print(f"--- {name}, case {number}: {took:.1f} s", flush=True)
    print(f"{name:18} {cases:6} cases: {counts['accepted']} accepted, {counts['refused']} refused, "
          f"{counts['findings']} findings, slowest {slowest:.2f} s", flush=True)  # fmt: skip
    return counts


def guided(folder: Path, seconds: int) -> None:
    """Coverage-guided, bytes into the readers of JSON."""
    import atheris

    from atlas_wm.errors import UserError
    from atlas_wm.runs.folder import read_run

    corpus = folder / "corpus"
    corpus.mkdir()
    (corpus / "config").write_bytes(b"\0" + (folder / "run/config.json").read_bytes())
    (corpus / "normalizer").write_bytes(b"\1" + (folder / "run/normalizer.json").read_bytes())
    files = [folder / "run/config.json", folder / "run/normalizer.json"]
    valid = [file.read_bytes() for file in files]

    def one(data: bytes) -> None:
        which = data[0] % 2 if data else 0
        files[which].write_bytes(data[1:])
        try:
            read_run(folder / "run")
        except UserError:
            pass
        finally:
            files[which].write_bytes(valid[which])

    atheris.Setup([sys.argv[0], str(corpus), f"-max_total_time={seconds}", "-max_len=8192", "-timeout=5"], one)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="for each target")
    parser.add_argument("--pages", type=int, default=20, help="for each target that draws")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets whose name contains this")
    parser.add_argument("--atheris", type=int, default=0, metavar="SECONDS")
    given = parser.parse_args()
    with TemporaryDirectory() as place:
        folder = Path(place)
        if given.atheris:  # before anything else imports them
            import atheris

            with atheris.instrument_imports(
                include=["atlas_wm.config", "atlas_wm.normalizer", "atlas_wm.runs.folder"]
            ):
                import atlas_wm.runs.folder  # noqa: F401
        from targets import SLOW, TARGETS, make_valid

        make_valid(folder)
        os.chdir(folder)
        if given.atheris:
            guided(folder, given.atheris)
            return
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, resource.RLIM_INFINITY))
        found = 0
        for names, cases, seconds in ((TARGETS, given.cases, SECONDS), (SLOW, given.pages, 120.0)):
            for name in names:
                if given.only in name:
                    found += fuzz(folder, name, cases, given.seed, seconds)["findings"]
        assert "evil" not in sys.modules
    sys.exit(f"{found} findings" if found else 0)


if __name__ == "__main__":
    main()
