"""Training state on disk: whole or not at all, with checksums, never a pickle.

A checkpoint is a folder `step-00001000` holding `state-0000i-of-0000n.safetensors` (one file, or
one per process when sharded), the averaged model in the layout that `didi.load` reads, and
`manifest.json`, written last. It is built under another name and renamed when complete, so a
process killed at any moment leaves either the old set of checkpoints or the new one.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from didi_instruct.data import files
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import FileRecord
from didi_instruct.models.tensor_files import save_tensors
from didi_instruct.training.distributed import World, local, whole

MANIFEST = "manifest.json"


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files were found whole."""

    folder: Path
    info: dict[str, Any]

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the saved values into `tensors`, all of them or, where one does not fit, none."""
        paths = sorted(self.folder.glob("state-*"))
        opened: list[Any] = [safe_open(path, framework="pt") for path in paths]
        # A sharded tensor has a part in every file, a replicated one is in the first alone.
        names = [set(file.keys()) for file in opened]
        parts = {
            name: [file for file, held in zip(opened, names, strict=True) if name in held]
            for name in names[0]
        }
        if odd := sorted(parts.keys() ^ tensors.keys()):
            raise UserError(
                f"{self.folder}: state of another model, optimizer or version of didi "
                f"({len(odd)} names differ, first `{odd[0]}`): choose another --out."
            )
        for name, target in tensors.items():
            shapes = [file.get_slice(name).get_shape() for file in parts[name]]
            found = [sum(shape[0] for shape in shapes), *shapes[0][1:]] if shapes[0] else []
            if found != list(target.shape):
                raise UserError(
                    f"{self.folder}: `{name}` has shape {found}, "
                    f"but this model needs {list(target.shape)}."
                )
        for name, target in tensors.items():
            saved = [file.get_tensor(name) for file in parts[name]]
            _assign(target, torch.cat(saved) if len(saved) > 1 else saved[0])


def _assign(target: Tensor, saved: Tensor) -> None:
    """Copy a whole tensor into a plain tensor, or this process's part into a sharded one."""
    if isinstance(target, DTensor):
        if local(target).numel():
            chunks = torch.chunk(saved, target.device_mesh.size())
            local(target).copy_(chunks[target.device_mesh.get_local_rank()])
    else:
        target.copy_(saved)


class Checkpoints:
    """The checkpoints of one run, of which the newest `keep` are kept; all processes call alike."""

    def __init__(self, folder: Path, keep: int, world: World) -> None:
        self.folder, self.keep, self.world = folder, keep, world

    def save(
        self,
        info: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        *,
        sharded: bool = False,
        write_model: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write the checkpoint of `info["step"]`.

        `write_model` adds the weights of the product. A `sharded` state is one file per process.
        """
        final = self.folder / step_name(info["step"])
        partial = self.folder / f".partial-{final.name}"
        if self.world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            for killed in self.folder.glob(".partial-*"):
                shutil.rmtree(killed)
            size = sum(t.numel() * t.element_size() for t in tensors.values())
            # Weights of the product come on top of the state; moments dominate, so 1.5x is safe.
            files.require_space(self.folder, int(1.5 * size))
            partial.mkdir()
        self.world.wait()
        try:
            with files.no_space_as_user_error(self.folder):
                self._write_state(partial, tensors, sharded)
                if write_model is not None:
                    write_model(partial)
                self.world.wait()
                if self.world.is_main:
                    _write_manifest(partial, info)
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)  # room on a full disk
            raise
        if self.world.is_main:
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            files.sync_folder(self.folder)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(old)
        self.world.wait()
        return final

    def _write_state(self, folder: Path, tensors: Mapping[str, Tensor], sharded: bool) -> None:
        """Write this process's shards, or in the main process all tensors, gathered one by one."""
        own = {}
        for name, tensor in tensors.items():
            value = local(tensor) if sharded else whole(tensor)  # all processes must gather
            if self.world.is_main or (sharded and isinstance(tensor, DTensor)):
                own[name] = value.detach().to("cpu")
        if sharded or self.world.is_main:
            parts = self.world.size if sharded else 1
            save_tensors(folder / f"state-{self.world.rank:05d}-of-{parts:05d}.safetensors", own)

    def steps(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        found = self.folder.glob("step-*")
        return sorted(p for p in found if p.is_dir() and re.fullmatch(r"step-\d{8}", p.name))

    def latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest checkpoint that is whole, or None if there is none at all.

        `warn` names each damaged one, which is set aside as `damaged-step-…`.
        """
        chosen, damaged = -1, []
        if self.world.is_main:
            for folder in reversed(self.steps()):
                problem = damage(folder)
                if problem is None:
                    chosen = int(folder.name.removeprefix("step-"))
                    break
                warn(f"{problem}; trying the checkpoint before it.")
                damaged.append(folder)
        chosen = self.world.largest(chosen)
        if self.world.any(chosen < 0 and bool(damaged)):
            raise UserError(f"{self.folder}: every checkpoint is damaged.")
        for folder in damaged:
            target = folder.with_name(f"damaged-{folder.name}")
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
        self.world.wait()
        if chosen < 0:
            return None
        folder = self.folder / step_name(chosen)
        return Checkpoint(folder, json.loads((folder / MANIFEST).read_text())["info"])


def damage(folder: Path) -> str | None:
    """Return in words what is wrong with a checkpoint, None if its files are as written."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        digest = manifest.pop("sha256")
        if digest != _digest(manifest) or folder.name != step_name(manifest["info"]["step"]):
            return f"{path} was altered"
        records = {name: FileRecord(**record) for name, record in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{path} is missing or unreadable"
    problems = (record.damage(folder / name) for name, record in records.items())
    return next((problem for problem in problems if problem is not None), None)


def _write_manifest(folder: Path, info: Mapping[str, Any]) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    records = {p.relative_to(folder).as_posix(): asdict(FileRecord.of(p)) for p in paths}
    manifest = {"format": "didi-training", "version": 1, "info": dict(info), "files": records}
    manifest["sha256"] = _digest(manifest)
    files.write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def _digest(manifest: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest's own content."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
