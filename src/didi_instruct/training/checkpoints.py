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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from didi_instruct.data.files import (
    AtomicFile,
    no_space_as_user_error,
    require_space,
    sha256_file,
    sync_folder,
    write_atomic,
)
from didi_instruct.errors import UserError
from didi_instruct.models.tensor_files import write_tensors
from didi_instruct.training.distributed import World

MANIFEST = "manifest.json"
STEP_NAME = re.compile(r"step-(\d{8})")

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files were found whole."""

    folder: Path
    info: dict[str, Any]

    def fill(self, tensors: Tensors) -> None:
        """Copy the saved values into `tensors`, all of them or none."""
        files: list[Any] = [
            safe_open(p, framework="pt") for p in sorted(self.folder.glob("state-*"))
        ]
        # A sharded tensor has a part in every file, a replicated one is in the first alone.
        names = [set(f.keys()) for f in files]
        holders = {
            name: [f for f, held in zip(files, names, strict=True) if name in held]
            for name in names[0]
        }
        self._compare(holders, tensors)
        for name, target in tensors.items():
            parts = [f.get_tensor(name) for f in holders[name]]
            _assign(target, torch.cat(parts) if len(parts) > 1 else parts[0])

    def _compare(self, holders: Mapping[str, list[Any]], tensors: Tensors) -> None:
        """Refuse names or shapes that differ, before anything is copied."""
        if set(holders) != set(tensors):
            odd = sorted(set(holders) ^ set(tensors))
            raise UserError(
                f"{self.folder}: state of another model, optimizer or version of didi "
                f"({len(odd)} names differ, first `{odd[0]}`): choose another --out."
            )
        for name, target in tensors.items():
            shapes = [f.get_slice(name).get_shape() for f in holders[name]]
            found = [sum(s[0] for s in shapes), *shapes[0][1:]] if shapes[0] else []
            if found != list(target.shape):
                raise UserError(
                    f"{self.folder}: `{name}` has shape {found}, "
                    f"but this model needs {list(target.shape)}."
                )


def _assign(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a full tensor into a plain tensor, or this process's part into a sharded one."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            local = target.to_local()
            parts = torch.chunk(whole, target.device_mesh.size())
            if local.numel():
                local.copy_(parts[target.device_mesh.get_local_rank()])
        else:
            target.copy_(whole)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int, world: World) -> None:
        self.folder, self.keep, self.world = folder, keep, world

    def save(
        self,
        info: Mapping[str, Any],
        tensors: Tensors,
        *,
        sharded: bool = False,
        write_model: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write the checkpoint of `info["step"]`; all processes must call."""
        final = self.folder / f"step-{info['step']:08d}"
        partial = self.folder / f".partial-{info['step']:08d}"
        if self.world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clear_partial()
            size = sum(t.numel() * t.element_size() for t in tensors.values())
            # Weights of the product come on top of the state; moments dominate, so 1.5x is safe.
            require_space(self.folder, int(1.5 * size))
            partial.mkdir()
        self.world.wait()
        try:
            with no_space_as_user_error(self.folder):
                self._write(partial, info, tensors, sharded, write_model)
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)  # room on a full disk
            raise
        if self.world.is_main:
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            sync_folder(self.folder)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(old)
        self.world.wait()
        return final

    def _write(
        self,
        partial: Path,
        info: Mapping[str, Any],
        tensors: Tensors,
        sharded: bool,
        write_model: Callable[[Path], None] | None,
    ) -> None:
        """Fill the hidden folder; the manifest comes last."""
        parts = self.world.size if sharded else 1
        own = dict(self._own_values(tensors, sharded))
        if sharded or self.world.is_main:
            name = f"state-{self.world.rank:05d}-of-{parts:05d}.safetensors"
            file = AtomicFile(partial / name)
            try:
                write_tensors(file.write, own)
                file.commit()
            finally:
                file.discard()
        if write_model is not None:
            write_model(partial)
        self.world.wait()
        if self.world.is_main:
            files = {
                p.name: {"bytes": p.stat().st_size, "sha256": sha256_file(p)}
                for p in sorted(partial.iterdir())
            }
            manifest = {"format": "didi-training", "version": 1, "info": dict(info), "files": files}
            manifest["sha256"] = _digest(manifest)
            write_atomic(partial / MANIFEST, json.dumps(manifest, indent=1).encode())

    def _own_values(self, tensors: Tensors, sharded: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Values for this process to write: own shards, or whole tensors gathered one by one."""
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                value = tensor.to_local() if sharded else tensor.full_tensor()
                if sharded or self.world.is_main:
                    yield name, value.detach().to("cpu").contiguous()
            elif self.world.is_main:
                yield name, tensor.detach().to("cpu").contiguous()

    def _clear_partial(self) -> None:
        for left_over in self.folder.glob(".partial-*"):
            shutil.rmtree(left_over)

    def steps(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(p for p in found if p.is_dir() and STEP_NAME.fullmatch(p.name))

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
        chosen = self.world.agree(chosen)
        if self.world.any(chosen < 0 and bool(damaged)):
            raise UserError(f"{self.folder}: every checkpoint is damaged.")
        for folder in damaged:
            target = folder.with_name(f"damaged-{folder.name}")
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
        self.world.wait()
        if chosen < 0:
            return None
        folder = self.folder / f"step-{chosen:08d}"
        return Checkpoint(folder, json.loads((folder / MANIFEST).read_text())["info"])


def damage(folder: Path) -> str | None:
    """Say what is wrong with a checkpoint folder, or None if every file is as it was written."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        files, digest = manifest["files"], manifest.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path} is missing or unreadable"
    if digest != _digest(manifest) or folder.name != f"step-{manifest['info']['step']:08d}":
        return f"{path} was altered"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != expected["bytes"]:
            found = path.stat().st_size
            return f"{path} is truncated ({found} of {expected['bytes']} bytes)"
        if sha256_file(path) != expected["sha256"]:
            return f"{path} was altered (checksum differs)"
    return None


def _digest(manifest: Mapping[str, Any]) -> str:
    """Checksum of a manifest's own content."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
