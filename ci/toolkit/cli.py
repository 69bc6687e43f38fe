"""``python -m ci toolkit``: install, verify and lock the build roots (docs/factory/toolkits.md)."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from dataclasses import asdict

from ci import console, matrix
from ci.errors import CheckFailed

from . import manifest, roots


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="toolkit_command", required=True, metavar="COMMAND", title="commands")
    functions = (_install, _verify, _lock, _path, _list)
    install, verify, lock, path, listing = (console.add_command(commands, run.__name__[1:], run.__doc__, run) for run in functions)
    for each in (install, verify, lock):
        each.add_argument("roots", nargs="*", metavar="ROOT", help=", ".join(roots.declared()))
    path.add_argument("root", metavar="ROOT", help=", ".join(roots.declared()))
    lock.add_argument("--check", action="store_true", help="write nothing; fail if a lock would change")
    for each in (install, verify):
        each.add_argument(
            "--cuda", action="append", choices=list(matrix.load().cuda), help="roots of this CUDA version, and device (repeatable)"
        )
    for each in (install, verify, path, listing):
        console.add_platform(each)
    for each in (install, verify, listing):
        console.add_json(each)


def _chosen(args: argparse.Namespace) -> dict[str, matrix.Platform]:
    platform = matrix.platform(args.platform)
    named = {roots.find(name).name: platform for name in args.roots}
    return roots.needed(args.cuda or matrix.load().cuda, platform) | named if args.cuda or not named else named


def _install(args: argparse.Namespace) -> int:
    """Install roots; complete roots are not changed."""
    from . import provision

    done = [provision.install(name, platform) for name, platform in _chosen(args).items()]
    if args.json:
        print(json.dumps([{**asdict(one), "path": str(one.path)} for one in done], indent=2))
    else:
        for one in done:
            how = "cached" if one.cached else f"{one.wheel_bytes / 1e6:.0f} MB of wheels"
            print(f"{one.root:15} {one.seconds:6.1f} s  {how:18} {one.path}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Recheck the SHA-256 of every file of installed roots."""
    chosen = _chosen(args)
    found = {}
    for name, platform in chosen.items():
        path, files = roots.installed(name, platform)
        found[name] = manifest.differences(path, files)
        if not args.json:
            print("\n".join(f"{name}: {line}" for line in found[name]) or f"{name}: {len(files)} files as installed")
    if args.json:
        print(json.dumps(found, indent=2))
    if damaged := [name for name, lines in found.items() if lines]:
        where = ", ".join(str(roots.directory(name, chosen[name])) for name in damaged)
        fix = f"remove {where} and install again, which downloads the damaged files of uv's cache again"
        raise CheckFailed(f"not as installed: {', '.join(damaged)}\n  fix: {fix}")
    return 0


def _lock(args: argparse.Namespace) -> int:
    """Resolve ci/toolkit/locks/toolkits.toml, and write the locks."""
    from . import lock

    differs = False
    for name in args.roots or roots.declared():
        root = roots.find(name)
        old = root.lock_file.read_text("utf-8") if root.lock_file.is_file() else ""
        new = lock.resolve(root)
        if args.check:
            difference = difflib.unified_diff(old.splitlines(), new.splitlines(), str(root.lock_file), "as resolved now", lineterm="")
            sys.stdout.writelines(f"{line}\n" for line in difference)
        elif new != old:
            root.lock_file.write_text(new, "utf-8", newline="\n")
        differs |= new != old
        print(f"{name}: {'unchanged' if new == old else 'differs' if args.check else 'written'}")
    if differs and args.check:
        raise CheckFailed("a lock differs from toolkits.toml\n  fix: python -m ci toolkit lock")
    return 0


def _path(args: argparse.Namespace) -> int:
    """Print the directory of an installed root."""
    print(roots.root_path(args.root, matrix.platform(args.platform)))
    return 0


def _list(args: argparse.Namespace) -> int:
    """List the roots, and which of them are installed."""
    platform = matrix.platform(args.platform)
    rows = []
    for name, root in roots.declared().items():
        path = roots.directory(name, platform)
        rows.append({"root": name, "about": root.about, "installed": manifest.read(path) is not None, "path": str(path)})
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['root']:15} {'installed' if row['installed'] else '-':10} {row['path']}\n{'':15} {row['about']}")
    return 0
