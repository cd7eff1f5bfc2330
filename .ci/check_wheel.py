"""Build the wheel, install it with its core dependencies alone, and use it as a stranger would.

Times are the processor's, of all threads: on an idle machine more than one waits for, and on a busy
one not what others take.
"""

import json
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
HELP_SECONDS = 0.5
SERVING = "didi_instruct.serving."
PAGE = "didi_instruct.serving.page"
"""Modules that need the extra `serve`, and the one of them that does not."""
SHIPPED = "didi_instruct/shipped/"
SHIPPED_BYTES, LOAD_SECONDS = 24 << 20, 1.0
LOAD = """
import time
import torch
torch.set_num_threads(1)  # on a busy machine threads that wait for each other take time, too
from didi_instruct.model import load
from didi_instruct.hub.sources import shipped
def once():
    started = time.process_time()
    for name in shipped():
        load(name, device="cpu")
    return time.process_time() - started
print(min(once() for _ in range(5)))
"""


def run(*command: str | Path, **settings: object) -> str:
    """Run a command, echo it, and return what it printed."""
    print("+", *command, flush=True)
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **settings
    )
    if result.returncode:
        sys.exit(f"{result.stdout}\n{result.stderr}\nexit code {result.returncode}")
    return result.stdout


def modules() -> list[str]:
    """Name every module of the package, `__main__` aside."""
    source = ROOT / "src"
    found = pkgutil.walk_packages([str(source / "didi_instruct")], prefix="didi_instruct.")
    return ["didi_instruct", *(m.name for m in found if not m.name.endswith("__main__"))]


def main() -> None:
    """Build, install, import, run."""
    with tempfile.TemporaryDirectory() as scratch:
        dist = Path(scratch) / "dist"
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", dist, cwd=ROOT)
        wheel = next(dist.glob("*.whl"))
        clean = Path(scratch) / "venv"
        run(sys.executable, "-m", "venv", clean)
        python, didi = clean / "bin" / "python", clean / "bin" / "didi"
        constraints = ROOT / "constraints.txt"
        run(python, "-m", "pip", "install", "--quiet", "-c", constraints, "torch", wheel)

        outside = {"cwd": scratch, "env": {**os.environ, "PYTHONPATH": ""}}
        served = [name for name in modules() if name.startswith(SERVING) and name != PAGE]
        names = [name for name in modules() if name not in served]
        code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        run(python, "-c", code, **outside)
        print(f"imported {len(names)} modules with the core dependencies alone")

        page = ROOT / "src" / "didi_instruct" / "serving" / "page"
        code = "from didi_instruct.serving.page import page_files; print(len(page_files()))"
        if int(run(python, "-c", code, **outside)) != len(list(page.iterdir())):
            sys.exit(f"the wheel does not hold what {page} does")

        run(didi, "--help", **outside)
        seconds = min(timed(didi, outside) for _ in range(5))
        print(f"didi --help: {seconds:.2f} s of processor time, warm")
        if seconds > HELP_SECONDS:
            sys.exit(f"didi --help takes more than {HELP_SECONDS} s")

        settings = ["train.steps=3", "train.batch_size=4", "train.eval_sequences=8"]
        flags = [part for s in settings for part in ("--set", s)]
        run(didi, "pretrain", "oracle-teacher", "--out", "run", *flags, **outside)
        run(didi, "info", "run", **outside)
        print("trained with the core dependencies alone")
        check_shipped(wheel)
        seconds = float(run(python, "-c", LOAD, **outside))
        print(f"all shipped models load in {seconds:.2f} s of processor time")
        if seconds > LOAD_SECONDS:
            sys.exit(f"shipped models take more than {LOAD_SECONDS} s to load")
        offline = {**outside, "env": {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}}
        print(run(didi, "generate", "--steps", "8", **offline))
        run(python, "-m", "pip", "install", "--quiet", "-c", constraints, f"{wheel}[serve]")
        code = f"import importlib\nfor name in {served!r}: importlib.import_module(name)\n"
        run(python, "-c", code, **outside)
        check_server(didi, offline)
        shutil.rmtree(clean)


def check_server(didi: Path, offline: dict[str, object]) -> None:
    """`didi serve` as installed: the page, a text, and the end it is asked for."""
    command = [didi, "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **offline) as process:
        try:
            line = process.stdout.readline()
            address = next((word for word in line.split() if word.startswith("http")), None)
            if address is None:
                sys.exit(f"didi serve does not say where it listens: {line!r}")
            page = urllib.request.urlopen(address, timeout=60).read()
            body, form = b'{"steps": 8}', {"Content-Type": "application/json"}
            asked = urllib.request.Request(f"{address}/v1/completions", body, form)
            answer = json.load(urllib.request.urlopen(asked, timeout=60))
            print(f"served a page of {len(page)} bytes and {answer['choices'][0]['text'][:60]!r}")
            process.terminate()
            if process.wait(60):
                sys.exit(f"didi serve ends with exit code {process.returncode}")
        finally:
            process.kill()


def check_shipped(wheel: Path) -> None:
    """All templates and files of the shipped models must be in the wheel, these not too large."""
    templates = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.j2")}
    with zipfile.ZipFile(wheel) as archive:
        if missing := templates - set(archive.namelist()):
            sys.exit(f"the wheel lacks templates: {sorted(missing)}")
    folder = ROOT / "src" / SHIPPED
    files = [path for path in folder.rglob("*") if path.is_file()]
    wanted = {str(path.relative_to(ROOT / "src")): path.stat().st_size for path in files}
    with zipfile.ZipFile(wheel) as archive:
        found = {i.filename: i.file_size for i in archive.infolist() if SHIPPED in i.filename}
    if not wanted:
        sys.exit(f"{folder} holds no model to ship")
    if found != wanted:
        odd = sorted(set(found.items()) ^ set(wanted.items()))
        sys.exit(f"the wheel does not hold what {folder} does: {odd}")
    total = sum(wanted.values())
    if total > SHIPPED_BYTES:
        sys.exit(f"shipped models take {total:,} bytes, more than {SHIPPED_BYTES:,}")
    print(f"shipped models: {total:,} bytes")


def timed(didi: Path, outside: dict[str, object]) -> float:
    """Time one `didi --help`."""
    before = os.times()
    run(didi, "--help", **outside)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])  # of children


if __name__ == "__main__":
    main()
