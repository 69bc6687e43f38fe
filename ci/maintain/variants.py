"""``python -m ci variants``: experimental: make variant wheels (draft PEPs 825 and 850) from finished wheels.

Makes one variant for each CUDA version, with the requirements of its extra, and the null variant, with those of [cpu]. An installer that
implements the drafts chooses by the driver. Nearly all files are byte-identical to the wheel's: docs/factory/variants.md names the others.
No release has variants.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from ..errors import CheckFailed, EnvironmentProblem
from ..files import whole
from ..matrix import load
from ..repair.sbom.archive import insert, source_date_epoch
from ..wheelfile.wheel import Wheel, read

SCHEMA = "https://variants-schema.wheelnext.dev/peps/850/v0.2.0.json"
NAMESPACE = "nvidia"
PROVIDER = {"requires": ["nvidia-variant-provider>=0.0.1,<1"], "plugin-api": "nvidia_variant_provider.plugin:NvidiaVariantPlugin"}
NULL = "null"  # the drafts' name of the variant that fits everywhere
EXTRAS = {**{cuda.extra: cuda.extra for cuda in load().cuda.values()}, NULL: load().cpu.extra}  # by the label of the variant


def description(labels: Iterable[str]) -> bytes:
    """Which drivers these variants are for: in a wheel of its own alone, beside the wheels of all."""
    least = {cuda.extra: cuda.driver_cuda for cuda in load().cuda.values()}
    content = {
        "$schema": SCHEMA,
        "default-priorities": {"namespace": [NAMESPACE]},
        "providers": {NAMESPACE: PROVIDER},
        "variants": {label: {NAMESPACE: {"cuda_version_lower_bound": [least[label]]}} if label in least else {} for label in labels},
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def requiring(metadata: bytes, extra: str) -> bytes:
    """METADATA whose requirements of an extra are unconditional; the extras stay."""
    head, blank, text = metadata.partition(b"\n\n")
    head, count = re.subn(rb"(?m)^(Requires-Dist: [^;\n]+?) *; extra == ['\"]%s['\"]$" % extra.encode(), rb"\1", head)
    if not count:
        raise CheckFailed(f"METADATA has no requirement of the extra {extra}\n  fix: give wheels that `python -m ci repair` finished")
    return head + blank + text


def changes(wheel: Wheel) -> dict[str, dict[str, bytes]]:
    """By label, the members of its .dist-info that a variant has of its own."""
    metadata = wheel.information("METADATA").encode()
    return {label: {"METADATA": requiring(metadata, extra), "variant.json": description([label])} for label, extra in EXTRAS.items()}


def write(wheel: Wheel, members: dict[str, bytes], target: Path) -> None:
    """The wheel under another name, with other members in its .dist-info."""
    epoch = int(source_date_epoch(wheel.path))
    with whole(target) as part:
        shutil.copyfile(wheel.path, part)
        for name, data in members.items():
            insert(part, f"{wheel.dist_info}/{name}", data, dist_info=wheel.dist_info, epoch=epoch)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheels", metavar="WHEEL", nargs="+", type=Path, help="finished wheels of one version")
    parser.add_argument("-o", "--output", metavar="FOLDER", type=Path, required=True, help="output directory")


def run(args: argparse.Namespace) -> int:
    if empty := [extra.extra for extra in load().extras if not extra.requires]:
        problem = f"the extra [{empty[0]}] of ci/matrix/matrix.toml requires nothing, so a variant for it would be the wheel itself"
        raise EnvironmentProblem(problem, fix="variants are for projects whose extras all require packages")
    wheels = [read(path) for path in args.wheels]
    versions = {wheel.dist_info.removesuffix(".dist-info") for wheel in wheels}
    if len(versions) > 1:
        raise EnvironmentProblem(f"these are wheels of {', '.join(sorted(versions))}", fix="give the wheels of one version")
    planned = [(wheel, label, members) for wheel in wheels for label, members in changes(wheel).items()]
    for wheel, label, members in planned:
        target = args.output / f"{wheel.path.stem}-{label}.whl"
        write(wheel, members, target)
        print(target)
    index = args.output / f"{versions.pop()}-variants.json"
    with whole(index) as part:
        part.write_bytes(description(EXTRAS))
    print(index)
    return 0
