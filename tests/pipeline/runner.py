"""Runs a workflow's jobs one after another, as GitHub would: conditions, matrices, outputs, called workflows, each step in a shell.

What differs from GitHub: one machine, jobs in order, and stand-ins for the actions (:mod:`.standins`). A step that cannot run here is
left out only where the caller says so, with its reason, and is then in the report.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from . import expressions

Action = Callable[["Job", dict[str, Any]], None]
# Of the caller's own environment, what a job has too: where packages come from here, and how containers start.
PASSED = ("PIP_", "UV_", "SSL_", "REQUESTS_CA", "CIBW_", "CONTAINERS_", "STANDIN_", "LANG", "XDG_RUNTIME")


@dataclass
class Machine:
    """This machine as GitHub: the repository, what is stored between jobs, and what the stand-ins recorded."""

    repository: Path  # a clone with the commit and its tag
    folder: Path
    actions: Mapping[str, Action]
    variables: Mapping[str, str] = field(default_factory=dict)  # the repository's
    environment: Mapping[str, str] = field(default_factory=dict)  # of every step, such as where the index is
    instead: Callable[[str, str], str | None] = lambda _job, line: line  # another line for a step's, None leaves it out
    report: list[dict[str, Any]] = field(default_factory=list)
    earlier: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # what an earlier run said of its jobs, by their names

    def run(self, workflow: str, event: str, *, ref: str, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Run a workflow for an event; returns the results and outputs of its jobs by their names."""
        kind, _, name = ref.removeprefix("refs/").partition("/")
        command = ["git", "-C", str(self.repository), "rev-parse", "--verify", f"{ref}^{{commit}}"]
        sha = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        github = {
            "event_name": event, "event": {}, "ref": ref, "ref_name": name, "ref_type": {"tags": "tag"}.get(kind, "branch"),
            "repository": "OWNER/mlx-cuda", "run_id": "7", "run_number": "7", "sha": sha, "token": "a-token", "workflow": workflow,
        }  # fmt: skip
        return Run(self, workflow, github, dict(inputs or {}), f"{workflow} / ").jobs()


@dataclass
class Run:
    """One run of one workflow, called or started."""

    machine: Machine
    workflow: str
    github: dict[str, Any]
    inputs: dict[str, Any]
    place: str  # the names of the first workflow and of the calling jobs
    called: bool = False

    def jobs(self) -> dict[str, Any]:
        table = yaml.safe_load((self.machine.repository / ".github" / "workflows" / f"{self.workflow}.yml").read_text("utf-8"))
        triggers = table[True]  # YAML 1.1 reads the key `on` so
        declared = (
            (triggers.get("workflow_call" if self.called else "workflow_dispatch") or {}) if isinstance(triggers, dict) else {}
        ).get("inputs", {})
        self.inputs = {name: each.get("default", "") for name, each in declared.items()} | self.inputs
        done: dict[str, Any] = {}
        waiting = dict(table["jobs"])
        while waiting:
            name = next(name for name, job in waiting.items() if set(_list(job.get("needs"))) <= done.keys())
            done[name] = self._job(name, waiting.pop(name), done)
        outputs = ((triggers.get("workflow_call") or {}) if isinstance(triggers, dict) else {}).get("outputs", {})
        contexts = {"jobs": done}
        self.outputs = {name: expressions.fill(each["value"], contexts, {}) for name, each in outputs.items()}
        return done

    def _job(self, name: str, table: dict[str, Any], done: dict[str, Any]) -> dict[str, Any]:
        needs = {each: done[each] for each in _list(table.get("needs"))}
        contexts = {"github": self.github, "inputs": self.inputs, "vars": dict(self.machine.variables), "needs": needs}
        functions = {
            "success": lambda: all(each["result"] == "success" for each in needs.values()),
            "failure": lambda: any(each["result"] == "failure" for each in needs.values()),
            "cancelled": lambda: False,
        }
        if not _holds(table.get("if"), contexts, functions):
            return {"result": "skipped", "outputs": {}}
        results = []
        for number, combination in enumerate(_combinations(table, contexts)):
            contexts["matrix"] = combination
            title = f"{self.place}{expressions.fill(table.get('name', name), contexts, {})}"
            if "uses" in table:
                inputs = expressions.fill(table.get("with", {}), contexts, {})
                run = Run(self.machine, Path(table["uses"]).stem, self.github, inputs, f"{title} / ", called=True)
                jobs = run.jobs()
                failed = any(each["result"] == "failure" for each in jobs.values())
                results.append({"result": "failure" if failed else "success", "outputs": run.outputs})
            else:
                before = self.machine.earlier.get(title, {"failed": True})
                if not (before["failed"] or "outputs" in table):  # "Re-run failed jobs": the others stay as they were
                    self.machine.report.append(before)
                    results.append({"result": "success", "outputs": {}})
                    continue
                job = Job(self.machine, f"{self.workflow}/{name}", title, table, contexts, f"{len(self.machine.report)}-{name}-{number}")
                results.append(job.run())
        failed = any(each["result"] == "failure" for each in results)
        return {"result": "failure" if failed else "success", "outputs": results[-1]["outputs"]}


