"""Every command that README.md and docs/ show is run as it is written, in a copy of the repository.

The shell, scripts/train.sh and scripts/test.sh are real. What they start (python, torchrun, titan-train, sbatch, …) are
stubs that write down how they were called; the calls are then checked here down to settings that fit together, with as
many processes as the command starts. So nothing is installed, trained or measured.
"""

import hashlib
import importlib
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.scripts import write_llama
from titan_like.commands import search
from titan_like.commands.bench_comm import build_parser as bench_parser
from titan_like.commands.bench_comm import sizes_of
from titan_like.commands.convert import build_parser as convert_parser
from titan_like.commands.plan import main as plan_main
from titan_like.config import load_config
from titan_like.parallel.layout import resolve_layout
from titan_like.planner.commands.outcome import Outcome
from titan_like.search import cases as search_cases
from titan_like.train.environment import dry_run_world
from titan_like.train.rules import resolve_settings

REPO = Path(__file__).parents[2]
# The installed commands, by the file that is the same in a checkout.
FILE_OF = {"titan-train": "train.py", "titan-preprocess": "scripts/preprocess_data.py"}
for _name in (
    "plan",
    "verify",
    "search",
    "evaluate",
    "generate",
    "convert",
    "compare",
    "report",
    "sweep",
    "bench-comm",
    "resumable",
):
    FILE_OF[f"titan-{_name}"] = f"scripts/{_name.replace('-', '_')}.py"
PROGRAMS = ("python", "torchrun", "sbatch", "kubectl", "pip", "docker", *FILE_OF)
# What stands for a file of the reader's, and is made here.
FILES = {
    "FILE.toml": '[cluster]\ngpu = "A100"\ngpus_per_node = 8\nnodes = 1\n'
    "[training]\nglobal_batch_size = 64\nsteps = 5\n",
    "FILE.csv": "model,gpu,gpus,gbs,notes\n",
    "measured.csv": "model,gpu,gpus,gbs,notes\n",
    "mine.toml": None,  # a shipped profile
    "qwen3.toml": "[training]\nsteps = 5\n",  # its family, which is the page's, has tests/e2e/test_own_family.py
}
FOLDERS = ("my_model", "data/Llama-3.1-8B-Instruct")  # likewise, of Hugging Face
# What is checked less far than to settings that fit together, and why.
ONLY_CALLED = {
    "kubectl apply": "needs a cluster; the file is there, and tests/e2e/test_kubernetes.py runs what its pods run",
    "kubectl get": "needs a cluster",
    "kubectl logs": "needs a cluster",
    "scripts/import_config.py": "needs files of other tools; tests/unit/test_import_config.py imports such",
    "scripts/sweep.py": "tests/unit/test_sweep.py runs it",
    "scripts/report.py": "tests/unit/test_report.py runs it",
    "scripts/compare.py": "tests/unit/test_loss_curve.py runs it",
    "scripts/preprocess_data.py": "tests/e2e/test_blend.py runs it as the page shows it",
    "scripts/convert.py": "needs a checkpoint of minutes; options only, tests/unit/test_hugging_face_files.py converts",
    "benchmarks/planner_accuracy.py": "takes a minute; options only",
    "benchmarks/search_cpu.py": "takes a quarter of an hour; tests/e2e/test_search.py searches",
    "benchmarks/fit_profiles.py": "writes a profile; tests/unit/test_planner_accuracy.py fits the same rows",
    "docker build": "needs a daemon; tests/unit/test_container.py reads the Dockerfile",
    "docker run": "needs a daemon; what it runs in the container is checked",
    "pip install": "tests/e2e/test_wheel.py installs the wheel",
    "venv": "the same",
    "pytest": "scripts/test.sh would run this test",
}


def shown_commands(path):
    """The commands in a page's code blocks, one a line, without the "…" of a longer output."""
    commands = []
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            word = re.match(r" *(?:[A-Z_]+=\S+ )*(\S+)", line)
            if word and word[1] in (*PROGRAMS, "export", "./scripts/train.sh", "./scripts/test.sh"):
                commands.append(line.strip())
    return commands


PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
SHOWN = [(path.name, command) for path in PAGES for command in shown_commands(path)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy whose .venv says that everything is installed."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("titan_like", "train_configs", "benchmarks"):
        (folder / name).symlink_to(REPO / name)
    shutil.copytree(REPO / "scripts", folder / "scripts")
    for name in ("train.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPO / name, folder)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in PROGRAMS:
        real = f'[ "$1" = -c ] && exec {sys.executable} "$@"\n' if name == "python" else ""
        text = f'#!/bin/bash\n{real}printf "%s\\037" {name} "WORLD_SIZE=$WORLD_SIZE" "NPROC=$NPROC" "$@" >> "$CALLS"\n'
        (programs / name).write_text(text + 'printf "\\036" >> "$CALLS"\n')
        (programs / name).chmod(0o755)
    (programs / "nvidia-smi").write_text("#!/bin/bash\nexit 1\n")  # a machine without GPUs
    (programs / "nvidia-smi").chmod(0o755)
    wanted = (folder / "pyproject.toml").read_bytes() + (folder / "constraints.txt").read_bytes()
    digest = hashlib.sha256(wanted).hexdigest()[:12]
    for extras in ("-plot", "-test"):
        (folder / ".venv" / f"installed-{digest}{extras}").touch()
    for name, text in FILES.items():
        profile = REPO / "titan_like" / "planner" / "profiles" / "fsdp_a100.toml"
        (folder / name).write_text(profile.read_text() if text is None else text)
    for name in FOLDERS:
        write_llama(folder / name)
    return folder


def calls_of(command, checkout, tmp_path, monkeypatch):
    """Run a command line as a reader would; the calls of stubs as (program, environment, arguments)."""
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PATH", f"{checkout}/.venv/bin:/usr/bin:/bin")
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    plain = re.sub(r"\[(--[^\]]*)\]", r"\1", command)  # what may be left out
    done = subprocess.run(["bash", "-c", plain], cwd=checkout, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    calls = []
    for record in written.split("\036")[:-1]:
        program, world_size, nproc, *arguments = record.split("\037")[:-1]
        calls.append((program, {"WORLD_SIZE": world_size[11:], "NPROC": nproc[6:]}, arguments))
    return calls


def check_call(program, environment, arguments, monkeypatch):
    """Follow a call down to settings that fit together; what was checked."""
    processes = int(environment["WORLD_SIZE"] or 1)
    if program == "kubectl":
        if arguments[0] == "apply":
            assert Path(arguments[-1]).is_file()
        return f"kubectl {arguments[0]}"
    if program == "pip":
        return f"pip {arguments[0]}"
    if program == "docker":
        if arguments[0] == "build":
            return "docker build"
        entry = arguments[arguments.index("--entrypoint") + 1] if "--entrypoint" in arguments else "titan-train"
        check_call(entry, environment, arguments[arguments.index("titan_like") + 1 :], monkeypatch)
        return "docker run"
    if program in FILE_OF:
        arguments = [FILE_OF[program], *arguments]
    if program == "torchrun":
        words = [word for argument in arguments for word in argument.split("=", 1)]
        given = dict(itertools.pairwise(words))
        at = next(i for i, word in enumerate(arguments) if re.search(r"\.py$|^titan[-_]", word))
        script = re.sub(r"^titan_like\.commands\.(\w+)$", r"\1.py", arguments[at])
        processes = int(given.get("--nproc_per_node", 1)) * int(given.get("--nnodes", 1))
        arguments = [FILE_OF.get(script, script), *arguments[at + 1 :]]
    if program == "sbatch":
        first = next(i for i, word in enumerate(arguments) if word.endswith(".sbatch"))
        assert Path(arguments[first]).is_file()
        slurm = dict(zip(arguments[:first:2], arguments[1:first:2], strict=True))
        processes = int(slurm["--nodes"]) * int(environment["NPROC"] or slurm["--gpus-per-node"])
        arguments = ["train.py", "--job.config_file", *arguments[first + 1 :]]
    script, *arguments = arguments
    if script == "-m":
        return arguments[0]
    assert Path(script).is_file(), script
    if script == "train.py":
        config = load_config(arguments)
        resolve_settings(config, dry_run_world(config) if config.job.dry_run and processes == 1 else processes)
    elif script == "scripts/plan.py":
        given = []
        command = importlib.import_module(f"titan_like.planner.commands.{arguments[0]}")
        monkeypatch.setattr(command, "run", lambda options, settings: given.append(settings) or Outcome("", {}))
        assert plan_main(arguments) == 0
        if arguments[0] in ("predict", "duration", "simulate"):  # the others choose layouts
            config = load_config(given[0])
            resolve_settings(config, dry_run_world(config))
    elif script == "scripts/search.py":
        options, settings = search.build_parser().parse_known_args(arguments)
        search.check_options(options)
        load_config(settings)
        if options.grid:
            assert search_cases.read_grid(options.grid, settings)
    elif script in ("scripts/evaluate.py", "scripts/generate.py", "scripts/verify.py"):
        module = importlib.import_module(f"titan_like.commands.{Path(script).stem}")
        options, settings = module.build_parser().parse_known_args(arguments)
        getattr(module, "check_options", bool)(options)
        load_config(settings)
    elif script == "benchmarks/optimizers.py":
        batch = ["--training.micro_batch_size=1", f"--training.global_batch_size={8 * processes}"]
        resolve_settings(load_config(["--training.steps=1", *batch, *arguments]), processes)
    elif script == "scripts/bench_comm.py":
        options, settings = bench_parser().parse_known_args(arguments)
        sizes_of(options)
        resolve_layout(load_config(settings).parallelism, processes)
    elif script == "scripts/convert.py":
        convert_parser().parse_args(arguments)
    else:
        assert script in ONLY_CALLED, f"say in this test how to check {script}"
    return script


@pytest.mark.parametrize(("page", "command"), SHOWN, ids=[f"{page}: {command[:60]}" for page, command in SHOWN])
def test_shown_command_runs_as_it_is_written(page, command, checkout, tmp_path, monkeypatch):
    calls = calls_of(command, checkout, tmp_path, monkeypatch)
    assert calls or command.startswith("export ")
    monkeypatch.chdir(checkout)
    monkeypatch.syspath_prepend(str(REPO))
    checked = [check_call(*call, monkeypatch) for call in calls]
    if "train.sh" in command:
        trains = [arguments for program, _, arguments in calls if program == "torchrun"]
        assert checked[:2] == ["train.py", "train.py"]  # the dry run, then training
        assert len(trains) == 1
        config = re.search(r"train_configs/\S+", command)
        assert "--job.config_file" in trains[0]
        assert (config[0] if config else "train_configs/debug_gpt.toml") in trains[0]


def test_the_pages_show_commands():
    counts = {page.name: sum(name == page.name for name, _ in SHOWN) for page in PAGES}
    assert counts["README.md"] >= 6
    assert sum(counts.values()) >= 25
    assert {"./scripts/train.sh", "./scripts/test.sh"} <= {command.split()[0] for _, command in SHOWN}