@dataclass
class Job:
    machine: Machine
    key: str  # workflow/job
    title: str
    table: dict[str, Any]
    contexts: dict[str, Any]
    identity: str

    def run(self) -> dict[str, Any]:
        base = self.machine.folder / "jobs" / self.identity
        self.workspace, self.temporary = base / "work", base / "temp"
        for folder in (self.workspace, self.temporary):
            folder.mkdir(parents=True)
        self.path: list[str] = []  # what actions put before PATH
        self.environment: dict[str, str] = {}  # what they set for the steps after them
        self.contexts |= {"runner": {"temp": str(self.temporary), "os": "Linux"}, "steps": {}}
        self.log = (self.machine.folder / f"{self.identity}.log").open("w", encoding="utf-8")
        start, failed, steps = time.monotonic(), "", []
        functions: expressions.Functions = {"success": lambda: not failed, "failure": lambda: bool(failed), "hashFiles": _digest}
        for step in self.table["steps"]:
            if _holds(step.get("if"), self.contexts, functions):
                said = step.get("uses", "").partition("@")[0] or step["run"].strip()
                began = time.monotonic()
                note = self._step(step)
                steps.append({"step": said, "seconds": round(time.monotonic() - began, 1), **({"note": note} if note else {})})
                failed = failed or (said if note.startswith("failed") else "")
        self.log.close()
        outputs = {} if failed else expressions.fill(self.table.get("outputs", {}), self.contexts, {})
        entry = {"job": self.title, "key": self.key, "seconds": round(time.monotonic() - start, 1), "failed": failed, "steps": steps}
        self.machine.report.append(entry)
        print(f"{entry['seconds']:7.1f} s  {'FAILED ' + failed if failed else 'ok'}  {self.title}", file=sys.stderr, flush=True)
        shutil.rmtree(base, ignore_errors=True)
        return {"result": "failure" if failed else "success", "outputs": outputs}

    def _step(self, step: dict[str, Any]) -> str:
        """Run a step; returns what the report has to say of it, "" where it ran as it stands."""
        if "uses" in step:
            name = step["uses"].partition("@")[0]
            options = expressions.fill(step.get("with", {}), self.contexts, {"hashFiles": _digest})
            self.machine.actions[name](self, options)
            return "a stand-in"
        line = self.machine.instead(self.key, step["run"])
        if line is None:
            return "left out"
        values = expressions.fill(step.get("env", {}), self.contexts, {"hashFiles": _digest})
        environment = {name: expressions.text(value) for name, value in values.items()}
        done, outputs = self.shell(line, environment)
        if "id" in step:
            self.contexts["steps"][step["id"]] = {"outputs": outputs}
        return f"failed with exit code {done}" if done else "" if line == step["run"] else f"as: {line}"

    def shell(self, line: str, environment: Mapping[str, str]) -> tuple[int, dict[str, str]]:
        """A command in the job's shell; its exit code and what it wrote for GITHUB_OUTPUT."""
        output, summary = self.temporary / "output", self.temporary / "summary"
        output.write_text("")
        passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
        home = self.machine.folder / "home"  # one for all jobs, so that what is downloaded is downloaded once
        variables = {
            **passed, "HOME": os.environ["HOME"], "XDG_CACHE_HOME": str(home), "CI": "true", "GITHUB_ACTIONS": "true",
            "UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv")),
            "GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary), "RUNNER_TEMP": str(self.temporary),
            "GITHUB_SERVER_URL": "https://github.com", "GITHUB_WORKSPACE": str(self.workspace),
            **{f"GITHUB_{name.upper()}": str(value) for name, value in self.contexts["github"].items() if name not in {"event", "token"}},
            **self.machine.environment, **self.environment, **environment,
            "PATH": os.pathsep.join([*self.path, str(self.machine.folder / "bin"), os.defpath, "/usr/local/bin", "/usr/sbin", "/sbin"]),
        }  # fmt: skip
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", line]
        self.log.write(f"$ {line}\n")
        self.log.flush()
        done = subprocess.run(
            command, cwd=self.workspace, env=variables, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT, check=False
        )
        return done.returncode, dict(each.split("=", 1) for each in output.read_text("utf-8").splitlines())


def _holds(condition: Any, contexts: Mapping[str, Any], functions: expressions.Functions) -> bool:
    """A condition that asks for no status asks for success first, as every job and step without one does."""
    if condition is None:
        return bool(functions["success"]())
    stripped = str(condition).strip().removeprefix("${{").removesuffix("}}")
    met = bool(expressions.evaluate(stripped, contexts, functions))
    asks = any(f"{status}()" in stripped for status in ("always", "cancelled", "failure", "success"))
    return met and (asks or bool(functions["success"]()))


def _combinations(table: dict[str, Any], contexts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    matrix = expressions.fill(table.get("strategy", {}).get("matrix", {}), contexts, {})
    if not matrix:
        return iter([{}])
    axes = {name: values for name, values in matrix.items() if name != "include"}
    combined = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())] if axes else []
    return iter([*combined, *matrix.get("include", [])])


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _digest(*_patterns: str) -> str:
    return "digest"


def save(machine: Machine, path: Path, commit: str) -> None:
    report = {"commit": commit, "date": datetime.now(timezone.utc).date().isoformat(), "jobs": machine.report}
    path.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
